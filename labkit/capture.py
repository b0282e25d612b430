"""Capture a strategy's timeline: live in this process, or with a profiler for `labkit profile`.

Nsight Systems and torch.profiler both read the GPU's own records of kernels and copies through
CUPTI, which serves one of them at a time. Nsight wraps a process from its start, so a capture
with it runs this module in a process of its own, the workers being that one's children.
"""

import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from .device import open_device
from .errors import LabError
from .hardware import default_workers, describe_host
from .job import Job
from .pipelines import STRATEGIES
from .presets import Preset
from .recorder import Recorder
from .timeline import Timeline
from .timing import open_parts, warm_up
from .trace_files import load_timeline
from .workload import segmentation_job

TOOLS = ("auto", "nsys", "torch")
# For a run that hangs under nsys; and for nsys, which may wait for a process that it lost.
_NSYS_LIMIT_S = 600
_END_LIMIT_S = 10


def capture_timeline(job: Job, strategy: Callable, preset: Preset, batches: int = 12) -> Timeline:
    """Run `strategy` on the first `batches` of `job`, warmed up, and record it live.

    Raises what the strategy raises.
    """
    with _ready(job, strategy, preset, batches) as run, Recorder(job.device) as recorder:
        run()
    return recorder.timeline(strategy.__name__, _describe(job))


def profile_strategy(
    strategy: str, preset: Preset, device: str = "auto", tool: str = "auto", progress=print
) -> tuple[Timeline, str]:
    """The timeline of a strategy on the labs' own job, and the tool that took it.

    `auto` takes Nsight Systems where it is installed and torch.profiler otherwise. The emulated
    device keeps its own records. `progress` is called with a sentence where the choice needs a
    reason. Raises LabError for an unknown name and when the run fails.
    """
    if tool not in TOOLS:
        raise LabError(f"unknown tool {tool!r}: choose {', '.join(TOOLS)}")
    opened = open_device(device)
    nsys, wrapper = shutil.which("nsys"), _wrapper()
    if opened.kind == "emulated":
        if tool != "auto":
            progress(f"{tool} sees no emulated device: taking the device's own records")
        tool = "emulated"
    elif wrapper:
        progress(
            f"{wrapper} is set: a profiler wraps this process and has CUPTI, which serves one at "
            "a time, so torch.profiler stays off: taking CUDA events"
        )
        tool = "events"
    elif tool == "nsys" and not nsys:
        raise LabError("nsys is not on the PATH: install Nsight Systems, or choose --tool torch")
    elif tool != "torch" and nsys:
        try:
            return _with_nsys(nsys, strategy, preset), "nsys"
        except LabError as error:
            if tool == "nsys":
                raise
            progress(f"{error}: taking torch.profiler instead")
    job = segmentation_job(preset, opened)
    with contextlib.closing(job):
        if tool in ("emulated", "events"):
            return capture_timeline(job, STRATEGIES[strategy], preset, job.count), tool
        return _with_torch(job, STRATEGIES[strategy], preset), "torch"


@contextmanager
def _ready(job: Job, strategy: Callable, preset: Preset, batches: int) -> Iterator[Callable]:
    """`strategy` with all its parts open and warmed up, as a function without arguments."""
    workers = preset.workers or default_workers()
    with open_parts(strategy, job, preset, workers) as parts:
        warm_up(strategy, job, parts, workers + 2 * preset.slots)
        job.device.synchronize()
        yield lambda: strategy(job.first(batches), **parts)


def _describe(job: Job) -> str:
    megabytes = job.output_bytes / 1e6
    return f"{job.name}, batches of {job.batch} ({megabytes:.0f} MB of output)"


def _wrapper() -> str | None:
    """The variable by which a profiler has told CUDA in this process that it is there."""
    names = "NSYS_PROFILING_SESSION_ID", "CUDA_INJECTION64_PATH"
    return next((name for name in names if os.environ.get(name)), None)


