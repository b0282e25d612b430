"""The idea of a strategy as a picture: the way of one batch's scores, and who moves them."""

from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from .errors import LabError

# Where a box is, and its colour; after Okabe and Ito, as in the timelines.
_PLACES = {"GPU": "#CFE6F5", "host memory": "#FBE3B5", "process": "#C9EBDF"}
_AT_ONCE, _LATER, _NEVER = "loop waits", "loop waits later, for an event", "loop does not wait"
_ARROWS = {_AT_ONCE: ("#D55E00", "-"), _LATER: ("#0072B2", "-"), _NEVER: ("#555555", "--")}
_WIDTH_IN, _ROW_IN, _LEGEND_IN = 10, 1.35, 0.35
_BOX, _BOX_HEIGHT = 1.25, 0.9  # in units of which the widest picture has eleven


class _Box(NamedTuple):
    place: str
    text: str


class _Move(NamedTuple):
    by: str
    loop: str


_SCORES = _Box("GPU", "device\nmemory")
_WORKER = _Box("process", "worker:\nprocess")
_STAGED = [
    _SCORES,
    _Move("copy\nengine", _AT_ONCE),
    _Box("host memory", "the driver's\nown buffer"),
    _Move("processor", _AT_ONCE),
]
_PATHS = {
    "sequential": [
        *_STAGED,
        _Box("host memory", "fresh,\npageable"),
        _Move("read by\nthe loop", _AT_ONCE),
        _Box("process", "main loop:\nprocess"),
    ],
    "multi_worker": [
        *_STAGED,
        _Box("host memory", "fresh,\npageable"),
        _Move("feeder\nthread", _NEVER),
        _Box("host memory", "a pipe"),
        _Move("worker", _NEVER),
        _Box("host memory", "worker's\nmemory"),
        _Move("read", _NEVER),
        _WORKER,
    ],
    "buffer_pool": [
        *_STAGED,
        _Box("host memory", "slot: shared,\npageable"),
        _Move("its number\nthrough a pipe", _NEVER),
        _WORKER,
    ],
    "pinned_async": [
        _SCORES,
        _Move("copy engine,\nsame stream", _LATER),
        _Box("host memory", "slot: shared,\npage-locked"),
        _Move("its number\nthrough a pipe", _NEVER),
        _WORKER,
    ],
    "stream_pipeline": [
        _SCORES,
        _Move("copy engine,\nown stream", _LATER),
        _Box("host memory", "slot: shared,\npage-locked"),
        _Move("its number\nthrough a pipe", _NEVER),
        _WORKER,
    ],
}


def plot_paths(*strategies: str) -> Figure:
    """The way of one batch's scores, a row for each strategy: boxes are where they lie, arrows
    who moves them.

    The figure's label is its text alternative. Raises LabError for an unknown strategy.
    """
    for strategy in strategies:
        if strategy not in _PATHS:
            raise LabError(f"no picture of {strategy!r}: choose {', '.join(_PATHS)}")
    size = _WIDTH_IN, _ROW_IN * len(strategies) + _LEGEND_IN
    figure = Figure(figsize=size, layout="constrained")
    rows = figure.subplots(len(strategies), squeeze=False)[:, 0]
    for axes, strategy in zip(rows, strategies, strict=True):
        _draw_path(axes, _PATHS[strategy])
        title = f"{strategy}: the way of one batch's scores on a GPU"
        axes.set_title(title, loc="left", fontsize=10)
    for words, (colour, dashes) in _ARROWS.items():
        axes.plot([], [], color=colour, ls=dashes, lw=2, label=words)
    figure.legend(loc="outside lower left", ncols=3, frameon=False, fontsize=8.5)
    figure.set_label(" ".join(["Diagram.", *map(_describe_path, strategies)]))
    return figure


def _draw_path(axes: Axes, path: list) -> None:
    axes.set_axis_off()
    # Boxes and arrows of equal length, in turn; a shorter way leaves room at the right.
    axes.set_xlim(-0.1, 11 * _BOX + 0.1)
    axes.set_ylim(-0.4, 1.0)
    for number, step in enumerate(path):
        left, middle = number * _BOX, (number + 0.5) * _BOX
        if isinstance(step, _Box):
            axes.add_patch(
                FancyBboxPatch(
                    (left + 0.04, 0.04), _BOX - 0.08, _BOX_HEIGHT - 0.08,
                    boxstyle="round,pad=0.03", facecolor=_PLACES[step.place], edgecolor="#1A1A1A",
                )
            )  # fmt: skip
            axes.text(middle, _BOX_HEIGHT / 2, step.text, ha="center", va="center", fontsize=8.5)
            axes.text(middle, -0.1, step.place, ha="center", va="top", fontsize=8, color="#444444")
        else:
            colour, dashes = _ARROWS[step.loop]
            arrow = {"arrowstyle": "-|>", "color": colour, "lw": 2, "ls": dashes}
            ends = (left + _BOX - 0.03, _BOX_HEIGHT / 2), (left + 0.03, _BOX_HEIGHT / 2)
            axes.annotate("", *ends, arrowprops=arrow)
            axes.text(middle, 0.53, step.by, ha="center", va="bottom", fontsize=8, color=colour)


def _describe_path(strategy: str) -> str:
    words = [f"The way of one batch's scores on a GPU in {strategy}:"]
    for step in _PATHS[strategy]:
        if isinstance(step, _Box):
            words.append(f"{step.text} ({step.place})")
        else:
            words.append(f"by {step.by} ({step.loop}) to")
    return " ".join(" ".join(words).split()) + "."
