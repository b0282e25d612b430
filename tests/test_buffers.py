"""The pool: one piece of shared memory, whose slots have one holder at a time."""

import collections
from pathlib import Path

import pytest
import torch
from helpers import (
    SLOW_COPY,
    delay,
    files_in_shared_memory,
    make_device,
    open_descriptors,
    stalled,
)

from labkit import BufferPool, LabError, buffers

pytestmark = pytest.mark.timeout(60, method="signal")


def _numbers(device, *shape, dtype=torch.float32):
    """1, 2, 3, ... on the host and on the device."""
    host = (torch.arange(max(1, torch.Size(shape).numel())) % 100 + 1).to(dtype)
    host = host[: torch.Size(shape).numel()].view(shape)
    tensor = device.upload(host)
    device.synchronize()
    return host, tensor


# Acquire and release.


def test_slots_go_out_and_come_back(pool):
    slots = [pool.acquire() for _ in range(3)]
    assert sorted(slot.index for slot in slots) == [0, 1, 2]
    pool.release(slots[1])
    assert pool.acquire() is slots[1]


def test_the_slot_that_was_free_longest_goes_first(pool):
    first, second = pool.acquire(), pool.acquire()
    pool.release(second)
    pool.release(first)
    assert [pool.acquire().index for _ in range(3)] == [2, second.index, first.index]


def test_no_slot_has_two_holders(pool):
    held = collections.deque()
    for step in range(40):
        if len(held) == 3 or (held and step % 5 == 0):
            pool.release(held.popleft())
        held.append(pool.acquire())
        assert len({slot.index for slot in held}) == len(held)
        assert len({slot.tensor.data_ptr() for slot in held}) == len(held)


def test_acquiring_while_all_are_held_is_an_error_at_once(pool):
    for _ in range(3):
        pool.acquire()
    with pytest.raises(LabError, match="all 3 slots are held"):
        pool.acquire()


def test_releasing_twice_is_refused(pool):
    slot = pool.acquire()
    pool.release(slot)
    with pytest.raises(LabError, match=f"slot {slot.index} was released twice"):
        pool.release(slot)
    assert len({pool.acquire().index for _ in range(3)}) == 3


def test_the_slot_of_another_pool_is_refused(device, pool):
    with BufferPool(device, (8, 4), torch.float32, slots=1) as other:
        foreign = other.acquire()
        with pytest.raises(LabError, match="another pool"):
            pool.release(foreign)
        other.release(foreign)


# Copying.


@pytest.mark.parametrize("page_locked", [False, True])
def test_a_copy_waits_unless_told_otherwise(device, page_locked):
    host, tensor = _numbers(device, 8, 4)
    with BufferPool(device, (8, 4), torch.float32, 1, page_locked) as pool:
        slot = pool.acquire()
        delay(device)
        assert slot.copy_(tensor) is slot
        assert slot.event.query()
        assert torch.equal(slot.tensor, host)


def test_a_non_blocking_copy_into_a_page_locked_slot_returns_at_once(device, pool):
    host, tensor = _numbers(device, 8, 4)
    slot = pool.acquire()
    with stalled(device):
        slot.copy_(tensor, non_blocking=True)
        assert not slot.event.query()
    slot.event.synchronize()
    assert torch.equal(slot.tensor, host)


def test_a_non_blocking_copy_into_a_pageable_slot_waits(device):
    host, tensor = _numbers(device, 8, 4)
    with BufferPool(device, (8, 4), torch.float32, slots=1) as pool:
        slot = pool.acquire()
        delay(device)
        slot.copy_(tensor, non_blocking=True)
        assert torch.equal(slot.tensor, host)


@pytest.mark.parametrize("shape", [(1, 4), (5, 4), (8, 4), (8, 3), (3,), (0, 4), ()])
def test_a_smaller_batch_fits(device, pool, shape):
    host, tensor = _numbers(device, *shape)
    slot = pool.acquire()
    slot.copy_(tensor)
    assert slot.tensor.shape == host.shape
    assert torch.equal(slot.tensor, host)


def test_a_copy_leaves_the_other_slots_alone(device, pool):
    slots = [pool.acquire() for _ in range(3)]
    host, tensor = _numbers(device, 8, 4)
    slots[1].copy_(tensor)
    assert not slots[0].tensor.any() and not slots[2].tensor.any()
    assert torch.equal(slots[1].tensor, host)


