"""How long the labs take: what `labkit run` measured, and what is told of it."""

import json

import pytest
from helpers import make_device

from labkit import LabError
from labkit.course import FOLDER, load_times, save_times, time_needed
from labkit.notebooks import find_notebooks


def test_what_was_measured_is_told_with_its_device(tmp_path):
    seconds = {"03_buffer_pool": 41.26}
    path = save_times(seconds, tmp_path / "here.json", make_device("emulated"), "smoke", False)
    assert load_times(path)["seconds"] == {"03_buffer_pool": 41.3}
    told = time_needed("03_buffer_pool", tmp_path)
    assert told.startswith("41 s (EMULATED device") and "preset smoke" in told
    assert time_needed("05_stream_pipeline", tmp_path) == "not measured yet"


def test_a_file_that_is_no_record_of_times_gives_one_line(tmp_path):
    path = tmp_path / "times.json"
    path.write_text(json.dumps({"schema": 1, "seconds": {"01": "long"}}))
    with pytest.raises(LabError, match="is not a record of times"):
        load_times(path)


def test_the_shipped_times_cover_every_lab():
    shipped = [load_times(path) for path in FOLDER.glob("*.json")]
    assert {times["device"]["kind"] for times in shipped} >= {"emulated"}
    for times in shipped:
        assert times["solved"]
        assert times["seconds"].keys() == {path.stem for path in find_notebooks([])}
