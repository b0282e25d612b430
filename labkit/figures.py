"""Figures as files: save one, show one in a notebook, draw all committed ones anew."""

import hashlib
import inspect
from collections.abc import Callable
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from . import metrics, plot_timeline, plots, timeline
from .errors import LabError
from .pipelines import STRATEGIES
from .plot_timeline import plot_timelines
from .plots import plot_ladder, plot_predictions
from .results import load_record
from .trace_files import load_timeline

# How many batches of the strategy before a step's figure shows: enough to see its period.
_BATCHES = {
    "sequential": 2,
    "multi_worker": 1,
    "buffer_pool": 1,
    "pinned_async": 4,
    "stream_pipeline": 4,
}


def save_figure(figure: Figure, stem: str | Path, source: str = "") -> Path:
    """Write `stem`.svg and `stem`.png and return the PNG's path.

    `source` goes into the SVG, so that a test can tell when what it was drawn from has changed.
    Raises LabError when a file cannot be written.
    """
    svg, png = (Path(f"{stem}.{kind}") for kind in ("svg", "png"))
    try:
        svg.parent.mkdir(parents=True, exist_ok=True)
        with matplotlib.rc_context({"svg.hashsalt": "labkit", "svg.fonttype": "none"}):
            figure.savefig(svg, metadata={"Date": None, "Source": source})
        figure.savefig(png, dpi=150)
    except OSError as error:
        raise LabError(f"cannot write the figure {str(stem)!r}: {error.strerror}") from None
    return png


def show_figure(figure: Figure, stem: str | Path):
    """Save `figure` as `save_figure` does; in a notebook, show it with its text alternative."""
    from IPython.display import Image

    path = save_figure(figure, stem)
    return Image(filename=path, alt=figure.get_label())


def committed(folder: Path) -> dict[str, tuple[Callable[[], Figure], str]]:
    """Every figure that belongs into `folder`: its name, how to draw it, and a fingerprint of
    the records or traces that it shows and of the code that draws it."""
    found = {}
    for path in sorted((folder / "records").glob("*.json")):
        mark = _fingerprint([path], plots)
        found[path.stem] = _ladder(path), mark
        if any(row["predicted_samples_per_s"] for row in load_record(path)["strategies"]):
            found[f"{path.stem}_predicted"] = _predicted(path), mark
    before: list[Path] = []
    for step, name in enumerate(STRATEGIES, 1):
        path = folder / "traces" / f"h200_{name}_nsys.json"
        if not path.exists():
            continue
        traces = [*before, path]
        mark = _fingerprint(traces, plot_timeline, metrics, timeline)
        for suffix, dark in (("", False), ("_dark", True)):
            draw = _step(traces, _BATCHES[name], dark)
            found[f"timeline_{step}_{name}{suffix}"] = draw, mark
        before = [path]
    return found


def _ladder(path: Path) -> Callable[[], Figure]:
    return lambda: plot_ladder(load_record(path))


def _predicted(path: Path) -> Callable[[], Figure]:
    return lambda: plot_predictions(load_record(path))


def _step(paths: list[Path], batches: int, dark: bool) -> Callable[[], Figure]:
    return lambda: plot_timelines(*map(load_timeline, paths), batches=batches, dark=dark)


def _fingerprint(paths: list[Path], *modules) -> str:
    total = hashlib.sha256()
    for path in paths:
        total.update(path.read_bytes())
    for module in modules:
        total.update(inspect.getsource(module).encode())
    return total.hexdigest()[:16]


def main(folder: str | Path = "figures") -> None:
    """Draw them all: `python -m labkit.figures`."""
    for name, (draw, mark) in committed(Path(folder)).items():
        save_figure(draw(), Path(folder, name), mark)


if __name__ == "__main__":
    main()
