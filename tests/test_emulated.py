"""What only the emulated device shows each time: the wrong bytes that forgetting to wait gives.

Its copies are slow here, so what runs beside one ends long before it does.
"""

import copy
import gc
import pickle
import threading

import pytest
import torch
from helpers import INSTANT, SLOW_COPY, Tiny, images, make_device, profile, stalled, wait_until

from labkit import LabError, open_device

pytestmark = pytest.mark.timeout(60, method="signal")

COPY_S = 32 * 1024 / SLOW_COPY.pinned_bytes_per_s  # of the scores of 8 images


@pytest.fixture
def inputs():
    return images(24)


@pytest.fixture
def expected(inputs):
    return Tiny()(inputs)


@pytest.fixture
def device():
    return make_device("emulated", SLOW_COPY)


@pytest.fixture
def model(device, inputs):
    device.page_lock(inputs)
    return device.load(Tiny(), inputs)


@pytest.fixture
def host(device):
    host = torch.full((8, 4, 16, 16), 7.0)
    device.page_lock(host)
    return host


# Reading too early.


def test_a_reader_that_does_not_wait_sees_old_bytes(device, model, inputs, expected, host):
    scores = model(device.upload(inputs[:8]))
    with stalled(device):
        host.copy_(scores, non_blocking=True)
        assert (host == 7).all()
    device.synchronize()
    assert torch.equal(host, expected[:8])


def test_non_blocking_to_cpu_gives_a_tensor_without_its_bytes(device, model, inputs, expected):
    scores = model(device.upload(inputs[:8]))
    with stalled(device):
        host = scores.to("cpu", non_blocking=True)
        assert (host == 0).all()
    device.synchronize()
    assert torch.equal(host, expected[:8])


def test_bytes_arrive_while_a_copy_runs():
    device = make_device("emulated", profile("slow", copy_bytes_per_s=50e6))
    source, host = torch.ones(3 * 2**20), torch.zeros(3 * 2**20)  # 12 MiB: 0.25 s
    tensor = device.upload(source)
    device.page_lock(host)
    host.copy_(tensor, non_blocking=True)
    assert wait_until(lambda: host[0] == 1)
    assert host[-1] == 0
    device.synchronize()
    assert torch.equal(host, source)


def test_a_copy_that_does_not_wait_for_the_kernel_takes_what_was_there(
    device, model, inputs, expected, host
):
    batch = device.upload(inputs[:8])
    copies = device.Stream()
    with stalled(device):
        scores = model(batch)
        with device.stream(copies):
            host.copy_(scores, non_blocking=True)
        copies.synchronize()
    device.synchronize()
    assert not (host == expected[:8]).any()
    assert (host.view(torch.uint8) == 0xCD).all()  # never written to


def test_a_copy_that_does_not_wait_takes_the_batch_before(device, model, inputs, expected, host):
    model(device.upload(inputs[:8]))
    batch = device.upload(inputs[8:16])
    copies = device.Stream()
    with stalled(device):
        scores = model(batch)  # in the memory of the first, which nobody kept
        with device.stream(copies):
            host.copy_(scores, non_blocking=True)
        copies.synchronize()
    assert torch.equal(host, expected[:8])


# Memory reused under a running copy.


def _copy_then_drop(device, model, inputs, host, record_stream, keep):
    copies = device.Stream()
    batches = [device.upload(inputs[:8]), device.upload(inputs[8:16])]
    scores = model(batches[0])
    copies.wait_stream(device.current_stream())
    with device.stream(copies):
        host.copy_(scores, non_blocking=True)
        arrived = copies.record_event()
    if record_stream:
        scores.record_stream(copies)
    kept = scores if keep else None
    del scores
    model(batches[1])
    device.current_stream().synchronize()
    assert not arrived.query(), "the kernel did not end while the copy was running"
    arrived.synchronize()
    return kept


def test_without_record_stream_a_running_copy_reads_the_next_batch(
    device, model, inputs, expected, host
):
    _copy_then_drop(device, model, inputs, host, record_stream=False, keep=False)
    assert torch.equal(host, expected[8:16])


@pytest.mark.parametrize("protection", ["record_stream", "keep"])
def test_record_stream_or_a_reference_protects_a_running_copy(
    device, model, inputs, expected, host, protection
):
    flags = {"record_stream": False, "keep": False, protection: True}
    _copy_then_drop(device, model, inputs, host, **flags)
    assert torch.equal(host, expected[:8])


def test_a_partly_overwritten_copy_is_a_mixture_of_both():
    slow = make_device("emulated", profile("slow", copy_bytes_per_s=50e6))
    model = torch.nn.Identity()
    inputs = torch.stack([torch.full((3 * 2**20,), 1.0), torch.full((3 * 2**20,), 2.0)])
    run = slow.load(model, inputs)
    batches = [slow.upload(inputs[:1]), slow.upload(inputs[1:])]
    host, copies = torch.zeros(1, 3 * 2**20), slow.Stream()
    slow.page_lock(host)
    scores = run(batches[0])
    copies.wait_stream(slow.current_stream())
    with slow.stream(copies):
        host.copy_(scores, non_blocking=True)
    del scores
    assert wait_until(lambda: host[0, 0] == 1)
    run(batches[1])
    slow.synchronize()
    assert host[0, 0] == 1 and host[0, -1] == 2


