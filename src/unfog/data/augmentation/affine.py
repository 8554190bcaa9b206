"""Affine maps of image batches, without the blur and the aliasing of plain interpolation.

As in StyleGAN2-ADA and EDM (Karras et al. 2020, appendix B.2), images are upsampled twofold with a wavelet's low-pass
filter, sampled bilinearly, and downsampled with the dual filter. The wavelet here is the Cohen-Daubechies-Feauveau 9/7.
It is symmetric, so that mirroring, shifts by whole pixels and quarter turns are exact, borders included.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

# Halves of the symmetric CDF 9/7 filters, centre first. Upsampling and then downsampling is the identity.
_UPSAMPLE = (1.115087052457, 0.591271763114, -0.057543526229, -0.091271763114)
_DOWNSAMPLE = (0.602949018236, 0.266864118443, -0.078223266529, -0.016864118443, 0.026748757411)
_REACH = len(_DOWNSAMPLE) - 1  # of the halving, in fine pixels; a fine pixel is half a pixel


def warp(x: Tensor, linear: Tensor, shift: Tensor) -> Tensor:
    """Map images so that the value at p is that of `x` at linear p + shift, with p in pixels from the centre.

    Images are continued beyond their borders by reflection in the outermost pixels. Shrinking is antialiased down to
    half the size.

    Args:
        x: float32 [B, C, H, W], H and W at least 2.
        linear: [B, 2, 2], on (x, y), y downwards.
        shift: [B, 2], in pixels (x, y).

    Returns:
        Like `x`, clamped to [-1, 1], as the filters overshoot at edges.
    """
    height, width = x.shape[2:]
    fine = _upsampling(height, x.device) @ x @ _upsampling(width, x.device).T
    grid = torch.stack(torch.meshgrid(_fine(width, x.device), _fine(height, x.device), indexing="xy"), dim=-1)
    # Reflection is computed here, as grid_sample cannot do it on every device: `phase` counts periods, each once there
    # and back, and its fraction is folded to grid_sample's coordinates, where -1 and 1 are the outermost pixels. With
    # remainder() it would take longer than all the rest.
    last = sides(x) - 1
    per_pixel = 1 / (2 * last)
    offset = (shift + last / 2) * per_pixel
    phase = torch.einsum("hwi,bji->bhwj", grid, linear * per_pixel[:, None]) + offset[:, None, None]
    points = phase.sub_(phase.floor()).sub_(0.5).abs_().mul_(-4).add_(1)
    sampled = F.grid_sample(fine, points, align_corners=True)
    return (_downsampling(height, x.device) @ sampled @ _downsampling(width, x.device).T).clamp_(-1, 1)


def sides(x: Tensor) -> Tensor:
    """Return (width, height) of images [B, C, H, W] as int64 [2] on their device."""
    return _sides(x.shape[3], x.shape[2], x.device)


@lru_cache(maxsize=8)
def _sides(width: int, height: int, device: torch.device) -> Tensor:
    # Cached, as copying it to the device anew could make the host wait.
    return torch.tensor([width, height], device=device)


def _fine(side: int, device: torch.device) -> Tensor:
    """Return the fine pixels of a row that downsampling reads, in pixels from the centre: [2 side - 1 + 2 reach]."""
    return torch.arange(-_REACH, 2 * side - 1 + _REACH, device=device) / 2 - (side - 1) / 2


# The filters are matrices, as CUDA may compute a convolution in TF32.


@lru_cache(maxsize=8)
def _upsampling(side: int, device: torch.device) -> Tensor:
    """Return the matrix [2 side - 1, side] that upsamples a row, continued by reflection."""
    matrix = torch.zeros(2 * side - 1, side, dtype=torch.float64)
    for row in range(2 * side - 1):
        for pixel in range(-len(_UPSAMPLE), side + len(_UPSAMPLE)):
            distance = abs(row - 2 * pixel)
            if distance < len(_UPSAMPLE):
                reflected = pixel % (2 * side - 2)
                matrix[row, min(reflected, 2 * side - 2 - reflected)] += _UPSAMPLE[distance]
    return matrix.float().to(device)


@lru_cache(maxsize=8)
def _downsampling(side: int, device: torch.device) -> Tensor:
    """Return the matrix [side, 2 side - 1 + 2 reach] that downsamples a row of fine pixels."""
    matrix = torch.zeros(side, 2 * side - 1 + 2 * _REACH, dtype=torch.float64)
    taps = torch.tensor(_DOWNSAMPLE[:0:-1] + _DOWNSAMPLE, dtype=torch.float64)
    for pixel in range(side):
        matrix[pixel, 2 * pixel : 2 * pixel + len(taps)] = taps
    return matrix.float().to(device)
