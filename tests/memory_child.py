"""Run one strategy for 50 and for 500 batches; print the peak memory of each as JSON.

In a process of its own: python memory_child.py STRATEGY.
"""

import contextlib
import functools
import json
import multiprocessing
import sys
import threading
from multiprocessing import forkserver
from pathlib import Path

if __name__ == "__main__":  # the server that starts workers imports torch while this process does
    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch", "labkit.workload"])
    forkserver.ensure_running()

import psutil
import torch
from helpers import INSTANT, Tiny, fingerprint, images, make_device, slow

from labkit import Job
from labkit.device import memory
from labkit.pipelines import STRATEGIES
from labkit.presets import Preset
from labkit.timing import open_parts

SLOTS = 8


class _NoFlops(contextlib.nullcontext):
    """Instead of torch's counter, which takes seconds to import the compiler. Time is no matter."""

    def __init__(self, display):
        super().__init__(self)

    def get_total_flops(self):
        return 0


def memory_bytes():
    """Proportional set size of this process and all its children: shared pages count once.

    Without those of files: their share depends on who else on this machine has torch loaded.
    """
    process, total = psutil.Process(), 0
    for one in [process, *process.children(recursive=True)]:
        for line in Path(f"/proc/{one.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                total += int(line.split()[1]) * 1024
    return total


def peak_bytes(run):
    """The most memory seen while `run()` runs, once or more often."""
    samples, done = [], threading.Event()

    def sample():
        while not done.is_set():
            samples.append(memory_bytes())
            done.wait(0.05)

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        while True:
            run()
            if len(samples) >= 3:
                return max(samples)
    finally:
        done.set()
        sampler.join()


def main(name):
    memory.FlopCounterMode = _NoFlops
    device = make_device("emulated", INSTANT)
    process = slow if name == "multi_worker" else fingerprint  # the others wait for memory
    job = Job(Tiny(), images(20, size=64), process, device, batch=8, samples=8 * 500)
    preset = Preset("", "", batch=8, image=64, samples=8 * 500, workers=2, slots=SLOTS)
    strategy = STRATEGIES[name]
    with open_parts(strategy, job, preset, workers=2) as parts:
        strategy(job.first(20), **parts)
        peaks = {
            "short": peak_bytes(lambda: strategy(job.first(50), **parts)),
            "long": peak_bytes(lambda: strategy(job, **parts)),
        }
        if "depth" in parts:
            for label, parts["depth"] in {"shallow": 1, "deep": SLOTS}.items():
                peaks[label] = peak_bytes(functools.partial(strategy, job.first(50), **parts))
    print(json.dumps(peaks | {"output": job.output_bytes, "batches": job.count}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
