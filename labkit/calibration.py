"""Calibrate: what each stage of a job takes on this machine, alone and beside the others.

A stage that runs alone says little about a pipeline, where everything runs at once: copies and
post-processing share the memory's bandwidth, and on few cores the time itself.
"""

import functools
import math
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch.utils.flop_counter import FlopCounterMode

from .buffers import BufferPool
from .costs import STAGES, Costs
from .hardware import default_workers
from .job import Job
from .presets import Preset
from .ranges import Listener, listen
from .results import stamp
from .workers import OutputWorkers

_FIRST, _REPEATS = 3, 7  # the first ones are left out
_ROUNDS, _ON_DEVICE = 3, 5  # of so many operations between two events
# So long are stages watched beside each other: for some passes of the slowest one, in bounds.
_PASSES, _LEAST_S, _MOST_S = 8, 0.4, 2.0


def calibrate(job: Job, preset: Preset, progress: Callable[[str], None] = lambda step: None):
    """The Costs of `job` on its device, with as many workers as `preset` says.

    Takes some seconds, for the labs' presets less than a minute. `progress` is called with a
    few words before each step. Raises LabError when shared memory is too small for a slot a
    worker, WorkerError when a batch fails.
    """
    workers = preset.workers or default_workers()
    with ExitStack() as stack:
        progress("stages alone")
        bench = _Bench(job, stack)
        times = {stage: bench.on_device(stage) for stage in ("forward", "upload")}
        # In turn, as a loop does: what memory a stage is given depends on the one before.
        for stages in (("queue", "copy", "touched copy"), ("fresh copy", "process in the loop")):
            rows = [[bench.in_loop[stage]() for stage in stages] for _ in range(_FIRST + _REPEATS)]
            times |= dict(zip(stages, map(list, zip(*rows[_FIRST:], strict=True)), strict=True))
        progress("workers alone")
        bench.open_workers(workers, _PASSES * max(map(statistics.median, times.values())))
        bench.watch(processing=workers)  # their first batches find new memory
        times["process"] = [s for _ in range(2) for s in bench.watch(processing=1)["process"]]
        times["send"] = bench.watch(sending=_REPEATS)["send"]
        times["hand-over"] = bench.hand_overs()
        seconds = {stage: statistics.median(some) for stage, some in times.items()}
        progress("stages beside each other")
        slowdowns = _watch_pairs(bench, seconds, workers)
        return Costs(
            **_without_schema(stamp(job, preset)),
            input_bytes=bench.images.nbytes,
            workers=workers,
            seconds={stage: _rounded(seconds[stage]) for stage in STAGES},
            spread={stage: [_rounded(f(times[stage])) for f in (min, max)] for stage in STAGES},
            slowdowns=slowdowns,
            once=bench.once,
            rates=bench.rates(seconds),
        )


def _watch_pairs(bench: "_Bench", seconds: dict[str, float], workers: int) -> dict:
    """How much longer each stage takes beside one of each that it can meet in a strategy."""
    slow = _Slowdowns(seconds)
    # As many workers as are busy while the device is never idle.
    busy = min(workers, math.ceil(seconds["process"] / seconds["forward"]) + 1)
    if busy > 1:
        slow.note(bench.watch(processing=busy), "process", "process", busy - 1)
    for loop in ("queue", "fresh copy", "touched copy", "copy"):
        found = bench.watch(loop, processing=busy)
        slow.note(found, loop, "process", busy)
        slow.note(found, "process", loop, among=busy)
    sending = math.ceil(bench.watched_s / seconds["send"])
    found = bench.watch(processing=busy, sending=sending)
    slow.note(found, "send", "process", busy)
    slow.note(found, "process", "send", among=busy)
    found = bench.watch("fresh copy", sending=sending)
    slow.note(found, "fresh copy", "send")
    slow.note(found, "send", "fresh copy")
    slow.note(bench.watch("queue", sending=sending), "queue", "send")
    pairs = ("forward", "copy"), ("copy", "forward"), ("upload", "copy"), ("copy", "upload")
    for stage, other in pairs:
        enough = 1 + math.ceil(1.3 * _ON_DEVICE * seconds[stage] / seconds[other])
        slow.note({stage: bench.on_device(stage, other, enough)}, stage, other)
    return slow.shares


