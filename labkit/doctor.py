"""What this machine has that the labs need, and how to mend what is missing."""

import importlib.metadata
import importlib.util
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from .hardware import usable_cores
from .presets import Preset, get_preset

# torch, a model's results and five kernels one after another: seen to stay under 3 GB.
_MEMORY_BYTES = 4 * 10**9


@dataclass(frozen=True)
class Finding:
    verdict: str  # "ok"; "note", for what only makes a difference; "bad"
    what: str
    detail: str
    fix: str = ""


def examine() -> list[Finding]:
    """Look at everything; one finding each, in the order in which to mend them."""
    return [
        _torch_pair(),
        _gpu(),
        _cores(),
        _memory(),
        _shared_memory(),
        _descriptors(),
        _page_locking(),
        _start_method(),
        _kernel(),
        _nsys(),
        _nvtx(),
        _container(),
    ]


def _torch_pair() -> Finding:
    detail = ", ".join(f"{name} {_version(name)}" for name in ("torch", "torchvision"))
    try:
        import torchvision.ops  # noqa: F401  fails to import beside a torch it was not built for
    except Exception as error:
        fix = "install the pair that pyproject.toml names: make labs does"
        return Finding("bad", "torch", f"{detail}: {type(error).__name__}: {error}"[:200], fix)
    wanted = _torch_of_torchvision()
    if wanted and _version("torch").partition("+")[0] != wanted:
        fix = f"install torch {wanted}, or the pair that pyproject.toml names: make labs does"
        return Finding("bad", "torch", f"{detail}, which was built for torch {wanted}", fix)
    return Finding("ok", "torch", detail)


def _torch_of_torchvision() -> str | None:
    """The version of torch that the installed torchvision asks for, if for a single one."""
    for requirement in importlib.metadata.requires("torchvision") or []:
        if found := re.fullmatch(r"torch *\(?==([\d.]+)\)?", requirement.partition(";")[0].strip()):
            return found.group(1)
    return None


def _gpu() -> Finding:
    try:
        import torch
    except Exception:
        return Finding("bad", "GPU", "torch cannot be imported", "see torch, above")
    if torch.cuda.is_available():
        detail = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
        return Finding("ok", "GPU", detail)
    if torch.version.cuda is None:
        why = "this torch is a CPU build"
    elif shutil.which("nvidia-smi"):
        why = "torch does not see it: compare `nvidia-smi` with torch.version.cuda"
    else:
        why = "no NVIDIA driver"
    return Finding("note", "GPU", f"none ({why})", "the labs run on the emulated device")


def _cores() -> Finding:
    cores = usable_cores()
    if cores < 2:
        return Finding("note", "cores", f"{cores}", "with one core the steps blur: use two")
    return Finding("ok", "cores", f"{cores}")


def _memory() -> Finding:
    import psutil

    free = psutil.virtual_memory().available
    if free < _MEMORY_BYTES:
        return Finding("bad", "memory", f"{free:,} bytes free", "free 4 GB, or use --preset smoke")
    return Finding("ok", "memory", f"{free:,} bytes free")


def _shared_memory() -> Finding:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return Finding(
            "note", "shared memory", "no /dev/shm on this system", "no limit to mind then"
        )
    preset = _preset()
    free, needed = shutil.disk_usage(folder).free, preset.slots * _slot_bytes(preset)
    if free < needed:
        fix = "docker run --shm-size=8g, or fewer --slots, or a smaller --preset"
        detail = f"{free:,} bytes free, the {preset.name} preset needs {needed:,}"
        return Finding("bad", "shared memory", detail, fix)
    return Finding("ok", "shared memory", f"{free:,} bytes free in {folder}")


def _descriptors() -> Finding:
    try:
        import resource
    except ImportError:  # not on Windows
        return Finding("note", "descriptors", "no limit known on this system", "nothing to mend")
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit < 256:
        return Finding("bad", "descriptors", f"{limit} open files allowed", "ulimit -n 1024")
    return Finding("ok", "descriptors", f"{limit} open files allowed")


def _page_locking() -> Finding:
    try:
        import torch
    except Exception:
        return Finding("bad", "page-locking", "torch cannot be imported", "see torch, above")
    if not torch.cuda.is_available():
        return Finding("ok", "page-locking", f"emulated; {_memlock_limit()}")
    from .device import open_device
    from .errors import LabError

    size = _slot_bytes(_preset())
    memory = torch.zeros(size, dtype=torch.uint8)
    try:
        device = open_device("cuda")
        device.page_lock(memory)
        device.page_unlock(memory)
    except LabError as error:
        # Not bad: the labs go on with pageable memory and say so.
        fix = "ulimit -l unlimited (docker run --ulimit memlock=-1), or a smaller --preset"
        return Finding("note", "page-locking", f"{error}; {_memlock_limit()}", fix)
    return Finding("ok", "page-locking", f"{size:,} bytes locked and unlocked; {_memlock_limit()}")


def _memlock_limit() -> str:
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    except (ImportError, AttributeError):  # not on Windows
        return "no limit known on this system"
    return "no limit" if limit == resource.RLIM_INFINITY else f"ulimit -l is {limit:,} bytes"


def _start_method() -> Finding:
    try:
        from .worker import START_METHOD
    except Exception:
        return Finding("bad", "workers", "torch cannot be imported", "see torch, above")
    if START_METHOD != "forkserver":
        return Finding("note", "workers", START_METHOD, "each worker takes seconds to start")
    return Finding("ok", "workers", f"start by {START_METHOD}")


def _kernel() -> Finding:
    from jupyter_client.kernelspec import KernelSpecManager

    specs = KernelSpecManager().find_kernel_specs()
    if "python3" not in specs:
        fix = "python -m ipykernel install --sys-prefix --name python3"
        return Finding("bad", "kernel", "no kernel called python3", fix)
    return Finding("ok", "kernel", "python3")


def _nsys() -> Finding:
    path = shutil.which("nsys")
    if path is None:
        return Finding(
            "note", "Nsight Systems", "not installed", "labkit profile takes torch.profiler then"
        )
    setting = Path("/proc/sys/kernel/perf_event_paranoid")
    if setting.is_file() and int(setting.read_text()) > 2:
        fix = "nothing for the labs; to sample the CPU: sysctl kernel.perf_event_paranoid=2"
        detail = (
            f"{path}, may not sample the CPU (perf_event_paranoid {setting.read_text().strip()})"
        )
        return Finding("note", "Nsight Systems", detail, fix)
    return Finding("ok", "Nsight Systems", path)


def _nvtx() -> Finding:
    if importlib.util.find_spec("nvtx") is None:
        return Finding("note", "nvtx", "not installed", "pip install nvtx")
    return Finding("ok", "nvtx", _version("nvtx"))


def _container() -> Finding:
    inside = Path("/.dockerenv").exists() or "container" in os.environ
    if inside:
        return Finding("note", "container", "yes", "its shared memory may be 64 MB: see above")
    return Finding("ok", "container", "none found")


def _preset() -> Preset:
    """The one that the labs take on this machine unless told otherwise."""
    try:
        import torch

        return get_preset("auto", "cuda" if torch.cuda.is_available() else "emulated")
    except ImportError:
        return get_preset("auto", "emulated")


def _slot_bytes(preset: Preset) -> int:
    """The output of one batch: 21 classes, float32, for each pixel."""
    return preset.batch * 21 * 4 * preset.image**2


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
