"""Pace of a run in training: the seconds of a step, which neither one slow step nor a pause decides."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import NamedTuple

_PAUSE = 8.0  # times the usual step from which on a single step is no measure of the pace
_FEWEST = 5  # entries below which the pace that was measured before training counts as one
_BLOCKS = 64  # entries of a window of quick steps


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
        """True once `add` was called."""
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
