"""Workers: what goes in comes out in order, and whatever ends one is said and cleaned up."""

import functools
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import types
from multiprocessing import connection
from pathlib import Path

import helpers
import psutil
import pytest
import torch
from helpers import (
    files_in_shared_memory,
    fingerprint,
    make_device,
    open_descriptors,
    stalled,
    wait_until,
)

import labkit.worker
from labkit import BufferPool, LabError, OutputWorkers
from labkit.worker import CLOSE_LIMIT_S
from labkit.workers import WorkerError

pytestmark = [
    pytest.mark.timeout(90, method="signal"),
    pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning"),
]


@pytest.fixture(params=["processes", "threads"])
def threads(request):
    return request.param == "threads"


@pytest.fixture
def small_pool(emulated):
    """Four slots of 8 x 4 float32 on a device that takes no time."""
    with BufferPool(emulated, (8, 4), torch.float32, slots=4, page_locked=True) as pool:
        yield pool


def _batch(index, size=8):
    return torch.arange(size * 4.0).view(size, 4) + 1000 * index


def _fill(pool, index, size=8):
    slot = pool.acquire()
    slot.copy_(pool._device.upload(_batch(index, size)))
    return slot


def _expected(sizes):
    return [fingerprint(index, _batch(index, size)) for index, size in enumerate(sizes)]


def _gone(pids, seconds=5):
    """Whether these processes ended, within `seconds`. Nobody may have reaped them."""

    def ended(pid):
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    return wait_until(lambda: all(ended(pid) for pid in pids), seconds)


def _pids(workers):
    return [worker._process.pid for worker in workers._workers]


# Results.


def test_results_come_in_batch_order(threads):
    with OutputWorkers(helpers.jittered, 3, threads=threads) as workers:
        for index in range(12):
            workers.submit(index, _batch(index))
        assert workers.results() == _expected([8] * 12)


def test_results_are_sorted_by_batch_not_by_submission(threads):
    with OutputWorkers(fingerprint, 2, threads=threads) as workers:
        for index in (4, 1, 3, 0, 2):
            workers.submit(index, _batch(index))
        assert workers.results() == _expected([8] * 5)


def test_slots_are_processed_and_released(threads, small_pool):
    sizes = [8] * 10 + [3]
    with OutputWorkers(fingerprint, 2, small_pool, threads=threads) as workers:
        for index, size in enumerate(sizes):
            workers.submit(index, _fill(small_pool, index, size))
        assert workers.results() == _expected(sizes)
        assert len({small_pool.acquire().index for _ in range(4)}) == 4


def test_slots_and_tensors_may_be_mixed(threads, small_pool):
    with OutputWorkers(fingerprint, 2, small_pool, threads=threads) as workers:
        for index in range(9):
            item = _batch(index) if index % 2 else _fill(small_pool, index)
            workers.submit(index, item)
        assert workers.results() == _expected([8] * 9)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(0, 4),
        torch.tensor(3.0),
        torch.ones(3, 5, dtype=torch.bfloat16),
        torch.arange(24).view(4, 6)[:, ::2],
        torch.arange(24).view(4, 6).t(),
        torch.tensor([True, False]),
        torch.arange(3 * 2**20 + 5, dtype=torch.int32),  # 13 pieces, the last one small
    ],
    ids=["empty", "scalar", "bfloat16", "gaps", "transposed", "bool", "large"],
)
def test_any_plain_tensor_arrives_whole(threads, tensor):
    with OutputWorkers(fingerprint, 1, threads=threads) as workers:
        workers.submit(0, tensor)
        assert workers.results() == [fingerprint(0, tensor)]


def test_the_tensor_is_the_workers_own_in_a_process():
    tensor = _batch(0)
    with OutputWorkers(helpers.scribble, 1) as workers:
        workers.submit(0, tensor)
        assert workers.results() == _expected([8])
    assert torch.equal(tensor, _batch(0))


def test_workers_serve_one_run_after_the_other(threads, small_pool):
    with OutputWorkers(fingerprint, 2, small_pool, threads=threads) as workers:
        assert workers.results() == []
        for _ in range(3):
            for index in range(5):
                workers.submit(index, _fill(small_pool, index))
            assert workers.results() == _expected([8] * 5)
        assert len(workers.seconds) == 15


def test_every_worker_gets_work():
    with OutputWorkers(helpers.worker_pid, 3, limit=3) as workers:
        for index in range(9):
            workers.submit(index, _batch(index))
        assert set(workers.results()) == set(_pids(workers))