def test_memory_is_reused_once_nobody_reads_it(device, model, inputs):
    batch = device.upload(inputs[:8])
    first = model(batch).block
    assert model(batch).block is first
    default, other = device.current_stream(), device.Stream()
    scores = model(batch)
    with device.stream(other), stalled(device):
        scores.record_stream(other)
        del scores
        with device.stream(default):
            assert model(batch).block is not first
    device.synchronize()
    assert first in {model(batch).block, model(batch).block}


def test_a_stream_does_not_take_the_memory_of_another(device, model, inputs):
    batch = device.upload(inputs[:8])
    first = model(batch).block
    device.synchronize()
    with device.stream(device.Stream()):
        assert model(batch).block is not first


def test_many_batches_take_the_memory_of_few(device, model, inputs):
    copies, blocks = device.Stream(), set()
    host = torch.zeros(1, 4, 16, 16)
    device.page_lock(host)
    for _ in range(50):
        scores = model(device.upload(inputs[:1]))
        blocks.add(scores.block)
        copies.wait_stream(device.current_stream())
        with device.stream(copies):
            host.copy_(scores, non_blocking=True)
        scores.record_stream(copies)
        copies.synchronize()
    assert len(blocks) <= 3


# Results belong to images.


def test_images_that_the_model_was_not_loaded_with_give_garbage(device, model, inputs, expected):
    batch = torch.cat([inputs[:1], 255 - inputs[1:2], inputs[2:3]])
    scores = model(device.upload(batch)).cpu()
    assert torch.equal(scores[0], expected[0]) and torch.equal(scores[2], expected[2])
    assert (scores[1].contiguous().view(torch.uint8) == 0xCD).all()


def test_images_may_come_in_any_order(device, model, inputs, expected):
    order = torch.tensor([5, 3, 3, 23, 0])
    assert torch.equal(model(device.upload(inputs[order])).cpu(), expected[order])


def test_images_may_repeat(device, inputs, expected):
    model = device.load(Tiny(), torch.cat([inputs[:4]] * 3))
    assert torch.equal(model(device.upload(inputs[:4])).cpu(), expected[:4])


def test_an_upload_that_is_overwritten_too_early_gives_wrong_results(
    device, model, inputs, expected
):
    images = inputs[:8].clone()
    device.page_lock(images)
    with stalled(device):
        batch = device.upload(images)
        scores = model(batch)
        images.copy_(inputs[8:16])
    assert torch.equal(scores.cpu(), expected[8:16])


# What it does not do.


