"""Recording a run: every lane has what happened, in the order in which it can have happened."""

import itertools

import pytest
import torch
from conftest import make_job
from helpers import BALANCED, fingerprint, make_device, stalled

from labkit import LabError, OutputWorkers, annotate, digest, open_device, summarize
from labkit.capture import capture_timeline
from labkit.pipelines import STRATEGIES
from labkit.presets import Preset
from labkit.ranges import current_listener
from labkit.recorder import Recorder
from labkit.timeline import DEVICE_LANES
from labkit.timing import open_parts

pytestmark = pytest.mark.timeout(90, method="signal")

PRESET = Preset("tiny", "tiny", batch=8, image=16, samples=26, workers=2, slots=3, repeats=1)
# Between the clocks of a GPU and its host; the emulated device has the host's own.
SLACK_S = {"cuda": 5e-4, "emulated": 1e-6}
DEVICES = [pytest.param("emulated"), *([pytest.param("cuda")] if torch.cuda.is_available() else [])]


@pytest.fixture(params=DEVICES)
def job(request):
    job = make_job(make_device(request.param, BALANCED))
    yield job
    job.close()


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_every_stage_of_every_batch_in_a_possible_order(job, strategy):
    timeline = capture_timeline(job, strategy, PRESET, batches=4)
    slack = SLACK_S[job.device.kind]
    assert timeline.strategy == strategy.__name__
    assert timeline.device["kind"] == job.device.kind
    stages = {}
    for span in timeline.spans:
        lane = "workers" if span.lane.startswith("worker ") else span.lane
        stages.setdefault((lane, span.stage), {}).setdefault(span.batch, []).append(span)
        assert 0 <= span.start <= span.end <= timeline.end
    processing = "host" if strategy.__name__ == "sequential" else "workers"
    for key in (("host", "upload"), ("host", "forward"), ("host", "copy"), ("upload", "upload"),
                ("compute", "forward"), ("copy", "copy"), (processing, "process")):  # fmt: skip
        assert sorted(stages[key]) == [0, 1, 2, 3], key
    for batch in range(4):
        upload, forward, copy, process = (
            stages[key][batch][-1]
            for key in (
                ("upload", "upload"),
                ("compute", "forward"),
                ("copy", "copy"),
                (processing, "process"),
            )  # fmt: skip
        )
        assert upload.end <= forward.end + slack
        assert forward.end <= copy.end + slack
        assert copy.end <= process.start + slack
        assert stages["host", "forward"][batch][0].start <= forward.end + slack
        images = 2 if batch == 3 else 8
        assert copy.bytes == images * 4 * 16 * 16 * 4
        assert upload.bytes == images * 3 * 16 * 16


def test_a_lane_of_the_device_does_one_thing_at_a_time(job):
    timeline = capture_timeline(job, STRATEGIES["stream_pipeline"], PRESET, batches=4)
    for lane in ("compute", "upload", "copy"):
        for before, after in itertools.pairwise(timeline.lane(lane)):
            assert before.end <= after.start + SLACK_S[job.device.kind]


def test_the_emulated_device_knows_what_was_page_locked():
    job = make_job(make_device("emulated", BALANCED))
    for name, pinned in (("buffer_pool", False), ("pinned_async", True)):
        timeline = capture_timeline(job, STRATEGIES[name], PRESET, batches=4)
        assert {span.pinned for span in timeline.lane("copy")} == {pinned}
        assert {span.pinned for span in timeline.lane("upload")} == {True}


def test_recorded_results_are_the_same(job):
    with open_parts(STRATEGIES["stream_pipeline"], job, PRESET, workers=2) as parts:
        plain = digest(STRATEGIES["stream_pipeline"](job, **parts))
        with Recorder(job.device):
            assert digest(STRATEGIES["stream_pipeline"](job, **parts)) == plain


