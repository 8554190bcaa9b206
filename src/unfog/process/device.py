"""The torch device that a `--device` name stands for."""

from __future__ import annotations

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
