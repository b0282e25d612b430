"""Recorder: listens to a run as it happens and makes a Timeline of it.

The host's and the workers' spans are the ranges of `annotate`. The device's come from CUDA
events that are recorded at both ends of a range, on the stream that is current there, or on the
emulated device from its engines.
"""

import time

from .errors import LabError
from .hardware import describe_host, device_entry
from .ranges import Listener, annotate, listen
from .timeline import DEVICE_LANES, Launched, Span, Timeline, with_batches

_EVENTS_NOTE = "taken between CUDA events, which do not show the pauses within a forward"


class Recorder(Listener):
    """Records the run inside its `with` block; afterwards `timeline()` gives it.

    Waits for the device at both ends, and nowhere else. With `device_events=False` only host
    and workers are recorded, for whoever has a profiler that sees the device better.
    """

    def __init__(self, device, device_events: bool = True):
        super().__init__()
        self._device = device
        self._with_events = device_events and device.kind == "cuda"
        self._events: list[tuple] = []  # (range's name, batch, bytes, first event, last event)
        self._launched: list[Launched] = []

    def __enter__(self) -> "Recorder":
        if self._device.kind == "emulated" and self._device.operations is not None:
            raise LabError("this device is being recorded already: one Recorder at a time")
        self._device.synchronize()
        if self._with_events:
            self._zero = self._record_event()
            self._zero.synchronize()
        self._start = time.perf_counter()
        if self._device.kind == "emulated":
            self._device.operations = []
        self._listening = listen(self)
        self._listening.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self._listening.__exit__(*error)
        try:
            self._device.synchronize()
        finally:
            if self._device.kind == "emulated":
                operations, self._device.operations = self._device.operations, None
        if self._device.kind == "emulated":
            for engine, start, end, queued, bytes, pinned in operations:
                name = next(stage for stage, lane in DEVICE_LANES.items() if lane == engine)
                span = Span(engine, name, start, end, None, bytes, pinned)
                self._launched.append(Launched(span, queued))

    def begin(self, block: annotate):
        # Read the clock first: making an event takes its time too.
        began = super().begin(block)
        wanted = self._with_events and block.name in DEVICE_LANES
        return began, self._record_event() if wanted else None

    def end(self, block: annotate, began) -> None:
        start, first = began
        if first is not None:
            last = self._record_event()
            self._events.append((block.name, block.batch, block.bytes, first, last))
        super().end(block, start)

    def _record_event(self):
        event = self._device.Event(enable_timing=True)
        event.record()
        return event

    def timeline(self, strategy: str = "", job: str = "") -> Timeline:
        """The Timeline of what was recorded. Host and device share its clock to some 20 µs at the
        start; over a long run the two clocks drift apart."""
        host = [Span("host", *values) for values in self.ranges]
        workers = [
            Span(f"worker {number}", *values)
            for number, ranges in self.worker_ranges
            for values in ranges
        ]
        device = with_batches(self._launched, host) + [
            Span(DEVICE_LANES[name], name, self._moment(first), self._moment(last), batch, nbytes)
            for name, batch, nbytes, first, last in self._events
        ]
        return Timeline(
            host + workers + device,
            source="emulated" if self._device.kind == "emulated" else "CUDA events",
            device=device_entry(self._device),
            strategy=strategy,
            job=job,
            versions={"torch": describe_host()["torch"]},
            notes=[_EVENTS_NOTE] if self._events else [],
        )

    def _moment(self, event) -> float:
        """When the device got past `event`, on the host's clock."""
        return self._start + self._zero.elapsed_time(event) / 1e3
