"""The exercises: every stub, planted bug and solution of the sources, and checks that teach."""

import ast
import json
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import jupytext
import nbformat
import pytest
import torch
from conftest import DEVICES

import labkit
from labkit import LabError, checks, verdict
from labkit.notebooks import FOLDER, build, find_exercises, run_notebook

LABKIT = Path(sys.executable).with_name("labkit")
LIMIT_S = 200  # for a run of one notebook that hangs
BEGIN = "raise NotImplementedError"

# What the check says of the bug that each stub has behind its first line.
BUGS = {
    "time_copy": ["forward", "synchronise the device before each look"],
    "forward_rate": ["batches/s", "when the last result is there"],
    "threads_or_processes": ["as_bytes must be 'threads' or 'processes'"],
    "hand_over_all": ["batch 2", "bytes wrong", "before its bytes are in the pipe"],
    "one_slot": ["LabError: all 1 slots are held", "line 6", "before you acquire another"],
    "get_buffer": ["got a third buffer while the consumer", "wait until something comes back"],
    "through_a_ring": ["batch 0 has the bytes of batch 2", "batch 1 has the bytes of batch 3"],
    "read_each": ["batch 1 has the bytes of batch 0", "wait for slot.event before you read"],
    "queue_batch": ["batch 1 has the bytes of batch 0", "Record it behind the copy"],
    "copy_beside": ["batches are wrong", "Let the copy stream wait"],
    "copy_and_forget": ["batches are wrong", "record_stream keeps it"],
}


def master(source: Path) -> list:
    return jupytext.read(source, fmt="py:percent").cells


def name_of(exercise) -> str:
    return next(n.name for n in ast.parse(exercise.stub).body if isinstance(n, ast.FunctionDef))


SOURCES = sorted(FOLDER.glob("0*.py"))
EXERCISES = {
    name_of(exercise): (source, exercise)
    for source in SOURCES
    for exercise in find_exercises(master(source))
}
every_exercise = pytest.mark.parametrize("name", EXERCISES)


@pytest.fixture(scope="module", params=DEVICES)
def gpu(request):
    """The device as a notebook opens it. One for all: a bad attempt must not harm the next one."""
    device = labkit.open_device(request.param)
    yield device
    device.synchronize()


def judge(name: str, text: str, gpu):
    """The verdict on the cell `text`, with the imports that its notebook has."""
    source, exercise = EXERCISES[name]
    imports = [
        ast.unparse(node)
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    cell = {"gpu": gpu, "torch": torch}
    exec("\n".join(imports), cell)
    exec(compile(text, f"<cell {name}>", "exec"), cell)
    return eval(exercise.check, cell)


def bug_of(name: str) -> str:
    """The stub without its first line."""
    return "\n".join(li for li in EXERCISES[name][1].stub.splitlines() if BEGIN not in li)


def is_one_line(found) -> bool:
    return "\n" not in repr(found) and repr(found).startswith(f"{found.outcome}: ")


# Every exercise of the sources.


def test_each_lab_has_two_or_three_and_none_is_forgotten_here():
    counts = [sum(source == path for source, _ in EXERCISES.values()) for path in SOURCES]
    assert len(counts) == 5 and all(count in (2, 3) for count in counts)
    assert list(EXERCISES) == list(BUGS)


@every_exercise
def test_an_untouched_stub_is_not_attempted(gpu, name):
    found = judge(name, EXERCISES[name][1].stub, gpu)
    assert found.outcome == "not attempted" and not found and is_one_line(found)


@every_exercise
def test_a_planted_bug_is_named(gpu, name):
    assert bug_of(name) != EXERCISES[name][1].stub
    found = judge(name, bug_of(name), gpu)
    assert found.outcome == "wrong" and not found and is_one_line(found)
    for words in BUGS[name]:
        assert words in found.message, found


@every_exercise
def test_a_solution_passes(gpu, name):
    found = judge(name, EXERCISES[name][1].solution, gpu)
    assert found and found.outcome == "pass" and is_one_line(found), found


@every_exercise
def test_stub_and_solution_have_the_same_signature(name):
    stub, solution = (
        next(n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef))
        for text in EXERCISES[name][1][::2]
    )
    assert ast.unparse(stub.args) == ast.unparse(solution.args) and stub.name == solution.name
    assert ast.get_docstring(stub) == ast.get_docstring(solution)


# Attempts of other kinds.


@every_exercise
@pytest.mark.parametrize(
    "body, words",
    [
        ('raise ValueError("planted\\nand more")', ["ValueError: planted", "line 2 of its cell"]),
        ("raise SystemExit", ["SystemExit: no message"]),
        ('raise NotImplementedError("aten::nothing")', ["NotImplementedError: aten::nothing"]),
        ("return None", []),
        ("return object()", []),
    ],
    ids=["raises", "exits", "torch lacks it", "returns None", "returns an object"],
)
def test_an_attempt_that_fails_gets_one_line(emulated_gpu, name, body, words):
    found = judge(name, f"def {name}(*parts):\n    {body}\n", emulated_gpu)
    assert found.outcome == "wrong" and is_one_line(found), found
    for text in words:
        assert text in found.message


