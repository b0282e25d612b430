"""Measuring: what is run, how often, and what a row says. Never how fast."""

import inspect

import pytest
import torch
from conftest import make_job
from helpers import BALANCED, fingerprint, make_device

from labkit import LabError, digest, measure
from labkit.pipelines import STRATEGIES
from labkit.presets import Preset
from labkit.timing import measure_ceiling, open_parts, pick_strategies

pytestmark = pytest.mark.timeout(90, method="signal")

PRESET = Preset("tiny", "tiny", batch=8, image=16, samples=26, workers=2, slots=3, repeats=2)


@pytest.fixture(scope="module")
def measured():
    """A record of all five strategies, the digest that each has to have, and the steps told."""
    job = make_job(make_device("emulated", BALANCED))
    results = [
        fingerprint(index, job.forward(batch).cpu()) for index, batch in enumerate(job.batches())
    ]
    steps = []
    record = measure(job, STRATEGIES.values(), PRESET, progress=steps.append)
    return record, digest(results), steps


def test_every_strategy_is_measured_with_the_same_digest(measured):
    record, expected, _ = measured
    rows = record["strategies"]
    assert [row["name"] for row in rows] == list(STRATEGIES)
    assert {row["digest"] for row in rows} == {expected}
    assert {row["batches"] for row in rows} == {4}


def test_a_row_has_the_median_within_its_spread(measured):
    for row in measured[0]["strategies"]:
        low, high = row["spread"]
        assert 0 < low <= row["samples_per_s"] <= high
        assert row["gpu_busy"] > 0


def test_a_row_names_only_the_parts_that_its_strategy_has(measured):
    rows = {row["name"]: row for row in measured[0]["strategies"]}
    parts = {name: (row["workers"], row["slots"], row["depth"]) for name, row in rows.items()}
    assert parts["sequential"] == (0, 0, 0)
    assert parts["multi_worker"][0] == 2 and parts["multi_worker"][2] == 0
    assert parts["buffer_pool"] == (2, 3, 0)
    assert parts["pinned_async"] == (2, 3, 0)
    assert parts["stream_pipeline"] == (2, 3, 2)


def test_steps_are_told_before_they_are_done(measured):
    steps = measured[2]
    assert steps[0] == "ceiling"
    for name in STRATEGIES:
        assert [step for step in steps if step.startswith(f"{name}:")] == [
            f"{name}: warming up",
            f"{name}: run 1 of 2",
            f"{name}: run 2 of 2",
        ]


def test_the_ceiling_is_the_slowest_part_alone(measured):
    ceiling = measured[0]["ceiling"]
    assert ceiling["limited_by"] in {"forward", "copy", "process"}
    assert ceiling["samples_per_s"] > 0
    # The profile's own times are lower bounds, however busy this machine is.
    assert ceiling["forward_s"] >= 0.0029
    assert ceiling["copy_s"] >= 32 * 1024 / BALANCED.pinned_bytes_per_s - 1e-4
    assert ceiling["slot_copy_s"] >= 32 * 1024 / BALANCED.pinned_bytes_per_s - 1e-4


def test_the_ceiling_leaves_nothing_page_locked(emulated):
    job = make_job(emulated)
    measure_ceiling(job, workers=1)
    assert len(emulated._page_locked) == 1  # the job's inputs


def test_a_strategy_is_warmed_up_with_every_shape_and_then_repeated(job):
    runs = []

    def counted(job):
        batches = [batch.cpu() for batch in job.batches()]
        runs.append([len(batch) for batch in batches])
        return [fingerprint(index, batch) for index, batch in enumerate(batches)]

    measure(job, [counted], PRESET)
    assert set(runs[0]) == {8, 2}
    assert runs[1:] == [[8, 8, 8, 2]] * PRESET.repeats


def test_a_strategy_with_changing_results_is_an_error(job):
    calls = []

    def fickle(job):
        calls.append(1)
        return [len(calls)]

    with pytest.raises(LabError, match="fickle gave other results"):
        measure(job, [fickle], PRESET)


def test_parts_are_those_that_a_strategy_names(job):
    for name, strategy in STRATEGIES.items():
        with open_parts(strategy, job, PRESET, workers=1) as parts:
            assert list(inspect.signature(strategy).parameters)[1:] == sorted(
                parts, key=["workers", "pool", "pinned_pool", "depth"].index
            )
            for kind in {"pool", "pinned_pool"} & set(parts):
                assert parts[kind].page_locked == (kind == "pinned_pool")
                assert parts[kind].slots == PRESET.slots
                assert parts[kind].slot_bytes == job.output_bytes, name


def test_parts_are_closed_afterwards(job):
    with open_parts(STRATEGIES["stream_pipeline"], job, PRESET, workers=1) as parts:
        pass
    with pytest.raises(LabError, match="closed"):
        parts["pinned_pool"].acquire()
    with pytest.raises(LabError, match="closed"):
        parts["workers"].submit(0, torch.zeros(1))


def test_an_unknown_part_is_refused(job):
    def wishful(job, workers, gpus):
        return []

    with (
        pytest.raises(LabError, match="wishful asks for 'gpus'"),
        open_parts(wishful, job, PRESET, workers=1),
    ):
        pass


def test_strategies_are_picked_by_name():
    everything = list(STRATEGIES.values())
    assert pick_strategies(None) == everything
    # Each once, in the order of the labs.
    assert pick_strategies("pinned_async, sequential,pinned_async") == [
        STRATEGIES["sequential"],
        STRATEGIES["pinned_async"],
    ]
    for wrong, match in (("sequental", "'sequental'"), ("", "no strategy"), (" , ", "no strategy")):
        with pytest.raises(LabError, match=match):
            pick_strategies(wrong)
