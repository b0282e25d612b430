"""A GPU's streams, events, engines and memory, emulated on the CPU.

Results are real, times are those of a named hardware profile. One compute engine and one copy
engine in each direction each do one operation at a time. A stream is a queue that a thread
serves in order; an operation starts when everything before it in its stream is done and its
engine is free, and takes the time that the profile gives. Waiting costs no CPU, so the work of
the host (page faults, shared memory, workers) stays real and competes for the real cores.

CUDA's rules hold here too, the ones that hurt included:

* operations are queued and return at once; whoever reads a result has to wait for it;
* a copy to or from pageable memory blocks the host (a GPU's upload from it returns once its
  bytes are staged); one to page-locked memory with
  `non_blocking=True` does not, and its bytes arrive while it runs;
* memory of a dropped tensor is reused at once by the stream that it was allocated on, and
  `record_stream` is what protects it from other streams' running work.
"""

import threading
import weakref
from collections import deque
from contextlib import contextmanager

import numpy as np
import torch

from ..errors import LabError
from ..hardware import HardwareProfile
from .memory import Block, DeviceTensor, Kernel, host_bytes
from .stream import EmulatedEvent, EmulatedStream, Engine, Mark, Operation, sleep_until

# Bytes of one step of a copy: small enough that a reader who does not wait sees a mixture.
_CHUNK_BYTES = 4 * 2**20


