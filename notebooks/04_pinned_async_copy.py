# %% [markdown]
# # 4. Page-locked memory and asynchronous copies
#
# The pool's copies are slow, and while one runs the loop cannot queue anything else. Both come
# from the memory that they go to. This lab changes it, and with it comes the first bug of this
# course that gives wrong bytes without any error.
#
# **Time needed:** 35 minutes with reading and the exercises. Running all cells took TIME_NEEDED.
#
# After this lab you can
#
# * say what page-locked (pinned) memory is, and why a copy to other memory cannot be
#   asynchronous;
# * queue a copy and go on, and wait for it with an event;
# * recognise a reader that did not wait.
#
# **Before you run it:** `slot.copy_(scores, non_blocking=True)` has returned. What is in the
# slot?

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
from labkit.pipelines import buffer_pool, multi_worker, sequential

gpu = labkit.open_device(device)
size = labkit.get_preset(preset, gpu.kind, batches=batches)
job = labkit.segmentation_job(size, gpu, process, images=images, weights=weights)
print(f"{gpu.name}; {job.count} batches, {job.output_bytes / 1e6:.1f} MB of scores each")

# %% [markdown]
# ## Pageable and page-locked
#
# The operating system may move a page of ordinary memory to another place, or out to disk, at
# any time: it is *pageable*. The GPU's copy engine works with physical addresses and by itself,
# so it must not touch such a page. For a copy to pageable memory the driver first copies into a
# small page-locked buffer of its own and has the processor copy on from there. That takes the
# processor's time, it is slower, and the call returns only when it is done, whatever
# `non_blocking` says. (For the other direction, an upload, it returns once the driver has the
# bytes, which may be before they arrive.)
#
# Memory can be locked in place. Then the copy engine writes straight into it, and the call only
# has to queue the copy. Locking is slow and takes memory away from everybody else, so it is
# done once, for a pool.
#
# Below, the same copy goes into a pool of either kind. How long does the call take, and how
# long until the bytes are there?

# %%
import statistics
import time


def copy_times(page_locked, repeats=5):
    """Median ms until `copy_` returns and until the bytes have arrived."""
    scores = job.forward(next(job.batches()))
    gpu.synchronize()
    returned, arrived = [], []
    with labkit.BufferPool(
        gpu, job.output_shape, job.output_dtype, slots=1, page_locked=page_locked
    ) as pool:
        slot = pool.acquire()
        for _ in range(repeats):
            start = time.perf_counter()
            slot.copy_(scores, non_blocking=True)
            returned.append((time.perf_counter() - start) * 1e3)
            slot.event.synchronize()
            arrived.append((time.perf_counter() - start) * 1e3)
    return statistics.median(returned), statistics.median(arrived)


print(f"{gpu.name}:")
for name, page_locked in {"pageable": False, "page-locked": True}.items():
    returned, arrived = copy_times(page_locked)
    print(f"{name:12} returns after {returned:7.2f} ms, bytes there after {arrived:7.2f} ms "
          f"({job.output_bytes / arrived / 1e6:5.1f} GB/s)")

# %% [markdown]
# ## A reader that does not wait
#
# With page-locked memory the call returns long before the bytes are there. So what does someone
# see who reads at once? Here the slot is filled with zeros, then a batch is computed and copied
# into it.

# %%
with labkit.BufferPool(
    gpu, job.output_shape, job.output_dtype, slots=1, page_locked=True
) as pool:
    slot = pool.acquire()
    slot.tensor.zero_()
    slot.copy_(job.forward(next(job.batches())), non_blocking=True)
    at_once = slot.tensor[-1, -1, -1, :4].tolist()
    slot.event.synchronize()
    after_waiting = slot.tensor[-1, -1, -1, :4].tolist()
print("read at once:      ", at_once)
print("read after waiting:", after_waiting)
if at_once != after_waiting:
    print("The reader that did not wait got old bytes.")
else:
    print("This time the copy was faster than the reader. Luck is not synchronisation.")

