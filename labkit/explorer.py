"""explore: turn knobs and see at once what is predicted. Nothing runs but the predictor."""

import base64
import functools
import html
import io
import os
import sys
from dataclasses import dataclass, replace

from .costs import WITH_SCORES, Costs
from .errors import LabError
from .pipelines import STRATEGIES
from .plot_timeline import legend, plot_timelines
from .prediction import Prediction, predict
from .presets import MODELS, Preset, check_depth

_BATCHES, _SHOWN = 48, 3  # so many are predicted, and so many drawn
# What the model gives for each pixel: bytes, against 21 scores in float32.
PRECISIONS = {"float32 scores": 1.0, "bfloat16 scores": 1 / 2, "uint8, the best class": 1 / 84}
_AS = {
    "bfloat16": "bfloat16 scores",
    "float16": "bfloat16 scores",
    "uint8": "uint8, the best class",
}


@dataclass(frozen=True)
class Question:
    """What is asked: a strategy with its parts, and a job that may differ from the calibrated one.

    `image` is height and width in pixels, `process_factor` how many times as long as calibrated
    the post-processing takes.
    """

    strategy: str
    model: str
    batch: int
    image: int
    precision: str
    workers: int
    slots: int
    depth: int
    process_factor: float


def as_calibrated(costs: Costs, strategy: str = "stream_pipeline") -> Question:
    """The question that `costs` were calibrated for, with two slots a worker."""
    job, workers = costs.job, costs.workers
    precision = _AS.get(job["dtype"], next(iter(PRECISIONS)))
    return Question(
        strategy, job["model"], job["batch"], job["image"], precision, workers, 2 * workers, 2, 1.0
    )


def answer(costs: Costs, question: Question) -> Prediction:
    """The prediction for `question`, from what was calibrated for a job that may differ from it.

    Every stage is taken to grow with its bytes, the forward with its floating-point operations.
    Raises LabError for a depth above the number of slots, and for a model whose operations are
    not known.
    """
    check_depth(question.depth, question.slots)
    seconds = costs.seconds
    pixels, size = _pixels(costs, question), _size(costs, question)
    asked = {stage: seconds[stage] * size for stage in WITH_SCORES}
    asked["upload"] = seconds["upload"] * pixels
    asked["forward"] = seconds["forward"] * pixels * _work(costs.job["model"], question.model)
    for stage in ("process", "process in the loop"):
        asked[stage] *= question.process_factor
    job = {
        "model": question.model,
        "batch": question.batch,
        "output_bytes": round(costs.output_bytes * size),
    }
    size = Preset(
        "explored", question.model, question.batch, question.image, _BATCHES * question.batch,
        question.workers, question.slots, question.depth,
    )  # fmt: skip
    changed = replace(costs.scaled(asked, **job), input_bytes=round(costs.input_bytes * pixels))
    return predict(STRATEGIES[question.strategy], changed, size)


def host_bytes(costs: Costs, question: Question) -> int:
    """What the strategy holds on the host: its slots, or the batches that are under way."""
    batches = 1 if question.strategy == "sequential" else question.slots
    return round(costs.output_bytes * _size(costs, question)) * batches


def _size(costs: Costs, question: Question) -> float:
    """The bytes of a batch's scores, over those of the calibrated ones."""
    calibrated = PRECISIONS[as_calibrated(costs).precision]
    return _pixels(costs, question) * PRECISIONS[question.precision] / calibrated


def _pixels(costs: Costs, question: Question) -> float:
    """The pixels of a batch, over those of the calibrated one."""
    return question.batch * question.image**2 / (costs.batch * costs.job["image"] ** 2)


def _work(calibrated: str, model: str) -> float:
    """The operations of `model` for a pixel, over those of the calibrated one."""
    if calibrated == model:
        return 1.0
    for name in (calibrated, model):
        if name not in MODELS:
            raise LabError(f"how much work {name!r} is for the GPU is not known: calibrate it")
    return _flops(model) / _flops(calibrated)