def test_a_batch_that_is_too_large_is_refused(device, pool):
    slot = pool.acquire()
    with pytest.raises(LabError, match=r"32 elements .* got 36"):
        slot.copy_(device.upload(torch.zeros(9, 4)))
    slot.copy_(device.upload(torch.ones(8, 4)))
    assert slot.tensor.sum() == 32


def test_another_type_is_refused(device, pool):
    slot = pool.acquire()
    with pytest.raises(LabError, match=r"float32.*float16"):
        slot.copy_(device.upload(torch.zeros(8, 4, dtype=torch.float16)))


def test_copying_into_a_free_slot_is_refused(device, pool):
    slot = pool.acquire()
    tensor = device.upload(torch.ones(8, 4))
    pool.release(slot)
    with pytest.raises(LabError, match="acquire"):
        slot.copy_(tensor)
    assert not slot.tensor.any()


def test_a_copied_output_leaves_no_autograd_graph_in_the_slot(pool):
    slot = pool.acquire()
    slot.copy_(torch.ones(8, 4, requires_grad=True) * 2)
    assert not slot.tensor.requires_grad and not pool.memory.requires_grad
    assert (slot.tensor == 2).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.uint8, torch.int64])
def test_a_pool_may_have_any_type(device, dtype):
    host, tensor = _numbers(device, 6, 5, dtype=dtype)
    with BufferPool(device, (6, 5), dtype, slots=2, page_locked=True) as pool:
        slot = pool.acquire()
        slot.copy_(tensor, non_blocking=True)
        slot.event.synchronize()
        assert slot.tensor.dtype == dtype and torch.equal(slot.tensor, host)
        assert pool.slot_bytes == 30 * dtype.itemsize


@pytest.mark.parametrize("page_locked", [False, True])
def test_a_pool_for_outputs_without_elements(device, page_locked):
    with BufferPool(device, (0, 4), torch.float32, 2, page_locked) as pool:
        slot = pool.acquire()
        slot.copy_(device.upload(torch.zeros(0, 4)), non_blocking=True)
        slot.event.synchronize()
        assert tuple(slot.tensor.shape) == (0, 4)
        pool.release(slot)


# A slot whose copy runs is nobody's.


def test_a_slot_is_not_handed_out_while_its_copy_runs(device):
    host, tensor = _numbers(device, 8, 4)
    with BufferPool(device, (8, 4), torch.float32, 1, page_locked=True) as pool:
        slot = pool.acquire()
        delay(device, 0.1)
        slot.copy_(tensor, non_blocking=True)
        pool.release(slot)
        again = pool.acquire()
        assert again.event.query()
        assert torch.equal(again.tensor, host)


def test_a_slot_that_moves_on_keeps_the_bytes_of_its_new_holder(device):
    host, first = _numbers(device, 8, 4)
    second = device.upload(-host)
    with BufferPool(device, (8, 4), torch.float32, 1, page_locked=True) as pool:
        slot = pool.acquire()
        with device.stream(device.Stream()):
            delay(device, 0.1)
            slot.copy_(first, non_blocking=True)
        pool.release(slot)
        slot = pool.acquire()
        with device.stream(device.Stream()):
            slot.copy_(second, non_blocking=True)
        slot.event.synchronize()
        delay(device, 0.1)  # for the first copy to do its harm, if it was still to come
        device.synchronize()
        assert torch.equal(slot.tensor, -host)


def test_closing_waits_for_running_copies():
    device = make_device("emulated", SLOW_COPY)
    host, tensor = _numbers(device, 64, 128)
    pool = BufferPool(device, (64, 128), torch.float32, 1, page_locked=True)
    slot = pool.acquire()
    slot.copy_(tensor, non_blocking=True)
    assert not slot.event.query()
    pool.close()
    assert slot.event.query()
    assert torch.equal(slot.tensor, host)


# Memory.


def test_all_slots_are_one_piece_of_shared_memory_and_one_descriptor(device):
    before = open_descriptors()
    with BufferPool(device, (16, 4), torch.float32, slots=32) as pool:
        assert open_descriptors() <= before + 1
        assert pool.memory.is_shared()
        slots = [pool.acquire() for _ in range(32)]
        whole = pool.memory.untyped_storage().data_ptr()
        assert {slot.tensor.untyped_storage().data_ptr() for slot in slots} == {whole}
        assert pool.memory.untyped_storage().nbytes() == 32 * pool.slot_bytes
    del pool, slots, whole
    assert open_descriptors() <= before


