"""The job of the exercises: small and slow, so that a mistake shows on a fast GPU too.

`device.delay` stands before each forward: whoever reads too early surely does. Results are whole
numbers, so that they are the same bytes each time.
"""

import time
from contextlib import contextmanager

import torch

from .buffers import BufferPool
from .job import Job
from .verdict import Wrong

BATCH, SAMPLES = 4, 18  # five batches, the last one smaller
FORWARD_S = 20e-3


class Mix(torch.nn.Module):
    """[n, 3, h, w] uint8 to [n, 16, h, w] float32, in whole numbers: the same on any device."""

    def __init__(self):
        super().__init__()
        self.mix = torch.nn.Conv2d(3, 16, 1, bias=False).requires_grad_(False)
        self.mix.weight.copy_(torch.arange(1.0, 49).view(16, 3, 1, 1))

    def forward(self, images):
        return self.mix(images.float())


class SlowJob(Job):
    """A job whose forward takes `forward_s` at least."""

    def __init__(self, device, process, samples: int, image: int, forward_s: float):
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(
            0, 256, (samples, 3, image, image), dtype=torch.uint8, generator=generator
        )
        self.forward_s = forward_s
        super().__init__(Mix(), images, process, device, BATCH)

    def forward(self, images):
        self.device.delay(self.forward_s)
        return super().forward(images)


def keep(batch: int, scores: torch.Tensor) -> torch.Tensor:
    """The process of the exercises: a copy of all bytes, to be compared."""
    return scores.clone()


def keep_slowly(batch: int, scores: torch.Tensor) -> torch.Tensor:
    """`keep`, slower than the loop, so that batches wait for a worker."""
    time.sleep(0.1)
    return scores.clone()


def keep_then_work(batch: int, scores: torch.Tensor) -> torch.Tensor:
    """`keep`, at once, and then so long at work that a copy queued before has arrived."""
    kept = scores.clone()
    time.sleep(4 * FORWARD_S)
    return kept


@contextmanager
def open_job(device, process=keep, samples=SAMPLES, image=64, forward_s=FORWARD_S):
    """A SlowJob of `samples` images of `image` x `image`, closed when the device is idle."""
    job = SlowJob(device, process, samples, image, forward_s)
    try:
        yield job
    finally:
        device.synchronize()  # an attempt that failed may have left work behind
        job.close()


@contextmanager
def open_slots(job, count: int):
    """`count` page-locked slots, acquired and filled with zeros."""
    with BufferPool(job.device, job.output_shape, job.output_dtype, count, True) as pool:
        try:
            yield [pool.acquire() for _ in range(count)]
        finally:
            job.device.synchronize()


def need_filled(tensors: list[torch.Tensor]) -> None:
    """Raise Wrong unless every one of the slots' `tensors` was copied into."""
    for number, tensor in enumerate(tensors):
        if not tensor.any():
            raise Wrong(f"the bytes are right, but slot {number} was never copied into: use it")


def need_workers(workers, job) -> None:
    """Raise Wrong unless the workers processed every batch of `job`."""
    if len(workers.seconds) != job.count:
        raise Wrong(
            f"{len(workers.seconds)} batches went to the workers, there are {job.count}: "
            "submit each of them once"
        )
