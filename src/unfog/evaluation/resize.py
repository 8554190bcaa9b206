"""Resizing as the networks that measure were trained to expect; which one matters as much as which network."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def tf1_bilinear(x: Tensor, size: int) -> Tensor:
    """Bilinear resize of float [N, C, H, W] to [N, C, size, size] as TensorFlow 1 did it by default.

    Output pixel i reads at i * in / out, without half-pixel centres and without smoothing before shrinking; past the
    last pixel the last one is repeated (`resize_bilinear`, align_corners=False). The FID of the literature rests on
    it (Heusel et al. 2017; Parmar et al. 2022, section 3, on what other resizes do to the figure).
    """
    rows, next_row, down = _source(x.shape[2], size, x.device)
    columns, next_column, right = _source(x.shape[3], size, x.device)
    x = x[:, :, :, columns].lerp(x[:, :, :, next_column], right)
    return x[:, :, rows].lerp(x[:, :, next_row], down[:, None])


def _source(length: int, size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """For each output place: the pixel before it, the pixel after, and how far between them, in float32 as there."""
    scale = torch.tensor(length, dtype=torch.float32) / size
    place = torch.arange(size, dtype=torch.float32) * scale
    before = place.long().clamp(max=length - 1)
    return before.to(device), (before + 1).clamp(max=length - 1).to(device), (place - before).to(device)


def antialiased(x: Tensor, size: int) -> Tensor:
    """Bicubic resize of float [N, C, H, W] to [N, C, size, size], smoothed where it shrinks, half-pixel centres."""
    return F.interpolate(x, size=(size, size), mode="bicubic", antialias=True)
