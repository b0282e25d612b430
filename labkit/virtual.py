"""Device, pool, workers and job on a calculated clock (clock.py), as a strategy uses them.

The strategies run on these as they are written. Where the real parts would take time, these
move the clock by what was calibrated (costs.py).
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import simpy

from .clock import Machine
from .errors import LabError
from .ranges import Listener, annotate
from .timeline import DEVICE_LANES, Span


class _Operation:
    """One operation of the device: waits for what its stream says, then for its engine."""

    def __init__(self, device, stage: str, seconds: float, needs: list, tensor, pinned=None):
        self.done = device.machine.env.event()
        self._device, self._engine = device, device.engines[DEVICE_LANES[stage]]
        self.stage, self.seconds, self._tensor, self._pinned = stage, seconds, tensor, pinned
        waits = [need for need in needs if not need.triggered]
        self._missing = len(waits)
        for need in waits:
            need.callbacks.append(self._met)
        if not waits:
            self._engine.request(self)

    def _met(self, _) -> None:
        self._missing -= 1
        if not self._missing:
            self._engine.request(self)

    def begin(self) -> None:
        self._start = self._device.machine.now
        self._device.machine.start(self.stage, self.seconds, self._end)

    def _end(self) -> None:
        self._device.note(self.stage, self._start, self._tensor, self._pinned)
        self.done.succeed()
        self._engine.release()


class _Engine:
    """Does one operation at a time, in the order in which they become ready."""

    def __init__(self):
        self._queue: deque[_Operation] = deque()

    def request(self, operation: _Operation) -> None:
        self._queue.append(operation)
        if len(self._queue) == 1:
            operation.begin()

    def release(self) -> None:
        self._queue.popleft()
        if self._queue:
            self._queue[0].begin()


class VirtualStream:
    """What was queued last, which is what anything queued next has to wait for."""

    def __init__(self):
        self.needs: list[simpy.Event] = []

    def wait_stream(self, other: "VirtualStream") -> None:
        self.needs = self.needs + other.needs

    def wait_event(self, event: "VirtualEvent") -> None:
        self.needs = self.needs + event.needs


class VirtualEvent:
    def __init__(self, device: "VirtualDevice"):
        self._device = device
        self.needs: list[simpy.Event] = []

    def record(self, stream: VirtualStream | None = None) -> None:
        self.needs = (stream or self._device.current_stream()).needs

    def query(self) -> bool:
        return all(need.triggered for need in self.needs)

    def synchronize(self) -> None:
        for need in self.needs:
            self._device.machine.wait(need)


class VirtualDevice:
    """The names of `torch.cuda` that the strategies use."""

    kind = "predicted"
    Stream = staticmethod(VirtualStream)

    def __init__(self, machine: Machine):
        self.machine = machine
        self.engines = {lane: _Engine() for lane in DEVICE_LANES.values()}
        self._stream = VirtualStream()

    def Event(self) -> VirtualEvent:
        return VirtualEvent(self)

    def current_stream(self) -> VirtualStream:
        return self._stream

    @contextmanager
    def stream(self, stream: VirtualStream):
        before, self._stream = self._stream, stream
        try:
            yield
        finally:
            self._stream = before

    def synchronize(self, stream: VirtualStream | None = None) -> None:
        for need in (stream or self._stream).needs:
            self.machine.wait(need)

    def queue(self, stage: str, seconds: float, tensor, pinned: bool | None = None) -> None:
        stream = self._stream
        stream.needs = [_Operation(self, stage, seconds, stream.needs, tensor, pinned).done]

    def blocking_copy(self, stage: str, tensor: "VirtualTensor") -> "VirtualTensor":
        """Wait for the current stream, then copy to pageable memory with the host's help."""
        self.synchronize()
        start = self.machine.now
        self.machine.spend(stage, self.machine.costs.seconds[stage] * tensor.share)
        self.note("copy", start, tensor, False)
        return tensor

    def note(self, stage: str, start: float, tensor, pinned: bool | None) -> None:
        nbytes = None if stage == "forward" else tensor.nbytes
        self.machine.spans.append(
            Span(DEVICE_LANES[stage], stage, start, self.machine.now, tensor.batch, nbytes, pinned)
        )


class VirtualTensor:
    """A batch on the device: which one, its size, and its share of a full batch."""

    def __init__(self, device: VirtualDevice, batch: int, nbytes: int, share: float):
        self._device, self.batch, self.nbytes, self.share = device, batch, nbytes, share

    def cpu(self) -> "VirtualTensor":
        return self._device.blocking_copy("fresh copy", self)

    def record_stream(self, stream: VirtualStream) -> None:
        """Nothing to protect: there are no bytes here."""


class VirtualJob:
    """A job whose batches cost what was calibrated. `process` is done by the main loop."""

    def __init__(self, machine: Machine, samples: int):
        self.device = VirtualDevice(machine)
        self.samples, self.batch = samples, machine.costs.batch
        self._machine, self._seconds = machine, machine.costs.seconds

    def batches(self, stream: VirtualStream | None = None) -> Iterator[VirtualTensor]:
        costs, device = self._machine.costs, self.device
        for index, first in enumerate(range(0, self.samples, self.batch)):
            share = min(self.batch, self.samples - first) / self.batch
            images = VirtualTensor(device, index, round(costs.input_bytes * share), share)
            current = device.current_stream()
            with device.stream(stream or current), annotate("upload", index, images.nbytes):
                device.queue("upload", self._seconds["upload"] * share, images, True)
            if stream is not None:
                current.wait_stream(stream)
            yield images

    def forward(self, images: VirtualTensor) -> VirtualTensor:
        nbytes = round(self._machine.costs.output_bytes * images.share)
        scores = VirtualTensor(self.device, images.batch, nbytes, images.share)
        self.device.queue("forward", self._seconds["forward"] * images.share, scores)
        self._machine.spend("queue", self._seconds["queue"])
        return scores

    def process(self, index: int, host: VirtualTensor) -> None:
        self._machine.spend("process", self._seconds["process in the loop"] * host.share)


