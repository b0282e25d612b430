"""`labkit profile`: what it prints and writes, and what it never does."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
import torch
from test_traces import WORKERS, change, real  # noqa: F401

from labkit import LabError, capture, cli, load_timeline
from labkit.presets import get_preset
from labkit.timeline import Span, Timeline

SMOKE = get_preset("smoke", "emulated")
FILES = {"json", "png", "svg", "perfetto.json"}
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def profile(*arguments, expect=0, capsys=None, monkeypatch=None):
    monkeypatch.setattr(sys, "argv", ["labkit", "profile", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, err = capsys.readouterr()
    assert ended.value.code == expect, err
    return out, err


@pytest.fixture
def run(capsys, monkeypatch):
    return lambda *arguments, expect=0: profile(
        *arguments, expect=expect, capsys=capsys, monkeypatch=monkeypatch
    )


@pytest.mark.parametrize("strategy", ["sequential", "stream_pipeline"])
def test_it_prints_the_metrics_and_writes_four_files(run, tmp_path, strategy):
    out, _ = run(strategy, "--device", "emulated", "--preset", "smoke", "--batches", 8,
                 "--out", tmp_path / "new folder")  # fmt: skip
    for part in (strategy, "EMULATED", "GPU computes", "copies to host", "Steady state"):
        assert part in out
    assert {path.name for path in (tmp_path / "new folder").iterdir()} == {
        f"{strategy}_emulated.{kind}" for kind in FILES
    }
    timeline = load_timeline(tmp_path / "new folder" / f"{strategy}_emulated.json")
    assert timeline.strategy == strategy and timeline.source == "emulated"
    assert {span.batch for span in timeline.lane("compute")} == set(range(8))
    assert timeline.versions == {"torch": torch.__version__}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sequental"], "unknown strategy 'sequental'"),
        (["sequential", "--tool", "vtune"], "unknown tool 'vtune'"),
        (["sequential", "--batches", "0"], "batches must be at least 1"),
        (["sequential", "--preset", "huge"], "unknown preset 'huge'"),
        (["stream_pipeline", "--slots", "1"], "depth 2 needs at least 2 slots"),
        (["sequential", "--out", "FILE"], "cannot write"),
    ],
)
def test_what_is_refused_is_refused_in_one_line(run, tmp_path, monkeypatch, arguments, said):
    monkeypatch.setattr(capture, "segmentation_job", None)  # refused before there is any work
    (tmp_path / "file").touch()
    arguments = [str(tmp_path / "file" / "x") if a == "FILE" else a for a in arguments]
    _, err = run(*arguments, "--device", "emulated", expect=1)
    assert said in err and err.count("\n") == 1


def test_a_profiler_that_sees_no_emulated_device_is_not_started(run, tmp_path):
    _, err = run("sequential", "--device", "emulated", "--preset", "smoke", "--tool", "torch",
                 "--out", tmp_path)  # fmt: skip
    assert "torch sees no emulated device" in " ".join(err.split())
    assert (tmp_path / "sequential_emulated.json").exists()


def test_an_export_holds_nothing_private(tmp_path):
    """Everything that the run can know of this machine is planted; nothing of it comes out."""
    secret = "s3cret-Pa55"
    home = tmp_path / f"home-{secret}"
    home.mkdir()
    private = {"API_KEY": secret, "HOME": str(home), "USER": secret, "LOGNAME": secret}
    subprocess.run(
        [sys.executable, "-m", "labkit.cli", "profile", "multi_worker", "--device", "emulated",
         "--preset", "smoke", "--out", "out"],
        check=True, cwd=home, env={**os.environ, **private, "PYTHONPATH": str(Path.cwd())},
        capture_output=True, timeout=120,
    )  # fmt: skip
    files = list((home / "out").iterdir())
    assert len(files) == 4
    for path in files:
        content = path.read_bytes()
        for word in (secret, os.uname().nodename, str(os.getpid()), str(Path.cwd())):
            if len(word) > 4:
                assert word.encode() not in content, (path.name, word)


# Under nsys. It is not installed where these tests run first, so what stands for it here is a
# script; on a GPU machine that has it the last test runs the real one.

STAND_IN = """#!{python}
import json, os, pathlib, shutil, sys, time
option = dict(a[2:].split("=", 1) for a in sys.argv[2:] if a.startswith("--") and "=" in a)
if sys.argv[1] == "profile":
    {profile}
    order = json.loads(sys.argv[-1])
    pathlib.Path(order["tell"]).write_text("a job")
    pathlib.Path(option["output"] + ".nsys-rep").write_text("report")
    pathlib.Path({log!r}).write_text(json.dumps(sys.argv))
