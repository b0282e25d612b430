"""OutputWorkers: processes, or threads, that consume batches on the host.

Each worker has a pipe of its own, so one that dies in the middle of a message harms no other.

    main loop --submit--> feeder thread --pipe--> worker: process(index, tensor)
        ^                                              |
        +------- results(), or a wait for a slot <-----+  (index, outcome, ranges)

A task carries a batch index and what to read: for a pool's slot its index and shape, some
100 bytes; for a bare tensor all its bytes, written by the feeder thread.
The parent knows which worker has which batch, and waits for results and for the end of a
worker at the same time. A worker ends when its pipe closes, or at once when its parent ends.
"""

import functools
import pickle
import queue
import sys
import threading
import time
import weakref
from multiprocessing import connection

import torch

from .buffers import BufferPool, Slot
from .errors import LabError
from .presets import check_count
from .ranges import annotate, current_listener
from .worker import CLOSE_LIMIT_S, ProcessWorker, ThreadWorker, Worker, finish

# For a worker that never gets ready, as one whose imports wait for a network.
_START_LIMIT_S = 120.0


class WorkerError(LabError):
    """A batch failed. `batch`, `worker`, `results` (those made already, by batch index)."""

    def __init__(
        self, message: str, batch: int | None, worker: int, results: dict, trace: str = ""
    ):
        super().__init__(message)
        self.batch, self.worker, self.results, self.trace = batch, worker, results, trace

    def _render_traceback_(self):
        return [*super()._render_traceback_(), *self.trace.splitlines()]


