"""The five notebooks: as files, as parameters, and run headlessly from outside."""

import ast
import copy
import inspect
import json
import re
import sys
from pathlib import Path

import nbclient
import nbformat
import psutil
import pytest
from helpers import wait_until

from labkit import LabError, check_digests, cli, load_record, notebooks, pipelines
from labkit.notebooks import FOLDER, build, find_notebooks, parse_parameters, run_notebook

# For a run that hangs; all five take about a minute on two cores.
LIMIT_S = 280
STEMS = {
    "01_profile_the_baseline": [pipelines.sequential],
    "02_multi_worker_output": [pipelines.multi_worker],
    "03_buffer_pool": [pipelines.buffer_pool],
    "04_pinned_async_copy": [pipelines.pinned_async],
    "05_stream_pipeline": [pipelines.StreamPipeline, pipelines.stream_pipeline],
}
every_notebook = pytest.mark.parametrize("stem", STEMS)


def read(stem: str):
    return nbformat.read(FOLDER / f"{stem}.ipynb", as_version=nbformat.NO_CONVERT)


def parameters_cell(notebook):
    (cell,) = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", [])]
    return cell


def refusal(action, *args) -> str:
    """The one line that `action` is refused with."""
    with pytest.raises(LabError) as error:
        action(*args)
    text = str(error.value)
    assert text.strip() and "\n" not in text
    return text


# As files.


def test_there_are_five_of_them():
    assert sorted(path.stem for path in FOLDER.glob("*.py")) == list(STEMS)
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == list(STEMS)


@every_notebook
def test_notebook_is_built_from_its_source(stem):
    built, committed = (
        build(FOLDER / f"{stem}.py"),
        (FOLDER / f"{stem}.ipynb").read_text(encoding="utf-8"),
    )
    assert built == committed, "stale: run `make notebooks`"


@every_notebook
def test_notebook_is_stripped_and_canonical(stem):
    notebook = read(stem)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    assert notebook.metadata.kernelspec.name == "python3"
    assert notebook.metadata.keys() == {"kernelspec", "language_info"}
    ids = [cell.id for cell in notebook.cells]
    assert len(set(ids)) == len(ids)
    for cell in notebook.cells:
        assert cell.metadata.keys() <= {"tags"}
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None
            ast.parse(cell.source)


@every_notebook
def test_parameters_are_flat_typed_assignments(stem):
    values = {}
    for node in ast.parse(parameters_cell(read(stem)).source).body:
        assert isinstance(node, ast.AnnAssign), ast.unparse(node)
        value = ast.literal_eval(node.value)
        assert type(value) in (str, int, float, bool)
        assert node.annotation.id == type(value).__name__
        values[node.target.id] = value
    assert {"device", "preset", "results_dir"} <= values.keys()
    assert notebooks.read_parameters(FOLDER / f"{stem}.ipynb") == values


@every_notebook
def test_the_strategy_that_is_read_is_the_one_that_runs(stem):
    cells = [cell.source for cell in read(stem).cells if cell.cell_type == "code"]
    for part in STEMS[stem]:
        assert inspect.getsource(part).strip() in cells, f"{part.__name__} differs from labkit's"


@every_notebook
def test_links_between_notebooks_lead_somewhere(stem):
    for cell in read(stem).cells:
        if cell.cell_type == "markdown":
            for target in re.findall(r"\]\(([^)#:]+)\)", cell.source):
                assert (FOLDER / target).exists(), target


def test_a_changed_source_changes_the_notebook(tmp_path):
    source = FOLDER / "01_profile_the_baseline.py"
    edited = tmp_path / source.name
    edited.write_text(source.read_text().replace("perf_counter", "monotonic", 1))
    assert build(edited) != build(source)


# Names and parameters.


def write_notebook(path: Path, *cells: str, parameters: str = "") -> Path:
    """A notebook of those code cells, behind a parameters cell."""
    first = nbformat.v4.new_code_cell(parameters, metadata={"tags": ["parameters"]})
    notebook = nbformat.v4.new_notebook(
        cells=[first, *map(nbformat.v4.new_code_cell, cells)],
        metadata={"kernelspec": {"name": "python3", "language": "python", "display_name": "P"}},
    )
    nbformat.write(notebook, path)
    return path


