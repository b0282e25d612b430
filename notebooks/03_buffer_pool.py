# %% [markdown]
# # 3. A pool of buffers
#
# `multi_worker` asks for new memory for each batch and sends all of it through a pipe. This lab
# does neither: it allocates a few buffers once, in memory that the workers share, and uses them
# in turn.
#
# **Time needed:** 40 minutes with reading and the exercises. Running all cells took TIME_NEEDED.
#
# After this lab you can
#
# * say why copying into fresh memory is slow, and measure it;
# * hand data to another process without moving it;
# * say what stops a fast producer from overrunning a slow consumer.
#
# **Before you run it:** copying the same bytes to the same place for the second time: faster,
# slower, or the same as the first time?

# %% tags=["parameters"]
device: str = "auto"  # auto, cuda or emulated
preset: str = "auto"  # auto, smoke, workshop or article
batches: int = 20  # in one run
images: str = ""  # a folder of photographs; empty for scikit-image's samples
weights: str = "random"  # random or pretrained
process: str = "archive"  # what becomes of the scores: archive or class_map
results_dir: str = "build"  # where figures and records go

# %%
import labkit
from labkit import annotate, checks
from labkit.pipelines import multi_worker, sequential

gpu = labkit.open_device(device)
size = labkit.get_preset(preset, gpu.kind, batches=batches)
job = labkit.segmentation_job(size, gpu, process, images=images, weights=weights)
print(f"{gpu.name}; {job.count} batches, {job.output_bytes / 1e6:.1f} MB of scores each")

# %% [markdown]
# ## Fresh memory is slow
#
# When a program asks for a large piece of memory, the operating system hands out *addresses*,
# not memory. At the first touch of each page, usually 4096 bytes, the processor stops, the
# operating system finds a free page, fills it with zeros, and lets the program go on. That is a
# page fault. It takes a microsecond or so, and a batch of scores has very many pages.
#
# Both copies below are the same on the CPU: host memory to host memory, one thread, no GPU.
# `mmap` asks the operating system for memory directly, so it is fresh for sure. Both targets are
# made with it, so that they differ in nothing else.

# %%
import mmap
import statistics
import time

import numpy as np

source = np.ones(job.output_bytes, dtype=np.uint8)


def fresh():
    memory = mmap.mmap(-1, source.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(memory, dtype=np.uint8)


def bandwidth(get_target, repeats=5):
    """Median GB/s of copying `source` into the memory that `get_target` returns."""
    seconds = []
    for _ in range(repeats):
        target = get_target()
        start = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - start)
    return source.nbytes / statistics.median(seconds) / 1e9


touched = fresh()
touched[:] = 1
rates = {"fresh": bandwidth(fresh), "touched": bandwidth(lambda: touched)}
for name, rate in rates.items():
    print(f"into {name:8} memory {rate:6.2f} GB/s")
print(f"\ntouched memory is {rates['touched'] / rates['fresh']:.1f} times as fast")

# %% [markdown]
# ## The strategy: `buffer_pool`
#
# A pool holds a few *slots*, each as large as a full batch. All of it is allocated once, in
# shared memory, and every page is touched before the first batch comes. A slot has one holder
# at a time:
#
# ```
# free --acquire--> held --copy_--> filled --submit--> with a worker --+
#   ^                                                                  |
#   +------------------------------ release ---------------------------+
# ```
#
# The worker sees the same memory. So what goes through its pipe is no longer the batch but the
# number of a slot and a shape. Touching is not quite over with that: when a worker reads a slot
# for the first time, its pages, which exist by now, have to be entered into *its* addresses.


# %%
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


# %% [markdown]
# The way got shorter: the slot is written once and read where it lies.

# %%
labkit.show_figure(
    labkit.plot_paths("multi_worker", "buffer_pool"), f"{results_dir}/figures/03_paths"
)

# %% [markdown]
# The last batch may be smaller than the others. It lies in the first part of its slot, and the
# shape in the message says how much of the slot is meant. Forget this, and the worker
# processes the tail of an older batch once more.
#
# `acquire` is where a fast loop meets slow workers: when no slot is free it waits for one. So
# the pool needs no other limit, and memory stays as it was after the first batch. When no slot
# is free and no worker holds one either, waiting would never end. The pool knows this and says
# so:

