"""Pace of a run: how long its steps take, less pauses, and how long its previews, evaluations and checkpoints do."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import NamedTuple

_PAUSE = 8.0  # times the usual step from which on a single step is not a measure of the pace
_FEWEST = 5  # entries below which the pace that was measured before training counts as one
_BLOCKS = 64  # entries of a window of quick steps
_NEWEST = 8  # calls of one kind that count
_DEAREST = 4.0  # times the dearest call so far that the next one counts at most
_FAR = 2.0  # times the usual from which on the longest call is left out


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
