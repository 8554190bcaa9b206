"""Augmentation: flip, colour jitter, crop, and EDM's non-leaking augmentation.

`flip`, `jitter` and `crop` show in the samples, which are mirrored, tinted and enlarged as the training images were.
`augment` does not, as the network is conditioned on it (see `nonleaking`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unfog.data.augmentation.affine import sides, warp
from unfog.data.augmentation.nonleaking import draw_geometry
from unfog.data.settings import Data
from unfog.sharded_rng import draw_rows


def to_model_range(pixels: Tensor) -> Tensor:
    """Convert uint8 [0, 255] to float32 [-1, 1]. All code that needs this range calls this function."""
    return (pixels / 127.5).sub_(1)


@dataclass(frozen=True)
class Augment:
    """Callable on uint8 [B, C, H, W] that returns (images float32 in [-1, 1], augmentation condition [B, 9] or None).

    It draws from torch's global generator of the batch's device, which training seeds by position in the stream. With
    all settings 0 it draws nothing.
    """

    flip: bool = False
    jitter: float = 0.0
    crop: float = 0.0
    augment: float = 0.0

    @classmethod
    def from_settings(cls, settings: Data) -> Augment:
        return cls(settings.flip, settings.jitter, settings.crop, settings.augment)

    def __call__(self, pixels: Tensor) -> tuple[Tensor, Tensor | None]:
        """Augment each image of a batch on its own.

        Flip it with probability 1/2. Scale its brightness, contrast and saturation, in this order, by factors uniform
        in [1 - jitter, 1 + jitter]. Enlarge a square of it, with a side uniform in [1 - crop, 1], to the whole. Apply
        each of EDM's changes with probability `augment`; the condition describes these alone.
        """
        if self.flip:
            mirrored = draw_rows(len(pixels), lambda n: torch.rand(n, device=pixels.device)) < 0.5
            pixels = torch.where(mirrored.view(-1, 1, 1, 1), pixels.flip(-1), pixels)
        if self.jitter:
            pixels = self._jitter_colours(pixels)
        x0 = to_model_range(pixels)
        if self.crop:
            x0 = self._crop(x0)
        if not self.augment:
            return x0, None
        geometry = draw_geometry(x0, self.augment)
        return geometry.apply(x0), geometry.condition()

    def _jitter_colours(self, pixels: Tensor) -> Tensor:
        draws = draw_rows(len(pixels), lambda n: torch.rand(3, n, 1, 1, 1, device=pixels.device), dim=1)
        brightness, contrast, saturation = 1 + self.jitter * (2 * draws - 1)
        x = pixels.float() * brightness
        x = torch.lerp(_grey(x).mean((2, 3), keepdim=True), x, contrast)
        if pixels.shape[1] == 3:
            x = torch.lerp(_grey(x), x, saturation)
        return x.round_().clamp_(0, 255).to(torch.uint8)

    def _crop(self, x: Tensor) -> Tensor:
        draws = draw_rows(len(x), lambda n: torch.rand(n, 3, device=x.device))
        side = 1 - self.crop * draws[:, 0]
        margins = sides(x) * (1 - side)[:, None]
        linear = side[:, None, None] * torch.eye(2, device=x.device)
        return warp(x, linear, (draws[:, 1:] - 0.5) * margins)


def _grey(x: Tensor) -> Tensor:
    """Return the luma (ITU-R BT.601, like Pillow's "L"), [B, C, H, W] -> [B, 1, H, W]."""
    if x.shape[1] == 1:
        return x
    return 0.299 * x[:, :1] + 0.587 * x[:, 1:2] + 0.114 * x[:, 2:]
