"""The five strategies: every batch once, in order, with the bytes that the model gave."""

import functools
import inspect
import json
import random
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import helpers
import pytest
import torch
from conftest import DEVICES, make_job
from helpers import (
    BALANCED,
    INSTANT,
    SLOW_COPY,
    SLOW_KERNEL,
    Tiny,
    fingerprint,
    images,
    make_device,
    profile,
    stalled,
)

from labkit import BufferPool, Job, LabError, OutputWorkers, StreamPipeline, archive, digest
from labkit.pipelines import STRATEGIES
from labkit.workers import WorkerError

pytestmark = [
    pytest.mark.timeout(120, method="signal"),
    pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning"),
]

PROFILES = {each.name: each for each in (BALANCED, INSTANT, SLOW_COPY, SLOW_KERNEL)}
CONCURRENT = [name for name in STRATEGIES if name != "sequential"]


def run(strategy, job, slots=3, workers=2, depth=2, threads=True):
    """Call `strategy` with the parts that it names."""
    names = set(inspect.signature(strategy).parameters)
    with ExitStack() as stack:
        parts, pool = {}, None
        for name in names & {"pool", "pinned_pool"}:
            pool = BufferPool(
                job.device, job.output_shape, job.output_dtype, slots, name == "pinned_pool"
            )
            parts[name] = stack.enter_context(pool)
        if "workers" in names:
            consumers = OutputWorkers(job.process, workers, pool, limit=slots, threads=threads)
            parts["workers"] = stack.enter_context(consumers)
        if "depth" in names:
            parts["depth"] = depth
        return strategy(job, **parts)


def expected_results(job):
    """What the model gives for each of the job's batches on the CPU, without any strategy."""
    batches = [batch.cpu() for batch in job.batches()]
    return [fingerprint(index, Tiny()(batch)) for index, batch in enumerate(batches)]


# The same results, whatever the settings.


