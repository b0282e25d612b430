"""The contracts that both devices keep, in code that knows no difference between them.

`stalled(device)` holds the current stream for the length of a block. What is queued behind it
cannot be done, so an event that stays behind shows that a call returned before its work ended.
"""

import threading

import pytest
import torch
from helpers import Tiny, delay, images, stalled, stays_behind, wait_until

from labkit import LabError

pytestmark = pytest.mark.timeout(60, method="signal")

COUNT = 24


@pytest.fixture
def inputs(page_locked):
    return page_locked((COUNT, 3, 16, 16), torch.uint8).copy_(images(COUNT))


@pytest.fixture
def model(device, inputs):
    """Loaded, and warm: the first call on a GPU may wait for the whole device."""
    model = device.load(Tiny(), inputs)
    for size in (8, 5):
        model(device.upload(inputs[:size])).cpu()
    return model


@pytest.fixture
def expected():
    return Tiny()(images(COUNT))


@pytest.fixture
def scores(device, model, inputs):
    """The scores of the first 8 images, on the device."""
    scores = model(device.upload(inputs[:8]))
    device.synchronize()
    return scores


# What returns at once.


def test_a_launch_returns_before_its_kernel_ends(device, model, inputs, expected):
    batch, event = device.upload(inputs[:8]), device.Event()
    with stalled(device):
        scores = model(batch)
        event.record()
        assert stays_behind(event)
    event.synchronize()
    assert event.query()
    assert torch.equal(scores.cpu(), expected[:8])


def test_an_upload_from_page_locked_memory_returns_at_once(device, inputs):
    device.upload(inputs[:8])  # its memory is there for the next one
    event = device.Event()
    with stalled(device):
        batch = device.upload(inputs[:8])
        event.record()
        assert stays_behind(event)
    event.synchronize()
    assert torch.equal(batch.cpu(), inputs[:8])


def test_an_upload_reads_page_locked_memory_when_the_stream_gets_there(device, page_locked):
    host = page_locked((8,), value=1)
    device.upload(host)
    with stalled(device):
        tensor = device.upload(host)
        host.fill_(2)
    device.synchronize()
    assert tensor.cpu().tolist() == [2] * 8


def test_a_non_blocking_copy_to_page_locked_memory_returns_at_once(
    device, scores, expected, page_locked
):
    host, event = page_locked(scores.shape), device.Event()
    with stalled(device):
        host.copy_(scores, non_blocking=True)
        event.record()
        assert stays_behind(event)
    event.synchronize()
    assert torch.equal(host, expected[:8])


def test_a_part_of_page_locked_memory_is_page_locked(device, scores, expected, page_locked):
    memory, event = page_locked((3, *scores.shape)), device.Event()
    with stalled(device):
        memory[1].copy_(scores, non_blocking=True)
        event.record()
        assert stays_behind(event)
    event.synchronize()
    assert torch.equal(memory[1], expected[:8])
    assert (memory[0] == 7).all() and (memory[2] == 7).all()


def test_non_blocking_to_cpu_returns_at_once(device, scores, expected):
    scores.to("cpu", non_blocking=True)  # torch keeps this page-locked memory for the next
    device.synchronize()
    event = device.Event()
    with stalled(device):
        host = scores.to("cpu", non_blocking=True)
        event.record()
        assert stays_behind(event)
    event.synchronize()
    assert type(host) is torch.Tensor and torch.equal(host, expected[:8])


def test_a_delay_holds_its_stream_up_and_no_other(device):
    late, early, stream = device.Event(), device.Event(), device.Stream()
    device.delay(0.3)
    late.record()
    with device.stream(stream):
        early.record()
    assert wait_until(early.query)
    assert stays_behind(late)
    assert wait_until(late.query)


# What waits.


@pytest.mark.parametrize("non_blocking", [False, True])
def test_a_copy_to_pageable_memory_blocks(device, scores, expected, non_blocking):
    host = torch.full(tuple(scores.shape), 7.0)
    delay(device)
    host.copy_(scores, non_blocking=non_blocking)
    assert torch.equal(host, expected[:8])


def test_a_blocking_copy_to_page_locked_memory_blocks(device, scores, expected, page_locked):
    host = page_locked(scores.shape)
    delay(device)
    host.copy_(scores)
    assert torch.equal(host, expected[:8])


@pytest.mark.parametrize("copy", [lambda t: t.cpu(), lambda t: t.to("cpu")], ids=["cpu", "to"])
def test_a_copy_without_a_target_blocks(device, model, inputs, expected, copy):
    batch = device.upload(inputs[:8])
    delay(device)
    host = copy(model(batch))
    assert type(host) is torch.Tensor and torch.equal(host, expected[:8])


