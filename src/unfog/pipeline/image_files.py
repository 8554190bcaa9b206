"""Write samples as numbered PNGs, a grid of them, and a strip of the denoising steps of the first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from unfog.diffusion.editing import Edit
from unfog.diffusion.noise import Schedule
from unfog.pipeline.autoencoder_folder import Decode
from unfog.pipeline.edit import edit_grid
from unfog.pipeline.generate import sample_grid, to_pixels
from unfog.reporting.image_grids import Pixels, labelled_strip, save_png
from unfog.reporting.progress import say

MAX_IN_GRID = 1000  # samples; a grid of ten thousand takes more memory than generating them, and few programs open it
_STRIP_LEVELS = (1.0, 0.75, 0.5, 0.25, 0.1, 0.05, 0.0)  # of the schedule: t = 999, 750, …, 0 where it has 1000 steps


class _Column(NamedTuple):
    """One sampling step of the strip."""

    step: int
    caption: str
    x_t: Pixels
    x0: Pixels


class DenoisingStrip:
    """Observer of sampling that keeps x_t and predicted x0 of the first sample at the steps nearest to _STRIP_LEVELS.

    x_t is the state before the step, so that it belongs to the level in its caption.
    """

    def __init__(self, schedule: Schedule, decode: Decode = lambda x: x):
        self.schedule, self.decode = schedule, decode
        self.nearest: dict[float, tuple[float, _Column]] = {}
        """Level -> (distance of the nearest step so far, that step)."""

    def __call__(self, step: int, logsnr: float, x_t: Tensor, x0: Tensor) -> None:
        """Keep a sampling step if it is the nearest to a level so far, as a sampler may choose its own levels."""
        quantile = float(self.schedule.quantile(torch.tensor([logsnr], dtype=torch.float64)))
        far = {level: abs(quantile - level) for level in _STRIP_LEVELS}
        nearer = [level for level in _STRIP_LEVELS if level not in self.nearest or far[level] < self.nearest[level][0]]
        if not nearer:
            return
        steps = self.schedule.steps
        caption = f"t = {quantile * steps:.0f}" if steps else f"log SNR {logsnr:.1f}"
        # Shown within [-1, 1]: on the VE path x_t reaches far beyond.
        seen = self.decode(x_t[:1] / x_t[:1].abs().amax().clamp(min=1))
        column = _Column(step, caption, _first(seen), _first(self.decode(x0[:1])))
        self.nearest.update({level: (far[level], column) for level in nearer})

    def columns(self) -> list[_Column]:
        """Return the kept steps, each once, in order."""
        return [column for _, column in sorted({c.step: c for _, c in self.nearest.values()}.items())]

    def image(self) -> Pixels:
        """Return the strip, uint8 [H, W, 3]."""
        columns = self.columns()
        rows = {"x_t": np.stack([c.x_t for c in columns]), "predicted x0": np.stack([c.x0 for c in columns])}
        return labelled_strip(rows, [c.caption for c in columns])


def _first(x: Tensor) -> Pixels:
    pixels: Pixels = to_pixels(x[0]).permute(1, 2, 0).cpu().numpy()
    return pixels


def write_images(
    folder: Path, pictures: Pixels, classes: Sequence[str], watched: DenoisingStrip | None, edit: Edit | None = None
) -> None:
    """Write 000000.png, 000001.png, …, grid.png, and strip.png if sampling was observed.

    The grid shows the first thousand samples; those of an edit come after the edited image and its mask.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for number, picture in enumerate(pictures):
        save_png(folder / f"{number:06d}.png", picture)
    if len(pictures) > MAX_IN_GRID:
        say(f"  grid.png shows the first {MAX_IN_GRID:,} of {len(pictures):,} pictures")
    first = pictures[:MAX_IN_GRID]
    save_png(folder / "grid.png", edit_grid(edit, first) if edit else sample_grid(first, classes))
    if watched is not None:
        save_png(folder / "strip.png", watched.image())
