"""Stopping on request, in three degrees.

A first signal, or `request` from any thread, raises a flag: whoever works in small pieces looks at it and comes to an
end by itself. Whatever is still at work a second later is cut off by an alarm, which raises `Interrupted` in the main
thread. A second signal raises `KeyboardInterrupt` at once.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from types import FrameType, TracebackType
from typing import Any

from unfog.errors import Interrupted

_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name)]
_ALARM: signal.Signals | None = getattr(signal, "SIGALRM", None)
_MAY_BE_IGNORED = ("SIGINT", "SIGHUP")
"""Whoever started us may have had these ignored: a shell for a command in the background, and `nohup`."""

_ALARM_INTERVAL = 1.0  # seconds until the alarm rings, and between two of its rings
_RETRY_INTERVAL = 0.1  # seconds until it rings once more where it was not let through
_SAME_REQUEST = 1.0  # seconds within which signals may be one request: a scheduler and a launcher both pass it on
CLEANUP = 5.0  # seconds that `finally` and `except` have to put things in order, undisturbed

_Handler = Callable[[int, FrameType | None], None]


class StopSignals:
    """A context in which a signal is a request to stop; `stop = StopSignals()`, then `stop()` tells whether one came.

    `saves`: whether what is then at an end is saved, as a person is told; `quiet`: nobody is told, as another process
    does.

    In the main thread only, since Python delivers signals nowhere else; in another one, and for what the platform
    does not have, `request` and asking are what is left.
    """

    def __init__(self, saves: bool = True, quiet: bool = False) -> None:
        self._quiet = quiet
        self._ending = "ending here and saving" if saves else "ending here"
        self.received: str | None = None
        """What requested the stop: "SIGTERM", "STOP file", …; None: nothing did."""
        self._before: dict[signal.Signals, Any] = {}
        self._alarm = _Alarm(self._ring)
        self._defer_interrupts = _DeferredInterrupts(self._alarm)
        self._process = 0  # whose signals these are: a forked worker inherits the handlers, but not what they are for
        self._noticed = self._settled = self._closed = False
        self._first = math.inf  # when the first signal came
        self._interrupts = 0  # how many of the signals were SIGINT
        self._left = self._raised = -math.inf  # when KeyboardInterrupt and Interrupted were last raised

    def __call__(self) -> bool:
        """Whether a stop was requested; who is told so for the first time has a whole second to get to `settle`."""
        if self.received is None:
            return False
        if not (self._noticed or self._settled):
            self._noticed = True
            self._alarm.ring_in(_ALARM_INTERVAL)
        return True

    def leave_if_requested(self) -> None:
        """Raise Interrupted if a stop was requested and is not settled: for work that may be left where it is."""
        if self.received is not None and not self._settled:
            self._raised = time.monotonic()
            raise Interrupted(self.received)

    def request(self, why: str) -> None:
        """Stop as a first signal does, in a word or two of why; from any thread. Nothing if requested before."""
        if self.received is None:
            self._begin(why)
            self._tell(f"{why}: {self._ending}")

    def defer_interrupts(self) -> AbstractContextManager[None]:
        """A context that the alarm does not cut through but waits for; for the main thread; costs a microsecond."""
        return self._defer_interrupts

    def silence(self) -> None:
        """Raise no Interrupted from here on: what is left is to save and go."""
        self._settled = True
        self._alarm.silence()

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._process = os.getpid()
            self._alarm.take()
            for number in _SIGNALS:
                before = signal.getsignal(number)
                # None: a handler that is not Python's, and that Python could not put back.
                if before is not None and not (before is signal.SIG_IGN and number.name in _MAY_BE_IGNORED):
                    self._before[number] = before
                    signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._settled = True
        self._closed = True  # should the loop below be cut short, what is left of our handlers passes signals on
        try:
            for number, before in self._before.items():
                signal.signal(number, before)
        finally:
            self._alarm.give_back()

    def _tell(self, text: str) -> None:
        if not self._quiet:
            _say(text)

    def _begin(self, why: str) -> None:
        # Signals and threads may come in between: at worst two both begin, and one of them is named.
        self.received = why
        if not self._settled:
            self._alarm.ring_in(_ALARM_INTERVAL)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._closed or os.getpid() != self._process:
            _pass_on(self._before[signal.Signals(number)], number, frame)
            return
        now = time.monotonic()
        self._interrupts += number == signal.SIGINT
        if self._first == math.inf:
            self._first = now  # no call since the comparison, so no other signal can have come in between
            name = signal.Signals(number).name
            if self.received is None:
                self._begin(name)
            self._tell(f"{name}: {self._ending}; once more to leave at once")
            return
        # A person who insists presses Ctrl-C again. Anything else this soon is the same request on another way.
        insisted = number == signal.SIGINT and self._interrupts > 1
        if (insisted or now - self._first > _SAME_REQUEST) and now - self._left > _SAME_REQUEST:
            self._left = now  # further ones let what now unwinds come to its end
            raise KeyboardInterrupt

    def _ring(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process or self.received is None:  # an alarm, but not ours
            _pass_on(self._alarm.handler_before, number, frame)
        elif self._settled:
            pass
        elif self._defer_interrupts.depth:
            self._defer_interrupts.rang = True
        elif frame is not None and frame.f_code in (StopSignals.silence.__code__, StopSignals.__exit__.__code__):
            self._alarm.ring_in(
                _RETRY_INTERVAL
            )  # they are about to end all this; should they not get there, it rings again
        elif not (_cleaning_up() and time.monotonic() - self._raised < CLEANUP):
            # It rings on all the same: a library may swallow this, and Python itself does in a destructor.
            self._raised = time.monotonic()
            self._alarm.ring_in(
                _ALARM_INTERVAL
            )  # from now, as this ring may have waited long for some call into C to return
            raise Interrupted(self.received)


class _Alarm:
    """The process's interval timer, borrowed: whoever used it before gets it back, and what was left to wait for."""

    def __init__(self, ring: _Handler):
        self.handler_before: Any = None
        self._ring = ring
        self._taken = False
        self._due_before, self._interval_before = -math.inf, 0.0
        self._set_at = math.inf  # when it was first set by us
        # A ring after the handler is gone would end the process. Reentrant, because a signal may come inside.
        self._lock = threading.RLock()

    def take(self) -> None:
        """Be the one whom it rings for. Until it is set, rings that somebody else ordered come here too."""
        if _ALARM is None or signal.getsignal(_ALARM) is None:
            return
        delay, self._interval_before = signal.getitimer(signal.ITIMER_REAL)
        self._due_before = time.monotonic() + delay if delay else -math.inf
        self.handler_before = signal.getsignal(_ALARM)
        signal.signal(_ALARM, self._ring)
        self._taken = True

    def ring_in(self, seconds: float) -> None:
        """Ring after so many seconds, and every GRACE seconds from then on; from any thread."""
        with self._lock:
            if self._taken:
                self._set_at = min(self._set_at, time.monotonic())
                signal.setitimer(signal.ITIMER_REAL, seconds, _ALARM_INTERVAL)

    def silence(self) -> None:
        """Do not ring any more, if it was set."""
        with self._lock:
            if self._taken and self._set_at < math.inf:
                signal.setitimer(signal.ITIMER_REAL, 0)

    def give_back(self) -> None:
        """Put everything back as it was found."""
        with self._lock:
            if _ALARM is None or not self._taken:
                return
            self.silence()
            self._taken = False
            signal.signal(_ALARM, self.handler_before)
            now, due, interval = time.monotonic(), self._due_before, self._interval_before
            if interval and due < now:
                due += math.ceil((now - due) / interval) * interval
            if math.inf > due > self._set_at:  # else it was never touched, or had rung before
                signal.setitimer(signal.ITIMER_REAL, max(due - now, 1e-3), interval)


class _DeferredInterrupts:
    """`depth` counts how often it was entered and not left; `rang`: the alarm came meanwhile. Once for every step."""

    __slots__ = ("_alarm", "depth", "rang")

    def __init__(self, alarm: _Alarm):
        self._alarm, self.depth, self.rang = alarm, 0, False

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.depth -= 1
        if self.rang and not self.depth:
            self.rang = False
            self._alarm.ring_in(_RETRY_INTERVAL)


def _cleaning_up() -> bool:
    """Whether some `except`, `finally` or `__exit__` is at work on an Interrupted, so that none may cut through it."""
    error = sys.exc_info()[1]
    while error is not None and not isinstance(error, Interrupted):
        error = error.__context__
    return error is not None


def _pass_on(before: Any, number: int, frame: FrameType | None) -> None:
    """Do with a signal what would have been done without us."""
    if callable(before):
        before(number, frame)
    elif before != signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


def _say(text: str) -> None:
    # Not through `sys.stderr`: the signal may have come in the middle of a write there. And not where stderr was closed
    # from the start, as file 2 may be any file then.
    if sys.__stderr__ is not None:
        with suppress(OSError):  # the terminal may be what has gone
            os.write(2, f"{text}\n".encode())
