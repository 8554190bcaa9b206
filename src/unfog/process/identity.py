"""Identity of a process, which no other process with its number shares: whether it still exists, or is suspended."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Literal

ProcessState = Literal["there", "suspended", "gone", "unknown"]


def own_identity() -> dict[str, object]:
    """Return `machine`, which is equal for processes that see each other, `started`, and `uptime` of now in seconds.

    {} if the system does not report it; only Linux does.
    """
    machine, found = _machine(), _stat("self")
    return {"machine": machine, "started": found[1], "uptime": round(uptime(), 3)} if machine and found else {}


def process_state(pid: int, machine: object, started: object) -> ProcessState:
    """Return the state of the process `pid` with this `own_identity`; "unknown" for one of elsewhere."""
    if not machine or machine != _machine():
        return "unknown"
    found = _stat(str(pid))
    if found is None or found[1] != started or found[0] in "ZX":  # a zombie has ended, and its parent has not noticed
        return "gone"
    return "suspended" if found[0] in "Tt" else "there"


def uptime() -> float:
    """Return the seconds since the machine started, which no change of the clock moves."""
    if not hasattr(time, "clock_gettime"):
        return time.monotonic()  # on Windows since its start
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


@cache
def _machine() -> str:
    """Return the boot of the machine and the namespace of process numbers; "" if the system does not report them."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    return ""


def _stat(process: str) -> tuple[str, int] | None:
    """Return state and start, in ticks, of a process; None if it does not exist."""
    with suppress(OSError, ValueError, IndexError):
        # The name of the program, in brackets, may hold spaces; see man 5 proc.
        fields = Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return fields[0], int(fields[19])
    return None
