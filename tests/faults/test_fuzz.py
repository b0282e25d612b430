"""Every reader of files from outside, fed with damaged ones: one line, or success. Never more."""

import contextlib
import functools
import gzip
import io
import json
import os
import sqlite3
import tempfile
import tracemalloc
from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from sample_record import sample_record
from test_notebooks import write_notebook
from test_traces import DATA, NSIGHT, TORCH, example

from labkit import LabError, load_costs, load_record, load_timeline, workload
from labkit.metrics import summarize
from labkit.notebooks import parse_parameters, read_parameters
from labkit.trace_files import save_timeline
from labkit.workload import build_model, load_images

pytestmark = pytest.mark.timeout(120, method="signal")
SETTINGS = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}
# Some hundred times what is fed in: a bomb takes gigabytes.
MEMORY_LIMIT_BYTES = 2**28
SHIPPED_COSTS = Path(workload.__file__).parent.parent / "figures" / "profiles" / "h200.json"

# What can stand in the place of any value of a JSON file.
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from([10**400, -1, 0, 1e308, "x" * 10_000, "\ud800", "../../etc", "\x1b[2J"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip


@functools.cache
def unpacked(name):
    return gzip.decompress((DATA / f"{name}.gz").read_bytes())


def one_line_or_success(read, path):
    """What `read(path)` gives, or None after an error of one line."""
    tracemalloc.start()
    try:
        return read(path)
    except LabError as error:
        text = str(error)
        assert text.strip() and "\n" not in text and len(text) < 1000, text
        text.encode()  # half a letter could not be printed
        return None
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < MEMORY_LIMIT_BYTES, f"{peak:,} bytes"


def places(content, path=()):
    """The path to every value in it."""
    found = [path]
    items = content.items() if isinstance(content, dict) else enumerate(content)
    for key, value in items:
        if isinstance(value, dict | list):
            found += places(value, (*path, key))
        else:
            found.append((*path, key))
    return found


def changed(content, path, value):
    """A copy of `content` with one value replaced, or taken out for Ellipsis."""
    if not path:
        return None if value is ... else value
    content = content.copy()
    if len(path) > 1:
        content[path[0]] = changed(content[path[0]], path[1:], value)
    elif value is ...:
        del content[path[0]]
    else:
        content[path[0]] = value
    return content


def torch_trace():
    """The shape of the real one, short enough for many trials."""
    trace = json.loads(unpacked(TORCH))
    events = trace["traceEvents"]
    kept = [next(e for e in events if e.get("cat") == cat) for cat in
            ("kernel", "gpu_memcpy", "user_annotation", "cuda_runtime")]  # fmt: skip
    return {**trace, "traceEvents": kept}


def compact_trace():
    with tempfile.TemporaryDirectory() as folder:
        return json.loads(save_timeline(example(), Path(folder, "t.json")).read_text())


def notebook_json():
    with tempfile.TemporaryDirectory() as folder:
        text = 'word: str = "a"\ncount: int = 3'
        return json.loads(write_notebook(Path(folder, "n.ipynb"), parameters=text).read_text())


def read_all_of_timeline(path):
    timeline = load_timeline(path)
    if timeline.spans:
        summarize(timeline)
    return timeline


def read_notebook(path):
    read_parameters(path)
    return parse_parameters([], path)


READERS = {
    "record": (sample_record, load_record),
    "profile": (lambda: json.loads(SHIPPED_COSTS.read_text()), load_costs),
    "compact trace": (compact_trace, read_all_of_timeline),
    "torch trace": (torch_trace, read_all_of_timeline),
    "notebook": (notebook_json, read_notebook),
}


@pytest.mark.parametrize("name", READERS)
def test_a_json_file_with_any_value_in_any_place(tmp_path, name):
    make, read = READERS[name]
    whole = make()
    where = places(whole)
    path = tmp_path / "file.json"

    @settings(max_examples=150, **SETTINGS)
    @given(
        st.lists(st.tuples(st.sampled_from(where), VALUES | st.just(...)), min_size=1, max_size=2)
    )
    def check(changes):
        content = whole
        for place, value in changes:
            # The place may have gone with the change before.
            with contextlib.suppress(KeyError, IndexError, TypeError, AttributeError):
                content = changed(content, place, value)
        path.write_text(json.dumps(content), encoding="utf-8")
        one_line_or_success(read, path)

    path.write_text(json.dumps(whole))
    assert one_line_or_success(read, path) is not None
    check()


@pytest.mark.parametrize("name", [*READERS, "nsight", "image", "weights"])
def test_a_file_with_any_bytes_in_it(tmp_path, monkeypatch, name):
    whole, read = whole_file(name, tmp_path, monkeypatch)
    path = tmp_path / ("file.png" if name == "image" else "file")

    @settings(max_examples=60, **SETTINGS)
    @given(
        st.lists(st.tuples(st.integers(0, len(whole) - 1), st.binary(max_size=8)), max_size=5),
        st.integers(0, len(whole)) | st.just(len(whole)),
    )
    def check(writes, end):
        data = bytearray(whole)
        for start, some in writes:
            data[start : start + len(some)] = some
        path.write_bytes(bytes(data[:end]))
        one_line_or_success(read, path)

    check()
    for data in (
        b"",
        b"\0" * 5000,
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"\xff" * 100,
        b"1" * 10**6,
    ):
        path.write_bytes(data)
        assert one_line_or_success(read, path) is None


def whole_file(name, folder, monkeypatch):
    if name == "nsight":
        return unpacked(NSIGHT), read_all_of_timeline
    if name == "image":
        data = io.BytesIO()
        Image.effect_noise((40, 30), 60).save(data, "PNG")
        return data.getvalue(), lambda path: load_images(path.parent, 8, 100)
    if name == "weights":
        return weights_file(folder, monkeypatch)
    make, read = READERS[name]
    return json.dumps(make()).encode(), read


def weights_file(folder, monkeypatch):
    data = io.BytesIO()
    torch.save({"a": torch.zeros(3)}, data)
    hub = folder / "hub"
    (hub / "checkpoints").mkdir(parents=True)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(hub))
    from torchvision.models.segmentation import DeepLabV3_MobileNet_V3_Large_Weights as Weights

    file = hub / "checkpoints" / Path(Weights.DEFAULT.url).name

    def read(path):
        file.write_bytes(path.read_bytes())
        return build_model("deeplabv3_mobilenet_v3_large", "pretrained")

    return data.getvalue(), read


@settings(max_examples=60, **SETTINGS)
@given(
    table=st.sampled_from(["CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_MEMCPY",
                           "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS", "StringIds"]),
    column=st.integers(0, 20),
    value=st.none() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text(max_size=9)
    | st.binary(max_size=9),
    every=st.integers(1, 50),
)  # fmt: skip
def test_an_nsight_export_with_any_value_in_any_column(table, column, value, every):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "file.sqlite")
        path.write_bytes(unpacked(NSIGHT))
        with closing(sqlite3.connect(path)) as database:
            names = [row[1] for row in database.execute(f"PRAGMA table_info({table})")]
            name = names[column % len(names)]
            try:
                database.execute(
                    f'UPDATE {table} SET "{name}" = ? WHERE rowid % ? = 0', (value, every)
                )
                database.commit()
            except (sqlite3.Error, UnicodeError):
                return  # the database itself refused it
        one_line_or_success(read_all_of_timeline, path)


