"""The ladder, and predictions beside it, drawn from a record and nothing else."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .errors import LabError
from .results import is_right, prediction_error, speedup, strategy_label, title

# Okabe and Ito's colours, which colour-blind readers can tell apart:
# https://jfly.uni-koeln.de/color/
_BAR, _WRONG, _CEILING = "#0072B2", "#999999", "#D55E00"


def plot_ladder(record: dict) -> Figure:
    """A bar for each strategy in samples/s, its spread, its gain, and the measured ceiling.

    The figure's label is its text alternative.
    """
    rows = record["strategies"]
    ceiling = record["ceiling"]
    figure = Figure(figsize=(8, 1.5 + 0.55 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    widest = max([ceiling["samples_per_s"], *(row["spread"][1] for row in rows)])
    for place, row in enumerate(rows):
        rate = row["samples_per_s"]
        _bar(axes, place, row, _BAR if is_right(record, row) else _WRONG)
        times = speedup(record, row)
        label = f"{rate:,.0f}" if times is None else f"{rate:,.0f}  ({times:.1f}x)"
        if not is_right(record, row):
            label = "wrong bytes"
        start, ceiling_at = row["spread"][1] + 0.015 * widest, ceiling["samples_per_s"]
        if start <= ceiling_at < start + 0.2 * widest:  # not across the ceiling's line
            start = ceiling_at + 0.015 * widest
        axes.text(start, place, label, va="center", fontsize=10)
    axes.axvline(ceiling["samples_per_s"], color=_CEILING, ls="--", lw=1.5)
    axes.text(
        0.99 * ceiling["samples_per_s"], -0.62, f"ceiling: {ceiling['limited_by']}",
        color=_CEILING, ha="right", va="bottom", fontsize=10,
    )  # fmt: skip
    axes.set_yticks(range(len(rows)), [strategy_label(row) for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.95)
    axes.set_xlim(0, 1.22 * widest)
    axes.set_xlabel("samples per second, to the last result back (bar: median, whisker: all runs)")
    _finish(axes, record)
    figure.set_label(describe_ladder(record))
    return figure


def plot_predictions(record: dict) -> Figure:
    """What was measured, as bars with their spread, and what was predicted before, as marks.

    Strategies without a prediction are left out. The figure's label is its text alternative.
    """
    rows = _predicted(record)
    figure = Figure(figsize=(8, 1.5 + 0.55 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    widest = max(max(row["spread"][1], row["predicted_samples_per_s"]) for row in rows)
    for place, row in enumerate(rows):
        rate, predicted = row["samples_per_s"], row["predicted_samples_per_s"]
        _bar(axes, place, row, _BAR)
        axes.plot([predicted, predicted], [place - 0.44, place + 0.44], color=_CEILING, lw=3)
        label = f"{rate:,.0f} measured, {predicted:,.0f} predicted ({prediction_error(row):+.1%})"
        axes.text(
            max(row["spread"][1], predicted) + 0.015 * widest, place, label, va="center", fontsize=9
        )
    axes.set_yticks(range(len(rows)), [strategy_label(row) for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 1.65 * widest)
    axes.set_xlabel("samples per second (bar: measured, whisker: all runs; line: predicted before)")
    _finish(axes, record)
    figure.set_label(describe_predictions(record))
    return figure


def _bar(axes: Axes, place: int, row: dict, colour: str) -> None:
    """A strategy's median, and its lowest and highest run as a whisker."""
    rate = row["samples_per_s"]
    low, high = row["spread"]
    whisker = {"ecolor": "black", "capsize": 3, "lw": 1}
    axes.barh(place, rate, color=colour, xerr=[[rate - low], [high - rate]], error_kw=whisker)


def _finish(axes: Axes, record: dict) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    head, _, where = title(record).partition(" - ")
    axes.set_title(f"{head}\n{where}", fontsize=10, loc="left")


def describe_predictions(record: dict) -> str:
    """What the figure of predictions shows, in words."""
    parts = [
        f"{strategy_label(row)} {row['samples_per_s']:,.0f} samples/s measured, "
        f"{row['predicted_samples_per_s']:,.0f} predicted ({prediction_error(row):+.1%})"
        for row in _predicted(record)
    ]
    return f"Bar chart. {title(record)}. {'; '.join(parts)}."


def _predicted(record: dict) -> list[dict]:
    rows = [row for row in record["strategies"] if row["predicted_samples_per_s"] is not None]
    if not rows:
        raise LabError("this record has no predictions: give measure() what predict_all() returned")
    return rows


def describe_ladder(record: dict) -> str:
    """What the ladder figure shows, in words."""
    parts = []
    for row in record["strategies"]:
        times = speedup(record, row)
        gain = "" if times is None else f" ({times:.1f} times sequential)"
        if not is_right(record, row):
            gain = " with wrong bytes"
        parts.append(f"{strategy_label(row)} {row['samples_per_s']:,.0f} samples/s{gain}")
    ceiling = record["ceiling"]
    return (
        f"Bar chart. {title(record)}. {'; '.join(parts)}. "
        f"Ceiling {ceiling['samples_per_s']:,.0f} samples/s, set by {ceiling['limited_by']}."
    )
