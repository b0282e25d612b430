"""Trace files: what the readers find in real exports, and what they say of everything else."""

import gc
import gzip
import json
import random
import sqlite3
from pathlib import Path

import pytest

from labkit import LabError, load_timeline, summarize
from labkit.pipelines import STRATEGIES
from labkit.timeline import Span, Timeline
from labkit.trace_files import export_perfetto, save_timeline, shipped_timeline

PAGE_LOCKED = ("pinned_async", "stream_pipeline")
DATA = Path(__file__).parent / "data"
NSIGHT, WORKERS, TORCH = (
    "nsys_h200_sample.sqlite",
    "nsys_h200_workers.sqlite",
    "torch_h200_sample.json",
)


@pytest.fixture
def real(tmp_path):
    """Unpacks one of the real exports and gives its path."""

    def unpack(name: str) -> Path:
        path = tmp_path / name
        path.write_bytes(gzip.decompress((DATA / f"{name}.gz").read_bytes()))
        return path

    return unpack


def change(path: Path, *statements: str) -> Path:
    database = sqlite3.connect(path)
    for statement in statements:
        database.execute(statement)
    database.commit()
    database.close()
    return path


def query(path: Path, statement: str) -> list:
    database = sqlite3.connect(path)
    rows = database.execute(statement).fetchall()
    database.close()
    return rows


def error_of(path: Path) -> str:
    with pytest.raises(LabError) as caught:
        load_timeline(path)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 400
    return message


# Nsight Systems.


def test_nsight_every_kernel_and_copy_is_there(real):
    path = real(NSIGHT)
    timeline = load_timeline(path)
    (kernels,), (sets,) = (
        query(path, f"SELECT count(*) FROM CUPTI_ACTIVITY_KIND_{kind}")[0]
        for kind in ("KERNEL", "MEMSET")
    )
    assert len(timeline.lane("compute")) == kernels + sets
    expected = query(path, "SELECT bytes, (end - start) / 1e9 FROM CUPTI_ACTIVITY_KIND_MEMCPY")
    found = [(span.bytes, pytest.approx(span.seconds, abs=2e-9)) for span in timeline.lane("copy")]
    assert sorted(expected) == found or expected == found
    assert {span.pinned for span in timeline.lane("copy")} == {False}
    assert timeline.device == {"kind": "cuda", "name": "NVIDIA H200", "profile": None}
    assert timeline.versions == {"Nsight Systems": "2025.3.2.0"}
    assert timeline.notes == []


def test_nsight_ranges_have_inline_or_interned_texts(real):
    inline = [span.name for span in load_timeline(real(NSIGHT)).lane("host")]
    assert inline == ["forward", "copy"] * 4
    path = real(WORKERS)
    assert query(
        path, "SELECT count(*) FROM NVTX_EVENTS WHERE eventType = 59 AND text NOT NULL"
    ) == [(0,)]
    host = load_timeline(path).lane("host")
    assert [span.name for span in host] == ["upload", "forward", "copy", "copy2"] * 3
    assert [span.batch for span in host] == [batch for batch in range(3) for _ in range(4)]


def test_nsight_copies_say_whether_the_host_side_was_page_locked(real):
    timeline = load_timeline(real(WORKERS))
    assert [span.pinned for span in timeline.lane("copy")] == [False, True] * 3
    assert [span.pinned for span in timeline.lane("upload")] == [True] * 3
    rates = [span.bytes / span.seconds / 1e9 for span in timeline.lane("copy")]
    assert all(rate < 2 for rate in rates[::2]) and all(rate > 50 for rate in rates[1::2])


def test_nsight_kernels_belong_to_the_batch_that_queued_them(real):
    timeline = load_timeline(real(WORKERS))
    assert {span.batch for span in timeline.lane("compute")} == {0, 1, 2}
    assert [span.batch for span in timeline.lane("upload")] == [0, 1, 2]
    for span in timeline.lane("compute"):
        queued = [r for r in timeline.lane("host") if (r.batch, r.name) == (span.batch, "forward")]
        assert span.start > queued[0].start


def test_nsight_other_processes_are_workers(real):
    timeline = load_timeline(real(WORKERS))
    assert timeline.lanes == ["host", "compute", "upload", "copy", "worker 0", "worker 1"]
    process = timeline.lane("worker 0") + timeline.lane("worker 1")
    assert sorted(span.batch for span in process) == [0, 1, 2, 3]
    assert all(span.name == "process" and 0.01 <= span.seconds < 0.011 for span in process)