def test_a_partial_function_keeps_its_arguments(threads, tmp_path):
    log = tmp_path / "log"
    process = functools.partial(helpers.logged, log=log)
    with OutputWorkers(process, 2, threads=threads) as workers:
        for index in range(6):
            workers.submit(index, _batch(index))
        workers.results()
    assert sorted(log.read_text().split()) == [str(index) for index in range(6)]


def test_a_worker_process_computes_on_one_thread():
    with OutputWorkers(helpers.intra_op_threads, 1) as workers:
        workers.submit(0, _batch(0))
        assert workers.results() == [1]


def test_a_worker_has_mapped_every_slot_before_its_first_batch(emulated):
    with (
        BufferPool(emulated, (2**22,), torch.float32, slots=2) as pool,
        OutputWorkers(helpers.page_faults, 1, pool) as workers,
    ):
        for batch in range(2):
            workers.submit(batch, pool.acquire().copy_(emulated.upload(torch.ones(1))))
        # 4,096 pages each: unmapped, some hundreds of faults at 16 pages a time
        assert max(workers.results()) < 64


def test_worker_threads_leave_torchs_threads_alone():
    before = torch.get_num_threads()
    with OutputWorkers(helpers.intra_op_threads, 1, threads=True) as workers:
        workers.submit(0, _batch(0))
        assert workers.results() == [before]


# Waiting.


@pytest.mark.parametrize("limit", [1, 3])
def test_submitting_a_tensor_waits_while_the_limit_is_under_way(threads, tmp_path, limit):
    gate = tmp_path / "gate"
    process = functools.partial(helpers.wait_for, path=gate)
    with OutputWorkers(process, 2, limit=limit, threads=threads) as workers:
        for index in range(limit):
            workers.submit(index, _batch(index))
        last = threading.Thread(target=workers.submit, args=(limit, _batch(limit)))
        last.start()
        last.join(0.3)
        assert last.is_alive()
        gate.touch()
        last.join(30)
        assert not last.is_alive()
        assert workers.results() == list(range(limit + 1))


def test_submitting_a_slot_does_not_wait(threads, small_pool, tmp_path):
    gate = tmp_path / "gate"
    process = functools.partial(helpers.wait_for, path=gate)
    with OutputWorkers(process, 1, small_pool, limit=1, threads=threads) as workers:
        for index in range(4):
            workers.submit(index, _fill(small_pool, index))
        gate.touch()
        assert workers.results() == [0, 1, 2, 3]


def test_acquiring_waits_for_a_worker_to_be_done(threads, small_pool, tmp_path):
    gate = tmp_path / "gate"
    process = functools.partial(helpers.wait_for, path=gate)
    with OutputWorkers(process, 1, small_pool, threads=threads) as workers:
        for index in range(4):
            workers.submit(index, _fill(small_pool, index))
        opener = threading.Timer(0.2, gate.touch)
        opener.start()
        assert small_pool.acquire().held
        assert gate.exists()
        assert workers.results() == [0, 1, 2, 3]


def test_acquiring_what_the_main_loop_holds_is_an_error_at_once(threads, small_pool):
    with OutputWorkers(fingerprint, 1, small_pool, threads=threads) as workers:
        workers.submit(0, _fill(small_pool, 0))
        for _ in range(4):
            small_pool.acquire()
        with pytest.raises(LabError, match="all 4 slots are held"):
            small_pool.acquire()
        assert workers.results() == _expected([8])


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_that_nothing_can_pass_is_refused(limit):
    with pytest.raises(LabError, match="limit"):
        OutputWorkers(fingerprint, 1, limit=limit, threads=True).close()


@pytest.mark.parametrize("count", [0, -1, 1.5, True])
def test_the_count_is_a_whole_number_of_at_least_one(count):
    with pytest.raises(LabError, match="workers"):
        OutputWorkers(fingerprint, count)


# What is refused.


def _refused(workers, batch, item, match):
    with pytest.raises(LabError, match=match) as refusal:
        workers.submit(batch, item)
    assert "\n" not in str(refusal.value)
    assert not isinstance(refusal.value, WorkerError)
    assert workers.results() == []


def test_a_batch_submitted_twice_is_refused(threads):
    with OutputWorkers(fingerprint, 1, threads=threads) as workers:
        workers.submit(0, _batch(0))
        with pytest.raises(LabError, match="batch 0 was submitted twice"):
            workers.submit(0, _batch(0))
        assert workers.results() == _expected([8])