def test_an_upload_from_pageable_memory_takes_what_is_there_now(device):
    host = torch.full((2**18,), 1.0)
    delay(device)
    tensor = device.upload(host)
    host.fill_(2)
    assert (tensor.cpu() == 1).all()


def test_memory_is_pageable_again_once_unlocked(device, scores, expected):
    host = torch.empty(scores.shape).share_memory_().fill_(7)
    device.page_lock(host)
    device.page_unlock(host)
    delay(device)
    host.copy_(scores, non_blocking=True)
    assert torch.equal(host, expected[:8])


def test_a_stream_synchronizes_all_that_was_queued_on_it(device, scores, expected, page_locked):
    host, stream = page_locked(scores.shape), device.Stream()
    with device.stream(stream):
        delay(device)
        host.copy_(scores, non_blocking=True)
    stream.synchronize()
    assert torch.equal(host, expected[:8])


def test_the_device_synchronizes_every_stream(device, scores, expected, page_locked):
    streams = [device.Stream() for _ in range(3)]
    hosts = [page_locked(scores.shape) for _ in range(4)]
    for stream, host in zip([device.current_stream(), *streams], hosts, strict=True):
        with device.stream(stream):
            delay(device)
            host.copy_(scores, non_blocking=True)
    device.synchronize()
    for host in hosts:
        assert torch.equal(host, expected[:8])


def test_the_device_synchronizes_a_stream_that_nobody_keeps(device, scores, expected, page_locked):
    host = page_locked(scores.shape)
    with device.stream(device.Stream()):
        delay(device)
        host.copy_(scores, non_blocking=True)
    device.synchronize()
    assert torch.equal(host, expected[:8])


def test_a_stream_says_whether_it_is_done(device):
    stream = device.Stream()
    with device.stream(stream), stalled(device):
        assert stays_behind(stream)
    assert wait_until(stream.query)


# Order.


def test_a_stream_does_one_thing_after_the_other(device, model, inputs, expected, page_locked):
    host = page_locked((8, 4, 16, 16))
    batches = [device.upload(inputs[first : first + 8]) for first in (0, 8, 16)]
    events = [device.Event() for _ in batches]
    with stalled(device):
        for batch, event in zip(batches, events, strict=True):
            host.copy_(model(batch), non_blocking=True)
            event.record()
        assert stays_behind(events[0])
    events[-1].synchronize()
    assert all(event.query() for event in events)
    assert torch.equal(host, expected[16:])


def test_an_upload_is_done_before_the_kernel_behind_it(device, model, inputs, expected):
    with stalled(device):
        scores = [model(device.upload(inputs[first : first + 8])) for first in (0, 8, 16)]
    for first, result in zip((0, 8, 16), scores, strict=True):
        assert torch.equal(result.cpu(), expected[first : first + 8])


def test_two_streams_do_not_wait_for_each_other(device, scores, expected, page_locked):
    ahead, behind = device.Stream(), device.Stream()
    host, late, early = page_locked(scores.shape), device.Event(), device.Event()
    with device.stream(behind), stalled(device):
        late.record()
        with device.stream(ahead):
            host.copy_(scores, non_blocking=True)
            early.record()
        early.synchronize()
        assert stays_behind(late)
        assert torch.equal(host, expected[:8])
    late.synchronize()


def _wait_stream(device, producer, consumer):
    consumer.wait_stream(producer)


def _wait_event(device, producer, consumer):
    event = device.Event()
    event.record(producer)
    consumer.wait_event(event)


def _recorded_event(device, producer, consumer):
    consumer.wait_event(producer.record_event())


def _given_event(device, producer, consumer):
    event = device.Event()
    assert producer.record_event(event) is event
    event.wait(consumer)


def _current_streams(device, producer, consumer):
    event = device.Event()
    with device.stream(producer):
        event.record()
    with device.stream(consumer):
        event.wait()


@pytest.mark.parametrize(
    "order", [_wait_stream, _wait_event, _recorded_event, _given_event, _current_streams]
)
def test_a_stream_can_wait_for_another(device, model, inputs, expected, page_locked, order):
    producer, consumer = device.Stream(), device.Stream()
    host, arrived = page_locked((8, 4, 16, 16)), device.Event()
    with device.stream(producer):
        batch = device.upload(inputs[:8])
        with stalled(device):
            scores = model(batch)
            order(device, producer, consumer)
            with device.stream(consumer):
                host.copy_(scores, non_blocking=True)
                arrived.record()
            assert stays_behind(arrived)
    arrived.synchronize()
    assert torch.equal(host, expected[:8])