@pytest.mark.parametrize("statement", ["DROP TABLE NVTX_EVENTS", "DELETE FROM NVTX_EVENTS"])
def test_nsight_without_ranges_still_gives_the_gpu(real, statement):
    whole = summarize(load_timeline(real(WORKERS)))
    timeline = load_timeline(change(real(WORKERS), statement))
    assert timeline.lanes == ["compute", "upload", "copy"]
    assert "no NVTX ranges" in timeline.notes[0]
    assert summarize(timeline).copies == [
        copies._replace(seconds=pytest.approx(copies.seconds)) for copies in whole.copies
    ]


def test_nsight_older_schemas_lack_tables_and_columns(real):
    path = change(
        real(WORKERS),
        "ALTER TABLE CUPTI_ACTIVITY_KIND_MEMCPY DROP COLUMN dstKind",
        "ALTER TABLE CUPTI_ACTIVITY_KIND_MEMCPY DROP COLUMN srcKind",
        "ALTER TABLE NVTX_EVENTS DROP COLUMN int64Value",
        "DROP TABLE TARGET_INFO_GPU",
        "DROP TABLE META_DATA_EXPORT",
        "DROP TABLE CUPTI_ACTIVITY_KIND_RUNTIME",
        "DROP TABLE CUPTI_ACTIVITY_KIND_MEMSET",
    )
    timeline = load_timeline(path)
    assert timeline.lanes == ["host", "compute", "upload", "copy", "worker 0", "worker 1"]
    assert {span.pinned for span in timeline.lane("copy")} == {None}
    assert {span.batch for span in timeline.spans} == {None}
    assert "does not name" in timeline.device["name"] and timeline.versions == {}
    assert timeline.notes == ["no CUDA calls in this report: kernels and copies have no batch"]


def test_nsight_newer_schemas_have_more(real):
    path = change(
        real(NSIGHT),
        "ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL ADD COLUMN novelty INTEGER",
        "CREATE TABLE CUPTI_ACTIVITY_KIND_NOVELTY (start INTEGER, end INTEGER)",
    )
    assert len(load_timeline(path).lane("compute")) == 956


def test_nsight_nothing_in_it(real):
    path = change(
        real(WORKERS),
        *(
            f"DROP TABLE {name}"
            for name in ("NVTX_EVENTS", "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_MEMSET",
                         "CUPTI_ACTIVITY_KIND_MEMCPY")
        ),
    )  # fmt: skip
    assert "--trace=cuda,nvtx" in error_of(path)
    empty = path.with_name("other.sqlite")
    change(empty, "CREATE TABLE people (name TEXT)")
    assert "neither kernels nor copies" in error_of(empty)


@pytest.mark.timeout(30, method="signal")
def test_nsight_a_view_that_never_ends_is_not_asked(real):
    endless = "WITH RECURSIVE n(start) AS (SELECT 1 UNION ALL SELECT start + 1 FROM n)"
    path = change(
        real(WORKERS),
        "DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL",
        f"CREATE VIEW CUPTI_ACTIVITY_KIND_KERNEL AS {endless} SELECT start, start AS end FROM n",
    )
    assert all(span.name == "memset" for span in load_timeline(path).lane("compute"))


@pytest.mark.parametrize(
    "values", ["start = 'soon'", "end = start - 5", "end = 1.5", "start = x'00ff'", "end = NULL"]
)
def test_nsight_damaged_times(real, values):
    path = real(WORKERS)
    change(path, "CREATE TABLE copied AS SELECT * FROM CUPTI_ACTIVITY_KIND_MEMCPY",
           "DROP TABLE CUPTI_ACTIVITY_KIND_MEMCPY",
           "ALTER TABLE copied RENAME TO CUPTI_ACTIVITY_KIND_MEMCPY",
           f"UPDATE CUPTI_ACTIVITY_KIND_MEMCPY SET {values}")  # fmt: skip
    assert "damaged" in error_of(path)


@pytest.mark.parametrize("share", [0.001, 0.01, 0.3, 0.9, 0.999])
def test_nsight_truncated(real, share):
    path = real(NSIGHT)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    assert str(path) in error_of(path)


