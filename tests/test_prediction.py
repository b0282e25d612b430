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


def test_the_small_costs_count_too():
    assert seconds("stream_pipeline", costs(**{"hand-over": 0.5})) == pytest.approx(
        10 * F + C + 0.5 + P
    )
    # Queuing is the main loop's own time: the device starts at once, the loop goes on later.
    assert seconds("sequential", costs(queue=F + 1)) == pytest.approx(10 * (F + 1 + FRESH + LOOP))
    # As many bare tensors are under way as there are slots, and no more.
    slow = costs(process=30.0)
    one = predict(STRATEGIES["multi_worker"], slow, size(workers=1, slots=2)).timeline
    forwards = [span.start for span in one.lane("compute")]
    assert forwards[3] >= FRESH + F + SEND + 30.0 > forwards[2]
    # Without a number of workers in the preset: as many as were calibrated.
    assert seconds("buffer_pool", slow, size(workers=0)) == pytest.approx(
        seconds("buffer_pool", slow, size(workers=2))
    )
    assert predict(STRATEGIES["buffer_pool"], slow, size(workers=0)).workers == 2


def test_the_main_loop_learns_late_that_a_batch_is_done():
    """As with the real ones: a worker is chosen by what was collected, not by what is done."""
    known = costs(process=9.0, forward=10.0)
    found = predict(STRATEGIES["buffer_pool"], known, size(6, workers=2, slots=6)).timeline
    lanes = {span.batch: span.lane for span in found.spans if span.name == "process"}
    # Nothing is collected before the end, so they are dealt out in turn, though 0 was idle.
    assert [lanes[batch] for batch in range(6)] == ["worker 0", "worker 1"] * 3


def test_a_smaller_last_batch_costs_its_share():
    sending = costs(send=40.0, process=0.0)
    whole, part = (seconds("multi_worker", sending, size(2, part=n)) for n in (0, 6))
    assert whole - part == pytest.approx(0.75 * 40.0)
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

    def two_streams(job, workers, pinned_pool):
        copies, filled = job.device.Stream(), []
        for index, images in enumerate(job.batches()):
            scores, computed = job.forward(images), job.device.Event()
            computed.record()
            copies.wait_event(computed)
            with job.device.stream(copies):
                filled.append((index, pinned_pool.acquire().copy_(scores, non_blocking=True)))
        for index, slot in filled:
            slot.event.synchronize()
            workers.submit(index, slot)
        return workers.results()

    # All copies are waited for in turn, each but the last behind a forward.
    found = predict(two_streams, costs(), size(slots=10, workers=10))
    assert found.seconds == pytest.approx(10 * F + C + P)

    def hoarder(job, workers, pool):
        return [pool.acquire() for _ in range(10)]

    with pytest.raises(LabError, match="no worker has one to give back"):
        predict(hoarder, costs(), size())

    def hasty(job, workers, pinned_pool):
        slot = pinned_pool.acquire()
        workers.submit(0, slot.copy_(job.forward(next(job.batches())), non_blocking=True))

    with pytest.raises(LabError, match="submitted while its copy is running"):
        predict(hasty, costs(), size())

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


@pytest.mark.parametrize(
    ("cores", "process"), [(4, 10.0), (3, 10.0), (8, 30.0), (2, 20.0), (16, 40.0), (6, 2.5)]
)
def test_the_smallest_size_reaches_it_and_one_smaller_does_not(cores, process):
    known = costs(forward=1.0, copy=0.3, process=process)
    known = replace(known, host={**known.host, "cores": cores})
    found = advise(known, size(workers=2, slots=4))
    right = min(8 / 1.0, 8 * cores / process)
    assert found.reach == pytest.approx(right, rel=0.005)

    def rate(**changes) -> float:
        """Over so many batches that neither the ends nor a period counts."""
        long = replace(found.smallest, **changes, samples=8 * 1500)
        return predict(STRATEGIES["stream_pipeline"], known, long).samples_per_s

    assert rate() > 0.98 * right
    smallest = found.smallest
    if smallest.workers > 1:
        assert rate(workers=smallest.workers - 1) < 0.99 * right
    if smallest.slots > smallest.depth:
        assert rate(slots=smallest.slots - 1) < 0.995 * right


def test_the_ceiling_is_the_slower_one_of_forward_and_copy():
    found = advise(costs(copy=9.0), size())
    assert (found.ceiling, found.limited_by) == (8 / 9.0, "copy")


def test_workers_in_each_other_s_way_are_not_advised():
    known = costs({"process": {"process": 1.5}}, forward=1.0, copy=1.0, process=4.0)
    found = advise(replace(known, host={**known.host, "cores": 8}), size(workers=1, slots=2))
    assert found.reach >= found.now * 0.999
    assert found.smallest.workers == 1


@pytest.mark.timeout(60)
def test_advice_comes_soon_for_a_large_machine():
    known = replace(costs(process=400.0), host={**costs().host, "cores": 10**9})
    assert advise(known, size(workers=2, slots=4)).smallest.workers == 32


def test_costs_of_next_to_nothing_have_a_rate():
    nothing = costs(**dict.fromkeys(SECONDS, 0.0))
    nothing.seconds["upload"] = 1.0
    for strategy in STRATEGIES.values():
        assert predict(strategy, nothing, size(5)).steady_samples_per_s > 0


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
