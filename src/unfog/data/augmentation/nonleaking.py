"""Non-leaking augmentation for small sets: the network is conditioned on the augmentation, so samples do not show it.

EDM (Karras et al. 2022, appendix F.2), after ADA (Karras et al. 2020). The network gets nine numbers that describe how
its input was mirrored, rotated and stretched; sampling sets them to zero.

Probabilities and spreads are EDM's, so that p = 0.12 means the same here. Differences: shifts by whole pixels are a
change of their own beside those by fractions; a stretch has one pair of numbers (see `Geometry.stretch`); images are
resampled with another wavelet (see `affine`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from unfog.data.augmentation.affine import sides, warp
from unfog.sharded_rng import draw_rows

CONDITIONS = 9
"""Length of the augmentation condition."""

_OCTAVES = 0.2  # standard deviation of the binary logarithm of scale and stretch
_SHIFT = 1 / 8  # of the side: standard deviation of a shift by fractions, largest shift by whole pixels


class Geometry(NamedTuple):
    """The geometric changes to each image, in the order of their application; zeros change nothing."""

    flip: Tensor
    """0 or 1 [B, 2]: left to right, top to bottom."""
    zoom: Tensor
    """[B], in standard deviations: above 0 enlarges."""
    angle: Tensor
    """[B], radians, clockwise as y goes downwards."""
    stretch: Tensor
    """[B, 2], in standard deviations: (s cos 2r, s sin 2r) for a stretch by s along the direction r, which shrinks
    across it by as much. So each stretch has one pair of numbers, where EDM's (s cos r, s sin r) has four."""
    shift: Tensor
    """[B, 2], to the right and down, as a fraction of the side."""

    def condition(self) -> Tensor:
        """Return the network's condition, float32 [B, 9]: 0 for changes not made, else of the order of 1."""
        turn = torch.stack([self.angle.cos() - 1, self.angle.sin()], dim=1)
        return torch.cat([self.flip, self.shift / _SHIFT, self.zoom[:, None], turn, self.stretch], dim=1)

    def apply(self, x: Tensor) -> Tensor:
        """Change images float32 [B, C, H, W] in [-1, 1]. Images without a change stay the same to the bit."""
        # `warp` wants the place that each pixel comes from, hence the inverse of flip, zoom, turn, stretch and shift.
        unstretch = _inverse_stretch(self.stretch)
        cos, sin = self.angle.cos(), self.angle.sin()
        unturn = torch.stack([cos, sin, -sin, cos], dim=1).view(-1, 2, 2)
        unflip_unzoom = (1 - 2 * self.flip) * (-_OCTAVES * self.zoom).exp2()[:, None]
        linear = unflip_unzoom[:, :, None] * (unturn @ unstretch)
        shift = (linear @ (-self.shift * sides(x))[:, :, None])[:, :, 0]
        touched = (self.condition() != 0).any(dim=1)
        return torch.where(touched.view(-1, 1, 1, 1), warp(x, linear, shift), x)


def draw_geometry(x: Tensor, p: float) -> Geometry:
    """Draw changes for images `x`, each with probability `p`, from torch's global generator of their device.

    As in EDM, half of all images are flipped left to right whatever p is, if above 0. A flip top to bottom is a fair
    coin. Scale and stretch are 2^(0.2 n) with n normal; angles and the direction of a stretch are uniform; shifts are
    normal with 1/8 of the side, or, as a change of their own, by whole pixels up to 1/8 of the side.
    """
    count, device = len(x), x.device
    done = (draw_rows(count, lambda n: torch.rand(7, n, device=device), dim=1) < p).float()
    done[0] = float(p > 0)
    even = draw_rows(count, lambda n: torch.rand(6, n, device=device), dim=1)
    normal = draw_rows(count, lambda n: torch.randn(4, n, device=device), dim=1)
    whole = ((2 * even[2:4].T - 1) * _SHIFT * sides(x)).round() / sides(x)
    direction = 2 * math.pi * even[5]  # twice the angle
    return Geometry(
        flip=(done[:2] * even[:2].round()).T,
        zoom=done[2] * normal[0],
        angle=done[3] * (2 * even[4] - 1) * math.pi,
        stretch=(done[4] * normal[1] * torch.stack([direction.cos(), direction.sin()])).T,
        shift=(done[5] * normal[2:] * _SHIFT).T + done[6][:, None] * whole,
    )


def _inverse_stretch(stretch: Tensor) -> Tensor:
    """Return the inverse of the stretch, [B, 2] -> [B, 2, 2]."""
    # A stretch that keeps the area is the exponential of a symmetric matrix without trace, which has this closed form.
    size = stretch.norm(dim=1)
    along, across = (stretch / size.clamp_min(1e-12)[:, None]).unbind(1)
    octaves = math.log(2) * _OCTAVES * size
    cosh, sinh = octaves.cosh(), octaves.sinh()
    rows = [cosh - sinh * along, -sinh * across, -sinh * across, cosh + sinh * along]
    return torch.stack(rows, dim=1).view(-1, 2, 2)
