"""Time budget of a run: plan its length anew from the measured pace as it trains, so that it ends in time."""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import NamedTuple

from unfog.config.schema import Config
from unfog.errors import RequestError
from unfog.planning.timing import forward_passes, repetitions
from unfog.reporting.progress import format_duration, warn
from unfog.reporting.records import LENGTH_EVENT, Row
from unfog.training.length import NO_LIMIT, Length, LengthPlan
from unfog.training.loop import Intervals

_CHECKS = 200  # of a run: often enough for its last percent, and few enough for state.json
_WINDOW = 0.05  # share of the budget over which the pace is measured
_TOLERANCE = 0.01  # share of the budget by which the end may move without a new plan
_TOLERANCE_LEFT = 0.05  # the same as a share of what is left, as the pace is no more certain than that
_TRUST = 0.05  # share of the budget that the schedule of one plan may be ahead of the time
_NOTABLE, _NOTABLE_SHARE = 2.0, 0.002  # seconds, and share of the budget, from which on a pause is said
_LONG_START, _SAID_START = 0.75, 0.1  # share of the budget from which on the time of the start is warned of, or said
_AIM, _MOST = 0.08, 0.1  # share of previews, evaluation and checkpoints; the end may take what is between the two
_LEISURE = 0.7  # of the aim: only below it they come more often again, or it would go up and down
STRETCHES = tuple(2**k for k in range(11))
_FINAL_PREVIEWS = 1.5  # the last image shows one sample at every step, for about half of the time of a preview
# Of `Pace` and `CallTimes`.
_PAUSE = 8.0  # times the usual step from which on a single step is not a measure of the pace
_FEWEST = 5  # entries below which the pace that was measured before training counts as one
_BLOCKS = 64  # entries of a window of quick steps
_NEWEST = 8  # calls of one kind that count
_DEAREST = 4.0  # times the dearest call so far that the next one counts at most
_FAR = 2.0  # times the usual from which on the longest call is left out


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
        return f"; starting up took {format_duration(spent)}" if spent > _SAID_START * self.seconds else ""

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
    def warn_if_spent(seconds: float, began: float) -> None:
        """Warn if the start of a new run has taken most of its time budget, and name a longer one."""
        spent = time.monotonic() - began
        if spent > _LONG_START * seconds:
            left = "little is left to train" if spent < seconds else "one step is trained"
            warn(
                f"the start took {format_duration(spent)} of the {format_duration(seconds)} of --budget: {left}; "
                f"give --budget {math.ceil(5 * spent / 60)}m or more, or --steps"
            )

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


class _Entry(NamedTuple):
    seconds: float
    steps: int
    long: bool = False
    """It took over _PAUSE times as long as usual."""

    @property
    def pace(self) -> float:
        return self.seconds / self.steps


