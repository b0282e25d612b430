"""Page-locking that is refused: pageable instead, said once, shown wherever the result is."""

import gc
import re
import warnings

import pytest
import torch
from conftest import make_job
from helpers import fingerprint, make_device
from rich.console import Console
from sample_record import row, sample_record
from test_pipelines import expected_results, run

from labkit import BufferPool, LabError, OutputWorkers, ladder_table, load_record, save_record
from labkit.pipelines import STRATEGIES
from labkit.plots import plot_ladder, plot_predictions
from labkit.presets import get_preset
from labkit.timing import measure

pytestmark = pytest.mark.timeout(120, method="signal")
SHAPE = 8, 1024
SLOT_BYTES = 8 * 1024 * 4


def refuse(device, monkeypatch, bytes_left=0):
    """Let `device` page-lock no more than `bytes_left`. The refusal itself is the device's own."""
    if device.kind == "emulated":
        device.page_lock_limit_bytes = sum(device._page_locked.values()) + bytes_left
        return
    # CUDA refuses what is registered already, in part or as a whole.
    lock, unlock = type(device).page_lock, type(device).page_unlock

    def page_lock(memory):
        if memory.nbytes <= bytes_left:
            return lock(device, memory)
        lock(device, memory)
        try:
            return lock(device, memory)
        finally:
            unlock(device, memory)

    monkeypatch.setattr(device, "page_lock", page_lock, raising=False)


def locked_bytes(device):
    return sum(device._page_locked.values()) if device.kind == "emulated" else 0


@pytest.mark.parametrize("slots", [1, 2, 4])
@pytest.mark.parametrize("room", [0, 1, 3])
def test_a_refusal_at_any_slot_leaves_nothing_locked(device, monkeypatch, slots, room):
    if room >= slots:
        pytest.skip("there is room for all")
    refuse(device, monkeypatch, room * SLOT_BYTES)
    before = locked_bytes(device)
    with pytest.warns(UserWarning, match="pageable") as said:
        pool = BufferPool(device, SHAPE, torch.float32, slots, page_locked=True)
    assert len(said) == 1
    message = str(said[0].message)
    assert f"{slots * SLOT_BYTES:,}" in message and "\n" not in message
    assert not pool.page_locked and locked_bytes(device) == before
    slot = pool.acquire()
    tensor = device.upload(torch.ones(SHAPE))
    slot.copy_(tensor, non_blocking=True)  # as any copy to pageable memory: it waits
    assert slot.tensor.eq(1).all()
    pool.release(slot)
    with pytest.raises(LabError):
        device.page_unlock(pool.memory)
    pool.close()
    pool.close()


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_is_right_without_page_locked_memory(device, monkeypatch, name):
    refuse(device, monkeypatch)
    with pytest.warns(UserWarning, match="inputs.*pageable"):
        job = make_job(device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert run(STRATEGIES[name], job) == expected_results(job)
    device.synchronize()
    job.close()
    job.close()


def test_a_measurement_goes_on_and_is_labelled(emulated, monkeypatch, tmp_path):
    job = make_job(emulated)
    refuse(emulated, monkeypatch)
    chosen = [STRATEGIES[name] for name in ("sequential", "buffer_pool", "stream_pipeline")]
    preset = get_preset("smoke", "emulated", batches=2)
    with pytest.warns(UserWarning, match="pageable"):
        record = measure(job, chosen, preset)
    job.close()
    assert [row.get("page_locked") for row in record["strategies"]] == [None, None, False]
    assert load_record(save_record(record, tmp_path / "record.json")) == record
    refuse(emulated, monkeypatch, 2**30)
    job = make_job(emulated)
    assert "page_locked" not in measure(job, chosen[-1:], preset)["strategies"][0]
    job.close()


def shown(record):
    console = Console(width=80, record=True)
    console.print(ladder_table(record))
    figures = [plot_ladder(record), plot_predictions(record)]
    ticks = [label.get_text() for f in figures for label in f.axes[0].get_yticklabels()]
    lines = re.sub(r"  (\w+) .*\n  (\(pageable\)) *", r"  \1 \2", console.export_text())
    return [lines, *(figure.get_label() for figure in figures), " ".join(ticks)]


def test_tables_and_figures_say_pageable():
    record = sample_record()
    for each in record["strategies"]:
        each["predicted_samples_per_s"] = 100.0
    assert not any("pageable" in text for text in shown(record))
    row(record, "pinned_async")["page_locked"] = False
    for text in shown(record):
        assert "pinned_async (pageable)" in text
        assert "stream_pipeline (pageable)" not in text
    assert max(map(len, shown(record)[0].splitlines())) <= 80


@pytest.mark.parametrize("value", ["no", 0, None, []])
def test_page_locked_in_a_record_is_true_or_false(tmp_path, value):
    record = sample_record()
    row(record, "pinned_async")["page_locked"] = value
    with pytest.raises(LabError, match="is not a record"):
        load_record(save_record(record, tmp_path / "record.json"))


def test_fifty_pools_one_after_the_other(device):
    tensor = device.upload(torch.ones(SHAPE))
    before = locked_bytes(device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for value in range(50):
            with BufferPool(device, SHAPE, torch.float32, 2, page_locked=True) as pool:
                assert pool.page_locked
                slot = pool.acquire()
                slot.copy_(tensor, non_blocking=True)
                slot.event.synchronize()
                assert slot.tensor.sum() == 8 * 1024, value
    assert locked_bytes(device) == before


def test_a_pool_that_is_dropped_leaves_nothing_locked(device):
    """As when a cell that makes one is run again: its memory may be another pool's next."""
    before = locked_bytes(device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(10):
            pool = BufferPool(device, SHAPE, torch.float32, 2, page_locked=True)
            slot = pool.acquire()
            slot.copy_(device.upload(torch.ones(SHAPE)), non_blocking=True)
            memory = pool.memory
            del pool, slot
            gc.collect()
            with pytest.raises(LabError):
                device.page_unlock(memory)
    assert locked_bytes(device) == before


def test_an_error_while_locking_leaves_nothing_locked(emulated, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(emulated, "Event", interrupted)
    with pytest.raises(KeyboardInterrupt):
        BufferPool(emulated, SHAPE, torch.float32, 2, page_locked=True)
    gc.collect()
    assert locked_bytes(emulated) == 0


@pytest.mark.parametrize("page_locked", [False, True])
def test_outputs_without_elements_warn_of_nothing(device, page_locked):
    with (
        warnings.catch_warnings(),
        BufferPool(device, (0, 4), torch.float32, 2, page_locked) as pool,
        OutputWorkers(fingerprint, 1, pool, threads=True) as workers,
    ):
        warnings.simplefilter("error")
        slot = pool.acquire()
        slot.copy_(device.upload(torch.zeros(0, 4)), non_blocking=True)
        slot.event.synchronize()
        workers.submit(0, slot)
        assert workers.results() == [fingerprint(0, torch.zeros(0, 4))]


def test_two_devices_do_not_share_a_limit():
    small, large = make_device("emulated"), make_device("emulated")
    small.page_lock_limit_bytes = 0
    with pytest.warns(UserWarning, match="pageable"):
        BufferPool(small, SHAPE, torch.float32, 1, page_locked=True).close()
    with BufferPool(large, SHAPE, torch.float32, 1, page_locked=True) as pool:
        assert pool.page_locked