# %%
with labkit.BufferPool(gpu, job.output_shape, job.output_dtype, slots=1) as pool:
    pool.acquire()
    try:
        pool.acquire()
    except labkit.LabError as error:
        print(error)

# %% [markdown]
# ## Predict, then measure
#
# What do you expect of memory that is touched already, and of workers that get a number instead
# of the bytes? And how many slots are enough?

# %%
costs = labkit.calibrate(job, size)
predictions = labkit.predict_all([sequential, multi_worker, buffer_pool], costs, size)
labkit.save_predictions(predictions, f"{results_dir}/records/03_predicted.json")
labkit.prediction_table(predictions, costs)

# %% [markdown]
# ## The run

# %%
record = labkit.measure(job, [sequential, multi_worker, buffer_pool], size, predictions)
labkit.save_record(record, f"{results_dir}/records/03_buffer_pool.json")
print(labkit.check_digests(record))
labkit.ladder_table(record)

# %%
labkit.show_figure(labkit.plot_ladder(record), f"{results_dir}/figures/03_buffer_pool")

# %%
labkit.show_figure(
    labkit.plot_predictions(record), f"{results_dir}/figures/03_predicted_and_measured"
)

# %% [markdown]
# ## The timeline
#
# Two things are gone: `receive`, since a number of a slot is all that a worker gets, and most of
# `copy`, which no longer waits for fresh memory.

# %%
before = labkit.capture_timeline(job, multi_worker, size)
after = labkit.capture_timeline(job, buffer_pool, size)
labkit.show_figure(
    labkit.plot_timelines(before, after, batches=2), f"{results_dir}/figures/03_timeline"
)

# %%
print(labkit.describe_timeline(after))
print(labkit.explain(predictions["buffer_pool"], after))

# %% [markdown]
# The same two on an NVIDIA H200, from traces of Nsight Systems that come with this course:

# %%
h200_before, h200_after = map(labkit.shipped_timeline, ["multi_worker", "buffer_pool"])
labkit.show_figure(
    labkit.plot_timelines(h200_before, h200_after, batches=1),
    f"{results_dir}/figures/03_timeline_h200",
)

# %%
print(labkit.describe_timeline(h200_after))

# %% [markdown]
# How much memory does this take, and what is left to gain?

# %%
row, ceiling = record["strategies"][-1], record["ceiling"]
batch_s = job.batch / row["samples_per_s"]
end_s = ceiling["process_s"] / job.count  # the last batch's processing overlaps with nothing
rest_s = batch_s - ceiling["forward_s"] - end_s
print(f"the pool: {row['slots']} slots, {row['slots'] * job.output_bytes / 1e6:,.0f} MB in all")
print(f"{gpu.name}:")
print(f"a batch takes {batch_s * 1e3:.1f} ms; the copy is about {rest_s * 1e3:.1f} ms of it")
print(f"that is {job.output_bytes / rest_s / 1e9:.1f} GB/s, when the machine can do "
      f"{ceiling['pinned_gbps']:.1f} GB/s")

# %% [markdown]
# The copy is still far from what the machine can do: the next lab mends that. And the GPU still
# waits for the whole of it: that takes until lab 5.
#
# Shared memory has a size of its own. On Linux it is the file system `/dev/shm`, which takes up
# to half of a machine's memory, but a Docker container gets 64 MB unless it is started with
# `--shm-size`. A program that fills it may be ended by a bus error, long after the allocation that
# went too far. `BufferPool` therefore looks first, and refuses in one line.

# %% [markdown]
# ## Exercises
#
# Take the line that raises `NotImplementedError` away, run the cell, then the check below it.
# Until then the check says "not attempted", and the notebook goes on.
#
# ### 3.1 A pool of one slot
#
# Loops often fetch what they need next ahead of time. This one acquires the next slot before it
# lets go of the one it has, and with a pool of one slot it comes to nothing. Mend it, so that one
# slot is enough.
#
# The check runs it with one slot and one worker, and compares every batch's bytes.
#
# <details>
# <summary>Hint</summary>
#
# Who could give the slot back while the loop waits for it?
#
# </details>

# %% tags=["stub"]
def one_slot(job, workers, pool):
    """`buffer_pool`, also with a pool of a single slot."""
    raise NotImplementedError  # take this line away, and mend what follows
    slot = pool.acquire()
    for index, images in enumerate(job.batches()):
        slot.copy_(job.forward(images))
        following = pool.acquire()
        workers.submit(index, slot)
        slot = following
    return workers.results()