def test_a_wait_covers_only_what_was_queued_before_it(device):
    first, second = device.Stream(), device.Stream()
    event = first.record_event()
    second.wait_stream(first)
    with device.stream(first), stalled(device):
        second.wait_event(event)
        second.synchronize()  # would not end if it waited for the stall
        assert stays_behind(first)


def test_recording_again_does_not_move_an_earlier_wait(device):
    first, second = device.Stream(), device.Stream()
    event = first.record_event()
    second.wait_event(event)
    with device.stream(first), stalled(device):
        event.record()
        second.synchronize()
        assert stays_behind(event)
    event.synchronize()


def test_a_wait_for_its_own_stream_ends(device):
    stream = device.Stream()
    stream.wait_stream(stream)
    stream.wait_event(stream.record_event())
    stream.synchronize()


# Events.


def test_an_event_that_was_never_recorded_is_past(device):
    event = device.Event()
    assert event.query()
    event.synchronize()
    stream = device.Stream()
    stream.wait_event(event)
    event.wait(stream)
    stream.synchronize()


def test_an_event_records_on_the_current_stream(device):
    other = device.Stream()
    here, there = device.Event(), device.Event()
    with device.stream(other), stalled(device):
        here.record()
        there.record(device.Stream())
        there.synchronize()
        assert stays_behind(here)
    here.synchronize()


def test_elapsed_time_is_that_between_two_events(device):
    start, end = device.Event(enable_timing=True), device.Event(enable_timing=True)
    start.record()
    delay(device)
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) > 0
    assert end.elapsed_time(start) < 0


@pytest.mark.parametrize("timed", [(False, False), (True, False), (False, True)])
def test_elapsed_time_needs_enable_timing(device, timed):
    start, end = (device.Event(enable_timing=flag) for flag in timed)
    start.record()
    end.record()
    device.synchronize()
    with pytest.raises((LabError, RuntimeError, ValueError)):
        start.elapsed_time(end)


def test_elapsed_time_needs_two_events_that_are_past(device):
    start, end = device.Event(enable_timing=True), device.Event(enable_timing=True)
    with pytest.raises((LabError, RuntimeError, ValueError)):
        start.elapsed_time(end)
    start.record()
    with stalled(device):
        end.record()
        with pytest.raises((LabError, RuntimeError)):
            start.elapsed_time(end)
    end.synchronize()
    assert start.elapsed_time(end) >= 0


# The current stream.


def test_streams_nest(device):
    default, outer, inner = device.current_stream(), device.Stream(), device.Stream()
    with device.stream(outer):
        assert device.current_stream() == outer
        with device.stream(inner):
            assert device.current_stream() == inner
        assert device.current_stream() == outer
    assert device.current_stream() == default
    assert len({default, outer, inner}) == 3


def test_an_error_gives_the_stream_before_back(device):
    default = device.current_stream()
    with pytest.raises(KeyError), device.stream(device.Stream()):
        raise KeyError
    assert device.current_stream() == default


def test_every_thread_has_a_current_stream_of_its_own(device):
    default, seen = device.current_stream(), []

    def look():
        seen.append(device.current_stream())
        with device.stream(device.Stream()):
            seen.append(device.current_stream())

    with device.stream(device.Stream()):
        mine = device.current_stream()
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert device.current_stream() == mine
    assert seen[0] == default
    assert seen[1] not in (default, mine)


