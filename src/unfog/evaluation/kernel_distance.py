"""Kernel distance (KID): squared maximum mean discrepancy with a polynomial kernel, without bias at any n.

k(x, y) = (x.y / D + 1)^3 (Binkowski et al. 2018, section 4); the estimate is that of Gretton et al. 2012, eq. 3.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

_BLOCK = 5000
ROWS = 1024


class Discrepancy(NamedTuple):
    """Squared MMD, which may come out below 0 where the sets are alike, and its standard error."""

    value: float
    error: float


def kernel_distance(x: Tensor, y: Tensor, seed: int = 0, block: int = _BLOCK) -> Discrepancy:
    """Unbiased squared MMD of features [N, D], [M, D], in float64.

    Every picture is used once: sets of more than `block` are cut at random into equally many parts, and the parts'
    distances averaged, which bounds the work to block * (N + M) kernels. The standard error is the jackknife's over
    pictures within each part; where the sets are alike it is too large rather than too small (Efron & Stein 1981).

    Raises:
        ValueError: a set has fewer than three pictures.
    """
    if min(len(x), len(y)) < 3:
        raise ValueError(f"sets of {len(x)} and {len(y)} are too small for a kernel distance; give at least 3 each")
    parts = min(-(-max(len(x), len(y)) // block), min(len(x), len(y)) // 3)
    generator = torch.Generator().manual_seed(seed)
    x, y = (z[torch.randperm(len(z), generator=generator).to(z.device)] for z in (x, y)) if parts > 1 else (x, y)
    found = [_one(p, q) for p, q in zip(x.tensor_split(parts), y.tensor_split(parts), strict=True)]
    return Discrepancy(sum(one.value for one in found) / parts, math.sqrt(sum(one.error**2 for one in found)) / parts)


def _one(x: Tensor, y: Tensor) -> Discrepancy:
    n, m = len(x), len(y)
    within_x, within_y = _row_sums(x, x, skip_self=True), _row_sums(y, y, skip_self=True)
    x_to_y, y_to_x = _row_sums(x, y), _row_sums(y, x)
    total_x, total_y, total = within_x.sum(), within_y.sum(), x_to_y.sum()
    value = total_x / (n * (n - 1)) + total_y / (m * (m - 1)) - 2 * total / (n * m)
    # What is left without picture i: its row and its column fall away.
    without_x = (total_x - 2 * within_x) / ((n - 1) * (n - 2)) - 2 * (total - x_to_y) / ((n - 1) * m)
    without_y = (total_y - 2 * within_y) / ((m - 1) * (m - 2)) - 2 * (total - y_to_x) / (n * (m - 1))
    variance = sum((k - 1) / k * (z - z.mean()).square().sum() for k, z in ((n, without_x), (m, without_y)))
    return Discrepancy(float(value), math.sqrt(float(variance)))


def _row_sums(x: Tensor, y: Tensor, skip_self: bool = False) -> Tensor:
    """Sum of k(x_i, y_j) over j, [N], by blocks of rows."""
    y = y.double()
    sums = torch.cat([((part.double() @ y.T) / x.shape[1] + 1).pow_(3).sum(1) for part in torch.split(x, ROWS)])
    if skip_self:
        sums -= (x.double().square().sum(1) / x.shape[1] + 1).pow(3)
    return sums
