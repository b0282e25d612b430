"""The checks of the exercises. Each runs an attempt on the open device and returns a Verdict.

What `sequential` gives is right; the job is that of slow_job.py.
"""

import queue
import threading
import time
from contextlib import ExitStack

import torch

from .buffers import BufferPool
from .errors import LabError
from .pipelines import sequential
from .slow_job import (
    BATCH,
    keep_slowly,
    keep_then_work,
    need_filled,
    need_workers,
    open_job,
    open_slots,
)
from .verdict import Wrong, call, compare, describe, need_number, rule, verdict
from .workers import OutputWorkers

# Lab 1.


@verdict
def time_copy(attempt, device) -> str:
    """`attempt(job, device)`: milliseconds that the copy of one batch's scores takes, alone."""
    with open_job(device, samples=BATCH, image=256, forward_s=0.1) as job:
        call(attempt, job, device)  # the first time pays for things that happen once
        said = min(need_number(call(attempt, job, device)) for _ in range(3))
        forwards, copies = zip(*(_stage_ms(job) for _ in range(3)), strict=True)
    forward, copy = min(forwards), min(copies)
    seen = f"{device.name}: your timer says {said:.1f} ms for a copy of about {copy:.1f} ms"
    if said >= copy + forward / 2:
        raise Wrong(
            f"{seen}: the forward, {forward:.1f} ms, is counted in. It was only queued when the "
            "clock was read first. Rule: synchronise the device before each look at the clock"
        )
    if not said >= copy / 10:
        raise Wrong(
            f"{seen}: the copy lies outside the two looks at the clock, or was not waited for. "
            "Rule: the clock stops when the bytes are on the host"
        )
    return f"{seen}; the forward before it, {forward:.1f} ms, is not in it"


def _stage_ms(job) -> tuple[float, float]:
    images = next(job.batches())
    job.device.synchronize()
    start = time.perf_counter()
    scores = job.forward(images)
    job.device.synchronize()
    middle = time.perf_counter()
    scores.cpu()
    return (middle - start) * 1e3, (time.perf_counter() - middle) * 1e3


@verdict
def forward_rate(attempt, device) -> str:
    """`attempt(job, device)`: batches per second that the device computes, nothing copied back."""
    with open_job(device) as job:
        said = max(need_number(call(attempt, job, device)) for _ in range(3))
        right = max(_rate(job) for _ in range(3))
    seen = f"{device.name}: your rate is {said:,.0f} batches/s, it computes about {right:,.0f}"
    if said > 2 * right:
        raise Wrong(
            f"{seen}: batches were counted when they were queued. Rule: stop the clock when the "
            "last result is there, not when the last batch is launched"
        )
    if not said > right / 4:
        raise Wrong(f"{seen}: a rate is the number of batches, job.count, by the seconds they took")
    return seen


def _rate(job) -> float:
    job.device.synchronize()
    start = time.perf_counter()
    for images in job.batches():
        job.forward(images)
    job.device.synchronize()
    return job.count / (time.perf_counter() - start)


# Lab 2.


_WORK = {
    "as_bytes": lambda batch, scores: len(scores.numpy().tobytes()),
    "best_class": lambda batch, scores: scores.argmax(dim=0),
    "in_this_cell": lambda batch, scores: scores.amax(dim=0),
}
_KINDS = {"as_bytes": "processes", "best_class": "threads", "in_this_cell": "threads"}


@verdict
def threads_or_processes(attempt, device) -> str:
    """`attempt()`: for each of three functions "threads" or "processes"."""
    answers = call(attempt)
    if not isinstance(answers, dict) or answers.keys() != _KINDS.keys():
        raise Wrong(
            f"a dict with the keys {', '.join(_KINDS)} must come back, got {describe(answers)}"
        )
    for name, answer in answers.items():
        if answer not in ("threads", "processes"):
            raise Wrong(f"{name} must be 'threads' or 'processes', got {describe(answer)}")
    found = {name: _why(name) for name in _KINDS}
    faults = [
        f"{name} in {answers[name]}? {found[name]}"
        for name, kind in _KINDS.items()
        if answers[name] != kind
    ]
    if faults:
        raise Wrong("; ".join(faults))
    return "; ".join(f"{name} in {kind}: {found[name]}" for name, kind in _KINDS.items())


