"""Streams, events and engines of the emulated device: what runs when.

A stream is a queue that a thread of its own serves in order. An operation starts when all
before it in its stream is done and its engine is free.
"""

import threading
import time
import weakref
from queue import SimpleQueue
from typing import NamedTuple

from ..errors import LabError


class Operation(NamedTuple):
    """One operation that an engine has done; times are `time.perf_counter()`'s seconds."""

    engine: str  # compute, upload or copy
    start: float
    end: float
    queued: float
    bytes: int | None
    pinned: bool | None


class EmulatedStream:
    """A queue of operations that a thread of its own carries out in order."""

    def __init__(self, device):
        self._device = device
        self._operations = SimpleQueue()
        serve = threading.Thread(
            target=_serve, args=(self._operations, device._faults), name="stream", daemon=True
        )
        serve.start()
        # The thread knows only the queue: dropping the stream ends it, after what is queued.
        end = weakref.finalize(self, _end_stream, self._operations, device._last_marks)
        end.atexit = False

    def mark(self) -> "Mark":
        """Queue a mark that is set when all that is queued so far is done."""
        mark = Mark()
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

    def _queue_delay(self, seconds: float) -> None:
        def operation(ready: float) -> float:
            sleep_until(ready + seconds)
            return ready + seconds

        self._operations.put((operation, time.perf_counter()))

    def _queue_on(self, engine: "Engine", seconds: float, action, nbytes=None, pinned=None):
        # Not `self` in here: a stream that waits in its own queue would never be dropped.
        device, queued = self._device, time.perf_counter()

        def operation(ready: float) -> float:
            end = engine.run(ready, seconds + device.profile.launch_s, action)
            if (log := device.operations) is not None:
                # The host has its part in a copy to pageable memory, and that part is real.
                last = end if pinned is not False else max(end, time.perf_counter())
                log.append(Operation(engine.name, end - seconds, last, queued, nbytes, pinned))
            return end

        self._operations.put((operation, queued))


class EmulatedEvent:
    """A point in a stream that others can wait for. One that was never recorded counts as past."""

    def __init__(self, device, enable_timing: bool):
        self._device = device
        self._enable_timing = enable_timing
        self._mark: Mark | None = None

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


class Mark:
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


class Engine:
    """Hardware that does one operation at a time.

    Times are planned, not measured: an operation that was queued in time starts when the one
    before it was due to end, even if this computer woke its thread late. So the emulated device
    keeps its rates on a busy machine.
    """

    def __init__(self, name: str):
        self.name = name
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


def _end_stream(operations: SimpleQueue, last_marks: list[Mark]) -> None:
    mark = Mark()
    operations.put((mark.set, time.perf_counter()))
    operations.put(None)
    last_marks.append(mark)
    last_marks[:] = [mark for mark in last_marks if not mark.done.is_set()]


def sleep_until(moment: float) -> None:
    delay = moment - time.perf_counter()
    if delay > 0:
        time.sleep(delay)
