"""Random changes to images, for whole batches at once and on whatever device they are on.

None changes what an image is of. `flip`, `jitter` and `crop` change what is learned: samples are mirrored, tinted and
enlarged as the training images were, which is right where such pictures are as good as the others (a flip of symmetric
things, say). `augment` does not, as the network is told of it (`unfog.data.augmentation.nonleaking`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unfog.data.augmentation.affine import sides, warp
from unfog.data.augmentation.nonleaking import draw
from unfog.data.settings import Data
from unfog.sharded_rng import draw_rows


def to_model_range(pixels: Tensor) -> Tensor:
    """uint8 [0, 255] to float32 [-1, 1]: the one place where that happens."""
    return (pixels / 127.5).sub_(1)


@dataclass(frozen=True)
class Augment:
    """Callable on uint8 [B, C, H, W], giving (images float32 in [-1, 1], what was done [B, 9] or None).

    Draws from torch's global generator of the batch's device, so that whoever seeds that by position has augmentation
    by position; off (all at 0) it draws nothing.
    """

    flip: bool = False
    jitter: float = 0.0
    crop: float = 0.0
    augment: float = 0.0

    @classmethod
    def of(cls, settings: Data) -> Augment:
        """As the settings say."""
        return cls(settings.flip, settings.jitter, settings.crop, settings.augment)

    def __call__(self, pixels: Tensor) -> tuple[Tensor, Tensor | None]:
        """Each image flipped with probability 1/2, then its brightness, contrast and saturation (in this order) scaled
        by a factor of its own, uniform in [1 - jitter, 1 + jitter]; then a square of it, of a side uniform in
        [1 - crop, 1] of its own and anywhere, enlarged to the whole; then each change of EDM's with probability
        `augment`, for which alone there is a condition.
        """
        if self.flip:
            mirrored = draw_rows(len(pixels), lambda n: torch.rand(n, device=pixels.device)) < 0.5
            pixels = torch.where(mirrored.view(-1, 1, 1, 1), pixels.flip(-1), pixels)
        if self.jitter:
            pixels = self._recoloured(pixels)
        x0 = to_model_range(pixels)
        if self.crop:
            x0 = self._cropped(x0)
        if not self.augment:
            return x0, None
        geometry = draw(x0, self.augment)
        return geometry.apply(x0), geometry.condition()

    def _recoloured(self, pixels: Tensor) -> Tensor:
        draws = draw_rows(len(pixels), lambda n: torch.rand(3, n, 1, 1, 1, device=pixels.device), dim=1)
        brightness, contrast, saturation = 1 + self.jitter * (2 * draws - 1)
        x = pixels.float() * brightness
        x = torch.lerp(_grey(x).mean((2, 3), keepdim=True), x, contrast)
        if pixels.shape[1] == 3:
            x = torch.lerp(_grey(x), x, saturation)
        return x.round_().clamp_(0, 255).to(torch.uint8)

    def _cropped(self, x: Tensor) -> Tensor:
        draws = draw_rows(len(x), lambda n: torch.rand(n, 3, device=x.device))
        side = 1 - self.crop * draws[:, 0]
        margins = sides(x) * (1 - side)[:, None]
        linear = side[:, None, None] * torch.eye(2, device=x.device)
        return warp(x, linear, (draws[:, 1:] - 0.5) * margins)


def _grey(x: Tensor) -> Tensor:
    """Luma of RGB (ITU-R BT.601, as Pillow's "L"), [B, C, H, W] -> [B, 1, H, W]."""
    if x.shape[1] == 1:
        return x
    return 0.299 * x[:, :1] + 0.587 * x[:, 1:2] + 0.114 * x[:, 2:]