@pytest.mark.parametrize("name", [NSIGHT, TORCH])
def test_flipped_bytes_give_one_line_or_a_timeline(real, name):
    content = real(name).read_bytes()
    dice = random.Random(0)
    for trial in range(60):
        damaged = bytearray(content)
        for _ in range(dice.choice([1, 10, 1000])):
            damaged[dice.randrange(len(damaged))] = dice.randrange(256)
        path = real(name)
        path.write_bytes(damaged)
        try:
            assert isinstance(load_timeline(path), Timeline), trial
        except LabError as error:
            assert "\n" not in str(error), trial


# torch.profiler.


def test_torch_every_kernel_and_copy_is_there(real):
    path = real(TORCH)
    events = json.loads(path.read_text())["traceEvents"]
    timeline = load_timeline(path)
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memset")]
    assert len(timeline.lane("compute")) == len(kernels)
    assert [
        (s.lane, s.pinned, s.bytes) for s in timeline.spans if s.lane in ("copy", "upload")
    ] == [
        ("upload", True, 12582912),
        ("copy", False, 88080384),
        ("copy", True, 88080384),
    ] * 2
    assert timeline.device["name"] == "NVIDIA H200"
    assert timeline.versions == {"CUDA": "13.0"}


def test_torch_ranges_and_what_they_queued(real):
    timeline = load_timeline(real(TORCH))
    host = [(span.name, span.batch) for span in timeline.lane("host")]
    names = ("upload", "forward", "copy", "copy2")
    assert host == [(name, batch) for batch in (0, 1) for name in names]
    assert [span.batch for span in timeline.lane("copy")] == [0, 0, 1, 1]
    assert {span.batch for span in timeline.lane("compute")} == {0, 1}


def test_torch_kernels_have_short_names(real):
    names = {span.name for span in load_timeline(real(TORCH)).lane("compute")}
    assert "nchwToNhwcKernel" in names
    assert not any(mark in name for name in names for mark in "<(: ")


def test_torch_without_cuda_or_without_ranges_says_so(real):
    path = real(TORCH)
    trace = json.loads(path.read_text())
    events = trace["traceEvents"]
    for kept, lanes, note in (
        ({"user_annotation"}, ["host"], "without CUDA"),
        ({"kernel"}, ["compute"], "no ranges"),
    ):
        trace["traceEvents"] = [event for event in events if event.get("cat") in kept]
        path.write_text(json.dumps(trace))
        timeline = load_timeline(path)
        assert timeline.lanes == lanes
        assert note in timeline.notes[0]
    trace["traceEvents"] = []
    path.write_text(json.dumps(trace))
    assert "neither kernels nor copies nor ranges" in error_of(path)


def test_torch_the_profiler_s_own_steps_are_no_stage(real):
    path = real(TORCH)
    trace = json.loads(path.read_text())
    first = next(event for event in trace["traceEvents"] if event.get("cat") == "user_annotation")
    trace["traceEvents"].append({**first, "name": "ProfilerStep#2", "dur": 1e6})
    path.write_text(json.dumps(trace))
    assert "ProfilerStep#2" not in {span.name for span in load_timeline(path).spans}


@pytest.mark.parametrize(
    "event",
    [
        {"dur": 1.0},
        {"ts": 1.0},
        {"ts": "now", "dur": 1.0},
        {"ts": 1.0, "dur": -1.0},
        {"ts": True, "dur": 1.0},
        {"ts": 10**400, "dur": 1},
        {"ts": 1.0, "dur": [1]},
    ],
)
def test_torch_damaged_events(tmp_path, event):
    path = tmp_path / "trace.json"
    path.write_text(
        json.dumps({"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", **event}]})
    )
    assert "damaged" in error_of(path)


# labkit's own.


def example() -> Timeline:
    return Timeline(
        [
            Span("host", "forward", 0.0, 0.1, batch=0),
            Span("compute", "conv<4>", 0.05, 0.15, batch=0),
            Span("copy", "copy", 0.15, 0.25, batch=0, bytes=1000, pinned=True),
            Span("worker 10", "process", 0.25, 0.5, batch=0),
            Span("worker 2", "process", 0.3, 0.5, batch=1),
        ],
        source="emulated",
        device={"kind": "emulated", "name": "emulated GPU (classroom)", "profile": "classroom"},
        strategy="pinned_async",
        job="tiny, batches of 8",
        versions={"torch": "2.14"},
        notes=["made for a test"],
    )


def test_a_timeline_survives_its_file(tmp_path):
    path = save_timeline(example(), tmp_path / "new folder" / "trace.json")
    again = load_timeline(path)
    assert again == example()
    assert again.title() == example().title()


