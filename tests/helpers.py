"""What the tests share with worker processes, which import it by name: no pytest in here."""

import contextlib
import mmap
import os
import resource
import threading
import time
from pathlib import Path

import torch
import xxhash

from labkit.hardware import HardwareProfile


def profile(name, kernel_s=0.0, copy_bytes_per_s=1e12, pageable_bytes_per_s=1e12):
    """A machine whose kernel on a batch of 8 of `images()` takes `kernel_s`."""
    flops = 2 * 3 * Tiny.classes * 8 * SIZE * SIZE
    return HardwareProfile(
        name=name,
        source="invented for the tests",
        flops_per_s=flops / kernel_s if kernel_s else 1e18,
        pageable_bytes_per_s=pageable_bytes_per_s,
        pinned_bytes_per_s=copy_bytes_per_s,
        launch_s=0.0,
    )


class Tiny(torch.nn.Module):
    """[n, 3, h, w] uint8 to [n, 4, h, w] float32.

    Small whole numbers throughout, so that a GPU's results equal the CPU's bit for bit.
    """

    classes = 4

    def __init__(self):
        super().__init__()
        self.mix = torch.nn.Conv2d(3, self.classes, 1, bias=False).requires_grad_(False)
        weight = torch.arange(3.0 * self.classes).view(self.classes, 3, 1, 1)
        self.mix.weight.copy_(weight + 1)

    def forward(self, images):
        return self.mix(images.float())


SIZE = 16
# The scores of 8 images take 32 KiB: 33 ms for a copy.
SLOW_COPY = profile("slow copies", copy_bytes_per_s=1e6, pageable_bytes_per_s=1e6)
SLOW_KERNEL = profile("slow kernels", kernel_s=30e-3)
BALANCED = profile("balanced", 3e-3, copy_bytes_per_s=1e7, pageable_bytes_per_s=1e7)
INSTANT = profile("instant")


def images(count, seed=0, size=SIZE):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=generator)


# On a device.


def make_device(kind, hardware=INSTANT):
    from labkit.device.emulated import EmulatedDevice

    if kind == "emulated":
        return EmulatedDevice(hardware)
    from labkit import open_device

    return open_device(kind)


_STALL_CYCLES = 600_000_000  # about 0.3 s on a GPU at 2 GHz


@contextlib.contextmanager
def stalled(device):
    """A kernel on the current stream that does not end inside the block.

    On the emulated device it ends when the block does: nothing inside may wait for it. On a GPU
    it ends after some 0.3 s.
    """
    if device.kind == "cuda":
        torch.cuda._sleep(_STALL_CYCLES)
        yield
        return
    gate = threading.Event()
    device.launch(0.0, gate.wait)
    try:
        yield
    finally:
        gate.set()


def delay(device, seconds=0.05):
    """Queue a kernel of about that length on the current stream."""
    if device.kind == "cuda":
        torch.cuda._sleep(int(2e9 * seconds))
    else:
        device.launch(seconds, lambda: None)


def wait_until(condition, seconds=10.0):
    """Whether `condition()` became true within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def stays_behind(event):
    """Whether `event` is still to come after a time in which an idle stream gets far."""
    return not wait_until(event.query, 0.03)


def open_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def files_in_shared_memory(*pids):
    """Those that torch made in the processes `pids`, in this one unless given."""
    pids = pids or [os.getpid()]
    return [path for pid in pids for path in Path("/dev/shm").glob(f"torch_{pid}_*")]


# What workers call.


def bytes_of(tensor):
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def fingerprint(batch, tensor):
    return batch, tuple(tensor.shape), str(tensor.dtype), xxhash.xxh3_64_hexdigest(bytes_of(tensor))


def logged(batch, tensor, log):
    """`fingerprint`, and a line in the file `log` for every call."""
    with Path(log).open("a") as file:
        file.write(f"{batch}\n")
    return fingerprint(batch, tensor)


def value(batch, tensor, log):
    """The tensor's only number, and a line in the file `log` for every call."""
    with Path(log).open("a") as file:
        file.write(f"{batch}\n")
    return batch, tensor.item()


def counts(batch, tensor):
    """How many files this worker has open."""
    return batch, open_descriptors()


def jittered(batch, tensor):
    """`fingerprint`, after a time that puts neighbouring batches out of order."""
    time.sleep(0.02 * (batch * 7 % 3))
    return fingerprint(batch, tensor)


def slow(batch, tensor):
    """`fingerprint`, slower than the main loop: without a limit, batches would pile up."""
    time.sleep(0.006)
    return fingerprint(batch, tensor)


def worker_pid(batch, tensor):
    time.sleep(0.05)  # long enough for the next batch to go to the next worker
    return os.getpid()


def intra_op_threads(batch, tensor):
    return torch.get_num_threads()


def wait_for(batch, tensor, path):
    """Wait until the file `path` is there."""
    if not wait_until(Path(path).exists, 30):
        raise TimeoutError(path)
    return batch


def hang_at(batch, tensor, bad, folder):
    """At batch `bad`, write the file `folder`/pid and sleep for a minute."""
    if batch == bad:
        part = Path(folder, "part")
        part.write_text(str(os.getpid()))
        part.rename(Path(folder, "pid"))
        time.sleep(60)
    return batch


def fork_and_hang_at(batch, tensor, bad, folder):
    """`hang_at`, with a process beside it that has the same open files; its id is in `beside`."""
    if batch == bad:
        beside = os.fork()
        if beside == 0:
            time.sleep(60)
            os._exit(0)
        Path(folder, "beside").write_text(str(beside))
    return hang_at(batch, tensor, bad, folder)


def fail_at(batch, tensor, bad):
    if batch == bad:
        raise ValueError(f"cannot stand batch {batch}\nsecond line")
    return batch


def exit_at(batch, tensor, bad):
    if batch == bad:
        raise SystemExit(3)
    return batch


def needs_numpy(batch, tensor):
    return tensor.numpy().sum()


def unpicklable(batch, tensor):
    return lambda: batch


def large_result(batch, tensor):
    """A megabyte."""
    return bytes([int(tensor[-1])]) * 2**20


class BreaksOnArrival:
    """Can be pickled and not unpickled, as exceptions with arguments of their own often are."""

    def __reduce__(self):
        return int, ("not a number",)


def breaks_on_arrival(batch, tensor):
    return BreaksOnArrival()


def scribble(batch, tensor):
    """`fingerprint`, then overwrite the tensor, which is the worker's until it returns."""
    result = fingerprint(batch, tensor)
    tensor.fill_(0)
    return result


def page_faults(batch, tensor):
    """In a worker: how many pages it had to map while it read a batch."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensor.view(torch.uint8).view(-1)[:: mmap.PAGESIZE].sum()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
