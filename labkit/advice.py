"""Advice: how few workers, slots and copies in flight are enough, and what to change next.

All of it is predicted, for a run so long that its two ends do not count.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from .costs import Costs
from .pipelines import STRATEGIES
from .prediction import Prediction, predict
from .presets import Preset
from .timing import needed_parts

_ENOUGH = 0.99  # of what can be reached
_DEEPEST = 4
_HALVED = ("fresh copy", "touched copy", "copy", "send", "process", "process in the loop")


@dataclass(frozen=True)
class Advice:
    """Rates are in samples/s. `ceiling` is the device's, by the slower one of forward and copy.

    `smallest` is the preset with the fewest workers, then slots, then copies in flight with which
    stream_pipeline comes within 1 % of `reach`: of the ceiling, or of what all cores reach.
    `changes` are (what, rate) for one change to what is there `now`, the best first.
    """

    ceiling: float
    limited_by: str
    reach: float
    smallest: Preset
    now: float
    changes: list[tuple[str, float]]


def advise(costs: Costs, preset: Preset, strategy: str = "stream_pipeline") -> Advice:
    """What to do on the machine and with the job of `costs`, from `strategy` and `preset` on."""
    slowest = max(("forward", "copy"), key=costs.seconds.get)
    ceiling = costs.batch / costs.seconds[slowest]
    preset = replace(preset, workers=preset.workers or costs.workers)
    most = max(preset.workers, costs.host["cores"])
    reach = min(ceiling, _rate(costs, _sized(preset, most, 2 * most + 4, _DEEPEST)))
    smallest = next(some for some in _sizes(costs, preset, most, _ENOUGH * reach))
    changes = [(what, _rate(*changed)) for what, *changed in _changes(costs, preset, strategy)]
    return Advice(
        ceiling=ceiling,
        limited_by=slowest,
        reach=reach,
        smallest=smallest,
        now=_rate(costs, preset, strategy),
        changes=sorted(changes, key=lambda change: -change[1]),
    )


def _rate(costs: Costs, preset: Preset, strategy: str = "stream_pipeline") -> float:
    return _long(costs, preset, strategy).steady_samples_per_s


def _long(costs: Costs, preset: Preset, strategy: str) -> Prediction:
    # While slots last, even workers that are too slow hold nobody up: many more batches than slots.
    batches = 40 + 8 * preset.slots
    return predict(STRATEGIES[strategy], costs, replace(preset, samples=batches * costs.batch))


def _sized(preset: Preset, workers: int, slots: int, depth: int) -> Preset:
    return replace(preset, workers=workers, slots=slots, depth=depth)


def _sizes(costs: Costs, preset: Preset, most: int, enough: float) -> Iterator[Preset]:
    """Sizes that are enough, the smallest first."""
    for workers in range(1, most + 1):
        if _rate(costs, _sized(preset, workers, 2 * most + 4, _DEEPEST)) < enough:
            continue
        for slots in range(1, 2 * most + 5):
            for depth in range(1, min(slots, _DEEPEST) + 1):
                size = _sized(preset, workers, slots, depth)
                if _rate(costs, size) >= enough:
                    yield size


def _changes(costs: Costs, preset: Preset, strategy: str) -> Iterator[tuple]:
    """Each single change: what it is, and the costs, preset and strategy that it leads to."""
    names = list(STRATEGIES)
    for name in names[names.index(strategy) + 1 :]:
        yield f"strategy {name}", costs, preset, name
    parts = needed_parts(STRATEGIES[strategy])
    if "workers" in parts:
        more = replace(preset, workers=preset.workers + 1)
        yield f"{more.workers} workers", costs, more, strategy
    if parts & {"pool", "pinned_pool"}:
        more = replace(preset, slots=2 * preset.slots)
        yield f"{more.slots} slots", costs, more, strategy
    if "depth" in parts and preset.depth < preset.slots:
        more = replace(preset, depth=preset.depth + 1)
        yield f"depth {more.depth}", costs, more, strategy
    half = {stage: costs.seconds[stage] / 2 for stage in _HALVED}
    yield "half the bytes (bfloat16 scores)", costs.scaled(half), preset, strategy
    forward = {"forward": costs.seconds["forward"] / 2}
    yield "a forward of half the time", costs.scaled(forward), preset, strategy


def advice_table(found: Advice, strategy: str):
    """Advice as a rich table, the best change first."""
    from rich import box
    from rich.table import Table

    size = found.smallest
    title = (
        f"PREDICTED. The device's ceiling is {found.ceiling:,.0f} samples/s, set by "
        f"{found.limited_by}. stream_pipeline comes within 1 % of {found.reach:,.0f} with "
        f"{_count(size.workers, 'worker')}, {_count(size.slots, 'slot')}, depth {size.depth}."
    )
    table = Table(title=title, title_justify="left", box=box.SIMPLE, padding=(0, 1))
    table.add_column(f"one change to {strategy}")
    table.add_column("samples/s", justify="right")
    table.add_column("gain", justify="right")
    table.add_row("as it is", f"{found.now:,.1f}", "")
    for what, rate in found.changes:
        table.add_row(what, f"{rate:,.1f}", f"{rate / found.now - 1:+.1%}")
    return table


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
