"""Figures, each drawn from a record and nothing else."""

import hashlib
import json
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from .errors import LabError
from .results import is_right, load_record, speedup, title

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
        low, high = row["spread"]
        axes.barh(
            place,
            rate,
            color=_BAR if is_right(record, row) else _WRONG,
            xerr=[[rate - low], [high - rate]],
            error_kw={"ecolor": "black", "capsize": 3, "lw": 1},
        )
        times = speedup(record, row)
        label = f"{rate:,.0f}" if times is None else f"{rate:,.0f}  ({times:.1f}x)"
        if not is_right(record, row):
            label = "wrong bytes"
        start, ceiling_at = high + 0.015 * widest, ceiling["samples_per_s"]
        if start <= ceiling_at < start + 0.2 * widest:  # not across the ceiling's line
            start = ceiling_at + 0.015 * widest
        axes.text(start, place, label, va="center", fontsize=10)
    axes.axvline(ceiling["samples_per_s"], color=_CEILING, ls="--", lw=1.5)
    axes.text(
        0.99 * ceiling["samples_per_s"], -0.62, f"ceiling: {ceiling['limited_by']}",
        color=_CEILING, ha="right", va="bottom", fontsize=10,
    )  # fmt: skip
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.95)
    axes.set_xlim(0, 1.22 * widest)
    axes.set_xlabel("samples per second, to the last result back (bar: median, whisker: all runs)")
    axes.spines[["top", "right"]].set_visible(False)
    head, _, where = title(record).partition(" - ")
    axes.set_title(f"{head}\n{where}", fontsize=10, loc="left")
    figure.set_label(describe_ladder(record))
    return figure


def describe_ladder(record: dict) -> str:
    """What the ladder figure shows, in words."""
    parts = []
    for row in record["strategies"]:
        times = speedup(record, row)
        gain = "" if times is None else f" ({times:.1f} times sequential)"
        if not is_right(record, row):
            gain = " with wrong bytes"
        parts.append(f"{row['name']} {row['samples_per_s']:,.0f} samples/s{gain}")
    ceiling = record["ceiling"]
    return (
        f"Bar chart. {title(record)}. {'; '.join(parts)}. "
        f"Ceiling {ceiling['samples_per_s']:,.0f} samples/s, set by {ceiling['limited_by']}."
    )


def save_figure(figure: Figure, stem: str | Path, source: str = "") -> Path:
    """Write `stem`.svg and `stem`.png and return the PNG's path.

    `source` goes into the SVG, so that a test can tell when its record has changed.
    """
    stem = Path(stem)
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
        with matplotlib.rc_context({"svg.hashsalt": "labkit", "svg.fonttype": "none"}):
            figure.savefig(f"{stem}.svg", metadata={"Date": None, "Source": source})
        figure.savefig(f"{stem}.png", dpi=150)
    except OSError as error:
        raise LabError(f"cannot write the figure {str(stem)!r}: {error.strerror}") from None
    return Path(f"{stem}.png")


def show_figure(figure: Figure, stem: str | Path):
    """Save `figure` as `save_figure` does; in a notebook, show it with its text alternative."""
    from IPython.display import Image

    path = save_figure(figure, stem)
    return Image(filename=path, alt=figure.get_label())


def fingerprint(record: dict) -> str:
    """Which record a committed figure was drawn from."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]


def main(records: str = "figures/records", figures: str = "figures") -> None:
    """Draw the ladder of every record in a folder: `python -m labkit.plots`."""
    for path in sorted(Path(records).glob("*.json")):
        record = load_record(path)
        save_figure(plot_ladder(record), Path(figures, path.stem), fingerprint(record))


if __name__ == "__main__":
    main()
