"""What a timeline says: how busy the GPU is, and what it waits for when it is not."""

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from .timeline import Span, Timeline, innermost

# Between two kernels of one forward the GPU pauses for some microseconds; that is no gap.
GAP_S = 50e-6
_BUSY_ENOUGH = 0.95
_GAPS_SHOWN = 3
# Host ranges that keep the GPU waiting by themselves, whatever a copy does meanwhile.
_HOSTS_OWN = {"process", "wait for slot", "wait for workers"}
_WHILE = {
    "copy": "while scores are copied to the host",
    "upload": "while images are uploaded",
    "forward": "while the main loop queues a forward",
    "process": "while the main loop processes scores",
    "wait for slot": "while every slot is with a worker",
    "wait for workers": "while the main loop waits for the workers",
    "between kernels": "between one kernel and the next",
    "nothing recorded": "while the main loop is in no named range",
}


class Gap(NamedTuple):
    """A time in which the GPU computes nothing. `cause` is what it waits for, in one word or
    two; `host` the range that the main loop was in for the longest part of it, if any."""

    start: float
    end: float
    cause: str
    host: Span | None

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Copies(NamedTuple):
    """All copies of one kind: `lane` is `upload` or `copy`, `pinned` None if unknown."""

    lane: str
    pinned: bool | None
    count: int
    bytes: int
    seconds: float

    @property
    def gbps(self) -> float:
        """1e9 bytes per second, while copying."""
        return self.bytes / self.seconds / 1e9 if self.seconds else 0.0


@dataclass
class Metrics:
    """`busy` is the share of `seconds` with a kernel running, `idle` the seconds without one by
    cause, `gaps` those of 50 µs and more, longest first. `hidden` is the share of the
    device-to-host copies' time with a kernel running beside them; None without such copies.
    `batches` is how many copies to the host end in this time, `stages` the seconds of each
    (lane, stage), all workers as one lane.
    """

    title: str
    seconds: float
    batches: int
    busy: float
    idle: dict[str, float]
    gaps: list[Gap]
    copies: list[Copies]
    hidden: float | None
    stages: dict[tuple[str, str], float]

    @property
    def sentence(self) -> str:
        """Where the GPU waits, and so which stage limits the run, in one sentence."""
        if not (self.busy or self.idle):
            return "There is no kernel in this timeline."
        head = f"The GPU computes {self.busy:.0%} of the time"
        if self.busy >= _BUSY_ENOUGH:
            return f"{head}: what limits it is the forward itself."
        causes = sorted(self.idle, key=self.idle.get, reverse=True)
        said = [cause for cause in causes if self.idle[cause] >= 0.02 * self.seconds][:2]
        said = said or causes[:1]
        parts = [f"{self.idle[c] / self.seconds:.0%} {_WHILE.get(c, f'during {c}')}" for c in said]
        return f"{head}. It waits {' and '.join(parts)}."


def summarize(timeline: Timeline, window: tuple[float, float] | None = None) -> Metrics:
    """The metrics of `timeline` from `window[0]` to `window[1]`, in seconds; all of it if None."""
    start, end = window or (0.0, timeline.end)
    spans = [span for span in timeline.spans if span.start < end and span.end > start]
    compute, copy, upload = (
        Times.union([span for span in spans if span.lane == lane], start, end)
        for lane in ("compute", "copy", "upload")
    )
    hosts = Times(innermost([span for span in spans if span.lane == "host"]))
    seconds = end - start
    idle, gaps = Counter(), []
    for gap in compute.gaps(start, end) if timeline.lane("compute") else ():
        if gap[1] - gap[0] < GAP_S:
            idle["between kernels"] += gap[1] - gap[0]
            continue
        shares, host = _blame(gap, hosts, copy, upload)
        idle.update(shares)
        gaps.append(Gap(*gap, max(shares, key=shares.get), host))
    hidden = sum(compute.seconds(*times) for times in copy.pieces)
    return Metrics(
        title=timeline.title(),
        seconds=seconds,
        batches=sum(span.lane == "copy" and start < span.end <= end for span in spans),
        busy=compute.seconds(start, end) / seconds if seconds else 0.0,
        idle=dict(idle),
        gaps=sorted(gaps, key=lambda gap: -gap.seconds),
        copies=_copies(spans, start, end),
        hidden=hidden / copy.seconds(start, end) if copy.pieces else None,
        stages=_stages(spans, start, end),
    )


