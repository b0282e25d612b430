# %% [markdown]
# # 1. Profile the baseline
#
# A model segments a stream of image batches, and every per-pixel score has to get back to the
# CPU. The loop that does it is five lines of PyTorch, and it leaves the GPU idle most of the
# time. In this lab you find out where the time goes, and why the obvious timer does not tell.
#
# You need to know PyTorch. You need not have profiled anything before.
#
# **Time needed:** 35 minutes with reading and the exercises. Running all cells took TIME_NEEDED.
#
# After this lab you can
#
# * say what part of a loop's time the GPU really works;
# * time one stage of it so that the number means what it says;
# * mark the stages with NVTX ranges and see them in Nsight Systems.
#
# **Before you run it:** in the loop below, which line do you expect to take longest?

# %% tags=["parameters"]
device: str = "auto"  # auto, cuda or emulated
preset: str = "auto"  # auto, smoke, workshop or article
batches: int = 20  # in one run
images: str = ""  # a folder of photographs; empty for scikit-image's samples
weights: str = "random"  # random or pretrained
process: str = "archive"  # what becomes of the scores: archive or class_map
results_dir: str = "build"  # where figures and records go

# %% [markdown]
# ## The job
#
# The model is DeepLabV3 from torchvision, in `eval()` mode. It gives 21 scores for each pixel,
# and each score is a float32: 84 bytes for a pixel that came as three. Computing them is the
# GPU's business; moving them and consuming them is what this course is about.
#
# With a GPU, all of this runs on it. Without one it runs on an *emulated* device: streams,
# events and copies with the same names and rules, at the rates of an invented machine, and
# with real results that the CPU computed beforehand. Host memory, processes and files are
# real in both cases. Every figure and table says which of the two it shows.

# %%
import labkit
from labkit import annotate, checks

gpu = labkit.open_device(device)
size = labkit.get_preset(preset, gpu.kind, batches=batches)
job = labkit.segmentation_job(size, gpu, process, images=images, weights=weights)
print(f"device:  {gpu.name}")
print(f"input:   {job.count} batches of up to {job.batch} images, {size.image} x {size.image}")
print(f"output:  {job.output_shape} {job.output_dtype}, {job.output_bytes / 1e6:.1f} MB a batch")

# %% [markdown]
# ## The strategy: `sequential`
#
# Compute, copy, process: one after the other. `job.batches()` uploads one batch after another,
# `job.process` consumes a batch of scores on the host. Unless you choose otherwise it is
# `labkit.archive`, which copies all the bytes out and writes them to a sink, the null device,
# as one would to a file. `annotate` gives each stage a name and does nothing else; what that is
# good for comes below.


# %%
def sequential(job):
    """Compute, copy, process: one after the other, and nothing at the same time."""
    results = []
    for index, images in enumerate(job.batches()):
        with annotate("forward", index):
            scores = job.forward(images)  # queued on the device
        with annotate("copy", index, scores.nbytes):
            host = scores.cpu()  # waits for the forward, then copies into fresh memory
        with annotate("process", index):
            results.append(job.process(index, host))
    return results


# %% [markdown]
# Where do the scores lie on their way, and who moves them?

# %%
labkit.show_figure(
    labkit.plot_paths("sequential"), f"{results_dir}/figures/01_paths"
)

# %% [markdown]
# ## A timer that lies
#
# The obvious thing is to read the clock before and after each line.

# %%
import itertools
import time


def stage_times(job, wait):
    """Milliseconds of each stage for one batch; `wait` is called before each look at the clock."""
    image_batch = next(job.batches())
    wait()
    clock = [time.perf_counter()]
    scores = job.forward(image_batch)
    wait()
    clock.append(time.perf_counter())
    host = scores.cpu()
    wait()
    clock.append(time.perf_counter())
    job.process(0, host)
    clock.append(time.perf_counter())
    return [(end - start) * 1e3 for start, end in itertools.pairwise(clock)]


def show(times):
    print(f"{gpu.name}, one batch:")
    for name, ms in zip(("forward", "copy", "process"), times, strict=True):
        print(f"{name:8} {ms:8.1f} ms")


gpu.synchronize()
stage_times(job, wait=lambda: None)  # the first time pays for things that happen once
show(stage_times(job, wait=lambda: None))

