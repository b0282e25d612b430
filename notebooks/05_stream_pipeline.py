# %% [markdown]
# # 5. A pipeline of streams
#
# The GPU has engines for computing and other engines for copying. In one stream they take
# turns. This lab gives the copies a stream of their own, and what remains is the time of the
# slowest stage alone: the ceiling.
#
# **Time needed:** 40 minutes with reading and the exercises. Running all cells took TIME_NEEDED.
#
# After this lab you can
#
# * run copies beside kernels, and say what keeps them in the right order;
# * say which waits a pipeline of streams needs, and what it must promise about memory;
# * send less, and run your own model through the same pipeline.
#
# **Before you run it:** forward and copy now run at the same time. What stops the copy of a
# batch from starting before its forward is done?

# %% tags=["parameters"]
device: str = "auto"  # auto, cuda or emulated
preset: str = "auto"  # auto, smoke, workshop or article
batches: int = 20  # in one run
images: str = ""  # a folder of photographs; empty for scikit-image's samples
weights: str = "random"  # random or pretrained
compiled: bool = False  # in the coda, also torch.compile the model (takes minutes)
process: str = "archive"  # what becomes of the scores: archive or class_map
results_dir: str = "build"  # where figures and records go

# %%
from collections import deque

import labkit
from labkit import annotate, checks
from labkit.pipelines import buffer_pool, hand_over, multi_worker, pinned_async, sequential
from labkit.presets import check_depth

gpu = labkit.open_device(device)
size = labkit.get_preset(preset, gpu.kind, batches=batches)
job = labkit.segmentation_job(size, gpu, process, images=images, weights=weights)
print(f"{gpu.name}; {job.count} batches, {job.output_bytes / 1e6:.1f} MB of scores each")

# %% [markdown]
# ## Streams
#
# A stream is a queue of work for the GPU, done in order. Two streams know nothing of each
# other: their work runs at the same time, or in any order, unless you say otherwise. There are
# two ways to say so, and neither makes the host wait: `stream.wait_event(event)` and its
# shorthand `stream.wait_stream(other)`. (In plain CUDA the default stream is an exception: it
# and other streams wait for each other. PyTorch makes its streams so that they do not.)
#
# Below, a forward and a copy of *another* batch's scores are queued, first both in one stream,
# then the copy in a second one.

# %%
import statistics
import time


def both(copy_stream, repeats=5):
    """Median ms for a forward, with a copy of other scores queued on `copy_stream`."""
    image_batch = next(job.batches())
    scores = job.forward(image_batch)
    milliseconds = []
    with labkit.BufferPool(
        gpu, job.output_shape, job.output_dtype, slots=1, page_locked=True
    ) as pool:
        slot = pool.acquire()
        for _ in range(repeats):
            gpu.synchronize()
            start = time.perf_counter()
            with gpu.stream(copy_stream):
                slot.copy_(scores, non_blocking=True)
            job.forward(image_batch)
            gpu.synchronize()
            milliseconds.append((time.perf_counter() - start) * 1e3)
    return statistics.median(milliseconds)


print(f"{gpu.name}:")
print(f"one stream:  {both(gpu.current_stream()):7.1f} ms")
print(f"two streams: {both(gpu.Stream()):7.1f} ms")

# %% [markdown]
# ## The strategy: `stream_pipeline`
#
# Three lines keep it right. The first two guard against wrong bytes that no error would tell
# of, the third against a slot that `submit` would refuse:
#
# * `copy_stream.wait_stream(...)`: the copy starts when the forward is done, not before.
# * `scores.record_stream(copy_stream)`: when the loop drops `scores`, PyTorch's allocator may
#   hand its memory to the next tensor of the stream that it was allocated on. Within that
#   stream the order of work makes this safe. The copy stream may still be reading, and after
#   this call the allocator keeps the memory back until that stream has got past all that was
#   queued on it when `scores` was dropped. Meanwhile it takes other memory.
# * `hand_over`, from lab 4, waits for `slot.event`: no worker gets a slot before its bytes are
#   here. `slot.copy_` stands inside `with device.stream(...)`, so its event is on that stream too.
#
# The images take the other way with a stream of their own as well: `job.batches(stream=...)`
# uploads the next batch while the GPU computes. It needs the same care the other way round: the
# computing stream waits for the upload, and `record_stream` keeps the images until the forward
# has read them. PyTorch has 32 streams and hands them out in turn, so two that are made one
# after the other are never the same.
#
# `depth` is how many copies may be in flight before the loop waits for the oldest.


