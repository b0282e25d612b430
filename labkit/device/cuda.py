"""The GPU. Nothing stands between the learner and `torch.cuda`."""

import contextlib

import torch

from ..errors import LabError

_CYCLES_PER_S = 1.8e9  # between 1.1 and 2.6 GHz on NVIDIA's GPUs since Volta


class CudaDevice:
    """One NVIDIA GPU: `torch.cuda`'s own stream and event classes, and five small helpers."""

    kind = "cuda"
    profile = None

    Stream = torch.cuda.Stream
    Event = torch.cuda.Event
    stream = staticmethod(torch.cuda.stream)
    current_stream = staticmethod(torch.cuda.current_stream)
    synchronize = staticmethod(torch.cuda.synchronize)

    def __init__(self):
        self.name = torch.cuda.get_device_name()

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        """Copy `host` to the GPU on the current stream.

        Returns at once when `host` is page-locked; then `host` must stay unchanged until the
        stream gets there.
        """
        return host.to("cuda", non_blocking=True)

    def load(self, model: torch.nn.Module, inputs: torch.Tensor):
        """Move `model` to the GPU. Calling the result queues its kernels and returns at once."""
        return model.to("cuda")

    def delay(self, seconds: float) -> None:
        """Hold the current stream up for about `seconds`, give or take a half. Returns at once."""
        # torch's own tests wait like this; it takes cycles, so the length depends on the clock.
        torch.cuda._sleep(int(seconds * _CYCLES_PER_S))

    def page_lock(self, tensor: torch.Tensor) -> None:
        """Page-lock the memory that `tensor` lies in, so that copies to it can be asynchronous.

        The pages should have been touched before: page-locking fresh ones takes ten times as
        long. Undo it with `page_unlock` before the memory is freed.
        """
        code = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)
        _check(code, f"page-lock {tensor.nbytes:,} bytes")

    def page_unlock(self, tensor: torch.Tensor) -> None:
        """Undo `page_lock`, once no copy is in flight."""
        torch.cuda.synchronize()
        _check(torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr()), "undo page-locking")


def _check(code, action: str) -> None:
    if int(code) != 0:
        # CUDA keeps the error for whoever asks next, which would be a learner's own kernel.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")
        raise LabError(
            f"CUDA could not {action} (error {int(code)}): "
            "use fewer slots or a smaller batch, or free memory"
        )