# Never run, whatever is in it.


class Bomb:
    def __reduce__(self):
        return (Path.touch, (Path(tempfile.gettempdir(), "labkit was here"),))


def test_weights_are_not_executed(tmp_path, monkeypatch):
    _, read = weights_file(tmp_path, monkeypatch)
    mark = Path(tempfile.gettempdir(), "labkit was here")
    mark.unlink(missing_ok=True)
    torch.save(Bomb(), tmp_path / "weights")
    assert one_line_or_success(read, tmp_path / "weights") is None
    assert not mark.exists()


def test_parameters_are_not_executed(tmp_path):
    mark = tmp_path / "mark"
    code = f"n: int = __import__('pathlib').Path({str(mark)!r}).touch()"
    path = write_notebook(tmp_path / "own.ipynb", parameters=code)
    assert one_line_or_success(read_notebook, path) is None
    assert not mark.exists()
    deep = "n: int = " + "(" * 5000 + ")" * 5000
    assert (
        one_line_or_success(read_notebook, write_notebook(tmp_path / "deep.ipynb", parameters=deep))
        is None
    )


@pytest.mark.parametrize("read", [load_record, load_costs, load_timeline, read_notebook])
def test_odd_paths(tmp_path, read):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "folder").mkdir()
    (tmp_path / "dangling").symlink_to("nowhere")
    odd = ["loop", "folder", "dangling", "missing", "x" * 300, "a\0b"]
    for name in odd:
        assert one_line_or_success(read, tmp_path / name) is None
    if read is not read_notebook:  # `labkit run` takes a file and nothing else
        assert one_line_or_success(read, Path("/dev/zero")) is None


def test_a_folder_of_odd_images(tmp_path):
    for name in ("loop.png", "folder.png", "zero.png", "pipe.png"):
        folder = tmp_path / name.removesuffix(".png")
        folder.mkdir()
        if name == "loop.png":
            (folder / name).symlink_to(name)
        elif name == "folder.png":
            (folder / name).mkdir()
        elif name == "pipe.png":
            os.mkfifo(folder / name)  # nobody ever writes into it
        else:
            (folder / name).symlink_to("/dev/zero")
        assert one_line_or_success(lambda path: load_images(path, 8, 3), folder) is None