def test_notebooks_are_found_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert [path.stem for path in find_notebooks([])] == list(STEMS)
    for name in ("03", "03_buffer", "03_buffer_pool", "03_buffer_pool.ipynb"):
        assert [path.stem for path in find_notebooks([name])] == ["03_buffer_pool"]
    assert [path.name[:2] for path in find_notebooks(["05", "02"])] == ["05", "02"]
    own = write_notebook(tmp_path / "own.ipynb")
    assert find_notebooks(["own.ipynb"]) == [Path(own.name)]


@pytest.mark.parametrize("name", ["", "0", "06", "buffer_pool", "nowhere/06.ipynb", "*"])
def test_unknown_notebooks_are_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    line = refusal(find_notebooks, [name])
    assert repr(name) in line and "05_stream_pipeline" in line


def test_no_notebooks_in_a_folder(tmp_path):
    assert str(tmp_path) in refusal(find_notebooks, [], tmp_path)


@pytest.fixture(scope="module")
def typed(tmp_path_factory):
    path = tmp_path_factory.mktemp("typed") / "typed.ipynb"
    text = 'word: str = "a"\ncount: int = 3  # why\nrate: float = 0.5\nflag: bool = False'
    return write_notebook(path, "later: int = 1", parameters=text)


@pytest.mark.parametrize(
    "text, value",
    [
        ("word=b", "b"),
        ("word=", ""),
        ("word=a=b = c", "a=b = c"),
        ("word=nan", "nan"),
        ("word=12", "12"),
        ("word=/tmp/übung 1", "/tmp/übung 1"),
        ("count=12", 12),
        ("count=-1", -1),
        ("rate=2", 2.0),
        ("rate=1e-3", 1e-3),
        ("flag=true", True),
        ("flag=True", True),
        ("flag=false", False),
    ],
)
def test_parameters_get_the_declared_type(typed, text, value):
    (parsed,) = parse_parameters([text], typed).values()
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    "text, words",
    [
        ("count=1.5", ["count", "int", "1.5"]),
        ("count=", ["count", "int"]),
        ("count=true", ["count", "int", "true"]),
        ("count=" + "9" * 5000, ["count", "int"]),
        ("rate=fast", ["rate", "float", "fast"]),
        ("rate=nan", ["rate", "nan"]),
        ("rate=inf", ["rate", "inf"]),
        ("rate=-inf", ["rate", "-inf"]),
        ("rate=1e999", ["rate", "1e999"]),
        ("flag=1", ["flag", "true or false", "1"]),
        ("flag=", ["flag", "true or false"]),
        ("later=1", ["typed", "later", "word, count, rate, flag"]),
        ("Word=a", ["Word"]),
        ("=1", ["typed"]),
        ("word", ["word", "name=value"]),
        ("", ["name=value"]),
    ],
)
def test_other_parameters_are_refused(typed, text, words):
    line = refusal(parse_parameters, [text], typed)
    for word in words:
        assert word in line


def test_all_parameters_at_once(typed):
    texts = ["word=x", "count=1", "rate=2", "flag=true", "count=7"]
    values = parse_parameters(texts, typed)
    assert values == {"word": "x", "count": 7, "rate": 2.0, "flag": True}
    assert parse_parameters([], typed) == {}


def test_a_notebook_of_absurd_size_is_refused_unread(tmp_path):
    path = tmp_path / "big.ipynb"
    with path.open("wb") as file:
        file.truncate(10**9)  # a hole: it takes no space
    with pytest.raises(LabError, match="1,000,000,000 bytes"):
        notebooks.read_parameters(path)


@pytest.mark.parametrize(
    "contents", ["", "{}", "no notebook", "[]", '{"nbformat": 4, "cells": 3}'], ids=repr
)
def test_a_file_that_is_no_notebook_is_refused(tmp_path, contents):
    path = tmp_path / "file.ipynb"
    path.write_text(contents)
    assert "file" in refusal(parse_parameters, ["count=1"], path)


@pytest.mark.parametrize("text", ["count: int = ", "count: int = len('a')", "count: int = None"])
def test_a_parameters_cell_that_cannot_be_read_is_refused(tmp_path, text):
    path = write_notebook(tmp_path / "own.ipynb", parameters=text)
    assert "own" in refusal(parse_parameters, ["count=1"], path)


# Run from outside: all five, from a folder whose name has a space and a letter beyond ASCII.


def test_all_five_run(all_five):
    result, out = all_five
    assert result.returncode == 0, result.stderr
    assert [path.name for path in out.parent.iterdir()] == [out.name]
    assert {path.name for path in out.iterdir()} == {
        "figures", "records", *(f"{stem}.ipynb" for stem in STEMS),
    }  # fmt: skip
    assert "EMULATED" in result.stdout and "stream_pipeline" in result.stdout
    assert "Traceback" not in result.stderr
    places = [result.stderr.find(f"{stem}: done") for stem in STEMS]
    assert -1 not in places and places == sorted(places)


