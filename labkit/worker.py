"""One worker: a process or a thread that consumes batches, and the parent's end of its pipe.

OutputWorkers (workers.py) describes the protocol that the two ends speak.
"""

import ctypes
import mmap
import multiprocessing
import os
import pickle
import queue
import shutil
import signal
import sys
import threading
import time
import traceback
from collections import deque
from multiprocessing import connection, resource_tracker, util

import torch

from .buffers import view_slot
from .ranges import Listener, annotate, listen

# `fork` after CUDA breaks, so never that. A fork server that has imported torch starts each
# worker in some 20 ms, where `spawn` imports torch anew in each.
_METHODS = multiprocessing.get_all_start_methods()
START_METHOD = "forkserver" if "forkserver" in _METHODS else "spawn"
# A bare tensor travels in pieces, so that the receiver's own buffer stays in the cache.
_PIECE_BYTES = 2**20
# For a worker that is still busy with a batch when the run is over; then it is ended.
CLOSE_LIMIT_S = 2.0


class Worker:
    """What the parent keeps of a worker: its number, its batches, its end of the pipe."""

    sentinel = None

    def __init__(self, number: int):
        self.number = number
        self.batches: deque[int] = deque()
        self.ready = False


class ProcessWorker(Worker):
    def __init__(self, number: int, process, memory: torch.Tensor | None):
        super().__init__(number)
        context = multiprocessing.get_context(START_METHOD)
        if START_METHOD == "forkserver":
            context.set_forkserver_preload(["torch", "labkit.workload", "labkit.worker"])
        self.replies, theirs = context.Pipe()
        self._process = context.Process(
            target=_worker_main,
            args=(theirs, process, memory, util.get_temp_dir()),
            name=f"worker {number}",
            daemon=True,
        )
        try:
            _start(self._process, theirs)
        except BaseException:
            self.replies.close()  # a worker that starts all the same ends at once
            raise
        self.sentinel = self._process.sentinel

    def send(self, task) -> None:
        batch, slot, content = task
        if slot is not None:
            self.replies.send(task)
            return
        # As the bytes it consists of: torch's own way would take a piece of shared memory
        # and a file descriptor for each tensor, and pickling them would copy them twice.
        data = memoryview(content.contiguous().view(-1).view(torch.uint8).numpy())
        self.replies.send((batch, None, (len(data), content.dtype, tuple(content.shape))))
        for first in range(0, len(data), _PIECE_BYTES):
            self.replies.send_bytes(data[first : first + _PIECE_BYTES])

    def end(self) -> None:
        self.replies.close()

    def join(self, deadline: float) -> None:
        self._process.join(max(0.0, deadline - time.monotonic()))
        if self._process.is_alive():
            self._process.terminate()
            self._process.join(CLOSE_LIMIT_S)
        self.kill()
        self._process.join(CLOSE_LIMIT_S)

    def kill(self) -> None:
        if self._process.is_alive():
            self._process.kill()

    def is_gone(self) -> bool:
        return not self._process.is_alive()

    def how_it_ended(self) -> str:
        self._process.join(CLOSE_LIMIT_S)
        code = self._process.exitcode
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            hint = " (out of memory?)" if name == "SIGKILL" else ""
            return f"was killed by {name}{hint}"
        return f"ended with exit code {code}"