else:
    shutil.copy({export!r}, option["output"])
"""


@pytest.fixture
def nsys(tmp_path, real):  # noqa: F811
    """Makes a stand-in for nsys that does `profile` first and exports a real report."""

    def make(profile="pass", export=None):
        path = tmp_path / "nsys"
        path.write_text(
            STAND_IN.format(
                python=sys.executable,
                profile=profile,
                log=str(tmp_path / "log"),
                export=str(export or real(WORKERS)),
            )  # fmt: skip
        )
        path.chmod(0o755)
        return str(path)

    return make


def left_behind():
    return [path for path in Path("/tmp").glob("labkit-*") if path.is_dir()]


def test_nsys_is_told_to_take_children_and_a_range_and_no_samples(nsys, tmp_path):
    before = left_behind()
    timeline = capture._with_nsys(nsys(), "pinned_async", SMOKE)
    assert (timeline.strategy, timeline.job) == ("pinned_async", "a job")
    assert timeline.source == "Nsight Systems"
    told = json.loads((tmp_path / "log").read_text())
    for option in ("--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none",
                   "--trace-fork-before-exec=true", "--capture-range=cudaProfilerApi",
                   "--capture-range-end=stop"):  # fmt: skip
        assert option in told
    order = json.loads(told[-1])
    assert order["strategy"] == "pinned_async" and order["preset"] == asdict(SMOKE)
    assert left_behind() == before


def test_the_environment_in_a_report_goes_no_further(nsys, real, tmp_path):  # noqa: F811
    secret = "s3cret-Pa55"
    report = change(
        real(WORKERS),
        "CREATE TABLE TARGET_INFO_SYSTEM_ENV (name TEXT, value TEXT)",
        f"INSERT INTO TARGET_INFO_SYSTEM_ENV VALUES ('API_KEY', '{secret}')",
        f"INSERT INTO StringIds VALUES (99999999, '{secret}')",
        f"INSERT INTO META_DATA_EXPORT VALUES ('EXPORT_PARAM_OUTPUT_PATH', '/home/{secret}')",
        f"UPDATE TARGET_INFO_GPU SET uuid = '{secret}'",
        "CREATE TABLE PROCESSES (globalPid INTEGER, name TEXT)",
        f"INSERT INTO PROCESSES VALUES (1, '{secret}')",
    )
    export = shutil.copy(report, tmp_path / "planted.sqlite")
    assert secret.encode() in Path(export).read_bytes()
    from labkit.figures import save_figure
    from labkit.plot_timeline import plot_timelines
    from labkit.trace_files import export_perfetto, save_timeline

    timeline = capture._with_nsys(nsys(export=export), "sequential", SMOKE)
    out = tmp_path / "out"
    save_timeline(timeline, out / "a.json")
    export_perfetto(timeline, out / "b.json")
    save_figure(plot_timelines(timeline), out / "c")
    assert len(list(out.iterdir())) == 4
    for path in out.iterdir():
        assert secret.encode() not in path.read_bytes()


def test_a_failed_run_under_nsys_says_what_the_run_said(nsys):
    failing = nsys("print('labkit: no slots left', flush=True); print('nsys: done'); sys.exit(1)")
    with pytest.raises(LabError, match="nsys left no report: no slots left"):
        capture._with_nsys(failing, "sequential", SMOKE)
    silent = nsys("sys.exit(3)")
    with pytest.raises(LabError, match="it said nothing"):
        capture._with_nsys(silent, "sequential", SMOKE)


def test_a_failed_run_never_reads_another_run_s_report(nsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("run.nsys-rep", "run.sqlite", "job"):
        Path(name).write_text("stale")
    with pytest.raises(LabError, match="left no report"):
        capture._with_nsys(nsys("sys.exit(0)"), "sequential", SMOKE)


def test_a_report_that_cannot_be_exported(nsys, tmp_path):
    with pytest.raises(LabError, match="could not export its report: .*missing"):
        capture._with_nsys(nsys(export=tmp_path / "missing"), "sequential", SMOKE)


@pytest.mark.timeout(60, method="signal")
def test_nsys_that_hangs_is_ended_with_its_children(nsys, monkeypatch, tmp_path):
    monkeypatch.setattr(capture, "_NSYS_LIMIT_S", 3)
    monkeypatch.setattr(capture, "_END_LIMIT_S", 0.5)
    hanging = (
        "import signal, subprocess; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    child = subprocess.Popen(['sleep', '100'])\n"
        "    pids = f'{os.getpid()} {child.pid}'\n"
        f"    pathlib.Path({str(tmp_path / 'pids')!r}).write_text(pids)\n"
        "    time.sleep(100)"
    )
    with pytest.raises(LabError, match="did not end within 3 s"):
        capture._with_nsys(nsys(hanging), "sequential", SMOKE)
    for pid in map(int, (tmp_path / "pids").read_text().split()):
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_workers_are_put_on_the_profiler_s_clock():
    device = {"kind": "cuda", "name": "x", "profile": None}
    recorded = [Span("host", "forward", 0.0, 0.1, 0), Span("host", "copy", 0.2, 0.4, 0),
                Span("worker 0", "process", 0.5, 0.6, 0)]  # fmt: skip
    profiled = [Span("upload", "upload", 0.0, 1.0), *(
        span._replace(start=span.start + 2, end=span.end + 2) for span in recorded[:2]
    )]  # fmt: skip
    both = capture._with_workers_of(
        Timeline(profiled, "torch.profiler", device), Timeline(recorded, "CUDA events", device)
    )
    [worker] = both.lane("worker 0")
    assert (worker.start, worker.end) == pytest.approx((2.5, 2.6))
    assert both.lanes == ["host", "upload", "worker 0"]
    nothing_common = Timeline([Span("compute", "k", 0.0, 1.0)], "torch.profiler", device)
    assert capture._with_workers_of(nothing_common, both) == nothing_common


# On a GPU.


@NEEDS_CUDA
@pytest.mark.parametrize("strategy", ["sequential", "stream_pipeline"])
def test_torch_profiler_on_a_gpu(strategy):
    timeline, tool = capture.profile_strategy(strategy, SMOKE, "cuda", "torch")
    assert tool == "torch" and timeline.source == "torch.profiler"
    whole_run(timeline, strategy)


def whole_run(timeline, strategy):
    batches = set(range(SMOKE.batches))
    assert {span.batch for span in timeline.lane("compute")} == batches
    copies = {span.batch: span for span in timeline.lane("copy")}
    assert copies.keys() == batches
    assert {span.pinned for span in copies.values()} == {strategy == "stream_pipeline"}
    assert copies[0].bytes == 3 * 21 * 64 * 64 * 4
    lanes = [lane for lane in timeline.lanes if lane.startswith("worker")]
    processing = [
        s for lane in lanes or ["host"] for s in timeline.lane(lane) if s.name == "process"
    ]
    assert {span.batch for span in processing} == batches
    for span in processing:
        assert copies[span.batch].end <= span.start + 1e-3


@NEEDS_CUDA
@pytest.mark.parametrize("name", ["NSYS_PROFILING_SESSION_ID", "CUDA_INJECTION64_PATH"])
def test_inside_a_profiler_torch_s_own_stays_off_and_says_why(monkeypatch, name):
    monkeypatch.setenv(name, "1")
    said = []
    timeline, tool = capture.profile_strategy("pinned_async", SMOKE, "cuda", "auto", said.append)
    assert tool == "events" and timeline.source == "CUDA events"
    assert len(said) == 1 and name in said[0] and "torch.profiler stays off" in said[0]


@NEEDS_CUDA
def test_auto_goes_on_with_torch_when_nsys_fails(nsys, monkeypatch, tmp_path):
    nsys("print('no permission'); sys.exit(1)")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    said = []
    _, tool = capture.profile_strategy("sequential", SMOKE, "cuda", "auto", said.append)
    assert tool == "torch" and "no permission" in said[0]
    with pytest.raises(LabError, match="no permission"):
        capture.profile_strategy("sequential", SMOKE, "cuda", "nsys")


@NEEDS_CUDA
@pytest.mark.skipif(not shutil.which("nsys"), reason="needs Nsight Systems")
@pytest.mark.parametrize("strategy", ["sequential", "stream_pipeline"])
def test_the_real_nsys(strategy, monkeypatch, tmp_path):
    secret = "s3cret-Pa55"
    monkeypatch.setenv("API_KEY", secret)
    from labkit.trace_files import save_timeline

    kept = []
    load = capture.load_timeline
    monkeypatch.setattr(
        capture, "load_timeline", lambda path: kept.append(Path(path).read_bytes()) or load(path)
    )
    timeline, tool = capture.profile_strategy(strategy, SMOKE, "cuda", "auto")
    assert tool == "nsys" and timeline.source == "Nsight Systems"
    whole_run(timeline, strategy)
    assert secret.encode() in kept[0]  # Nsight did write it down
    assert secret.encode() not in save_timeline(timeline, tmp_path / "t.json").read_bytes()
    assert "batches of 3" in timeline.job
