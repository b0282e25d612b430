"""The notebooks as files: built from their sources, given parameters, run headlessly."""

import ast
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from .errors import LabError

FOLDER = Path(__file__).parent.parent / "notebooks"
# For a kernel that cannot start, and for a cell that hangs: the run ends with an error.
START_LIMIT_S = 120
CELL_LIMIT_S = 900
_MAX_BYTES = 10**8


def find_notebooks(names: list[str], folder: Path = FOLDER) -> list[Path]:
    """The notebooks called `names`, in order; all five for an empty list.

    A name is a file's path, a notebook's name, or the beginning of one: `02`. Raises LabError
    for a name that fits none.
    """
    known = sorted(folder.glob("0*.ipynb"))
    if not known:
        raise LabError(f"no notebooks in {str(folder)!r}: run labkit from a checkout of the labs")
    if not names:
        return known
    found = []
    for name in names:
        path = Path(name)
        if path.suffix == ".ipynb" and path.is_file():
            found.append(path)
            continue
        fits = [path for path in known if name and path.stem.startswith(path_stem(name))]
        if len(fits) != 1:
            stems = ", ".join(path.stem for path in known)
            raise LabError(f"unknown notebook {name!r}: choose from {stems}")
        found += fits
    return found


def path_stem(name: str) -> str:
    return Path(name).name.removesuffix(".ipynb")


def read_parameters(path: Path) -> dict:
    """Names and default values of the assignments in a notebook's `parameters` cell."""
    import nbformat

    try:
        if (size := path.stat().st_size) > _MAX_BYTES:
            raise LabError(f"{str(path)!r} has {size:,} bytes, more than any notebook of the labs")
        notebook = nbformat.read(path, as_version=4)
    except LabError:
        raise
    except Exception as error:
        raise LabError(f"{str(path)!r} is not a notebook: {type(error).__name__}") from None
    cells = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", [])]
    defaults = {}
    try:
        for node in (node for cell in cells for node in ast.parse(cell.source).body):
            if isinstance(node, ast.AnnAssign) and node.value is not None:
                defaults[node.target.id] = ast.literal_eval(node.value)
        if any(type(value) not in (str, int, float, bool) for value in defaults.values()):
            raise ValueError
    except (SyntaxError, ValueError, AttributeError):
        raise LabError(
            f"cannot read the parameters of {path.stem}: write each as name: type = value, "
            "with str, int, float or bool"
        ) from None
    return defaults


def parse_parameters(assignments: list[str], path: Path) -> dict:
    """`name=value` texts as values of the types that the notebook at `path` declares.

    Raises LabError for a name that it does not have and for a value of another type.
    """
    declared = read_parameters(path)
    values = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals:
            raise LabError(f"cannot read parameter {assignment!r}: write it as name=value")
        if name not in declared:
            names = ", ".join(declared) or "none"
            raise LabError(f"notebook {path.stem} has no parameter {name!r}: it has {names}")
        values[name] = _parse(name, text, type(declared[name]))
    return values


def _parse(name: str, text: str, kind: type):
    try:
        if kind is bool:
            return {"true": True, "false": False}[text.lower()]
        value = kind(text)
        if value != value or value in (float("inf"), float("-inf")):
            raise ValueError
        return value
    except (ValueError, KeyError):
        wanted = "true or false" if kind is bool else f"of type {kind.__name__}"
        raise LabError(f"parameter {name} must be {wanted}, got {text!r}") from None


def run_notebook(path: Path, out: Path, parameters: dict, solved: bool = False) -> Path:
    """Execute the notebook at `path` in a kernel of its own and write it into the folder `out`.

    `solved` takes the solutions of its exercises, from the source beside it. A notebook that
    fails is kept as `NAME.failed.ipynb`, and LabError names the cell.
    """
    import papermill

    solution = build(find_source(path), solved=True) if solved else None
    done = out / path.name
    failed = out / f"{path.stem}.failed.ipynb"
    running = out / f"{path.stem}.running.ipynb"
    try:
        out.mkdir(parents=True, exist_ok=True)
        for old in (done, failed, running):
            old.unlink(missing_ok=True)
    except OSError as error:
        raise LabError(f"cannot write to {str(out)!r}: {error.strerror}") from None
    # This Python's own kernel, whatever else is called python3 on this machine.
    ours = str(Path(sys.prefix) / "share" / "jupyter")
    os.environ.pop("JPY_SESSION_NAME", None)  # of a notebook that we are started from: see explorer
    os.environ["JUPYTER_PATH"] = os.pathsep.join(
        dict.fromkeys([ours, *filter(None, os.environ.get("JUPYTER_PATH", "").split(os.pathsep))])
    )
    try:
        # A socket's path has 107 characters at most.
        short = "/tmp" if len(tempfile.gettempdir()) > 60 else None
        with tempfile.TemporaryDirectory(prefix="labkit-", dir=short) as sockets:
            start = path
            if solution is not None:
                start = Path(sockets, path.name)
                start.write_text(solution, encoding="utf-8")
            papermill.execute_notebook(
                # Papermill takes braces in a path for names of parameters.
                *(str(file).replace("{", "{{").replace("}", "}}") for file in (start, running)),
                parameters=parameters,
                kernel_name="python3",
                progress_bar=False,
                start_timeout=START_LIMIT_S,
                execution_timeout=CELL_LIMIT_S,
                kernel_manager_class=_private_kernel_manager(Path(sockets)),
            )
    except Exception as error:
        where, kept = _last_cell(running), ""
        if running.exists():
            running.replace(failed)
            kept = f" (as far as it got: {failed})"
        raise LabError(f"{path.stem}: {_explain(error, where)}{kept}") from None
    running.replace(done)
    return done