def _start(process, pipe: connection.Connection) -> None:
    """Start `process`, which has `pipe`, and close that here, so that reads end when it does.

    In a thread, since interrupts only reach the main one: in the middle of a start they would
    leave a process that nobody knows.
    """
    errors = []

    def start() -> None:
        try:
            if hasattr(signal, "pthread_sigmask"):  # not on Windows
                resource_tracker.ensure_running()  # which unblocks interrupts behind itself
                # For the fork server and the workers, which inherit it and never want one.
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            process.start()
        except BaseException as error:
            errors.append(error)
        finally:
            pipe.close()

    thread = threading.Thread(target=start, name="start", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def finish(action) -> None:
    """Call `action`, which ends by itself; an interrupt meanwhile is raised after it.

    For cleaning up, which people interrupt too when it takes them too long.
    """
    thread = threading.Thread(target=action, name="finish", daemon=True)
    interrupt = None
    thread.start()
    while thread.is_alive():
        try:
            thread.join()
        except KeyboardInterrupt as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt


class ThreadWorker(Worker):
    def __init__(self, number: int, process, memory: torch.Tensor | None):
        super().__init__(number)
        self._tasks = queue.SimpleQueue()
        self.replies, self._theirs = multiprocessing.Pipe(duplex=False)
        self._thread = threading.Thread(
            target=_serve,
            args=(self._tasks.get, self._theirs.send_bytes, process, memory),
            name=f"worker {number}",
            daemon=True,
        )
        self._thread.start()

    def send(self, task) -> None:
        self._tasks.put(task)

    def end(self) -> None:
        self._tasks.put(None)

    def join(self, deadline: float) -> None:
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if not self._thread.is_alive():
            self.replies.close()
            self._theirs.close()

    def kill(self) -> None:
        """A thread cannot be ended from outside: it ends after the batch it is at."""

    def is_gone(self) -> bool:
        return not self._thread.is_alive()

    def how_it_ended(self) -> str:
        return "ended"


def _worker_main(
    pipe: connection.Connection, process, memory: torch.Tensor | None, folder: str
) -> None:
    """A worker process, from start to end. `folder` is multiprocessing's own of the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    torch.set_num_threads(1)
    _keep_freed_memory()
    if memory is not None:
        _map_pages(memory)

    def receive():
        try:
            task = pipe.recv()
            return task if task[1] is not None else _receive_tensor(pipe, task)
        except EOFError:  # the parent closed its end: no more work
            return None

    try:
        _serve(receive, pipe.send_bytes, process, memory)
    except (BrokenPipeError, ConnectionResetError):
        os._exit(1)  # the parent is gone and wants no result


def _receive_tensor(pipe: connection.Connection, task):
    batch, _, (size, dtype, shape) = task
    with annotate("receive", batch, size):
        flat = torch.empty(size, dtype=torch.uint8)
        data = memoryview(flat.numpy())
        for first in range(0, size, _PIECE_BYTES):
            pipe.recv_bytes_into(data[first : first + _PIECE_BYTES])
    return batch, None, flat.view(dtype).view(shape)


def _serve(receive, reply, process, memory: torch.Tensor | None) -> None:
    """Process tasks until there are no more; every task gets exactly one reply."""
    reply(pickle.dumps((None, "ready", None, [])))
    while True:
        ranges = Listener()
        with listen(ranges):
            task = receive()
        if task is None:
            return
        batch, slot, content = task
        try:
            tensor = content if slot is None else view_slot(memory[slot], content)
            with listen(ranges), annotate("process", batch):
                result = process(batch, tensor)
            answer = pickle.dumps((batch, "done", pickle.dumps(result), ranges.ranges))
        except BaseException as error:  # sys.exit() too: every task gets its reply
            first_line = f"{type(error).__name__}: {error}".splitlines()[0]
            if isinstance(error, TypeError) and "BFloat16" in first_line:
                first_line += " (NumPy has no bfloat16: call .float() on the tensor first)"
            answer = pickle.dumps((batch, "failed", (first_line, traceback.format_exc()), []))
        task = content = tensor = result = None  # hold no batch while waiting for the next
        reply(answer)


def _end_with_parent(folder: str) -> None:
    connection.wait([multiprocessing.parent_process().sentinel])
    shutil.rmtree(folder, ignore_errors=True)  # a parent that was killed could not
    os._exit(1)


def _map_pages(memory: torch.Tensor) -> None:
    """Read from every page of the pool, so that this process has them all mapped.

    The pages are there, but each process maps them for itself at the first access. Without
    this a worker's first batch in each slot takes up to one and a half times as long.
    """
    memory.detach().view(-1).view(torch.uint8)[:: mmap.PAGESIZE].sum()


def _keep_freed_memory() -> None:
    """Tell glibc to keep freed memory in this process instead of giving it back.

    A worker allocates the same large buffers for each batch. By default glibc returns them
    to the kernel, which hands out new pages to be faulted in and zeroed, at 1 to 2 GB/s.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is not None:
        m_trim_threshold, m_mmap_max = -1, -4  # from malloc.h
        mallopt(m_mmap_max, 0)
        mallopt(m_trim_threshold, 2**31 - 1)
