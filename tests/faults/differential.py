"""For each folder given, with a copy of labkit in it: does every strategy give the right bytes?

Prints a line a folder: `right`, or what went wrong. torch is imported once, labkit in a process
of its own for each. No pytest in here.
"""

import os
import sys

import torch  # noqa: F401  before the processes are made


def examine() -> str:
    from helpers import BALANCED, SLOW_COPY, SLOW_KERNEL, Tiny, fingerprint, images, make_device
    from helpers import slow as process

    from labkit import BufferPool, Job, OutputWorkers
    from labkit.pipelines import STRATEGIES

    for profile in (SLOW_COPY, SLOW_KERNEL, BALANCED):
        device = make_device("emulated", profile)
        job = Job(Tiny(), images(45), process, device, 8)
        batches = images(45).split(8)
        expected = [fingerprint(index, Tiny()(batch)) for index, batch in enumerate(batches)]
        for name in ("stream_pipeline", "pinned_async", "buffer_pool"):
            pinned = name != "buffer_pool"
            with (
                BufferPool(device, job.output_shape, job.output_dtype, 2, pinned) as pool,
                OutputWorkers(process, 2, pool, threads=True) as workers,
            ):
                found = STRATEGIES[name](job, workers, pool)
            if found != expected:
                return f"{name} gave wrong results on {profile.name}"
    return "right"


def main(folders: list[str]) -> None:
    for folder in folders:
        sys.stdout.flush()
        if child := os.fork():
            os.waitpid(child, 0)
            continue
        sys.path.insert(0, folder)
        try:
            import labkit

            assert labkit.__file__.startswith(folder), labkit.__file__
            said = examine()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        print(said.splitlines()[0], flush=True)
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
