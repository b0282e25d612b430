"""Draw timelines: one style for every source, a lane for whatever does one thing at a time."""

from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from .errors import LabError
from .metrics import Metrics, summarize
from .timeline import DEVICE_LANES, Span, Timeline, innermost

# After Okabe and Ito, whom colour-blind readers can tell apart: https://jfly.uni-koeln.de/color/
# Their lightness differs too, for print in grey. On dark ground they are lighter.
_LIGHT = {
    "forward": "#0072B2", "upload": "#CC79A7", "copy": "#E69F00", "process": "#009E73",
    "receive": "#56B4E9", "wait": "#FFFFFF", "other": "#999999", "idle": "#F9E3D5",
    "ground": "#FFFFFF", "ink": "#1A1A1A", "faint": "#D0D0D0",
}  # fmt: skip
_DARK = {
    "forward": "#2F8CCC", "upload": "#E3A3C5", "copy": "#F2B733", "process": "#2BC795",
    "receive": "#9AD5F7", "wait": "#16181D", "other": "#8C8C8C", "idle": "#4A2A1A",
    "ground": "#16181D", "ink": "#F0F0F0", "faint": "#4A4D55",
}  # fmt: skip
_STAGES = ("upload", "forward", "copy", "receive", "process", "wait", "other")
_IDLE_WORDS = "GPU computes nothing"
_LANE_IN, _THIN_IN = 0.34, 0.17  # heights in inches, and what is around the panels
_WIDTH_IN, _LEFT_IN, _RIGHT_IN, _TITLE_IN, _TICKS_IN, _LEGEND_IN = 10, 1.25, 0.15, 0.52, 0.3, 0.5
_LANE_NAME_LIMIT = 18  # as many letters as fit beside a panel
_PIXELS = 1500  # across a figure: pieces closer than one are drawn as one
_LABEL_SHARE = 0.012  # of the width that a digit needs


class _Bar(NamedTuple):
    start: float
    end: float
    stage: str
    batch: int | None


def plot_timelines(*timelines: Timeline, batches: int = 3, dark: bool = False) -> Figure:
    """A panel for each timeline, all in one time scale: as long as `batches` of the first one.

    What is shown lies in the steady state. Bars carry their batch's number where there is room;
    white bars are waits. The figure's label is its text alternative.
    """
    if not timelines:
        raise LabError("nothing to draw: give at least one timeline")
    colours = _DARK if dark else _LIGHT
    start, end = timelines[0].first_batches(batches)
    length = (end - start) or 1e-3
    windows = []
    for timeline in timelines:
        start = max(0.0, min(timeline.steady()[0], timeline.end - length))
        windows.append((start, start + length))
    panels_bars = [_lanes(*both) for both in zip(timelines, windows, strict=True)]
    figure, panels = _panels([sum(map(_height, lanes)) or _LANE_IN for lanes in panels_bars])
    figure.set_facecolor(colours["ground"])
    shown, words = set(), []
    for axes, timeline, lanes in zip(panels, timelines, panels_bars, strict=True):
        found = summarize(timeline, timeline.steady())
        _draw(axes, timeline, lanes, length * 1e3, found.busy, colours)
        shown |= {bar.stage for bars in lanes.values() for bar in bars}
        words.append(_describe(timeline, found))
    panels[-1].set_xlabel("milliseconds", color=colours["ink"])
    handles = [
        Patch(facecolor=colours[stage], edgecolor=colours["ink"], lw=0.5, label=stage)
        for stage in _STAGES
        if stage in shown
    ]
    handles.append(Patch(facecolor=colours["idle"], label=_IDLE_WORDS))
    figure.legend(
        handles=handles, loc="lower center", ncols=len(handles), frameon=False,
        labelcolor=colours["ink"], fontsize=9, handlelength=1.2, columnspacing=1.2,
    )  # fmt: skip
    figure.set_label(" ".join(words))
    return figure


def legend() -> str:
    """The colours of the stages as HTML."""
    squares = "".join(
        f"<span style='background:{_LIGHT[stage]};border:1px solid #888;padding:0 0.6em;"
        f"margin:0 0.4em 0 1em'></span>{words}"
        for stage, words in [*((stage, stage) for stage in _STAGES), ("idle", _IDLE_WORDS)]
    )
    return f"<p>{squares}</p>"


def _panels(heights: list[float]) -> tuple[Figure, list[Axes]]:
    """A figure with a panel of each height, in inches: faster than to have them fitted."""
    total = sum(heights) + (_TITLE_IN + _TICKS_IN) * len(heights) + _LEGEND_IN
    figure = Figure(figsize=(_WIDTH_IN, total))
    panels, top = [], total
    for height in heights:
        bottom = top - _TITLE_IN - height
        width = _WIDTH_IN - _LEFT_IN - _RIGHT_IN
        place = _LEFT_IN / _WIDTH_IN, bottom / total, width / _WIDTH_IN, height / total
        panels.append(figure.add_axes(place))
        top = bottom - _TICKS_IN
    return figure, panels


def describe_timeline(timeline: Timeline) -> str:
    """What a timeline shows, in words: its title, where the GPU waits in the steady state, and
    what the source lacks."""
    return _describe(timeline, summarize(timeline, timeline.steady()))


