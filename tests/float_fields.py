"""Images that keep their values, for tests: 24 fields of four channels of different scales, and how they are stored."""

from pathlib import Path
from typing import Any

import numpy as np

from conftest import FEW_PICTURES, TRANSFORMER

NEVER = {"every": -1}
TINY: dict[str, Any] = {
    "network": TRANSFORMER,
    "steps": 2,
    "batch": 4,
    "device": "cpu",
    "evaluate": NEVER,
    **FEW_PICTURES,
}
_DRAWN = np.random.default_rng(0).normal(size=(24, 12, 16, 4))
FIELDS = (_DRAWN * [1, 10, 100, 1000] + [0, 5, 100, -3000]).astype(np.float32)
"""[N, H, W, C]."""


def saved(tmp_path: Path, values: np.ndarray, name: str = "x.npy") -> Path:
    np.save(tmp_path / name, values)
    return tmp_path / name


def planes(values: np.ndarray) -> np.ndarray:
    """Return [N, H, W, C] as [N, C, H, W]."""
    return values.transpose(0, 3, 1, 2)
