# %% [markdown]
# # 2. Multi-worker output
#
# In `sequential` the GPU waits while the host processes the batch before. The first idea is the
# one that every data loader has, turned round: let other processes do it.
#
# **Time needed:** 35 minutes with reading and the exercises. Running all cells took TIME_NEEDED.
#
# After this lab you can
#
# * hand a model's outputs to worker processes, and get the results back in order;
# * say why they are processes and not threads, and when threads do better;
# * say what it costs to get a tensor into another process.
#
# **Before you run it:** with `process` off the loop, what is left in it? How much faster can
# the loop become?

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
from labkit.pipelines import sequential

gpu = labkit.open_device(device)
size = labkit.get_preset(preset, gpu.kind, batches=batches)
job = labkit.segmentation_job(size, gpu, process, images=images, weights=weights)
print(f"{gpu.name}; {job.count} batches, {job.output_bytes / 1e6:.1f} MB of scores each")

# %% [markdown]
# ## The strategy: `multi_worker`
#
# `workers.submit` hands a batch over and returns; a feeder thread writes its bytes into a
# worker's pipe. `workers.results()` waits for all of them and puts them into batch order,
# whichever worker was first.


# %%
def multi_worker(job, workers):
    """Hand each batch to a worker process, so that the loop does not wait for `process`."""
    for index, images in enumerate(job.batches()):
        with annotate("forward", index):
            scores = job.forward(images)
        with annotate("copy", index, scores.nbytes):
            host = scores.cpu()
        workers.submit(index, host)  # every byte of it goes through a pipe
    return workers.results()


# %% [markdown]
# The picture compares the way of the scores before and now. What the loop waits for is orange.

# %%
labkit.show_figure(
    labkit.plot_paths("sequential", "multi_worker"), f"{results_dir}/figures/02_paths"
)

# %% [markdown]
# Five decisions are hidden in `labkit.OutputWorkers`:
#
# * **Processes, not threads.** Threads of one Python process share one interpreter lock. Work
#   that holds it, such as `tobytes()`, stops the loop that should be feeding the GPU. Work that
#   releases it, as most PyTorch and NumPy operations do, is better off in threads, which share
#   memory at no cost: `OutputWorkers(..., threads=True)`.
# * **Never `fork`.** A process that has used CUDA should not be forked. CUDA fails in the child,
#   and a lock that another thread held at that moment stays locked there for ever, even if the
#   child never touches the GPU. The workers come from a *fork server*, a small process that has
#   imported torch and done nothing else. Where there is none they are started anew (`spawn`).
#   Either way a worker has to *import* the function it runs, so a function from a notebook cell
#   will not do; and a script needs `if __name__ == "__main__":` around what starts workers, since
#   they import the script too.
# * **One thread each.** PyTorch would give every worker as many threads as there are cores.
# * **Memory is kept.** A worker keeps what it frees, and so asks for new memory only once. Why
#   that makes its `process` faster than the loop's, lab 3 shows.
# * **A limit.** When the workers are slower than the loop, batches pile up until memory is full.
#   So only a few may be under way at once, and then `submit` waits.
#
# Here is the second of these, as it looks when one forgets it:

# %%
try:
    labkit.OutputWorkers(lambda index, scores: None, 1)
except labkit.LabError as error:
    print(error)

# %% [markdown]
# ## Predict, then measure
#
# From here on every lab says beforehand what its step will bring. Write down your own guess
# first: how many samples per second, and which stage will be the slowest?
#
# `labkit.calibrate` times each stage of the job by itself, and beside the stages that it can
# meet: a copy takes longer while workers use the same memory. It runs no strategy.
# `labkit.predict_all` then runs the strategies above, as they are written, on a machine whose
# clock is calculated from these times.

# %%
costs = labkit.calibrate(job, size)
labkit.costs_table(costs)

# %%
predictions = labkit.predict_all([sequential, multi_worker], costs, size)
labkit.save_predictions(predictions, f"{results_dir}/records/02_predicted.json")
labkit.prediction_table(predictions, costs)

# %% [markdown]
# ## The run

# %%
record = labkit.measure(job, [sequential, multi_worker], size, predictions)
labkit.save_record(record, f"{results_dir}/records/02_multi_worker_output.json")
print(labkit.check_digests(record))
labkit.ladder_table(record)

# %%
labkit.show_figure(
    labkit.plot_ladder(record), f"{results_dir}/figures/02_multi_worker_output"
)

# %%
labkit.show_figure(
    labkit.plot_predictions(record), f"{results_dir}/figures/02_predicted_and_measured"
)

# %% [markdown]
# The digests are the first thing to look at. A fast pipeline with wrong bytes is worth nothing,
# and from here on every lab has a new way to get them wrong. `check_digests` holds the results
# of each strategy against `sequential`'s, and no gain is ever shown for a run that differs.

# %% [markdown]
# ## The timeline
#
# The strategy before and this one, one under the other in the same time scale. `process` has
# left the host's lane and is now in the workers', with `receive` before it: the worker taking
# the batch's bytes out of its pipe.

# %%
before = labkit.capture_timeline(job, sequential, size)
after = labkit.capture_timeline(job, multi_worker, size)
labkit.show_figure(
    labkit.plot_timelines(before, after, batches=2), f"{results_dir}/figures/02_timeline"
)

# %%
print(labkit.describe_timeline(after))
print(labkit.explain(predictions["multi_worker"], after))

