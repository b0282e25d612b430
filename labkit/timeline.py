"""Timeline: what ran when, in one form for every source.

    source                        made by
    a run that is recorded live   recorder.py, on a GPU and on the emulated device
    torch.profiler                torch_trace.py
    Nsight Systems                nsight.py
    labkit's own compact JSON     trace_files.py, which finds out what a file is
    a prediction                  whoever makes Spans: a Timeline is no more than those

A lane is something that does one thing at a time: `host` (the main loop), `compute`, `upload`
and `copy` (the device's engines: kernels, copies to it, copies from it), `worker 0` and so on.
"""

import math
import operator
import re
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import NamedTuple

from .hardware import describe_device

# What a host range of that name queues, and the device's lane where it runs.
DEVICE_LANES = {"forward": "compute", "upload": "upload", "copy": "copy"}
# A device's lane does one stage's work, whatever its kernels are called.
_STAGES = {lane: stage for stage, lane in DEVICE_LANES.items()}
_NAME_LIMIT = 200
_ORDER = ("host", "compute", "upload", "copy")


class Span(NamedTuple):
    """Something that ran in `lane` from `start` to `end`, in seconds from the run's start.

    `name` is a stage, or a kernel's own name in a profiler's trace. `bytes` is what a copy
    moved, `pinned` whether its host side was page-locked; None where the source does not say.
    """

    lane: str
    name: str
    start: float
    end: float
    batch: int | None = None
    bytes: int | None = None
    pinned: bool | None = None

    @property
    def stage(self) -> str:
        return _STAGES.get(self.lane, self.name)

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass
class Timeline:
    """Spans in the order of their starts, the first one at 0, and what they were taken from.

    `device` has `kind`, `name` and `profile`, as in a record; `notes` say what the source lacks.
    """

    spans: list[Span]
    source: str
    device: dict
    strategy: str = ""
    job: str = ""
    versions: dict = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self):
        spans = sorted(self.spans, key=lambda span: span.start)
        if spans and (zero := spans[0].start) != 0:
            spans = [Span(s[0], s[1], s.start - zero, s.end - zero, *s[4:]) for s in spans]
        self.spans = spans
        self._lanes: dict[str, list[Span]] = {}
        for span in spans:
            self._lanes.setdefault(span.lane, []).append(span)

    @property
    def end(self) -> float:
        """Seconds from the start of the first span to the end of the last one."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def lanes(self) -> list[str]:
        """The lanes in the order in which they are drawn: the host, the device, the workers."""
        return sorted(self._lanes, key=_lane_order)

    def lane(self, name: str) -> list[Span]:
        return self._lanes.get(name, [])

    def steady(self) -> tuple[float, float]:
        """Start and end of the steady state: the middle half, from a copy's end to another's.

        Without its beginning, where nothing overlaps yet, and its end, where the workers
        finish. The whole timeline when it has fewer than four copies.
        """
        ends = sorted(span.end for span in self.lane("copy"))
        if len(ends) < 4:
            return 0.0, self.end
        first = len(ends) // 4
        return ends[first], ends[len(ends) - 1 - first]

    def first_batches(self, count: int) -> tuple[float, float]:
        """A window of `count` batches within the steady state, or all there is of it."""
        start, end = self.steady()
        ends = sorted(span.end for span in self.lane("copy") if start <= span.end <= end)
        return start, ends[count] if 0 < count < len(ends) else end

    def title(self) -> str:
        """One line that says what ran on what, and whether it was emulated or predicted."""
        parts = [
            self.strategy or "a run",
            self.job,
            describe_device(self.device)
            + ("" if self.source == self.device["kind"] else f" ({self.source})"),
        ]
        return " - ".join(part for part in parts if part)


def _lane_order(lane: str) -> tuple:
    if lane in _ORDER:
        return _ORDER.index(lane), 0, lane
    number = re.search(r"\d+$", lane)
    return len(_ORDER), int(number.group()) if number else -1, lane


def innermost(spans: list[Span]) -> list[tuple[float, float, Span]]:
    """Pieces (start, end, span) that do not overlap, in order: of nested spans the inner one."""
    pieces, open_spans, at = [], [], -math.inf

    def advance(to: float) -> None:
        nonlocal at
        if open_spans and at < to:
            pieces.append((at, to, open_spans[-1]))
        at = max(at, to)

    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        while open_spans and open_spans[-1].end <= span.start:
            advance(open_spans[-1].end)
            open_spans.pop()
        advance(span.start)
        open_spans.append(span)
    while open_spans:
        advance(open_spans[-1].end)
        open_spans.pop()
    return pieces


def clean(name) -> str:
    """A name from a file, so short and so plain that it can be printed and drawn."""
    return str(name).encode("utf-8", "replace").decode()[:_NAME_LIMIT]


def whole(value) -> int | None:
    """A batch's number or a count of bytes, as a whole number; None for anything else."""
    try:
        number = operator.index(value)
    except TypeError:
        return None
    return number if 0 <= number < 2**62 and not isinstance(value, bool) else None


class Launched(NamedTuple):
    """A device's span, and when the host queued it (None if the source does not say)."""

    span: Span
    queued: float | None


def with_batches(launched: list[Launched], host: list[Span]) -> list[Span]:
    """The device's spans, each with the batch of the host's range that queued it.

    Of ranges in each other, the inner one that has a batch."""
    pieces = innermost([span for span in host if span.batch is not None])
    starts = [start for start, _, _ in pieces]
    spans = []
    for span, queued in launched:
        place = -1 if queued is None else bisect_right(starts, queued) - 1
        if place >= 0 and queued < pieces[place][1]:
            span = span._replace(batch=pieces[place][2].batch)
        spans.append(span)
    return spans
