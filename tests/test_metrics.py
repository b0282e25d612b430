"""What a timeline says, held against timelines worked out by hand and against counting."""

import io
import random

import pytest

from labkit import metrics_table, summarize
from labkit.metrics import Times
from labkit.timeline import Launched, Span, Timeline, innermost, with_batches

H200 = {"kind": "cuda", "name": "NVIDIA H200", "profile": None}


def timeline(*spans: Span, device=H200, **more) -> Timeline:
    return Timeline(list(spans), source="made up", device=device, **more)


def one_after_the_other(batches: int) -> Timeline:
    """Per batch: 10 ms forward, 20 ms copy, 30 ms process, the host blocking in each."""
    spans = []
    for batch in range(batches):
        at = 0.06 * batch
        spans += [
            Span("host", "forward", at, at + 0.001, batch),
            Span("compute", "a_kernel", at, at + 0.004, batch),
            Span("compute", "b_kernel", at + 0.004, at + 0.010, batch),
            Span("host", "copy", at + 0.001, at + 0.030, batch),
            Span("copy", "copy", at + 0.010, at + 0.030, batch, 40_000_000, False),
            Span("host", "process", at + 0.030, at + 0.060, batch),
        ]
    return timeline(*spans, strategy="sequential")


def test_busy_idle_and_causes():
    found = summarize(one_after_the_other(3))
    assert found.seconds == pytest.approx(0.18)
    assert found.busy == pytest.approx(1 / 6)
    assert found.idle == pytest.approx({"copy": 0.06, "process": 0.09})
    assert found.hidden == 0.0
    assert [copies[:4] for copies in found.copies] == [("copy", False, 3, 120_000_000)]
    assert found.copies[0].gbps == pytest.approx(2.0)
    assert found.batches == 3
    assert found.stages[("compute", "forward")] == pytest.approx(0.03)
    assert found.stages[("host", "process")] == pytest.approx(0.09)


def test_each_gap_has_its_cause_and_the_host_s_range():
    gaps = sorted(summarize(one_after_the_other(2)).gaps)
    assert [gap.seconds for gap in gaps] == pytest.approx([0.05, 0.05])
    assert {gap.cause for gap in gaps} == {"process"}  # 30 ms of it, the copy has 20
    assert [(gap.host.name, gap.host.batch) for gap in gaps] == [("process", 0), ("process", 1)]


def test_the_sentence_names_the_two_largest_causes():
    assert summarize(one_after_the_other(2)).sentence == (
        "The GPU computes 17% of the time. It waits 50% while the main loop processes scores "
        "and 33% while scores are copied to the host."
    )


def test_a_busy_gpu_is_limited_by_the_forward():
    found = summarize(
        timeline(
            Span("compute", "k", 0.0, 0.97),
            Span("host", "wait for copy", 0.0, 1.0),
            Span("copy", "copy", 0.5, 1.0, 0, 1),
        )
    )
    assert found.sentence.endswith("what limits it is the forward itself.")
    assert found.hidden == pytest.approx(0.47 / 0.5)


def test_without_a_kernel_there_is_nothing_to_say():
    for spans in ([], [Span("host", "process", 0.0, 1.0)]):
        found = summarize(timeline(*spans))
        assert found.sentence == "There is no kernel in this timeline."
        assert found.hidden is None
        metrics_table(found)


@pytest.mark.parametrize(
    ("host", "device", "cause"),
    [
        ("wait for slot", "copy", "wait for slot"),  # the workers are to blame, not the copy
        ("wait for workers", "copy", "wait for workers"),
        ("process", "copy", "process"),
        ("wait for copy", "copy", "copy"),
        ("forward", "copy", "copy"),  # queued behind a copy in its stream
        ("forward", "upload", "upload"),
        ("forward", None, "forward"),
        ("copy", None, "copy"),  # page faults, before and after the engine's part
        ("my own stage", None, "my own stage"),
        (None, None, "nothing recorded"),
        (None, "copy", "copy"),
    ],
)
def test_what_the_gpu_waits_for(host, device, cause):
    spans = [Span("compute", "k", 0.0, 0.1, 0), Span("compute", "k", 0.9, 1.0, 1)]
    if host:
        spans.append(Span("host", host, 0.0, 1.0, 7))
    if device:
        spans.append(Span(device, device, 0.1, 0.9, 0, 8))
    found = summarize(timeline(*spans))
    assert found.idle == pytest.approx({cause: 0.8})
    [gap] = found.gaps
    assert gap.cause == cause
    assert gap.host == (None if host is None else Span("host", host, 0.0, 1.0, 7))
    assert f"{0.8:.0%}" in found.sentence


