"""The command line from outside: what is refused, how, and what a benchmark prints and writes."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from sample_record import RATES, row, sample_record

from labkit import cli, load_costs, load_record
from labkit.results import save_record

LABKIT = Path(sys.executable).with_name("labkit")
# For a command that hangs; the slowest one takes some 20 s on two cores.
LIMIT_S = 150
SMOKE = "--preset", "smoke", "--device", "emulated"
# In the smoke preset: 3 images x 21 classes x 64 x 64 x float32, and three slots of these.
SLOT_BYTES = 3 * 21 * 64 * 64 * 4
POOL_BYTES = 3 * SLOT_BYTES


def labkit(*args, cwd: Path, before=(), **variables) -> subprocess.CompletedProcess:
    """Run the installed `labkit` in the folder `cwd`."""
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "FORCE_COLOR")}
    environment |= variables
    command = [*before, LABKIT, *args]
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )


@pytest.fixture
def here(tmp_path, monkeypatch, capsys):
    """Run `labkit` in this process and in an empty folder: torch need not be loaded again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["labkit", *map(str, args)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        printed = capsys.readouterr()
        return subprocess.CompletedProcess(args, end.value.code, printed.out, printed.err)

    return run


def assert_refused(result, *words) -> str:
    """The error is one line on stderr that starts with `labkit: ` and has all the `words`."""
    assert result.returncode not in (0, None)
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("labkit: ")
    for word in words:
        assert word in lines[0]
    return lines[0]


# Refused before torch is loaded: each in a process of its own.


@pytest.fixture(scope="module")
def no_torch(tmp_path_factory):
    """The value of PYTHONPATH with which importing torch fails."""
    folder = tmp_path_factory.mktemp("no_torch")
    (folder / "torch.py").write_text("raise ImportError('torch was loaded')")
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.mark.parametrize(
    "command, words",
    [
        ("bench --preset nope", ["preset", "nope", "smoke"]),
        ("bench --batches 0", ["batches", "at least 1"]),
        ("bench --batches -3", ["batches", "-3"]),
        ("bench --batches 2.5", ["batches", "integer"]),
        ("bench --workers 0", ["workers"]),
        ("bench --slots -1", ["slots"]),
        ("bench --depth 0", ["depth"]),
        ("bench --depth x", ["depth", "integer"]),
        ("bench --model nope", ["model", "nope", "deeplabv3_resnet50"]),
        ("bench --batch 0", ["batch", "at least 1"]),
        ("bench --image -5", ["image", "-5"]),
        ("profile sequential --batches 0", ["batches", "at least 1"]),
        ("calibrate --workers 0", ["workers", "at least 1"]),
        ("predict missing.json", ["hardware profile", "missing.json"]),
        ("predict --slots 1 --depth 2", ["depth 2", "slots"]),
        ("predict --slots 100000000", ["slots", "1000"]),
        ("bench --preset smoke --depth 4", ["depth 4", "slots", "3"]),
        ("bench --nope", ["--nope"]),
        ("bench extra", ["extra"]),
        ("nope", ["nope"]),
        ("run 09", ["notebook", "'09'", "01_profile_the_baseline"]),
        ("run 0", ["notebook", "'0'"]),
        ("run missing.ipynb", ["notebook", "missing.ipynb"]),
        ("run 01 --preset nope", ["preset", "nope"]),
        ("run 01 -p nope=1", ["01_profile_the_baseline", "nope", "batches"]),
    ],
)
def test_refused_at_once(tmp_path, no_torch, command, words):
    result = labkit(*command.split(), cwd=tmp_path, PYTHONPATH=no_torch)
    assert_refused(result, *words)
    assert list(tmp_path.iterdir()) == []


# Refused later: in this process, where torch and Jupyter's modules are loaded only once.


@pytest.mark.parametrize(
    "command, words",
    [
        ("bench --device tpu --json new/record.json", ["device", "tpu", "emulated"]),
        ("bench --strategies sequential,nope", ["strategy", "nope", "stream_pipeline"]),
        ("bench --strategies ,", ["strategy", "sequential"]),
        ("bench --preset smoke --device emulated --images missing", ["folder", "missing"]),
        ("bench --preset smoke --device emulated --process nope", ["process", "nope"]),
        ("profile sequential,multi_worker", ["one strategy", "sequential,multi_worker"]),
        ("calibrate --device tpu", ["device", "tpu"]),
        ("run -p compiled=true", ["01_profile_the_baseline", "compiled"]),
        ("run 01 -p batches=many", ["batches", "int", "many"]),
        ("run 01 -p batches=1.5", ["batches", "int", "1.5"]),
        ("run 05 -p compiled=1", ["compiled", "true or false"]),
        ("run 01 -p batches", ["batches", "name=value"]),
        ("run 01 --device tpu", ["device", "tpu"]),
        ("run 01 -p device=tpu", ["device", "tpu"]),
        ("run 01 -p preset=nope", ["preset", "nope"]),
        ("run 01 --device emulated --preset smoke -p batches=0", ["batches", "0"]),
        ("run 01 --device emulated --preset smoke -p batches=-2", ["batches", "-2"]),
    ],
)
def test_refused_before_anything_is_written(here, tmp_path, command, words):
    assert_refused(here(*command.split()), *words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", ["bench", "run"])
def test_cuda_without_a_gpu(here, tmp_path, command):
    assert_refused(here(command, "--device", "cuda"), "cuda", "emulated")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["nothing", "text", "half an image", "a folder", "a file"])
def test_bad_image_folder(here, tmp_path, content):
    folder = tmp_path / "photos"
    folder.mkdir()
    named = "photos"
    if content == "text":
        (folder / "notes.txt").write_text("no image")
    elif content == "half an image":
        Image.effect_noise((64, 64), 50).save(folder / "bad.png")
        data = (folder / "bad.png").read_bytes()
        (folder / "bad.png").write_bytes(data[: len(data) // 2])
        named = "bad.png"
    elif content == "a folder":
        (folder / "bad.jpg").mkdir()
        named = "bad.jpg"
    elif content == "a file":
        folder = folder / "photo.png"
        Image.new("RGB", (8, 8)).save(folder)
        named = "photo.png"
    assert_refused(here("bench", *SMOKE, "--images", folder, "--json", "record.json"), named)
    assert not (tmp_path / "record.json").exists()


@pytest.mark.parametrize("place", ["file/record.json", ".", "x" * 300, "/proc/record.json"])
def test_a_record_that_cannot_be_written_is_refused_before_measuring(
    here, tmp_path, monkeypatch, place
):
    from labkit import timing

    def measure(*args, **kwargs):
        raise AssertionError("measured first")

    monkeypatch.setattr(timing, "measure", measure)
    (tmp_path / "file").write_text("a file")
    assert_refused(here("bench", *SMOKE, "--json", place), "write")
    assert (tmp_path / "file").read_text() == "a file"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_folder_that_cannot_be_written_is_refused_before_running(here, tmp_path):
    (tmp_path / "file").write_text("a file")
    result = here("run", "01", *SMOKE, "--out", "file/build")
    assert result.returncode == 1
    assert re.search(r"^labkit: .*file/build", result.stderr, re.MULTILINE)
    assert "Traceback" not in result.stderr
    assert len(list(tmp_path.iterdir())) == 1


def test_shared_memory_too_small(tmp_path):
    mount = "mount -t tmpfs -o size=512k tmpfs /dev/shm"
    before = ["unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh"]
    if not shutil.which("unshare") or subprocess.run([*before, "true"]).returncode:
        pytest.skip("nothing can be mounted here")
    result = labkit("bench", *SMOKE, "--json", "record.json", cwd=tmp_path, before=before)
    assert_refused(result, f"{POOL_BYTES:,}", f"{2**19:,}", "slots", "shm")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="shared memory has no limit here")
def test_shared_memory_too_small_is_refused_before_measuring(here, tmp_path, monkeypatch):
    # One slot fits and the pool does not: what was measured first would be lost.
    def measure_ceiling(*args):
        raise AssertionError("measured first")

    usage = type("Usage", (), {"free": POOL_BYTES - 1})
    monkeypatch.setattr("labkit.timing.measure_ceiling", measure_ceiling)
    monkeypatch.setattr("labkit.buffers.shutil.disk_usage", lambda folder: usage)
    result = here("bench", *SMOKE, "--json", "record.json")
    assert_refused(result, f"{POOL_BYTES:,}", f"{POOL_BYTES - 1:,} free", "slots")
    assert list(tmp_path.iterdir()) == []


# Help.


@pytest.mark.parametrize(
    "command",
    [
        "--help",
        "bench --help",
        "run --help",
        "doctor --help",
        "profile --help",
        "calibrate --help",
        "predict --help",
    ],
)
def test_help_loads_nothing_heavy(tmp_path, command):
    before = [sys.executable, "-X", "importtime"]
    result = labkit(*command.split(), cwd=tmp_path, before=before)
    assert result.returncode == 0
    assert "Usage: labkit" in result.stdout
    loaded = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "labkit.cli" in loaded
    assert loaded.isdisjoint({"torch", "numpy", "matplotlib", "papermill", "PIL", "IPython"})


def test_help_names_what_there_is(tmp_path):
    text = labkit("--help", cwd=tmp_path).stdout
    verbs = "bench", "run", "report", "doctor", "profile", "calibrate", "predict"
    assert all(verb in text for verb in verbs)
    text = labkit("bench", "--help", cwd=tmp_path).stdout
    options = {"device", "preset", "strategies", "batches", "workers", "slots", "depth"}
    options |= {"model", "batch", "image", "process", "predict"}
    for option in options | {"images", "json"}:
        assert f"--{option}" in text
    text = labkit("run", "--help", cwd=tmp_path).stdout
    assert all(option in text for option in ("--device", "--preset", "-p", "--out"))


def test_without_a_verb_the_help_is_shown(tmp_path):
    result = labkit(cwd=tmp_path)
    text = result.stdout + result.stderr
    assert text.startswith("Usage: labkit"), "help is not an error message"
    assert result.returncode in (0, 2)


# A benchmark, and its prediction.


def test_what_was_calibrated_is_predicted(here, tmp_path):
    result = here("calibrate", *SMOKE)
    assert result.returncode == 0, result.stderr
    assert "EMULATED" in result.stdout and "touched copy" in result.stdout
    assert load_costs(tmp_path / "build" / "hardware.json").job["preset"] == "smoke"
    result = here("predict", "--advise", "--strategy", "buffer_pool")
    assert result.returncode == 0, result.stderr
    assert result.stdout.lstrip().startswith("PREDICTED")
    for name in RATES:
        assert f"  {name} " in result.stdout
    assert "one change to buffer_pool" in result.stdout
    assert "strategy stream_pipeline" in result.stdout


def test_bench_of_another_job_with_its_prediction(here, tmp_path):
    given = (
        "--model deeplabv3_mobilenet_v3_large --batch 2 --image 48 --process class_map --batches 3"
    )
    chosen = "sequential,pinned_async"
    result = here(
        "bench", *SMOKE, *given.split(), "--strategies", chosen, "--predict", "--json", "r.json"
    )
    assert result.returncode == 0, result.stderr
    record = load_record(tmp_path / "r.json")
    job = record["job"]
    assert (job["batch"], job["image"], job["process"], job["batches"]) == (2, 48, "class_map", 3)
    assert all(row["predicted_samples_per_s"] > 0 for row in record["strategies"])
    assert "predicted" in result.stdout


@pytest.fixture(scope="session")
def smoke(tmp_path_factory):
    """One whole benchmark: what it printed, and the record that it wrote."""
    folder = tmp_path_factory.mktemp("bench")
    result = labkit("bench", *SMOKE, "--json", "new folder/record.json", cwd=folder)
    return result, folder / "new folder" / "record.json"


def test_bench_writes_a_record(smoke):
    result, path = smoke
    assert result.returncode == 0, result.stderr
    record = load_record(path)
    assert [row["name"] for row in record["strategies"]] == list(RATES)
    assert record["device"]["kind"] == "emulated"
    assert record["device"]["profile"] == "classroom"
    assert record["job"]["preset"] == "smoke"
    assert record["job"]["output_bytes"] == SLOT_BYTES
    assert record["job"]["batches"] == 6 and record["job"]["samples"] == 17
    assert len({row["digest"] for row in record["strategies"]}) == 1
    assert [file.name for file in path.parent.iterdir()] == ["record.json"]
    for each in record["strategies"]:
        low, high = each["spread"]
        assert low <= each["samples_per_s"] <= high
        assert each["workers"] == (0 if each["name"] == "sequential" else 2)


def test_bench_prints_the_ladder(smoke):
    result, path = smoke
    lines = result.stdout.splitlines()
    assert "EMULATED" in result.stdout
    assert max(map(len, lines)) <= 80
    assert "…" not in result.stdout and "..." not in result.stdout
    record = load_record(path)
    for name in RATES:
        line = next(line for line in lines if name in line)
        base, rate = (row(record, n)["samples_per_s"] for n in ("sequential", name))
        assert f"{rate / base:.2f}x" in line
    assert any("ceiling" in line for line in lines)
    assert "Traceback" not in result.stderr
    assert "wrong" not in result.stdout


def photographs(folder: Path, count: int) -> Path:
    folder.mkdir()
    for number in range(count):
        Image.effect_noise((50 + number, 40), 60).save(folder / f"{number}.png")
    return folder


def test_bench_on_a_folder_of_images(here, tmp_path):
    folder = photographs(tmp_path / "photos é", 3)
    result = here("bench", *SMOKE, "--images", folder, "--batches", "4", "--workers", "1",
                  "--strategies", "sequential,stream_pipeline", "--depth", "3",
                  "--json", "record.json")  # fmt: skip
    assert result.returncode == 0, result.stderr
    record = load_record(tmp_path / "record.json")
    assert record["job"]["batches"] == 4
    assert record["job"]["samples"] == 11, "the last batch stays a partial one"
    assert [r["name"] for r in record["strategies"]] == ["sequential", "stream_pipeline"]
    assert row(record, "stream_pipeline")["depth"] == 3
    assert row(record, "stream_pipeline")["workers"] == 1
    assert len({row["digest"] for row in record["strategies"]}) == 1
    assert re.search(r"stream_pipeline .*\dx", result.stdout)


def test_bench_on_one_image_without_the_baseline(here, tmp_path):
    folder = photographs(tmp_path / "photos", 1)
    result = here("bench", *SMOKE, "--images", folder, "--batches", "2", "--slots", "2",
                  "--strategies", "buffer_pool,pinned_async", "--json", "record.json")  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert not re.search(r"\dx", result.stdout), "a gain over what?"
    record = json.loads((tmp_path / "record.json").read_text())
    assert [r["slots"] for r in record["strategies"]] == [2, 2]
    assert record["job"]["batches"] == 2


def test_wrong_results_fail_the_benchmark(here, monkeypatch):
    from labkit import timing, workload

    class Nothing:
        def close(self):
            pass

    record = sample_record()
    for each in record["strategies"][1:]:
        each["digest"] = "f" * 32
    monkeypatch.setattr(workload, "segmentation_job", lambda *args, **kwargs: Nothing())
    monkeypatch.setattr(timing, "measure", lambda *args, **kwargs: record)
    result = here("bench", *SMOKE)
    assert result.returncode == 1
    assert re.search(r"^labkit: multi_worker .*f{32}", result.stderr, re.MULTILINE)
    assert not re.search(r"[1-9]\d*\.\d\dx", result.stdout.replace("1.00x", ""))
    for name in list(RATES)[1:]:
        assert re.search(rf"{name} .*wrong", result.stdout)


def test_run_prints_the_ladder_of_the_last_notebook(tmp_path, capsys):
    save_record(sample_record(), tmp_path / "record.json")
    cli._print_ladder(tmp_path / "record.json")
    assert "15.00x" in capsys.readouterr().out
    cli._print_ladder(tmp_path / "missing.json")
    assert capsys.readouterr().out == ""


# Doctor.


def test_doctor(here):
    result = here("doctor")
    assert ("bad" in result.stdout) == (result.returncode != 0)
    for what in ("torch", "GPU", "cores", "memory", "kernel"):
        assert what in result.stdout