def _private_kernel_manager(folder: Path):
    """Kernels that talk over sockets in `folder`: TCP ports can be taken or listened to."""
    from jupyter_client.manager import AsyncKernelManager

    class PrivateKernelManager(AsyncKernelManager):
        def __init__(self, **options):
            if os.name == "posix":
                options |= {"transport": "ipc", "connection_file": str(folder / "kernel.json")}
            super().__init__(**options)

    return PrivateKernelManager


def _last_cell(path: Path) -> str:
    """Which cell the notebook at `path` had begun last; empty if that cannot be told."""
    import nbformat

    begun = ""
    try:
        cells = nbformat.read(path, as_version=4).cells
    except Exception:  # none was written, or half of one when the disk was full
        return begun
    for number, cell in enumerate(cells, 1):
        if cell.metadata.get("papermill", {}).get("start_time"):
            begun = f"cell {number} ({_first_line(cell.source)!r}): "
    return begun


def _first_line(text: str) -> str:
    return next(iter(text.strip().splitlines()), "")


def _explain(error: Exception, where: str) -> str:
    if hasattr(error, "ename"):  # papermill's own error: a cell raised
        source, reason = _first_line(error.source), _first_line(error.evalue)
        return f"cell {error.cell_index + 1} ({source!r}) failed: {error.ename}: {reason}"
    return f"{where}{type(error).__name__}: {_first_line(str(error)) or 'no message'}"


class Exercise(NamedTuple):
    """The sources of an exercise's three cells."""

    stub: str
    check: str
    solution: str


def find_source(path: Path) -> Path:
    """The percent-format source of the notebook at `path`, which has the solutions."""
    source = path.with_suffix(".py")
    if not source.is_file():
        raise LabError(f"no source {str(source)!r} beside the notebook: it has the solutions")
    return source


def find_exercises(cells: list) -> list[Exercise]:
    """The exercises among `cells`: tagged `stub`, `check` and `solution`, in that order.

    Raises LabError where one of the three is missing.
    """
    tags = ("stub", "check", "solution")
    marked = [(tag, cell.source) for cell in cells for tag in tags if tag in _tags(cell)]
    found = [tag for tag, _ in marked]
    if found != list(tags) * (len(marked) // len(tags)):
        raise LabError(f"an exercise is a stub, a check and a solution; found {', '.join(found)}")
    sources = iter(source for _, source in marked)
    return [Exercise(*three) for three in zip(sources, sources, sources, strict=True)]


def _tags(cell) -> list[str]:
    return cell.metadata.get("tags", [])


def _place_solutions(cells: list, solved: bool) -> list:
    """For a learner each solution folded away; with `solved` in its stub's place."""
    import nbformat

    solutions = iter([exercise.solution for exercise in find_exercises(cells)])
    placed = []
    for cell in cells:
        if solved and "stub" in _tags(cell):
            cell.source, cell.metadata["tags"] = next(solutions), ["solution"]
        elif "solution" in _tags(cell):
            if solved:
                continue
            cell = nbformat.v4.new_markdown_cell(
                "<details>\n<summary>Solution</summary>\n\n"
                f"```python\n{cell.source}\n```\n\n</details>",
                metadata={"tags": ["solution"]},
            )
        placed.append(cell)
    return placed


def build(source: Path, solved: bool = False) -> str:
    """The .ipynb text for a percent-format source: no outputs, fixed ids, one canonical form.

    A cell tagged `solution` is folded away in markdown; with `solved` it replaces the `stub`.
    `TIME_NEEDED` becomes what the cells took where it was measured.
    """
    import jupytext
    import nbformat

    from .course import time_needed

    notebook = jupytext.read(source, fmt="py:percent")
    first = notebook.cells[0]
    first.source = first.source.replace("TIME_NEEDED", time_needed(source.stem))
    notebook.cells = _place_solutions(notebook.cells, solved)
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number:02}"
        cell.metadata = {"tags": cell.metadata["tags"]} if "tags" in cell.metadata else {}
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    nbformat.validate(notebook)
    return nbformat.writes(notebook, version=nbformat.NO_CONVERT) + "\n"


def main(report: Callable[[str], None] = print) -> None:
    """Write every notebook from its source: `python -m labkit.notebooks`."""
    for source in sorted(FOLDER.glob("0*.py")):
        source.with_suffix(".ipynb").write_text(build(source))
        report(f"built {source.with_suffix('.ipynb').name}")


if __name__ == "__main__":
    main()