def _configurations(count):
    choose = random.Random(5)
    for number in range(count):
        batch, slots = choose.randint(1, 8), choose.randint(1, 4)
        samples = choose.randint(1, 7) * batch - choose.randrange(batch)
        yield {
            "profile": list(PROFILES)[number % len(PROFILES)],
            "batch": batch,
            "samples": samples,
            "distinct": choose.choice([samples, max(1, samples // 3)]),
            "slots": slots,
            "workers": choose.randint(1, 3),
            "depth": choose.randint(1, slots),
            "threads": number % 3 != 0,
        }


@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize(
    "settings",
    list(_configurations(12)),
    ids=lambda s: "-".join(str(value) for value in s.values()),
)
def test_every_strategy_gives_what_the_model_gives(kind, settings, tmp_path):
    settings = dict(settings)
    device = make_device(kind, PROFILES[settings.pop("profile")])
    log = tmp_path / "log"
    job = make_job(
        device,
        functools.partial(helpers.logged, log=log),
        *(settings.pop(name) for name in ("batch", "samples", "distinct")),
    )
    expected = expected_results(job)
    for strategy in STRATEGIES.values():
        log.write_text("")
        assert run(strategy, job, **settings) == expected
        # Exactly once, whatever came back.
        assert sorted(map(int, log.read_text().split())) == list(range(job.count))


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("last", [1, 2, 3, 4])
def test_the_last_batch_may_have_any_size(device, name, last):
    job = make_job(device, batch=4, samples=8 + last)
    results = run(STRATEGIES[name], job)
    assert [shape[0] for _, shape, _, _ in results] == [4, 4, last]
    assert results == expected_results(job)


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("samples", [1, 8])
def test_a_run_may_be_a_single_batch(device, name, samples):
    job = make_job(device, batch=8, samples=samples)
    assert run(STRATEGIES[name], job, slots=1, depth=1) == expected_results(job)


@pytest.mark.parametrize("name", CONCURRENT)
def test_digests_equal_with_worker_processes(job, name):
    job.process = archive
    assert digest(run(STRATEGIES[name], job, threads=False)) == digest(
        run(STRATEGIES["sequential"], job)
    )


@pytest.mark.parametrize("name", CONCURRENT)
def test_parts_serve_one_run_after_the_other(job, name):
    def thrice(job, **parts):
        return [STRATEGIES[name](job, **parts) for _ in range(3)]

    thrice.__signature__ = inspect.signature(STRATEGIES[name])
    assert run(thrice, job) == [expected_results(job)] * 3


@pytest.mark.parametrize("name", CONCURRENT)
def test_results_come_in_batch_order_from_uneven_workers(job, name):
    job.process = helpers.jittered
    assert run(STRATEGIES[name], job, slots=4, workers=3) == expected_results(job)


@pytest.mark.parametrize("name", CONCURRENT)
@pytest.mark.parametrize("threads", [False, True])
def test_a_failing_batch_ends_a_strategy_and_the_next_run_works(job, name, threads):
    job.process = functools.partial(helpers.fail_at, bad=1)
    with pytest.raises(WorkerError, match="batch 1 failed") as failure:
        run(STRATEGIES[name], job, slots=2, threads=threads)
    assert failure.value.batch == 1
    job.process = fingerprint
    assert run(STRATEGIES[name], job, threads=threads) == expected_results(job)


# A part of the job, for warming up.


@pytest.mark.parametrize("samples", [5, 8, 16, 23, 24, 25])
@pytest.mark.parametrize("limit", [2, 3, 10])
def test_the_first_batches_have_every_shape(emulated, samples, limit):
    job = make_job(emulated, batch=8, samples=samples)
    shapes = [tuple(batch.shape) for batch in job.batches()]
    first = [tuple(batch.shape) for batch in job.first(limit).batches()]
    assert len(first) == min(limit, len(shapes))
    assert set(first) == set(shapes)
    assert [tuple(batch.shape) for batch in job.batches()] == shapes  # the job itself is whole


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_first_batches_can_be_run(job, name):
    results = run(STRATEGIES[name], job.first(2))
    whole = expected_results(job)
    assert [result[1:] for result in results] == [whole[0][1:], whole[-1][1:]]


# What the digest must see: each of these forgets one thing.


class Forgetful(StreamPipeline):
    """StreamPipeline again, in which a step can be left out."""

    def __init__(self, *parts, forgets=()):
        super().__init__(*parts)
        self.forgets = forgets

    def submit(self, index, scores):
        if len(self.in_flight) == self.depth:
            self._hand_over()
        slot = self.pool.acquire()
        if "wait_stream" not in self.forgets:
            self.copy_stream.wait_stream(self.device.current_stream())
        with self.device.stream(self.copy_stream):
            slot.copy_(scores, non_blocking=True)
        if "record_stream" not in self.forgets:
            scores.record_stream(self.copy_stream)
        self.in_flight.append((index, slot))

    def _hand_over(self):
        index, slot = self.in_flight.pop() if "order" in self.forgets else self.in_flight.popleft()
        if "synchronize" not in self.forgets:
            slot.event.synchronize()
        if "check" in self.forgets:
            slot.event = self.device.Event()  # never recorded: it counts as past
        self.workers.submit(index, slot)

    def results(self):
        if "last" in self.forgets:
            self.in_flight.pop()
        while self.in_flight:
            self._hand_over()
        return self.workers.results()


def _run_forgetful(profile, *forgets, depth=2):
    device = make_device("emulated", profile)
    job = make_job(device, samples=45)
    expected = expected_results(job)

    def strategy(job, workers, pinned_pool):
        pipeline = Forgetful(device, workers, pinned_pool, depth, forgets=forgets)
        for index, batch in enumerate(job.batches()):
            pipeline.submit(index, job.forward(batch))
        return pipeline.results()

    results = run(strategy, job)
    return digest(results) == digest(expected), results, expected


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_pipeline_that_forgets_nothing_is_right(profile, depth):
    right, _, _ = _run_forgetful(PROFILES[profile], depth=depth)
    assert right


def test_the_order_of_handing_over_does_not_matter():
    right, _, _ = _run_forgetful(BALANCED, "order")
    assert right


def test_a_pipeline_that_does_not_wait_for_the_forward_is_seen():
    right, results, expected = _run_forgetful(SLOW_KERNEL, "wait_stream")
    assert not right
    assert [result[:3] for result in results] == [result[:3] for result in expected]


def test_a_pipeline_that_does_not_wait_for_the_copy_is_refused():
    with pytest.raises(LabError, match="copy is running"):
        _run_forgetful(SLOW_COPY, "synchronize")


def test_a_pipeline_that_also_deceives_the_check_is_seen():
    right, _, _ = _run_forgetful(SLOW_COPY, "synchronize", "check")
    assert not right


def test_a_pipeline_that_does_not_protect_its_memory_is_seen():
    right, _, _ = _run_forgetful(SLOW_COPY, "record_stream")
    assert not right


def test_a_pipeline_that_loses_a_batch_is_seen():
    right, results, expected = _run_forgetful(BALANCED, "last")
    assert not right and results == expected[:-1]


def test_an_asynchronous_loop_that_does_not_wait_is_refused():
    def hasty(job, workers, pinned_pool):
        for index, batch in enumerate(job.batches()):
            scores = job.forward(batch)
            slot = pinned_pool.acquire()
            slot.copy_(scores, non_blocking=True)
            workers.submit(index, slot)
        return workers.results()

    with pytest.raises(LabError, match="copy is running"):
        run(hasty, make_job(make_device("emulated", SLOW_COPY)))


def test_a_loop_that_reads_too_early_is_seen():
    def hasty(job):
        hosts = [job.forward(batch).to("cpu", non_blocking=True) for batch in job.batches()]
        return [job.process(index, host) for index, host in enumerate(hosts)]

    job = make_job(make_device("emulated", SLOW_COPY))
    results = hasty(job)
    job.device.synchronize()
    assert digest(results) != digest(expected_results(job))


def test_a_digest_sees_a_single_wrong_byte_and_the_order():
    scores = torch.zeros(8, 4)
    right = [fingerprint(index, scores) for index in range(3)]
    wrong = scores.clone()
    wrong.view(torch.uint8)[7, 15] = 1
    assert digest([*right[:2], fingerprint(2, wrong)]) != digest(right)
    assert digest([right[1], right[0], right[2]]) != digest(right)
    assert digest(right[:2]) != digest(right)
    assert digest([fingerprint(index, scores) for index in range(3)]) == digest(right)


# StreamPipeline with a model of one's own.


class Own(torch.nn.Module):
    """[n, 10] float32 to [n, 6] float32."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(10, 6)
        with torch.no_grad():
            self.layer.weight.copy_(torch.arange(60.0).view(6, 10) % 5 - 2)
            self.layer.bias.copy_(torch.arange(6.0))

    def forward(self, rows):
        return self.layer(rows).relu()


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("depth", [1, 3])
def test_a_stream_pipeline_takes_any_model(device, threads, depth):
    rows = (torch.arange(420.0) % 13).view(42, 10)
    sizes, reference = [8, 8, 8, 8, 8, 2], Own()
    with torch.no_grad():
        outputs = reference(rows).split(sizes)
    expected = [fingerprint(index, output) for index, output in enumerate(outputs)]
    model = device.load(Own(), rows)
    with (
        torch.inference_mode(),
        BufferPool(device, (8, 6), torch.float32, slots=3, page_locked=True) as pool,
        OutputWorkers(fingerprint, 2, pool, threads=threads) as workers,
    ):
        pipeline = StreamPipeline(device, workers, pool, depth)
        assert pipeline.results() == []
        for _ in range(2):
            for index, batch in enumerate(rows.split(sizes)):
                pipeline.submit(index, model(device.upload(batch)))
            assert pipeline.results() == expected


def test_a_stream_pipeline_follows_the_current_stream(device):
    job = make_job(device, samples=40)
    expected = expected_results(job)

    def strategy(job, workers, pinned_pool):
        pipeline = StreamPipeline(device, workers, pinned_pool)
        compute = device.Stream()
        with device.stream(compute):
            for index, batch in enumerate(job.batches()):
                pipeline.submit(index, job.forward(batch))
            return pipeline.results()

    assert run(strategy, job) == expected


def test_submitting_to_a_stream_pipeline_returns_before_the_copy_is_done():
    device = make_device("emulated", SLOW_COPY)
    job = make_job(device, batch=8, samples=8)
    with (
        BufferPool(device, job.output_shape, job.output_dtype, 2, page_locked=True) as pool,
        OutputWorkers(fingerprint, 1, pool, threads=True) as workers,
    ):
        pipeline = StreamPipeline(device, workers, pool)
        pipeline.submit(0, job.forward(next(job.batches())))
        assert not pipeline.in_flight[0][1].event.query()
        assert pipeline.results() == expected_results(job)


def test_a_copy_runs_beside_the_next_kernel():
    device = make_device("emulated", profile("very slow copies", copy_bytes_per_s=1e5))
    job = make_job(device, batch=8, samples=8)
    with (
        BufferPool(device, job.output_shape, job.output_dtype, 2, page_locked=True) as pool,
        OutputWorkers(fingerprint, 1, pool, threads=True) as workers,
    ):
        batch = next(job.batches())
        pipeline = StreamPipeline(device, workers, pool)
        pipeline.submit(0, job.forward(batch))
        job.forward(batch)
        device.current_stream().synchronize()
        assert not pipeline.in_flight[0][1].event.query()
        assert pipeline.results() == expected_results(job)


def test_no_more_than_depth_copies_are_in_flight(job):
    for depth in (1, 2, 4):
        seen = []

        def strategy(job, workers, pinned_pool, depth=depth, seen=seen):
            pipeline = StreamPipeline(job.device, workers, pinned_pool, depth)
            for index, batch in enumerate(job.batches()):
                pipeline.submit(index, job.forward(batch))
                seen.append(len(pipeline.in_flight))
            return pipeline.results()

        run(strategy, job, slots=4, depth=depth)
        assert max(seen) == min(depth, job.count)


def test_a_depth_beyond_the_pool_is_an_error_at_once(job):
    with pytest.raises(LabError, match="depth 3 needs at least 3 slots"):
        run(STRATEGIES["stream_pipeline"], job, slots=2, depth=3)


@pytest.mark.parametrize("depth", [0, -1])
def test_a_depth_without_copies_is_refused(job, depth):
    with pytest.raises(LabError, match="depth"):
        run(STRATEGIES["stream_pipeline"], job, depth=depth)


# The job.


def test_a_job_covers_its_samples_in_order(emulated):
    job = make_job(emulated, batch=8, samples=26)
    batches = [batch.cpu() for batch in job.batches()]
    assert torch.equal(torch.cat(batches), images(26))
    assert job.count == len(batches) == 4


@pytest.mark.parametrize("distinct", range(2, 12))
@pytest.mark.parametrize("batch", [1, 4, 8])
def test_batches_that_follow_each_other_differ(emulated, distinct, batch):
    job = make_job(emulated, batch=batch, samples=5 * batch, distinct=distinct)
    batches = [batch.cpu() for batch in job.batches()]
    for one, next_one in zip(batches, batches[1:], strict=False):
        assert not torch.equal(one, next_one)


def test_inputs_are_page_locked_until_the_job_goes(device):
    job = make_job(device)
    inputs = job.inputs
    with pytest.raises(LabError):
        device.page_lock(inputs)
    device.synchronize()
    job.close()
    job.close()
    device.page_lock(inputs)
    device.page_unlock(inputs)
    dropped = make_job(device)
    inputs = dropped.inputs
    device.synchronize()
    del dropped
    device.page_lock(inputs)
    device.page_unlock(inputs)


@pytest.mark.parametrize(
    "changes", [{"batch": 0}, {"batch": -1}, {"samples": 0}, {"samples": 1.5}, {"batch": True}]
)
def test_counts_are_whole_numbers_of_at_least_one(emulated, changes):
    with pytest.raises(LabError, match=next(iter(changes))):
        Job(Tiny(), images(4), fingerprint, emulated, **{"batch": 2, **changes})


def test_a_job_without_inputs_is_refused(emulated):
    with pytest.raises(LabError, match="at least one input"):
        Job(Tiny(), images(0), fingerprint, emulated, batch=2)


# Memory.


@pytest.mark.parametrize("name", STRATEGIES)
def test_memory_does_not_grow_with_the_number_of_batches(name):
    child = Path(__file__).with_name("memory_child.py")
    done = subprocess.run(
        [sys.executable, child, name],
        capture_output=True,
        text=True,
        timeout=110,
        env={"PYTHONPATH": str(child.parent.parent)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    peaks = json.loads(done.stdout)
    # The 450 batches more are 30 % and more of all memory.
    assert peaks["batches"] == 500
    assert 450 * peaks["output"] > 0.3 * peaks["short"]
    assert peaks["long"] < 1.05 * peaks["short"]
    if name == "stream_pipeline":
        assert peaks["deep"] < 1.05 * peaks["shallow"]


# Images that come on a stream of their own: the same two promises the other way round.


def _upload_ahead(job, stream, forgets=()):
    """`job.batches(stream=...)` again, in which a step can be left out."""
    device = job.device
    for index in range(job.count):
        with device.stream(stream):
            batch = device.upload(job.inputs[8 * index : 8 * index + 8])
        if "wait_stream" not in forgets:
            device.current_stream().wait_stream(stream)
        if "record_stream" not in forgets:
            batch.record_stream(device.current_stream())
        yield batch


def _forward_all(job, batches):
    """Queue all forwards without waiting for one; what they gave."""
    return [scores.cpu() for scores in [job.forward(batch) for batch in batches]]


@pytest.mark.parametrize("profile", [SLOW_COPY, SLOW_KERNEL], ids=["slow copies", "slow kernels"])
@pytest.mark.parametrize("kind", DEVICES)
def test_images_on_another_stream_arrive_in_time_and_stay(kind, profile):
    device = make_device(kind, profile)
    job = make_job(device, samples=48)
    expected = _forward_all(job, job.batches())
    stream = device.Stream()
    with ExitStack() as stalls:
        if kind == "cuda":
            # A real GPU is never slow by itself: let uploads come late, or the forwards.
            late = stream if profile is SLOW_COPY else device.current_stream()
            with device.stream(late):
                stalls.enter_context(stalled(device))
        scores = [job.forward(batch) for batch in job.batches(stream=stream)]
    for found, right in zip(scores, expected, strict=True):
        assert torch.equal(found.cpu(), right)


@pytest.mark.parametrize(
    ("profile", "forgets", "right"),
    [
        (SLOW_COPY, (), True),
        (SLOW_KERNEL, (), True),
        (SLOW_COPY, ("wait_stream",), False),
        (SLOW_KERNEL, ("record_stream",), False),
    ],
)
def test_uploads_that_forget_a_promise_are_seen(profile, forgets, right):
    job = make_job(make_device("emulated", profile), samples=48)
    expected = _forward_all(job, job.batches())
    found = _forward_all(job, _upload_ahead(job, job.device.Stream(), forgets))
    equal = [torch.equal(one, other) for one, other in zip(found, expected, strict=True)]
    assert all(equal) == right


def test_uploads_run_beside_the_forward():
    """stream_pipeline's uploads wait for no kernel; the emulated device says when they ran."""
    job = make_job(make_device("emulated", SLOW_KERNEL), samples=40)
    job.device.operations = []
    run(STRATEGIES["stream_pipeline"], job)
    job.device.synchronize()
    kernels = [op for op in job.device.operations if op.engine == "compute"]
    uploads = [op for op in job.device.operations if op.engine == "upload"]
    beside = [u for u in uploads if any(k.start < u.start and u.end < k.end for k in kernels)]
    assert len(beside) >= len(uploads) - 2
