"""Wrong use: an error at that line, which says what to do."""

import subprocess
import sys

import helpers
import pytest
import torch
from helpers import fingerprint
from test_killed import ENVIRONMENT, kernel  # noqa: F401

from labkit import BufferPool, LabError, OutputWorkers
from labkit.workers import WorkerError

pytestmark = pytest.mark.timeout(120, method="signal")


@pytest.fixture
def workers(pool):
    with OutputWorkers(fingerprint, 1, pool, threads=True) as workers:
        yield workers


def refusal(action, *args, **more):
    with pytest.raises(LabError) as error:
        action(*args, **more)
    assert "\n" not in str(error.value) and not isinstance(error.value, WorkerError)
    return str(error.value)


def ones(device):
    return device.upload(torch.ones(8, 4))


def test_a_slot_that_nothing_was_copied_into(device, pool, workers):
    """Its event was never recorded for this batch, so it would count as past."""
    assert "slot.copy_(" in refusal(workers.submit, 0, pool.acquire())
    slot = pool.acquire()
    slot.tensor.copy_(ones(device), non_blocking=True)  # past the slot, without its event
    assert "slot.copy_(" in refusal(workers.submit, 0, slot)
    slot.copy_(ones(device))
    workers.submit(0, slot)
    assert workers.results() == [fingerprint(0, torch.ones(8, 4))]


def test_a_slot_that_was_filled_for_the_holder_before(device, pool, workers):
    for slot in [pool.acquire() for _ in range(3)]:
        slot.copy_(ones(device))
        pool.release(slot)
    assert "slot.copy_(" in refusal(workers.submit, 0, pool.acquire())


@pytest.mark.parametrize("how", ["transposed", "gaps", "elsewhere"])
def test_a_slot_with_another_tensor(device, pool, workers, how):
    slot = pool.acquire()
    slot.copy_(ones(device))
    slot.tensor = {
        "transposed": slot.tensor.t(),
        "gaps": slot.tensor[:, ::2],
        "elsewhere": torch.ones(8, 4),
    }[how]
    assert "not what copy_ wrote" in refusal(workers.submit, 0, slot)


def test_a_slot_of_a_pool_that_was_closed(device):
    pool = BufferPool(device, (8, 4), torch.float32, 2, page_locked=True)
    with OutputWorkers(fingerprint, 1, pool, threads=True) as workers:
        slot = pool.acquire()
        slot.copy_(ones(device))
        pool.close()
        assert "closed" in refusal(slot.copy_, ones(device))
        refusal(workers.submit, 0, slot)
    assert "closed" in refusal(OutputWorkers, fingerprint, 1, pool)


@pytest.mark.parametrize("threads", [False, True])
def test_a_consumer_that_needs_numpy_and_gets_bfloat16(emulated, threads):
    batch = torch.ones(8, 4, dtype=torch.bfloat16)
    with OutputWorkers(helpers.needs_numpy, 1, threads=threads) as workers:
        workers.submit(3, batch)
        with pytest.raises(WorkerError, match=r"batch 3 .*NumPy has no bfloat16.*\.float\(\)"):
            workers.results()


@pytest.mark.parametrize("process", [3, None, "archive", torch.ones(3)])
@pytest.mark.parametrize("threads", [False, True])
def test_a_process_that_is_no_function(process, threads):
    assert "function" in refusal(OutputWorkers, process, 1, threads=threads)


def test_a_function_of_a_cell(kernel):  # noqa: F811
    code = """
import torch
from labkit import OutputWorkers, LabError
def mine(batch, tensor): return batch
OutputWorkers(mine, 1)
"""
    name, value = kernel.end(kernel.begin(code))
    assert name == "LabError" and "'mine'" in value
    assert ".py file" in value and "threads=True" in value
    kernel.run(code.replace("(mine, 1)", "(mine, 1, threads=True).close()"))


SCRIPT = """
import torch
from helpers import fingerprint
from labkit import OutputWorkers
with OutputWorkers(fingerprint, 1) as workers:
    workers.submit(0, torch.ones(3))
"""


def test_a_script_without_its_guard(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    child = subprocess.run(
        [sys.executable, script], env=ENVIRONMENT, capture_output=True, text=True, timeout=60
    )
    assert child.returncode == 1
    last = child.stderr.splitlines()[-1]
    assert "while starting" in last and 'if __name__ == "__main__":' in last
