"""Fixtures: every contract of the device runs on the emulated one, and on a GPU where one is."""

import pytest
import torch
from helpers import BALANCED, Tiny, fingerprint, images, make_device

from labkit import BufferPool, Job

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


def make_job(device, process=fingerprint, batch=8, samples=26, distinct=None):
    return Job(Tiny(), images(distinct or samples), process, device, batch, samples)