def _blame(gap, hosts: "Times", copy: "Times", upload: "Times") -> tuple[Counter, Span | None]:
    """Seconds of `gap` by cause, and the host's range that has the longest part of it."""
    marked = hosts.within(*gap)
    unmarked = [(*piece, None) for piece in Times(marked).gaps(*gap)]
    shares = Counter()
    for start, end, span in marked + unmarked:
        name = span.name if span else "nothing recorded"
        if name in _HOSTS_OWN:
            shares[name] += end - start
            continue
        shares["copy"] += copy.seconds(start, end)
        for rest in copy.gaps(start, end):
            uploading = upload.seconds(*rest)
            shares["upload"] += uploading
            shares[name] += rest[1] - rest[0] - uploading
    of_host: dict[Span, float] = {}
    for start, end, span in marked:
        of_host[span] = of_host.get(span, 0.0) + end - start
    longest = max(of_host, key=of_host.get, default=None)
    return Counter({name: seconds for name, seconds in shares.items() if seconds > 0}), longest


def _copies(spans: list[Span], start: float, end: float) -> list[Copies]:
    """Whole copies only: a part of one has no bytes of its own."""
    found: dict[tuple, list] = {}
    for span in spans:
        inside = start <= span.start and span.end <= end
        if span.lane in ("upload", "copy") and span.bytes is not None and inside:
            found.setdefault((span.lane, span.pinned), []).append(span)
    return [
        Copies(lane, pinned, len(some), sum(s.bytes for s in some), sum(s.seconds for s in some))
        for (lane, pinned), some in sorted(found.items(), key=str)
    ]


def _stages(spans: list[Span], start: float, end: float) -> dict[tuple[str, str], float]:
    seconds = Counter()
    for span in spans:
        lane = "workers" if span.lane.startswith("worker ") else span.lane
        seconds[lane, span.stage] += min(span.end, end) - max(span.start, start)
    return dict(seconds)


class Times:
    """Pieces (start, end, ...) in order and apart from each other."""

    def __init__(self, pieces: list[tuple]):
        self.pieces = pieces
        self._ends = [piece[1] for piece in pieces]

    @classmethod
    def union(cls, spans: list[Span], start: float, end: float) -> "Times":
        """The times between `start` and `end` in which any of `spans` runs."""
        pieces = []
        for span in spans:  # in the order of their starts
            first, last = max(span.start, start), min(span.end, end)
            if pieces and first <= pieces[-1][1]:
                pieces[-1] = pieces[-1][0], max(last, pieces[-1][1])
            elif first < last:
                pieces.append((first, last))
        return cls(pieces)

    def within(self, start: float, end: float) -> list[tuple]:
        """The pieces between `start` and `end`, cut off there."""
        found = []
        place = bisect_right(self._ends, start)
        while place < len(self.pieces) and self.pieces[place][0] < end:
            first, last, *rest = self.pieces[place]
            found.append((max(first, start), min(last, end), *rest))
            place += 1
        return found

    def seconds(self, start: float, end: float) -> float:
        return sum(piece[1] - piece[0] for piece in self.within(start, end))

    def gaps(self, start: float, end: float) -> list[tuple[float, float]]:
        """The times between `start` and `end` that are in no piece."""
        edges = [start, *(edge for piece in self.within(start, end) for edge in piece[:2]), end]
        pairs = zip(edges[::2], edges[1::2], strict=True)
        return [(first, last) for first, last in pairs if first < last]


def metrics_table(found: Metrics):
    """Metrics as a rich table: what the GPU did, what it waited for, copies, stages, gaps."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(found.title), title_justify="left", box=box.SIMPLE, padding=(0, 1))
    table.add_column("")
    for name in ("ms", "ms a batch", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")

    def row(name: str, seconds: float, more: str = "", each: bool = True) -> None:
        share = f"{seconds / found.seconds:.1%}" if found.seconds else ""
        per_batch = f"{seconds / found.batches * 1e3:,.2f}" if each and found.batches else ""
        table.add_row(escape(name), f"{seconds * 1e3:,.1f}", per_batch, share, escape(more))

    row("GPU computes", found.busy * found.seconds)
    for cause, seconds in sorted(found.idle.items(), key=lambda item: -item[1]):
        row(f"  waits: {cause}", seconds)
    table.add_section()
    for copies in found.copies:
        memory = {True: "page-locked", False: "pageable", None: ""}[copies.pinned]
        to = "to host" if copies.lane == "copy" else "to device"
        row(f"{copies.count} copies {to}", copies.seconds, f"{copies.gbps:.2f} GB/s {memory}")
    if found.hidden is not None:
        table.add_row("  behind kernels", "", "", f"{found.hidden:.1%}", "of the copies' time")
    table.add_section()
    for (lane, stage), seconds in sorted(found.stages.items()):
        row(f"{lane}: {stage}", seconds)
    table.add_section()
    for gap in found.gaps[:_GAPS_SHOWN]:
        host = "" if gap.host is None else f"in {gap.host.name}"
        batch = "" if gap.host is None or gap.host.batch is None else f", batch {gap.host.batch}"
        row(f"gap: {gap.cause}", gap.seconds, f"at {gap.start * 1e3:,.0f} ms {host}{batch}", False)
    return table