# %% [markdown]
# No error and no warning, whichever of the two you see: a reader that does not wait gets the
# old bytes, or some old and some new, or with luck the right ones. In a loop that uses its
# buffers again, the old bytes are those of an *earlier batch*. They look entirely plausible.
#
# What tells when the bytes are there is an **event**. `event.record()` puts a mark into the
# stream that is current where it is called; the event is past when the GPU reaches the mark. A
# slot does this for you: `slot.copy_` records `slot.event` right behind the copy.
#
# | call | who waits |
# |---|---|
# | `event.record()` | nobody: it returns at once |
# | `event.query()` | nobody: it tells whether the event is past |
# | `event.synchronize()` | the host, until the event is past |
# | `stream.wait_event(event)` | that stream, on the device; the host goes on |
#
# On a GPU a host that waits in `synchronize()` usually keeps its core busy, asking over and over;
# an `Event(blocking=True)` lets it sleep. `labkit` leaves the main loop a core of its own.
#
# ## The strategy: `pinned_async`
#
# Most of the gain is the faster copy. The order of the lines saves the rest: the next forward is
# queued *before* the loop waits for the copy of the batch before it. While the host waits and
# hands that batch to a worker, the GPU already computes.


# %%
def hand_over(workers, index, slot):
    """Give a slot to the workers once the bytes of its copy are here."""
    with annotate("wait for copy", index):
        slot.event.synchronize()
    workers.submit(index, slot)


# %%
def pinned_async(job, workers, pinned_pool):
    """Page-locked slots: queue the next batch first, and only then wait for the copy before it."""
    previous = None
    for index, images in enumerate(job.batches()):
        with annotate("forward", index):
            scores = job.forward(images)
        if previous is not None:
            hand_over(workers, *previous)
        slot = pinned_pool.acquire()
        with annotate("copy", index, scores.nbytes):
            slot.copy_(scores, non_blocking=True)  # returns before the bytes arrive
        previous = (index, slot)
    hand_over(workers, *previous)
    return workers.results()


# %% [markdown]
# The driver's own buffer is gone, and with it the processor's part in the copy.

# %%
labkit.show_figure(
    labkit.plot_paths("buffer_pool", "pinned_async"), f"{results_dir}/figures/04_paths"
)

# %% [markdown]
# `submit` refuses a slot whose event is not past, so that no *worker* reads too early. Whoever
# reads `slot.tensor` himself has to wait himself, as above.
#
# ## Predict, then measure
#
# Forward and copy still take turns in one stream. What does that say about the time of a batch?

# %%
strategies = [sequential, multi_worker, buffer_pool, pinned_async]
costs = labkit.calibrate(job, size)
predictions = labkit.predict_all(strategies, costs, size)
labkit.save_predictions(predictions, f"{results_dir}/records/04_predicted.json")
labkit.prediction_table(predictions, costs)

# %% [markdown]
# ## The run

# %%
record = labkit.measure(job, strategies, size, predictions)
labkit.save_record(record, f"{results_dir}/records/04_pinned_async_copy.json")
print(labkit.check_digests(record))
labkit.ladder_table(record)

# %%
labkit.show_figure(labkit.plot_ladder(record), f"{results_dir}/figures/04_pinned_async_copy")

# %%
labkit.show_figure(
    labkit.plot_predictions(record), f"{results_dir}/figures/04_predicted_and_measured"
)

# %% [markdown]
# ## The timeline
#
# The host's lane looks different now. It queues a forward and a copy, both short, and then waits
# (white) for the copy of the batch before. Look at the lanes `compute` and `copy`: they take
# turns.

# %%
before = labkit.capture_timeline(job, buffer_pool, size)
after = labkit.capture_timeline(job, pinned_async, size)
labkit.show_figure(
    labkit.plot_timelines(before, after, batches=4), f"{results_dir}/figures/04_timeline"
)

# %%
print(labkit.describe_timeline(after))
print(labkit.explain(predictions["pinned_async"], after))

# %% [markdown]
# The same two on an NVIDIA H200, from traces of Nsight Systems that come with this course:

# %%
h200_before, h200_after = map(labkit.shipped_timeline, ["buffer_pool", "pinned_async"])
labkit.show_figure(
    labkit.plot_timelines(h200_before, h200_after, batches=4),
    f"{results_dir}/figures/04_timeline_h200",
)

# %%
print(labkit.describe_timeline(h200_after))

# %% [markdown]
# ## What is left
#
# One stream does one thing at a time. Forward and copy are in the same stream, so the next
# forward starts when the copy is done:

