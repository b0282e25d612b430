"""Read what Nsight Systems exports: `nsys export --type=sqlite`.

The tables and their columns are described in the Nsight Systems user guide, *Exporter schema*:
https://docs.nvidia.com/nsight-systems/UserGuide/index.html. Versions differ in what they have;
what is missing is left out and said in the timeline's notes. Of the machine that was recorded
nothing is read but the GPU's name.
"""

import contextlib
import sqlite3
from collections import Counter
from pathlib import Path
from types import NoneType

from .errors import LabError
from .timeline import Launched, Span, Timeline, clean, whole, with_batches

_RANGES = (59, 60)  # NvtxPushPopRange, NvtxStartEndRange
_TO_DEVICE, _TO_HOST = 1, 2  # ENUM_CUDA_MEMCPY_OPER
_PAGEABLE, _PINNED = 0, 1  # ENUM_CUDA_MEM_KIND
_PROCESS = ~0xFFFFFF  # a globalTid without its lowest 24 bits, the thread, is its globalPid
_ROWS_LIMIT = 2_000_000  # of one table: more would take gigabytes and minutes
_TEXTS = {"text", "value", "name", "shortName"}  # columns that need not be whole numbers


def read_nsight(path: Path) -> Timeline:
    """The timeline of an SQLite export. Raises LabError in one line for anything else."""
    try:
        with contextlib.closing(_open(path)) as database:
            return _Report(database, path).timeline()
    except (sqlite3.Error, UnicodeError) as error:
        raise LabError(f"cannot read {str(path)!r} as an Nsight Systems export: {error}") from None


def _open(path: Path) -> sqlite3.Connection:
    with path.open("rb") as file:
        header = file.read(100)
    # https://www.sqlite.org/fileformat.html: the size of a page and their number
    page, pages = int.from_bytes(header[16:18]), int.from_bytes(header[28:32])
    if path.stat().st_size < (65536 if page == 1 else page) * pages:
        raise LabError(f"{str(path)!r} is truncated: copy or export it again")
    database = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)
    database.execute("PRAGMA trusted_schema = OFF")
    return database


