"""A clock that is calculated: SimPy's, and all the work that is under way on it.

Work slows down what runs beside it, by what was calibrated (costs.py). Whenever something begins
or ends, every other work's speed is set anew.
"""

from collections import Counter
from collections.abc import Callable

import simpy

from .costs import Costs
from .errors import LabError
from .timeline import Span


class _Work:
    __slots__ = ("stage", "left", "rate", "then")

    def __init__(self, stage: str, left: float, then: Callable[[], None]):
        self.stage, self.left, self.then = stage, left, then


class Machine:
    """The clock, and all work that is under way. `spans` is what the device and workers did."""

    def __init__(self, costs: Costs):
        self.env = simpy.Environment()
        self.costs = costs
        self.spans: list[Span] = []
        self._active: list[_Work] = []
        self._stages: Counter[str] = Counter()
        self._moment = 0.0  # up to which the work is reckoned
        self._alarm = None

    @property
    def now(self) -> float:
        return self.env.now

    def start(self, stage: str, seconds: float, then: Callable[[], None]) -> None:
        """Begin `stage`, which takes `seconds` when nothing is beside it; then call `then`."""
        self._reckon()
        self._active.append(_Work(stage, seconds, then))
        self._stages[stage] += 1
        self._plan()

    def wait(self, event: simpy.Event) -> None:
        """The main loop waits for `event`: the clock moves until it has happened.

        Raises LabError when nothing is under way that could make it happen.
        """
        if event.triggered:
            return
        try:
            self.env.run(until=event)
        except RuntimeError:
            raise LabError(
                "this strategy would wait for ever: give slots to the workers before it waits"
            ) from None

    def spend(self, stage: str, seconds: float) -> None:
        """The main loop does `stage` itself."""
        if seconds:
            done = self.env.event()
            self.start(stage, seconds, done.succeed)
            self.env.run(until=done)

    def _reckon(self) -> None:
        passed = self.env.now - self._moment
        if passed:
            self._moment = self.env.now
            for work in self._active:
                work.left -= passed * work.rate

    def _plan(self) -> None:
        """Set how fast everything goes now, and an alarm for what ends first."""
        self._alarm = None
        if not self._active:
            return
        rates = {stage: self._rate(stage) for stage, count in self._stages.items() if count}
        for work in self._active:
            work.rate = rates[work.stage]
        first = min(self._active, key=lambda work: work.left / work.rate)
        self._alarm = self.env.timeout(max(0.0, first.left / first.rate), first)
        self._alarm.callbacks.append(self._ring)

    def _rate(self, stage: str) -> float:
        beside = self.costs.slowdowns.get(stage)
        if not beside:
            return 1.0
        extra = 0.0
        for other, share in beside.items():
            extra += share * (self._stages[other] - (other == stage))
        return 1 / (1 + extra)

    def _ring(self, alarm: simpy.Event) -> None:
        if alarm is not self._alarm:  # the plan has changed since
            return
        self._reckon()
        alarm.value.left = 0.0
        done = [work for work in self._active if work.left <= 1e-9]
        self._active = [work for work in self._active if work.left > 1e-9]
        for work in done:
            self._stages[work.stage] -= 1
        self._plan()
        for work in done:
            work.then()
