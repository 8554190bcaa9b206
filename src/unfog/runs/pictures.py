"""Pictures as files: numbered PNGs, a grid of them, and the strip that shows how one came out of the noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from unfog.reporting.figures import Pixels, save_png, strip
from unfog.runs.sampling import picture_grid, to_pixels


class Strip:
    """Watches sampling, and keeps x_t and the predicted x0 of the first picture at `columns` of its `steps` levels.

    x_t is the state before the step, so that the first column is noise and belongs to the level that it names.
    """

    def __init__(self, steps: int, columns: int = 7):
        self.wanted = {round(i * (steps - 1) / max(columns - 1, 1)) for i in range(columns)}
        self.captions: list[str] = []
        self.x_t: list[Pixels] = []
        self.x0: list[Pixels] = []

    def __call__(self, step: int, logsnr: float, x_t: Tensor, x0: Tensor) -> None:
        """Look at one sampling step."""
        if step in self.wanted:
            self.captions.append("noise" if logsnr == -math.inf else f"log SNR {logsnr:.1f}")
            self.x_t.append(_first(x_t / x_t[:1].abs().amax().clamp(min=1)))
            self.x0.append(_first(x0))

    def picture(self) -> Pixels:
        """The strip, uint8 [H, W, 3]."""
        return strip({"x_t": np.stack(self.x_t), "predicted x0": np.stack(self.x0)}, self.captions)


def _first(x: Tensor) -> Pixels:
    pixels: Pixels = to_pixels(x[0]).permute(1, 2, 0).cpu().numpy()
    return pixels


def write_pictures(folder: Path, pictures: Pixels, classes: Sequence[str], watched: Strip | None) -> None:
    """000000.png, 000001.png, …, grid.png, and strip.png if sampling was watched."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, picture in enumerate(pictures):
        save_png(folder / f"{number:06d}.png", picture)
    save_png(folder / "grid.png", picture_grid(pictures, classes))
    if watched is not None:
        save_png(folder / "strip.png", watched.picture())