def test_a_slot_whose_copy_runs_is_refused(device):
    tensor = device.upload(_batch(0))
    with (
        BufferPool(device, (8, 4), torch.float32, 1, page_locked=True) as pool,
        OutputWorkers(fingerprint, 1, pool, threads=True) as workers,
    ):
        slot = pool.acquire()
        with stalled(device):
            slot.copy_(tensor, non_blocking=True)
            _refused(workers, 0, slot, "copy is running")
        slot.event.synchronize()
        workers.submit(0, slot)
        assert workers.results() == _expected([8])


def test_a_tensor_on_the_device_is_refused(device):
    with OutputWorkers(fingerprint, 1) as workers:
        _refused(workers, 0, device.upload(_batch(0)), "no plain host tensor")


@pytest.mark.parametrize(
    "item",
    [
        torch.ones(3, requires_grad=True),
        torch.ones(3, requires_grad=True) * 2,
        torch.nn.Parameter(torch.ones(3), requires_grad=False),
        torch.ones(3, device="meta"),
        torch.ones(3).to_sparse(),
        torch.ones(3, dtype=torch.complex64).conj(),
        [1.0, 2.0],
        None,
    ],
    ids=["leaf", "graph", "parameter", "meta", "sparse", "conjugate", "list", "none"],
)
def test_what_is_no_plain_host_tensor_is_refused(item):
    with OutputWorkers(fingerprint, 1) as workers:
        _refused(workers, 0, item, "no plain host tensor")


def test_a_slot_is_refused_by_workers_without_its_pool(threads, small_pool):
    with BufferPool(small_pool._device, (8, 4), torch.float32, slots=4) as other:
        for pool in (None, other):
            with OutputWorkers(fingerprint, 1, pool, threads=threads) as workers:
                _refused(workers, 0, _fill(small_pool, 0), "pool")


def test_a_slot_that_nobody_holds_is_refused(threads, small_pool):
    with OutputWorkers(fingerprint, 1, small_pool, threads=threads) as workers:
        slot = _fill(small_pool, 0)
        small_pool.release(slot)
        _refused(workers, 0, slot, "slot 0")


def test_a_slot_that_a_worker_has_is_refused(threads, small_pool, tmp_path):
    gate = tmp_path / "gate"
    process = functools.partial(helpers.wait_for, path=gate)
    with OutputWorkers(process, 1, small_pool, threads=threads) as workers:
        slot = _fill(small_pool, 0)
        workers.submit(0, slot)
        try:
            with pytest.raises(LabError, match="slot 0"):
                workers.submit(1, slot)
        finally:
            gate.touch()
        assert workers.results() == [0]


def _nested():
    def process(batch, tensor):
        return batch

    return process


@pytest.mark.parametrize(
    "process",
    [lambda batch, tensor: batch, _nested(), functools.partial(_nested(), batch=0)],
    ids=["lambda", "nested", "partial"],
)
def test_what_a_process_cannot_import_is_refused(process):
    with pytest.raises(LabError, match=r"cannot import .*threads=True") as refusal:
        OutputWorkers(process, 1)
    assert "\n" not in str(refusal.value)


def test_threads_take_any_function():
    with OutputWorkers(lambda batch, tensor: batch, 1, threads=True) as workers:
        workers.submit(0, _batch(0))
        assert workers.results() == [0]


def test_arguments_that_cannot_be_pickled_are_refused():
    with pytest.raises(LabError, match="cannot be sent"):
        OutputWorkers(functools.partial(fingerprint, log=threading.Lock()), 1)


def test_a_worker_that_cannot_start_says_so(monkeypatch):
    module = types.ModuleType("only_in_this_process")
    exec("def process(batch, tensor): return batch", module.__dict__)
    monkeypatch.setitem(sys.modules, "only_in_this_process", module)
    with pytest.raises(WorkerError, match=r"worker \d ended with exit code 1 while starting"):
        OutputWorkers(module.process, 2)


# Errors.


def test_an_error_names_batch_worker_and_reason(threads):
    process = functools.partial(helpers.fail_at, bad=2)
    with OutputWorkers(process, 1, threads=threads) as workers:
        for index in range(3):
            workers.submit(index, _batch(index))
        with pytest.raises(WorkerError) as failure:
            workers.results()
        error = failure.value
        assert str(error) == "batch 2 failed in worker 0: ValueError: cannot stand batch 2"
        assert (error.batch, error.worker) == (2, 0)
        assert error.results == {0: 0, 1: 1}
        assert "in fail_at" in error.trace and "second line" in error.trace
        assert isinstance(error, LabError)