# %% [markdown]
# The last line compares the steady state of the predicted run with the one that was recorded
# just now. Whatever it names, ask why a stage takes longer, or shorter, inside the loop than it
# did when it was calibrated.
#
# The same two on an NVIDIA H200, from traces of Nsight Systems that come with this course:

# %%
h200_before, h200_after = map(labkit.shipped_timeline, ["sequential", "multi_worker"])
labkit.show_figure(
    labkit.plot_timelines(h200_before, h200_after, batches=1),
    f"{results_dir}/figures/02_timeline_h200",
)

# %%
print(labkit.describe_timeline(h200_after))

# %% [markdown]
# ## What is left in the loop
#
# The loop now waits for the forward and for `.cpu()`. How long should these two take?

# %%
ceiling = record["ceiling"]
batch_ms = {row["name"]: job.batch / row["samples_per_s"] * 1e3 for row in record["strategies"]}
print(f"{gpu.name}:")
print(f"a batch in sequential      {batch_ms['sequential']:7.1f} ms")
print(f"a batch in multi_worker    {batch_ms['multi_worker']:7.1f} ms")
print(f"forward alone              {ceiling['forward_s'] * 1e3:7.1f} ms")
print(f"copy, if done well         {ceiling['copy_s'] * 1e3:7.1f} ms")

# %% [markdown]
# Forward and a good copy are far from adding up to the time of a batch. Three things eat the
# difference. `.cpu()` copies into memory that is *fresh* each time, and fresh memory is slow in
# a way that the next lab shows. It is also ordinary memory, which lab 4 replaces. And every
# batch goes through a pipe: the feeder thread copies it into the operating system, and the
# worker copies it out again, on the cores that the rest of the work needs too.

# %% [markdown]
# ## Exercises
#
# Take the line that raises `NotImplementedError` away, run the cell, then the check below it.
# Until then the check says "not attempted", and the notebook goes on.
#
# ### 2.1 Threads or processes?
#
# Three functions are to run beside the loop. Which should be given to threads, which to processes?
#
# * `as_bytes`, in a module: `scores.numpy().tobytes()`, one call that holds the interpreter lock.
# * `best_class`, in a module: `scores.argmax(dim=0)`, one call that gives the lock free.
# * `in_this_cell`: `lambda batch, scores: scores.amax(dim=0)`, written in this notebook.
#
# The check tells why: it runs the first two in a thread, beside a loop that only counts how long it
# is kept from running, and tries to give the third to a process.
#
# <details>
# <summary>Hint</summary>
#
# Two questions: can a new process get at the function at all? And if so, does a thread with it keep
# the loop from running?
#
# </details>

# %% tags=["stub"]
def threads_or_processes():
    """For each function "threads" or "processes"."""
    raise NotImplementedError  # take this line away, and fill in the three
    return {"as_bytes": ..., "best_class": ..., "in_this_cell": ...}


# %% tags=["check"]
checks.threads_or_processes(threads_or_processes, gpu)

# %% tags=["solution"]
def threads_or_processes():
    """For each function "threads" or "processes"."""
    return {
        "as_bytes": "processes",  # in a thread it would stop the loop that feeds the GPU
        "best_class": "threads",  # the lock is free, so sharing memory costs nothing
        "in_this_cell": "threads",  # a new process could not import it
    }


# %% [markdown]
# ### 2.2 The tensor that was handed over
#
# `.cpu()` allocates memory for each batch. This loop saves that: it allocates once and copies every
# batch into the same tensor. No error comes, and the results are wrong. Mend it.
#
# The check gives it one slow worker, and compares what comes back with each batch's own bytes.
#
# <details>
# <summary>Hint</summary>
#
# `submit` returns before the feeder thread has written the tensor's bytes into the pipe. Which
# batch's bytes are in the tensor when it does?
#
# </details>

# %% tags=["stub"]
import torch


def hand_over_all(job, workers):
    """`multi_worker`, for a job of its own."""
    raise NotImplementedError  # take this line away, and mend what follows
    host = torch.empty(job.output_shape, dtype=job.output_dtype)
    for index, images in enumerate(job.batches()):
        scores = job.forward(images)
        part = host[: len(scores)]  # the last batch may be smaller
        part.copy_(scores)
        workers.submit(index, part)
    return workers.results()


# %% tags=["check"]
checks.hand_over_all(hand_over_all, gpu)

# %% tags=["solution"]
def hand_over_all(job, workers):
    """`multi_worker`, for a job of its own."""
    for index, images in enumerate(job.batches()):
        scores = job.forward(images)
        workers.submit(index, scores.cpu())  # memory of its own, until its bytes are in the pipe
    return workers.results()


# %% [markdown]
# Memory of its own for each batch is what makes this loop slow. The next lab uses memory again
# without this mistake, by knowing when a piece of it is free.
#
# ## Key points
#
# * Workers take the processing off the loop. What remains is what the loop itself waits for.
# * Data for another process is copied, unless both share memory.
# * Processes for work that holds the interpreter lock, threads for work that releases it.
# * Results come back in any order. Somebody has to sort them, and to limit how many are under
#   way.
#
# ## Where to read on
#
# * [Multiprocessing best practices](https://docs.pytorch.org/docs/stable/notes/multiprocessing.html), PyTorch documentation
# * [Contexts and start methods](https://docs.python.org/3/library/multiprocessing.html#contexts-and-start-methods), Python documentation
#
# Next: [3. A pool of buffers](03_buffer_pool.ipynb) stops asking for fresh memory.
