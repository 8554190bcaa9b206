"""Held-out loss, with the same noise at the same levels each time.

A training loss jumps with the drawn noise levels. This one changes only with the network, so checkpoints can be
compared, and a rise means overfitting.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from unfog.device_copies import to_device

# (x0 [B, C, H, W], label [B] or None, u [B], noise like x0) -> weighted loss [B], squared error of the noise [B].
LossAt = Callable[[Tensor, Tensor | None, Tensor, Tensor], tuple[Tensor, Tensor]]


class HeldOut(NamedTuple):
    """Held-out images and noise levels: float [N, C, H, W] in [-1, 1], labels [N] or None, noise quantiles [L]."""

    x0: Tensor
    label: Tensor | None
    levels: Tensor

    @torch.inference_mode()
    def losses(
        self,
        loss_at: LossAt,
        batch: int,
        seed: int = 0,
        progress: Callable[[int], None] = lambda images: None,
        only: slice = slice(None),
    ) -> Tensor:
        """Return float64 [2, L, N]: loss and squared noise error of each image at each level, clean to noisy.

        `progress` is called with the images of each pass. Levels that are not among the `only` ones stay 0.
        """
        # Read once at the end: each reading would wait for the device.
        table: Tensor | None = None
        for level in range(len(self.levels))[only]:
            u = self.levels[level]
            # All noise of a level is drawn at once, so that it does not depend on the batch.
            generator = torch.Generator().manual_seed(seed * 1_000_003 + level)
            noises = torch.randn(self.x0.shape, generator=generator)
            for first in range(0, len(self.x0), batch):
                x0 = self.x0[first : first + batch]
                label = None if self.label is None else self.label[first : first + batch]
                noise = to_device(noises[first : first + batch], x0.device)
                values = torch.stack(loss_at(x0, label, u.expand(len(x0)), noise))
                if table is None:
                    table = values.new_zeros(2, len(self.levels), len(self.x0))
                table[:, level, first : first + batch] = values
                progress(len(x0))
        # On the CPU first, as MPS has no float64.
        return (
            torch.zeros(2, len(self.levels), len(self.x0), dtype=torch.float64)
            if table is None
            else table.cpu().double()
        )

    def measure(self, loss_at: LossAt, batch: int, seed: int = 0) -> dict[str, float | list[float]]:
        """Return the `summary` of the losses at all levels."""
        return self.summary(self.losses(loss_at, batch, seed), batch)

    def summary(self, losses: Tensor, batch: int) -> dict[str, float | list[float]]:
        """Mean loss over images and levels, by level from clean to noisy, and the noise-prediction error by level.

        `losses` [2, L, N] were computed in batches of this size.
        """
        # Summed batch by batch: another order would change the last bit of recorded losses.
        totals = torch.zeros(2, len(self.levels), dtype=torch.float64)
        for part in torch.split(losses, batch, dim=2):
            for row, of_level in enumerate(part):
                totals[row] += torch.stack([values.sum() for values in of_level])
        loss, noise_error = (totals / len(self.x0)).tolist()
        return {
            "held_out_loss": sum(loss) / len(loss),
            "held_out_by_level": loss,
            "held_out_noise_error": noise_error,
        }


class MeanEstimate(NamedTuple):
    """A mean over images, with its standard error; the latter is nan of one image."""

    value: float
    error: float
    n: int

    @classmethod
    def over_images(cls, losses: Tensor) -> MeanEstimate:
        """Mean of losses [L, N] and its standard error over the N images; those of one image are not independent."""
        by_image = losses.double().mean(0)
        error = float(by_image.std(unbiased=True)) / math.sqrt(len(by_image)) if len(by_image) > 1 else math.nan
        return cls(float(by_image.mean()), error, len(by_image))


def midpoints(levels: int) -> Tensor:
    """Noise quantiles in the middle of `levels` equal parts of (0, 1)."""
    # The ends themselves are infinitely clean and noisy in continuous schedules.
    return (torch.arange(levels) + 0.5) / levels