# %% [markdown]
# By this account the forward costs little and the copy is to blame. That is false. Calls that
# give the GPU work only *queue* it and return. Each piece of work is a *kernel*, a function that
# runs on the GPU; they stand in a *stream*, a queue that the GPU works off in order. `forward`
# returned before its result was there, and `.cpu()`, the first line that needs the result, had
# to wait for it. So the copy got the blame for the computation.
#
# The cure is to wait for the device before each look at the clock, with `synchronize()`.

# %%
times = stage_times(job, wait=gpu.synchronize)
show(times)
print(f"\nof these {sum(times):.0f} ms it computes {times[0]:.0f}: {times[0] / sum(times):.0%}")

# %% [markdown]
# Waiting like this costs time itself, since nothing overlaps any more. It is right for finding
# out what a stage costs and wrong inside the loop that one wants to be fast. `labkit.measure`
# therefore waits only at the ends: its clock starts with the device idle and stops when the
# last *result* is back. Before that it warms up with every batch shape, and afterwards it
# repeats and gives the median with the spread.
#
# ## The run
#
# The **ceiling** is what no strategy can pass, but for the error of measuring: of forward, copy
# and process, each measured alone, the slowest one. `process` counts as if all workers did it at
# once. A *sample* is one image. *Busy* is what the forwards alone would take, as a share of the
# run. The *digest* is a fingerprint of all results: from lab 2 on it tells whether another
# strategy gave the same ones.

# %%
record = labkit.measure(job, [sequential], size)
labkit.save_record(record, f"{results_dir}/records/01_profile_the_baseline.json")
print(labkit.check_digests(record))
labkit.ladder_table(record)

# %%
labkit.show_figure(
    labkit.plot_ladder(record), f"{results_dir}/figures/01_profile_the_baseline"
)

# %%
share = record["strategies"][0]["gpu_busy"]
print(f"{gpu.name}: computing {share:.0%} of the time. The other four labs are about the rest.")

# %% [markdown]
# ## Seeing it: a timeline
#
# Timers answer the questions that you thought of. A timeline shows the others too: what the
# loop, the device and every process did, on one time axis. This one is taken live while the
# loop runs. The host's bars are the names that `annotate` gave; the device's come from events
# in its stream, which is what lab 4 is about, or from the emulated device's own record.

# %%
timeline = labkit.capture_timeline(job, sequential, size)
labkit.show_figure(
    labkit.plot_timelines(timeline, batches=2), f"{results_dir}/figures/01_timeline"
)

# %% [markdown]
# The number in a bar is its batch. The top lane is what the loop does or waits for, the others
# what the device really does: `upload` brings the images, `compute` runs kernels, `copy` takes
# the scores back.
#
# Look at the bar `copy` in the host's lane: it begins while the device still computes. That is
# the wrong blame from above, to be seen. And look at the tinted stretches of the lane
# `compute`, where the device computes nothing. What is the loop doing meanwhile?
#
# The table counts the *steady state*: the middle half of the run, without its two ends. For each
# thing that the device waits for it gives the time in which no kernel ran.

# %%
labkit.metrics_table(labkit.summarize(timeline, timeline.steady()))

# %%
print(labkit.describe_timeline(timeline))

# %% [markdown]
# Here is the same loop on a GPU: an NVIDIA H200, recorded with Nsight Systems. The trace comes
# with this course, and the figure is drawn from it here and now. Its bars `copy` are mostly the
# processor at work: with ordinary memory the copy engine only brings the bytes half of the way,
# as lab 4 explains.

# %%
on_h200 = labkit.shipped_timeline("sequential")
labkit.show_figure(
    labkit.plot_timelines(on_h200, batches=2), f"{results_dir}/figures/01_timeline_h200"
)

# %%
print(labkit.describe_timeline(on_h200))