# %%
row, ceiling = record["strategies"][-1], record["ceiling"]
batch_ms = job.batch / row["samples_per_s"] * 1e3
print(f"{gpu.name}:")
end_ms = ceiling["process_s"] / job.count * 1e3
print(f"a batch takes {batch_ms:.1f} ms, of which {end_ms:.1f} ms are its share of the run's end,")
print("when the last batch is processed and nothing else is left to do")
print(f"forward {ceiling['forward_s'] * 1e3:.1f} ms + copy {ceiling['slot_copy_s'] * 1e3:.1f} ms "
      f"= {(ceiling['forward_s'] + ceiling['slot_copy_s']) * 1e3:.1f} ms")

# %% [markdown]
# ## Exercises
#
# Take the line that raises `NotImplementedError` away, run the cell, then the check below it.
# Until then the check says "not attempted", and the notebook goes on.
#
# ### 4.1 The reader that does not wait
#
# Every batch goes through one page-locked slot and is processed by the loop itself. No error
# comes, and each result but the first looks plausible. Mend it.
#
# The check says which batch's bytes each result really has.
#
# <details>
# <summary>Hint</summary>
#
# `slot.copy_` has only queued the copy, behind a forward that was only queued too. The slot has an
# event that tells when both are done.
#
# </details>

# %% tags=["stub"]
def read_each(job, slot):
    """What `process` makes of every batch, by way of one page-locked slot."""
    raise NotImplementedError  # take this line away, and mend what follows
    results = []
    for index, images in enumerate(job.batches()):
        slot.copy_(job.forward(images), non_blocking=True)
        results.append(job.process(index, slot.tensor))
    return results


# %% tags=["check"]
checks.read_each(read_each, gpu)

# %% tags=["solution"]
def read_each(job, slot):
    """What `process` makes of every batch, by way of one page-locked slot."""
    results = []
    for index, images in enumerate(job.batches()):
        slot.copy_(job.forward(images), non_blocking=True)
        slot.event.synchronize()  # until then the slot holds the batch before
        results.append(job.process(index, slot.tensor))
    return results


# %% [markdown]
# ### 4.2 An event that promises too much
#
# This function queues a batch into plain page-locked memory, without a slot, and returns an event.
# Whoever waits for the event gets wrong bytes all the same. Mend it. The function itself must not
# wait.
#
# The check waits for the event, reads `host` at once, and compares the bytes.
#
# <details>
# <summary>Hint</summary>
#
# `record()` puts a mark into the current stream, behind all that is queued there *so far*.
#
# </details>

# %% tags=["stub"]
def queue_batch(job, images, host):
    """Queue the forward of `images` and the copy of its scores to `host`.

    Returns, at once, an event that is past when the bytes are there.
    """
    raise NotImplementedError  # take this line away, and mend what follows
    event = job.device.Event()
    event.record()
    scores = job.forward(images)
    host.copy_(scores, non_blocking=True)
    return event


# %% tags=["check"]
checks.queue_batch(queue_batch, gpu)

# %% tags=["solution"]
def queue_batch(job, images, host):
    """Queue the forward of `images` and the copy of its scores to `host`.

    Returns, at once, an event that is past when the bytes are there.
    """
    event = job.device.Event()
    scores = job.forward(images)
    host.copy_(scores, non_blocking=True)
    event.record()  # behind the copy: what is in front of the mark is what it stands for
    return event


# %% [markdown]
# ## Key points
#
# * Do not count on a copy to pageable memory being asynchronous, whatever `non_blocking` says.
# * Page-lock once, for memory that is used again and again.
# * `non_blocking=True` returns before the bytes arrive. Wait for an event before reading.
# * Queue the next work first, then wait for the last.
#
# ## Where to read on
#
# * [A guide on good usage of `non_blocking` and `pin_memory()`](https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html), PyTorch tutorials
# * [CUDA runtime: memory management, `cudaHostRegister`](https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__MEMORY.html), NVIDIA
# * [CUDA runtime: API synchronization behavior](https://docs.nvidia.com/cuda/cuda-runtime-api/api-sync-behavior.html), NVIDIA
# * [`torch.cuda.Event`](https://docs.pytorch.org/docs/stable/generated/torch.cuda.Event.html), PyTorch documentation
#
# Next: [5. A pipeline of streams](05_stream_pipeline.ipynb) lets both run at once.
