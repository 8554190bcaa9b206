"""The torch device that a `--device` name stands for."""

from __future__ import annotations

from pathlib import Path

import torch

from unfog.config.validate import check_device
from unfog.errors import RequestError


def choose_device(name: str) -> torch.device:
    """Return the device called `name`; "auto" is CUDA, else MPS, else the CPU.

    Raises:
        RequestError: torch does not have that device here.
    """
    check_device(name)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    device = torch.device(name)
    count = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if (device.index or 0) >= count.get(device.type, 0):
        raise RequestError(f"device = {name} is not available to torch {torch.__version__}; try --device auto")
    return device


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