class _Slot:
    def __init__(self, index: int, pool: "VirtualPool"):
        self.index, self._pool = index, pool
        self.event = pool.device.Event()

    def copy_(self, source: VirtualTensor, non_blocking: bool = False) -> "_Slot":
        self.tensor, device = source, self._pool.device
        if self._pool.page_locked:
            device.queue("copy", device.machine.costs.seconds["copy"] * source.share, source, True)
        else:
            device.blocking_copy("touched copy", source)
        self.event.record()
        if not non_blocking:
            self.event.synchronize()
        return self


class VirtualPool:
    def __init__(self, device: VirtualDevice, slots: int, page_locked: bool):
        self.device, self.slots, self.page_locked = device, slots, page_locked
        self.free = deque(_Slot(index, self) for index in range(slots))
        self.wait_for_release: Callable[[], None] = self._nobody_releases

    def acquire(self) -> _Slot:
        if not self.free:
            with annotate("wait for slot"):
                while not self.free:
                    self.wait_for_release()
        return self.free.popleft()

    def _nobody_releases(self) -> None:
        raise LabError(f"all {self.slots} slots are held and no worker has one to give back")


class _Worker:
    def __init__(self, number: int):
        self.lane = f"worker {number}"
        self.tasks: deque[tuple] = deque()  # (batch, slot or tensor), oldest first
        self.known = 0  # tasks that it has as far as the main loop knows


class VirtualWorkers:
    """Workers that take a slot by its number, and a bare tensor through their one feeder.

    As with the real ones, the main loop learns that a batch is done when it waits for one.
    """

    def __init__(self, machine: Machine, count: int, pool: VirtualPool | None, limit: int):
        self._machine, self._pool, self._limit = machine, pool, limit
        self._workers = [_Worker(number) for number in range(count)]
        self._to_send: deque[tuple] = deque()  # (worker, batch, tensor), oldest first
        self._sending = False
        self._under_way = 0
        self._done: list[tuple] = []  # (worker, slot) of batches that nobody has asked for
        self._reply = machine.env.event()
        if pool is not None:
            pool.wait_for_release = self._wait_for_release

    def submit(self, batch: int, item) -> None:
        bare = isinstance(item, VirtualTensor)
        if not bare and not item.event.query():
            raise LabError(f"slot {item.index} was submitted while its copy is running")
        if bare and self._under_way >= self._limit:
            with annotate("wait for workers"):
                while self._under_way >= self._limit:
                    self._collect()
        self._under_way += 1
        worker = min(self._workers, key=lambda worker: worker.known)
        worker.known += 1
        worker.tasks.append((batch, item))
        if bare:
            self._to_send.append((worker, batch, item))
            self._feed()
        elif len(worker.tasks) == 1:
            self._take(worker)

    def results(self) -> list:
        with annotate("wait for workers"):
            while self._under_way:
                self._collect()
        return []

    def _wait_for_release(self) -> None:
        if not self._under_way:
            self._pool._nobody_releases()
        self._collect()

    def _collect(self) -> None:
        """Wait until a batch is done; take note of all that are."""
        if not self._done:
            self._machine.wait(self._reply)
        for worker, slot in self._done:
            worker.known -= 1
            self._under_way -= 1
            if slot is not None:
                self._pool.free.append(slot)
        self._done = []

    def _feed(self) -> None:
        """Send the oldest tensor, unless its worker is still at another batch."""
        if self._sending or not self._to_send:
            return
        worker, batch, tensor = self._to_send[0]
        if worker.tasks[0][0] != batch:
            return
        self._sending, start = True, self._machine.now

        def sent() -> None:
            self._note(worker, "receive", start, batch)
            self._to_send.popleft()
            self._sending = False
            self._process(worker, batch, tensor)
            self._feed()

        self._machine.start("send", self._machine.costs.seconds["send"] * tensor.share, sent)

    def _take(self, worker: _Worker) -> None:
        """Start on a slot once the message about it has arrived."""
        batch, slot = worker.tasks[0]
        arrival = self._machine.env.timeout(self._machine.costs.seconds["hand-over"])
        arrival.callbacks.append(lambda _: self._process(worker, batch, slot.tensor, slot))

    def _process(self, worker: _Worker, batch: int, tensor: VirtualTensor, slot=None) -> None:
        start = self._machine.now

        def done() -> None:
            self._note(worker, "process", start, batch)
            worker.tasks.popleft()
            self._done.append((worker, slot))
            reply, self._reply = self._reply, self._machine.env.event()
            reply.succeed()
            if slot is None:
                self._feed()
            elif worker.tasks:
                self._take(worker)

        seconds = self._machine.costs.seconds["process"] * tensor.share
        self._machine.start("process", seconds, done)

    def _note(self, worker: _Worker, name: str, start: float, batch: int) -> None:
        self._machine.spans.append(Span(worker.lane, name, start, self._machine.now, batch))


class VirtualListener(Listener):
    """Keeps the main loop's ranges, on the calculated clock."""

    def __init__(self, machine: Machine):
        super().__init__()
        self._machine = machine

    def begin(self, block: annotate) -> float:
        return self._machine.now

    def end(self, block: annotate, began: float) -> None:
        self.ranges.append((block.name, began, self._machine.now, block.batch, block.bytes))