def test_threads_work_side_by_side(device, model, inputs, expected):
    results = {}

    def work(first):
        with device.stream(device.Stream()), torch.inference_mode():
            for _ in range(5):
                results[first] = model(device.upload(inputs[first : first + 8])).cpu()

    threads = [threading.Thread(target=work, args=[first]) for first in (0, 8, 16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for first in (0, 8, 16):
        assert torch.equal(results[first], expected[first : first + 8])


# Page-locking.


def test_page_locking_twice_is_refused(device, page_locked):
    host = page_locked((2**12,))
    with pytest.raises(LabError):
        device.page_lock(host)


def test_unlocking_what_is_not_locked_is_refused(device, page_locked):
    host = torch.zeros(2**12).share_memory_()
    with pytest.raises(LabError):
        device.page_unlock(host)
    device.page_lock(host)
    device.page_unlock(host)
    with pytest.raises(LabError):
        device.page_unlock(host)


def test_memory_can_be_locked_again(device, scores, expected):
    host = torch.zeros(scores.shape).share_memory_()
    for _ in range(3):
        device.page_lock(host)
        host.fill_(7)
        host.copy_(scores, non_blocking=True)
        device.synchronize()
        device.page_unlock(host)
        assert torch.equal(host, expected[:8])


def test_the_device_works_on_after_it_refused_to_page_lock(
    device, model, inputs, expected, page_locked
):
    host = page_locked((8, 4, 16, 16))
    with pytest.raises(LabError):
        device.page_lock(host)
    with pytest.raises(LabError):
        device.page_unlock(torch.zeros(2**12).share_memory_())
    host.copy_(model(device.upload(inputs[:8])), non_blocking=True)
    device.synchronize()
    assert torch.equal(host, expected[:8])


def test_two_tensors_in_one_page_can_be_page_locked(device):
    page = torch.zeros(2**12, dtype=torch.uint8).share_memory_()
    first, second = page[:100], page[100:300]
    device.page_lock(first)
    try:
        device.page_lock(second)
        device.page_unlock(second)
    finally:
        device.page_unlock(first)


# Shapes, types and memory.


@pytest.mark.parametrize("size", [1, 5, 7, 8])
def test_a_batch_may_be_partial(device, model, inputs, expected, page_locked, size):
    host = page_locked((8, 4, 16, 16))
    part = host[:size]
    scores = model(device.upload(inputs[3 : 3 + size]))
    assert tuple(scores.shape) == (size, 4, 16, 16)
    part.copy_(scores, non_blocking=True)
    device.synchronize()
    assert torch.equal(part, expected[3 : 3 + size])
    assert (host[size:] == 7).all()


@pytest.mark.parametrize("shape", [(0,), (0, 3, 16, 16), (4, 0), ()])
def test_empty_and_scalar_tensors_travel(device, shape):
    host = torch.full(shape, 3.0)
    tensor = device.upload(host)
    device.synchronize()
    for back in (tensor.cpu(), tensor.to("cpu", non_blocking=True), host.clone().copy_(tensor)):
        device.synchronize()
        assert torch.equal(back, host)


def test_a_batch_of_nothing_has_scores_of_nothing(device, model, inputs):
    scores = model(device.upload(inputs[:0]))
    assert tuple(scores.shape) == (0, 4, 16, 16)
    assert tuple(scores.cpu().shape) == (0, 4, 16, 16)
    device.synchronize()


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.bool, torch.int64, torch.float64, torch.float16, torch.bfloat16]
)
def test_every_type_travels(device, dtype):
    host = (torch.arange(30) % 7).view(5, 6).to(dtype)
    tensor = device.upload(host)
    assert tensor.dtype == dtype and tensor.shape == host.shape
    assert torch.equal(tensor.cpu(), host)


def test_metadata_is_there_before_the_bytes(device, model, inputs):
    batch = device.upload(inputs[:5])
    with stalled(device):
        scores = model(batch)
        assert tuple(scores.shape) == (5, 4, 16, 16)
        assert scores.dtype == torch.float32
        assert scores.numel() == 5 * 4 * 16 * 16
        assert scores.nbytes == 4 * scores.numel()
        assert len(scores) == scores.size(0) == 5
        assert scores.ndim == scores.dim() == 4


def test_a_host_tensor_outlives_its_device_tensor(device, model, inputs, expected):
    hosts = []
    for first in (0, 8, 16):
        scores = model(device.upload(inputs[first : first + 8]))
        hosts.append(scores.cpu())
        del scores
    assert torch.equal(torch.cat(hosts), expected)


def test_a_dropped_tensor_is_safe_on_its_own_stream(device, model, inputs, expected, page_locked):
    hosts = [page_locked((8, 4, 16, 16)) for _ in range(3)]
    with stalled(device):
        for first, host in zip((0, 8, 16), hosts, strict=True):
            host.copy_(model(device.upload(inputs[first : first + 8])), non_blocking=True)
    device.synchronize()
    assert torch.equal(torch.cat(hosts), expected)


def test_record_stream_protects_a_dropped_tensor(device, model, inputs, expected, page_locked):
    copies, arrived = device.Stream(), device.Event()
    host = page_locked((8, 4, 16, 16))
    batches = [device.upload(inputs[first : first + 8]) for first in (0, 8, 16)]
    scores = model(batches[0])
    copies.wait_stream(device.current_stream())
    with device.stream(copies):
        delay(device, 0.2)
        host.copy_(scores, non_blocking=True)
        arrived.record()
    scores.record_stream(copies)
    del scores
    for batch in batches[1:]:
        model(batch)
    arrived.synchronize()
    assert torch.equal(host, expected[:8])