def _describe(timeline: Timeline, found: Metrics) -> str:
    notes = "".join(f" Note: {note}." for note in timeline.notes)
    return f"Timeline. {found.title}. {found.sentence}{notes}"


def _lanes(timeline: Timeline, window: tuple[float, float]) -> dict[str, list[_Bar]]:
    """What to draw of each lane; workers that do nothing in `window` are left out."""
    lanes = {}
    for lane in timeline.lanes:
        spans = [s for s in timeline.lane(lane) if s.start < window[1] and s.end > window[0]]
        if lane not in DEVICE_LANES.values():  # ranges may lie in each other: the inner ones win
            spans = [span._replace(start=a, end=b) for a, b, span in innermost(spans)]
        lanes[lane] = _bars(spans, *window)
    return {lane: bars for lane, bars in lanes.items() if bars or not _is_worker(lane)}


def _draw(
    axes: Axes, timeline: Timeline, lanes: dict, width: float, busy: float, colours: dict
) -> None:
    """Draw the bars of `lanes`; `width` is in milliseconds, `busy` the GPU's share."""
    top = 0.0
    middles: dict[str, list[float]] = {}  # of the lanes that share a name
    for lane, bars in lanes.items():
        height = _height(lane)
        low, thickness = top + 0.12 * height, 0.76 * height
        if lane == "compute":
            axes.broken_barh([(0, width)], (low, thickness), facecolors=colours["idle"])
        for stage in [stage for stage in _STAGES if any(bar.stage == stage for bar in bars)]:
            pieces = [(b.start * 1e3, (b.end - b.start) * 1e3) for b in bars if b.stage == stage]
            edge = colours["ink"] if stage == "wait" else colours["ground"]
            # A thin bar would be all edge.
            edges = [
                edge if length > 4 * width / _PIXELS else colours[stage] for _, length in pieces
            ]
            axes.broken_barh(
                pieces, (low, thickness), facecolors=colours[stage], edgecolors=edges, lw=0.5
            )
        for bar in bars if height == _LANE_IN else ():
            _label(axes, bar, low + thickness / 2, width, colours)
        middles.setdefault(_lane_name(lane, lanes, timeline), []).append(top + height / 2)
        top += height
    axes.set_ylim(top or _LANE_IN, 0)
    axes.set_xlim(0, width)
    places = [sum(places) / len(places) for places in middles.values()]
    axes.set_yticks(places, list(middles), fontsize=9, parse_math=False)
    axes.set_facecolor(colours["ground"])
    axes.tick_params(colors=colours["ink"], length=0, axis="y")
    axes.tick_params(colors=colours["ink"], axis="x", labelsize=9)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(colours["ink"])
    axes.grid(axis="x", color=colours["faint"], lw=0.6)
    axes.set_axisbelow(True)
    strategy, _, rest = timeline.title().partition(" - ")
    title = f"{strategy}: the GPU computes {busy:.0%} of the time\n{rest}"
    axes.set_title(title, fontsize=9.5, loc="left", color=colours["ink"], parse_math=False)


def _lane_name(lane: str, lanes: dict, timeline: Timeline) -> str:
    if _is_worker(lane):
        everyone, drawn = (sum(map(_is_worker, some)) for some in (timeline.lanes, lanes))
        return "workers" if everyone == drawn else f"{drawn} of {everyone} workers"
    return "host loop" if lane == "host" else lane[:_LANE_NAME_LIMIT]


def _is_worker(lane: str) -> bool:
    return lane.startswith("worker ")


def _height(lane: str) -> float:
    return _THIN_IN if lane == "upload" or _is_worker(lane) else _LANE_IN


def _bars(spans: list[Span], start: float, end: float) -> list[_Bar]:
    """The spans of one lane between `start` and `end`, counted from `start`: those of one stage
    and batch that lie closer together than a pixel as one."""
    pixel = (end - start) / _PIXELS
    bars: list[_Bar] = []
    for span in spans:
        if span.end <= start or span.start >= end:
            continue
        stage = "wait" if span.stage.startswith("wait") else span.stage
        stage = stage if stage in _STAGES else "other"
        bar = _Bar(max(span.start, start) - start, min(span.end, end) - start, stage, span.batch)
        last = bars[-1] if bars else None
        if last and last[2:] == bar[2:] and bar.start - last.end < pixel:
            bars[-1] = last._replace(end=max(last.end, bar.end))
        else:
            bars.append(bar)
    return bars


def _label(axes: Axes, bar: _Bar, y: float, width: float, colours: dict) -> None:
    text = "" if bar.batch is None else str(bar.batch)
    if not text or (bar.end - bar.start) * 1e3 < _LABEL_SHARE * (len(text) + 0.5) * width:
        return
    ink = max(("#000000", "#FFFFFF"), key=lambda ink: contrast(ink, colours[bar.stage]))
    axes.text((bar.start + bar.end) * 500, y, text, color=ink, fontsize=8, ha="center", va="center")


def contrast(one: str, other: str) -> float:
    """The contrast of two colours, 1 to 21: https://www.w3.org/TR/WCAG21/#dfn-contrast-ratio"""

    def luminance(colour: str) -> float:
        parts = [
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)
        ]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
