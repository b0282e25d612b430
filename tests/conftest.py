"""Fixtures: every contract of the device runs on the emulated one, and on a GPU where one is."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import BALANCED, Tiny, fingerprint, images, make_device

from labkit import BufferPool, Job

# For a run that hangs; all five notebooks take about a minute on two cores.
LIMIT_S = 280
DEVICES = ["emulated", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(params=DEVICES)
def device(request):
    """An idle device. The emulated one takes no time: see helpers.stalled."""
    device = make_device(request.param)
    yield device
    device.synchronize()


@pytest.fixture
def emulated():
    return make_device("emulated")


@pytest.fixture
def page_locked(device):
    """Makes page-locked host tensors filled with `value`, which starts as 7."""
    made = []

    def make(shape, dtype=torch.float32, value=7):
        # Shared memory has pages of its own: two of these never lie in the same page.
        host = torch.empty(shape, dtype=dtype).share_memory_().fill_(value)
        device.page_lock(host)
        made.append(host)
        return host

    yield make
    device.synchronize()
    for host in made:
        device.page_unlock(host)


@pytest.fixture
def job():
    """26 images in batches of 8, the last one smaller, on an emulated device with real delays."""
    job = make_job(make_device("emulated", BALANCED))
    yield job
    job.close()


@pytest.fixture
def pool(device):
    with BufferPool(device, (8, 4), torch.float32, slots=3, page_locked=True) as pool:
        yield pool


@pytest.fixture(scope="session")
def all_five(tmp_path_factory):
    """All five notebooks, run from outside, in a folder whose name has a space and an ü."""
    folder = tmp_path_factory.mktemp("run") / "übung 1"
    folder.mkdir()
    labkit = Path(sys.executable).with_name("labkit")
    command = [labkit, "run", "--device", "emulated", "--preset", "smoke", "--out", "out é"]
    result = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, encoding="utf-8"
    )
    return result, folder / "out é"


def make_job(device, process=fingerprint, batch=8, samples=26, distinct=None):
    return Job(Tiny(), images(distinct or samples), process, device, batch, samples)
