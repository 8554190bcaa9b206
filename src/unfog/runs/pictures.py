"""Pictures as files: numbered PNGs, a grid of them, and the strip that shows how one came out of the noise."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from unfog.diffusion.noise import Schedule
from unfog.diffusion.sampler import Sampler, noise_levels
from unfog.reporting.figures import Pixels, save_png, strip
from unfog.runs.sampling import picture_grid, to_pixels

LEVELS = (1.0, 0.75, 0.5, 0.25, 0.1, 0.05, 0.0)  # of the schedule: t = 999, 750, …, 0 where it has 1000 steps


class Strip:
    """Watches sampling, and keeps x_t and the predicted x0 of the first picture at the steps nearest to LEVELS.

    x_t is the state before the step, so that it belongs to the level that its column names.
    """

    def __init__(self, schedule: Schedule, sampler: Sampler):
        logsnr = noise_levels(schedule, sampler.steps, sampler.grid)[:-1]
        quantile = schedule.quantile(logsnr)
        self.wanted = {int((quantile - level).abs().argmin()) for level in LEVELS}
        self.names = [
            f"t = {u * schedule.steps:.0f}" if schedule.steps else f"log SNR {value:.1f}"
            for u, value in zip(quantile.tolist(), logsnr.tolist())
        ]
        self.captions: list[str] = []
        self.x_t: list[Pixels] = []
        self.x0: list[Pixels] = []

    def __call__(self, step: int, logsnr: float, x_t: Tensor, x0: Tensor) -> None:
        """Look at one sampling step."""
        if step in self.wanted:
            self.captions.append(self.names[step])
            # Shown within [-1, 1]: on the VE path x_t reaches far beyond.
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
