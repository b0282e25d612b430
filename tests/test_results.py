"""Records and figures: what is written is whole, what is read is checked, what is shown is true."""

import errno
import inspect
import io
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from rich.console import Console
from sample_record import RATES, row, sample_record

from labkit import LabError, check_digests, ladder_table, load_record, plot_ladder, save_record
from labkit.figures import committed, main, save_figure
from labkit.plots import describe_ladder, plot_predictions
from labkit.results import check_writable, speedup, title

FIGURES = Path(__file__).parent.parent / "figures"


def refusal(action, *args) -> str:
    """The one line that `action` is refused with."""
    with pytest.raises(LabError) as error:
        action(*args)
    text = str(error.value)
    assert text.strip() and "\n" not in text
    return text


# Writing.


def test_what_is_saved_is_loaded(tmp_path):
    path = tmp_path / "new" / "folder é" / "record.json"
    assert save_record(sample_record(), path) == path
    assert load_record(path) == sample_record()
    changed = sample_record("cuda")
    save_record(changed, path)
    assert load_record(str(path)) == changed
    assert [file.name for file in path.parent.iterdir()] == ["record.json"]


def unwritable(tmp_path) -> dict[str, Path]:
    (tmp_path / "file").write_text("a file")
    (tmp_path / "folder").mkdir()
    return {
        "below a file": tmp_path / "file" / "record.json",
        "further below a file": tmp_path / "file" / "folder" / "record.json",
        "a folder": tmp_path / "folder",
        "a name that is too long": tmp_path / ("x" * 300),
        "a folder that takes no files": Path("/proc/record.json"),
    }


PLACES = ["below a file", "further below a file", "a folder", "a name that is too long",
          "a folder that takes no files"]  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("action", [check_writable, lambda p: save_record(sample_record(), p)],
                         ids=["asked before", "saved"])  # fmt: skip
def test_a_place_that_cannot_be_written(tmp_path, place, action):
    path = unwritable(tmp_path)[place]
    before = sorted(tmp_path.rglob("*"))
    assert str(path)[:50] in refusal(action, path)
    assert sorted(tmp_path.rglob("*")) == before


def test_asking_whether_a_place_can_be_written_leaves_nothing(tmp_path):
    check_writable(tmp_path / "record.json")
    assert list(tmp_path.iterdir()) == []
    save_record(sample_record(), tmp_path / "record.json")
    check_writable(tmp_path / "record.json")
    assert load_record(tmp_path / "record.json") == sample_record()


