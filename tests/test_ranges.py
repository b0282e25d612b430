"""annotate: what each listener sees, what it costs to nobody, and who may be missing."""

import subprocess
import sys
import threading
import time

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from labkit import annotate, ranges
from labkit.ranges import Listener, current_listener, listen


def test_a_listener_gets_name_times_batch_and_bytes():
    before = time.perf_counter()
    with listen(Listener()) as heard, annotate("copy", batch=3, bytes=100):
        pass
    [(name, start, end, batch, nbytes)] = heard.ranges
    assert (name, batch, nbytes) == ("copy", 3, 100)
    assert before <= start <= end <= time.perf_counter()


def test_nested_ranges_end_inside_out():
    with listen(Listener()) as heard, annotate("outer"), annotate("inner"):
        pass
    (inner, i_start, i_end, *_), (outer, o_start, o_end, *_) = heard.ranges
    assert (inner, outer) == ("inner", "outer")
    assert o_start <= i_start <= i_end <= o_end


def test_a_range_is_kept_and_the_error_goes_on_when_its_block_fails():
    with listen(Listener()) as heard, pytest.raises(ZeroDivisionError), annotate("fails"):
        _ = 1 / 0
    assert [name for name, *_ in heard.ranges] == ["fails"]
    assert current_listener() is None


def test_a_listener_hears_its_own_thread_only():
    def elsewhere():
        with annotate("elsewhere"):
            pass

    with listen(Listener()) as heard:
        other = threading.Thread(target=elsewhere)
        other.start()
        other.join()
    assert heard.ranges == []


def test_listening_ends_with_its_block_and_nests():
    with listen(Listener()) as outer:
        with listen(Listener()) as inner, annotate("a"):
            pass
        with annotate("b"):
            pass
    with annotate("c"):
        pass
    assert [name for name, *_ in inner.ranges] == ["a"]
    assert [name for name, *_ in outer.ranges] == ["b"]


def test_torch_profiler_sees_a_range_of_that_name():
    with profile(activities=[ProfilerActivity.CPU]) as profiled, annotate("forward", batch=1):
        torch.zeros(3).add_(1)
    assert "forward" in {event.name for event in profiled.events()}


class Domain:
    """What an NVTX domain is asked to do: a real one shows nothing without a tool."""

    def __init__(self):
        self.calls = []

    def get_event_attributes(self, message, payload):
        return message, payload

    def push_range(self, attributes):
        self.calls.append(("push", *attributes))

    def pop_range(self):
        self.calls.append("pop")


def test_nvtx_gets_the_name_and_the_batch_as_payload(monkeypatch):
    monkeypatch.setattr(ranges, "_domain", domain := Domain())
    with annotate("copy", batch=7), annotate("wait"):
        pass
    assert domain.calls == [("push", "copy", 7), ("push", "wait", None), "pop", "pop"]


def test_the_real_nvtx_takes_these_arguments():
    nvtx = pytest.importorskip("nvtx")
    domain = nvtx.Domain("labkit-test")  # not the dummy that get_domain gives without a tool
    for payload in (None, 0, 2**40):
        domain.push_range(domain.get_event_attributes(message="forward", payload=payload))
        domain.pop_range()


def test_without_nvtx_everything_else_works():
    code = (
        "import sys; sys.modules['nvtx'] = None\n"
        "from labkit.ranges import Listener, annotate, listen\n"
        "with listen(Listener()) as heard, annotate('forward', batch=2):\n    pass\n"
        "print(heard.ranges[0][0], heard.ranges[0][3])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.split()) == (0, ["forward", "2"]), done.stderr
