"""Machines: the named profiles that the emulated device runs from, and what this machine is."""

import os
import platform
from dataclasses import dataclass

from .errors import LabError


@dataclass(frozen=True)
class HardwareProfile:
    """Rates of one machine, in SI units."""

    name: str
    source: str
    flops_per_s: float  # what a model's convolutions reach, not a datasheet's peak
    pageable_bytes_per_s: float  # copies to and from memory that is not page-locked
    pinned_bytes_per_s: float  # copies to and from page-locked memory
    launch_s: float  # from one operation's end to the next one's start


PROFILES = {
    "classroom": HardwareProfile(
        name="classroom",
        source="invented: no such machine exists. Chosen so that, on two cores and with the "
        "workshop preset, each step of the ladder is limited by the cost that its lab is about.",
        flops_per_s=1.0e12,
        pageable_bytes_per_s=1.6e9,
        pinned_bytes_per_s=5.0e9,
        launch_s=20e-6,
    ),
}


def get_profile(name: str) -> HardwareProfile:
    if name not in PROFILES:
        raise LabError(f"unknown hardware profile {name!r}: choose {', '.join(PROFILES)}")
    return PROFILES[name]


def usable_cores() -> int:
    """Cores that this process may run on; a container's share, not the machine's count."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def default_workers() -> int:
    """One worker for each core but two, which the main loop and the copies keep; at least one."""
    return max(1, usable_cores() - 2)


def device_entry(device) -> dict:
    """The `device` part of a record or a timeline, for an open device."""
    profile = device.profile
    return {
        "kind": device.kind,
        "name": device.name,
        "profile": profile.name if profile else None,
    }


def describe_device(entry: dict) -> str:
    """A `device` part in words, which never pass an emulated device off as a GPU."""
    if entry["kind"] == "cuda":
        return entry["name"]
    return f"{entry['kind'].upper()} device, profile {entry['profile']}: not a GPU"


def describe_host() -> dict:
    """The `host` part of a record: nothing that names a person or a machine."""
    import torch
    import torchvision

    return {
        "cores": usable_cores(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
    }
