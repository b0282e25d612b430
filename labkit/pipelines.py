"""The five strategies. Each notebook shows its own here, letter by letter.

A strategy's parameters name what it needs: the job, `workers` to consume batches on the host,
a `pool` of pageable slots or a `pinned_pool` of page-locked ones. Each returns what the job's
`process` returned, in batch order.

`annotate` names what the loop is at, for profilers and timelines; it does nothing else.
"""

from collections import deque

from .presets import check_depth
from .ranges import annotate


def sequential(job):
    """Compute, copy, process: one after the other, and nothing at the same time."""
    results = []
    for index, images in enumerate(job.batches()):
        with annotate("forward", index):
            scores = job.forward(images)  # queued on the device
        with annotate("copy", index, scores.nbytes):
            host = scores.cpu()  # waits for the forward, then copies into fresh memory
        with annotate("process", index):
            results.append(job.process(index, host))
    return results


def multi_worker(job, workers):
    """Hand each batch to a worker process, so that the loop does not wait for `process`."""
    for index, images in enumerate(job.batches()):
        with annotate("forward", index):
            scores = job.forward(images)
        with annotate("copy", index, scores.nbytes):
            host = scores.cpu()
        workers.submit(index, host)  # every byte of it goes through a pipe
    return workers.results()


def buffer_pool(job, workers, pool):
    """Copy into memory that the workers share: they get a slot's number, not its bytes."""
    for index, images in enumerate(job.batches()):
        with annotate("forward", index):
            scores = job.forward(images)
        slot = pool.acquire()  # waits until a worker has given one back
        with annotate("copy", index, scores.nbytes):
            slot.copy_(scores)  # waits for the forward, then for the copy
        workers.submit(index, slot)
    return workers.results()


def hand_over(workers, index, slot):
    """Give a slot to the workers once the bytes of its copy are here."""
    with annotate("wait for copy", index):
        slot.event.synchronize()
    workers.submit(index, slot)


def pinned_async(job, workers, pinned_pool):
    """Page-locked slots: queue the next batch first, and only then wait for the copy before it."""
    previous = None
    for index, images in enumerate(job.batches()):
        with annotate("forward", index):
            scores = job.forward(images)
        if previous is not None:
            hand_over(workers, *previous)
        slot = pinned_pool.acquire()
        with annotate("copy", index, scores.nbytes):
            slot.copy_(scores, non_blocking=True)  # returns before the bytes arrive
        previous = (index, slot)
    hand_over(workers, *previous)
    return workers.results()


def stream_pipeline(job, workers, pinned_pool, depth=2):
    """Copies run on streams of their own, both ways, beside another batch's forward."""
    pipeline = StreamPipeline(job.device, workers, pinned_pool, depth)
    for index, images in enumerate(job.batches(stream=job.device.Stream())):
        with annotate("forward", index):
            scores = job.forward(images)
        pipeline.submit(index, scores)
    return pipeline.results()


class StreamPipeline:
    """Copies outputs to page-locked slots on a copy stream; `depth` copies may be in flight."""

    def __init__(self, device, workers, pinned_pool, depth=2):
        self.device, self.workers, self.pool = device, workers, pinned_pool
        self.depth = check_depth(depth, pinned_pool.slots)
        self.copy_stream = device.Stream()
        self.in_flight = deque()  # (batch index, slot), oldest first

    def submit(self, index, scores):
        """Queue the copy of `scores`, on the device, to the host. Returns before it is done."""
        if len(self.in_flight) == self.depth:
            hand_over(self.workers, *self.in_flight.popleft())
        slot = self.pool.acquire()
        self.copy_stream.wait_stream(self.device.current_stream())  # not before the forward
        with self.device.stream(self.copy_stream), annotate("copy", index, scores.nbytes):
            slot.copy_(scores, non_blocking=True)
        scores.record_stream(self.copy_stream)  # keep its memory until the copy has read it
        self.in_flight.append((index, slot))

    def results(self):
        """Wait for everything; what `process` returned, in batch order."""
        while self.in_flight:
            hand_over(self.workers, *self.in_flight.popleft())
        return self.workers.results()


STRATEGIES = {
    strategy.__name__: strategy
    for strategy in (sequential, multi_worker, buffer_pool, pinned_async, stream_pipeline)
}