def test_the_first_error_stays(threads, small_pool):
    process = functools.partial(helpers.fail_at, bad=0)
    with OutputWorkers(process, 1, small_pool, threads=threads) as workers:
        workers.submit(0, _fill(small_pool, 0))
        with pytest.raises(WorkerError) as first:
            workers.results()
        held = [small_pool.acquire() for _ in range(4)]
        assert len(held) == 4
        for call in (workers.results, lambda: workers.submit(1, _batch(1)), small_pool.acquire):
            with pytest.raises(LabError):
                call()
        with pytest.raises(WorkerError) as again:
            workers.results()
        assert again.value is first.value


def test_an_error_ends_a_wait_for_a_slot(threads, small_pool):
    process = functools.partial(helpers.fail_at, bad=1)
    with OutputWorkers(process, 1, small_pool, threads=threads) as workers:
        for index in range(4):
            workers.submit(index, _fill(small_pool, index))
        with pytest.raises(WorkerError, match="batch 1"):
            for _ in range(4):
                small_pool.acquire()


def test_an_error_ends_a_wait_for_the_limit(threads):
    process = functools.partial(helpers.fail_at, bad=0)
    with (
        OutputWorkers(process, 1, limit=1, threads=threads) as workers,
        pytest.raises(WorkerError, match="batch 0"),
    ):
        for index in range(3):
            workers.submit(index, _batch(index))


def test_a_result_that_cannot_be_pickled_is_an_error(threads):
    with OutputWorkers(helpers.unpicklable, 1, threads=threads) as workers:
        workers.submit(5, _batch(5))
        with pytest.raises(WorkerError, match=r"batch 5 failed in worker 0: .*[Pp]ickle"):
            workers.results()


def test_a_result_that_cannot_be_unpickled_is_an_error(threads):
    with OutputWorkers(helpers.breaks_on_arrival, 1, threads=threads) as workers:
        workers.submit(5, _batch(5))
        with pytest.raises(WorkerError, match="batch 5 failed in worker 0"):
            workers.results()


@pytest.mark.timeout(15, method="signal")
def test_a_process_function_that_exits_is_an_error(threads):
    process = functools.partial(helpers.exit_at, bad=1)
    with OutputWorkers(process, 1, threads=threads) as workers:
        workers.submit(0, _batch(0))
        workers.submit(1, _batch(1))
        with pytest.raises(WorkerError, match="batch 1") as failure:
            workers.results()
        assert failure.value.results == {0: 0}


def test_a_worker_killed_at_a_batch_is_an_error(tmp_path):
    process = functools.partial(helpers.hang_at, bad=2, folder=tmp_path)
    with OutputWorkers(process, 1) as workers:
        for index in range(4):
            workers.submit(index, _batch(index))
        assert wait_until((tmp_path / "pid").exists)
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
        assert connection.wait([workers._workers[0].sentinel], 10)
        # Its two results are still to be read.
        with pytest.raises(WorkerError, match=r"worker 0 was killed by SIGKILL.* batch 2") as end:
            workers.results()
    assert (end.value.batch, end.value.worker) == (2, 0)
    assert end.value.results == {0: 0, 1: 1}


def test_a_killed_worker_is_an_error_though_its_pipe_stays_open(tmp_path):
    process = functools.partial(helpers.fork_and_hang_at, bad=0, folder=tmp_path)
    with OutputWorkers(process, 1) as workers:
        workers.submit(0, _batch(0))
        assert wait_until((tmp_path / "pid").exists)
        beside = int((tmp_path / "beside").read_text())
        try:
            os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
            with pytest.raises(WorkerError, match="worker 0 was killed by SIGKILL.* batch 0"):
                workers.results()
            assert psutil.Process(beside).status() == psutil.STATUS_SLEEPING
        finally:
            os.kill(beside, signal.SIGKILL)


def test_a_worker_killed_at_a_batch_ends_a_wait_for_a_slot(tmp_path, small_pool):
    process = functools.partial(helpers.hang_at, bad=0, folder=tmp_path)
    with OutputWorkers(process, 1, small_pool) as workers:
        for index in range(4):
            workers.submit(index, _fill(small_pool, index))
        assert wait_until((tmp_path / "pid").exists)
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
        with pytest.raises(WorkerError, match="SIGKILL"):
            small_pool.acquire()