class Pace:
    """Measures the seconds of a step: a mean over the newest steps, less the longest if that is far from the usual.

    A step that takes many times the usual, between others that do not, is a pause. Two of them within the window are
    a machine that has become slower, or stalls regularly: both count.

    Args:
        step_seconds: the pace as measured before training.
        window: seconds of training over which it is measured.
    """

    def __init__(self, step_seconds: float, window: float):
        self.step_seconds, self._before = step_seconds, _Entry(step_seconds, 1)
        self.measured = False
        """`step_seconds` is a measurement of steps of this run."""
        self.paused = 0.0
        """Seconds of all pauses so far."""
        self.pending = 0.0
        """Seconds of the newest step if it may have been a pause, which the next one decides."""
        self._window = window
        self._entries: deque[_Entry] = deque()
        self._open = _Entry(0.0, 0)  # a block that is not full
        self._last: tuple[float, int] | None = None
        self._paused_at = -math.inf

    @property
    def started(self) -> bool:
        """True once `add` was called, so that the next step has a beginning."""
        return self._last is not None

    def add(self, now: float, step: int) -> float:
        """Note that step number `step` ended at `now`, in seconds of training. Return the length of a pause before it.

        The first step is not timed, as it also allocates and compiles.
        """
        last, self._last = self._last, (now, step)
        if last is None or step <= last[1]:  # the first step, or one after a roll-back
            return 0.0
        new = _Entry(now - last[0], step - last[1])
        if new.pace > _PAUSE * self.step_seconds:
            self._add_long(new._replace(long=True))
            return 0.0
        pause = self._end_pause()
        self._open = _Entry(self._open.seconds + new.seconds, self._open.steps + new.steps)
        if self._open.seconds >= self._window / _BLOCKS:
            self._close_block()
        return pause

    def measure(self) -> None:
        """Set `step_seconds` to what the newest steps took."""
        known = [*self._entries, *([self._open] if self._open.steps else [])]
        compared = [*known, self._before] if len(known) < _FEWEST else known
        longest = max(compared, key=lambda entry: entry.pace)
        if longest.pace > _PAUSE * statistics.median_low(entry.pace for entry in compared) and longest in known:
            known.remove(longest)
        if known:
            self.measured = True
            self.step_seconds = max(sum(entry.seconds for entry in known) / sum(entry.steps for entry in known), 1e-9)

    def _add_long(self, entry: _Entry) -> None:
        self._close_block()
        assert self._last is not None
        recent = self._last[0] - entry.seconds - self._paused_at < self._window
        alone = not (recent or any(other.long for other in self._entries))
        self.pending = entry.seconds if alone else 0.0
        self._entries.append(entry)
        self._trim()

    def _end_pause(self) -> float:
        """Take a pending pause out of what is measured, and return its length."""
        pause, self.pending = self.pending, 0.0
        if not pause:
            return 0.0
        self._entries.remove(next(entry for entry in self._entries if entry.long))
        self.paused, self._paused_at = self.paused + pause, self._last[0] if self._last else 0.0
        return pause

    def _close_block(self) -> None:
        if self._open.steps:
            self._entries.append(self._open)
            self._open = _Entry(0.0, 0)
            self._trim()

    def _trim(self) -> None:
        total = sum(entry.seconds for entry in self._entries) - self.pending
        while len(self._entries) > _FEWEST and total - self._entries[0].seconds >= self._window:
            total -= self._entries.popleft().seconds


class _Call(NamedTuple):
    seconds: float
    step_seconds: float | None
    """Pace at that time; None before steps of the run are measured."""


class CallTimes:
    """Measures the seconds of a preview, an evaluation and the like: a mean over the newest, less one that is far off.

    All slow down with the steps when the machine has other work, so each time is compared with the pace at that time.

    Args:
        pace: that of the run.
        steps: by kind, the estimated time of a call in steps. It holds until the first call.
        seconds: the same in seconds, as measured just now.
    """

    def __init__(self, pace: Pace, steps: Mapping[str, float], seconds: Mapping[str, float]):
        self._pace = pace
        self._estimates = {kind: _Call(count, 1.0) for kind, count in steps.items()}
        self._estimates |= {kind: _Call(time, None) for kind, time in seconds.items()}
        self._calls: dict[str, deque[_Call]] = defaultdict(lambda: deque(maxlen=_NEWEST))

    def add(self, kind: str, seconds: float) -> float:
        """Note the time of a call. Return how much of it counts: a stalled disk, say, does not decide the others."""
        calls = self._calls[kind]
        counted = min(seconds, _DEAREST * max(map(self._now, calls), default=seconds))
        calls.append(_Call(counted, self._pace.step_seconds if self._pace.measured else None))
        return counted

    def was_called(self, kind: str) -> bool:
        return bool(self._calls[kind])

    def seconds(self, kind: str) -> float:
        """Return the time that a call takes now; 0 if nothing is known of it."""
        times = sorted(map(self._now, self._calls[kind] or filter(None, [self._estimates.get(kind)])))
        if len(times) > 1 and times[-1] > _FAR * statistics.median_low(times):
            times.pop()
        return statistics.fmean(times) if times else 0.0

    def adopt_pace(self) -> None:
        """Compare the calls before the first measured step with the present pace."""
        for kind, calls in self._calls.items():
            self._calls[kind] = deque(map(self._with_pace, calls), _NEWEST)
        self._estimates = {kind: self._with_pace(call) for kind, call in self._estimates.items()}

    def _with_pace(self, call: _Call) -> _Call:
        return call if call.step_seconds is not None else call._replace(step_seconds=self._pace.step_seconds)

    def _now(self, call: _Call) -> float:
        return call.seconds if call.step_seconds is None else call.seconds * self._pace.step_seconds / call.step_seconds
