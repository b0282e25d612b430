"""Advice: how few workers, slots and copies in flight are enough, and what to change next.

All of it is predicted, for a run so long that its two ends do not count.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace

from .costs import WITH_SCORES, Costs
from .pipelines import STRATEGIES
from .prediction import predict
from .presets import Preset
from .timing import needed_parts

_ENOUGH = 0.99  # of what can be reached
_DEEPEST, _MOST = 3, 32  # copies in flight and workers that are tried


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
    now = _rate(costs, preset, strategy)
    # More workers may be slower, when they are in each other's way.
    counts = {min(2**n, _most(costs, preset)) for n in range(_MOST.bit_length())}
    best, workers = max((_plenty(costs, preset, count), count) for count in counts)
    reach = min(ceiling, max(best, now if strategy == "stream_pipeline" else 0.0))
    enough = min(_ENOUGH * reach, best)
    changes = [(what, _rate(*changed)) for what, *changed in _changes(costs, preset, strategy)]
    return Advice(
        ceiling=ceiling,
        limited_by=slowest,
        reach=reach,
        smallest=_smallest(costs, preset, workers, enough),
        now=now,
        changes=sorted(changes, key=lambda change: -change[1]),
    )


def _most(costs: Costs, preset: Preset) -> int:
    return min(_MOST, max(preset.workers, costs.host["cores"]))


def _rate(costs: Costs, preset: Preset, strategy: str = "stream_pipeline") -> float:
    # While slots last, even workers that are too slow hold nobody up: many more batches than slots.
    samples = (40 + 6 * preset.slots) * costs.batch
    return predict(
        STRATEGIES[strategy], costs, replace(preset, samples=samples)
    ).steady_samples_per_s


def _plenty(costs: Costs, preset: Preset, workers: int) -> float:
    """The rate with so many workers, and slots and depth enough."""
    return _rate(costs, replace(preset, workers=workers, slots=2 * workers + 4, depth=2))


def _smallest(costs: Costs, preset: Preset, workers: int, enough: float) -> Preset:
    """The fewest workers, then slots, then copies in flight whose rate is `enough`."""

    def by_workers(count: int) -> bool:
        return _plenty(costs, preset, count) >= enough

    workers = bisect_left(range(1, workers), True, key=by_workers) + 1
    sizes = []
    for depth in range(1, _DEEPEST + 1):
        size = replace(preset, workers=workers, depth=depth)

        def by_slots(slots: int, size: Preset = size) -> bool:
            return _rate(costs, replace(size, slots=slots)) >= enough

        slots = range(depth, 2 * workers + 5)
        sizes.append(replace(size, slots=slots[0] + bisect_left(slots[:-1], True, key=by_slots)))
    return min(sizes, key=lambda size: (size.slots, size.depth))


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
    half = {stage: costs.seconds[stage] / 2 for stage in WITH_SCORES}
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
        gain = round(rate / found.now - 1, 3) + 0.0  # never -0.0
        table.add_row(what, f"{rate:,.1f}", f"{gain:+.1%}")
    return table


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
