"""A GPU's streams, events, engines and memory, emulated on the CPU.

Results are real, times are those of a named hardware profile. One compute engine and one copy
engine in each direction each do one operation at a time. A stream is a queue that a thread
serves in order; an operation starts when everything before it in its stream is done and its
engine is free, and takes the time that the profile gives. Waiting costs no CPU, so the work of
the host (page faults, shared memory, workers) stays real and competes for the real cores.

CUDA's rules hold here too, the ones that hurt included:

* operations are queued and return at once; whoever reads a result has to wait for it;
* a copy to or from pageable memory blocks the host; one to page-locked memory with
  `non_blocking=True` does not, and its bytes arrive while it runs;
* memory of a dropped tensor is reused at once by the stream that it was allocated on, and
  `record_stream` is what protects it from other streams' running work.
"""

import threading
import time
import weakref
from collections import deque
from contextlib import contextmanager
from queue import SimpleQueue

import numpy as np
import torch

from ..errors import LabError
from ..hardware import HardwareProfile
from .memory import Block, DeviceTensor, Kernel, host_bytes

# Bytes of one step of a copy: small enough that a reader who does not wait sees a mixture.
_CHUNK_BYTES = 4 * 2**20


class EmulatedDevice:
    """The names of `torch.cuda` that the labs use, at the rates of `profile`."""

    kind = "emulated"

    def __init__(self, profile: HardwareProfile):
        self.profile = profile
        self.name = f"emulated GPU ({profile.name})"
        self._compute, self._upload, self._download = _Engine(), _Engine(), _Engine()
        self._page_locked: dict[int, int] = {}  # first address -> bytes
        self._dropped: deque[Block] = deque()
        self._allocation = threading.Lock()
        self._streams = weakref.WeakSet()
        self._last_marks: list[_Mark] = []  # of streams that are gone
        self._faults: list[BaseException] = []
        self._thread = threading.local()
        self._default_stream = self.Stream()

    # The names of torch.cuda.

    def Stream(self) -> "EmulatedStream":
        stream = EmulatedStream(self)
        self._streams.add(stream)
        return stream

    def Event(self, enable_timing: bool = False, blocking: bool = False) -> "EmulatedEvent":
        return EmulatedEvent(self, enable_timing)

    def current_stream(self) -> "EmulatedStream":
        return getattr(self._thread, "stream", self._default_stream)

    @contextmanager
    def stream(self, stream: "EmulatedStream"):
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

    # The four helpers that CudaDevice has as well.

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

    def page_lock(self, tensor: torch.Tensor) -> None:
        """Let copies between the device and the memory of `tensor` be asynchronous."""
        if tensor.data_ptr() in self._page_locked:
            raise LabError("this memory is page-locked already: page_unlock it first")
        self._page_locked[tensor.data_ptr()] = tensor.nbytes

    def page_unlock(self, tensor: torch.Tensor) -> None:
        """Undo `page_lock`. No copy may be in flight."""
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
            _sleep_until(end)
            action()

        self.current_stream()._queue_on(self._compute, seconds + self.profile.launch_s, kernel)

    def copy_to_host(self, host: torch.Tensor, block: Block, non_blocking: bool) -> None:
        target = host_bytes(host)

        def copy(start: float, end: float) -> None:
            # `block` is read anew for each step: memory reused under a running copy shows.
            for first in range(0, target.size, _CHUNK_BYTES):
                step = slice(first, min(first + _CHUNK_BYTES, target.size))
                _sleep_until(start + (end - start) * step.stop / target.size)
                target[step] = block.contents[step]

        self._copy(self._download, host, non_blocking, copy)

    def copy_to_device(self, block: Block, host: torch.Tensor, non_blocking: bool) -> None:
        source = host_bytes(host)

        def copy(start: float, end: float) -> None:
            _sleep_until(end)
            block.contents = source.copy()

        self._copy(self._upload, host, non_blocking, copy)

    def _copy(self, engine: "_Engine", host: torch.Tensor, non_blocking: bool, copy) -> None:
        pinned = self.is_page_locked(host)
        profile = self.profile
        rate = profile.pinned_bytes_per_s if pinned else profile.pageable_bytes_per_s
        stream = self.current_stream()
        stream._queue_on(engine, host.nbytes / rate + profile.launch_s, copy)
        if not (pinned and non_blocking):
            stream.synchronize()

    def is_page_locked(self, host: torch.Tensor) -> bool:
        first, last = host.data_ptr(), host.data_ptr() + host.nbytes
        ranges = list(self._page_locked.items())
        return any(start <= first and last <= start + size for start, size in ranges)

    def _allocate(self, nbytes: int, stream: "EmulatedStream") -> Block:
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


