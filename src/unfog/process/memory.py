"""Memory of this process, as Linux reports it."""

from __future__ import annotations

from pathlib import Path


def resident_bytes() -> int:
    """Return the resident memory of this process; 0 where the system does not report it."""
    return _status("VmRSS")


def peak_bytes() -> int:
    """Return the largest resident memory that this process has had; 0 where the system does not report it."""
    return _status("VmHWM")


def _status(name: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)