# %%
class StreamPipeline:
    """Copies outputs to page-locked slots on a copy stream; `depth` copies may be in flight."""

    def __init__(self, device, workers, pinned_pool, depth=2):
        self.device, self.workers, self.pool = device, workers, pinned_pool
        self.depth = check_depth(depth, pinned_pool.slots)
        self.copy_stream = device.Stream()
        self.in_flight = deque()  # (batch index, slot), oldest first

    def submit(self, index, scores):
        """Queue the copy of `scores`, on the device, to the host. Returns before it is done."""
        if len(self.in_flight) == self.depth:
            hand_over(self.workers, *self.in_flight.popleft())
        slot = self.pool.acquire()
        self.copy_stream.wait_stream(self.device.current_stream())  # not before the forward
        with self.device.stream(self.copy_stream), annotate("copy", index, scores.nbytes):
            slot.copy_(scores, non_blocking=True)
        scores.record_stream(self.copy_stream)  # keep its memory until the copy has read it
        self.in_flight.append((index, slot))

    def results(self):
        """Wait for everything; what `process` returned, in batch order."""
        while self.in_flight:
            hand_over(self.workers, *self.in_flight.popleft())
        return self.workers.results()


# %%
def stream_pipeline(job, workers, pinned_pool, depth=2):
    """Copies run on streams of their own, both ways, beside another batch's forward."""
    pipeline = StreamPipeline(job.device, workers, pinned_pool, depth)
    for index, images in enumerate(job.batches(stream=job.device.Stream())):
        with annotate("forward", index):
            scores = job.forward(images)
        pipeline.submit(index, scores)
    return pipeline.results()


# %% [markdown]
# The way is the same as before. What is new is that the copy stands in a stream of its own.

# %%
labkit.show_figure(
    labkit.plot_paths("pinned_async", "stream_pipeline"), f"{results_dir}/figures/05_paths"
)

# %% [markdown]
# ## Predict, then measure
#
# If forward and copy run at the same time, which of them sets the pace? And what may the slower
# one take before it does?

# %%
strategies = [sequential, multi_worker, buffer_pool, pinned_async, stream_pipeline]
costs = labkit.calibrate(job, size)
predictions = labkit.predict_all(strategies, costs, size)
labkit.save_predictions(predictions, f"{results_dir}/records/05_predicted.json")
labkit.prediction_table(predictions, costs)

# %% [markdown]
# ## The run: the whole ladder

# %%
record = labkit.measure(job, strategies, size, predictions)
labkit.save_record(record, f"{results_dir}/records/05_stream_pipeline.json")
print(labkit.check_digests(record))
labkit.ladder_table(record)

# %%
labkit.show_figure(labkit.plot_ladder(record), f"{results_dir}/figures/05_stream_pipeline")

# %%
labkit.show_figure(
    labkit.plot_predictions(record), f"{results_dir}/figures/05_predicted_and_measured"
)

# %% [markdown]
# ## The timeline
#
# The lanes `compute` and `copy` no longer take turns: each batch's copy runs beside the forward
# of the next one. On a GPU the host's bars `forward` may be longer than before: when the loop is
# far ahead, its queue for the GPU is full, and then even queuing has to wait.

# %%
before = labkit.capture_timeline(job, pinned_async, size)
after = labkit.capture_timeline(job, stream_pipeline, size)
labkit.show_figure(
    labkit.plot_timelines(before, after, batches=4), f"{results_dir}/figures/05_timeline"
)

# %%
print(labkit.describe_timeline(after))
print(labkit.explain(predictions["stream_pipeline"], after))

# %% [markdown]
# The same two on an NVIDIA H200, from traces of Nsight Systems that come with this course:

# %%
h200_before, h200_after = map(labkit.shipped_timeline, ["pinned_async", "stream_pipeline"])
labkit.show_figure(
    labkit.plot_timelines(h200_before, h200_after, batches=4),
    f"{results_dir}/figures/05_timeline_h200",
)

# %%
print(labkit.describe_timeline(h200_after))

# %% [markdown]
# What still separates the last bar from the ceiling is mostly the two ends of a run: the first
# batch has nothing to overlap with, and the last one is still being processed when the GPU has
# long finished. The longer the run, the less they count.

# %%
row, ceiling = record["strategies"][-1], record["ceiling"]
total_s = job.samples / row["samples_per_s"]
ends_s = ceiling["slot_copy_s"] + ceiling["process_s"]
print(f"{gpu.name}:")
print(f"the run takes {total_s:.3f} s; copying and processing the last batch alone is "
      f"{ends_s:.3f} s of it, {ends_s / total_s:.0%}")
print(f"the ceiling is set by {ceiling['limited_by']}")

# %% [markdown]
# ## What next, and what is enough
#
# A predictor that is right can be asked what no run has shown yet: how few workers and slots
# would do, and which single change buys most from here. (`labkit predict --advise` asks it from a
# shell.)

# %%
labkit.advice_table(labkit.advise(costs, size), "stream_pipeline")

# %% [markdown]
# Here you can ask anything else. Every knob that you turn is predicted anew. Try: which number
# of workers makes the GPU wait when processing takes four times as long? When does the copy
# become the slowest stage, and what does bfloat16 change then? The second machine to choose is
# the NVIDIA H200 whose costs come with this course.

# %%
labkit.explore(costs, labkit.shipped_costs())

# %% [markdown]
# ## Coda: send less
#
# The pipeline hides the copy behind the forward. The next gain does not come from more streams
# but from fewer bytes and a shorter forward. Whoever needs only the best class of each pixel
# can have the GPU choose it, and send one byte instead of 84. Whoever needs the scores, but not
# all of their digits, can send them as bfloat16. Each is a few lines around the model.

# %%
import torch


class BestClass(torch.nn.Module):
    """Scores [n, classes, h, w] to the best class of each pixel: uint8 [n, h, w]."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, images):
        return self.model(images).argmax(dim=1).to(torch.uint8)


class LowPrecision(torch.nn.Module):
    """The same scores in bfloat16; on a GPU the model computes in it too, where that is safe."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, images):
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=images.is_cuda):
            return self.model(images).to(torch.bfloat16)


model = job.model_module
variants = {
    "scores, float32": model,
    "scores, bfloat16": LowPrecision(model),
    "best class, from float32": BestClass(model),
    "best class, from bfloat16": BestClass(LowPrecision(model)),
}
if compiled and gpu.kind == "cuda":
    variants["best class, from bfloat16, compiled"] = torch.compile(BestClass(LowPrecision(model)))

photographs = job.inputs[: 2 * job.batch]  # used again and again, as many as there are samples
print(f"{gpu.name}:")
for name, variant in variants.items():
    leaner = labkit.Job(variant, photographs, labkit.archive, gpu, job.batch, job.samples)
    leaner_record = labkit.measure(leaner, [stream_pipeline], size)
    rate = leaner_record["strategies"][0]["samples_per_s"]
    limit = leaner_record["ceiling"]
    print(f"{name:36} {leaner.output_bytes / 1e6:7.2f} MB  {rate:8,.0f} samples/s, "
          f"ceiling {limit['samples_per_s']:8,.0f} ({limit['limited_by']})")
    leaner.close()

# %% [markdown]
# On the emulated device a kernel's time follows from its floating-point operations alone, so
# there bfloat16 makes only the copy shorter. On a GPU it shortens both, and then the slowest
# stage may be another one: look at what sets each ceiling.
#
# ## Coda: your own model
#
# A job is any model that maps a batch to one tensor, and any importable function that consumes
# it. Nothing in the pool, the workers or the pipeline knows about segmentation.

# %%
own_model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(16, 8, 1)
)
own_inputs = torch.randn(10, 3, 64, 64)
own_job = labkit.Job(own_model, own_inputs, labkit.archive, gpu, batch=4)