def _with_torch(job: Job, strategy: Callable, preset: Preset) -> Timeline:
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with _ready(job, strategy, preset, job.count) as run:
        # The first profile of a process pays for CUPTI.
        with profile(activities=activities, acc_events=True):
            job.forward(next(job.batches()))
            job.device.synchronize()
        with (
            profile(activities=activities, acc_events=True) as profiled,
            Recorder(job.device, device_events=False) as recorder,
        ):
            run()
    with tempfile.TemporaryDirectory(prefix="labkit-") as folder:
        path = Path(folder, "trace.json")
        profiled.export_chrome_trace(str(path))
        timeline = load_timeline(path)
    timeline = _with_workers_of(timeline, recorder.timeline())
    return _named(timeline, strategy.__name__, _describe(job))


def _with_workers_of(profiled: Timeline, recorded: Timeline) -> Timeline:
    """`profiled`, and the workers of the same run, which torch.profiler does not see.

    The clocks are set by the host's ranges, which both have.
    """
    mine, theirs = (
        {(span.name, span.batch): span.start for span in timeline.lane("host")}
        for timeline in (profiled, recorded)
    )
    common = mine.keys() & theirs.keys()
    if not common:
        return profiled
    shift = statistics.median(mine[key] - theirs[key] for key in common)
    workers = [
        span._replace(start=span.start + shift, end=span.end + shift)
        for span in recorded.spans
        if span.lane.startswith("worker ")
    ]
    return replace(profiled, spans=profiled.spans + workers)


def _named(timeline: Timeline, strategy: str, job: str) -> Timeline:
    versions = {**timeline.versions, "torch": describe_host()["torch"]}
    return replace(timeline, strategy=strategy, job=job, versions=versions)


def _with_nsys(nsys: str, strategy: str, preset: Preset) -> Timeline:
    # A folder of its own, so that no report of another run can be taken for this one's. It holds
    # the machine's whole environment and goes when its spans have been read.
    with tempfile.TemporaryDirectory(prefix="labkit-") as folder:
        report, sqlite, told = (
            Path(folder, name) for name in ("run.nsys-rep", "run.sqlite", "job")
        )
        order = {"strategy": strategy, "preset": asdict(preset), "tell": str(told)}
        output = _run(
            nsys, "profile", "--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none",
            "--trace-fork-before-exec=true", "--capture-range=cudaProfilerApi",
            "--capture-range-end=stop", f"--output={report.with_suffix('')}",
            sys.executable, "-m", "labkit.capture", json.dumps(order),
        )  # fmt: skip
        if not (told.exists() and report.exists()):
            raise LabError(f"nsys left no report: {_last_words(output)}")
        output = _run(nsys, "export", "--type=sqlite", f"--output={sqlite}", str(report))
        if not sqlite.exists():
            raise LabError(f"nsys could not export its report: {_last_words(output)}")
        return _named(load_timeline(sqlite), strategy, told.read_text())


def _run(*command: str) -> str:
    """Run `command` to its end and return what it printed; it never outlives this call."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        start_new_session=True,
    )  # fmt: skip
    try:
        return process.communicate(timeout=_NSYS_LIMIT_S)[0]
    except subprocess.TimeoutExpired:
        raise LabError(f"{command[0]} did not end within {_NSYS_LIMIT_S} s") from None
    finally:
        if process.poll() is None:
            process.terminate()  # nsys ends what it has started
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.communicate(timeout=_END_LIMIT_S)
            finally:  # after a second interrupt, too
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _last_words(output: str) -> str:
    """What went wrong, from all that nsys and the run printed."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("labkit: ")]
    return (ours or lines or ["it said nothing"])[-1].removeprefix("labkit: ")


def main(order: str) -> None:
    """The run that nsys wraps: warm up, let it listen, run, let it stop."""
    import torch

    order = json.loads(order)
    preset = Preset(**order["preset"])
    strategy = STRATEGIES[order["strategy"]]
    job = segmentation_job(preset, open_device("cuda"))
    with _ready(job, strategy, preset, job.count) as run:
        torch.cuda.profiler.start()
        run()
        job.device.synchronize()
        Path(order["tell"]).write_text(_describe(job))  # nsys may end us when it stops
        torch.cuda.profiler.stop()


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except LabError as error:
        sys.exit(f"labkit: {error}")
