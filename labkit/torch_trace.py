"""Read what torch.profiler exports: `profile.export_chrome_trace(FILE)`.

The format is Chrome's trace event format. The categories of kernels, copies and ranges are what
torch 2.8 to 2.14 write; they are documented nowhere.
"""

import re
from collections import Counter
from functools import lru_cache

from .errors import LabError
from .timeline import Launched, Span, Timeline, clean, whole, with_batches

_CALLS = {"cuda_runtime", "cuda_driver"}
_WANTED = {"kernel", "gpu_memset", "gpu_memcpy", "user_annotation", *_CALLS}
_LANES = {"DtoH": "copy", "HtoD": "upload"}
_US_LIMIT = 1e18


def read_torch_trace(trace: dict) -> Timeline:
    """The timeline of a parsed trace. A range's batch is its place among those of its name.

    Raises LabError when it has neither kernels nor copies nor ranges, or is damaged.
    """
    found = {category: [] for category in _WANTED}
    for event in trace["traceEvents"]:
        if isinstance(event, dict) and event.get("ph") == "X":
            category = event.get("cat")
            if isinstance(category, str) and category in found:
                found[category].append(event)
    calls = [event for category in _CALLS for event in found[category]]
    queued = {_argument(call, "correlation"): _times(call)[0] for call in calls}
    queued.pop(None, None)
    host = _ranges(found["user_annotation"], Counter(_thread(call) for call in calls))
    device = [_launched("compute", _short(_name(kernel)), kernel, queued) for kernel in
              found["kernel"]]  # fmt: skip
    device += [_launched("compute", "memset", event, queued) for event in found["gpu_memset"]]
    device += [_copy(event, queued) for event in found["gpu_memcpy"]]
    if not (device or host):
        raise LabError("the trace has neither kernels nor copies nor ranges: profile a run in it")
    notes = []
    if not device:
        notes.append("no kernels and no copies in this trace: it was made without CUDA")
    if not host:
        notes.append("no ranges in this trace: the lane of the host is empty")
    runtime = trace.get("cuda_runtime_version")
    return Timeline(
        host + with_batches(device, [span for span in host if span.lane == "host"]),
        source="torch.profiler",
        device={"kind": "cuda", "name": _gpu(trace), "profile": None},
        versions={"CUDA": f"{runtime // 1000}.{runtime % 1000 // 10}"}
        if isinstance(runtime, int)
        else {},
        notes=notes,
    )


def _ranges(events: list[dict], calls: Counter) -> list[Span]:
    used = Counter(_thread(event) for event in events)
    if not used:
        return []
    host = max(used, key=lambda thread: (calls[thread], used[thread]))
    others = sorted((thread for thread in used if thread != host), key=str)
    lanes = {host: "host"} | {thread: f"thread {n}" for n, thread in enumerate(others)}
    spans, seen = [], Counter()
    for event in sorted(events, key=_times):
        name, lane = _name(event), lanes[_thread(event)]
        if not name.startswith("ProfilerStep"):  # the profiler's own, around everything
            spans.append(Span(lane, clean(name), *_times(event), seen[lane, name]))
            seen[lane, name] += 1
    return spans


def _copy(event: dict, queued: dict) -> Launched:
    """A copy by its name, such as `Memcpy DtoH (Device -> Pinned)`."""
    name = _name(event)
    lane = next((lane for kind, lane in _LANES.items() if kind in name), None)
    if lane is None:
        return _launched("compute", "memcpy on the device", event, queued)
    pinned = True if "Pinned" in name else False if "Pageable" in name else None
    nbytes = _argument(event, "bytes")
    return _launched(lane, lane, event, queued, whole(nbytes), pinned)


def _launched(lane, name, event, queued, nbytes=None, pinned=None) -> Launched:
    span = Span(lane, name, *_times(event), None, nbytes, pinned)
    return Launched(span, queued.get(_argument(event, "correlation")))


def _argument(event: dict, name: str):
    arguments = event.get("args")
    value = arguments.get(name) if isinstance(arguments, dict) else None
    return value if isinstance(value, int) else None


def _thread(event: dict) -> tuple:
    return str(event.get("pid")), str(event.get("tid"))


def _name(event: dict) -> str:
    return str(event.get("name"))[:2000]  # of a kernel: shortened further


def _times(event: dict) -> tuple[float, float]:
    """Start and end in seconds; the file has microseconds."""
    start, duration = event.get("ts"), event.get("dur")
    numbers = type(start) in (int, float) and type(duration) in (int, float)
    if not (numbers and abs(start) < _US_LIMIT and 0 <= duration < _US_LIMIT):
        times = f"starts at {str(start)[:30]} and lasts {str(duration)[:30]} µs"
        raise LabError(f"an event in this trace {times}: it is damaged")
    return start / 1e6, (start + duration) / 1e6


@lru_cache
def _short(kernel: str) -> str:
    """`void ns::name<float, 4>(float*)` as `name`."""
    plain = re.sub(r"^void |\(anonymous namespace\)::", "", kernel)
    return clean(re.split(r"[<(]", plain, maxsplit=1)[0].split("::")[-1].strip()) or "kernel"


def _gpu(trace: dict) -> str:
    properties = trace.get("deviceProperties")
    first = properties[0] if isinstance(properties, list) and properties else None
    name = first.get("name") if isinstance(first, dict) else None
    return clean(name) if name else "a GPU that the trace does not name"
