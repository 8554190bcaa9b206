"""Distances between two sets of features: Frechet distance (FID) and kernel distance (KID).

Frechet distance between the Gaussians that have the means and covariances of the sets:

    FD = |m1 - m2|^2 + tr(S1) + tr(S2) - 2 tr((S1 S2)^(1/2))        (Dowson & Landau 1982; Heusel et al. 2017, eq. 6)

An estimate from n images is too large, by about c / n with a c of the network's own (Chong & Forsyth 2020), so
values of different n cannot be compared. The standard error is the delta method's: the derivative of FD by the weight
of each image. It is of the noise at this n and says nothing about the bias.

Kernel distance: squared maximum mean discrepancy with k(x, y) = (x.y / D + 1)^3 (Binkowski et al. 2018, section 4),
estimated without bias at any n (Gretton et al. 2012, eq. 3).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

# Rows of features that are computed in float64 at once, which bounds memory.
_ROWS = 4096
_KERNEL_ROWS = 1024
_KERNEL_BLOCK = 5000


class FeatureStatistics(NamedTuple):
    """Mean [D] and covariance [D, D], unbiased, in float64, of n features."""

    n: int
    mean: Tensor
    covariance: Tensor

    @classmethod
    def of(cls, x: Tensor) -> FeatureStatistics:
        """Statistics of features [N, D], N > 1; in two passes over blocks, as one pass would cancel."""
        mean = torch.zeros(x.shape[1], dtype=torch.float64, device=x.device)
        for part in torch.split(x, _ROWS):
            mean += part.double().sum(0)
        mean /= len(x)
        covariance = torch.zeros(x.shape[1], x.shape[1], dtype=torch.float64, device=x.device)
        for part in torch.split(x, _ROWS):
            centred = part.double() - mean
            covariance.addmm_(centred.T, centred)
        return cls(len(x), mean, covariance / (len(x) - 1))


class Distance(NamedTuple):
    """A distance of two sets and the standard error of the sampling of both."""

    value: float
    error: float

    @classmethod
    def frechet(cls, x: Tensor, y: Tensor, x_known: FeatureStatistics | None = None) -> Distance:
        """FD of two sets of features [N, D], [M, D], N, M > D, and its standard error.

        With T the map that carries the first Gaussian to the second, dFD / dS1 = I - T (Takatsu 2011), so an image x
        moves FD by (x - m1)' (I - T) (x - m1) + 2 (m1 - m2)' (x - m1) over N, and likewise for the second set.
        """
        a, b = x_known or FeatureStatistics.of(x), FeatureStatistics.of(y)
        values, vectors = torch.linalg.eigh(a.covariance)
        values = values.clamp(min=0)
        half = (vectors * values.sqrt()) @ vectors.T
        # A pseudo-inverse: with fewer images than features, or dead features, the covariance is singular.
        inverse = (vectors * _inverse(values.sqrt())) @ vectors.T
        roots, basis = torch.linalg.eigh(half @ b.covariance @ half)
        roots = roots.clamp(min=0).sqrt()
        there = inverse @ ((basis * roots) @ basis.T) @ inverse
        back = half @ ((basis * _inverse(roots)) @ basis.T) @ half
        variance = _influence(x, a, b.mean, there) / a.n + _influence(y, b, a.mean, back) / b.n
        return cls(_sum(a, b, roots.sum()), math.sqrt(variance))

    @classmethod
    def kernel(cls, x: Tensor, y: Tensor, seed: int = 0, block: int = _KERNEL_BLOCK) -> Distance:
        """Unbiased squared MMD of features [N, D], [M, D], in float64.

        Every image is used once: sets of more than `block` are cut at random into equally many parts, and the parts'
        distances averaged, which bounds the work to block * (N + M) kernels. The standard error is the jackknife's over
        images within each part; where the sets are alike it is too large rather than too small (Efron & Stein 1981).
        ValueError if a set has fewer than three images.
        """
        if min(len(x), len(y)) < 3:
            raise ValueError(f"sets of {len(x)} and {len(y)} are too small for a kernel distance; give at least 3 each")
        parts = min(-(-max(len(x), len(y)) // block), min(len(x), len(y)) // 3)
        generator = torch.Generator().manual_seed(seed)
        # Shuffled, as a set may come sorted by class, and parts of one class each would be far apart.
        x, y = (z[torch.randperm(len(z), generator=generator).to(z.device)] for z in (x, y)) if parts > 1 else (x, y)
        found = [
            _kernel_distance_of_part(p, q) for p, q in zip(x.tensor_split(parts), y.tensor_split(parts), strict=True)
        ]
        return cls(sum(one.value for one in found) / parts, math.sqrt(sum(one.error**2 for one in found)) / parts)


def _frechet_distance(a: FeatureStatistics, b: FeatureStatistics) -> float:
    """FD of two Gaussians; of equal ones 0 up to rounding. No matrix root of a product that is not symmetric:
    S1 S2 has the eigenvalues of S1^(1/2) S2 S1^(1/2), which is.
    """
    half = _root(a.covariance)
    # Rounding may leave eigenvalues slightly below 0.
    cross = torch.linalg.eigvalsh(half @ b.covariance @ half).clamp(min=0).sqrt().sum()
    return _sum(a, b, cross)


def extrapolate_frechet(x: Tensor, y: Tensor, parts: int, seed: int, whole: float) -> float:
    """FD of infinitely many images: the line through FD of both sets in k parts, k = 1 to `parts`, at k = 0;
    `whole` is FD for k = 1.

    Chong & Forsyth 2020, section 3, draw subsets at random and shrink only the generated set, so that the reference's
    own bias stays. Here both shrink; and the k parts are disjoint and averaged, so that the sampling noise, to first
    order a sum over images, is the same for every k, and the line does not amplify it. ValueError if fewer than two
    parts make no line.
    """
    if parts < 2:
        raise ValueError(f"parts = {parts} must be at least 2")
    # A generator of the CPU, whose permutations are the same for features on any device.
    generator = torch.Generator().manual_seed(seed)
    x, y = (z[torch.randperm(len(z), generator=generator).to(z.device)] for z in (x, y))
    counts = torch.arange(1, parts + 1, dtype=torch.float64)
    means = [whole]
    for k in range(2, parts + 1):
        pairs = zip(x.tensor_split(k), y.tensor_split(k), strict=True)
        means.append(sum(_frechet_distance(FeatureStatistics.of(p), FeatureStatistics.of(q)) for p, q in pairs) / k)
    # FD grows as 1 / n: a line in the number of parts, whose value at 0 is that of infinitely many images.
    values = torch.tensor(means, dtype=torch.float64)
    centred = counts - counts.mean()
    slope = (centred * values).sum() / centred.square().sum()
    return float(values.mean() - slope * counts.mean())


def _sum(a: FeatureStatistics, b: FeatureStatistics, cross: Tensor) -> float:
    apart = (a.mean - b.mean).square().sum()
    return float(apart + a.covariance.trace() + b.covariance.trace() - 2 * cross)


def _root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    root: Tensor = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    return root


def _inverse(values: Tensor) -> Tensor:
    """1 / values, and 0 in the directions in which nothing varies."""
    return torch.where(values > values.max() * 1e-7, 1 / values, 0)


def _influence(x: Tensor, own: FeatureStatistics, other_mean: Tensor, transport: Tensor) -> float:
    """Variance over the images of what each does to FD."""
    matrix = torch.eye(len(transport), dtype=transport.dtype, device=x.device) - transport
    moved = []
    for part in torch.split(x, _ROWS):
        centred = part.double() - own.mean
        moved.append(((centred @ matrix) * centred).sum(1) + 2 * centred @ (own.mean - other_mean))
    return float(torch.cat(moved).var())


def _kernel_distance_of_part(x: Tensor, y: Tensor) -> Distance:
    n, m = len(x), len(y)
    within_x, within_y = _kernel_sums(x, x, skip_self=True), _kernel_sums(y, y, skip_self=True)
    x_to_y, y_to_x = _kernel_sums(x, y), _kernel_sums(y, x)
    total_x, total_y, total = within_x.sum(), within_y.sum(), x_to_y.sum()
    value = total_x / (n * (n - 1)) + total_y / (m * (m - 1)) - 2 * total / (n * m)
    # What is left without image i: its row and its column fall away.
    without_x = (total_x - 2 * within_x) / ((n - 1) * (n - 2)) - 2 * (total - x_to_y) / ((n - 1) * m)
    without_y = (total_y - 2 * within_y) / ((m - 1) * (m - 2)) - 2 * (total - y_to_x) / (n * (m - 1))
    variance = sum((k - 1) / k * (z - z.mean()).square().sum() for k, z in ((n, without_x), (m, without_y)))
    return Distance(float(value), math.sqrt(float(variance)))


def _kernel_sums(x: Tensor, y: Tensor, skip_self: bool = False) -> Tensor:
    """Sum of k(x_i, y_j) over j, [N], by blocks of rows."""
    y = y.double()
    sums = torch.cat([((part.double() @ y.T) / x.shape[1] + 1).pow_(3).sum(1) for part in torch.split(x, _KERNEL_ROWS)])
    if skip_self:
        # The kernel of an image with itself, which the unbiased estimate leaves out.
        sums -= (x.double().square().sum(1) / x.shape[1] + 1).pow(3)
    return sums