@every_notebook
def test_executed_notebook_is_whole(all_five, stem):
    _, out = all_five
    notebook = nbformat.read(out / f"{stem}.ipynb", as_version=nbformat.NO_CONVERT)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(code) == sum(cell.cell_type == "code" for cell in read(stem).cells) + 1
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert not [o for o in outputs if o.output_type == "error"]
    assert not [o.text for o in outputs if o.get("name") == "stderr"], "warnings for the reader"
    shown = [o for o in outputs if "image/png" in o.get("data", {})]
    assert shown
    alternatives = [str(o.metadata) for o in shown] + [o.data.get("text/html", "") for o in shown]
    assert any("EMULATED" in text for text in alternatives), "a figure without text alternative"


@every_notebook
def test_untouched_exercises_say_so_and_stop_nothing(all_five, stem):
    _, out = all_five
    cells = nbformat.read(out / f"{stem}.ipynb", as_version=nbformat.NO_CONVERT).cells
    checked = [cell for cell in cells if "check" in cell.metadata.get("tags", [])]
    assert len(checked) >= 2
    for cell in checked:
        (output,) = cell.outputs
        assert output.data["text/plain"].startswith("not attempted: ")


@every_notebook
def test_notebook_leaves_its_record_and_figure(all_five, stem):
    _, out = all_five
    record = load_record(out / "records" / f"{stem}.json")
    names = list(pipelines.STRATEGIES)[: list(STEMS).index(stem) + 1]
    assert [row["name"] for row in record["strategies"]] == names
    assert check_digests(record)
    assert record["device"]["kind"] == "emulated"
    assert record["job"]["preset"] == "smoke"
    svg = (out / "figures" / f"{stem}.svg").read_text()
    assert all(name in svg for name in names) and "EMULATED" in svg
    assert (out / "figures" / f"{stem}.png").exists()
    # A record a lab, a prediction from lab 2 on, and how long each took.
    assert len(list((out / "records").iterdir())) == 2 * len(STEMS)


@pytest.mark.parametrize("stem", list(STEMS)[1:])
def test_what_is_measured_was_predicted_before(all_five, stem):
    _, out = all_five
    record = load_record(out / "records" / f"{stem}.json")
    stored = json.loads((out / "records" / f"{stem[:2]}_predicted.json").read_text())
    assert stored["created"] <= record["created"] and stored["device"]["kind"] == "predicted"
    assert stored["predicted_samples_per_s"] == {
        row["name"]: row["predicted_samples_per_s"] for row in record["strategies"]
    }
    svg = (out / "figures" / f"{stem[:2]}_predicted_and_measured.svg").read_text()
    assert "predicted" in svg and "EMULATED" in svg
    said = (out / f"{stem}.ipynb").read_text()
    last = record["strategies"][-1]["name"]
    assert f"{last}: the largest difference is" in said or "too few batches to compare" in said


@every_notebook
def test_executed_notebooks_have_no_dead_widget(all_five, stem):
    _, out = all_five
    notebook = nbformat.read(out / f"{stem}.ipynb", as_version=nbformat.NO_CONVERT)
    assert "widgets" not in notebook.metadata
    kinds = {
        kind
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        for kind in output.get("data", {})
    }
    assert not any("widget" in kind for kind in kinds)
    if stem.startswith("05"):
        assert "A static figure. For the explorer" in (out / f"{stem}.ipynb").read_text()


@pytest.fixture
def our_kernel(monkeypatch):
    """This Python's own kernel, whatever else is called python3 here."""
    monkeypatch.setenv("JUPYTER_PATH", str(Path(sys.prefix) / "share" / "jupyter"))


def test_a_notebook_alone_and_twice_in_one_kernel(our_kernel, tmp_path):
    stem = "04_pinned_async_copy"
    before = sorted(FOLDER.iterdir())
    notebook = read(stem)
    cell = parameters_cell(notebook)
    cell.source += (
        f'\ndevice = "emulated"\npreset = "smoke"\nbatches = 3\nresults_dir = {str(tmp_path)!r}'
    )
    again = copy.deepcopy(notebook.cells)
    for cell in again:
        cell.id += "-again"
    notebook.cells += again
    resources = {"metadata": {"path": str(FOLDER)}}
    nbclient.NotebookClient(
        notebook, timeout=LIMIT_S, kernel_name="python3", resources=resources
    ).execute()
    assert check_digests(load_record(tmp_path / "records" / f"{stem}.json"))
    assert sorted(FOLDER.iterdir()) == before, "something was written beside the notebooks"