def test_every_page_is_touched_at_the_start(device):
    with BufferPool(device, (2**20,), torch.float32, slots=8) as pool:
        first = pool.memory.data_ptr()
        mappings = Path("/proc/self/smaps").read_text().split("\n")
        at = next(i for i, line in enumerate(mappings) if line.startswith(f"{first:x}-"))
        resident = next(line for line in mappings[at:] if line.startswith("Rss:"))
        assert int(resident.split()[1]) * 1024 >= 8 * pool.slot_bytes


def test_nothing_is_left_in_shared_memory(device):
    with BufferPool(device, (2**20,), torch.float32, slots=2):
        assert files_in_shared_memory() == []  # a killed process leaves nothing either


def test_closing_gives_the_memory_back(device):
    pool = BufferPool(device, (2**20,), torch.float32, slots=8)
    start = f"{pool.memory.data_ptr():x}-"
    assert start in Path("/proc/self/maps").read_text()
    pool.close()
    assert start not in Path("/proc/self/maps").read_text()


def test_too_little_shared_memory_is_an_error_before_anything_is_allocated(device, monkeypatch):
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(buffers.shutil, "disk_usage", lambda path: usage(10**6, 0, 10**6))
    with monkeypatch.context() as patch, pytest.raises(LabError) as refusal:
        patch.setattr(buffers.torch, "empty", None)
        BufferPool(device, (1000, 100), torch.float32, slots=3)
    message = str(refusal.value)
    assert "1,200,000" in message and "1,000,000" in message
    assert "\n" not in message


def test_a_pool_that_just_fits_is_made(device, monkeypatch):
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(buffers.shutil, "disk_usage", lambda path: usage(4096, 0, 4096))
    BufferPool(device, (256,), torch.float32, slots=4).close()


def test_more_than_there_is_on_this_machine_is_refused(device):
    with pytest.raises(LabError, match="shared memory"):
        BufferPool(device, (2**40,), torch.float32, slots=2**10)


@pytest.mark.parametrize("slots", [0, -1, 1.5, True, None])
def test_slots_is_a_whole_number_of_at_least_one(device, slots):
    with pytest.raises(LabError, match="slots"):
        BufferPool(device, (8,), torch.float32, slots)


# Page-locking.


def test_memory_is_page_locked_on_request_until_the_pool_closes(device):
    pool = BufferPool(device, (8, 1024), torch.float32, 2, page_locked=True)
    memory = pool.memory
    assert pool.page_locked
    with pytest.raises(LabError):
        device.page_lock(memory)
    pool.close()
    device.page_lock(memory)
    device.page_unlock(memory)


def test_memory_is_pageable_without_request(device):
    with BufferPool(device, (8, 1024), torch.float32, 2) as pool:
        assert not pool.page_locked
        with pytest.raises(LabError):
            device.page_unlock(pool.memory)


# Closing.


def test_a_closed_pool_is_of_no_use(device):
    pool = BufferPool(device, (8,), torch.float32, slots=2)
    slot = pool.acquire()
    pool.close()
    with pytest.raises(LabError, match="closed"):
        pool.acquire()
    with pytest.raises(LabError, match="closed"):
        pool.release(slot)


@pytest.mark.parametrize("page_locked", [False, True])
def test_closing_may_be_repeated(device, page_locked):
    pool = BufferPool(device, (8,), torch.float32, 2, page_locked)
    pool.close()
    pool.close()


def test_leaving_the_block_closes(device):
    with BufferPool(device, (8,), torch.float32, 2, page_locked=True) as pool:
        memory = pool.memory
    with pytest.raises(LabError, match="closed"):
        pool.acquire()
    with pytest.raises(LabError):
        device.page_unlock(memory)


def test_an_error_in_the_block_closes_as_well(device):
    with pytest.raises(KeyError), BufferPool(device, (8,), torch.float32, 2, True) as pool:
        slot = pool.acquire()
        raise KeyError
    with pytest.raises(LabError, match="closed"):
        pool.release(slot)


def test_an_error_on_the_device_does_not_keep_memory_page_locked(emulated):
    pool = BufferPool(emulated, (8,), torch.float32, 1, page_locked=True)
    memory, slot = pool.memory, pool.acquire()
    emulated.launch(0.0, lambda: 1 / 0)
    slot.event.record()
    with pytest.raises(LabError, match="ZeroDivisionError"):
        pool.close()
    with pytest.raises(LabError, match="not page-locked"):
        emulated.page_unlock(memory)
