"""Timelines as files: find out what a file is and read it; write labkit's own two forms.

What is written holds lanes, names, times, bytes, the GPU's name and versions: nothing else of
the machine that was recorded.
"""

import gc
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import LabError
from .nsight import read_nsight
from .results import refuse_constant, write_json
from .timeline import Span, Timeline, clean, whole
from .torch_trace import read_torch_trace

_SIZE_LIMIT_BYTES = 2**27  # of a JSON file: a longer one takes gigabytes to parse
_LANES_LIMIT = 1000
_SPANS_LIMIT = 2_000_000
_NS_LIMIT = 10**15  # eleven days
_SHIPPED = Path(__file__).parent.parent / "figures" / "traces"


def load_timeline(path: str | Path) -> Timeline:
    """Read a timeline: an Nsight Systems SQLite export, a torch.profiler trace, or labkit's own.

    Raises LabError in one line for a file that is none of these, empty, damaged or too large.
    """
    with _no_collection():
        return _load(Path(path))


@contextmanager
def _no_collection() -> Iterator[None]:
    """Pause the garbage collector, which would walk through the growing trace over and over."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _load(path: Path) -> Timeline:
    try:
        if path.exists() and not path.is_file():
            raise LabError(f"{str(path)!r} is not a file")
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(16)
    except (OSError, ValueError) as error:  # ValueError: a path with a null in it
        reason = getattr(error, "strerror", error)
        raise LabError(f"cannot read the trace {str(path)!r}: {reason}") from None
    if size == 0:
        raise LabError(f"the trace {str(path)!r} is empty")
    if head == b"SQLite format 3\0":
        return read_nsight(path)
    if path.suffix == ".nsys-rep":
        raise LabError(
            f"{str(path)!r} is a report: export it with nsys export --type=sqlite, and give that"
        )
    if head[:2] == b"\x1f\x8b":
        raise LabError(f"{str(path)!r} is compressed: gunzip it first")
    if size > _SIZE_LIMIT_BYTES:
        raise LabError(f"the trace {str(path)!r} is larger than {_SIZE_LIMIT_BYTES:,} bytes")
    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        raise LabError(
            f"{str(path)!r} is no trace: neither an SQLite export of Nsight Systems nor whole JSON"
        ) from None
    content = content if isinstance(content, dict) else {}
    try:
        if content.get("labkit_timeline") == 1:
            return _from_compact(content)
        if "labkit" in content:
            raise LabError("it was written for Perfetto: read the .json beside it")
        if isinstance(content.get("traceEvents"), list):
            return read_torch_trace(content)
    except LabError as error:
        raise LabError(f"cannot read the trace {str(path)!r}: {error}") from None
    raise LabError(f"{str(path)!r} is JSON, but neither torch.profiler's nor labkit's trace")


def shipped_timeline(strategy: str, tool: str = "nsys") -> Timeline:
    """The trace of `strategy` that comes with the labs, captured on an NVIDIA H200.

    `tool` is `nsys` or `torch`. Raises LabError for an unknown strategy.
    """
    path = _SHIPPED / f"h200_{strategy}_{tool}.json"
    if not path.exists():
        raise LabError(f"no trace of {strategy!r} by {tool!r} is shipped in {str(_SHIPPED)!r}")
    return load_timeline(path)


def save_timeline(timeline: Timeline, path: str | Path) -> Path:
    """Write `timeline` as compact JSON, which `load_timeline` reads; columns, times in ns."""
    names = sorted({clean(span.name) for span in timeline.spans})
    number = {name: place for place, name in enumerate(names)}
    lanes = []
    for lane in timeline.lanes:
        spans = timeline.lane(lane)
        columns = {
            "lane": lane,
            "name": [number[clean(span.name)] for span in spans],
            "start_ns": [round(span.start * 1e9) for span in spans],
            "duration_ns": [round(span.seconds * 1e9) for span in spans],
        }
        for column in ("batch", "bytes", "pinned"):
            values = [getattr(span, column) for span in spans]
            if column != "pinned":
                values = [whole(value) for value in values]
            if any(value is not None for value in values):
                columns[column] = values
        lanes.append(columns)
    content = {
        "labkit_timeline": 1,
        "source": timeline.source,
        "device": timeline.device,
        "strategy": clean(timeline.strategy),
        "job": clean(timeline.job),
        "versions": timeline.versions,
        "notes": timeline.notes,
        "names": names,
        "lanes": lanes,
    }
    return write_json(content, path, "trace", indent=None)


def _from_compact(content: dict) -> Timeline:
    device, names, lanes = content.get("device"), content.get("names"), content.get("lanes")
    texts = [content.get(key) for key in ("source", "strategy", "job")]
    versions, notes = content.get("versions"), content.get("notes")
    device_texts = [device.get("kind"), device.get("name")] if isinstance(device, dict) else [None]
    if not (
        all(isinstance(text, str) and len(text) < 500 for text in [*texts, *device_texts])
        and device["kind"] in ("cuda", "emulated", "predicted")
        and isinstance(device.get("profile"), str | None)
        and isinstance(versions, dict)
        and all(isinstance(value, str) for value in versions.values())
        and isinstance(notes, list)
        and all(isinstance(note, str) for note in notes)
        and isinstance(names, list)
        and all(isinstance(name, str) and len(name) <= 500 for name in names)
        and isinstance(lanes, list)
        and len(lanes) <= _LANES_LIMIT
    ):
        raise LabError("its description is damaged")
    spans = []
    for columns in lanes:
        spans += _lane_from_compact(columns, names)
        if len(spans) > _SPANS_LIMIT:
            raise LabError(f"it has more than {_SPANS_LIMIT:,} spans")
    device = {key: device.get(key) for key in ("kind", "name", "profile")}
    return Timeline(spans, texts[0], device, texts[1], texts[2], versions, notes)


def _lane_from_compact(columns, names: list[str]) -> list[Span]:
    lane = columns.get("lane") if isinstance(columns, dict) else None
    if not isinstance(lane, str) or len(lane) > 100:
        raise LabError("one of its lanes is damaged")
    count = len(columns["name"]) if isinstance(columns.get("name"), list) else 0

    def column(key: str, fits: Callable, optional: bool = False) -> list:
        values = columns.get(key)
        if optional and values is None:
            return [None] * count
        if not isinstance(values, list) or len(values) != count:
            raise LabError(f"lane {lane!r} has {count} spans and a damaged column {key!r}")
        for value in values:
            if not (fits(value) or (optional and value is None)):
                raise LabError(f"lane {lane!r} has {str(value)[:50]!r} in column {key!r}")
        return values

    def below(limit: int) -> Callable:
        return lambda value: type(value) is int and 0 <= value < limit

    rows = zip(
        column("name", below(len(names))),
        column("start_ns", below(_NS_LIMIT)),
        column("duration_ns", below(_NS_LIMIT)),
        column("batch", below(2**62), optional=True),
        column("bytes", below(2**62), optional=True),
        column("pinned", lambda value: type(value) is bool, optional=True),
        strict=True,
    )
    return [
        Span(lane, names[name], start / 1e9, (start + duration) / 1e9, batch, nbytes, pinned)
        for name, start, duration, batch, nbytes, pinned in rows
    ]


def export_perfetto(timeline: Timeline, path: str | Path) -> Path:
    """Write `timeline` for https://ui.perfetto.dev and chrome://tracing."""
    events = [{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": timeline.title()}}]
    threads = {lane: place for place, lane in enumerate(timeline.lanes)}
    for lane, place in threads.items():
        base = {"ph": "M", "pid": 0, "tid": place}
        events.append({**base, "name": "thread_name", "args": {"name": lane}})
        events.append({**base, "name": "thread_sort_index", "args": {"sort_index": place}})
    for span in timeline.spans:
        known = {"batch": span.batch, "bytes": span.bytes, "page-locked": span.pinned}
        known = {key: value for key, value in known.items() if value is not None}
        if span.bytes and span.seconds:
            known["GB/s"] = round(span.bytes / span.seconds / 1e9, 2)
        events.append(
            {
                "ph": "X", "pid": 0, "tid": threads[span.lane], "name": span.name,
                "cat": span.stage, "ts": round(span.start * 1e6, 3),
                "dur": round(span.seconds * 1e6, 3), "args": known,
            }
        )  # fmt: skip
    content = {"labkit": timeline.source, "displayTimeUnit": "ms", "traceEvents": events}
    return write_json(content, path, "trace", indent=None)