class OutputWorkers:
    """`count` workers that call `process(batch_index, host_tensor)` for each batch submitted.

    `process` is importable by name: a function of a module, or a functools.partial of one.
    It owns `host_tensor` only until it returns. What it returns is pickled and sent back: of a
    tensor return a `.clone()`, since a view of a slot is sent with the memory of all slots.
    With `pool`, slots of that pool can be submitted; they are released when processed.
    At most `limit` bare tensors are under way at once. `threads=True` uses threads of this
    process, which is good for work that releases the interpreter lock and bad for all other.
    """

    def __init__(
        self,
        process,
        count: int,
        pool: BufferPool | None = None,
        limit: int = 4,
        threads: bool = False,
    ):
        check_count("workers", count)
        check_count("limit", limit)
        if not callable(process):
            kind = type(process).__name__
            raise LabError(f"process must be a function (batch_index, host_tensor), got a {kind}")
        if pool is not None:
            pool.check_open()
        if not threads:
            check_importable(process)
        self._pool, self._limit = pool, limit
        self._results, self._under_way = {}, {}  # batch -> result; batch -> slot or None
        self._error: WorkerError | None = None
        self._closed = False
        self.seconds: list[float] = []  # how long each batch took in its worker
        self._tasks = queue.SimpleQueue()
        self._feeder = threading.Thread(
            target=_feed, args=(self._tasks,), name="feeder", daemon=True
        )
        kind = ThreadWorker if threads else ProcessWorker
        memory = None if pool is None else pool.memory
        self._workers: list[Worker] = []
        # For one that is dropped without close(), as by a cell that is run again.
        self._dropped = weakref.finalize(self, _end_all, self._workers, self._tasks)
        try:
            for number in range(count):
                self._workers.append(kind(number, process, memory))
            self._feeder.start()
            self._wait_until_ready()
        except BaseException:
            self._abort()
            raise
        if pool is not None:
            pool.wait_for_release = self._wait_for_release

    def submit(self, batch: int, item: Slot | torch.Tensor) -> None:
        """Hand over a filled slot, or a host tensor, as batch number `batch`.

        Returns at once for a slot; for a tensor, once fewer than `limit` are under way.
        Raises LabError for a slot whose copy is still running and for a batch submitted twice,
        and WorkerError when a worker has failed.
        """
        self._check()
        if batch in self._under_way or batch in self._results:
            raise LabError(f"batch {batch} was submitted twice")
        if isinstance(item, Slot):
            self._check_slot(item)
            task = (batch, item.index, tuple(item.tensor.shape))
            self._under_way[batch] = item
        else:
            if not _is_plain(item):
                raise LabError(
                    f"batch {batch} is no plain host tensor: submit tensor.detach().cpu()"
                )
            if len(self._under_way) >= self._limit:
                with annotate("wait for workers"):
                    while len(self._under_way) >= self._limit:
                        self._collect()
            task = (batch, None, item)
            self._under_way[batch] = None
        worker = min(self._workers, key=lambda worker: len(worker.batches))
        worker.batches.append(batch)
        self._tasks.put((worker, task))

    def results(self) -> list:
        """Wait for all that was submitted; return what `process` returned, in batch order.

        The workers can then be given a new run. Raises WorkerError when a worker has failed.
        """
        self._check()
        with annotate("wait for workers"):
            while self._under_way:
                self._collect()
        results, self._results = self._results, {}
        return [results[batch] for batch in sorted(results)]

    def close(self) -> None:
        """Let every worker finish the batch it is at, then end it. Bounded; may be repeated."""
        if self._closed:
            return
        try:
            if self._stop_feeder():
                for worker in self._workers:
                    worker.end()
                deadline = time.monotonic() + CLOSE_LIMIT_S
                for worker in self._workers:
                    worker.join(deadline)
                self._forget()
        finally:
            self._abort()  # if that was interrupted, or the feeder waits for a worker that hangs

    def __enter__(self) -> "OutputWorkers":
        return self

    def __exit__(self, kind, error, trace) -> None:
        self.close() if kind is None else self._abort()

    def _check_slot(self, slot: Slot) -> None:
        if self._pool is None or slot not in self._pool:
            raise LabError(f"slot {slot.index} is of another pool than these workers have")
        if slot in self._under_way.values():
            raise LabError(f"slot {slot.index} is with a worker already: acquire another one")
        if not slot.held:
            raise LabError(f"slot {slot.index} is free: acquire() it and fill it first")
        if not slot.filled:
            raise LabError(
                f"slot {slot.index} has nothing of its holder: fill it with slot.copy_(scores), "
                "which also records slot.event"
            )
        if not slot.holds_its_copy():
            raise LabError(
                f"slot {slot.index} has a tensor that is not what copy_ wrote: workers get the "
                "slot's own bytes, so leave slot.tensor as it is"
            )
        if not slot.event.query():
            raise LabError(
                f"slot {slot.index} was submitted while its copy is running: "
                "call slot.event.synchronize() first"
            )

    # Waiting: the only places where the main loop blocks.

    def _wait_for_release(self) -> None:
        if not any(self._under_way.values()):
            self._pool._nobody_releases()
        self._collect()

    def _collect(self, timeout: float | None = None) -> bool:
        """Wait until a worker has sent something or has ended; take all that is there."""
        self._check()
        sources = {worker.replies: worker for worker in self._workers}
        ends = {worker.sentinel: worker for worker in self._workers if worker.sentinel is not None}
        ready = connection.wait([*sources, *ends], timeout)
        # First what was sent: a worker may have sent its last result and then died.
        for source in ready:
            if source in sources:
                self._take(sources[source])
        for end in ready:
            if end in ends:
                while ends[end].replies.poll():
                    self._take(ends[end])
                self._fail_worker(ends[end])
        return bool(ready)

    def _take(self, worker: Worker) -> None:
        try:
            batch, outcome, value, ranges = pickle.loads(worker.replies.recv_bytes())
        except (EOFError, OSError):
            self._fail_worker(worker)
        if outcome == "ready":
            worker.ready = True
            return
        worker.batches.remove(batch)
        slot = self._under_way.pop(batch)
        if slot is not None:
            self._pool.release(slot)
        message, trace = value if outcome == "failed" else ("", "")
        if outcome == "done":
            try:
                self._results[batch] = pickle.loads(value)
            except Exception as error:
                message = f"its result cannot be unpickled: {type(error).__name__}: {error}"
        if message:
            message = f"batch {batch} failed in worker {worker.number}: {message}"
            self._fail(message, batch, worker, trace)
        _, start, end, *_ = ranges[-1]  # that of `process` itself
        self.seconds.append(end - start)
        if (listener := current_listener()) is not None:
            listener.worker_ranges.append((worker.number, ranges))

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_LIMIT_S
        while not all(worker.ready for worker in self._workers):
            if not self._collect(max(0.0, deadline - time.monotonic())):
                late = next(worker for worker in self._workers if not worker.ready)
                self._fail(f"worker {late.number} was not ready after {_START_LIMIT_S:.0f} s: "
                           "look at what its module imports", None, late)  # fmt: skip

    # Failing: the first error stays, and every later call raises it.

    def _check(self) -> None:
        if self._closed:
            raise LabError("these workers are closed: make new ones")
        if self._error is not None:
            raise self._error

    def _fail_worker(self, worker: Worker) -> None:
        batch = worker.batches[0] if worker.batches else None
        doing = "while idle"
        if not worker.ready:
            # A new process imports the script anew, and would start workers in its turn.
            doing = (
                "while starting, standard error says why; a script starts workers behind "
                'if __name__ == "__main__":'
            )
        if batch is not None:
            doing = f"with batch {batch}"
        self._fail(f"worker {worker.number} {worker.how_it_ended()} {doing}", batch, worker)

    def _fail(self, message: str, batch: int | None, worker: Worker, trace: str = "") -> None:
        self._error = WorkerError(message, batch, worker.number, dict(self._results), trace)
        raise self._error

    def _abort(self) -> None:
        """End every worker now, whatever it is doing. No interrupt stops it half-way."""
        if not self._closed:
            finish(self._end_now)

    def _end_now(self) -> None:
        for worker in self._workers:
            worker.kill()
        self._stop_feeder()
        for worker in self._workers:
            worker.end()
            worker.join(time.monotonic() + CLOSE_LIMIT_S)
        self._forget()

    def _forget(self) -> None:
        self._closed = True
        self._dropped.detach()
        if self._pool is None:
            return
        self._pool.wait_for_release = self._pool._nobody_releases
        if all(worker.is_gone() for worker in self._workers):
            for slot in filter(None, self._under_way.values()):
                self._pool.release(slot)

    def _stop_feeder(self) -> bool:
        self._tasks.put(None)
        if self._feeder.ident is not None:
            self._feeder.join(CLOSE_LIMIT_S)
        return not self._feeder.is_alive()