# %% tags=["check"]
checks.one_slot(one_slot, gpu)

# %% tags=["solution"]
def one_slot(job, workers, pool):
    """`buffer_pool`, also with a pool of a single slot."""
    for index, images in enumerate(job.batches()):
        scores = job.forward(images)  # queued while the worker still has the slot
        slot = pool.acquire()  # the worker that has it gives it back
        slot.copy_(scores)
        workers.submit(index, slot)
    return workers.results()


# %% [markdown]
# ### 3.2 Back-pressure
#
# The heart of a pool, without the pool: `free` is a queue of buffers, and a consumer that is slower
# than the loop puts them back when it is done. This function never lets the loop wait. That sounds
# good, and it fills the machine's memory. Mend it.
#
# The check counts how often `allocate` is called, and compares every batch's bytes.
#
# <details>
# <summary>Hint</summary>
#
# `get_nowait` raises `queue.Empty` when nothing is there. `queue.SimpleQueue` has another method
# that takes something out.
#
# </details>

# %% tags=["stub"]
import queue


def get_buffer(free, allocate):
    """A buffer for the next batch, out of the queue `free`."""
    raise NotImplementedError  # take this line away, and mend what follows
    try:
        return free.get_nowait()
    except queue.Empty:
        return allocate()


# %% tags=["check"]
checks.get_buffer(get_buffer, gpu)

# %% tags=["solution"]
def get_buffer(free, allocate):
    """A buffer for the next batch, out of the queue `free`."""
    return free.get()  # waits until the consumer has put one back: that is the back-pressure


# %% [markdown]
# ### 3.3 A slot used again too early
#
# A look ahead at lab 4: with `non_blocking=True` and page-locked slots `slot.copy_` returns while
# the copy is still in flight, and `slot.event.synchronize()` waits until the slot's *last* copy has
# arrived. Here two slots are used in turn, and each batch is read a little later, so that its copy
# has time. One comparison is wrong, and with it the results. Mend it.
#
# The check gives it two slots and compares every batch's bytes.
#
# <details>
# <summary>Hint</summary>
#
# Write down for the first four batches which slot each is copied to, and when it is read.
#
# </details>

# %% tags=["stub"]
def through_a_ring(job, slots):
    """A copy of every batch's scores on the host, by way of `slots` in turn."""
    raise NotImplementedError  # take this line away, and mend what follows
    results, in_flight = [], []

    def read_oldest():
        slot = in_flight.pop(0)
        slot.event.synchronize()
        results.append(slot.tensor.clone())

    for index, images in enumerate(job.batches()):
        if len(in_flight) > len(slots):
            read_oldest()
        slot = slots[index % len(slots)]
        slot.copy_(job.forward(images), non_blocking=True)
        in_flight.append(slot)
    while in_flight:
        read_oldest()
    return results


# %% tags=["check"]
checks.through_a_ring(through_a_ring, gpu)

# %% tags=["solution"]
def through_a_ring(job, slots):
    """A copy of every batch's scores on the host, by way of `slots` in turn."""
    results, in_flight = [], []

    def read_oldest():
        slot = in_flight.pop(0)
        slot.event.synchronize()
        results.append(slot.tensor.clone())

    for index, images in enumerate(job.batches()):
        if len(in_flight) == len(slots):  # `>` is one too late: every slot is in use already
            read_oldest()
        slot = slots[index % len(slots)]
        slot.copy_(job.forward(images), non_blocking=True)
        in_flight.append(slot)
    while in_flight:
        read_oldest()
    return results


# %% [markdown]
# A pool keeps you from this mistake: `acquire` gives out only what was released.
#
# ## Key points
#
# * Fresh memory costs a page fault for each page. Allocate once, touch once, use again.
# * Workers that share memory need a number, not the bytes.
# * A pool with few slots limits memory and holds back a loop that is too fast.
# * A slot has one holder at a time. Whoever gives it back too early makes wrong bytes.
#
# ## Where to read on
#
# * [Sharing tensors between processes](https://docs.pytorch.org/docs/stable/multiprocessing.html#sharing-strategies), PyTorch documentation
# * [Shared memory file system](https://www.kernel.org/doc/html/latest/filesystems/tmpfs.html), Linux kernel documentation
#
# Next: [4. Page-locked memory and asynchronous copies](04_pinned_async_copy.ipynb).
