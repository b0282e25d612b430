"""Job: a model, its input batches, and what to do with each output. Nothing here is a strategy."""

import functools
import hashlib
import io
import pickle
import weakref
from collections.abc import Callable, Iterator

import torch

from .device import page_lock_or_warn
from .errors import LabError
from .presets import check_count
from .ranges import annotate


class Job:
    """Run `model` over `samples` inputs in batches and give each output to `process`.

    `model` takes a batch of `inputs` [n, ...] and returns one tensor [n, ...], the samples
    independent of each other. `process(batch_index, host_tensor)` is importable by name; what
    it returns must depend on every byte, or a wrong one goes unseen. When there are fewer
    `inputs` than `samples` they are used again. The last batch may be smaller.
    `device` is an open device; the inputs are page-locked on it, or stay pageable with a warning
    when it refuses, and the model is loaded.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        inputs: torch.Tensor,
        process: Callable,
        device,
        batch: int,
        samples: int | None = None,
        name: str = "",
    ):
        if len(inputs) == 0:
            raise LabError("a job needs at least one input, got none")
        self.batch = check_count("batch", batch)
        self.samples = check_count("samples", len(inputs) if samples is None else samples)
        self.process = process
        self.device = device
        self.name = name or type(model).__name__
        self.model_module = model.eval()
        self._distinct = len(inputs)
        # When inputs repeat, batches that follow each other must still differ, or a slot with
        # an old batch's bytes would go unseen.
        self._step = batch if batch % self._distinct else batch + 1
        # A copy of our own, since we page-lock it; when inputs repeat, so long that each batch
        # is one piece of it.
        rows = self._distinct if self.samples <= self._distinct else self._distinct + batch - 1
        self.inputs = inputs[torch.arange(rows) % self._distinct]
        self._unlock = None
        if page_lock_or_warn(device, self.inputs, "the job's inputs"):
            self._unlock = weakref.finalize(self, device.page_unlock, self.inputs)
        self._model = device.load(self.model_module, self.inputs)
        first = next(self.batches())
        scores = self.forward(first)
        self.output_shape, self.output_dtype = tuple(scores.shape), scores.dtype
        self.output_bytes = scores.nbytes
        device.synchronize()

    @property
    def count(self) -> int:
        """The number of batches in a run."""
        return -(-self.samples // self.batch)

    def batches(self, limit: int | None = None, stream=None) -> Iterator[torch.Tensor]:
        """Each input batch in turn, uploaded when it is asked for. Returns before it is there.

        It is uploaded on the current stream, or on `stream`, beside what the current one does,
        which then waits for it. With `limit`, only the first batches up to that number; the last
        one of the whole run is among them, since it may be the only one of its shape.
        """
        indices = range(self.count)
        if limit is not None and limit < self.count:
            indices = [*range(limit - 1), self.count - 1]
        for index in indices:
            first = index * self._step % self._distinct
            size = min(self.batch, self.samples - index * self.batch)
            images = self.inputs[first : first + size]
            current = self.device.current_stream()
            with self.device.stream(stream or current), annotate("upload", index, images.nbytes):
                batch = self.device.upload(images)
            if stream is not None:
                current.wait_stream(stream)  # no forward before its images are here
                batch.record_stream(current)  # keep their memory until the forward has read it
            yield batch

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Queue the model on `images` on the current stream. Returns before the result is there."""
        with torch.inference_mode():
            return self._model(images)

    def first(self, limit: int) -> "Job":
        """The same job cut to `limit` batches, for warming up: every shape is still there."""
        short = object.__new__(Job)
        short.__dict__.update(self.__dict__)
        short.batches = functools.partial(self.batches, limit)
        return short

    def close(self) -> None:
        """Undo the page-locking of the inputs. May be repeated; dropping the job does it too."""
        if self._unlock is not None:
            self._unlock()


def digest(results: list) -> str:
    """One fingerprint of all `results`, in order: equal only if every one of them is equal."""
    total = hashlib.sha256()
    for result in results:
        data = io.BytesIO()
        _Pickler(data, protocol=4).dump(result)
        total.update(data.getbuffer())
    return total.hexdigest()[:32]


class _Pickler(pickle.Pickler):
    """Writes tensors as their bytes: torch's own way adds numbers that differ between copies."""

    def reducer_override(self, value):
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        flat = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
        return torch.Tensor, (str(value.dtype), tuple(value.shape), flat.numpy().tobytes())
