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

# torch.autograd.profiler's own question; looked up once, as every range asks it.
_profiler_enabled = torch.autograd._profiler_enabled


def _open_domain():
    """The NVTX domain, or None if no tool was attached to this process when it started."""
    try:
        import nvtx
    except ImportError:  # without it Nsight Systems sees no ranges; all else works
        return None
    domain = nvtx.get_domain("labkit")
    return domain if isinstance(domain, nvtx.Domain) else None


class _Thread(threading.local):
    listener = None  # found faster on the class than an attribute that a thread lacks


_domain = _open_domain()
_thread = _Thread()


class annotate:
    """A context manager that names its block for profilers and for this thread's listener.

    `batch` is the batch's index; `bytes` says how much the block copies. Costs less than two
    microseconds when nothing listens. Needs neither CUDA nor nvtx.
    """

    __slots__ = ("name", "batch", "bytes", "_profiled", "_listener", "_began")

    def __init__(self, name: str, batch: int | None = None, bytes: int | None = None):
        self.name, self.batch, self.bytes = name, batch, bytes

    def __enter__(self) -> "annotate":
        self._listener = _thread.listener
        if self._listener is not None:
            self._began = self._listener.begin(self)
        if _domain is not None:
            attributes = _domain.get_event_attributes(message=self.name, payload=self.batch)
            _domain.push_range(attributes)
        self._profiled = None
        if _profiler_enabled():
            self._profiled = torch.profiler.record_function(self.name)
            self._profiled.__enter__()
        return self

    def __exit__(self, *error) -> None:
        if self._profiled is not None:
            self._profiled.__exit__(*error)
        if _domain is not None:
            _domain.pop_range()
        if self._listener is not None:
            self._listener.end(self, self._began)


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
    return _thread.listener


@contextmanager
def listen(listener: Listener):
    """Give this thread's ranges to `listener` inside the block."""
    before, _thread.listener = _thread.listener, listener
    try:
        yield listener
    finally:
        _thread.listener = before
