"""The start of the command, from which a time budget counts: that of its process, or the call from Python."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

_LONGEST_START = 600.0  # seconds; more is a clock that cannot be right
_began: float | None = None


def begin() -> None:
    """Note that this process is one command, whose time began with the process, or with that of torchrun."""
    global _began
    process = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
    _began = time.monotonic() - _age(process)


def began() -> float:
    """Return when the command began, by `time.monotonic`: now, where Python calls."""
    return time.monotonic() if _began is None else _began


def _age(process: int) -> float:
    """Return the seconds since a process began; 0 if the system does not report it."""
    with suppress(OSError, ValueError, IndexError, AttributeError):
        # The name of the program, in brackets, may hold spaces; the start is field 22 (man 5 proc).
        ticks = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        return age if 0 <= age <= _LONGEST_START else 0.0
    return 0.0