@pytest.fixture(scope="module")
def emulated_gpu():
    return labkit.open_device("emulated")


@pytest.mark.parametrize("attempt", [None, 3, "text", torch.ones(2)], ids=repr)
def test_what_is_no_function_is_refused(emulated_gpu, attempt):
    found = checks.read_each(attempt, emulated_gpu)
    assert found.outcome == "wrong" and "a function is needed" in found.message
    assert is_one_line(found)


def read_all(job, slot):
    results = []
    for index, images in enumerate(job.batches()):
        slot.copy_(job.forward(images), non_blocking=True)
        slot.event.synchronize()
        results.append(job.process(index, slot.tensor))
    return results


OTHERS = [
    ("time_copy", "return 0.0", "outside the two looks"),
    ("time_copy", "return float('nan')", "outside the two looks"),
    ("time_copy", "return True", "a number must come back"),
    ("forward_rate", "return 1e-3", "job.count"),
    ("forward_rate", "return float('inf')", "when the last result is there"),
    (
        "threads_or_processes",
        "return dict.fromkeys(['as_bytes', 'best_class', 'in_this_cell'], 'threads')",
        "as_bytes in threads?",
    ),
    (
        "threads_or_processes",
        "return dict.fromkeys(['as_bytes', 'best_class', 'in_this_cell'], 'processes')",
        "worker processes cannot import",
    ),
    ("threads_or_processes", "return {'as_bytes': 'threads'}", "best_class, in_this_cell"),
    ("hand_over_all", "return labkit.pipelines.sequential(a)", "0 batches went to the workers"),
    ("one_slot", "return labkit.pipelines.sequential(a)", "0 batches went to the workers"),
    ("one_slot", "return labkit.pipelines.multi_worker(a, b)", "never copied into"),
    ("get_buffer", "return torch.zeros(3)", "batch 0 needs a buffer"),
    ("read_each", "return read_all(a, b)[:-1]", "4 results came back for 5 batches"),
    ("read_each", "return [r + 1 for r in read_all(a, b)]", "of 1,048,576 bytes wrong"),
    ("read_each", "return [r.double() for r in read_all(a, b)]", "torch.float64, not"),
    ("read_each", "return list(a.batches())", "a tensor on the host"),
    ("read_each", "return labkit.pipelines.sequential(a)", "slot 0 was never copied into"),
    ("through_a_ring", "return [b[0].tensor] * 5", "still all zeros"),
    ("queue_batch", "return None", "an event must come back"),
    (
        "queue_batch",
        "e = a.device.Event(); c.copy_(a.forward(b)); e.record(); return e",
        "returned only when they were here",
    ),
    ("copy_beside", "return None", "5 of 5 batches are wrong: batch 0 is still all zeros"),
    ("copy_beside", "d.synchronize(); b.copy_(a)", "the host waited"),
    ("copy_and_forget", "d.synchronize(); b.copy_(a)", "the host waited"),
]


@pytest.mark.parametrize("name, body, words", OTHERS)
def test_other_mistakes_are_named(gpu, name, body, words):
    given = EXERCISES[name][1].stub.partition("(")[2].partition(")")[0].count(",") + 1
    if name == "threads_or_processes":
        given = 0
    text = f"def {name}({', '.join('abcd'[:given])}):\n    {body}\n"
    helper = "import labkit.pipelines\nfrom test_checks import read_all\n"
    found = judge(name, helper + text, gpu)
    assert found.outcome == "wrong" and is_one_line(found), found
    assert words in found.message


@pytest.mark.parametrize(
    "name, body",
    [
        # Waiting for all of the device is more than is needed, and right.
        ("read_each", "for i, x in enumerate(a.batches()):\n        b.copy_(a.forward(x), True)\n"
         "        a.device.synchronize(); done.append(a.process(i, b.tensor))\n    return done"),
        # A reference protects the memory as well as record_stream does.
        ("copy_and_forget", "c.wait_stream(d.current_stream())\n    done.append(a)\n"
         "    with d.stream(c):\n        b.copy_(a, non_blocking=True)"),
        ("copy_beside", "c.wait_event(d.current_stream().record_event())\n"
         "    with d.stream(c):\n        b.copy_(a, non_blocking=True)"),
    ],
)  # fmt: skip
def test_other_right_answers_pass(gpu, name, body):
    given = ", ".join("abcd"[: 2 if name == "read_each" else 4])
    found = judge(name, f"done = []\ndef {name}({given}):\n    {body}\n", gpu)
    assert found, found