# %% [markdown]
# ## Nsight Systems and NVTX
#
# Nsight Systems records by itself what the GPU did: every kernel, every copy, its bytes, and
# whether the host's side of it was page-locked. What your *program* was doing it learns from
# NVTX ranges. `annotate` opens one for each name, with the batch's number as its payload. In a
# program without `labkit` you would write `with nvtx.annotate("forward"):` yourself. Ranges cost
# next to nothing while no profiler listens, and work on machines without a GPU.
#
# From a shell,
#
# ```
# labkit profile sequential
# ```
#
# takes such a timeline: with Nsight Systems where it is installed, otherwise with
# `torch.profiler`, and without a GPU from the emulated device. It prints the table above, draws
# the figure, and writes a trace that you can open and zoom at https://ui.perfetto.dev.
#
# To use the Nsight Systems window itself, record this very notebook:
#
# ```
# nsys profile --trace=cuda,nvtx --sample=none --output=baseline labkit run 01 -p batches=4
# ```
#
# Open `baseline.nsys-rep`. It holds the whole notebook, so zoom to the last group of `forward`,
# `copy` and `process` in the NVTX row above the CUDA rows. The range `forward` is the time for
# *queuing* the kernels. The GPU starts with the first of them, but most run under the range
# `copy`, where the host waits. Then comes the memory copy, and then a long stretch in which the
# GPU rows are empty: the loop is in `process`. Recording takes time itself: compare shares, not
# milliseconds.

# %% [markdown]
# ## Exercises
#
# Each one starts with a line that raises `NotImplementedError`. While it stands there, the check
# below says "not attempted" and the notebook goes on. Take it away, run the cell and the check to
# see what is wrong, and mend it. A check runs your function on the device that is open, with a
# small job of its own whose forward is held up, so that a mistake shows on a fast GPU too.
#
# ### 1.1 Whose time is it?
#
# This timer is to say what the copy of one batch's scores takes, and nothing else. It does what
# many timers do, and blames the copy for the kernel's time. Mend it.
#
# The check compares what it returns with the time of the copy alone.
#
# <details>
# <summary>Hint</summary>
#
# Where is the device in its work when the clock is read for the first time?
#
# </details>

# %% tags=["stub"]
def time_copy(job, device):
    """Milliseconds that it takes to copy one batch's scores to the host, without the forward."""
    raise NotImplementedError  # take this line away, and mend what follows
    scores = job.forward(next(job.batches()))
    start = time.perf_counter()
    scores.cpu()
    return (time.perf_counter() - start) * 1e3


# %% tags=["check"]
checks.time_copy(time_copy, gpu)

# %% tags=["solution"]
def time_copy(job, device):
    """Milliseconds that it takes to copy one batch's scores to the host, without the forward."""
    scores = job.forward(next(job.batches()))
    device.synchronize()  # the forward was only queued: wait until it is done
    start = time.perf_counter()
    scores.cpu()  # returns when the bytes are here, so the second look needs no waiting
    return (time.perf_counter() - start) * 1e3


# %% [markdown]
# ### 1.2 Launched or done?
#
# How many batches can the device compute in a second, when nothing is copied back? The rate that
# this function gives is too good to be true. Mend it, without waiting after each batch.
#
# The check compares it with the rate at which batches really get done.
#
# <details>
# <summary>Hint</summary>
#
# The loop ends when the last forward is queued. What has to happen before the clock is stopped?
# And before it is started?
#
# </details>

# %% tags=["stub"]
def forward_rate(job, device):
    """Batches per second that the device computes."""
    raise NotImplementedError  # take this line away, and mend what follows
    start = time.perf_counter()
    for images in job.batches():
        job.forward(images)
    return job.count / (time.perf_counter() - start)


# %% tags=["check"]
checks.forward_rate(forward_rate, gpu)

# %% tags=["solution"]
def forward_rate(job, device):
    """Batches per second that the device computes."""
    device.synchronize()  # nothing from before may run into the measured time
    start = time.perf_counter()
    for images in job.batches():
        job.forward(images)
    device.synchronize()  # once, at the end: in between the device is never idle
    return job.count / (time.perf_counter() - start)


# %% [markdown]
# ## Key points
#
# * A call that gives the GPU work returns before the work is done.
# * The first call that needs the result waits, and gets the blame. Synchronise before you read
#   a clock.
# * Stop the clock when the last result is back, not when the last batch is launched.
# * In this loop the GPU waits for the host most of the time.
#
# ## Where to read on
#
# * [CUDA semantics: asynchronous execution](https://docs.pytorch.org/docs/stable/notes/cuda.html#asynchronous-execution), PyTorch documentation
# * [Nsight Systems user guide](https://docs.nvidia.com/nsight-systems/UserGuide/index.html), NVIDIA
# * [NVTX for Python](https://nvidia.github.io/NVTX/python/), NVIDIA
#
# Next: [2. Multi-worker output](02_multi_worker_output.ipynb) takes `process` off the loop.