@functools.cache
def _flops(model: str) -> float:
    """Floating-point operations of one forward for a pixel."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from torchvision.models import segmentation

    with torch.device("meta"), torch.inference_mode():
        network = getattr(segmentation, model)(weights=None, weights_backbone=None).eval()
        network.aux_classifier = None
        with FlopCounterMode(display=False) as counter:
            network(torch.empty(1, 3, 256, 256))
    return counter.get_total_flops() / 256**2


def is_live() -> bool:
    """Is there a front end that shows widgets? Headless runs and static pages have none.

    Jupyter's server names the notebook to its kernel; papermill and nbconvert do not.
    """
    return "JPY_SESSION_NAME" in os.environ or "google.colab" in sys.modules


def explore(*machines: Costs, live: bool | None = None):
    """An explorer of what is predicted for one machine, or for several to choose from.

    Shows widgets in a live notebook, and one static figure where there are none, or no
    ipywidgets. `live` overrules the guess. Raises LabError without a machine.
    """
    if not machines:
        raise LabError("nothing to explore: give what calibrate() returned")
    try:
        import ipywidgets
    except ImportError:
        return _static(machines[0], "ipywidgets is not installed")
    if not (is_live() if live is None else live):
        return _static(machines[0], "open this notebook in JupyterLab")
    return Explorer(ipywidgets, machines).widget


def _static(costs: Costs, why: str):
    from IPython.display import HTML, Image, display

    question = as_calibrated(costs)
    prediction = answer(costs, question)
    figure = plot_timelines(prediction.timeline, batches=_SHOWN)
    display(HTML(_words(costs, question, prediction)))
    display(HTML(f"<p>A static figure. For the explorer with its controls: {why}.</p>"))
    return Image(data=_png(figure), alt=figure.get_label())


def _png(figure) -> bytes:
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=80)
    return picture.getvalue()


def _words(costs: Costs, question: Question, prediction: Prediction) -> str:
    """Throughput, ceiling, host memory and the limit, as HTML."""
    lanes = (prediction.timeline.lane(lane)[0] for lane in ("compute", "copy"))
    slowest = max(lanes, key=lambda span: span.seconds)
    ceiling = question.batch / slowest.seconds
    facts = {
        "predicted, steady state": f"{prediction.steady_samples_per_s:,.0f} samples/s",
        "the device's ceiling": f"{ceiling:,.0f} samples/s, by {slowest.stage}",
        "scores on the host": f"{host_bytes(costs, question) / 1e6:,.0f} MB",
    }
    cell = "<td style='padding-right:2em;text-align:left'>{}<br><b>{}</b></td>"
    cells = "".join(cell.format(*map(html.escape, fact)) for fact in facts.items())
    title = html.escape(prediction.timeline.title())
    return f"<p><b>{title}</b></p><table><tr>{cells}</tr></table><p>{prediction.limit}</p>"


class Explorer:
    """The controls, and what they show. `widget` holds all of it."""

    def __init__(self, widgets, machines: tuple[Costs, ...]):
        self._machines = {f"{n}: {costs.name}": costs for n, costs in enumerate(machines, 1)}
        costs = machines[0]
        start = as_calibrated(costs)
        calibrated = [costs.job for costs in machines]
        models = list(dict.fromkeys([*(job["model"] for job in calibrated), *MODELS]))
        style = {"style": {"description_width": "9em"}, "layout": {"width": "24em"}}

        def choice(options, value, name):
            return widgets.Dropdown(options=options, value=value, description=name, **style)

        def slider(low, high, value, name):
            return widgets.IntSlider(
                value, min(low, value), max(high, value), description=name,
                continuous_update=False, **style,
            )  # fmt: skip

        powers = sorted({1, 2, 4, 8, 16, 32, 64, 128, *(job["batch"] for job in calibrated)})
        images = sorted({64, 128, 256, 384, 512, 1024, *(job["image"] for job in calibrated)})
        self.controls = {
            "strategy": choice(list(STRATEGIES), start.strategy, "strategy"),
            "model": choice(models, start.model, "model"),
            "batch": choice(powers, start.batch, "batch"),
            "image": choice(images, start.image, "image size"),
            "precision": choice(list(PRECISIONS), start.precision, "precision"),
            "workers": slider(1, 32, start.workers, "workers"),
            "slots": slider(1, 64, start.slots, "slots"),
            "depth": slider(1, 8, start.depth, "depth"),
            "process_factor": widgets.FloatLogSlider(
                1.0, base=2, min=-4, max=4, step=0.5, description="processing cost",
                continuous_update=False, **style,
            ),
        }  # fmt: skip
        self.machine = choice(list(self._machines), next(iter(self._machines)), "machine")
        # The picture as HTML: ipywidgets' own Image has no text alternative in the page.
        self.words, self.picture = widgets.HTML(), widgets.HTML()
        for control in (self.machine, *self.controls.values()):
            control.observe(self._redraw, "value")
        columns = [self.machine, *self.controls.values()]
        boxes = [widgets.VBox(columns[first::2]) for first in (0, 1)]
        self.widget = widgets.VBox(
            [widgets.HBox(boxes), self.words, self.picture, widgets.HTML(legend())]
        )
        self._redraw()

    def _redraw(self, change=None) -> None:
        costs = self._machines[self.machine.value]
        question = Question(**{name: control.value for name, control in self.controls.items()})
        try:
            prediction = answer(costs, question)
        except LabError as error:
            self.words.value = f"<p>{html.escape(str(error))}</p>"
            return
        figure = plot_timelines(prediction.timeline, batches=_SHOWN)
        # Title and legend are words beside the picture: most of the time goes into text.
        figure.legends.clear()
        figure.axes[0].set_title("", loc="left")
        source = base64.b64encode(_png(figure)).decode()
        alternative = html.escape(figure.get_label())
        self.picture.value = f'<img alt="{alternative}" src="data:image/png;base64,{source}">'
        self.words.value = _words(costs, question, prediction)