def test_pauses_between_kernels_are_no_gaps():
    found = summarize(
        timeline(*(Span("compute", "k", i * 1e-3, i * 1e-3 + 0.999e-3) for i in range(100)))
    )
    assert found.gaps == []
    assert found.idle == pytest.approx({"between kernels": 99e-6})


def test_nested_ranges_blame_the_inner_one():
    found = summarize(
        timeline(
            Span("compute", "k", 0.0, 0.1),
            Span("host", "epoch", 0.0, 1.0),
            Span("host", "process", 0.4, 0.6),
            Span("compute", "k", 0.9, 1.0),
        )
    )
    assert found.idle == pytest.approx({"epoch": 0.6, "process": 0.2})


def test_copies_of_each_kind_apart_and_whole_ones_only():
    spans = [
        Span("upload", "upload", 0.0, 0.1, 0, 10, True),
        Span("copy", "copy", 0.0, 0.2, 0, 20, True),
        Span("copy", "copy", 0.2, 0.4, 0, 30, False),
        Span("copy", "copy", 0.4, 0.9, 1, 40, None),
        Span("copy", "copy", 0.9, 1.0, 2, 50, None),
        Span("copy", "copy", 1.0, 1.1, 3),  # a source without bytes
    ]
    found = summarize(timeline(*spans), (0.0, 0.95))
    assert {(c.lane, c.pinned): c.bytes for c in found.copies} == {
        ("upload", True): 10,
        ("copy", True): 20,
        ("copy", False): 30,
        ("copy", None): 40,
    }


def test_the_steady_state_is_the_middle_half_between_ends_of_copies():
    whole = one_after_the_other(16)
    start, end = whole.steady()
    assert (start, end) == pytest.approx((0.06 * 4 + 0.03, 0.06 * 11 + 0.03))
    found = summarize(whole, whole.steady())
    assert found.batches == 7
    assert found.busy == pytest.approx(1 / 6)
    start, end = whole.first_batches(2)
    assert (start, end) == pytest.approx((0.27, 0.27 + 0.12))
    assert whole.first_batches(1000) == whole.steady()
    short = one_after_the_other(3)
    assert short.steady() == (0.0, short.end)


def test_a_window_cuts_what_crosses_it():
    found = summarize(one_after_the_other(1), (0.005, 0.020))
    assert found.seconds == pytest.approx(0.015)
    assert found.busy == pytest.approx(1 / 3)
    assert found.stages[("copy", "copy")] == pytest.approx(0.010)


def test_against_counting():
    """Whole microseconds, so that every one of them can be looked at by itself."""
    dice = random.Random(1)
    for _ in range(40):
        length = 2000

        def some(lane, count, longest, length=length):
            starts = [dice.randrange(length) for _ in range(count)]
            ends = [min(length, start + dice.randrange(longest)) for start in starts]
            return [
                Span(lane, lane, a / 1e6, b / 1e6, 0, 1) for a, b in zip(starts, ends, strict=True)
            ]

        spans = some("compute", 8, 300) + some("copy", 4, 300)
        spans += [Span("host", "wait for copy", 0.0, length / 1e6)]
        found = summarize(timeline(*spans), (0.0, length / 1e6))

        def running(lane, spans=spans):
            return {
                moment
                for span in spans
                if span.lane == lane
                for moment in range(round(span.start * 1e6), round(span.end * 1e6))
            }

        compute, copy = running("compute"), running("copy")
        assert found.busy == pytest.approx(len(compute) / length)
        if copy:
            assert found.hidden == pytest.approx(len(copy & compute) / len(copy))
        assert found.busy + sum(found.idle.values()) / found.seconds == pytest.approx(1.0)


def test_times_are_cut_at_the_window():
    times = Times([(0, 2), (3, 5), (8, 9)])
    assert times.within(1, 4) == [(1, 2), (3, 4)]
    assert times.seconds(1, 4) == 2
    assert times.gaps(1, 10) == [(2, 3), (5, 8), (9, 10)]
    assert Times([]).gaps(1, 2) == [(1, 2)]