def test_every_real_export_survives_labkit_s_own_form(real, tmp_path):
    for name in (NSIGHT, WORKERS, TORCH):
        timeline = load_timeline(real(name))
        again = load_timeline(save_timeline(timeline, tmp_path / "compact.json"))
        assert len(again.spans) == len(timeline.spans)
        assert summarize(again).busy == pytest.approx(summarize(timeline).busy, rel=1e-5)


DAMAGES = [
    ("device", None),
    ("device", {"kind": "cuda"}),
    ("device", {"kind": "quantum", "name": "x", "profile": None}),
    ("strategy", 5),
    ("source", "x" * 1000),
    ("versions", {"torch": 3}),
    ("notes", "no"),
    ("names", [1]),
    ("lanes", None),
    ("lanes", [None]),
    ("lanes", [{"lane": 3}]),
    ("lanes", [{"lane": "host", "name": [0]}]),
    ("lanes", [{"lane": "host", "name": [9], "start_ns": [0], "duration_ns": [1]}]),
    ("lanes", [{"lane": "host", "name": [-1], "start_ns": [0], "duration_ns": [1]}]),
    ("lanes", [{"lane": "host", "name": [0], "start_ns": [0, 1], "duration_ns": [1]}]),
    ("lanes", [{"lane": "host", "name": [0], "start_ns": [0.5], "duration_ns": [1]}]),
    ("lanes", [{"lane": "host", "name": [0], "start_ns": [0], "duration_ns": [10**30]}]),
    ("lanes", [{"lane": "host", "name": [0], "start_ns": [0], "duration_ns": [1], "bytes": 1}]),
    ("lanes", [{"lane": "host", "name": [0], "start_ns": [0], "duration_ns": [1], "pinned": [7]}]),
    ("lanes", [{"lane": "host", "name": [0], "start_ns": [0], "duration_ns": [1], "pinned": 7}]),
    ("lanes", [{"lane": "host", "name": 5, "start_ns": [0], "duration_ns": [1]}]),
    ("lanes", [{"lane": "host", "name": "ab", "start_ns": [0], "duration_ns": [1]}]),
]


@pytest.mark.parametrize(("key", "value"), DAMAGES)
def test_a_damaged_file_of_ours_gives_one_line(tmp_path, key, value):
    path = save_timeline(example(), tmp_path / "trace.json")
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, key: value}))
    assert "damaged" in error_of(path) or "lane" in error_of(path)
    del content[key]
    path.write_text(json.dumps(content))
    assert "damaged" in error_of(path)


def test_perfetto_gets_named_lanes_and_all_spans(tmp_path):
    path = export_perfetto(example(), tmp_path / "trace.perfetto.json")
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert [names[tid] for tid in sorted(names)] == example().lanes
    assert example().lanes[-2:] == ["worker 2", "worker 10"]
    assert "EMULATED" in events[0]["args"]["name"]
    drawn = [(names[e["tid"]], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    expected = [
        (s.lane, s.name, pytest.approx(s.start * 1e6), pytest.approx(s.seconds * 1e6))
        for s in example().spans
    ]
    assert drawn == expected
    [copy] = [e for e in events if e.get("cat") == "copy"]
    assert copy["args"] == {"batch": 0, "bytes": 1000, "page-locked": True, "GB/s": 0.0}
    assert "read the .json beside it" in error_of(path)


# Everything else.


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"not a trace", "is no trace"),
        (b"\x00\xff\xfe" * 100, "is no trace"),
        (b"SQLite format 3\0 and then nothing", "truncated"),
        (b'{"traceEvents": [', "is no trace"),
        (b'{"traceEvents": [{"ph": NaN}]}', "is no trace"),
        (b"[" * 100_000, "is no trace"),
        (b"[]", "neither"),
        (b"3", "neither"),
        (b"{}", "neither"),
        (b'{"traceEvents": {}}', "neither"),
        (b'{"traceEvents": [1, null, "x", []]}', "neither"),
        (b"\x1f\x8b\x08", "gunzip"),
    ],
)
def test_other_files_give_one_line(tmp_path, content, said):
    path = tmp_path / "a file"
    path.write_bytes(content)
    assert said in error_of(path)


