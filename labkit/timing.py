"""Measuring: warm up, synchronise, repeat, and say the median with its spread.

The clock starts with the device idle and stops when the last *result* is back. Opening pools
and workers is not in it; a run of any length needs that once.
"""

import inspect
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, contextmanager

from .buffers import BufferPool, check_shared_memory
from .errors import LabError
from .hardware import default_workers, usable_cores
from .job import Job, digest
from .pipelines import STRATEGIES
from .presets import Preset
from .results import make_record
from .workers import OutputWorkers

_PARTS = ("workers", "pool", "pinned_pool", "depth")
_PARTS_WITH_SLOTS = {"pool", "pinned_pool"}


def measure(
    job: Job,
    strategies: Iterable[Callable],
    preset: Preset,
    predictions: dict | None = None,
    progress=lambda step: None,
) -> dict:
    """Time `strategies` on `job` and return the record (see results.py).

    Each runs `preset.repeats` times after a warm-up that covers every shape. The ceiling is
    measured first. `predictions`, from `predict_all`, go into the record beside what is measured.
    `progress` is called with a few words before each step. Raises WorkerError when a batch
    fails, LabError when a strategy gives other results in one repeat than in the next.
    """
    strategies = list(strategies)
    workers = preset.workers or default_workers()
    if any(_PARTS_WITH_SLOTS & needed_parts(strategy) for strategy in strategies):
        check_shared_memory(preset.slots, job.output_bytes)
    progress("ceiling")
    ceiling = measure_ceiling(job, workers)
    rows = []
    for strategy in strategies:
        name = strategy.__name__
        progress(f"{name}: warming up")
        with open_parts(strategy, job, preset, workers) as parts:
            warm_up(strategy, job, parts, workers + 2 * preset.slots)
            seconds, digests = [], set()
            for repeat in range(preset.repeats):
                progress(f"{name}: run {repeat + 1} of {preset.repeats}")
                job.device.synchronize()
                start = time.perf_counter()
                results = strategy(job, **parts)
                job.device.synchronize()
                seconds.append(time.perf_counter() - start)
                digests.add(digest(results))
        if len(digests) > 1:
            raise LabError(f"{name} gave other results in one run than in the next")
        refused = "pinned_pool" in parts and not parts["pinned_pool"].page_locked
        rates = [job.samples / s for s in seconds]
        busy = job.samples / job.batch * ceiling["forward_s"] / statistics.median(seconds)
        rows.append(
            {
                "name": name,
                "samples_per_s": round(statistics.median(rates), 3),
                "spread": [round(min(rates), 3), round(max(rates), 3)],
                "batches": job.count,
                "digest": digests.pop(),
                "gpu_busy": round(busy, 4),
                "predicted_samples_per_s": (
                    round(predictions[name].samples_per_s, 3)
                    if predictions and name in predictions
                    else None
                ),
                "workers": workers if "workers" in parts else 0,
                "slots": preset.slots if parts.keys() & _PARTS_WITH_SLOTS else 0,
                "depth": preset.depth if "depth" in parts else 0,
                **({"page_locked": False} if refused else {}),
            }
        )
    return make_record(job, preset, ceiling, rows)


def warm_up(strategy: Callable, job: Job, parts: dict, more: int) -> None:
    """Run a few batches, and `more` with workers: until then each finds memory that is new."""
    strategy(job.first(3 + (more if "workers" in parts else 0)), **parts)


@contextmanager
def open_parts(strategy: Callable, job: Job, preset: Preset, workers: int):
    """The parts that `strategy` names in its parameters, opened: a dict to call it with."""
    names = needed_parts(strategy)
    parts = {}
    with ExitStack() as stack:
        pool = None
        for name in _PARTS_WITH_SLOTS & names:
            pool = BufferPool(
                job.device, job.output_shape, job.output_dtype, preset.slots, name == "pinned_pool"
            )
            parts[name] = stack.enter_context(pool)
        if "workers" in names:
            parts["workers"] = stack.enter_context(
                OutputWorkers(job.process, workers, pool, limit=preset.slots)
            )
        if "depth" in names:
            parts["depth"] = preset.depth
        yield parts


def needed_parts(strategy: Callable) -> set[str]:
    """The names of a strategy's parameters but the job; LabError for one that is no part."""
    names = list(inspect.signature(strategy).parameters)[1:]
    for name in names:
        if name not in _PARTS:
            raise LabError(
                f"strategy {strategy.__name__} asks for {name!r}: "
                f"its parameters are job and any of {', '.join(_PARTS)}"
            )
    return set(names)


def measure_ceiling(job: Job, workers: int) -> dict:
    """What no strategy can pass: the slowest of forward, copy and process, each one alone.

    `forward_s`, `copy_s` and `process_s` are seconds per full batch; `copy_s` is into
    page-locked memory that torch allocated, `slot_copy_s` into a pool's slot, both without the
    first touch. `process` runs on all workers at once, but on no more cores than there are.
    """
    device = job.device
    images = next(job.batches())
    scores = job.forward(images)
    forwards = 5

    def forward():
        for _ in range(forwards):
            job.forward(images)
        device.synchronize()

    def copy():
        page_locked.copy_(scores, non_blocking=True)
        device.synchronize()

    def copy_to_slot():
        slot.copy_(scores, non_blocking=True)
        slot.event.synchronize()

    forward_s = _median_seconds(forward) / forwards
    pool = BufferPool(device, job.output_shape, job.output_dtype, slots=1, page_locked=True)
    with pool, OutputWorkers(job.process, 1, pool) as consumer:
        slot = pool.acquire()
        # torch's own way to allocate it; where the pool was refused it would be too
        page_locked = (
            scores.to("cpu", non_blocking=True) if pool.page_locked else slot.copy_(scores).tensor
        )
        copy_s = _median_seconds(copy)
        slot_copy_s = _median_seconds(copy_to_slot)
        for batch in range(4):
            consumer.submit(batch, slot.copy_(scores))
            slot = pool.acquire()  # back once the batch is processed
        consumer.results()
        process_s = statistics.median(consumer.seconds[1:])
    limits = {
        "forward": forward_s,
        "copy": copy_s,
        "process": process_s / min(workers, usable_cores()),
    }
    limited_by = max(limits, key=limits.get)
    return {
        "samples_per_s": round(job.batch / limits[limited_by], 3),
        "limited_by": limited_by,
        "forward_s": round(forward_s, 6),
        "copy_s": round(copy_s, 6),
        "slot_copy_s": round(slot_copy_s, 6),
        "process_s": round(process_s, 6),
        "pinned_gbps": round(job.output_bytes / copy_s / 1e9, 3),
        "slot_gbps": round(job.output_bytes / slot_copy_s / 1e9, 3),
    }


def _median_seconds(action: Callable[[], None], repeats: int = 5) -> float:
    """Median seconds of `action`, which waits for the device itself; the first call is left out."""
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def pick_strategies(names: str | None) -> list[Callable]:
    """The strategies in a comma-separated list, in the labs' order; all five for None.

    Raises LabError for an unknown name.
    """
    if names is None:
        return list(STRATEGIES.values())
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    for name in chosen:
        if name not in STRATEGIES:
            raise LabError(f"unknown strategy {name!r}: choose from {', '.join(STRATEGIES)}")
    if not chosen:
        raise LabError(f"no strategy given: choose from {', '.join(STRATEGIES)}")
    return [strategy for name, strategy in STRATEGIES.items() if name in chosen]