@pytest.mark.parametrize("step", ["write", "replace"])
def test_a_full_disk_leaves_the_old_record(tmp_path, monkeypatch, step):
    path = tmp_path / "record.json"
    save_record(sample_record(), path)

    def write_half(self, text, *args, **kwargs):
        with self.open("w") as file:
            file.write(text[: len(text) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def replace(self, target):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        if step == "write":
            patch.setattr(Path, "write_text", write_half)
        else:
            patch.setattr(Path, "replace", replace)
        changed = sample_record("cuda")
        assert str(path) in refusal(save_record, changed, path)
    assert load_record(path) == sample_record()
    assert [file.name for file in tmp_path.iterdir()] == ["record.json"]


# Reading.


def changed(**places) -> str:
    """A record's JSON with one value changed: `ceiling__copy_s=1`, `strategies__0__name=...`."""
    record = sample_record()
    for place, value in places.items():
        *steps, last = [int(step) if step.isdigit() else step for step in place.split("__")]
        part = record
        for step in steps:
            part = part[step]
        if value is KeyError:
            del part[last]
        else:
            part[last] = value
    return json.dumps(record)


BROKEN = {
    "empty": "",
    "truncated": changed()[:-200],
    "not JSON": "samples_per_s: 12",
    "no text": b"\xff\xfe\x00\x80",
    "a list": f"[{changed()}]",
    "null": "null",
    "two records": changed() + changed(),
    "too deep to parse": "[" * 100_000,
    "deep": "[" * 900 + "]" * 900,
    "a record and then much of nothing": changed() + " " * 2**21,
    "huge": changed(host__python="3" * 2**21),
    "a number of 5000 digits": changed().replace("100.0", "1" + "0" * 5000),
    "another schema": changed(schema=2),
    "no schema": changed(schema=KeyError),
    "an unknown kind": changed(device__kind="tpu"),
    "no ceiling": changed(ceiling=KeyError),
    "no strategies": changed(strategies=[]),
    "strategies are numbers": changed(strategies=list(range(20_000))),
    "no digest": changed(strategies__2__digest=KeyError),
    "a digest that is a list": changed(strategies__0__digest=["a"]),
    "one end of the spread": changed(strategies__0__spread=[90.0]),
    "a rate that is text": changed(strategies__0__samples_per_s="100"),
    "a rate that is true": changed(strategies__0__samples_per_s=True),
    "zero": changed(strategies__1__samples_per_s=0),
    "negative": changed(ceiling__samples_per_s=-5),
    "absurd": changed(strategies__0__samples_per_s=1e300),
    "an absurd count": changed(job__batch=10**12),
    "half a batch": changed(job__batch=7.5),
    "a negative count": changed(strategies__0__workers=-1),
    "not a number": changed(strategies__0__samples_per_s=float("nan")),
    "not a number in a spread": changed(strategies__0__spread=[float("nan"), 100.0]),
    "infinite": changed(ceiling__samples_per_s=float("inf")),
    "a ceiling that is not a number": changed(ceiling__samples_per_s=float("nan")),
    "a prediction that is not a number":
        changed(strategies__0__predicted_samples_per_s=float("nan")),
    "an infinite prediction": changed().replace('s_per_s": null', 's_per_s": 1e999', 1),
    "a spread turned round": changed(strategies__0__spread=[110.0, 90.0]),
    "a rate outside its spread": changed(strategies__0__samples_per_s=500.0),
}  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.parametrize("contents", BROKEN.values(), ids=BROKEN)
def test_what_is_no_record_is_refused(tmp_path, contents):
    path = tmp_path / "record.json"
    path.write_bytes(contents if isinstance(contents, bytes) else contents.encode())
    line = refusal(load_record, path)
    assert str(path) in line
    assert len(line) < len(str(path)) + 400


def test_the_unbroken_record_is_not_refused(tmp_path):
    (tmp_path / "record.json").write_text(changed())
    assert load_record(tmp_path / "record.json") == sample_record()


def test_no_file_to_read(tmp_path):
    assert "missing.json" in refusal(load_record, tmp_path / "missing.json")
    assert str(tmp_path) in refusal(load_record, tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_file_that_never_ends_is_refused(tmp_path):
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    lines = []
    reader = threading.Thread(target=lambda: lines.append(refusal(load_record, pipe)), daemon=True)
    reader.start()
    reader.join(10)
    hung = reader.is_alive()
    if hung:
        pipe.open("w").close()  # lets the reader go
        reader.join(10)
    assert not hung, "load_record waits for whoever writes into the pipe"
    assert "pipe.json" in lines[0]


# What is shown.


def wrong(name: str, kind: str = "emulated") -> dict:
    """A record in which that strategy returned other results."""
    record = sample_record(kind)
    row(record, name)["digest"] = "f" * 32
    return record


def without(name: str) -> dict:
    record = sample_record()
    record["strategies"].remove(row(record, name))
    return record


def show(record: dict, width: int = 80) -> str:
    screen = io.StringIO()
    Console(file=screen, width=width).print(ladder_table(record))
    return screen.getvalue()


def test_speedup_is_over_sequential():
    record = sample_record()
    for name, rate in RATES.items():
        assert speedup(record, row(record, name)) == pytest.approx(rate / 100)


def test_no_speedup_for_wrong_results_or_without_sequential():
    record = wrong("buffer_pool")
    assert speedup(record, row(record, "buffer_pool")) is None
    assert speedup(record, row(record, "multi_worker")) == pytest.approx(1.5)
    record = without("sequential")
    assert [speedup(record, each) for each in record["strategies"]] == [None] * 4


@pytest.mark.parametrize("kind", ["emulated", "predicted"])
def test_what_is_not_a_gpu_says_so_everywhere(kind):
    record = sample_record(kind)
    assert kind.upper() in title(record)
    assert kind.upper() in describe_ladder(record)
    assert kind.upper() in " ".join(show(record).split())
    assert "not a GPU" in title(record)


def test_a_gpu_is_named():
    text = title(sample_record("cuda"))
    assert "NVIDIA H200" in text
    assert "EMULATED" not in text and "PREDICTED" not in text


def test_table_shows_every_number():
    text = show(sample_record())
    for name, rate, gain in zip(
        RATES,
        ["100", "150", "700", "1,23[45]", "1,500"],
        ["1.00x", "1.50x", "7.00x", "12.3[45]x", "15.00x"],
        strict=True,
    ):
        assert re.search(rf"{name} +{rate} .* {gain}", text), name
    assert re.search(r"ceiling: forward +1,600", text)
    assert re.search(r"stream_pipeline .* 94%", text)


@pytest.mark.parametrize("kind", ["emulated", "cuda"])
def test_table_fits_eighty_columns(kind):
    for record in (sample_record(kind), wrong("stream_pipeline", kind)):
        text = show(record)
        assert "…" not in text and "..." not in text
        assert max(map(len, text.splitlines())) <= 80
        for name in RATES:
            assert name in text


def test_no_gain_is_shown_for_wrong_results():
    text = show(wrong("buffer_pool"))
    line = next(line for line in text.splitlines() if "buffer_pool" in line)
    assert "wrong" in line
    assert "7.00x" not in text
    assert "1.50x" in text
    assert "7.0" not in describe_ladder(wrong("buffer_pool"))


def test_no_gain_is_shown_without_sequential():
    record = without("sequential")
    assert not re.search(r"\dx", show(record))
    assert "times" not in describe_ladder(record)


def test_wrong_results_are_an_error():
    sentence = check_digests(sample_record())
    assert all(name in sentence for name in RATES)
    line = refusal(check_digests, wrong("pinned_async"))
    assert "pinned_async" in line and "f" * 32 in line


# Figures.


def svg_of(record: dict, folder: Path, source: str = "") -> str:
    save_figure(plot_ladder(record), folder / "ladder", source)
    return (folder / "ladder.svg").read_text()


def test_the_ladder_figure_says_what_it_shows(tmp_path):
    text = svg_of(sample_record(), tmp_path)
    for name in RATES:
        assert name in text
    assert "EMULATED" in text
    assert "ceiling: forward" in text
    for label in ("100  (1.0x)", "700  (7.0x)", "1,500  (15.0x)"):
        assert label in text
    assert (tmp_path / "ladder.png").read_bytes().startswith(b"\x89PNG")


def test_the_ladder_figure_shows_no_gain_for_wrong_results(tmp_path):
    text = svg_of(wrong("buffer_pool"), tmp_path)
    assert "wrong bytes" in text
    assert "7.0x" not in text
    record = sample_record("cuda")
    assert "EMULATED" not in svg_of(record, tmp_path)
    record["strategies"].pop(0)
    assert not re.search(r"\d\.\dx", svg_of(record, tmp_path))


def test_the_bars_are_the_rates():
    (axes,) = plot_ladder(sample_record()).axes
    assert [bar.get_width() for bar in axes.patches] == list(RATES.values())
    assert [label.get_text() for label in axes.get_yticklabels()] == list(RATES)
    lines = [line.get_xdata()[0] for line in axes.lines]
    assert 1600.0 in lines


def test_the_text_alternative_has_the_numbers():
    label = plot_ladder(sample_record()).get_label()
    for number in ("100", "150", "700", "1,500", "1,600"):
        assert f"{number} samples/s" in label
    assert "15.0 times" in label
    assert "EMULATED" in label


def test_a_figure_is_the_same_each_time(tmp_path):
    first = svg_of(sample_record(), tmp_path)
    assert svg_of(sample_record(), tmp_path) == first
    # In another process, whose hashes and dates are others:
    code = (
        "from sample_record import sample_record; from labkit import plot_ladder;"
        "from labkit.figures import save_figure;"
        "save_figure(plot_ladder(sample_record()), 'other')"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "5", "PYTHONPATH": str(Path(__file__).parent)}
    subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=tmp_path, env=environment, timeout=120
    )
    assert (tmp_path / "other.svg").read_text() == first


def test_a_figure_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    line = refusal(save_figure, plot_ladder(sample_record()), tmp_path / "file" / "ladder")
    assert "ladder" in line


def stale_figures(figures: Path) -> list[str]:
    """Figures whose record, trace or code has changed, and files that nothing draws."""
    wanted = committed(figures)
    stale = []
    for name, (_, mark) in wanted.items():
        svg, png = (figures / f"{name}.{kind}" for kind in ("svg", "png"))
        if not (svg.exists() and png.exists()) or mark not in svg.read_text():
            stale.append(name)
    files = [path for path in figures.iterdir() if path.is_file()]
    return stale + [path.name for path in files if path.stem not in wanted]


def test_committed_figures_are_those_of_their_records_and_traces():
    assert stale_figures(FIGURES) == []
    for path in (FIGURES / "records").glob("*.json"):
        check_digests(load_record(path))
    assert len(committed(FIGURES)) >= 2 + 2 * 5


def test_a_changed_record_makes_its_figure_stale(tmp_path):
    for kind in ("emulated", "cuda"):
        save_record(sample_record(kind), tmp_path / "records" / f"{kind}.json")
    assert stale_figures(tmp_path) == ["cuda", "emulated"]
    main(tmp_path)
    assert stale_figures(tmp_path) == []
    record = sample_record("cuda")
    record["strategies"][4]["samples_per_s"] += 1
    save_record(record, tmp_path / "records" / "cuda.json")
    assert stale_figures(tmp_path) == ["cuda"]


def test_a_changed_trace_makes_its_own_figure_and_the_next_one_stale(tmp_path):
    (tmp_path / "traces").mkdir()
    names = "sequential", "multi_worker", "buffer_pool"
    for name in names:
        file = f"h200_{name}_nsys.json"
        (tmp_path / "traces" / file).write_bytes((FIGURES / "traces" / file).read_bytes())
    main(tmp_path)
    assert stale_figures(tmp_path) == []
    (tmp_path / "orphan.png").touch()
    with (tmp_path / "traces" / "h200_sequential_nsys.json").open("a") as file:
        file.write("\n")
    assert stale_figures(tmp_path) == [
        "timeline_1_sequential",
        "timeline_1_sequential_dark",
        "timeline_2_multi_worker",
        "timeline_2_multi_worker_dark",
        "orphan.png",
    ]


def test_changed_code_makes_its_figures_stale(tmp_path, monkeypatch):
    save_record(sample_record("cuda"), tmp_path / "records" / "cuda.json")
    main(tmp_path)
    real = inspect.getsource
    monkeypatch.setattr(inspect, "getsource", lambda module: real(module) + "# changed")
    assert stale_figures(tmp_path) == ["cuda"]


# Predictions beside what was measured.


def predicted_record() -> dict:
    record = sample_record()
    for each, factor in zip(record["strategies"], (1.1, 0.75, None, 1.0, 2.0), strict=True):
        if factor is not None:
            each["predicted_samples_per_s"] = factor * each["samples_per_s"]
    return record


def test_the_table_shows_the_predictions_and_their_errors():
    shown = show(predicted_record())
    for name, said in (("sequential", "110 +10%"), ("multi_worker", "112 -25%")):
        assert said in next(line for line in shown.splitlines() if name in line)
    assert "predicted" in shown and "busy" not in shown
    assert "predicted" not in show(sample_record())


def test_the_figure_marks_each_prediction():
    figure = plot_predictions(predicted_record())
    [axes] = figure.axes
    marks = [line.get_xdata()[0] for line in axes.lines if len(set(line.get_xdata())) == 1]
    for rate in (110.0, 112.5, 1234.5, 3000.0):
        assert any(abs(mark - rate) < 1e-6 for mark in marks)
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == ["sequential", "multi_worker", "pinned_async", "stream_pipeline"]
    assert "EMULATED" in axes.get_title(loc="left")
    assert "1,500 samples/s measured, 3,000 predicted (+100.0%)" in figure.get_label()


def test_a_record_without_predictions_has_no_such_figure():
    assert "no predictions" in refusal(plot_predictions, sample_record())