with (
    labkit.BufferPool(
        gpu, own_job.output_shape, own_job.output_dtype, slots=2, page_locked=True
    ) as pool,
    labkit.OutputWorkers(labkit.archive, 2, pool) as workers,
):
    pipeline = StreamPipeline(gpu, workers, pool, depth=2)
    for index, batch in enumerate(own_job.batches()):
        pipeline.submit(index, own_job.forward(batch))
    fingerprints = pipeline.results()

print(*fingerprints, sep="\n")

# %% [markdown]
# ## Exercises
#
# Take the line that raises `NotImplementedError` away, run the cell, then the check below it.
# Until then the check says "not attempted", and the notebook goes on.
#
# ### 5.1 The copy that does not wait
#
# The heart of `StreamPipeline.submit`, with one line missing. `scores` was computed, or rather
# queued, on the current stream. Mend it; the host must not wait.
#
# The check queues every batch, keeps all scores, then waits for the device and compares the slots.
#
# <details>
# <summary>Hint</summary>
#
# What stops the copy stream, which has nothing else to do, from copying before there are scores?
#
# </details>

# %% tags=["stub"]
def copy_beside(scores, slot, copy_stream, device):
    """Queue the copy of `scores` into `slot` on `copy_stream`. Returns at once."""
    raise NotImplementedError  # take this line away, and mend what follows
    with device.stream(copy_stream):
        slot.copy_(scores, non_blocking=True)


# %% tags=["check"]
checks.copy_beside(copy_beside, gpu)

# %% tags=["solution"]
def copy_beside(scores, slot, copy_stream, device):
    """Queue the copy of `scores` into `slot` on `copy_stream`. Returns at once."""
    copy_stream.wait_stream(device.current_stream())  # the device waits, the host goes on
    with device.stream(copy_stream):
        slot.copy_(scores, non_blocking=True)


# %% [markdown]
# ### 5.2 The tensor freed under a running copy
#
# The same function with the right wait in it, but another caller: this one drops each batch's
# scores as soon as the copy is queued, as the loop of `stream_pipeline` does, while the copy stream
# is busy with something else and late. Again one line is missing.
#
# The check compares the slots in the end, and says whose bytes they have.
#
# <details>
# <summary>Hint</summary>
#
# To whom does PyTorch's allocator give the memory of the dropped scores, and when does the copy
# read it? Where in the text above was that mended?
#
# </details>

# %% tags=["stub"]
def copy_and_forget(scores, slot, copy_stream, device):
    """Queue the copy of `scores`, which the caller then drops, into `slot` on `copy_stream`."""
    raise NotImplementedError  # take this line away, and mend what follows
    copy_stream.wait_stream(device.current_stream())
    with device.stream(copy_stream):
        slot.copy_(scores, non_blocking=True)


# %% tags=["check"]
checks.copy_and_forget(copy_and_forget, gpu)

# %% tags=["solution"]
def copy_and_forget(scores, slot, copy_stream, device):
    """Queue the copy of `scores`, which the caller then drops, into `slot` on `copy_stream`."""
    copy_stream.wait_stream(device.current_stream())
    with device.stream(copy_stream):
        slot.copy_(scores, non_blocking=True)
    scores.record_stream(copy_stream)  # its memory stays out of use until the copy has read it


# %% [markdown]
# ## Key points
#
# * Copies and kernels use different engines. In two streams they run at the same time.
# * Streams wait for each other only where you say so, and the host need not wait at all.
# * Memory that another stream still reads has to be protected from reuse.
# * At the ceiling, the way on is a cheaper slowest stage: send less, compute less.
#
# ## Where to read on
#
# * [CUDA streams](https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams), PyTorch documentation
# * [`torch.Tensor.record_stream`](https://docs.pytorch.org/docs/stable/generated/torch.Tensor.record_stream.html), PyTorch documentation
# * [CUDA C++ best practices guide](https://docs.nvidia.com/cuda/cuda-c-best-practices-guide/): asynchronous and overlapping transfers with computation, NVIDIA
# * [Automatic mixed precision](https://docs.pytorch.org/docs/stable/amp.html) and [`torch.compile`](https://docs.pytorch.org/docs/stable/generated/torch.compile.html), PyTorch documentation
