"""`labkit run` on a machine that is not as it should be. `test_notebooks.py` has the rest."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from test_notebooks import files, refusal, write_notebook

from labkit import notebooks
from labkit.notebooks import run_notebook

pytestmark = pytest.mark.timeout(200, method="signal")
ROOT = Path(notebooks.__file__).parent.parent


def own_mounts(script: str, *args, **more) -> subprocess.CompletedProcess:
    """Run a shell script whose mounts nobody else sees; skip where that is not allowed."""
    command = ["unshare", "-m", "sh", "-ec"]
    if not shutil.which("unshare") or subprocess.run([*command, "true"]).returncode:
        pytest.skip("nothing can be mounted here")
    return subprocess.run(
        [*command, script, "sh", *map(str, args)],
        capture_output=True, text=True, timeout=150, **more,
    )  # fmt: skip


RUN = """
import sys
from pathlib import Path
from labkit import LabError
from labkit.notebooks import run_notebook
try:
    run_notebook(Path(sys.argv[1]), Path(sys.argv[2]), {})
except LabError as error:
    print(error, file=sys.stderr)
    sys.exit(1)
"""


def test_a_disk_that_gets_full_while_a_notebook_runs(tmp_path):
    (tmp_path / "run.py").write_text(RUN)
    (tmp_path / "small").mkdir()
    big = "from IPython.display import display\ndisplay({'text/plain': 'x' * 3_000_000}, raw=True)"
    path = write_notebook(tmp_path / "own.ipynb", "print('fine')", big)
    result = own_mounts(
        'mount -t tmpfs -o size=1m tmpfs "$3"; "$1" "$2" "$4" "$3/out" || { ls "$3/out"; exit 1; }',
        sys.executable, tmp_path / "run.py", tmp_path / "small", path,
    )  # fmt: skip
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1, result.stderr
    line = result.stderr
    assert line.startswith("own: ") and "No space left on device" in line
    assert "own.ipynb" not in result.stdout.split(), "a half-written notebook looks whole"


def test_a_disk_too_full_for_a_record(tmp_path):
    code = """
import sys
sys.path.insert(0, sys.argv[2])
from labkit import LabError, load_record, save_record
from sample_record import sample_record
record = sample_record()
save_record(record, sys.argv[1] + "/r.json")
record["strategies"] *= 20
try:
    save_record(record, sys.argv[1] + "/r.json")
except LabError as error:
    print(error)
assert load_record(sys.argv[1] + "/r.json") == sample_record()
"""
    result = own_mounts(
        'mount -t tmpfs -o size=12k tmpfs "$2"; "$1" -c "$3" "$2" "$4"; ls -A "$2"',
        sys.executable, tmp_path, code, ROOT / "tests",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    line, *left = result.stdout.splitlines()
    assert "cannot write the record" in line and "No space left" in line
    assert left == ["r.json"]


def test_a_checkout_that_is_read_only(tmp_path):
    """On a read-only mount, since a test that runs as root may write into any folder."""
    command = '"$1" -m labkit.cli run 01 --device emulated --preset smoke --out "$3"'
    result = own_mounts(
        f'mount --bind "$2" "$2"; mount -o remount,ro,bind "$2"; cd "$2"\n'
        f'! touch "$2/x" 2>/dev/null; {command}',
        sys.executable, ROOT, tmp_path / "out é",
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "out é" / "01_profile_the_baseline.ipynb").exists()


def test_an_output_folder_that_is_read_only(tmp_path):
    (tmp_path / "run.py").write_text(RUN)
    path = write_notebook(tmp_path / "own.ipynb", "print('fine')")
    (tmp_path / "out").mkdir()
    result = own_mounts(
        'mount -t tmpfs -o ro tmpfs "$3"; "$1" "$2" "$4" "$3"',
        sys.executable, tmp_path / "run.py", tmp_path / "out", path,
    )  # fmt: skip
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert "Read-only file system" in line


def test_a_kernel_that_cannot_start(tmp_path, monkeypatch):
    """It ends at once; the limit is for one that never says anything."""
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "ipykernel_launcher.py").write_text("raise SystemExit(7)")
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    path = write_notebook(tmp_path / "own.ipynb", "print('fine')")
    line = refusal(run_notebook, path, tmp_path / "out", {})
    assert line.startswith("own: ") and "ernel" in line
    assert not any(name.endswith("own.ipynb") for name in files(tmp_path / "out"))


def test_a_kernel_that_never_answers(tmp_path, monkeypatch):
    folder = tmp_path / "silent"
    folder.mkdir()
    (folder / "ipykernel_launcher.py").write_text("import time; time.sleep(100)")
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(notebooks, "START_LIMIT_S", 3)
    path = write_notebook(tmp_path / "own.ipynb", "print('fine')")
    line = refusal(run_notebook, path, tmp_path / "out", {})
    assert line.startswith("own: ") and "3 s" in line


def test_two_runs_at_once(tmp_path):

    (tmp_path / "run.py").write_text(RUN)
    path = write_notebook(tmp_path / "own.ipynb", "import time; time.sleep(1)", "print('done')")
    command = [sys.executable, tmp_path / "run.py", path]
    runs = [
        subprocess.Popen([*command, tmp_path / f"out {name}"], stderr=subprocess.PIPE, text=True)
        for name in ("a", "b")
    ]
    said = [run.communicate(timeout=100)[1] for run in runs]
    # A kernel that is told to end may say that it was interrupted; nothing else may be said.
    told = "[IPKernelApp] ERROR | KeyboardInterrupt caught in kernel.\n"
    assert [words.replace(told, "") for words in said] == ["", ""]
    assert [run.returncode for run in runs] == [0, 0]
    for name in ("a", "b"):
        done = nbformat.read(tmp_path / f"out {name}" / "own.ipynb", as_version=4)
        assert done.cells[-1].outputs[0].text == "done\n"
