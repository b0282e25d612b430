"""BufferPool: host memory that is allocated, shared and touched once, then used again and again.

A slot has one holder at a time:

    free --acquire--> held --copy_--> copy in flight --event--> filled --submit--> with a worker
      ^                                                                               |
      +---------------------------------- release -----------------------------------+
"""

import math
import shutil
import weakref
from collections import deque
from pathlib import Path

import torch

from .device import page_lock_or_warn
from .errors import LabError
from .presets import check_count
from .ranges import annotate

_SHARED_MEMORY = Path("/dev/shm")  # where Linux keeps it; elsewhere there is no such limit


class Slot:
    """One host buffer of a pool, as large as a full batch.

    `index` is its place in the pool. `event` is past once the bytes of the last copy have
    arrived; `tensor` is what that copy wrote, with its shape; `filled` says that its holder has
    called `copy_`.
    """

    def __init__(self, index: int, memory: torch.Tensor, event):
        self.index = index
        self.event = event
        self.held = self.filled = False
        self._memory = memory
        self.tensor = memory

    @torch.no_grad()
    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> "Slot":
        """Copy `source`, on the device, into this slot and record `event` behind the copy.

        With `non_blocking=True` and a page-locked pool this returns before the bytes arrive:
        `event.synchronize()` waits for them. Otherwise it returns when they are here.
        `source` has the pool's dtype and may be smaller than a full batch. Raises LabError for
        another dtype, for too many elements, and for a slot that nobody acquired.
        """
        if not self.held:
            raise LabError(
                f"slot {self.index} is free, or its pool is closed: acquire() one before copying"
            )
        if source.dtype != self._memory.dtype or source.numel() > self._memory.numel():
            raise LabError(
                f"slot {self.index} holds up to {self._memory.numel():,} elements of "
                f"{self._memory.dtype}, got {source.numel():,} of {source.dtype}: "
                "make the pool for the largest batch"
            )
        self.tensor = view_slot(self._memory, source.shape)
        self.tensor.copy_(source, non_blocking=non_blocking)
        self.event.record()
        self.filled = True
        if not non_blocking:
            self.event.synchronize()
        return self

    def holds_its_copy(self) -> bool:
        """Is `tensor` the beginning of this slot's memory, without gaps?"""
        return (
            self.tensor.is_contiguous()
            and self.tensor.storage_offset() == self._memory.storage_offset()
            and self.tensor.untyped_storage().data_ptr()
            == self._memory.untyped_storage().data_ptr()
        )


class BufferPool:
    """`slots` buffers of `shape` and `dtype` in memory that worker processes share.

    Every page is touched at the start. With `page_locked=True` the device may also copy into
    it without the host's help; `page_locked` is False, after a warning, when the device refused
    that. Raises LabError, before anything is allocated, when shared memory is too small. Close it
    when no copy and no worker uses it any more, or use `with`.
    """

    def __init__(self, device, shape, dtype: torch.dtype, slots: int, page_locked: bool = False):
        check_count("slots", slots)
        slot_bytes = math.prod(shape) * dtype.itemsize
        check_shared_memory(slots, slot_bytes)
        # One storage for all slots: one file descriptor however many there are.
        self.memory = torch.empty((slots, *shape), dtype=dtype).share_memory_().zero_()
        self.slots = slots
        self.slot_bytes = slot_bytes
        self._all = [Slot(i, self.memory[i], device.Event()) for i in range(slots)]
        self._free = deque(self._all)
        self._closed = False
        # OutputWorkers puts its own here: a function that waits until a worker is done.
        self.wait_for_release = self._nobody_releases
        self._device = device
        self.page_locked = (
            page_locked
            and slot_bytes > 0
            and page_lock_or_warn(device, self.memory, f"the pool's {slots} slots")
        )
        if self.page_locked:  # a pool that is dropped unlocks it too, before the memory goes
            self._unlock = weakref.finalize(self, device.page_unlock, self.memory)

    def acquire(self) -> Slot:
        """A slot that nobody uses, waiting for a worker to give one back if need be.

        Raises LabError when none is free and no worker holds one, since that wait has no end.
        """
        self.check_open()
        if not self._free:
            with annotate("wait for slot"):
                while not self._free:
                    self.wait_for_release()
        slot = self._free.popleft()
        slot.event.synchronize()  # whoever released it may have left a copy running
        slot.held, slot.filled = True, False
        return slot

    def release(self, slot: Slot) -> None:
        """Give `slot` back. OutputWorkers does this for the slots it was given."""
        self.check_open()
        if slot not in self:
            raise LabError(f"slot {slot.index} belongs to another pool")
        if not slot.held:
            raise LabError(f"slot {slot.index} was released twice: release each acquire once")
        slot.held = False
        self._free.append(slot)

    def close(self) -> None:
        """Wait for running copies, undo page-locking, give the memory back. May be repeated."""
        if self._closed:
            return
        self._closed = True
        try:
            for slot in self._all:
                slot.held = False
                slot.event.synchronize()
        finally:
            if self.page_locked:
                self._unlock()
            self._all, self._free, self.memory = [], deque(), None

    def __contains__(self, slot: Slot) -> bool:
        return slot in self._all

    def __enter__(self) -> "BufferPool":
        return self

    def __exit__(self, *error) -> None:
        self.close()

    def check_open(self) -> None:
        """Raise LabError when this pool is closed."""
        if self._closed:
            raise LabError("this pool is closed: make a new one")

    def _nobody_releases(self) -> None:
        raise LabError(
            f"all {self.slots} slots are held and no worker has one to give back: "
            "release slots, or hand filled ones to the workers, before acquiring more"
        )


def view_slot(memory: torch.Tensor, shape) -> torch.Tensor:
    """The first elements of a slot's memory as a tensor of `shape`; shares the memory."""
    return memory.view(-1)[: math.prod(shape)].view(shape)


def check_shared_memory(slots: int, slot_bytes: int) -> None:
    """Raise LabError unless `slots` of `slot_bytes` fit into the machine's shared memory."""
    if not _SHARED_MEMORY.is_dir():
        return
    free, needed = shutil.disk_usage(_SHARED_MEMORY).free, slots * slot_bytes
    if needed > free:
        raise LabError(
            f"the pool needs {needed:,} bytes of shared memory ({slots} slots of "
            f"{slot_bytes:,}), {_SHARED_MEMORY} has {free:,} free: use fewer slots or a smaller "
            "batch, or give the machine more (docker run --shm-size=8g)"
        )
