"""Prediction: right by hand where that is possible, and the real strategies' own rules kept."""

import itertools
from dataclasses import replace

import pytest
from sample_record import sample_costs

from labkit import LabError, explain, predict, predict_all, save_predictions, summarize
from labkit.advice import advice_table, advise
from labkit.pipelines import STRATEGIES
from labkit.prediction import prediction_table
from labkit.presets import Preset
from labkit.timeline import Span, Timeline

F, C, FRESH, TOUCHED, P, LOOP, SEND = 4.0, 1.0, 3.0, 2.0, 2.5, 5.0, 0.5
SECONDS = {
    "upload": 0.0, "queue": 0.0, "forward": F, "fresh copy": FRESH, "touched copy": TOUCHED,
    "copy": C, "send": SEND, "process": P, "process in the loop": LOOP, "hand-over": 0.0,
}  # fmt: skip


def costs(slowdowns=None, **seconds):
    return sample_costs(seconds={**SECONDS, **seconds}, slowdowns=slowdowns or {})


def size(batches=10, workers=3, slots=3, depth=2, part=0) -> Preset:
    samples = batches * 8 - part
    return Preset("smoke", "m", 8, 64, samples, workers, slots, depth)


def seconds(strategy: str, costs, size=None) -> float:
    return predict(STRATEGIES[strategy], costs, size or globals()["size"]()).seconds


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("sequential", 10 * (F + FRESH + LOOP)),
        ("multi_worker", 10 * (F + FRESH) + SEND + P),
        ("buffer_pool", 10 * (F + TOUCHED) + P),
        ("pinned_async", 10 * (F + C) + P),
        ("stream_pipeline", 10 * F + C + P),
    ],
)
def test_by_hand_with_the_device_as_the_limit(strategy, expected):
    assert seconds(strategy, costs()) == pytest.approx(expected)


def test_by_hand_with_other_limits():
    slow = costs(process=30.0)
    # One worker that is slow waits only for the copy into its slot.
    one = seconds("stream_pipeline", slow, size(workers=1, slots=1, depth=1))
    assert one == pytest.approx(F + 10 * (C + 30.0))
    # Two of them, a slot each: the second one has its first batch a forward later.
    two = seconds("stream_pipeline", slow, size(workers=2, slots=2, depth=1))
    assert two == pytest.approx(2 * F + 5 * (C + 30.0))
    two_slots = seconds("stream_pipeline", slow, size(workers=1, slots=2))
    assert two_slots == pytest.approx(F + C + 10 * 30.0)
    # A copy that is slower than the forward.
    assert seconds("stream_pipeline", costs(copy=7.0)) == pytest.approx(F + 10 * 7.0 + P)
    # The feeder sends one batch at a time.
    sending = costs(send=9.0, process=0.0)
    assert seconds("multi_worker", sending, size(slots=20)) == pytest.approx(F + FRESH + 10 * 9.0)
    # And waits while the worker that is to have it is still at another one.
    one = seconds("multi_worker", costs(process=30.0), size(workers=1, slots=20))
    assert one == pytest.approx(F + FRESH + 10 * (SEND + 30.0))
    # Uploads wait for their turn on the computing stream, and run beside it on their own.
    assert seconds("pinned_async", costs(upload=0.5)) == pytest.approx(10 * (0.5 + F + C) + P)
    assert seconds("stream_pipeline", costs(upload=0.5)) == pytest.approx(0.5 + 10 * F + C + P)


def test_a_smaller_last_batch_costs_its_share():
    assert seconds("sequential", costs(), size(part=6)) == pytest.approx(9.25 * (F + FRESH + LOOP))


def test_stages_slow_each_other_down():
    beside = {"forward": {"copy": 1.0}}
    # Each forward but the first has a copy beside it: it goes at half its speed for that time.
    assert seconds("stream_pipeline", costs(beside)) == pytest.approx(10 * F + 9 * 0.5 * C + C + P)
    # Three workers are under way at once when the device is fast: each takes 1 + 2 * 0.5 as long.
    crowd = costs({"process": {"process": 0.5}}, forward=0.001, copy=0.001, process=10.0)
    assert seconds("stream_pipeline", crowd, size(batches=3)) == pytest.approx(20, abs=0.1)
    assert seconds("stream_pipeline", crowd, size(batches=1)) == pytest.approx(10, abs=0.1)