def test_pieces_of_nested_and_crossing_ranges():
    outer, inner = Span("host", "outer", 0.0, 10.0), Span("host", "inner", 2.0, 4.0)
    assert innermost([inner, outer]) == [(0.0, 2.0, outer), (2.0, 4.0, inner), (4.0, 10.0, outer)]
    first, second = Span("host", "a", 0.0, 4.0), Span("host", "b", 2.0, 6.0)
    pieces = innermost([first, second])
    assert [piece[:2] for piece in pieces] == [(0.0, 2.0), (2.0, 6.0)]
    assert innermost([]) == []


def test_device_spans_get_the_batch_of_the_range_that_queued_them():
    host = [Span("host", "forward", 0.0, 1.0, 4), Span("host", "copy", 2.0, 3.0, 5)]
    late = Span("compute", "k", 7.0, 8.0)
    batches = [
        with_batches([Launched(late, queued)], host)[0].batch
        for queued in (0.5, 1.5, 2.0, 3.5, None)
    ]
    assert batches == [4, None, 5, None, None]


def test_a_timeline_starts_at_zero_and_orders_its_lanes():
    lanes = "worker 10", "worker 9", "thread 0", "copy", "upload", "compute", "host"
    spans = [Span(lane, "x", 100.0, 101.0) for lane in lanes]
    made = timeline(*spans, Span("host", "x", 99.0, 100.0))
    assert made.spans[0].start == 0.0 and made.end == 2.0
    assert made.lanes == ["host", "compute", "upload", "copy", "thread 0", "worker 9", "worker 10"]


@pytest.mark.parametrize("kind", ["emulated", "predicted"])
def test_what_is_no_measurement_says_so(kind):
    device = {"kind": kind, "name": "emulated GPU (classroom)", "profile": "classroom"}
    made = timeline(Span("compute", "k", 0.0, 1.0), device=device)
    assert f"{kind.upper()} device, profile classroom: not a GPU" in made.title()
    assert kind.upper() in summarize(made).title


def test_the_table_says_what_the_metrics_say():
    from rich.console import Console

    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(metrics_table(summarize(one_after_the_other(4))))
    text = console.export_text()
    for part in ("sequential", "GPU computes", "16.7%", "waits: process", "2.00 GB/s pageable",
                 "gap: process", "in process, batch 0"):  # fmt: skip
        assert part in text, text


def test_a_window_without_a_kernel_still_says_what_it_waits_for():
    spans = [Span("compute", "k", 0, 1), *(Span("copy", "copy", n, n + 1) for n in range(1, 6))]
    found = summarize(timeline(*spans), (1, 6))
    assert found.sentence == (
        "The GPU computes 0% of the time. It waits 100% while scores are copied to the host."
    )
    assert "no kernel" in summarize(timeline(Span("host", "copy", 0, 1))).sentence


def test_the_host_s_range_of_a_gap_is_the_one_with_most_of_its_time():
    spans = [
        Span("compute", "k", 0, 0.1),
        Span("host", "epoch", 0, 1),
        Span("host", "process", 0.4, 0.75),
        Span("compute", "k", 0.99, 1),
    ]
    [gap] = summarize(timeline(*spans)).gaps
    assert (gap.cause, gap.host.name) == ("epoch", "epoch")


def test_gaps_come_longest_first_and_two_causes_are_named():
    spans, at = [], 0.0
    for seconds, name in ((0.1, "a"), (0.4, "b"), (0.3, "c"), (0.2, "d")):
        spans += [Span("compute", "k", at, at + 0.1), Span("host", name, at, at + 0.1 + seconds)]
        at += 0.1 + seconds
    spans.append(Span("compute", "k", at, at + 0.1))
    found = summarize(timeline(*spans))
    assert [gap.cause for gap in found.gaps] == ["b", "c", "d", "a"]
    assert found.sentence.endswith("It waits 27% during b and 20% during c.")


def test_names_are_no_markup():
    from rich.console import Console

    spans = [Span("host", "layer[/x]", 0, 1), Span("compute", "k", 0.2, 0.3)]
    console = Console(width=120, file=io.StringIO())
    console.print(metrics_table(summarize(timeline(*spans))))
    assert "layer[/x]" in console.file.getvalue()