def test_copy_and_forward_overlap_only_where_they_can():
    """On the emulated device both are long enough to tell."""
    job = make_job(make_device("emulated", BALANCED))
    hidden = {
        name: summarize(capture_timeline(job, STRATEGIES[name], PRESET, batches=4)).hidden
        for name in STRATEGIES
    }
    assert hidden.pop("stream_pipeline") > 0.3
    assert set(hidden.values()) == {0.0}


def test_a_device_span_lasts_until_the_device_is_done(job):
    """Not until the call has returned: the kernel before it is still running then."""
    device = job.device
    with Recorder(device) as recorder:
        with annotate("elsewhere"), stalled(device), annotate("forward", 0):
            job.forward(next(job.batches()))
        device.synchronize()
    timeline = recorder.timeline()
    [forward] = [span for span in timeline.lane("compute") if span.batch == 0]
    [queued] = [span for span in timeline.lane("host") if span.name == "forward"]
    assert forward.end >= queued.end


def test_without_device_events_only_host_and_workers(job):
    with (
        OutputWorkers(fingerprint, 1) as workers,
        Recorder(job.device, device_events=False) as recorder,
    ):
        STRATEGIES["multi_worker"](job, workers)
    lanes = set(recorder.timeline().lanes)
    assert {"host", "worker 0"} <= lanes
    if job.device.kind == "cuda":
        assert lanes == {"host", "worker 0"}


@pytest.mark.parametrize("threads", [False, True])
def test_workers_ranges_come_back_with_their_results(emulated, threads):
    with OutputWorkers(annotating, 1, threads=threads) as workers, Recorder(emulated) as recorder:
        for batch in range(3):
            workers.submit(batch, torch.zeros(5))
        assert workers.results() == [0, 1, 2]
    timeline = recorder.timeline()
    spans = timeline.lane("worker 0")
    process = [span for span in spans if span.name == "process"]
    inner = [span for span in spans if span.name == "my own"]
    assert [span.batch for span in process] == [span.batch for span in inner] == [0, 1, 2]
    for outer, part in zip(process, inner, strict=True):
        assert outer.start <= part.start <= part.end <= outer.end
    received = [span.bytes for span in spans if span.name == "receive"]
    assert received == ([] if threads else [20, 20, 20])
    host = [span for span in timeline.lane("host") if span.name == "wait for workers"]
    assert host[-1].end >= process[-1].end


def annotating(batch, tensor):
    with annotate("my own", batch):
        return batch


def test_a_failed_run_leaves_nobody_listening(job):
    with pytest.raises(ZeroDivisionError), Recorder(job.device):
        _ = 1 / 0
    assert current_listener() is None
    if job.device.kind == "emulated":
        assert job.device.operations is None
    with Recorder(job.device) as recorder, annotate("forward", 0):
        job.forward(next(job.batches()))
    assert {span.lane for span in recorder.timeline().spans} >= {"host", "compute"}


def test_other_ranges_are_the_host_s_alone(job):
    with Recorder(job.device) as recorder, annotate("my own stage", 3):
        pass
    assert [(s.lane, s.name, s.batch) for s in recorder.timeline().spans] == [
        ("host", "my own stage", 3)
    ]
    assert "my own stage" not in DEVICE_LANES


def test_waits_for_slots_are_named(emulated):
    job = make_job(make_device("emulated"), process=sleepy)
    timeline = capture_timeline(job, STRATEGIES["buffer_pool"], PRESET, batches=4)
    names = {span.name for span in timeline.lane("host")}
    assert {"wait for slot", "wait for workers"} <= names


def sleepy(batch, tensor):
    import time

    time.sleep(0.05)
    return fingerprint(batch, tensor)


def test_one_recorder_at_a_time():
    device = open_device("emulated")
    with (
        Recorder(device),
        pytest.raises(LabError, match="one Recorder at a time"),
        Recorder(device),
    ):
        pass
    assert device.operations is None
    with Recorder(device):
        pass