def _why(name: str) -> str:
    """Why `name` is for threads or for processes, as this machine shows it just now."""
    if name == "in_this_cell":
        try:
            OutputWorkers(_WORK[name], 1).close()
        except LabError as error:
            return f"OutputWorkers says: {error}"
    taken, pause = _longest_pause(_WORK[name])
    seen = f"in a thread it took {taken:.0f} ms, and the loop beside it stood still for {pause:.0f}"
    if _KINDS[name] == "processes":
        return f"{seen}, since tobytes holds the interpreter lock from start to end"
    return f"{seen} at most, since argmax gives the lock free: threads share memory at no cost"


def _longest_pause(process) -> tuple[float, float]:
    """Milliseconds: of `process` in a thread, and of the longest pause of a loop beside it."""
    scores = torch.ones((4, 2**20))
    taken = []

    def work():
        start = time.perf_counter()
        process(0, scores)
        taken.append((time.perf_counter() - start) * 1e3)

    thread = threading.Thread(target=work)
    before, pauses = time.perf_counter(), [0.0]
    thread.start()
    while thread.is_alive() or len(pauses) == 1:
        time.sleep(1e-3)
        now = time.perf_counter()
        pauses.append((now - before) * 1e3)
        before = now
    thread.join()
    return taken[0], max(pauses)


@verdict
def hand_over_all(attempt, device) -> str:
    """`attempt(job, workers)`: every batch to a slow worker process, what comes back in order."""
    text = (
        "Rule: `submit` of a tensor returns before its bytes are in the pipe, so each batch "
        "needs memory of its own until then"
    )
    with open_job(device, keep_slowly) as job:
        expected = sequential(job)
        with OutputWorkers(keep_slowly, 1) as workers, rule(text):
            compare(call(attempt, job, workers), expected)
            need_workers(workers, job)
    return f"all {len(expected)} batches came back from the worker with their own bytes"


# Lab 3.


@verdict
def one_slot(attempt, device) -> str:
    """`attempt(job, workers, pool)`: `buffer_pool` with a pool of a single slot."""
    text = "Rule: hand the slot that you hold to the workers before you acquire another one"
    with open_job(device) as job:
        expected = sequential(job)
        with (
            BufferPool(device, job.output_shape, job.output_dtype, slots=1) as pool,
            OutputWorkers(job.process, 1, pool) as workers,
            rule(text),
        ):
            compare(call(attempt, job, workers, pool), expected)
            need_workers(workers, job)
            need_filled([pool.memory[0]])
    return f"all {len(expected)} batches went through one slot, and every byte is right"


@verdict
def get_buffer(attempt, device) -> str:
    """`attempt(free, allocate)`: a buffer for the next batch, beside a consumer that is slow."""
    made, results = [], {}
    tasks, free = queue.SimpleQueue(), queue.SimpleQueue()

    def allocate():
        made.append(torch.zeros(job.output_shape))
        return made[-1]

    def consume():
        while (task := tasks.get()) is not None:
            batch, buffer, size = task
            results[batch] = keep_slowly(batch, buffer[:size])
            free.put(buffer)

    with open_job(device) as job, ExitStack() as stack:
        expected = sequential(job)
        for _ in range(2):
            free.put(allocate())
        consumer = threading.Thread(target=consume, daemon=True)
        consumer.start()
        stack.callback(consumer.join, timeout=10.0)
        stack.callback(tasks.put, None)
        for batch, images in enumerate(job.batches()):
            scores = job.forward(images)
            buffer = call(attempt, free, allocate)
            if not any(buffer is one for one in made):
                raise Wrong(f"batch {batch} needs a buffer of `free`, got {describe(buffer)}")
            if len(made) > 2:
                raise Wrong(
                    f"batch {batch} got a third buffer while the consumer was at work on the "
                    "first two: memory grows with the loop's lead. Rule: when nothing is free, "
                    "wait until something comes back"
                )
            buffer[: len(scores)].copy_(scores)
            tasks.put((batch, buffer, len(scores)))
        stack.close()
    with rule("Rule: a buffer has one holder at a time"):
        compare([results.get(batch) for batch in range(len(expected))], expected)
    return f"all {len(expected)} batches went through two buffers: the loop waited for the consumer"


