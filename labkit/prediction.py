"""Predict what a strategy will reach, before it runs.

The strategy itself runs, on parts whose clock is calculated from what was calibrated
(virtual.py). It sees no measurement of any strategy: what it gets wrong is worth explaining.
"""

import datetime
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from .clock import Machine
from .costs import Costs
from .metrics import summarize
from .presets import Preset
from .ranges import listen
from .results import write_json
from .timeline import Span, Timeline
from .timing import needed_parts
from .virtual import VirtualJob, VirtualListener, VirtualPool, VirtualWorkers


@dataclass(frozen=True)
class Prediction:
    """What `strategy` needs for all samples of a job; its timeline says that it is predicted."""

    strategy: str
    samples: int
    batch: int
    workers: int
    seconds: float
    timeline: Timeline

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.seconds

    @property
    def steady_samples_per_s(self) -> float:
        """Without the two ends of the run, which count less the longer it is."""
        ends = sorted(span.end for span in self.timeline.lane("copy"))
        ends = ends[len(ends) // 4 :]
        # Workers that limit a run give slots back in bursts, so whole bursts are compared.
        burst = max(1, min(self.workers, len(ends) // 2))
        apart = (len(ends) - burst) // burst * burst
        first, last = ends[:burst], ends[apart : apart + burst]
        seconds = statistics.fmean(last) - statistics.fmean(first)
        return apart * self.batch / seconds if seconds > 0 else self.samples_per_s

    @property
    def limit(self) -> str:
        """Where the GPU waits in the steady state, and so which stage limits the strategy."""
        return summarize(self.timeline, self.timeline.steady()).sentence


def predict(strategy: Callable, costs: Costs, preset: Preset) -> Prediction:
    """The time that `strategy` takes on the machine and job of `costs`, with the samples,
    workers, slots and depth of `preset`.

    Any strategy will do that takes the parts the five take. Raises LabError for others.
    """
    machine = Machine(costs)
    job = VirtualJob(machine, preset.samples)
    names, parts, pool = needed_parts(strategy), {}, None
    for name in names & {"pool", "pinned_pool"}:
        pool = parts[name] = VirtualPool(job.device, preset.slots, name == "pinned_pool")
    count = (preset.workers or costs.workers) if "workers" in names else 0
    if count:
        parts["workers"] = VirtualWorkers(machine, count, pool, preset.slots)
    if "depth" in names:
        parts["depth"] = preset.depth
    with listen(VirtualListener(machine)) as heard:
        strategy(job, **parts)
        job.device.synchronize()
    timeline = Timeline(
        machine.spans + [Span("host", *values) for values in heard.ranges],
        source="predicted",
        device={
            "kind": "predicted",
            "name": "predicted",
            "profile": costs.device["profile"] or costs.device["name"],
        },
        strategy=strategy.__name__,
        job=f"{costs.job['model']}, batches of {costs.batch} "
        f"({costs.output_bytes / 1e6:.0f} MB of output)",
    )
    return Prediction(strategy.__name__, preset.samples, costs.batch, count, machine.now, timeline)


def predict_all(
    strategies: Iterable[Callable], costs: Costs, preset: Preset
) -> dict[str, Prediction]:
    """`predict` for each of `strategies`, by name."""
    return {strategy.__name__: predict(strategy, costs, preset) for strategy in strategies}


def save_predictions(predictions: dict[str, Prediction], path: str | Path) -> Path:
    """Write predictions down, to be held against what is measured later."""
    first = next(iter(predictions.values()))
    content = {
        "schema": 1,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": first.timeline.device,
        "predicted_samples_per_s": {
            name: round(prediction.samples_per_s, 3) for name, prediction in predictions.items()
        },
    }
    return write_json(content, path, "predictions")


def explain(prediction: Prediction, measured: Timeline) -> str:
    """In one sentence, where a run that was recorded differs most from its prediction."""
    found = [summarize(some, some.steady()) for some in (prediction.timeline, measured)]
    each = [
        {stage: seconds / metrics.batches for stage, seconds in metrics.stages.items()}
        for metrics in found
        if metrics.batches
    ]
    if len(each) < 2:
        return f"{prediction.strategy}: too few batches to compare."
    # A wait is what is left over: the cause lies in what is waited for.
    stages = [key for key in each[0].keys() & each[1].keys() if not key[1].startswith("wait")]
    stage = max(stages, key=lambda key: (abs(each[0][key] - each[1][key]), key))
    lane, name = stage
    where = "in the workers" if lane == "workers" else f"in the lane {lane}"
    predicted, real = (times[stage] * 1e3 for times in each)
    return (
        f"{prediction.strategy}: the largest difference is {name} {where}, "
        f"{predicted:.1f} ms a batch predicted and {real:.1f} ms recorded."
    )


def prediction_table(predictions: dict[str, Prediction], costs: Costs):
    """Predictions as a rich table: rates, gains, and where the GPU waits."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    rates = {name: prediction.samples_per_s for name, prediction in predictions.items()}
    title = f"PREDICTED from the profile of {costs.name}"
    table = Table(title=escape(title), title_justify="left", box=box.SIMPLE, padding=(0, 1))
    table.add_column("strategy", no_wrap=True)
    for name in ("samples/s", "gain"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("steady state")
    for name, prediction in predictions.items():
        gain = f"{rates[name] / rates['sequential']:.2f}x" if "sequential" in rates else ""
        table.add_row(name, f"{rates[name]:,.1f}", gain, prediction.limit)
    return table
