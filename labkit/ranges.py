"""annotate: give a stretch of the host's time a name, for whoever is listening.

    with annotate("forward", batch=3):
        scores = model(images)

Nsight Systems sees an NVTX range (domain `labkit`, the batch as its payload), torch.profiler a
range of that name, and a listener of this thread, as recorder.py has one, the times themselves.
A range is the time that the *host* spends in it. Work that it queues on the device may run later.
"""

import threading
import time
from contextlib import contextmanager

import torch

try:
    import nvtx
except ImportError:  # without it Nsight Systems sees no ranges; all else works
    nvtx = None

# Unless a tool is attached to this process, this domain's methods do nothing.
_domain = None if nvtx is None else nvtx.get_domain("labkit")
_thread = threading.local()


class annotate:
    """A context manager that names its block for profilers and for this thread's listener.

    `batch` is the batch's index; `bytes` says how much the block copies. Costs less than two
    microseconds when nothing listens. Needs neither CUDA nor nvtx.
    """

    __slots__ = ("name", "batch", "bytes", "_profiled", "_listener", "_began")

    def __init__(self, name: str, batch: int | None = None, bytes: int | None = None):
        self.name, self.batch, self.bytes = name, batch, bytes

    def __enter__(self) -> "annotate":
        if _domain is not None:
            attributes = _domain.get_event_attributes(message=self.name, payload=self.batch)
            _domain.push_range(attributes)
        self._profiled = None
        if torch.autograd._profiler_enabled():
            self._profiled = torch.profiler.record_function(self.name)
            self._profiled.__enter__()
        self._listener = current_listener()
        if self._listener is not None:
            self._began = self._listener.begin(self)
        return self

    def __exit__(self, *error) -> None:
        if self._listener is not None:
            self._listener.end(self, self._began)
        if self._profiled is not None:
            self._profiled.__exit__(*error)
        if _domain is not None:
            _domain.pop_range()


class Listener:
    """Keeps the ranges of one thread: (name, start, end, batch, bytes).

    Times are `time.perf_counter()`'s seconds, a clock that all processes of a machine share.
    """

    def __init__(self):
        self.ranges: list[tuple] = []
        self.worker_ranges: list[tuple] = []  # (worker number, its ranges), from OutputWorkers

    def begin(self, block: annotate):
        """Called when `block` is entered; what it returns comes back to `end`."""
        return time.perf_counter()

    def end(self, block: annotate, began) -> None:
        self.ranges.append((block.name, began, time.perf_counter(), block.batch, block.bytes))


def current_listener() -> Listener | None:
    return getattr(_thread, "listener", None)


@contextmanager
def listen(listener: Listener):
    """Give this thread's ranges to `listener` inside the block."""
    before, _thread.listener = current_listener(), listener
    try:
        yield listener
    finally:
        _thread.listener = before