@verdict
def through_a_ring(attempt, device) -> str:
    """`attempt(job, slots)`: a copy of every batch, by way of two page-locked slots in turn."""
    text = "Rule: a slot may be given its next copy once its last one has arrived and has been read"
    with open_job(device) as job, open_slots(job, 2) as slots, rule(text):
        expected = sequential(job)
        compare(call(attempt, job, slots), expected)
        need_filled([slot.tensor for slot in slots])
    return f"all {len(expected)} batches went through {len(slots)} slots, and every byte is right"


# Lab 4.


@verdict
def read_each(attempt, device) -> str:
    """`attempt(job, slot)`: process every batch, by way of one page-locked slot."""
    text = (
        "Rule: after a non_blocking copy, wait for slot.event before you read. Until then the "
        "slot holds what was in it before"
    )
    with open_job(device, keep_then_work) as job, open_slots(job, 1) as (slot,), rule(text):
        expected = sequential(job)
        compare(call(attempt, job, slot), expected)
        need_filled([slot.tensor])
    return f"all {len(expected)} batches were read when their own bytes had arrived"


@verdict
def queue_batch(attempt, device) -> str:
    """`attempt(job, images, host)`: queue forward and copy, return the event to wait for."""
    text = (
        "Rule: an event stands for what was queued before record(). Record it behind the copy, "
        "and let the host go on"
    )
    results, waited = [], []
    with open_job(device) as job, open_slots(job, 1) as (slot,), rule(text):
        expected = sequential(job)
        for images, scores in zip(job.batches(), expected, strict=True):
            host = slot.tensor[: len(scores)]
            event = call(attempt, job, images, host)
            waited.append(_is_idle(device))
            if not isinstance(event, type(device.Event())):
                raise Wrong(f"an event must come back, got {describe(event)}")
            event.synchronize()
            results.append(host.clone())
            device.synchronize()
        compare(results, expected)
        if all(waited):
            raise Wrong("the bytes are right, but your function returned only when they were here")
    return f"each of {len(expected)} events was past when its batch had arrived, and not before"


def _is_idle(device) -> bool:
    """Whether all that was queued on the current stream is done already."""
    event = device.Event()
    event.record()
    time.sleep(1e-3)  # what is not idle has more to do than that
    return event.query()


# Lab 5.


@verdict
def copy_beside(attempt, device) -> str:
    """`attempt(scores, slot, copy_stream, device)`: queue the copy on a stream of its own."""
    text = (
        "Rule: streams know nothing of each other. Let the copy stream wait for the stream that "
        "the forward is queued on"
    )
    with rule(text):
        count = _copy_all(attempt, device, drop=False)
    return f"all {count} copies waited for their forward, and the host for none of them"


@verdict
def copy_and_forget(attempt, device) -> str:
    """The same, with a caller that drops `scores` while the copy has yet to run."""
    text = (
        "Rule: memory of a dropped tensor goes to the next one on its own stream. "
        "record_stream keeps it until the other stream has read it"
    )
    with rule(text):
        count = _copy_all(attempt, device, drop=True)
    return f"all {count} copies read their own scores, though the loop had dropped them"


def _copy_all(attempt, device, drop: bool) -> int:
    """Copy every batch with `attempt` and compare; `drop` its scores, with the copies held up."""
    kept, waited = [], []
    with open_job(device) as job, open_slots(job, job.count) as slots:
        expected = sequential(job)
        copy_stream = device.Stream()
        for images, slot in zip(job.batches(), slots, strict=True):
            scores = job.forward(images)
            if drop:
                with device.stream(copy_stream):
                    device.delay(3 * job.forward_s)
            else:
                kept.append(scores)
            call(attempt, scores, slot, copy_stream, device)
            del scores
            waited.append(_is_idle(device))
        device.synchronize()
        compare([slot.tensor.clone() for slot in slots], expected)
    if all(waited):
        raise Wrong(
            "the bytes are right, but the host waited for the device at every batch: "
            "then nothing runs beside anything"
        )
    return len(expected)
