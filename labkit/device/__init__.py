"""Where a job runs: an NVIDIA GPU, or an emulated one on the CPU with the same names.

Both devices offer the part of `torch.cuda` that the labs use. On a GPU these names *are*
`torch.cuda`'s; see `cuda.py`. See `emulated.py` for what the emulation keeps of CUDA's rules.

    device.Stream()   device.Event()   device.stream(s)   device.current_stream()
    device.synchronize()
    device.upload(host_tensor)            host -> device, queued on the current stream
    device.load(model, inputs)            the model as a function on device tensors
    device.page_lock(tensor)   device.page_unlock(tensor)
    device.delay(seconds)                 holds the current stream up, for exercises and tests
"""

import warnings

from ..errors import LabError

KINDS = ("auto", "cuda", "emulated")


def open_device(kind: str = "auto", profile="classroom"):
    """Open the device called `kind`; `auto` takes a GPU if there is one, else the emulated one.

    `profile` is the hardware profile that gives the emulated device its rates: a name, or a
    calibrated one's `hardware()`. Other accelerators, Apple's MPS among them, count as no GPU:
    they have neither these streams nor page-locked copies. Raises LabError for an unknown name,
    and for `cuda` without a GPU.
    """
    import torch

    if kind not in KINDS:
        raise LabError(f"unknown device {kind!r}: choose {', '.join(KINDS)}")
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "emulated"
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise LabError(
                "device cuda was asked for, but torch sees no NVIDIA GPU: "
                "check nvidia-smi, or choose the emulated device"
            )
        from .cuda import CudaDevice

        return CudaDevice()
    from ..hardware import get_profile
    from .emulated import EmulatedDevice

    return EmulatedDevice(get_profile(profile) if isinstance(profile, str) else profile)


def page_lock_or_warn(device, memory, what: str) -> bool:
    """Page-lock the tensor `memory`; False, with one warning, when `device` refuses.

    `memory`, called `what` in the warning, is locked as a whole or not at all. As pageable memory
    it serves as well, only slower: copies to it wait.
    """
    try:
        device.page_lock(memory)
    except LabError as error:
        warnings.warn(f"{what} stay pageable, so their copies are slower: {error}", stacklevel=2)
        return False
    return True
