"""Each line of labkit that keeps bytes right, taken out: it has to be seen.

A mutation is a list of (file, what stands there, what stands there instead). It is applied to a
copy of the package, and `differential.py` compares what the strategies give with the model's own
results. To add one, add it to the list.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import labkit

PACKAGE = Path(labkit.__file__).parent
TESTS = Path(__file__).parent.parent

HAND_OVER = (
    "pipelines.py",
    "        slot.event.synchronize()\n    workers",
    "        pass\n    workers",
)
NO_CHECK = ("workers.py", "if not slot.event.query():", "if False:")
MUTATIONS = {
    "hand over before the copy is done": [HAND_OVER],
    "and without the check for that": [HAND_OVER, NO_CHECK],
    "copy before the forward is done": [
        ("pipelines.py", "self.copy_stream.wait_stream(self.device.current_stream())", "pass"),
    ],
    "give the scores' memory back before they are copied": [
        ("pipelines.py", "scores.record_stream(self.copy_stream)", "pass"),
    ],
    "forward before the images are there": [
        ("job.py", "current.wait_stream(stream)", "pass"),
    ],
    "give the images' memory back before the forward": [
        ("job.py", "batch.record_stream(current)", "pass"),
    ],
    "record no event behind a copy": [
        ("buffers.py", "self.event.record()", "pass"),
    ],
    "release a slot when it is submitted": [
        ("workers.py", "self._under_way[batch] = item", "self._under_way[batch] = None\n"
                       "            self._pool.release(item)"),
    ],
    "release a slot to two holders": [
        ("buffers.py", "slot = self._free.popleft()", "slot = self._all[0]"),
    ],
    "lose the last batch": [
        ("pipelines.py", "    hand_over(workers, *previous)\n    return", "    return"),
    ],
    "give results in the order of their arrival": [
        ("workers.py", "for batch in sorted(results)", "for batch in reversed(results)"),
    ],
    "process a batch under another's number": [
        ("worker.py", "result = process(batch, tensor)", "result = process(batch + 1, tensor)"),
    ],
    "read the whole slot for a smaller batch": [
        ("worker.py", "view_slot(memory[slot], content)", "memory[slot]"),
    ],
    "read another slot": [
        ("worker.py", "view_slot(memory[slot], content)", "view_slot(memory[0], content)"),
    ],
    "do not wait in a copy that should": [
        ("buffers.py", "        if not non_blocking:\n            self.event.synchronize()\n", ""),
        ("buffers.py", "non_blocking=non_blocking", "non_blocking=True"),
        ("buffers.py", "page_locked\n            and slot_bytes", "slot_bytes"),
    ],
}  # fmt: skip


def copy_with(changes, folder: Path) -> Path:
    shutil.copytree(PACKAGE, folder / "labkit", ignore=shutil.ignore_patterns("__pycache__"))
    for file, old, new in changes:
        path = folder / "labkit" / file
        text = path.read_text(encoding="utf-8")
        assert text.count(old) == 1, f"{file} has {text.count(old)} times {old!r}"
        path.write_text(text.replace(old, new), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What `differential.py` says of each mutation, and of labkit as it is."""
    every = {"unchanged": [], **MUTATIONS}
    folders = [copy_with(each, tmp_path_factory.mktemp("mutation")) for each in every.values()]
    child = subprocess.run(
        [sys.executable, Path(__file__).with_name("differential.py"), *folders],
        capture_output=True, text=True, timeout=200, env={"PYTHONPATH": str(TESTS)},
    )  # fmt: skip
    assert child.returncode == 0, child.stderr
    lines = child.stdout.splitlines()
    return dict(zip(every, lines, strict=True))


def test_labkit_as_it_is_gives_the_right_bytes(said):
    assert said["unchanged"] == "right"


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_seen(said, name):
    assert said[name] != "right"
    assert "labkit" not in said[name], "it could not even be imported"
