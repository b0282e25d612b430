"""The explorer: what it answers, in a live front end and without one."""

import subprocess
import sys
from dataclasses import replace

import pytest
from IPython.display import Image
from sample_record import sample_costs
from test_prediction import SECONDS

from labkit import LabError, explore
from labkit.explorer import (
    PRECISIONS,
    Explorer,
    answer,
    as_calibrated,
    host_bytes,
    is_live,
)
from labkit.pipelines import STRATEGIES


@pytest.fixture
def costs():
    return sample_costs(seconds=SECONDS, slowdowns={})


def test_what_was_calibrated_is_answered_as_it_is(costs):
    found = answer(costs, as_calibrated(costs))
    assert found.steady_samples_per_s == pytest.approx(8 / SECONDS["forward"])
    assert "PREDICTED" in found.timeline.title()


@pytest.mark.parametrize(
    ("change", "rate"),
    [
        ({"batch": 16}, 8 / 4.0),  # twice the work for twice the images
        ({"image": 512}, 8 / 16.0),  # four times the pixels
        ({"strategy": "pinned_async"}, 8 / 5.0),
        ({"strategy": "pinned_async", "precision": "bfloat16 scores"}, 8 / 4.5),
        ({"strategy": "pinned_async", "upload": 3.0, "precision": "bfloat16 scores"}, 8 / 7.5),
        ({"process_factor": 8.0}, 8 / 10.0),  # 20 s of processing, two workers
        ({"process_factor": 8.0, "workers": 8, "slots": 16}, 8 / 4.0),
    ],
)
def test_every_knob_does_what_it_says(costs, change, rate):
    if "upload" in change:  # a cost, and none of the knobs
        costs = costs.scaled({"upload": change.pop("upload")})
    question = replace(as_calibrated(costs), **change)
    assert answer(costs, question).steady_samples_per_s == pytest.approx(rate, rel=0.03)


def test_a_larger_model_takes_its_operations(costs):
    small = answer(costs, as_calibrated(costs))
    large = answer(costs, replace(as_calibrated(costs), model="deeplabv3_resnet50"))
    # 75 and 1248 thousand operations a pixel, by torch's own counter.
    factor = large.timeline.lane("compute")[0].seconds / small.timeline.lane("compute")[0].seconds
    assert 16 < factor < 17.5


def test_a_model_whose_operations_nobody_knows(costs):
    own = costs.scaled({}, model="a convolution")
    assert answer(own, as_calibrated(own)).samples_per_s > 0
    with pytest.raises(LabError, match="'a convolution' is for the GPU is not known"):
        answer(own, replace(as_calibrated(own), model="deeplabv3_resnet50"))


def test_precision_is_counted_from_what_was_calibrated(costs):
    half = costs.scaled({}, dtype="bfloat16")
    question = as_calibrated(half)
    assert question.precision == "bfloat16 scores"
    assert host_bytes(half, replace(question, slots=1)) == half.output_bytes
    full = replace(question, slots=1, precision="float32 scores")
    assert host_bytes(half, full) == 2 * half.output_bytes


def test_memory_on_the_host(costs):
    question = replace(as_calibrated(costs), slots=5)
    assert host_bytes(costs, question) == 5 * costs.output_bytes
    assert host_bytes(costs, replace(question, strategy="sequential")) == costs.output_bytes
    assert host_bytes(costs, replace(question, image=512)) == 20 * costs.output_bytes


def test_every_combination_of_choices_has_an_answer(costs):
    start = as_calibrated(costs)
    for strategy in STRATEGIES:
        for precision in PRECISIONS:
            asked = replace(
                start, strategy=strategy, precision=precision, workers=1, slots=1, depth=1
            )
            assert answer(costs, asked).samples_per_s > 0


def test_moving_a_control_redraws(costs):
    import ipywidgets

    explorer = Explorer(ipywidgets, (costs, replace(costs, workers=3)))
    first = explorer.picture.value
    assert "data:image/png;base64," in first and "samples/s" in explorer.words.value
    explorer.controls["strategy"].value = "sequential"
    assert explorer.picture.value != first
    assert '<img alt="Timeline. sequential' in explorer.picture.value
    explorer.controls["depth"].value = 8
    explorer.controls["slots"].value = 2
    assert "depth 8 needs at least 8 slots" in explorer.words.value
    explorer.controls["depth"].value = 2
    assert "samples/s" in explorer.words.value


def test_every_control_of_the_question_is_there(costs):
    import ipywidgets

    explorer = Explorer(ipywidgets, (costs,))
    assert explorer.controls.keys() == as_calibrated(costs).__dict__.keys()
    assert explorer.widget is not None


def test_without_a_live_front_end_there_is_a_figure_that_says_so(costs, capsys, monkeypatch):
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    assert not is_live()
    shown = explore(costs)
    assert isinstance(shown, Image) and shown.alt.startswith("Timeline.")
    monkeypatch.setenv("JPY_SESSION_NAME", "05.ipynb")
    assert is_live() and type(explore(costs)).__name__ == "VBox"
    assert isinstance(explore(costs, live=False), Image)


def test_without_ipywidgets_there_is_a_figure_that_says_so():
    code = (
        "import sys; sys.modules['ipywidgets'] = None\n"
        "sys.path.insert(0, 'tests')\n"
        "from sample_record import sample_costs\n"
        "from labkit import explore\n"
        "print(type(explore(sample_costs(), live=True)).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "Image"


def test_nothing_to_explore_gives_one_line():
    with pytest.raises(LabError, match="give what calibrate"):
        explore()