@pytest.mark.parametrize("slots", [1, 2, 5])
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_batch_once_in_each_lane_and_one_thing_at_a_time(strategy, workers, slots):
    beside = {"forward": {"copy": 0.1}, "process": {"process": 0.3, "copy": 0.2}}
    known = costs(beside, **{"hand-over": 0.01, "upload": 0.1, "queue": 0.3, "process": 9.0})
    depth = min(2, slots)
    found = predict(STRATEGIES[strategy], known, size(13, workers, slots, depth, part=3)).timeline
    for lane in ("compute", "upload", "copy"):
        assert [span.batch for span in found.lane(lane)] == list(range(13))
    processed = [s for s in found.spans if s.name == "process"]
    assert sorted(span.batch for span in processed) == list(range(13))
    by_batch = {(span.lane.split()[0], span.name, span.batch): span for span in found.spans}
    for batch in range(13):
        steps = [("upload", "upload"), ("compute", "forward"), ("copy", "copy")]
        steps.append(("host" if strategy == "sequential" else "worker", "process"))
        spans = [by_batch[(*step, batch)] for step in steps]
        for one, other in itertools.pairwise(spans):
            assert one.end <= other.start + 1e-9
    for lane in found.lanes:
        if lane != "host":
            for one, other in itertools.pairwise(found.lane(lane)):
                assert one.end <= other.start + 1e-9
    # A slot is taken when the copy starts and is free when the batch is processed.
    if strategy in ("buffer_pool", "pinned_async", "stream_pipeline"):
        for moment in [span.start for span in found.lane("copy")]:
            taken = [
                b for b in range(13)
                if by_batch["copy", "copy", b].start <= moment
                and by_batch["worker", "process", b].end > moment + 1e-9
            ]  # fmt: skip
            assert len(taken) <= slots


def test_a_strategy_of_one_s_own_is_predicted_as_it_is_written():
    def impatient(job, workers, pinned_pool):
        for index, images in enumerate(job.batches()):
            slot = pinned_pool.acquire()
            slot.copy_(job.forward(images), non_blocking=True)
            slot.event.synchronize()
            workers.submit(index, slot)
        return workers.results()

    assert predict(impatient, costs(), size()).seconds == pytest.approx(10 * (F + C) + P)

    def hoarder(job, workers, pool):
        return [pool.acquire() for _ in range(10)]

    with pytest.raises(LabError, match="wait for ever"):
        predict(hoarder, costs(), size())

    def odd(job, gpu):
        pass

    with pytest.raises(LabError, match="odd asks for 'gpu'"):
        predict(odd, costs(), size())


def test_a_prediction_says_what_it_is(tmp_path):
    found = predict_all(STRATEGIES.values(), costs(), size())
    title = found["pinned_async"].timeline.title()
    assert "PREDICTED device, profile NVIDIA H200: not a GPU" in title
    assert "waits" in found["pinned_async"].limit
    assert prediction_table(found, costs()).title.startswith("PREDICTED")
    path = save_predictions(found, tmp_path / "predicted.json")
    assert '"kind": "predicted"' in path.read_text()
    assert f'"sequential": {round(found["sequential"].samples_per_s, 3)}' in path.read_text()


def test_the_steady_rate_has_no_ends():
    known = costs(process=2000.0)
    found = predict(STRATEGIES["stream_pipeline"], known, size(40, workers=40, slots=40))
    assert found.samples_per_s < 0.15 < found.steady_samples_per_s
    assert found.steady_samples_per_s == pytest.approx(8 / F)


def test_the_largest_difference_is_explained():
    prediction = predict(STRATEGIES["buffer_pool"], costs(), size(20))
    spans = [
        span._replace(end=span.end + 0.7) if span.lane == "copy" else span
        for span in prediction.timeline.spans
    ]
    said = explain(prediction, Timeline(spans, "a", prediction.timeline.device))
    assert said.startswith("buffer_pool: the largest difference is copy in the lane copy")
    assert "2000.0 ms a batch predicted and 2700.0 ms recorded" in said
    nothing = Timeline([Span("host", "copy", 0, 1)], "a", prediction.timeline.device)
    assert "too few batches" in explain(prediction, nothing)


# Advice.


def test_the_smallest_size_that_is_enough():
    # 10 s of processing for 4 s of forward: two workers are too few, three are enough.
    known = replace(costs(process=10.0), host={**costs().host, "cores": 8})
    found = advise(known, size(workers=8, slots=16))
    assert (found.ceiling, found.limited_by) == (8 / F, "forward")
    assert found.reach == pytest.approx(8 / F)
    assert found.smallest.workers == 3
    # The copy's 1 s and the worker's 10 s, one batch every 4 s.
    assert found.smallest.slots == 3
    smaller = replace(found.smallest, slots=2, samples=800, depth=1)
    assert predict(STRATEGIES["stream_pipeline"], known, smaller).steady_samples_per_s < 0.99 * 2


def test_one_change_at_a_time_the_best_first():
    found = advise(costs(), size(), "pinned_async")
    assert found.now == pytest.approx(8 / (F + C))
    rates = dict(found.changes)
    assert list(rates.values()) == sorted(rates.values(), reverse=True)
    assert found.changes[0][0] == "a forward of half the time"
    assert rates["a forward of half the time"] == pytest.approx(8 / (F / 2 + C))
    assert rates["strategy stream_pipeline"] == pytest.approx(8 / F)
    assert rates["half the bytes (bfloat16 scores)"] == pytest.approx(8 / (F + C / 2))
    assert "depth" not in " ".join(rates) and "strategy buffer_pool" not in rates
    assert advice_table(found, "pinned_async").title.startswith("PREDICTED")


def test_advice_names_no_part_that_the_strategy_lacks():
    found = advise(costs(), size(), "sequential")
    assert not any("workers" in what or "slots" in what for what, _ in found.changes)
    assert summarize(predict(STRATEGIES["sequential"], costs(), size()).timeline).hidden == 0
