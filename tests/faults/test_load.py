"""Many batches, and two runs at once: nothing lost, nothing twice, nothing that grows."""

import functools
import gc
import subprocess
import sys
import threading

import helpers
import psutil
import pytest
import torch
from helpers import files_in_shared_memory, images, make_device, open_descriptors, wait_until
from test_killed import ENVIRONMENT, SETUP, Kernel, short  # noqa: F401
from test_pipelines import run

from labkit import BufferPool, Job, OutputWorkers
from labkit.pipelines import STRATEGIES

pytestmark = pytest.mark.timeout(280, method="signal")
SOAK = 20_000


class Small(torch.nn.Module):
    """[n, 3, 4, 4] uint8 to [n, 1] float32: the sum of all bytes of an image."""

    def forward(self, rows):
        return rows.float().sum(dim=(1, 2, 3))[:, None]


def small_job(device, process, batches):
    return Job(Small(), images(101, size=4), process, device, batch=1, samples=batches)


def test_a_soak(tmp_path):
    """Bytes right, each batch once, and memory as after the first tenth."""
    log = tmp_path / "log"
    job = small_job(make_device("emulated"), functools.partial(helpers.value, log=log), SOAK)
    sums = Small()(images(101, size=4)).flatten().tolist()
    expected = [(batch, sums[batch * job._step % 101]) for batch in range(SOAK)]
    resident, seen = psutil.Process().memory_info, []

    def watched(job, workers, pinned_pool):
        def batches(stream=None):
            for index, batch in enumerate(Job.batches(job, stream=stream)):
                if index % (SOAK // 10) == 0:
                    gc.collect()
                    seen.append(resident().rss)
                yield batch

        job.batches = batches
        return STRATEGIES["stream_pipeline"](job, workers, pinned_pool)

    found = run(watched, job, slots=4, workers=2, threads=False)
    assert found == expected
    assert sorted(map(int, log.read_text().split())) == list(range(SOAK))
    # The results themselves, some hundred bytes each, are what may grow.
    assert max(seen[2:]) - seen[1] < 400 * SOAK, seen


@pytest.mark.parametrize("name", STRATEGIES)
def test_descriptors_stay_flat_over_a_thousand_batches(name):
    job = small_job(make_device("emulated"), helpers.counts, 1000)
    first = job.first(2)
    run(STRATEGIES[name], first, threads=False)
    before, threads = open_descriptors(), threading.active_count()
    # Each worker says how many it has open itself.
    found = run(STRATEGIES[name], job, threads=False)
    assert [batch for batch, _ in found] == list(range(1000))
    most = max(count for _, count in found[100:])
    assert most <= max(count for _, count in found[:100])
    gc.collect()
    assert wait_until(lambda: open_descriptors() <= before, 5)
    assert wait_until(lambda: threading.active_count() <= threads, 5)


def test_twenty_starts_and_stops():
    device = make_device("emulated")

    def cycle():
        with (
            BufferPool(device, (8, 4), torch.float32, 3, page_locked=True) as pool,
            OutputWorkers(helpers.fingerprint, 1, pool) as workers,
        ):
            slot = pool.acquire()
            slot.copy_(device.upload(torch.ones(8, 4)))
            workers.submit(0, slot)
            workers.results()

    def footprint():
        gc.collect()
        return (
            open_descriptors(), threading.active_count(), len(files_in_shared_memory()),
            sum(device._page_locked.values()),
        )  # fmt: skip

    cycle()
    before = footprint()
    for _ in range(20):
        cycle()
    assert wait_until(lambda: all(n <= b for n, b in zip(footprint(), before, strict=True)), 5)


def test_two_kernels_at_once(short):  # noqa: F811
    kernels = []
    try:
        for name in ("one", "two"):
            (short / name).mkdir()
            kernels.append(Kernel(short / name))
        for kernel in kernels:
            kernel.run(SETUP)
        cells = [kernel.begin("assert {run(1) for _ in range(8)} == {right}") for kernel in kernels]
        for kernel, cell in zip(kernels, cells, strict=True):
            assert kernel.end(cell, 60) == "ok"
        cell = kernels[0].begin("run(1000)")
        kernels[1].manager.shutdown_kernel(now=True)
        kernels[0].manager.interrupt_kernel()
        assert kernels[0].end(cell)[0] == "KeyboardInterrupt"
        kernels[0].run("assert run(2) == right")
    finally:
        for kernel in kernels:
            kernel.client.stop_channels()
            kernel.manager.shutdown_kernel(now=True)


def test_two_scripts_at_once_agree(tmp_path):
    code = (
        "import helpers; from conftest import make_job\n"
        "from test_pipelines import run, STRATEGIES\n"
        "from labkit import digest\n"
        "if __name__ == '__main__':\n"
        "    job = make_job(helpers.make_device('emulated', helpers.BALANCED))\n"
        "    print({digest(run(each, job, threads=False)) for each in STRATEGIES.values()})\n"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    children = [
        subprocess.Popen([sys.executable, script], env=ENVIRONMENT, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    said = [child.communicate(timeout=100)[0] for child in children]
    assert said[0] == said[1] and said[0].count(b"'") == 2
    assert [child.returncode for child in children] == [0, 0]
