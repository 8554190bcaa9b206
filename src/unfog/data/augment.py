"""Random flips and slight colour changes, for whole batches at once and on whatever device they are on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Augment:
    """Callable on uint8 [B, C, H, W], giving the same. Draws from torch's global generator of the batch's
    device, so that whoever seeds that by position has augmentation by position; off (both at 0) it draws
    nothing.
    """

    flip: bool = False
    jitter: float = 0.0

    def __call__(self, pixels: Tensor) -> Tensor:
        """Each image flipped with probability 1/2, then its brightness, contrast and saturation (in this
        order) scaled by a factor of its own, uniform in [1 - jitter, 1 + jitter].
        """
        if self.flip:
            mirrored = torch.rand(len(pixels), device=pixels.device) < 0.5
            pixels = torch.where(mirrored.view(-1, 1, 1, 1), pixels.flip(-1), pixels)
        if self.jitter:
            pixels = self._recoloured(pixels)
        return pixels

    def _recoloured(self, pixels: Tensor) -> Tensor:
        draws = torch.rand(3, len(pixels), 1, 1, 1, device=pixels.device)
        brightness, contrast, saturation = 1 + self.jitter * (2 * draws - 1)
        x = pixels.float() * brightness
        x = torch.lerp(_grey(x).mean((2, 3), keepdim=True), x, contrast)
        if pixels.shape[1] == 3:
            x = torch.lerp(_grey(x), x, saturation)
        return x.round_().clamp_(0, 255).to(torch.uint8)


def _grey(x: Tensor) -> Tensor:
    """Luma of RGB (ITU-R BT.601, as Pillow's "L"), [B, C, H, W] -> [B, 1, H, W]."""
    if x.shape[1] == 1:
        return x
    return 0.299 * x[:, :1] + 0.587 * x[:, 1:2] + 0.114 * x[:, 2:]
