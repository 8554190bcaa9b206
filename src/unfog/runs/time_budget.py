"""Time budget of a run: plan its length anew from the measured pace as it trains, so that it ends in time."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from unfog.config.schema import Config
from unfog.errors import RequestError
from unfog.planning.timing import forward_passes, repetitions
from unfog.reporting.progress import format_duration
from unfog.reporting.records import LENGTH_EVENT, Row
from unfog.training.length import Length, Plan
from unfog.training.loop import Intervals

_CHECKS = 200  # of a run: often enough for its last percent, and few enough for state.json
_WINDOW = 0.05  # share of the budget over which the pace is measured
_TOLERANCE = 0.01  # share of the budget by which the end may move without a new plan
_TOLERANCE_LEFT = 0.05  # the same as a share of what is left, as the pace is no more certain than that
_AIM, _MOST = 0.08, 0.1  # share of previews, evaluation and checkpoints; the end may take what is between the two
_LEISURE = 0.7  # of the aim: only below it they come more often again, or it would go up and down
STRETCHES = tuple(2**k for k in range(11))
_FINAL_PREVIEWS = 1.5  # the last image shows one sample at every step, for about half of the time of a preview


class TimeBudget:
    """Plans how a run with a time budget goes on.

    Times of previews, evaluations and checkpoints are kept in steps, as they slow down with the steps when the machine
    has other work.

    Args:
        seconds: from the start of the command to its end.
        began: time of that start, by `time.monotonic`.
        step_seconds: time of a step, as measured before training.
        every: intervals of the run.
        costs: steps that a preview and an evaluation take, as far as known before the first.
    """

    def __init__(self, seconds: float, began: float, step_seconds: float, every: Intervals, costs: Mapping[str, float]):
        self.seconds, self.step_seconds = seconds, step_seconds
        self._began, self._every, self._clock = began, every, time.monotonic
        self._estimated, self._measured = dict(costs), dict[str, float]()
        self._aside = 0.0  # seconds that were not training
        self._marks: deque[tuple[float, int]] = deque()  # seconds of training, and steps
        self._checked = -math.inf
        self._paced = False  # the pace was measured in this run
        self._exit = 0.0  # seconds of the end of the process

    @contextmanager
    def aside(self, kind: str) -> Iterator[None]:
        """Count the time inside as that of a preview, an evaluation ("evaluate"), a checkpoint ("save") or the like."""
        started = self._clock()
        yield
        spent = self._clock() - started
        self._aside += spent
        cost = spent / self.step_seconds
        # A mean, as metrics are measured in some evaluations only.
        self._measured[kind] = (self._measured.get(kind, cost) + cost) / 2

    @staticmethod
    def estimated_costs(config: Config, held_out: int) -> dict[str, float]:
        """Return the steps that a preview and an evaluation take, by their numbers of forward passes."""
        passes, steps = forward_passes(config, held_out), max(1, config.training.images // config.training.batch)
        times = {name: repetitions(getattr(config, name).every, steps) for name in ("preview", "evaluate")}
        return {name: passes[name] / count / (passes["training"] / steps) for name, count in times.items()}

    @staticmethod
    def check_left(seconds: float, began: float, step_seconds: float, costs: Mapping[str, float]) -> None:
        """RequestError if a time budget is over before a step and the preview at the end."""
        spent = time.monotonic() - began
        needed = step_seconds * (1 + _FINAL_PREVIEWS * costs["preview"])
        if spent + needed > seconds:
            raise RequestError(
                f"a budget of {format_duration(seconds)} leaves no time to train: the start took {spent:.2g} s, and "
                f"one step with the preview at the end takes about {needed:.2g} s; give --budget "
                f"{math.ceil(2 * (spent + needed))}s or more, or --steps"
            )

    def affordable(self, due: list[str]) -> list[str]:
        """Return which of the hooks can be called before the first step, if they are to be called at the end too."""
        kept = list(due)
        for name in ("evaluate", "preview"):
            if 2 * self.step_seconds * sum(map(self._cost, kept)) > _MOST * self.seconds and name in kept:
                kept.remove(name)
        return kept

    def due(self, step: int, last: bool) -> bool:
        """Return whether to plan anew after step number `step`."""
        now = self._clock()
        if not self._marks:  # after the first step, which also allocates and compiles
            self._marks.append((now - self._aside, step))
            # The end takes a small part of what the start took: of imports, decoding and measuring.
            self._exit = min(5.0, 0.5 + 0.1 * (now - self._aside - self._began))
        return last or now - self._checked >= self.seconds / _CHECKS

    def plan(self, step: int, length: Length) -> Plan | None:
        """Return how the run goes on after `step` steps if that is not as planned."""
        self._checked = self._clock()
        self._measure_pace(step)
        left = (self._began + self.seconds - self._exit - self._checked) / self.step_seconds
        before = length.at(step)
        stretch = self._choose_stretch(step, left, before.stretch)
        steps = step + self._affordable_steps(step, left, stretch)
        if not self._marks:  # nothing is trained yet, and a run has a step at least
            steps = max(steps, step + 1)
        tolerance = max(_TOLERANCE * self.seconds / self.step_seconds, _TOLERANCE_LEFT * left)
        if abs(steps - before.steps) <= tolerance and stretch == before.stretch:
            return None
        return Plan(step, steps, stretch, length.position(step))

    def describe(self, plan: Plan) -> str:
        """Return the reason of a plan that was made just now."""
        left = self._began + self.seconds - self._checked
        return f"{self.step_seconds:.3g} s a step, and {format_duration(left)} of {format_duration(self.seconds)} left"

    def _measure_pace(self, step: int) -> None:
        now = self._checked - self._aside
        # The newest mark that is old enough stays, and those after it.
        while len(self._marks) > 1 and now - self._marks[1][0] >= _WINDOW * self.seconds:
            self._marks.popleft()
        if self._marks and step > self._marks[0][1]:
            before = self.step_seconds
            self.step_seconds = max((now - self._marks[0][0]) / (step - self._marks[0][1]), 1e-9)
            if not self._paced:  # what is measured so far was divided by a guess
                self._measured = {kind: cost * before / self.step_seconds for kind, cost in self._measured.items()}
            self._paced = True
            self._marks.append((now, step))

    def _choose_stretch(self, step: int, left: float, now: int) -> int:
        """Return the factor on the intervals with which previews, evaluations and checkpoints take their share."""

        def share(stretch: int) -> float:
            steps = self._affordable_steps(step, left, stretch)
            to_come = self._aside_steps(step, steps, stretch) + self._final_steps(stretch)
            return (self._aside + to_come * self.step_seconds) / self.seconds

        if now and share(now) <= _MOST:
            none_between = self._aside_steps(step, self._affordable_steps(step, left, now), now) == 0
            if none_between or share(now) <= _AIM:
                return now // 2 if now > 1 and share(now // 2) <= _LEISURE * _AIM else now
        aim = _AIM if now else _LEISURE * _AIM
        rarest = STRETCHES[-1] if now and share(STRETCHES[-1]) <= _MOST else 0
        return next((stretch for stretch in STRETCHES if share(stretch) <= aim), rarest)

    def _affordable_steps(self, step: int, left: float, stretch: int) -> int:
        """Return the most steps after step number `step` that end in time, if the time is enough for `left` in all."""
        left -= self._final_steps(stretch)
        low, high = 0, max(1, int(left) + 1)  # the first is affordable, the second is not
        while high - low > 1:
            middle = (low + high) // 2
            fits = middle + self._aside_steps(step, middle, stretch) <= left
            low, high = (middle, high) if fits else (low, middle)
        return low

    def _aside_steps(self, step: int, steps: int, stretch: int) -> float:
        """Return what comes between the next `steps` steps, in steps."""
        every, end = self._every.stretched(stretch), step + max(1, steps) - 1
        apart = {"preview": every.preview, "evaluate": every.evaluate, "save": every.checkpoint}
        apart["averages"] = every.ema_snapshot
        return sum(self._cost(name) * (end // n - step // n) for name, n in apart.items() if n > 0)

    def _final_steps(self, stretch: int) -> float:
        """Return what comes after the last step, in steps."""
        evaluation = self._cost("evaluate") if stretch and self._every.evaluate > 0 else 0.0
        return evaluation + _FINAL_PREVIEWS * self._cost("preview") + self._cost("save") + self._cost("write")

    def _cost(self, kind: str) -> float:
        return self._measured.get(kind, self._estimated.get(kind, 0.0))


def _recorded_plans(events: list[Row], first: int, after: int) -> list[Plan]:
    """Return the plans of events for a run of `first` steps in its settings, from the step `after` on.

    That step is among them, as a resume plans before it trains: its checkpoint does not have that plan.
    """
    found = Length()
    for row in events:
        if row.get("kind") == LENGTH_EVENT and row.get("first") == first:
            with suppress(KeyError, TypeError, ValueError, OverflowError):
                found.add([Plan.of(*(row[name] for name in Plan._fields))])
    return [plan for plan in found.plans if plan.step >= after]


def resume_length(length: Length, first: int, step: int, events: list[Row], anew: bool) -> Plan | None:
    """Continue a length at `step`, with `first` steps in the settings and the plans that events have for later steps.

    If the length is given `anew`, such plans are void. Returns the plan that says so, which is to be recorded.
    """
    length.adopt(first)
    length.add(_recorded_plans(events, first, step))
    if not (anew and length.plans):
        return None
    fixed = Plan(step, first, 1, float(step))
    length.add([fixed])
    return fixed