def test_an_attempt_that_hangs_is_ended(gpu, monkeypatch):
    monkeypatch.setattr(verdict, "LIMIT_S", 1.0)
    before = threading.active_count()
    found = judge("get_buffer", "def get_buffer(free, allocate):\n    return free.get()", gpu)
    assert found, "this one is done in time"
    forgetful = (
        "held = []\ndef get_buffer(free, allocate):\n    while True: held.append(free.get())"
    )
    for name, text in {
        "get_buffer": forgetful,
        "read_each": "import time\ndef read_each(job, slot):\n    time.sleep(60)",
        "queue_batch": "def queue_batch(job, images, host):\n    while True: pass",
    }.items():
        found = judge(name, text, gpu)
        assert found.outcome == "wrong" and is_one_line(found)
        assert f"{name} was not done after 1 s" in found.message
    assert threading.active_count() <= before + 2, "the streams of a closed job may still end"


def test_a_check_works_outside_the_main_thread(emulated_gpu):
    found = []
    thread = threading.Thread(target=lambda: found.append(checks.read_each(read_all, emulated_gpu)))
    thread.start()
    thread.join(LIMIT_S)
    assert found and found[0]


def test_a_machine_that_is_too_small_is_not_the_attempts_fault(emulated_gpu, monkeypatch):
    def no_room(slots, slot_bytes):
        raise LabError("no room")

    monkeypatch.setattr("labkit.buffers.check_shared_memory", no_room)
    found = checks.read_each(read_all, emulated_gpu)
    assert found.outcome == "not checked" and "no room" in found.message and not found


# As notebooks.


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_the_notebook_shows_the_stub_and_folds_the_solution(source):
    shown, solved = (nbformat.reads(build(source, s), as_version=4) for s in (False, True))
    code, whole = (
        [cell.source for cell in notebook.cells if cell.cell_type == "code"]
        for notebook in (shown, solved)
    )
    folded = [c.source for c in shown.cells if "solution" in c.metadata.get("tags", [])]
    exercises = find_exercises(master(source))
    assert len(folded) == len(exercises) and len(code) == len(whole)
    for exercise, text in zip(exercises, folded, strict=True):
        assert BEGIN in exercise.stub and exercise.stub in code and exercise.stub not in whole
        assert exercise.solution in whole and exercise.solution not in code
        assert text.startswith("<details>\n<summary>Solution</summary>\n\n```python\n")
        assert text.endswith("\n```\n\n</details>") and exercise.solution in text
        assert whole.index(exercise.check) == whole.index(exercise.solution) + 1
    prose = "\n".join(c.source for c in shown.cells if c.cell_type == "markdown")
    assert prose.count("<summary>Hint</summary>") == len(exercises)
    assert prose.count("<details>") == prose.count("</details>") == 2 * len(exercises)
    places = [prose.index(text) for text in ("\n## The", "## Exercises", "## Key points")]
    assert places == sorted(places)


@pytest.mark.parametrize("tags", [["stub"], ["check", "stub", "solution"], ["stub", "solution"]])
def test_an_exercise_with_a_part_missing_is_refused(tmp_path, tags):
    source = tmp_path / "own.py"
    source.write_text("\n".join(f'# %% tags=["{tag}"]\nx = 1\n' for tag in tags))
    with pytest.raises(LabError, match="a stub, a check and a solution; found"):
        build(source)


def test_solutions_need_the_source(tmp_path):
    path = tmp_path / "own.ipynb"
    path.write_text((FOLDER / f"{SOURCES[0].stem}.ipynb").read_text())
    with pytest.raises(LabError, match=r"no source .*own\.py"):
        run_notebook(path, tmp_path / "out", {}, solved=True)
    assert not (tmp_path / "out").exists()


def test_the_solved_notebook_is_run(tmp_path):
    source = tmp_path / "own.py"
    source.write_text(
        textwrap.dedent(
            """
            # %% tags=["stub"]
            raise NotImplementedError

            # %% tags=["check"]
            print(answer)

            # %% tags=["solution"]
            answer = "solved"
            """
        )
    )
    path = source.with_suffix(".ipynb")
    path.write_text(build(source))
    done = json.loads(run_notebook(path, tmp_path / "out", {}, solved=True).read_text())
    printed = [o["text"] for c in done["cells"] for o in c.get("outputs", [])]
    assert printed == [["solved\n"]]


def test_labkit_runs_the_solved_course(tmp_path):
    stem = "04_pinned_async_copy"
    command = [LABKIT, "run", "04", "--solutions", "--device", "emulated", "--preset", "smoke",
               "--out", tmp_path]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert result.returncode == 0, result.stderr
    cells = nbformat.read(tmp_path / f"{stem}.ipynb", as_version=4).cells
    said = [c.outputs[0].data["text/plain"] for c in cells if "check" in c.metadata.get("tags", [])]
    assert len(said) == 2 and all(text.startswith("pass: ") for text in said), said
