"""Time budget of a run: plan its length anew from the measured pace as it trains, so that it ends in time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from unfog.config.schema import Config
from unfog.errors import RequestError
from unfog.planning.auto_settings import SAID_START
from unfog.planning.pace import CallTimes, Pace
from unfog.planning.timing import forward_passes, repetitions
from unfog.reporting.progress import format_duration
from unfog.reporting.records import LENGTH_EVENT, Row
from unfog.text import plural
from unfog.training.length import NO_LIMIT, Length, LengthPlan
from unfog.training.loop import Intervals

_CHECKS = 200  # of a run: often enough for its last percent, and few enough for state.json
_WINDOW = 0.05  # share of the budget over which the pace is measured
_TOLERANCE = 0.01  # share of the budget by which the end may move without a new plan
_TOLERANCE_LEFT = 0.05  # the same as a share of what is left, as the pace is no more certain than that
_TRUST = 0.05  # share of the budget that the schedule of one plan may be ahead of the time
_NOTABLE, _NOTABLE_SHARE = 2.0, 0.002  # seconds, and share of the budget, from which on a pause is said
_AIM, _MOST = 0.08, 0.1  # share of previews, evaluation and checkpoints; the end may take what is between the two
_LEISURE = 0.7  # of the aim: only below it they come more often again, or it would go up and down
_SETTLED = 0.25  # share of the budget from which on a plan says how long the run will be
_NOTABLE_CHANGE, _APART = 1 / 3, 30.0  # change of the length that is printed, and seconds between such lines
STRETCHES = tuple(2**k for k in range(11))
_FINAL_PREVIEWS = 1.5  # the last image shows one sample at every step, for about half of the time of a preview


class TimeBudget:
    """Plans how a run with a time budget goes on.

    Args:
        seconds: from the start of the command to its end.
        began: time of that start, by `time.monotonic`.
        step_seconds: time of a step, as measured before training.
        every: intervals of the run.
        costs: steps that a preview and an evaluation take, as estimated before the first.
        timed: seconds of the same, where they are measured.
        suspended: returns for how many seconds the process was suspended so far.

    Attributes:
        pauses: lengths of pauses, in seconds, that are not reported yet.
    """

    def __init__(
        self,
        seconds: float,
        began: float,
        step_seconds: float,
        every: Intervals,
        costs: Mapping[str, float],
        suspended: Callable[[], float] = lambda: 0.0,
        timed: Mapping[str, float] = {},
    ):
        self.seconds, self.pauses = seconds, list[float]()
        self._began, self._every, self._clock, self._suspended = began, every, time.monotonic, suspended
        self._aside = 0.0  # seconds that were not training
        self._used = 0.0  # the same in costs that can be believed
        self._pace = Pace(step_seconds, _WINDOW * seconds)
        self._calls = CallTimes(self._pace, costs, timed)
        self._checked = -math.inf
        self._exit = 0.0  # seconds of the end of the process
        self._suspended_before = suspended()
        self._due_position = math.nan  # share of the schedule that the time so far is worth
        self._active_before = 0.0  # time of that, without pauses

    def describe_start(self, recorded: float) -> str:
        """Describe how long the start took, before the `recorded` seconds of the session; "" if that is little."""
        spent = self._clock() - self._began - recorded
        return f"; starting up took {format_duration(spent)}" if spent > SAID_START * self.seconds else ""

    @property
    def step_seconds(self) -> float:
        """Seconds that a step takes, as measured last."""
        return self._pace.step_seconds

    @contextmanager
    def aside(self, kind: str) -> Iterator[None]:
        """Count the time inside as that of a preview, an evaluation ("evaluate"), a checkpoint ("save") or the like."""
        started = self._awake()
        yield
        spent = self._awake() - started
        self._aside += spent
        self._used += self._calls.add(kind, spent)

    @staticmethod
    def estimated_costs(config: Config, held_out: int) -> dict[str, float]:
        """Return the steps that a preview and an evaluation take, by their numbers of forward passes."""
        passes, steps = forward_passes(config, held_out), max(1, config.training.images // config.training.batch)
        times = {name: repetitions(getattr(config, name).every, steps) for name in ("preview", "evaluate")}
        return {name: passes[name] / count / (passes["training"] / steps) for name, count in times.items()}

    @staticmethod
    def is_dear(costs: Mapping[str, float], step_seconds: float, seconds: float) -> bool:
        """Return whether previews at both ends, of these `costs` in steps, take more than their share of a budget."""
        return 2 * step_seconds * costs["preview"] > _MOST * seconds

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
        """Return the hooks of `due` to call before the first step.

        They are so few that they take at most their share of the budget if they are called again after the last step.
        """
        kept = list(due)
        for name in ("evaluate", "preview"):
            if 2 * self.step_seconds * sum(map(self._cost, kept)) > _MOST * self.seconds and name in kept:
                kept.remove(name)
        return kept

    def evaluates_at_end(self, stretch: int) -> bool:
        """Return whether to evaluate after the last step.

        A plan without evaluations in between, of `stretch` 0, has one there only if that takes little of the budget.
        """
        return self._every.evaluate > 0 and (stretch > 0 or bool(self.affordable(["evaluate"])))

    def due(self, step: int, last: bool) -> bool:
        """Return whether to plan anew after step number `step`. Called after each step."""
        now = self._clock()
        if not self._pace.started:
            # The end takes a small part of the time of the start: of imports, decoding and measuring.
            self._exit = min(5.0, 0.5 + 0.1 * (self._awake() - self._aside - self._began))
            self._active_before = self._active()
        pause = self._pace.add(self._awake() - self._aside, step)
        suspended = self._suspended()
        pause, self._suspended_before = pause + suspended - self._suspended_before, suspended
        if pause >= max(_NOTABLE, _NOTABLE_SHARE * self.seconds):
            self.pauses.append(pause)
        return last or now - self._checked >= self.seconds / _CHECKS

    def plan(self, step: int, length: Length) -> LengthPlan | None:
        """Return how the run goes on after `step` steps if that is not as planned."""
        self._checked = self._clock()
        self._measure_pace()
        left = (self._began + self.seconds - self._exit - self._checked) / self.step_seconds
        before = length.at(step)
        stretch = self._choose_stretch(step, left, before.stretch)
        steps = step + self._affordable_steps(step, left, stretch)
        if not self._pace.started:  # nothing is trained yet, and a run has a step at least
            steps = max(steps, step + 1)
        limit = self._limit(step, length, left - self._final_steps(stretch) + self._uncertain_steps())
        tolerance = max(_TOLERANCE * self.seconds / self.step_seconds, _TOLERANCE_LEFT * left)
        if abs(steps - before.steps) <= tolerance and stretch == before.stretch and self._reaches(step, length, limit):
            return None
        return LengthPlan(step, steps, stretch, length.position(step), limit)

    def _limit(self, step: int, length: Length, left: float) -> float:
        """Return up to where a plan may move the position in the schedule, with time for `left` more steps.

        A pace that is wrong moves it too fast. So it may be ahead of the time by a small part of the budget at most,
        or by half of what is left. It gets to the end once less is left than the length is certain to.
        """
        seconds, now = max(0.0, left * self.step_seconds), self._active()
        if math.isnan(self._due_position):
            self._due_position, self._active_before = length.position(step) / length.first, now
        spent, self._active_before = max(0.0, now - self._active_before), now
        self._due_position += (1 - self._due_position) * (spent / max(spent + seconds, 1e-9))
        if seconds <= _TOLERANCE * self.seconds:
            return float(length.first)
        ahead = min(0.5, _TRUST * self.seconds / seconds)
        return max(length.position(step), length.first * (1 - (1 - self._due_position) * (1 - ahead)))

    def _reaches(self, step: int, length: Length, limit: float) -> bool:
        """Return whether the present plan lets the position move on until the second check from now."""
        if (now := length.at(step)).limit > length.first:  # of a plan without a limit, or none
            return limit >= length.first
        steps = 2 * max(1, math.ceil(self.seconds / _CHECKS / self.step_seconds))
        return min(length.first, length.unlimited_position(step + steps)) <= now.limit

    def _active(self) -> float:
        """Return the seconds of the clock without suspension and pauses."""
        return self._awake() - self._pace.paused - self._pace.pending

    def _awake(self) -> float:
        return self._clock() - self._suspended()

    @property
    def is_settled(self) -> bool:
        """Return whether the length that was planned last can be believed: the pace was measured for long enough."""
        return self._pace.measured and self._checked - self._began >= _SETTLED * self.seconds

    def describe(self, plan: LengthPlan) -> str:
        """Return the reason of a plan that was made just now."""
        left = self._began + self.seconds - self._checked
        return f"{self.step_seconds:.3g} s a step, and {format_duration(left)} of {format_duration(self.seconds)} left"

    def _measure_pace(self) -> None:
        self._pace.measure()
        if self._pace.measured:
            self._calls.adopt_pace()

    def _choose_stretch(self, step: int, left: float, now: int) -> int:
        """Return the factor on the intervals with which previews, evaluations and checkpoints take their share."""

        def share(stretch: int) -> float:
            steps = self._affordable_steps(step, left, stretch)
            to_come = self._aside_steps(step, steps, stretch) + self._final_steps(stretch)
            return (self._used + to_come * self.step_seconds) / self.seconds

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
        """Return the time of previews, evaluations and saves during the next `steps` steps, in steps."""
        every, end = self._every.stretched(stretch), step + max(1, steps) - 1
        apart = {"preview": every.preview, "evaluate": every.evaluate, "save": every.checkpoint}
        apart["averages"] = every.ema_snapshot
        return sum(self._cost(name) * (end // n - step // n) for name, n in apart.items() if n > 0)

    def _final_steps(self, stretch: int) -> float:
        """Return the time of the work after the last step, in steps."""
        evaluation = self._cost("evaluate") if self.evaluates_at_end(stretch) else 0.0
        return evaluation + _FINAL_PREVIEWS * self._cost("preview") + self._cost("save") + self._cost("write")

    def _uncertain_steps(self) -> float:
        """Return the uncertain time at the end, in steps: half of a last preview that was only estimated."""
        return 0.0 if self._calls.was_called("preview") else 0.5 * _FINAL_PREVIEWS * self._cost("preview")

    def _cost(self, kind: str) -> float:
        """Return the time of a preview, an evaluation ("evaluate") or similar work now, in steps."""
        return self._calls.seconds(kind) / self.step_seconds


class PlanNotices:
    """Sentences on the plan of a run: of notable changes alone, each half minute at most, as the first paces are rough.

    Attributes:
        clock: returns the time in seconds.
        steps: length that was printed last.
    """

    def __init__(self) -> None:
        self.clock, self.steps, self._hooks = time.monotonic, 0, ""
        self._said_at = self.clock()

    def describe(self, plan: LengthPlan, budget: TimeBudget) -> list[str]:
        """Return the sentences to print of the plan that holds now; none if they were printed, or others just now."""
        said, hooks = [], self._describe_hooks(plan.stretch, budget)
        if hooks and not self._hooks:  # of the first plan that changes them
            self._hooks = hooks
            said.append(hooks)
        if self.clock() - self._said_at < _APART:
            return said
        if abs(plan.steps - self.steps) > _NOTABLE_CHANGE * self.steps:
            self.steps = plan.steps
            said.append(f"{plural(plan.steps, 'step')} in all from here on: {budget.describe(plan)}")
        if hooks != self._hooks:
            self._hooks = hooks
            said.append(hooks or "previews and evaluation as often as at first, as there is time for them again")
        if said:
            self._said_at = self.clock()
        return said

    def _describe_hooks(self, stretch: int, budget: TimeBudget) -> str:
        """Return how often previews and evaluation come; "" if that is as often as the settings say."""
        apart = f"{stretch} times as far apart" if 0 < stretch < STRETCHES[-1] else "at the end only"
        what = f"previews and evaluation {apart}"
        if not budget.evaluates_at_end(stretch):
            what = f"previews {apart}, no evaluation"
        return f"{what}, so that they and checkpoints take at most a tenth of the budget" if stretch != 1 else ""


def recorded_plans(events: list[Row], first: int, after: int) -> list[LengthPlan]:
    """Return the plans of events for a run of `first` steps in its settings, from the step `after` on.

    That step is among them, as a resume plans before it trains: its checkpoint does not have that plan.
    """
    found = Length()
    for row in events:
        if row.get("kind") == LENGTH_EVENT and row.get("first") == first:
            with suppress(KeyError, TypeError, ValueError, OverflowError):
                limit = float(row.get("limit", NO_LIMIT))  # which older versions have not recorded
                found.add([LengthPlan.of(row["step"], row["steps"], row["stretch"], row["position"], limit)])
    return [plan for plan in found.plans if plan.step >= after]


def resume_length(length: Length, first: int, step: int, events: list[Row], anew: bool) -> LengthPlan | None:
    """Continue a length at `step`, with `first` steps in the settings and the plans that events have for later steps.

    If the length is given `anew`, such plans are void; else the last one holds to the end, as no time budget makes
    another. Returns the plan that says so, which is to be recorded; None if nothing changes.
    """
    length.adopt(first)
    length.add(recorded_plans(events, first, step))
    if not length.plans:
        return None
    if anew:
        fixed = LengthPlan(step, first, 1, float(step))
    elif (last := length.plans[-1]).limit < first:
        at = max(step, last.step)
        fixed = LengthPlan(at, last.steps, last.stretch, length.position(at))
    else:
        return None
    length.add([fixed])
    return fixed
