"""Signals outside of training: in the first seconds of a command, while modules are imported, and at its very end."""

from __future__ import annotations

import os
import signal
from types import FrameType

from unfog.errors import Interrupted, NothingSaved

NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
# Signals that stay ignored if they were: a shell ignores them for background commands, and so does `nohup`.
MAY_BE_IGNORED = ("SIGINT", "SIGHUP")

stop_error: type[Interrupted] = Interrupted
"""What a signal raises, whose exit status is that of the command."""
received = ""
"""Name of the signal that came before `StopSignals` handled them; "" if none came."""
_process = 0  # that the handlers are of
_caught: list[signal.Signals] = []
_taken_over = False


def catch(saved: bool) -> None:
    """Turn signals into Interrupted from now on, until `StopSignals` takes over. For the main thread.

    They become NothingSaved unless there is a run already, which is `saved`.

    A process of torchrun only notes SIGUSR1: it may wait for the others in a call that no handler can end, and
    torchrun has its own way to end it.
    """
    global _process, stop_error
    stop_error = Interrupted if saved else NothingSaved
    _process = os.getpid()
    for name in ("SIGUSR1",) if "RANK" in os.environ else NAMES:
        number = getattr(signal, name, None)
        if number is None or (name in MAY_BE_IGNORED and signal.getsignal(number) is signal.SIG_IGN):
            continue
        _caught.append(number)
        signal.signal(number, _handle)


def take_over() -> str:
    """Return the name of the signal that came so far, or "". Later ones find the work done, and end nothing."""
    global _taken_over
    _taken_over = True
    return received


def ignore() -> None:
    """Ignore the caught signals from now on: the work is done, and the process ends with its own status."""
    for number in _caught:
        signal.signal(number, signal.SIG_IGN)


def _handle(number: int, frame: FrameType | None) -> None:
    global received
    if os.getpid() != _process:  # a forked worker must die of a signal as any process does
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
        return
    if _taken_over:  # the run is saved, and the command about to end with its status
        return
    first, received = not received, received or signal.Signals(number).name
    if "RANK" in os.environ:
        return
    if first:
        os.write(2, f"{received}: stopping; nothing is trained yet\n".encode())
    raise stop_error(received)