OPERATIONS = {
    "add": lambda t: t + 1,
    "mul": lambda t: 2 * t,
    "add_": lambda t: t.add_(1),
    "argmax": lambda t: t.argmax(dim=1),
    "softmax": lambda t: torch.softmax(t, 1),
    "max": torch.max,
    "half": lambda t: t.half(),
    "getitem": lambda t: t[0],
    "setitem": lambda t: t.__setitem__(0, 1.0),
    "numpy": lambda t: t.numpy(),
    "item": lambda t: t.item(),
    "tolist": lambda t: t.tolist(),
    "bool": bool,
    "clone": lambda t: t.clone(),
    "view": lambda t: t.view(-1),
    "cat": lambda t: torch.cat([t, t]),
    "empty_like": torch.empty_like,
    "zero_": lambda t: t.zero_(),
    "device": lambda t: t.device,
    "is_cuda": lambda t: t.is_cuda,
    "deepcopy": copy.deepcopy,
    "reduce_ex": pickle.dumps,
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_other_operations_are_refused_by_name(device, name):
    tensor = device.upload(torch.zeros(4, 3))
    with pytest.raises(LabError) as refusal:
        OPERATIONS[name](tensor)
    message = str(refusal.value)
    assert "\n" not in message
    assert name.strip("_") in message.split("'")[1]
    assert ".cpu()" in message


TRANSFERS = {
    "to a type": lambda t: t.to(torch.float16),
    "to a type as well": lambda t: t.to("cpu", torch.float16),
    "to a named type": lambda t: t.to("cpu", dtype=torch.float16),
    "to another device": lambda t: t.to("cuda"),
    "from the device": lambda t: t.copy_(t),
    "another type": lambda t: torch.zeros(4, 3, dtype=torch.float16).copy_(t),
    "another shape": lambda t: torch.zeros(3, 4).copy_(t),
    "a broadcast": lambda t: torch.zeros(2, 4, 3).copy_(t),
    "a gap in host memory": lambda t: torch.zeros(4, 6)[:, ::2].copy_(t),
}


@pytest.mark.parametrize("name", TRANSFERS)
def test_other_copies_are_refused_in_one_line(device, name):
    tensor = device.upload(torch.zeros(4, 3))
    with pytest.raises(LabError) as refusal:
        TRANSFERS[name](tensor)
    assert "\n" not in str(refusal.value)
    assert torch.equal(tensor.cpu(), torch.zeros(4, 3))


def test_a_model_takes_device_tensors_only(model, inputs):
    with pytest.raises(LabError, match="upload"):
        model(inputs[:8])


def test_a_device_tensor_prints_without_its_bytes(device):
    tensor = device.upload(torch.zeros(4, 3))
    assert repr(tensor) == "DeviceTensor(shape=(4, 3), dtype=torch.float32, on the device)"


# Errors come late.


def test_what_fails_in_a_kernel_is_raised_where_the_host_waits(emulated):
    stream = emulated.Stream()
    with emulated.stream(stream):
        emulated.launch(0.0, lambda: 1 / 0)
        event = stream.record_event()
    for wait in (event.synchronize, stream.synchronize, emulated.synchronize):
        with pytest.raises(LabError, match="ZeroDivisionError"):
            wait()


# Time is the profile's.


def test_an_operation_takes_the_time_of_the_profile():
    device = make_device("emulated", profile("timed", 0.02, 4e6, pageable_bytes_per_s=1e6))
    inputs = images(8)
    model = device.load(Tiny(), inputs)
    device.page_lock(inputs)
    pinned, pageable = torch.zeros(8, 4, 16, 16), torch.zeros(8, 4, 16, 16)
    device.page_lock(pinned)
    batch = device.upload(inputs)
    times = []

    def timed(action):
        start, end = device.Event(enable_timing=True), device.Event(enable_timing=True)
        start.record()
        result = action()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
        return result

    scores = timed(lambda: model(batch))
    timed(lambda: pinned.copy_(scores, non_blocking=True))
    timed(lambda: pageable.copy_(scores, non_blocking=True))
    nbytes = scores.nbytes
    assert times[0] >= 19.9
    assert times[1] >= nbytes / 4e6 * 1e3 - 0.1
    assert times[2] >= nbytes / 1e6 * 1e3 - 0.1


def test_two_kernels_take_turns_whatever_their_streams(emulated):
    events = []
    start = emulated.Event(enable_timing=True)
    start.record()
    for _ in range(3):
        with emulated.stream(emulated.Stream()):
            emulated.launch(0.02, lambda: None)
            event = emulated.Event(enable_timing=True)
            event.record()
            events.append(event)
    emulated.synchronize()
    for event in events:
        event.synchronize()
    assert max(start.elapsed_time(event) for event in events) >= 59.9


def test_both_copy_engines_and_the_kernels_run_side_by_side(emulated):
    host, up = torch.zeros(1000), torch.ones(1000)
    emulated.page_lock(host)
    emulated.page_lock(up)
    tensor = emulated.upload(up)
    kernel = emulated.Stream()
    with emulated.stream(kernel), stalled(emulated):
        with emulated.stream(emulated.Stream()):
            other = emulated.upload(up)
            emulated.current_stream().synchronize()
        with emulated.stream(emulated.Stream()):
            host.copy_(tensor, non_blocking=True)
            emulated.current_stream().synchronize()
        assert not kernel.query()
        assert (host == 1).all()
    assert (other.cpu() == 1).all()


# Threads.


def _stream_threads():
    return {thread for thread in threading.enumerate() if thread.name == "stream"}


def _end(threads):
    def none_is_left():
        gc.collect()
        return not any(thread.is_alive() for thread in threads)

    return wait_until(none_is_left)


def test_the_threads_of_dropped_streams_end(emulated):
    before = _stream_threads()
    streams = [emulated.Stream() for _ in range(5)]
    for stream in streams:
        with emulated.stream(stream):
            tensor = emulated.upload(torch.zeros(10))
    made = _stream_threads() - before
    assert len(made) == 5
    tensor.record_stream(stream)
    del streams, stream, tensor
    assert _end(made)


def test_the_threads_of_a_dropped_device_end():
    before = _stream_threads()
    device = make_device("emulated", INSTANT)
    model = device.load(Tiny(), images(8))
    device.page_lock(host := torch.zeros(8, 4, 16, 16))
    host.copy_(model(device.upload(images(8))), non_blocking=True)
    device.synchronize()
    made = _stream_threads() - before
    assert made
    del device, model, host
    assert _end(made)


def test_what_is_queued_on_a_dropped_stream_is_still_done(emulated):
    done = threading.Event()
    with emulated.stream(emulated.Stream()):
        emulated.launch(0.05, done.set)
    assert done.wait(10)


# Opening.


def test_opening_by_name():
    assert open_device("emulated").kind == "emulated"
    assert open_device("emulated").name == "emulated GPU (classroom)"
    assert open_device().kind == ("cuda" if torch.cuda.is_available() else "emulated")
    with pytest.raises(LabError, match="'mps'"):
        open_device("mps")
    with pytest.raises(LabError, match="'nowhere'"):
        open_device("emulated", profile="nowhere")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_an_error():
    with pytest.raises(LabError, match="no NVIDIA GPU"):
        open_device("cuda")
