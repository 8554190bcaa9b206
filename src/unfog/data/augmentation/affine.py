"""Affine maps of whole batches, without the blur and the aliasing of plain interpolation.

Images are doubled by a wavelet's low-pass, sampled there with bilinear weights, and halved by the dual low-pass, as in
StyleGAN2-ADA and EDM (Karras et al. 2020, appendix B.2), with another wavelet: Cohen-Daubechies-Feauveau 9/7 is
symmetric, so that what needs no interpolation (mirroring, a shift by whole pixels, a quarter turn) is exact, borders
included.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

# Halves of symmetric filters, centre first. Doubling and then halving is the identity.
_DOUBLE = (1.115087052457, 0.591271763114, -0.057543526229, -0.091271763114)
_HALVE = (0.602949018236, 0.266864118443, -0.078223266529, -0.016864118443, 0.026748757411)
_REACH = len(_HALVE) - 1  # of the halving, in fine pixels; a fine pixel is half a pixel


def warp(x: Tensor, linear: Tensor, shift: Tensor) -> Tensor:
    """Images whose value at p is that of `x` at linear p + shift, with p in pixels from the centre.

    Beyond its borders an image goes on as its reflection in the outermost pixels. Shrinking is not filtered further
    than the doubling does, which is enough down to half the size.

    Args:
        x: float32 [B, C, H, W], H and W at least 2.
        linear: [B, 2, 2], on (x, y), y downwards.
        shift: [B, 2], in pixels (x, y).

    Returns:
        Like `x`, clamped to [-1, 1], as the filters overshoot at edges.
    """
    height, width = x.shape[2:]
    fine = _doubling(height, x.device) @ x @ _doubling(width, x.device).T
    grid = torch.stack(torch.meshgrid(_fine(width, x.device), _fine(height, x.device), indexing="xy"), dim=-1)
    # Reflected here: not every device's grid_sample can. In numbers of periods, which are there and back; in the
    # coordinates of grid_sample, -1 and 1 are the outermost pixels. remainder() would take longer than all the rest.
    last = sides(x) - 1
    per_pixel = 1 / (2 * last)
    offset = (shift + last / 2) * per_pixel
    phase = torch.einsum("hwi,bji->bhwj", grid, linear * per_pixel[:, None]) + offset[:, None, None]
    points = phase.sub_(phase.floor()).sub_(0.5).abs_().mul_(-4).add_(1)
    sampled = F.grid_sample(fine, points, align_corners=True)
    return (_halving(height, x.device) @ sampled @ _halving(width, x.device).T).clamp_(-1, 1)


def sides(x: Tensor) -> Tensor:
    """(width, height) of images [B, C, H, W], int64 [2] on their device."""
    return _sides(x.shape[3], x.shape[2], x.device)


@lru_cache(maxsize=8)
def _sides(width: int, height: int, device: torch.device) -> Tensor:
    """Made once, as the host may wait for a device that it copies to."""
    return torch.tensor([width, height], device=device)


def _fine(side: int, device: torch.device) -> Tensor:
    """Where the fine pixels of a row are that the halving reads, in pixels from the centre: [2 side - 1 + 2 reach]."""
    return torch.arange(-_REACH, 2 * side - 1 + _REACH, device=device) / 2 - (side - 1) / 2


# As matrices, for a convolution may be done in TF32 on CUDA.


@lru_cache(maxsize=8)
def _doubling(side: int, device: torch.device) -> Tensor:
    """[2 side - 1, side]: a row of fine pixels, from the first pixel to the last, of a row that is reflected."""
    matrix = torch.zeros(2 * side - 1, side, dtype=torch.float64)
    for row in range(2 * side - 1):
        for pixel in range(-len(_DOUBLE), side + len(_DOUBLE)):
            distance = abs(row - 2 * pixel)
            if distance < len(_DOUBLE):
                reflected = pixel % (2 * side - 2)
                matrix[row, min(reflected, 2 * side - 2 - reflected)] += _DOUBLE[distance]
    return matrix.float().to(device)


@lru_cache(maxsize=8)
def _halving(side: int, device: torch.device) -> Tensor:
    """[side, 2 side - 1 + 2 reach]: back to pixels."""
    matrix = torch.zeros(side, 2 * side - 1 + 2 * _REACH, dtype=torch.float64)
    taps = torch.tensor(_HALVE[:0:-1] + _HALVE, dtype=torch.float64)
    for pixel in range(side):
        matrix[pixel, 2 * pixel : 2 * pixel + len(taps)] = taps
    return matrix.float().to(device)
