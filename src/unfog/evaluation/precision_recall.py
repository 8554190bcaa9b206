"""Precision, recall, density and coverage: images of one set in the nearest-neighbour balls of the other.

Precision and recall: Kynkaanniemi et al. 2019, eq. 1 and 2. Density and coverage: Naeem et al. 2020, eq. 4 and 5.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Z = 1.959964
"""Standard errors from a normal distribution's mean to the ends of its middle 95%."""
ENTRIES = 2**24
"""Distances in memory at once: 128 MB."""


class BallCounts(NamedTuple):
    """Balls around centres [N] up to their k-th neighbour, and the queries [M] inside them."""

    by_query: Tensor
    """int64 [M], number of balls that contain each query."""

    centre_reached: Tensor
    """bool [N], True for balls that contain a query."""


class Estimate(NamedTuple):
    """A mean over images with its 95% interval, given the other set."""

    value: float
    low: float
    high: float
    error: float


def count_in_balls(centres: Tensor, queries: Tensor, neighbours: Sequence[int]) -> dict[int, BallCounts]:
    """Count queries [M, D] in the balls of centres [N, D], for each k of `neighbours`.

    Raises:
        ValueError: fewer than k + 1 centres have no k-th neighbour.
    """
    if len(centres) <= max(neighbours):
        raise ValueError(f"{len(centres)} pictures have no {max(neighbours)}th neighbour; give more")
    # Centring keeps all distances and makes their rounding relative to the spread of the features.
    origin = centres.double().mean(0)
    centres, queries = centres.double() - origin, queries.double() - origin
    most = max(neighbours) + 1  # the nearest is the picture itself
    nearest = torch.cat([d.topk(most, largest=False).values for d in _distances(centres, centres)])
    reached = {k: torch.zeros(len(centres), dtype=torch.bool, device=centres.device) for k in neighbours}
    counts: dict[int, list[Tensor]] = {k: [] for k in neighbours}
    for distance in _distances(queries, centres):
        for k in neighbours:
            held = distance <= nearest[:, k]
            reached[k] |= held.any(0)
            counts[k].append(held.sum(1))
    return {k: BallCounts(torch.cat(counts[k]), reached[k]) for k in neighbours}


def proportion(hits: Tensor) -> Estimate:
    """Share of pictures [N] that hit, with Wilson's interval, which holds at 0 and 1 as well."""
    n, p, z = len(hits), float(hits.double().mean()), Z
    middle = (p + z**2 / (2 * n)) / (1 + z**2 / n)
    reach = z / (1 + z**2 / n) * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    return Estimate(p, middle - reach, middle + reach, math.sqrt(p * (1 - p) / n))


def mean(values: Tensor) -> Estimate:
    """Mean of values [N] by picture, with the interval of the normal distribution."""
    value, error = float(values.mean()), float(values.std()) / math.sqrt(len(values))
    return Estimate(value, value - Z * error, value + Z * error, error)


def _distances(x: Tensor, y: Tensor) -> Iterator[Tensor]:
    """Squared distances of blocks of rows, [rows, M]; of equal pictures exactly 0, which they are not by rounding."""
    norms = y.square().sum(1)
    rounding = 1e-13 * float(norms.max())
    rows = max(1, ENTRIES // len(y))
    for part in torch.split(x, rows):
        distance = torch.addmm(norms, part, y.T, alpha=-2).add_(part.square().sum(1)[:, None])
        yield distance.masked_fill_(distance < rounding, 0)
