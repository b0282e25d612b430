"""The command line: `labkit doctor | run | report | bench | profile | calibrate | predict`.

torch is imported when needed.
"""

import contextlib
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from .errors import LabError
from .presets import MODELS, PRESETS, get_preset

_PROFILE = Path("build/hardware.json")
app = typer.Typer(
    help="Five labs on getting a model's output off the GPU.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
Device = Annotated[str, typer.Option(help="auto, cuda or emulated")]
PresetName = Annotated[str, typer.Option(help=f"auto, {', '.join(PRESETS)}")]


@app.command()
def bench(
    device: Device = "auto",
    preset: PresetName = "auto",
    strategies: Annotated[str | None, typer.Option(help="comma-separated; all by default")] = None,
    batches: Annotated[int | None, typer.Option(help="batches in one run")] = None,
    workers: Annotated[int | None, typer.Option(help="worker processes")] = None,
    slots: Annotated[int | None, typer.Option(help="host buffers in a pool")] = None,
    depth: Annotated[int | None, typer.Option(help="copies in flight in stream_pipeline")] = None,
    images: Annotated[Path | None, typer.Option(help="folder of photographs")] = None,
    model: Annotated[str | None, typer.Option(help=f"another model: {', '.join(MODELS)}")] = None,
    batch: Annotated[int | None, typer.Option(help="images in a batch")] = None,
    image: Annotated[int | None, typer.Option(help="height and width of an image")] = None,
    process: Annotated[str, typer.Option(help="archive or class_map")] = "archive",
    predict: Annotated[bool, typer.Option("--predict", help="calibrate and predict first")] = False,
    json: Annotated[Path | None, typer.Option(help="write the record to this file")] = None,
) -> None:
    """Time the strategies and print the ladder."""
    changes = {
        "batches": batches, "workers": workers, "slots": slots, "depth": depth,
        "model": model, "batch": batch, "image": image,
    }  # fmt: skip
    # Everything that can be refused is refused before torch is loaded.
    get_preset(preset, "emulated", **changes)
    _load_torch()
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from .calibration import calibrate as measure_costs
    from .device import open_device
    from .prediction import predict_all
    from .results import check_digests, check_writable, ladder_table, save_record
    from .timing import measure, pick_strategies
    from .workload import segmentation_job

    chosen = pick_strategies(strategies)
    opened = open_device(device)
    if json is not None:
        check_writable(json)
    size = get_preset(preset, opened.kind, **changes)
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    # Drawn between the runs only: a timed loop shares its cores with nothing of ours.
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, auto_refresh=False, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("loading the model", total=None)

        def show(step: str) -> None:
            progress.update(task, description=step)
            progress.refresh()

        progress.refresh()
        job = segmentation_job(size, opened, process, images=images)
        predictions = None
        if predict:
            costs = measure_costs(job, size, progress=show)
            predictions = predict_all(chosen, costs, size)
        record = measure(job, chosen, size, predictions, progress=show)
        job.close()
    Console().print(ladder_table(record))
    if json is not None:
        save_record(record, json)
    check_digests(record)


@app.command()
def profile(
    strategy: Annotated[str, typer.Argument(help="one of the five strategies")],
    device: Device = "auto",
    preset: PresetName = "auto",
    tool: Annotated[str, typer.Option(help="auto, nsys or torch")] = "auto",
    batches: Annotated[int, typer.Option(help="batches in the captured run")] = 16,
    workers: Annotated[int | None, typer.Option(help="worker processes")] = None,
    slots: Annotated[int | None, typer.Option(help="host buffers in a pool")] = None,
    depth: Annotated[int | None, typer.Option(help="copies in flight in stream_pipeline")] = None,
    out: Annotated[Path, typer.Option(help="folder for figures and traces")] = Path(
        "build/profiles"
    ),
) -> None:
    """Record one strategy's timeline: print where the GPU waits, draw it, keep the trace."""
    changes = {"batches": batches, "workers": workers, "slots": slots, "depth": depth}
    get_preset(preset, "emulated", **changes)
    _load_torch()
    from rich.console import Console

    from .capture import profile_strategy
    from .device import open_device
    from .figures import save_figure
    from .metrics import metrics_table, summarize
    from .plot_timeline import plot_timelines
    from .results import check_writable
    from .trace_files import export_perfetto, save_timeline

    name = _one_strategy(strategy)
    check_writable(out / "trace.json")
    size = get_preset(preset, open_device(device).kind, **changes)
    console = Console(markup=False)
    tell = Console(stderr=True, markup=False).print
    timeline, used = profile_strategy(name, size, device, tool, tell)
    window = timeline.steady()
    found = summarize(timeline, window)
    console.print(metrics_table(found))
    for note in timeline.notes:
        console.print(f"note: {note}")
    console.print(f"Steady state, {window[0]:.3f} to {window[1]:.3f} s: {found.sentence}")
    stem = out / f"{name}_{used}"
    save_figure(plot_timelines(timeline), stem)
    save_timeline(timeline, stem.with_suffix(".json"))
    export_perfetto(timeline, stem.with_suffix(".perfetto.json"))
    console.print(f"wrote {stem}.png, .svg, .json and .perfetto.json (for ui.perfetto.dev)")


@app.command()
def calibrate(
    device: Device = "auto",
    preset: PresetName = "auto",
    workers: Annotated[int | None, typer.Option(help="worker processes")] = None,
    images: Annotated[Path | None, typer.Option(help="folder of photographs")] = None,
    out: Annotated[Path, typer.Option(help="the hardware profile to write")] = _PROFILE,
) -> None:
    """Time every stage of the job, alone and beside the others: what `predict` calculates from."""
    get_preset(preset, "emulated", workers=workers)
    _load_torch()
    from rich.console import Console

    from .calibration import calibrate as measure_costs
    from .costs import costs_table, save_costs
    from .device import open_device
    from .results import check_writable
    from .workload import segmentation_job

    opened = open_device(device)
    check_writable(out)
    size = get_preset(preset, opened.kind, workers=workers)
    console = Console(stderr=True, markup=False)
    job = segmentation_job(size, opened, images=images)
    with contextlib.closing(job):
        costs = measure_costs(job, size, progress=console.print)
    save_costs(costs, out)
    Console(markup=False).print(costs_table(costs), f"wrote {out}", sep="\n")


@app.command()
def predict(
    profile: Annotated[
        str, typer.Argument(help="what labkit calibrate wrote, or h200: the one that is shipped")
    ] = str(_PROFILE),
    preset: PresetName = "auto",
    batches: Annotated[int | None, typer.Option(help="batches in one run", max=10_000)] = None,
    workers: Annotated[int | None, typer.Option(help="worker processes", max=1000)] = None,
    slots: Annotated[int | None, typer.Option(help="host buffers in a pool", max=1000)] = None,
    depth: Annotated[int | None, typer.Option(help="copies in flight in stream_pipeline")] = None,
    advise: Annotated[bool, typer.Option("--advise", help="say what to change")] = False,
    strategy: Annotated[str, typer.Option(help="for --advise: where you are")] = "stream_pipeline",
) -> None:
    """Predict the ladder from a hardware profile; nothing runs."""
    changes = {"batches": batches, "workers": workers, "slots": slots, "depth": depth}
    get_preset(preset, "emulated", **changes)
    from .costs import load_costs, shipped_costs

    costs = shipped_costs() if profile == "h200" else load_costs(profile)
    _load_torch()
    from rich.console import Console

    from .advice import advice_table
    from .advice import advise as find_advice
    from .pipelines import STRATEGIES
    from .prediction import predict_all, prediction_table

    chosen = _one_strategy(strategy)
    name = costs.job["preset"] if preset == "auto" else preset
    size = get_preset(name, costs.device["kind"], batch=costs.batch, **changes)
    console = Console(markup=False)
    console.print(prediction_table(predict_all(STRATEGIES.values(), costs, size), costs))
    if advise:
        console.print(advice_table(find_advice(costs, size, chosen), chosen))


@app.command()
def run(
    notebooks: Annotated[
        list[str] | None, typer.Argument(help="names or paths, such as 02; all by default")
    ] = None,
    device: Device = "auto",
    preset: PresetName = "auto",
    parameter: Annotated[
        list[str] | None, typer.Option("-p", help="name=value, given to every notebook")
    ] = None,
    out: Annotated[Path, typer.Option(help="folder for notebooks, figures, records")] = Path(
        "build"
    ),
    solutions: Annotated[
        bool, typer.Option("--solutions", help="with the exercises solved")
    ] = False,
) -> None:
    """Run the notebooks headlessly and print the ladder of the last one."""
    get_preset(preset, "emulated")
    from .notebooks import find_notebooks, find_source, parse_parameters, run_notebook

    paths = find_notebooks(notebooks or [])
    if solutions:
        for path in paths:
            find_source(path)
    given = [f"device={device}", f"preset={preset}", f"results_dir={out.resolve()}"]
    values = [parse_parameters([*given, *(parameter or [])], path) for path in paths]
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from .course import save_times
    from .device import open_device

    for value in values:
        opened = open_device(value.get("device", device))
        size = get_preset(value.get("preset", preset), opened.kind)
        if "batches" in value:
            get_preset(size.name, opened.kind, batches=value["batches"])
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console, seconds = Console(stderr=True), {}
    with Progress(
        *columns, console=console, refresh_per_second=1, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("", total=len(paths))
        for path, value in zip(paths, values, strict=True):
            progress.update(task, description=path.stem)
            start = time.monotonic()
            run_notebook(path, out, value, solutions)
            seconds[path.stem] = time.monotonic() - start
            progress.console.print(f"{path.stem}: done in {seconds[path.stem]:.0f} s")
            progress.advance(task)
    save_times(seconds, out / "records" / "times.json", opened, size.name, solutions)
    _print_ladder(out / "records" / f"{paths[-1].stem}.json")


@app.command()
def report(
    folder: Annotated[Path, typer.Option("--from", help="what `labkit run` left")] = Path("build"),
    out: Annotated[Path, typer.Option(help="folder for the site")] = Path("build/site"),
) -> None:
    """Make a static site of the executed notebooks: pages, slides, and an index."""
    from .report import build_site

    print(f"wrote {build_site(folder, out)}")


def _one_strategy(name: str) -> str:
    from .timing import pick_strategies

    if "," in name:
        raise LabError(f"one strategy at a time, got {name!r}")
    return pick_strategies(name)[0].__name__


def _load_torch() -> None:
    """torch drops an interrupt that comes while it imports numpy, so numpy comes first."""
    import numpy  # noqa: F401
    import torch  # noqa: F401


def _print_ladder(path: Path) -> None:
    from rich.console import Console

    from .results import ladder_table, load_record

    if path.exists():
        Console().print(ladder_table(load_record(path)))


@app.command()
def doctor() -> None:
    """Look for what would make the labs fail on this machine, and say how to mend it."""
    from rich.console import Console
    from rich.table import Table

    from .doctor import examine

    table = Table(show_header=False, box=None)
    findings = examine()
    for finding in findings:
        table.add_row(finding.verdict, finding.what, finding.detail, finding.fix)
    Console().print(table)
    if any(finding.verdict == "bad" for finding in findings):
        raise LabError("this machine cannot run the labs as it is: see the lines marked bad")


def main() -> None:
    """Run the command line. Every error is one line on standard error and a non-zero exit."""
    try:
        code = app(standalone_mode=False) or 0
        if code != 130:  # what typer makes of an interrupt
            sys.exit(code)
        message = "interrupted"
    except LabError as error:
        trace = getattr(error, "trace", "")  # of a worker: the user's own code failed there
        message, code = f"{error}\n{trace}".strip(), 1
    except KeyboardInterrupt:
        message, code = "interrupted", 130
    except Exception as error:
        if not hasattr(error, "format_message"):  # the command line's own usage errors have it
            raise
        message, code = error.format_message(), 2
    if message.startswith("Usage:"):  # no verb was given
        print(message)
    else:
        print(f"labkit: {message}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
