"""Random schedules: whatever the sizes, speeds and failures, the right bytes, once, in order."""

import functools
import time

import helpers
import pytest
import torch
from conftest import make_job
from helpers import Tiny, fingerprint, images, make_device, profile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from test_pipelines import run

from labkit import BufferPool, LabError, OutputWorkers
from labkit.pipelines import STRATEGIES
from labkit.workers import WorkerError

pytestmark = pytest.mark.timeout(280, method="signal")
SETTINGS = {
    "deadline": None,
    "derandomize": True,  # the same schedules each time: a failure here is a failure there
    "database": None,
    "suppress_health_check": list(HealthCheck),
}
# Seconds that a kernel on eight images takes, and bytes a second of a copy (32 KiB a batch).
PROFILES = {
    (kernel, copy): profile(f"kernel {kernel}, copy {copy}", kernel, rate, rate)
    for kernel in (0.0, 1e-3)
    for copy, rate in {"instant": 1e12, "0.7 ms": 5e7, "3 ms": 1e7}.items()
}
EVERY_IMAGE = images(60)
EVERY_SCORE = Tiny()(EVERY_IMAGE)


def jitter(batch, tensor, milliseconds, bad=None):
    """`fingerprint` after a while, which is another for each batch; `bad` fails."""
    time.sleep(milliseconds[batch % len(milliseconds)] * 1e-3)
    if batch == bad:
        raise ValueError("as was asked for")
    return fingerprint(batch, tensor)


@st.composite
def schedules(draw):
    slots = draw(st.integers(1, 4))
    batch = draw(st.integers(1, 8))
    count = draw(st.integers(1, 7))
    bad = draw(st.none() | st.integers(0, count - 1))
    return {
        "profile": draw(st.sampled_from(sorted(PROFILES))),
        "batch": batch,
        "samples": max(1, count * batch - draw(st.integers(0, batch - 1))),
        "milliseconds": draw(st.lists(st.sampled_from([0, 0, 0.3, 2]), min_size=1, max_size=3)),
        "bad": bad if draw(st.booleans()) else None,
        "parts": {
            "slots": slots,
            "workers": draw(st.integers(1, 3)),
            "depth": draw(st.integers(1, slots)),
        },
    }


def check_schedule(schedule, threads):
    device = make_device("emulated", PROFILES[schedule["profile"]])
    samples, bad = schedule["samples"], schedule["bad"]
    process = functools.partial(jitter, milliseconds=schedule["milliseconds"])
    job = make_job(device, process, schedule["batch"], samples)
    scores = EVERY_SCORE[:samples] if samples <= 60 else None
    expected = [fingerprint(i, each) for i, each in enumerate(scores.split(schedule["batch"]))]
    for strategy in STRATEGIES.values():
        if bad is not None and strategy.__name__ != "sequential":
            job.process = functools.partial(process, bad=bad)
            with pytest.raises(WorkerError) as failure:
                run(strategy, job, threads=threads, **schedule["parts"])
            assert failure.value.batch == bad
            for index, result in failure.value.results.items():
                assert result == expected[index]
        job.process = process
        assert run(strategy, job, threads=threads, **schedule["parts"]) == expected
    device.synchronize()
    job.close()
    assert not device._page_locked


@settings(max_examples=120, **SETTINGS)
@given(schedules())
def test_every_schedule_gives_what_the_model_gives(schedule):
    check_schedule(schedule, threads=True)


@settings(max_examples=4, **SETTINGS)
@given(schedules())
def test_every_schedule_gives_what_the_model_gives_with_processes(schedule):
    check_schedule(schedule, threads=False)


class Parts(RuleBasedStateMachine):
    """Pool, streams and workers, called in any order that a program might; a model beside them.

    `held`: slots of ours, each with what was last copied into it. `given`: what was submitted.
    """

    @initialize(slots=st.integers(1, 4), count=st.integers(1, 3), copy=st.sampled_from([1e12, 1e7]))
    def open(self, slots, count, copy):
        self.device = make_device("emulated", profile("stateful", 1e-3, copy, copy))
        self.pool = BufferPool(self.device, (8, 4), torch.float32, slots, page_locked=True)
        self.workers = OutputWorkers(helpers.scribble, count, self.pool, threads=True)
        self.streams = [self.device.Stream() for _ in range(2)]
        self.held, self.given, self.batch, self.value = {}, {}, 0, 0

    @rule()
    def acquire(self):
        if len(self.held) == self.pool.slots:
            with pytest.raises(LabError, match="slots are held"):
                self.pool.acquire()
            return
        slot = self.pool.acquire()
        assert slot not in self.held and slot.event.query()
        self.held[slot] = None

    @precondition(lambda self: self.held)
    @rule(
        data=st.data(), size=st.integers(0, 8), stream=st.integers(0, 1), non_blocking=st.booleans()
    )
    def fill(self, data, size, stream, non_blocking):
        slot = data.draw(st.sampled_from(sorted(self.held, key=lambda slot: slot.index)))
        slot.event.synchronize()  # or two copies into one slot would race, which is our fault
        self.value += 1
        host = torch.full((size, 4), float(self.value))
        with self.device.stream(self.streams[stream]):
            slot.copy_(self.device.upload(host), non_blocking=non_blocking)
        assert non_blocking or slot.event.query()
        self.held[slot] = host

    @precondition(lambda self: any(host is not None for host in self.held.values()))
    @rule(data=st.data(), wait=st.booleans())
    def submit(self, data, wait):
        filled = [slot for slot, host in self.held.items() if host is not None]
        slot = data.draw(st.sampled_from(sorted(filled, key=lambda slot: slot.index)))
        if wait:
            slot.event.synchronize()
        try:
            self.workers.submit(self.batch, slot)
        except LabError as error:
            assert "copy is running" in str(error) and not wait
            slot.event.synchronize()
            self.workers.submit(self.batch, slot)
        self.given[self.batch] = self.held.pop(slot)
        self.batch += 1
        with pytest.raises(LabError):  # it is the worker's now, or back in the pool
            self.workers.submit(self.batch, slot)

    @rule(size=st.integers(0, 8))
    def submit_a_tensor(self, size):
        self.value += 1
        host = torch.full((size, 4), float(self.value))
        self.workers.submit(self.batch, host.clone())
        self.given[self.batch] = host
        self.batch += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        slot = data.draw(st.sampled_from(sorted(self.held, key=lambda slot: slot.index)))
        self.pool.release(slot)
        del self.held[slot]
        with pytest.raises(LabError, match="released twice"):
            self.pool.release(slot)

    @rule()
    def results(self):
        found = self.workers.results()
        assert found == [fingerprint(batch, host) for batch, host in sorted(self.given.items())]
        self.given = {}

    @invariant()
    def held_slots_have_their_bytes(self):
        for slot, host in getattr(self, "held", {}).items():
            if host is not None and slot.event.query():
                assert torch.equal(slot.tensor, host)

    def teardown(self):
        if hasattr(self, "pool"):
            self.results()
            self.workers.close()
            self.pool.close()
            self.device.synchronize()
            assert not self.device._page_locked


def test_parts_in_any_order():
    run_state_machine_as_test(
        Parts, settings=settings(max_examples=500, stateful_step_count=25, **SETTINGS)
    )
