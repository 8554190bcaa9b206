"""Texture features without a network: strength of detail by scale, direction, colour and place."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

_LEAST = 4
_FAINT = 1 / 512  # half of the smallest step of a pixel
_USUAL = 4.0  # what is taken from a logarithm, so that the features of photographs are about 1


def texture(x: Tensor) -> Tensor:
    """RGB [N, 3, H, W] in 0 to 255 -> [N, 33 L], L scales from the pixels to a side of 4, each half of the one before.

    Of each scale: logarithms of mean and root mean square of the Haar details (across, down, diagonal) of luma and the
    two colour differences; those of luma in each quarter of the picture; deviation of each channel, and of the pixels
    their mean. Logarithms, so that a blur or a grain counts by how much of the detail it changes, however little
    detail there is. After Portilla & Simoncelli 2000, whose statistics are of this kind; these see less and are few.
    """
    x = _luma_and_colour(x / 255)
    found = [4 * x.mean((2, 3))]
    while True:
        details = _details(x)  # [N, 3 channels, 3 directions, H - 1, W - 1]
        strength = details.abs()
        quarters = F.adaptive_avg_pool2d(strength[:, 0], 2)
        found += [_logarithm(strength.mean((3, 4))), _logarithm(details.square().mean((3, 4)).sqrt())]
        found += [_logarithm(quarters)]
        x = F.avg_pool2d(x, 2)
        if min(x.shape[2:]) < _LEAST:
            return torch.cat([part.flatten(1) for part in found], 1)
        found.append(4 * x.std((2, 3)))


def _luma_and_colour(x: Tensor) -> Tensor:
    """Y, Cb, Cr of RGB (BT.601)."""
    matrix = torch.tensor([[0.299, 0.587, 0.114], [-0.169, -0.331, 0.5], [0.5, -0.419, -0.081]], device=x.device)
    return torch.einsum("ij,njhw->nihw", matrix, x)


def _details(x: Tensor) -> Tensor:
    """Haar details of each channel at every place, in three directions."""
    haar = torch.tensor([[[1, -1], [1, -1]], [[1, 1], [-1, -1]], [[1, -1], [-1, 1]]], device=x.device) / 2
    found = F.conv2d(x.flatten(0, 1)[:, None], haar[:, None].to(x.dtype))
    return found.reshape(*x.shape[:2], *found.shape[1:])


def _logarithm(x: Tensor) -> Tensor:
    return (x + _FAINT).log() + _USUAL
