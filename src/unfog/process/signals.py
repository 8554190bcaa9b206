"""Stopping on request, in three stages.

A first signal, or `request` from any thread, sets a flag, which work in small pieces polls. Work that still runs a
second later is interrupted by an alarm, which raises `Interrupted` in the main thread. A second signal raises
`KeyboardInterrupt` at once.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

from unfog.errors import Interrupted
from unfog.process import early_signals
from unfog.reporting.progress import Progress, say_from_signal

_SIGNALS = [getattr(signal, name) for name in early_signals.NAMES if hasattr(signal, name)]
_ALARM: signal.Signals | None = getattr(signal, "SIGALRM", None)

_ALARM_INTERVAL = 1.0  # seconds until the alarm, and between two alarms
_RETRY_INTERVAL = 0.1  # seconds until the next alarm after one that was deferred
_SAME_REQUEST = 1.0  # seconds within which signals count as one: a scheduler and a launcher both send it
_CLEANUP = 5.0  # seconds in which `finally` and `except` blocks are not interrupted again

_Handler = Callable[[int, FrameType | None], None]


class StopSignals:
    """A context in which signals request a stop; calling it returns True once one was requested.

    In other threads than the main one, where Python delivers no signals, `request` and polling still work. The message
    to the user says that the run is saved if it `saves`, which may change as a new run begins. A `quiet` rank leaves
    the message to rank 0.
    """

    def __init__(self, saves: bool = True, quiet: bool = False) -> None:
        self._quiet = quiet
        self.saves = saves
        self.received: str | None = None  # source of the request: "SIGTERM", "STOP file", …; None before one
        self._before: dict[signal.Signals, Any] = {}
        self._alarm = _Alarm(self._ring)
        self._defer_interrupts = _DeferredInterrupts(self._alarm)
        self._process = 0  # a forked worker inherits the handlers, but must not act on them
        self._noticed = self._settled = self._closed = False
        self._first = math.inf  # when the first signal came
        self._interrupts = 0  # how many of the signals were SIGINT
        self._left = self._raised = -math.inf  # when KeyboardInterrupt and Interrupted were last raised

    def __call__(self) -> bool:
        """Return True if a stop was requested. The first such answer restarts the second before the alarm."""
        if self.received is None:
            return False
        if not (self._noticed or self._settled):
            self._noticed = True
            self._alarm.ring_in(_ALARM_INTERVAL)
        return True

    def leave_if_requested(self) -> None:
        """Raise Interrupted if a stop was requested: for work that may be left undone. Nothing after `silence`."""
        if self.received is not None and not self._settled:
            self._raised = time.monotonic()
            raise Interrupted(self.received)

    def watching(self, progress: Progress) -> Callable[[int, int], None]:
        """Return a callback (done, total) that shows progress, and raises Interrupted if a stop was requested."""

        def update(done: int, total: int) -> None:
            self.leave_if_requested()
            progress.set(done, total)

        return update

    def request(self, why: str) -> None:
        """Request a stop, as a first signal does, from any thread; `why` is the message."""
        if self.received is None:
            self._begin(why)
            self._tell(f"{why}: {self._ending}")

    def defer_interrupts(self) -> AbstractContextManager[None]:
        """Return a context that delays a due Interrupted to its end. For the main thread; costs about 1 µs."""
        return self._defer_interrupts

    def silence(self) -> None:
        """Raise no Interrupted from here on, as the process saves and ends."""
        self._settled = True
        self._alarm.silence()

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._process = os.getpid()
            # Before the handlers of signals, which set the alarm: one that rings without our handler ends the process.
            self._alarm.take()
            for number in _SIGNALS:
                before = signal.getsignal(number)
                # None: a handler that is not Python's, and that Python could not put back.
                if before is not None and not (
                    before is signal.SIG_IGN and number.name in early_signals.MAY_BE_IGNORED
                ):
                    self._before[number] = before
                    signal.signal(number, self._handle)
            if (early := early_signals.take_over()) and self.received is None:
                self._begin(early)
        return self

    def __exit__(self, *_: object) -> None:
        self._settled = True
        self._closed = True  # if the loop below is interrupted, the remaining handlers pass signals on
        try:
            for number, before in self._before.items():
                signal.signal(number, before)
        finally:
            self._alarm.give_back()

    @property
    def _ending(self) -> str:
        return "stopping and saving" if self.saves else "stopping"

    def _tell(self, text: str) -> None:
        if not self._quiet:
            say_from_signal(text)

    def _begin(self, why: str) -> None:
        # Signals and threads may race here: at worst both begin, and one of them is named.
        self.received = why
        if not self._settled:
            self._alarm.ring_in(_ALARM_INTERVAL)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # A forked worker of a data loader shares this object, and must die of a signal as any process does.
        if self._closed or os.getpid() != self._process:
            _pass_on(self._before[signal.Signals(number)], number, frame)
            return
        now = time.monotonic()
        self._interrupts += number == signal.SIGINT
        if self._first == math.inf:
            self._first = now  # no call since the comparison, so no other signal can have been handled in between
            name = signal.Signals(number).name
            if self.received is None:
                self._begin(name)
            if number == signal.SIGINT:
                self._tell(f"{self._ending.capitalize()}. Press Ctrl-C again to quit immediately.")
            else:
                self._tell(f"{name}: {self._ending}; a second signal quits immediately")
            return
        # A second Ctrl-C is insistence. Any other signal this soon is the same request by another way.
        insisted = number == signal.SIGINT and self._interrupts > 1
        if (insisted or now - self._first > _SAME_REQUEST) and now - self._left > _SAME_REQUEST:
            self._left = now  # further signals do not interrupt the unwinding
            raise KeyboardInterrupt

    def _ring(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process or self.received is None:  # an alarm that somebody else has set
            _pass_on(self._alarm.handler_before, number, frame)
        elif self._settled:
            pass
        elif self._defer_interrupts.depth:
            self._defer_interrupts.rang = True
        elif frame is not None and frame.f_code in (StopSignals.silence.__code__, StopSignals.__exit__.__code__):
            self._alarm.ring_in(_RETRY_INTERVAL)  # they silence the alarm; if they do not get there, it rings again
        elif not (_cleaning_up() and time.monotonic() - self._raised < _CLEANUP):
            # It goes on ringing: a library may swallow the exception, and Python does in a destructor.
            self._raised = time.monotonic()
            # From now, as this one may have waited long for a call into C to return.
            self._alarm.ring_in(_ALARM_INTERVAL)
            raise Interrupted(self.received)


class _Alarm:
    """The interval timer of the process, borrowed: the previous owner gets it back with its remaining time."""

    def __init__(self, ring: _Handler):
        self.handler_before: Any = None
        self._ring = ring
        self._taken = False
        self._due_before, self._interval_before = -math.inf, 0.0
        self._set_at = math.inf  # when it was first set by us
        # An alarm after the handler is gone would end the process. Reentrant, because a signal may come inside.
        self._lock = threading.RLock()

    def take(self) -> None:
        """Take the alarm over. Until it is set, alarms of its previous owner arrive here too."""
        if _ALARM is None or signal.getsignal(_ALARM) is None:
            return
        delay, self._interval_before = signal.getitimer(signal.ITIMER_REAL)
        self._due_before = time.monotonic() + delay if delay else -math.inf
        self.handler_before = signal.getsignal(_ALARM)
        signal.signal(_ALARM, self._ring)
        self._taken = True

    def ring_in(self, seconds: float) -> None:
        """Ring after so many seconds, then every _ALARM_INTERVAL seconds; from any thread."""
        with self._lock:
            if self._taken:
                self._set_at = min(self._set_at, time.monotonic())
                signal.setitimer(signal.ITIMER_REAL, seconds, _ALARM_INTERVAL)

    def silence(self) -> None:
        with self._lock:
            if self._taken and self._set_at < math.inf:
                signal.setitimer(signal.ITIMER_REAL, 0)

    def give_back(self) -> None:
        """Restore the handler and the timer of the previous owner."""
        with self._lock:
            if _ALARM is None or not self._taken:
                return
            self.silence()
            self._taken = False
            signal.signal(_ALARM, self.handler_before)
            now, due, interval = time.monotonic(), self._due_before, self._interval_before
            if interval and due < now:
                due += math.ceil((now - due) / interval) * interval
            if math.inf > due > self._set_at:  # else it was never changed, or was over before
                signal.setitimer(signal.ITIMER_REAL, max(due - now, 1e-3), interval)


class _DeferredInterrupts:
    __slots__ = ("_alarm", "depth", "rang")  # a cheap class rather than a generator: it is entered at every step

    def __init__(self, alarm: _Alarm):
        self._alarm = alarm
        self.depth = 0  # times entered and not left
        self.rang = False  # the alarm came meanwhile

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
        if self.rang and not self.depth:
            self.rang = False
            self._alarm.ring_in(_RETRY_INTERVAL)


def _cleaning_up() -> bool:
    """Return True inside an `except`, `finally` or `__exit__` that handles an Interrupted."""
    error = sys.exc_info()[1]
    while error is not None and not isinstance(error, Interrupted):
        error = error.__context__
    return error is not None


def _pass_on(before: Any, number: int, frame: FrameType | None) -> None:
    """Handle a signal as before these handlers were installed."""
    if callable(before):
        before(number, frame)
    elif before != signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
