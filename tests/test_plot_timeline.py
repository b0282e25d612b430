"""Figures of timelines: what is drawn, what is left out, and what they say without eyes."""

import io
import itertools

import pytest
from test_metrics import one_after_the_other, timeline

from labkit import LabError, plot_timelines, summarize
from labkit.plot_timeline import _DARK, _LIGHT, _PIXELS, _bars, contrast
from labkit.timeline import Span, Timeline
from labkit.trace_files import shipped_timeline


def bars_of(axes):
    """The drawn rectangles as (left, right) in milliseconds, by colour."""
    found = {}
    for collection in axes.collections:
        colour = tuple(collection.get_facecolor()[0])
        for path in collection.get_paths():
            left, right = path.get_extents().intervalx
            found.setdefault(colour, []).append((left, right))
    return found


def texts(axes):
    return [text.get_text() for text in axes.texts]


def test_the_text_alternative_says_what_and_where_the_gpu_waits():
    one = one_after_the_other(8)
    figure = plot_timelines(one, timeline(Span("compute", "k", 0.0, 1.0), strategy="other"))
    label = figure.get_label()
    assert label.count("Timeline. ") == 2
    for made in (one,):
        assert made.title() in label
        assert summarize(made, made.steady()).sentence in label
    assert "other - NVIDIA H200" in label


@pytest.mark.parametrize("kind", ["emulated", "predicted"])
def test_what_is_no_measurement_says_so_in_the_figure(kind):
    device = {"kind": kind, "name": "x", "profile": "classroom"}
    figure = plot_timelines(timeline(Span("compute", "k", 0.0, 1.0), device=device))
    assert kind.upper() in figure.axes[0].get_title(loc="left")
    assert kind.upper() in figure.get_label()


def test_all_panels_have_one_time_scale():
    fast = timeline(*(span._replace(start=span.start / 3, end=span.end / 3)
                      for span in one_after_the_other(16).spans))  # fmt: skip
    figure = plot_timelines(one_after_the_other(16), fast, batches=2)
    first, second = (axes.get_xlim() for axes in figure.axes)
    assert first == second == pytest.approx((0, 120))


def test_zoom_shows_that_many_batches():
    for batches in (1, 3):
        (axes,) = plot_timelines(one_after_the_other(16), batches=batches).axes
        assert axes.get_xlim()[1] == pytest.approx(60 * batches)


def test_bars_are_where_the_spans_are():
    made = one_after_the_other(8)
    (axes,) = plot_timelines(made, batches=1).axes
    start, _ = made.first_batches(1)
    copies = [
        ((span.start - start) * 1e3, (span.end - start) * 1e3)
        for span in made.spans
        if span.stage == "copy" and span.start >= start - 1e-9 and span.end <= start + 0.06 + 1e-9
    ]
    from matplotlib.colors import to_rgba

    drawn = bars_of(axes)[to_rgba(_LIGHT["copy"])]
    for expected in copies:
        assert any(bar == pytest.approx(expected, abs=0.1) for bar in drawn)
    assert len(drawn) == len(copies) == 2  # the host's and the engine's


def test_bars_carry_their_batch_where_there_is_room():
    (axes,) = plot_timelines(one_after_the_other(8), batches=1).axes
    assert {"3"} <= set(texts(axes)) <= {"2", "3"}
    wide = plot_timelines(one_after_the_other(200), batches=99).axes[0]
    assert texts(wide) == []


def test_idle_workers_are_not_drawn_and_the_rest_are_counted():
    spans = one_after_the_other(8).spans
    spans += [Span(f"worker {n}", "process", 0.2, 0.3, n) for n in range(3)]
    spans += [Span("worker 3", "process", 0.0, 0.001, 9)]
    (axes,) = plot_timelines(timeline(*spans), batches=1).axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == ["host loop", "compute", "copy", "3 of 4 workers"]


def test_spans_closer_than_a_pixel_are_one_bar():
    kernels = [Span("compute", "k", i * 1e-5, i * 1e-5 + 9e-6, i // 50_000) for i in range(100_000)]
    bars = _bars(kernels, 0.0, 1.0)
    assert [(bar.batch, bar.stage) for bar in bars] == [(0, "forward"), (1, "forward")]
    assert len(_bars(kernels, 0.0, 1e-3)) == 100
    assert _PIXELS > 1000


def test_waits_and_unknown_stages_have_bars_too():
    made = timeline(
        Span("host", "wait for slot", 0.0, 0.5),
        Span("host", "my own stage", 0.5, 1.0),
        Span("compute", "k", 0.0, 1.0),
    )
    figure = plot_timelines(made)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "forward", "wait", "other", "GPU computes nothing",
    ]  # fmt: skip


def test_an_empty_timeline_can_be_drawn():
    plot_timelines(timeline()).get_label()
    plot_timelines(timeline(Span("host", "x", 0.0, 0.0)))


@pytest.mark.parametrize("colours", [_LIGHT, _DARK], ids=["light", "dark"])
def test_colours_can_be_told_apart_and_read(colours):
    stages = [colours[name] for name in ("forward", "copy", "process", "receive", "upload")]
    assert len(set(stages)) == 5
    for stage in stages:
        assert contrast(stage, colours["ground"]) >= 2.0
        assert max(contrast("#000000", stage), contrast("#FFFFFF", stage)) >= 4.5
    assert contrast(colours["ink"], colours["ground"]) >= 7
    # Neighbours in a lane differ in lightness as well, for print in grey.
    for one, other in itertools.combinations(
        [colours[name] for name in ("forward", "copy", "wait")], 2
    ):
        assert contrast(one, other) >= 1.8
    assert contrast(colours["idle"], colours["forward"]) >= 2.5


def test_contrast_is_that_of_the_standard():
    assert contrast("#000000", "#FFFFFF") == pytest.approx(21)
    assert contrast("#777777", "#FFFFFF") == pytest.approx(4.48, abs=0.01)
    assert contrast("#123456", "#123456") == 1


def test_dark_figures_are_dark():
    light, dark = (plot_timelines(one_after_the_other(6), dark=dark) for dark in (False, True))
    assert sum(light.get_facecolor()[:3]) > 2.9
    assert sum(dark.get_facecolor()[:3]) < 0.5
    assert light.get_label() == dark.get_label()


def test_names_are_no_formulas():
    spans = [Span("worker $x", "process", 0, 1), Span("compute", "k", 0, 1)]
    device = {"kind": "cuda", "name": "$\\frac$ x_$y^z^z$", "profile": None}
    plot_timelines(Timeline(spans, "a", device, "$s$")).savefig(io.BytesIO())


def test_nothing_to_draw_gives_one_line():
    with pytest.raises(LabError, match="at least one timeline"):
        plot_timelines()


def test_of_ranges_in_each_other_the_inner_one_is_seen():
    spans = [
        Span("host", "process", 0, 1),
        Span("host", "copy", 0.4, 0.6),
        Span("copy", "copy", 0, 1),
    ]
    figure = plot_timelines(Timeline(spans, "a", {"kind": "cuda", "name": "x", "profile": None}))
    host = [path.get_extents() for bars in figure.axes[0].collections for path in bars.get_paths()]
    widths = sorted(round(box.width / 1000, 2) for box in host if box.y0 < 0.2)
    assert widths == [0.2, 0.4, 0.4]


def test_the_first_lane_is_on_top():
    figure = plot_timelines(shipped_timeline("sequential"))
    low, high = figure.axes[0].get_ylim()
    assert low > high