def test_a_worker_killed_while_idle_is_an_error_at_the_next_batch():
    with OutputWorkers(fingerprint, 1) as workers:
        workers.submit(0, _batch(0))
        assert workers.results() == _expected([8])
        os.kill(_pids(workers)[0], signal.SIGKILL)
        assert _gone(_pids(workers))
        with pytest.raises(WorkerError, match="worker 0 was killed by SIGKILL"):
            workers.submit(0, _batch(0))
            workers.results()


def test_an_idle_worker_killed_beside_a_busy_one_is_an_error(tmp_path):
    process = functools.partial(helpers.hang_at, bad=0, folder=tmp_path)
    with OutputWorkers(process, 2) as workers:
        workers.submit(0, _batch(0))
        assert wait_until((tmp_path / "pid").exists)
        os.kill(_pids(workers)[1], signal.SIGKILL)
        with pytest.raises(WorkerError, match="worker 1 was killed by SIGKILL.* while idle"):
            workers.results()


def test_a_killed_worker_does_not_take_the_results_of_others(tmp_path):
    process = functools.partial(helpers.hang_at, bad=1, folder=tmp_path)
    with OutputWorkers(process, 2, limit=2) as workers:
        for index in range(3):
            workers.submit(index, _batch(index))  # the last one waits for the result of batch 0
        assert wait_until((tmp_path / "pid").exists)
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
        with pytest.raises(WorkerError) as failure:
            workers.results()
    assert (failure.value.batch, failure.value.worker) == (1, 1)
    assert failure.value.results[0] == 0


def test_an_interrupt_is_the_parents_to_handle():
    with OutputWorkers(fingerprint, 1) as workers:
        os.kill(_pids(workers)[0], signal.SIGINT)
        workers.submit(0, _batch(0))
        assert workers.results() == _expected([8])


def test_the_next_run_works_after_a_failure(threads, small_pool):
    process = functools.partial(helpers.fail_at, bad=0)
    with OutputWorkers(process, 2, small_pool, threads=threads) as workers:
        workers.submit(0, _fill(small_pool, 0))
        with pytest.raises(WorkerError):
            workers.results()
    with OutputWorkers(fingerprint, 2, small_pool, threads=threads) as workers:
        for index in range(10):
            workers.submit(index, _fill(small_pool, index))
        assert workers.results() == _expected([8] * 10)


@pytest.mark.parametrize("how", ["killed", "closed"])
def test_slots_come_back_from_workers_that_are_gone(tmp_path, small_pool, how):
    process = functools.partial(helpers.hang_at, bad=0, folder=tmp_path)
    with OutputWorkers(process, 1, small_pool) as workers:
        for index in range(4):
            workers.submit(index, _fill(small_pool, index))
        assert wait_until((tmp_path / "pid").exists)
        if how == "killed":
            os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
            with pytest.raises(WorkerError):
                workers.results()
    with OutputWorkers(fingerprint, 1, small_pool) as workers:
        for index in range(6):
            workers.submit(index, _fill(small_pool, index))
        assert workers.results() == _expected([8] * 6)


# Closing.


def test_closed_workers_are_of_no_use(threads, small_pool):
    workers = OutputWorkers(fingerprint, 1, small_pool, threads=threads)
    workers.close()
    workers.close()
    with pytest.raises(LabError, match="closed"):
        workers.submit(0, _batch(0))
    with pytest.raises(LabError, match="closed"):
        workers.results()
    for _ in range(4):
        small_pool.acquire()
    with pytest.raises(LabError, match="all 4 slots are held"):
        small_pool.acquire()


def test_closing_ends_the_worker_processes():
    with OutputWorkers(fingerprint, 2) as workers:
        pids = _pids(workers)
        assert all(psutil.pid_exists(pid) for pid in pids)
    assert _gone(pids)


def test_closing_is_bounded_when_a_worker_hangs(tmp_path):
    process = functools.partial(helpers.hang_at, bad=0, folder=tmp_path)
    with OutputWorkers(process, 1) as workers:
        workers.submit(0, _batch(0))
        workers.submit(1, torch.zeros(2**20))  # too large for the pipe: its feeder waits
        assert wait_until((tmp_path / "pid").exists)
        pids = _pids(workers)
        closer = threading.Thread(target=workers.close)
        closer.start()
        closer.join(20)
        assert not closer.is_alive()
    assert _gone(pids)


