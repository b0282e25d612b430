"""Calibration on the devices that there are, and hardware profiles as files."""

import gc
import json
from pathlib import Path

import pytest
import torch
from conftest import DEVICES
from helpers import make_device
from sample_record import sample_costs
from test_prediction import size

from labkit import (
    Job,
    LabError,
    archive,
    calibrate,
    load_costs,
    load_record,
    open_device,
    predict,
    save_costs,
    shipped_costs,
)
from labkit.calibration import _Slowdowns
from labkit.costs import STAGES, costs_table
from labkit.pipelines import STRATEGIES
from labkit.results import prediction_error


@pytest.fixture(params=DEVICES)
def job(request):
    model = torch.nn.Conv2d(3, 8, 3, padding=1)
    inputs = torch.randn(8, 3, 96, 96)
    job = Job(model, inputs, archive, make_device(request.param), batch=8, name="a convolution")
    yield job
    job.close()


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.timeout(120)
def test_every_stage_is_measured_and_nothing_is_left(job):
    steps = []
    calibrate(job, size(workers=2))  # starts the fork server, which stays
    gc.collect()
    before = open_files(), sorted(map(str, Path("/dev/shm").iterdir()))
    costs = calibrate(job, size(workers=2), steps.append)
    gc.collect()
    assert (open_files(), sorted(map(str, Path("/dev/shm").iterdir()))) == before
    assert len(steps) == 3
    assert costs.seconds.keys() == costs.spread.keys() == STAGES.keys()
    for stage, (low, high) in costs.spread.items():
        assert 0 < low <= costs.seconds[stage] <= high
    assert costs.device["kind"] == job.device.kind
    assert (costs.batch, costs.workers) == (8, 2)
    assert costs.input_bytes == 8 * 3 * 96 * 96 * 4
    assert costs.output_bytes == job.output_bytes == 8 * 8 * 96 * 96 * 4
    for beside in costs.slowdowns.values():
        assert beside.keys() <= STAGES.keys() and all(share > 0 for share in beside.values())
    # What was calibrated is enough to predict every strategy.
    for strategy in STRATEGIES.values():
        assert predict(strategy, costs, size()).seconds > 10 * costs.seconds["forward"]


def test_the_device_s_own_rates_are_found():
    """The emulated device's times are planned, so that they can be found again."""
    device = open_device("emulated")
    model = torch.nn.Conv2d(3, 8, 31, padding=15)
    job = Job(model, torch.randn(8, 3, 128, 128), archive, device, batch=8)
    costs = calibrate(job, size(workers=1))
    flops = 2 * 8 * 8 * 128 * 128 * 3 * 31**2
    assert costs.seconds["forward"] == pytest.approx(flops / 1e12 + 20e-6, rel=0.05)
    assert costs.rates["flops_per_s"] == pytest.approx(1e12, rel=0.1)
    assert costs.seconds["copy"] >= job.output_bytes / 5e9
    assert costs.seconds["touched copy"] >= job.output_bytes / 1.6e9


def test_what_fails_in_a_worker_is_said(job):
    job.process = fail_in_worker
    with pytest.raises(LabError, match="failed"):
        calibrate(job, size(workers=1))


def fail_in_worker(batch, tensor):
    import multiprocessing

    if multiprocessing.parent_process() is not None:
        raise ValueError("not today")


# Files.


def test_a_profile_survives_its_file(tmp_path):
    path = save_costs(sample_costs(), tmp_path / "a folder" / "hardware.json")
    assert load_costs(path) == sample_costs()


