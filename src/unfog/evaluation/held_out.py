"""Losses of images at fixed noise levels with fixed noise, such as the held-out loss.

A training loss jumps with the drawn noise levels. These losses change only with the network, so checkpoints can be
compared, and a rise of the held-out loss means overfitting.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from unfog.device.copies import to_device
from unfog.values.conditions import Conditions

# (x0 [B, C, H, W], conditions, u [B], noise like x0) -> weighted loss [B], squared error of the noise [B].
LossAt = Callable[[Tensor, Conditions, Tensor, Tensor], tuple[Tensor, Tensor]]


@torch.inference_mode()
def fixed_losses(
    loss_at: LossAt,
    x0: Tensor,
    conditions: Conditions,
    u: Tensor,
    noise: Callable[[int], Tensor],
    batch: int,
    progress: Callable[[int], None] = lambda images: None,
    only: slice = slice(None),
) -> Tensor:
    """Return the loss and squared noise error of each image at each of its noise levels, float64 [2, L, N] on the CPU.

    Args:
        loss_at: the loss of a network.
        x0: float32 [N, C, H, W] in [-1, 1].
        conditions: of the images.
        u: noise quantiles [L, N].
        noise: returns the noise of a level, like x0, on the CPU or the device of x0.
        batch: images in one forward pass.
        progress: called with the number of images of each pass.
        only: levels to compute; the others are 0.
    """
    # Read once at the end: each reading would wait for the device.
    table: Tensor | None = None
    for level in range(len(u))[only]:
        noises = noise(level)
        for first in range(0, len(x0), batch):
            some = slice(first, first + batch)
            some_noise = to_device(noises[some], x0.device)
            values = torch.stack(loss_at(x0[some], conditions.rows(some), u[level, some], some_noise))
            if table is None:
                table = values.new_zeros(2, *u.shape)
            table[:, level, some] = values
            progress(values.shape[1])
    # On the CPU first, as MPS has no float64.
    return torch.zeros(2, *u.shape, dtype=torch.float64) if table is None else table.cpu().double()


class HeldOut(NamedTuple):
    """Held-out images and noise levels: float [N, C, H, W] in [-1, 1], conditions, noise quantiles [L]."""

    x0: Tensor
    conditions: Conditions
    levels: Tensor

    def losses(
        self,
        loss_at: LossAt,
        batch: int,
        seed: int = 0,
        progress: Callable[[int], None] = lambda images: None,
        only: slice = slice(None),
    ) -> Tensor:
        """Return the `fixed_losses` [2, L, N] of all images at all levels, clean to noisy, or at `only` some levels."""

        def noise(level: int) -> Tensor:
            # All noise of a level is drawn at once, so that it does not depend on the batch.
            generator = torch.Generator().manual_seed(seed * 1_000_003 + level)
            return torch.randn(self.x0.shape, generator=generator)

        u = self.levels[:, None].expand(-1, len(self.x0))
        return fixed_losses(loss_at, self.x0, self.conditions, u, noise, batch, progress, only)

    @property
    def images(self) -> int:
        """Number of held-out images of this size."""
        return len(self.x0)


class HeldOutBuckets(NamedTuple):
    """Held-out images of several sizes, with the same noise levels."""

    parts: tuple[HeldOut, ...]

    def losses(
        self,
        loss_at: LossAt,
        batch: int,
        seed: int = 0,
        progress: Callable[[int], None] = lambda images: None,
        only: slice = slice(None),
    ) -> Tensor:
        """Return `HeldOut.losses` of the images of all parts, in their order."""
        return torch.cat([part.losses(loss_at, batch, seed, progress, only) for part in self.parts], 2)

    @property
    def images(self) -> int:
        """Number of held-out images of all sizes."""
        return sum(part.images for part in self.parts)


def summarize_losses(losses: Tensor, batch: int) -> dict[str, float | list[float]]:
    """Mean loss over images and levels, by level from clean to noisy, and the noise-prediction error by level.

    `losses` [2, L, N] of `HeldOut` or `HeldOutBuckets` were computed in batches of this size.
    """
    # Summed batch by batch: another order would change the last bit of recorded losses.
    _, levels, images = losses.shape
    totals = torch.zeros(2, levels, dtype=torch.float64)
    for part in torch.split(losses, batch, dim=2):
        for row, of_level in enumerate(part):
            totals[row] += torch.stack([values.sum() for values in of_level])
    loss, noise_error = (totals / images).tolist()
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