# Failing. With small notebooks of our own, which need not load torch.


FEW = 'device: str = "auto"\npreset: str = "auto"\nresults_dir: str = "build"'


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_failing_cell_fails_the_run(tmp_path, monkeypatch, capsys):
    stem = "01_profile_the_baseline"
    notebook = read(stem)
    place = notebook.cells.index(parameters_cell(notebook)) + 1
    planted = 'raise ValueError("planted\\nand a second line")'
    notebook.cells.insert(place, nbformat.v4.new_code_cell(f"{planted}\nmore = 1"))
    path = tmp_path / f"{stem}.ipynb"
    nbformat.write(notebook, path)
    out = tmp_path / "out"
    arguments = ["run", path, "02", "--device", "emulated", "--preset", "smoke", "--out", out]
    monkeypatch.setattr(sys, "argv", ["labkit", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Traceback" not in printed.err
    assert printed.err.count("\n") <= 2, "the progress so far, and one line"
    line = printed.err.splitlines()[-1]
    assert line.startswith(f"labkit: {stem}: ")
    for word in ("cell", planted.partition("(")[0], "ValueError: planted", f"{stem}.failed.ipynb"):
        assert word in line
    assert files(out) == [f"{stem}.failed.ipynb"], "no record, and the second notebook not begun"
    kept = nbformat.read(out / f"{stem}.failed.ipynb", as_version=nbformat.NO_CONVERT)
    assert any(o.output_type == "error" for c in kept.cells for o in c.get("outputs", []))


def test_a_mended_notebook_replaces_the_failed_one(tmp_path):
    path = write_notebook(tmp_path / "own.ipynb", "1 / 0", parameters="n: int = 1")
    out = tmp_path / "out"
    assert "own" in refusal(run_notebook, path, out, {})
    assert files(out) == ["own.failed.ipynb"]
    write_notebook(path, "print('n is', n)", parameters="n: int = 1")
    assert run_notebook(path, out, {"n": 7}) == out / "own.ipynb"
    assert files(out) == ["own.ipynb"]
    assert "n is 7" in (out / "own.ipynb").read_text()
    write_notebook(path, "1 / 0")
    refusal(run_notebook, path, out, {})
    assert files(out) == ["own.failed.ipynb"], "the old success must not look like the new run"


def test_a_cell_that_hangs_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(notebooks, "CELL_LIMIT_S", 5)
    pid_file = tmp_path / "pid"
    hang = (
        "import os, pathlib, time\n"
        f"pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid()))\ntime.sleep(600)"
    )
    path = write_notebook(tmp_path / "own.ipynb", "print('fine')", hang, "print('never')")
    line = refusal(run_notebook, path, tmp_path / "out", {})
    pid = int(pid_file.read_text())
    assert wait_until(lambda: not psutil.pid_exists(pid)), "the kernel still runs"
    assert line.startswith("own: ") and "5 s" in line
    assert "import os, pathlib, time" in line, "it must name the cell"
    assert files(tmp_path / "out") == ["own.failed.ipynb"]


def test_a_kernel_that_dies(tmp_path):
    path = write_notebook(tmp_path / "own.ipynb", "print('fine')", "import os\nos._exit(3)")
    line = refusal(run_notebook, path, tmp_path / "out", {})
    assert line.startswith("own: ") and "died" in line
    assert "'import os'" in line, "it must name the cell"
    assert files(tmp_path / "out") == ["own.failed.ipynb"]


def test_a_folder_with_braces_in_its_name(tmp_path):
    folder = tmp_path / "a {b} {} c"
    folder.mkdir()
    path = write_notebook(folder / "own.ipynb", "print(n)", parameters="n: int = 1")
    assert run_notebook(path, folder / "out", {"n": 2}).parent == folder / "out"
    assert files(folder / "out") == ["own.ipynb"]


def test_the_kernel_is_of_this_python(tmp_path):
    path = write_notebook(tmp_path / "own.ipynb", "import sys; print(sys.prefix)")
    run_notebook(path, tmp_path / "out", {})
    done = nbformat.read(tmp_path / "out" / "own.ipynb", as_version=4)
    assert Path(done.cells[1].outputs[0].text.strip()).samefile(sys.prefix)