class EmulatedStream:
    """A queue of operations that a thread of its own carries out in order."""

    def __init__(self, device: EmulatedDevice):
        self._device = device
        self._operations = SimpleQueue()
        serve = threading.Thread(
            target=_serve, args=(self._operations, device._faults), name="stream", daemon=True
        )
        serve.start()
        # The thread knows only the queue: dropping the stream ends it, after what is queued.
        end = weakref.finalize(self, _end_stream, self._operations, device._last_marks)
        end.atexit = False

    def mark(self) -> "_Mark":
        """Queue a mark that is set when all that is queued so far is done."""
        mark = _Mark()
        self._operations.put((mark.set, time.perf_counter()))
        return mark

    def record_event(self, event: "EmulatedEvent | None" = None) -> "EmulatedEvent":
        event = event or self._device.Event()
        event.record(self)
        return event

    def wait_event(self, event: "EmulatedEvent") -> None:
        """Let what is queued here from now on wait for `event`. Returns at once."""
        event.wait(self)

    def wait_stream(self, stream: "EmulatedStream") -> None:
        """Let what is queued here from now on wait for all queued on `stream`. Returns at once."""
        self._operations.put((stream.mark().wait, time.perf_counter()))

    def query(self) -> bool:
        """Is everything queued so far done? Asks the stream's thread, for a millisecond at most."""
        return self.mark().done.wait(timeout=1e-3)

    def synchronize(self) -> None:
        """Wait until everything queued so far is done."""
        self.mark().done.wait()
        self._device.raise_fault()

    def _queue_on(self, engine: "_Engine", seconds: float, action) -> None:
        self._operations.put(
            (lambda ready: engine.run(ready, seconds, action), time.perf_counter())
        )


class EmulatedEvent:
    """A point in a stream that others can wait for. One that was never recorded counts as past."""

    def __init__(self, device: EmulatedDevice, enable_timing: bool):
        self._device = device
        self._enable_timing = enable_timing
        self._mark: _Mark | None = None

    def record(self, stream: EmulatedStream | None = None) -> None:
        """Set this event to the point that `stream` has been given work up to. Returns at once."""
        self._mark = (stream or self._device.current_stream()).mark()

    def wait(self, stream: EmulatedStream | None = None) -> None:
        """Let what is queued on `stream` from now on wait for this event. Returns at once."""
        if self._mark is not None:
            stream = stream or self._device.current_stream()
            stream._operations.put((self._mark.wait, time.perf_counter()))

    def query(self) -> bool:
        """Has the stream got past this event? Returns at once."""
        return self._mark is None or self._mark.done.is_set()

    def synchronize(self) -> None:
        """Wait, on the host, until the stream has got past this event."""
        if self._mark is not None:
            self._mark.done.wait()
            self._device.raise_fault()

    def elapsed_time(self, end: "EmulatedEvent") -> float:
        """Milliseconds on the device's clock from this event to `end`, both past."""
        if not (self._enable_timing and end._enable_timing):
            raise LabError("elapsed_time needs two events made with enable_timing=True")
        if self._mark is None or end._mark is None:
            raise LabError("elapsed_time needs two events that were recorded")
        if not (self.query() and end.query()):
            raise LabError("elapsed_time needs two events that are past: synchronize first")
        return (end._mark.time - self._mark.time) * 1e3


class _Mark:
    """A place in a stream: set by the stream's thread when it gets there."""

    def __init__(self):
        self.done = threading.Event()
        self.time = 0.0

    def set(self, ready: float) -> float:
        self.time = ready
        self.done.set()
        return ready

    def wait(self, ready: float) -> float:
        # Always ends: a stream's thread serves all that was queued before it goes.
        self.done.wait()
        return max(ready, self.time)


class _Engine:
    """Hardware that does one operation at a time.

    Times are planned, not measured: an operation that was queued in time starts when the one
    before it was due to end, even if this computer woke its thread late. So the emulated device
    keeps its rates on a busy machine.
    """

    def __init__(self):
        self._busy = threading.Lock()
        self._free_at = 0.0

    def run(self, ready: float, seconds: float, action) -> float:
        with self._busy:
            start = max(ready, self._free_at)
            end = start + seconds
            action(start, end)
            self._free_at = end
            return end


def _serve(operations: SimpleQueue, faults: list[BaseException]) -> None:
    """Carry out the operations of one stream; `ready` is when the one before was due to end."""
    ready = 0.0
    while (item := operations.get()) is not None:
        operation, queued = item
        ready = max(ready, queued)
        try:
            ready = operation(ready)
        except Exception as error:  # reported at the next synchronising call
            faults.append(error)
        del operation, item  # an idle stream must not keep the last operation's memory


def _end_stream(operations: SimpleQueue, last_marks: list[_Mark]) -> None:
    mark = _Mark()
    operations.put((mark.set, time.perf_counter()))
    operations.put(None)
    last_marks.append(mark)
    last_marks[:] = [mark for mark in last_marks if not mark.done.is_set()]


def _sleep_until(moment: float) -> None:
    delay = moment - time.perf_counter()
    if delay > 0:
        time.sleep(delay)