class _Slowdowns:
    """How much longer each stage takes beside one of another, by what was watched."""

    def __init__(self, alone: dict[str, float]):
        self._alone = alone
        self.shares: dict[str, dict[str, float]] = {}

    def note(self, found: dict, stage: str, other: str, others: int = 1, among: int = 1) -> None:
        """`stage` was beside `others` of `other`, and itself one of `among`."""
        shares = self.shares.setdefault(stage, {})
        own = shares.get(stage, 0.0) * (among - 1)
        extra = statistics.median(found[stage]) / self._alone[stage] - 1 - own
        if extra > 0:
            shares[other] = _rounded(extra / others)


class _Bench:
    """The job's stages, each as something that can be done again and again and timed."""

    def __init__(self, job: Job, stack: ExitStack):
        self._job, self._device, self._stack = job, job.device, stack
        self.images = next(job.batches())
        self._scores = job.forward(self.images)
        self._device.synchronize()
        self._side = self._device.Stream()
        # What is paid once, in seconds; the two pools differ in page-locking alone.
        self.once: dict[str, float] = {}
        gigabytes = job.output_bytes / 1e9
        start = time.perf_counter()
        self._touched = self._open_pool(1, page_locked=False).acquire()
        touched = time.perf_counter()
        self._pinned = self._open_pool(1, page_locked=True).acquire()
        lock_s = (time.perf_counter() - touched) - (touched - start)
        self.once["touch_s_per_gb"] = _rounded((touched - start) / gigabytes)
        self.once["page_lock_s_per_gb"] = _rounded(lock_s / gigabytes)
        self._fresh = self._scores.cpu()
        self._queue = {
            "forward": lambda: job.forward(self.images),
            "upload": lambda: self._device.upload(job.inputs[: job.batch]),
            "copy": lambda: self._pinned.copy_(self._scores, non_blocking=True),
        }
        # Each does its stage from the main loop and returns the seconds of one.
        self.in_loop = {
            "queue": self._queue_forward,
            "copy": lambda: self._between_events("copy"),
            "touched copy": _timed(lambda: self._touched.copy_(self._scores)),
            "fresh copy": _timed(self._copy_fresh),
            "process in the loop": _timed(lambda: job.process(0, self._fresh)),
        }

    def open_workers(self, count: int, watched_s: float) -> None:
        self.watched_s = min(max(_LEAST_S, watched_s), _MOST_S)
        self._pool = self._open_pool(count, page_locked=True)
        keep = functools.partial(_keep_processing, self._job.process, self.watched_s)
        start = time.perf_counter()
        self._workers = self._stack.enter_context(OutputWorkers(keep, count, self._pool))
        self.once["start_workers_s"] = _rounded(time.perf_counter() - start)
        self._receivers = self._stack.enter_context(OutputWorkers(_take, 2, limit=1000))
        # What is done first finds no memory that was used before.
        self.watch(processing=count, sending=4)

    def on_device(self, stage: str, beside: str = "", others: int = 0) -> list[float]:
        """Seconds of `stage` on the device, beside `others` operations or alone."""
        found = [self._between_events(stage, beside, others) for _ in range(_ROUNDS + 1)]
        return found[1:]

    def _between_events(self, stage: str, beside: str = "", others: int = 0) -> float:
        self._device.synchronize()
        start, end = (self._device.Event(enable_timing=True) for _ in range(2))
        with self._device.stream(self._side):
            for _ in range(others):
                self._queue[beside]()
        start.record()
        for _ in range(_ON_DEVICE):
            self._queue[stage]()
        end.record()
        self._device.synchronize()
        return start.elapsed_time(end) / 1e3 / _ON_DEVICE

    def watch(self, loop: str = "", processing: int = 0, sending: int = 0) -> dict:
        """Seconds of each stage while all of these go on at the same time: `loop` in the main
        loop, `processing` workers, and the feeder with `sending` messages."""
        listener = Listener()
        own = []
        with listen(listener):
            for number in range(processing):
                slot = self._pool.acquire()
                slot.copy_(self._scores)
                self._workers.submit(number, slot)
            for number in range(sending):
                self._receivers.submit(number, self._fresh)
            until = time.perf_counter() + self.watched_s
            while loop and time.perf_counter() < until:
                own.append(self.in_loop[loop]())
            self._receivers.results()
            passes = self._workers.results()
        received = [
            end - start
            for _, ranges in listener.worker_ranges
            for name, start, end, *_ in ranges
            if name == "receive"
        ]
        # The first and the last ones may have been alone for a part of their time.
        found = {loop: own, "send": received}
        found = {stage: some[1:-1] or some for stage, some in found.items()}
        found["process"] = [s for some in passes for s in some[1:-1] or some]
        return found

    def hand_overs(self) -> list[float]:
        """Seconds from handing something over that is processed at once until it is back."""
        nothing = torch.zeros(1)

        def round_trip() -> None:
            self._receivers.submit(0, nothing)
            self._receivers.results()

        return [_timed(round_trip)() for _ in range(10 * _REPEATS)]

    def rates(self, seconds: dict[str, float]) -> dict[str, float]:
        """What the emulated device would need to be as fast as this one."""
        job, model = self._job, self._job.model_module
        one = job.inputs[:1]
        weights = next(model.parameters(), one)
        with torch.inference_mode(), FlopCounterMode(display=False) as counter:
            model(one.to(weights.device))
        upload = self._queue["upload"]
        self._queue["upload"] = lambda: self._device.upload(one)
        small_s = statistics.median(self.on_device("upload"))
        self._queue["upload"] = upload
        return {
            "flops_per_s": _rounded(counter.get_total_flops() * job.batch / seconds["forward"]),
            "pageable_bytes_per_s": _rounded(job.output_bytes / seconds["touched copy"]),
            "pinned_bytes_per_s": _rounded(job.output_bytes / seconds["copy"]),
            "launch_s": _rounded(small_s - one.nbytes * seconds["upload"] / self.images.nbytes),
        }

    def _open_pool(self, slots: int, page_locked: bool) -> BufferPool:
        job = self._job
        pool = BufferPool(self._device, job.output_shape, job.output_dtype, slots, page_locked)
        return self._stack.enter_context(pool)

    def _queue_forward(self) -> float:
        seconds = _timed(self._queue["forward"])()
        self._device.synchronize()
        return seconds

    def _copy_fresh(self) -> None:
        self._fresh = self._scores.cpu()  # the one before goes when this one is there


def _rounded(value: float) -> float:
    """Four digits, and never zero or less: a difference of two measurements can be."""
    return float(f"{max(value, 1e-6):.4g}")


def _without_schema(stamped: dict) -> dict:
    return {key: value for key, value in stamped.items() if key != "schema"}


def _timed(action: Callable) -> Callable[[], float]:
    def timed() -> float:
        start = time.perf_counter()
        action()
        return time.perf_counter() - start

    return timed


def _keep_processing(process, seconds: float, batch: int, tensor: torch.Tensor) -> list[float]:
    """In a worker: process one batch again and again for `seconds`; the seconds of each time."""
    until = time.perf_counter() + seconds
    once, found = _timed(lambda: process(batch, tensor)), []
    while time.perf_counter() < until:
        found.append(once())
    return found


def _take(batch: int, tensor: torch.Tensor) -> None:
    """In a worker: take a message and do nothing with it."""