def test_an_error_in_the_block_ends_busy_workers_at_once(tmp_path):
    process = functools.partial(helpers.wait_for, path=tmp_path / "never")
    with pytest.raises(KeyError), OutputWorkers(process, 3) as workers:
        for index in range(3):
            workers.submit(index, _batch(index))
        pids, start = _pids(workers), time.monotonic()
        raise KeyError
    assert _gone(pids)
    assert time.monotonic() - start < 3 * CLOSE_LIMIT_S  # it waited for none of them


def _footprint():
    """Descriptors, threads, pieces of shared memory."""
    gc.collect()
    return open_descriptors(), threading.active_count(), len(files_in_shared_memory())


def test_nothing_piles_up_over_many_runs(threads):
    device = make_device("emulated")

    def run(fails):
        process = functools.partial(helpers.fail_at, bad=3 if fails else -1)
        with (
            BufferPool(device, (8, 4), torch.float32, 3, page_locked=True) as pool,
            OutputWorkers(process, 2, pool, threads=threads) as workers,
        ):
            try:
                for index in range(6):
                    workers.submit(index, _fill(pool, index))
                workers.results()
                assert not fails
            except WorkerError:
                assert fails

    def no_more_than(footprint):
        return all(now <= then for now, then in zip(_footprint(), footprint, strict=True))

    run(False)
    before = _footprint()
    for _ in range(3):
        run(False)
        run(True)
    assert wait_until(lambda: no_more_than(before), 5), (before, _footprint())


def test_results_larger_than_a_pipe_arrive(threads):
    with OutputWorkers(helpers.large_result, 2, limit=2, threads=threads) as workers:
        for index in range(6):
            workers.submit(index, torch.full((2**18,), float(index)))
        results = workers.results()
    assert [(len(result), result[0]) for result in results] == [(2**20, i) for i in range(6)]


# Beside the rest of the program.


def test_messages_for_slots_are_small(emulated):
    def written():
        return int(Path("/proc/self/io").read_text().split("wchar: ")[1].split()[0])

    shape, batches = (64, 1024), 20
    tensor = emulated.upload(torch.ones(shape))
    with (
        BufferPool(emulated, shape, torch.float32, slots=2) as pool,
        OutputWorkers(fingerprint, 1, pool) as workers,
    ):
        before = written()
        for index in range(batches):
            slot = pool.acquire()
            slot.copy_(tensor)
            workers.submit(index, slot)
        workers.results()
        assert (written() - before) / batches < 300
        before = written()
        workers.submit(0, torch.ones(shape))
        workers.results()
        assert written() - before > 4 * 64 * 1024  # this is how a tensor's bytes show


def test_the_global_start_method_is_left_alone():
    before = multiprocessing.get_start_method()
    with OutputWorkers(fingerprint, 1):
        assert multiprocessing.get_start_method() == before


def test_workers_can_be_spawned(monkeypatch, small_pool):
    monkeypatch.setattr(labkit.worker, "START_METHOD", "spawn")
    with OutputWorkers(fingerprint, 1, small_pool) as workers:
        for index in range(6):
            item = _batch(index) if index % 2 else _fill(small_pool, index)
            workers.submit(index, item)
        assert workers.results() == _expected([8] * 6)


_PARENT = """
import functools, os, sys, time
import torch
import helpers
from labkit import BufferPool, OutputWorkers

if __name__ == "__main__":
    device = helpers.make_device("emulated")
    pool = BufferPool(device, (8, 4), torch.float32, slots=4)
    process = functools.partial(helpers.hang_at, bad=0, folder=sys.argv[1])
    workers = OutputWorkers(process, 2, pool)
    slot = pool.acquire()
    slot.copy_(device.upload(torch.ones(8, 4)))
    workers.submit(0, slot)  # one worker hangs, the other one is idle
    while not os.path.exists(os.path.join(sys.argv[1], "pid")):
        time.sleep(0.01)
    print(*(worker._process.pid for worker in workers._workers), flush=True)
    time.sleep(60)
"""


def test_workers_end_when_their_parent_is_killed(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(_PARENT)
    tests = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)])}
    parent = subprocess.Popen(
        [sys.executable, script, tmp_path], stdout=subprocess.PIPE, env=environment
    )
    try:
        workers = {int(pid) for pid in parent.stdout.readline().split()}
        descendants = psutil.Process(parent.pid).children(recursive=True)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    pids = {process.pid for process in descendants}
    assert len(workers) == 2 and workers < pids
    assert _gone(workers)
    assert _gone(pids, 60)  # what starts workers has torch to unload first
    assert files_in_shared_memory(parent.pid, *pids) == []