def test_files_that_cannot_be_read_give_one_line(tmp_path):
    assert "No such file" in error_of(tmp_path / "missing.json")
    assert "is not a file" in error_of(tmp_path)
    report = tmp_path / "run.nsys-rep"
    report.write_bytes(b"anything")
    assert "nsys export --type=sqlite" in error_of(report)
    with (tmp_path / "huge.json").open("wb") as file:
        file.write(b"{")
        file.truncate(2**40)
    assert "larger than" in error_of(tmp_path / "huge.json")


def test_a_trace_that_cannot_be_written_gives_one_line(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(LabError, match="cannot write the trace"):
        save_timeline(example(), tmp_path / "file" / "trace.json")
    with pytest.raises(LabError, match="cannot write the trace"):
        export_perfetto(example(), tmp_path / "file" / "trace.json")


def test_a_path_with_odd_letters_is_read(real, tmp_path):
    odd = tmp_path / "träce 100% #1?mode=rwc.sqlite"
    real(NSIGHT).rename(odd)
    assert load_timeline(odd).lanes == ["host", "compute", "copy"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [odd.name]


# Those that come with the labs.


@pytest.mark.parametrize("tool", ["nsys", "torch"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_trace_of_every_strategy_is_shipped(strategy, tool):
    timeline = shipped_timeline(strategy, tool)
    assert timeline.strategy == strategy
    assert timeline.device == {"kind": "cuda", "name": "NVIDIA H200", "profile": None}
    assert timeline.source == {"nsys": "Nsight Systems", "torch": "torch.profiler"}[tool]
    assert timeline.lanes[:4] == ["host", "compute", "upload", "copy"]
    assert any(lane.startswith("worker") for lane in timeline.lanes) == (strategy != "sequential")
    forwards = {span.batch for span in timeline.lane("compute")}
    assert forwards == set(range(20)) == {span.batch for span in timeline.lane("copy")}
    path = Path(__file__).parent.parent / "figures" / "traces" / f"h200_{strategy}_{tool}.json"
    assert path.stat().st_size < 300_000


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_profilers_agree_on_the_shipped_runs(strategy):
    """Separate runs: in each the copies to pageable memory have a speed of their own."""
    nsight, torch = (
        summarize(timeline, timeline.steady())
        for timeline in (shipped_timeline(strategy, tool) for tool in ("nsys", "torch"))
    )
    assert abs(nsight.busy - torch.busy) < 0.03
    page_locked = [[c.gbps for c in m.copies if c.lane == "copy" and c.pinned]
                   for m in (nsight, torch)]  # fmt: skip
    assert [len(found) for found in page_locked] == [strategy in PAGE_LOCKED] * 2
    if strategy in PAGE_LOCKED:
        assert page_locked[0] == pytest.approx(page_locked[1], rel=0.03)


@pytest.mark.parametrize("tool", ["nsys", "torch"])
def test_what_the_shipped_runs_show(tool):
    first, last = (
        summarize(timeline, timeline.steady())
        for timeline in (shipped_timeline(name, tool) for name in ("sequential", "stream_pipeline"))
    )
    assert first.busy <= 0.10 and first.hidden == 0
    assert last.busy >= 0.97 and last.hidden >= 0.95


def test_an_unknown_shipped_trace():
    with pytest.raises(LabError, match="no trace of 'parallel'"):
        shipped_timeline("parallel")


# What nobody's profiler writes, and somebody's file has.


@pytest.mark.parametrize(
    ("table", "change_to"),
    [
        ("CUPTI_ACTIVITY_KIND_RUNTIME", "globalTid = 'x'"),
        ("CUPTI_ACTIVITY_KIND_RUNTIME", "start = x'00'"),
        ("NVTX_EVENTS", "globalTid = 1.5"),
        ("NVTX_EVENTS", "int64Value = 'x'"),
        ("CUPTI_ACTIVITY_KIND_MEMCPY", "bytes = 'many'"),
    ],
)
def test_nsight_columns_of_another_type_are_damage(real, table, change_to):
    path = change(
        real(WORKERS),
        f"CREATE TABLE copied AS SELECT * FROM {table}",
        f"DROP TABLE {table}",
        f"ALTER TABLE copied RENAME TO {table}",
        f"UPDATE {table} SET {change_to}",
    )
    assert "damaged" in error_of(path)


@pytest.mark.parametrize("category", [[], {}, 3, None])
def test_torch_events_of_an_odd_category_are_none_of_ours(tmp_path, category):
    event = {"ph": "X", "ts": 1, "dur": 1, "name": "k"}
    events = [{**event, "cat": category}, {**event, "cat": "kernel"}]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    assert len(load_timeline(path).spans) == 1


def test_nsight_ranges_within_a_range_do_not_hide_its_batch(real):
    path = real(WORKERS)
    columns = "start + 1000 AS start, end - 1000 AS end, eventType, globalTid, 'a library' AS text"
    forward = "SELECT id FROM StringIds WHERE value = 'forward'"
    row = f"SELECT {columns} FROM NVTX_EVENTS WHERE textId IN ({forward})"
    change(path, f"INSERT INTO NVTX_EVENTS (start, end, eventType, globalTid, text) {row}")
    timeline = load_timeline(path)
    assert sum(span.name == "a library" for span in timeline.lane("host")) == 3
    assert {span.batch for span in timeline.lane("compute")} == {0, 1, 2}


def test_nsight_ranges_from_start_to_end_count_too(real):
    path = change(real(NSIGHT), "UPDATE NVTX_EVENTS SET eventType = 60")
    assert [span.name for span in load_timeline(path).lane("host")] == ["forward", "copy"] * 4


def test_nsight_a_graph_is_work(real):
    path = change(
        real(WORKERS),
        "ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL RENAME TO CUPTI_ACTIVITY_KIND_GRAPH_TRACE",
    )
    graphs = [s for s in load_timeline(path).lane("compute") if s.name == "CUDA graph"]
    assert len(graphs) == 810 and {span.batch for span in graphs} == {0, 1, 2}


def test_nsight_the_host_is_the_thread_that_gives_the_gpu_its_work(real):
    """Another thread may have more ranges."""
    path = real(NSIGHT)
    row = "SELECT start, end, eventType, globalTid + 1, text, textId FROM NVTX_EVENTS"
    columns = "(start, end, eventType, globalTid, text, textId)"
    change(path, *[f"INSERT INTO NVTX_EVENTS {columns} {row}"] * 3)
    timeline = load_timeline(path)
    assert len(timeline.lane("host")) == 8 < len(timeline.lane("thread 0"))


def test_torch_the_host_is_the_thread_that_gives_the_gpu_its_work(real):
    path = real(TORCH)
    trace = json.loads(path.read_text())
    ranges = [e for e in trace["traceEvents"] if e.get("cat") == "user_annotation"]
    trace["traceEvents"] += [{**event, "tid": 1} for event in ranges] * 3
    path.write_text(json.dumps(trace))
    timeline = load_timeline(path)
    assert len(timeline.lane("host")) == 8 < len(timeline.lane("thread 0"))


def test_what_annotate_was_given_is_saved_so_that_it_can_be_read(tmp_path):
    import numpy as np

    for batch, read in ((np.int64(3), 3), (-1, None), ("a", None), (1.5, None), (True, None)):
        spans = [Span("host", "x" * 5000, 0.0, 1.0, batch), Span("copy", "\ud800", 0.0, 1.0, 1, -5)]
        timeline = Timeline(spans, "emulated", example().device, "s" * 999, "j" * 999)
        again = load_timeline(save_timeline(timeline, tmp_path / "trace.json"))
        assert again.lane("host")[0].batch == read
        assert again.lane("copy")[0].bytes is None


def test_more_than_can_be_meant_is_refused(real, monkeypatch, tmp_path):
    monkeypatch.setattr("labkit.nsight._ROWS_LIMIT", 100)
    assert "more than 100 rows" in error_of(real(NSIGHT))
    monkeypatch.setattr("labkit.trace_files._SPANS_LIMIT", 4)
    path = save_timeline(example(), tmp_path / "trace.json")
    assert "more than 4 spans" in error_of(path)
    spans = [Span(f"worker {number}", "process", 0.0, 1.0) for number in range(1001)]
    save_timeline(Timeline(spans, "emulated", example().device), path)
    assert "damaged" in error_of(path)


def test_a_path_with_a_null_gives_one_line():
    with pytest.raises(LabError, match="cannot read"):
        load_timeline("a\0b")
    with pytest.raises(LabError, match="cannot write"):
        save_timeline(example(), "a\0b")


def test_reading_leaves_the_garbage_collector_as_it_was(tmp_path):
    path = save_timeline(example(), tmp_path / "trace.json")
    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        try:
            load_timeline(path)
            assert gc.isenabled() == enabled
        finally:
            gc.enable()