@pytest.mark.parametrize(
    "change",
    [
        {"seconds": {}},
        {"seconds": {**sample_costs().seconds, "copy": 0}},
        {"seconds": {**sample_costs().seconds, "copy": 1e300}},
        {"slowdowns": {"copy": {"lunch": 1}}},
        {"slowdowns": {"copy": {"process": -1}}},
        {"slowdowns": []},
        {"workers": 0},
        {"device": {"kind": "quantum", "name": "x", "profile": None}},
        {"rates": {}},
        {"spread": {stage: [1] for stage in STAGES}},
        {"workers": 2.0},
        {"job": {**sample_costs().job, "batch": 0}},
        {"job": {**sample_costs().job, "batch": 8.0}},
        {"job": {**sample_costs().job, "image": 0}},
        {"host": {**sample_costs().host, "cores": 3.0}},
        {"seconds": {**sample_costs().seconds, "copy": 5e-324}},
        {"schema": 2},
    ],
)
def test_what_is_no_profile_gives_one_line(tmp_path, change):
    path = save_costs(sample_costs(), tmp_path / "hardware.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(LabError, match="is not a hardware profile") as caught:
        load_costs(path)
    assert "\n" not in str(caught.value)


def test_half_a_letter_gives_one_line(tmp_path):
    path = save_costs(sample_costs(), tmp_path / "hardware.json")
    path.write_text(path.read_text().replace("NVIDIA H200", "\\ud800"))
    with pytest.raises(LabError, match="hardware.json"):
        load_costs(path)


def test_what_others_cost_is_told_apart():
    slow = _Slowdowns({"process": 10.0, "copy": 2.0})
    # Three at once took 16: each of the two others costs 0.3.
    slow.note({"process": [15.0, 16.0, 90.0]}, "process", "process", 2)
    assert slow.shares["process"]["process"] == pytest.approx(0.3)
    # Three at once and a copy took 21: 0.5 of it is the copy's.
    slow.note({"process": [21.0]}, "process", "copy", among=3)
    assert slow.shares["process"]["copy"] == pytest.approx(0.5)
    slow.note({"copy": [3.0]}, "copy", "process", 4)
    assert slow.shares["copy"]["process"] == pytest.approx(0.125)
    slow.note({"copy": [1.9]}, "copy", "upload")
    assert "upload" not in slow.shares["copy"]


def test_the_emulated_device_runs_at_a_profile_s_rates():
    device = open_device("emulated", sample_costs().hardware())
    assert device.profile.pinned_bytes_per_s == 5e10
    assert device.name == "emulated GPU (NVIDIA H200)" and device.kind == "emulated"
    emulated = {"kind": "emulated", "name": "emulated GPU (classroom)", "profile": "classroom"}
    with pytest.raises(LabError, match="emulate a GPU's profile"):
        sample_costs(device=emulated).hardware()


def test_the_table_names_the_machine_and_what_disturbs():
    table = costs_table(sample_costs())
    assert "NVIDIA H200" in table.title
    assert "copy +20%" in "".join(table.columns[3].cells)
    emulated = {"kind": "emulated", "name": "emulated GPU (classroom)", "profile": "classroom"}
    assert "EMULATED" in costs_table(sample_costs(device=emulated)).title


def test_the_shipped_profile_is_an_h200_and_the_emulated_device_runs_from_it():
    costs = shipped_costs()
    assert costs.name == "NVIDIA H200" and costs.device["kind"] == "cuda"
    assert costs.seconds["copy"] < costs.seconds["touched copy"] < costs.seconds["fresh copy"]
    device = open_device("emulated", costs.hardware())
    assert device.profile.name == "NVIDIA H200" and "calibrated" in device.profile.source
    assert torch.equal(device.upload(torch.arange(8)).cpu(), torch.arange(8))
    # Each step of the ladder is predicted to be faster than the one before.
    rates = [predict(strategy, costs, size()).samples_per_s for strategy in STRATEGIES.values()]
    assert rates == sorted(rates)


def test_the_job_of_the_labs_was_predicted_well_on_an_h200():
    record = load_record(Path(__file__).parent.parent / "figures" / "records" / "h200_article.json")
    misses = sorted(abs(prediction_error(row)) for row in record["strategies"])
    assert len(misses) == 5 and misses[2] <= 0.05 and misses[4] <= 0.10
