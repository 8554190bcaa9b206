"""Images that are made here, for commands that need some."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

COUNT = 128  # enough that some are held out


def draw_photos(folder: Path, count: int = COUNT) -> Path:
    """Write images of two classes, and return the folder: bright and dark squares on noise, 32x32."""
    rng = np.random.default_rng(0)
    for i in range(count):
        pixels, kind = rng.integers(0, 120, (32, 32, 3)), ("bright", "dark")[i % 2]
        x, y = rng.integers(0, 16, 2)
        pixels[y : y + 14, x : x + 14] = 230 if kind == "bright" else 20
        (folder / kind).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / kind / f"{i:03}.png")
    return folder
