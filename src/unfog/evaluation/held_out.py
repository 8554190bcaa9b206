"""Loss on images that are not trained on, with the same noise at the same levels each time.

A training loss jumps with every draw of the noise level; this one moves only when the network does, so two checkpoints
can be compared, and a rise means overfitting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

LossAt = Callable[[Tensor, Tensor | None, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(x0 [B, C, H, W], label [B] or None, u [B], noise like x0) -> weighted loss [B], squared error of the noise [B]."""


class HeldOut(NamedTuple):
    """What is measured: images float [N, C, H, W] in [-1, 1], labels [N] or None, noise quantiles [L]."""

    x0: Tensor
    label: Tensor | None
    levels: Tensor

    @torch.inference_mode()
    def measure(self, loss_at: LossAt, batch: int, seed: int = 0) -> dict[str, float | list[float]]:
        """Mean loss over images and levels, by level from clean to noisy, and the noise-prediction error by level."""
        totals = torch.zeros(2, len(self.levels), dtype=torch.float64)
        for level, u in enumerate(self.levels):
            # All noise of a level at once, so that it is the same whatever the batch.
            generator = torch.Generator().manual_seed(seed * 1_000_003 + level)
            noises = torch.randn(self.x0.shape, generator=generator)
            for first in range(0, len(self.x0), batch):
                x0 = self.x0[first : first + batch]
                label = None if self.label is None else self.label[first : first + batch]
                noise = noises[first : first + batch].to(x0.device)
                for row, values in enumerate(loss_at(x0, label, u.expand(len(x0)), noise)):
                    totals[row, level] += values.cpu().double().sum()
        loss, noise_error = (totals / len(self.x0)).tolist()
        return {
            "held_out_loss": sum(loss) / len(loss),
            "held_out_by_level": loss,
            "held_out_noise_error": noise_error,
        }


def midpoints(levels: int) -> Tensor:
    """Noise quantiles in the middle of `levels` equal parts of (0, 1)."""
    return (torch.arange(levels) + 0.5) / levels