def _feed(tasks: queue.SimpleQueue) -> None:
    """The feeder thread. It knows no OutputWorkers, which could never be dropped otherwise."""
    while (item := tasks.get()) is not None:
        worker, task = item
        try:
            worker.send(task)
        except OSError:
            pass  # the worker is gone: _collect sees its end and says so
        except Exception:
            worker.kill()  # this batch cannot be sent: let _collect end the run
            raise
        del item, task, worker  # keep nothing alive while waiting for the next


def _end_all(workers: list[Worker], tasks: queue.SimpleQueue) -> None:
    tasks.put(None)
    for worker in workers:
        worker.kill()
        worker.end()


def _is_plain(item) -> bool:
    """Is `item` a host tensor that consists of its bytes and nothing else?"""
    return (
        type(item) is torch.Tensor
        and item.device.type == "cpu"
        and item.layout == torch.strided
        and not (item.requires_grad or item.is_conj() or item.is_neg() or item.is_quantized)
    )


def check_importable(process) -> None:
    """Raise LabError unless a new process can import `process`."""
    function = process
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__qualname__", repr(function))
    module = getattr(function, "__module__", None)
    in_cell = module == "__main__" and not hasattr(sys.modules["__main__"], "__file__")
    if in_cell or "<lambda>" in name or "<locals>" in name:
        raise LabError(
            f"worker processes cannot import {name!r}: put it in a module (a .py file beside the "
            "notebook) and import it, or use threads=True"
        )
    try:
        pickle.dumps(process)
    except Exception as error:
        raise LabError(f"worker processes cannot be sent {name!r}: {error}") from None