class EmulatedDevice:
    """The names of `torch.cuda` that the labs use, at the rates of `profile`."""

    kind = "emulated"

    def __init__(self, profile: HardwareProfile):
        self.profile = profile
        self.name = f"emulated GPU ({profile.name})"
        self._compute, self._upload, self._copy = map(Engine, ("compute", "upload", "copy"))
        self.operations: list[Operation] | None = None  # a list here is given all that is done
        self._page_locked: dict[int, int] = {}  # first address -> bytes
        # More is refused, as by a GPU's driver that cannot have the memory; None: no limit.
        self.page_lock_limit_bytes: int | None = None
        self._dropped: deque[Block] = deque()
        self._allocation = threading.Lock()
        self._streams = weakref.WeakSet()
        self._last_marks: list[Mark] = []  # of streams that are gone
        self._faults: list[BaseException] = []
        self._thread = threading.local()
        self._default_stream = self.Stream()

    # The names of torch.cuda.

    def Stream(self) -> EmulatedStream:
        stream = EmulatedStream(self)
        self._streams.add(stream)
        return stream

    def Event(self, enable_timing: bool = False, blocking: bool = False) -> EmulatedEvent:
        return EmulatedEvent(self, enable_timing)

    def current_stream(self) -> EmulatedStream:
        return getattr(self._thread, "stream", self._default_stream)

    @contextmanager
    def stream(self, stream: EmulatedStream):
        """Queue what this thread does inside the block on `stream`."""
        before, self._thread.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._thread.stream = before

    def synchronize(self) -> None:
        """Wait until every stream is done."""
        for stream in list(self._streams):
            stream.synchronize()
        while self._last_marks:
            self._last_marks.pop().done.wait()
        self.raise_fault()

    # The five helpers that CudaDevice has as well.

    def upload(self, host: torch.Tensor) -> DeviceTensor:
        """Copy `host` to the device on the current stream.

        Returns at once when `host` is page-locked; then `host` must stay unchanged until the
        stream gets there.
        """
        tensor = self.empty(host.shape, host.dtype)
        tensor.copy_(host, non_blocking=True)
        return tensor

    def load(self, model: torch.nn.Module, inputs: torch.Tensor) -> Kernel:
        """Run `model` on each of `inputs` now, on the CPU, and return a function that queues it.

        The function takes device tensors that hold some of `inputs` and returns at once.
        """
        return Kernel(self, model, inputs)

    def delay(self, seconds: float) -> None:
        """Hold the current stream up for `seconds`; no engine is busy with it. Returns at once."""
        self.current_stream()._queue_delay(seconds)

    def page_lock(self, tensor: torch.Tensor) -> None:
        """Let copies between the device and the memory of `tensor` be asynchronous."""
        if tensor.data_ptr() in self._page_locked:
            raise LabError("this memory is page-locked already: page_unlock it first")
        limit, locked = self.page_lock_limit_bytes, sum(self._page_locked.values())
        if limit is not None and locked + tensor.nbytes > limit:
            raise LabError(
                f"the emulated device could not page-lock {tensor.nbytes:,} bytes "
                f"(limit {limit:,}, in use {locked:,}): use fewer slots or a smaller batch"
            )
        self._page_locked[tensor.data_ptr()] = tensor.nbytes

    def page_unlock(self, tensor: torch.Tensor) -> None:
        """Undo `page_lock`. A copy in flight goes on."""
        if self._page_locked.pop(tensor.data_ptr(), None) is None:
            raise LabError("this memory is not page-locked")

    # What DeviceTensor and Kernel are made of.

    def empty(self, shape, dtype: torch.dtype) -> DeviceTensor:
        """Device memory for `shape`, allocated on the current stream; holds old bytes."""
        stream = self.current_stream()
        nbytes = int(np.prod(shape)) * dtype.itemsize
        return DeviceTensor(self, self._allocate(nbytes, stream), shape, dtype)

    def launch(self, seconds: float, action) -> None:
        """Queue `action` as a kernel of that length; it runs when the kernel ends."""

        def kernel(start: float, end: float) -> None:
            sleep_until(end)
            action()

        self.current_stream()._queue_on(self._compute, seconds, kernel)

    def copy_to_host(self, host: torch.Tensor, block: Block, non_blocking: bool) -> None:
        target = host_bytes(host)

        def copy(start: float, end: float) -> None:
            # `block` is read anew for each step: memory reused under a running copy shows.
            for first in range(0, target.size, _CHUNK_BYTES):
                step = slice(first, min(first + _CHUNK_BYTES, target.size))
                sleep_until(start + (end - start) * step.stop / target.size)
                target[step] = block.contents[step]

        self._queue_copy(self._copy, host, non_blocking, copy)

    def copy_to_device(self, block: Block, host: torch.Tensor, non_blocking: bool) -> None:
        source = host_bytes(host)

        def copy(start: float, end: float) -> None:
            sleep_until(end)
            block.contents = source.copy()

        self._queue_copy(self._upload, host, non_blocking, copy)

    def _queue_copy(self, engine: Engine, host: torch.Tensor, non_blocking: bool, copy) -> None:
        pinned = self.is_page_locked(host)
        profile = self.profile
        rate = profile.pinned_bytes_per_s if pinned else profile.pageable_bytes_per_s
        stream = self.current_stream()
        stream._queue_on(engine, host.nbytes / rate, copy, host.nbytes, pinned)
        if not (pinned and non_blocking):
            stream.synchronize()

    def is_page_locked(self, host: torch.Tensor) -> bool:
        first, last = host.data_ptr(), host.data_ptr() + host.nbytes
        ranges = list(self._page_locked.items())
        return any(start <= first and last <= start + size for start, size in ranges)

    def _allocate(self, nbytes: int, stream: EmulatedStream) -> Block:
        with self._allocation:
            for _ in range(len(self._dropped)):
                block = self._dropped.popleft()
                owner = block.stream()
                if owner is None:  # the stream is gone, and its memory with it
                    continue
                if owner is stream and block.nbytes == nbytes and block.is_idle():
                    return block
                self._dropped.append(block)
        return Block(nbytes, weakref.ref(stream))

    def drop(self, block: Block) -> None:
        """Take back the memory of a tensor that nobody refers to any more."""
        block.busy_until = [stream.mark() for stream in block.users]
        block.users = set()
        self._dropped.append(block)

    def raise_fault(self) -> None:
        """Raise what went wrong in an operation, as CUDA does: late, at a synchronising call."""
        if self._faults:
            raise LabError(f"an emulated operation failed: {self._faults[0]!r}")