class _Report:
    def __init__(self, database: sqlite3.Connection, path: Path):
        self._database, self._path = database, path
        # Real tables only: a view can be made to run for ever.
        query = "SELECT name FROM sqlite_master WHERE type = 'table' AND sql LIKE 'CREATE TABLE%'"
        self._tables = {name for (name,) in database.execute(query)}
        self._names = dict(self._rows("StringIds", "id", "value"))

    def timeline(self) -> Timeline:
        ranges = self._ranges()
        calls = self._rows("CUPTI_ACTIVITY_KIND_RUNTIME", "correlationId", "start", "globalTid")
        # Correlation ids are unique within a process.
        queued = {(tid & _PROCESS, call): start for call, start, tid in calls if tid is not None}
        device = [*self._kernels(queued), *self._copies(queued)]
        if not (device or ranges):
            raise LabError(
                f"{str(self._path)!r} has neither kernels nor copies nor NVTX ranges: "
                "record it with nsys profile --trace=cuda,nvtx"
            )
        lanes = _lanes(ranges, Counter(tid for _, _, tid in calls))
        marked = [span._replace(lane=lanes[tid]) for span, tid in ranges]
        notes = []
        if not ranges:
            notes.append("no NVTX ranges in this report: the lanes of host and workers are empty")
        if device and not calls:
            notes.append("no CUDA calls in this report: kernels and copies have no batch")
        return Timeline(
            marked + with_batches(device, [span for span in marked if span.lane == "host"]),
            source="Nsight Systems",
            device={"kind": "cuda", "name": self._gpu(), "profile": None},
            versions=self._versions(),
            notes=notes,
        )

    def _kernels(self, queued: dict) -> list[Launched]:
        columns = "start", "end", "correlationId", "globalPid"
        kernels = self._rows("CUPTI_ACTIVITY_KIND_KERNEL", *columns, "shortName")
        sets = self._rows("CUPTI_ACTIVITY_KIND_MEMSET", *columns)
        # Instead of its kernels, unless nsys was told --cuda-graph-trace=node.
        graphs = self._rows("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", *columns)
        return [
            _launched("compute", name, row, queued)
            for *row, name in [
                *((*row, self._name(name, "kernel")) for *row, name in kernels),
                *((*row, "memset") for row in sets),
                *((*row, "CUDA graph") for row in graphs),
            ]
        ]

    def _copies(self, queued: dict) -> list[Launched]:
        found = []
        for *row, nbytes, kind, source, target in self._rows(
            "CUPTI_ACTIVITY_KIND_MEMCPY", "start", "end", "correlationId", "globalPid",
            "bytes", "copyKind", "srcKind", "dstKind",
        ):  # fmt: skip
            if kind not in (_TO_DEVICE, _TO_HOST):
                found.append(_launched("compute", "memcpy on the device", row, queued))
                continue
            lane, host = ("upload", source) if kind == _TO_DEVICE else ("copy", target)
            pinned = {_PAGEABLE: False, _PINNED: True}.get(host)
            found.append(_launched(lane, lane, row, queued, whole(nbytes), pinned))
        return found

    def _ranges(self) -> list[tuple[Span, int]]:
        """NVTX ranges, each with its thread; their texts inline or as numbers of strings."""
        rows = self._rows(
            "NVTX_EVENTS", "start", "end", "eventType", "globalTid", "text", "textId", "int64Value"
        )
        return [
            (
                Span("", self._name(text or number, "range"), *_seconds(start, end), whole(batch)),
                tid,
            )
            for start, end, kind, tid, text, number, batch in rows
            if kind in _RANGES and end is not None and tid is not None
        ]

    def _name(self, value, otherwise: str) -> str:
        name = self._names.get(value) if isinstance(value, int) else value
        return clean(name) if name else otherwise

    def _gpu(self) -> str:
        names = [name for (name,) in self._rows("TARGET_INFO_GPU", "name") if name]
        return clean(names[0]) if names else "a GPU that the report does not name"

    def _versions(self) -> dict:
        stated = dict(self._rows("META_DATA_EXPORT", "name", "value"))
        version = stated.get("EXPORT_PRODUCT_VERSION")
        return {"Nsight Systems": clean(version)} if version else {}

    def _rows(self, table: str, *columns: str) -> list[tuple]:
        """All rows of a table, None for a column that it lacks; none if there is no such table."""
        if table not in self._tables:
            return []
        present = {row[1] for row in self._database.execute(f"PRAGMA table_info({table})")}
        wanted = ", ".join(_column(name) if name in present else "NULL" for name in columns)
        rows = self._database.execute(f"SELECT {wanted} FROM {table} LIMIT {_ROWS_LIMIT + 1}")
        rows = rows.fetchall()
        if len(rows) > _ROWS_LIMIT:
            raise LabError(
                f"{str(self._path)!r} has more than {_ROWS_LIMIT:,} rows in {table}: "
                "record fewer batches"
            )
        for place, name in enumerate(columns):
            if name not in _TEXTS:
                for row in rows:
                    if type(row[place]) not in (int, NoneType):
                        value = str(row[place])[:30]
                        raise LabError(f"{name} is {value} in {table}: this report is damaged")
        return rows


def _column(name: str) -> str:
    """How to ask for it: of a text no more than a name needs."""
    return f'substr("{name}", 1, 2000)' if name in ("text", "value", "name") else f'"{name}"'


def _launched(lane, name, row, queued, nbytes=None, pinned=None) -> Launched:
    start, end, call, process = row
    moment = queued.get((process, call))
    span = Span(lane, name, *_seconds(start, end), None, nbytes, pinned)
    return Launched(span, None if moment is None else moment / 1e9)


def _seconds(start, end) -> tuple[float, float]:
    if not (isinstance(start, int) and isinstance(end, int) and start <= end):
        times = f"from {str(start)[:30]} to {str(end)[:30]}"
        raise LabError(f"an event in this report lasts {times}: it is damaged")
    return start / 1e9, end / 1e9


def _lanes(ranges: list[tuple[Span, int]], calls: Counter) -> dict[int, str]:
    """Which lane each thread with ranges has: the one that gives the GPU most work is the host,
    other processes are workers."""
    used = Counter(tid for _, tid in ranges)
    if not used:
        return {}
    host = max(used, key=lambda tid: (calls[tid], used[tid]))
    lanes = {host: "host"}
    threads = sorted(tid for tid in used if tid != host and tid & _PROCESS == host & _PROCESS)
    workers = sorted(tid for tid in used if tid & _PROCESS != host & _PROCESS)
    lanes |= {tid: f"thread {number}" for number, tid in enumerate(threads)}
    return lanes | {tid: f"worker {number}" for number, tid in enumerate(workers)}
