"""Metrics that compare generated with real images by their features, with intervals and notes on bias."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from unfog.errors import RequestError
from unfog.evaluation.distances import Distance, FeatureStatistics, extrapolate_frechet
from unfog.evaluation.feature_networks import INCEPTION_DIGEST
from unfog.evaluation.features import Features

# Standard errors from a normal distribution's mean to the ends of its middle 95%.
Z = 1.959964
_FEW = 10_000  # images below which a Frechet distance is marked as biased
_ENTRIES = 2**24  # distances in memory at once: 128 MB
BRACKETS = " [{:.4g}, {:.4g}]"  # of an interval behind its value
_INSIDE = 1 - 1e-9  # of a squared radius: what is on the surface may be below it by rounding


@dataclass(frozen=True)
class MetricResult:
    """A metric. 95% interval and standard error are from the sampling of images; None if unknown."""

    metric: str
    value: float | None
    """None if it was refused; `note` says why."""
    low: float | None
    high: float | None
    error: float | None
    n: int
    n_reference: int
    features: str
    resize: str
    note: str = ""
    drawn: str = ""
    """How the images were sampled: sampler, steps, seed, weights; for the caller to add (`dataclasses.replace`)."""
    real: float | None = None
    """The same metric of real images against other real images; None if it was not measured. As `drawn`."""
    real_low: float | None = None
    """The least of `real` over random halves of the real images; None without halves."""
    real_high: float | None = None
    """The largest of `real` over random halves."""

    def interval(self, form: str = "{:.4g} to {:.4g}") -> str:
        """Return the 95% interval as text; "" if it is unknown."""
        return "" if self.low is None or self.high is None else form.format(self.low, self.high)

    def __str__(self) -> str:
        value = "refused" if self.value is None else f"{self.value:.4g}"
        within = self.interval(BRACKETS)
        parts = [
            f"n = {self.n:,}",
            f"reference {self.n_reference:,}",
            f"features {self.features}",
            f"resize {self.resize}",
            *filter(None, [self.drawn]),
        ]
        return f"{self.metric} {value}{within} ({', '.join(parts)})" + (f": {self.note}" if self.note else "")


class _Estimate(NamedTuple):
    """A value with its 95% interval and standard error; None if it is refused or not known."""

    value: float | None
    low: float | None = None
    high: float | None = None
    error: float | None = None
    note: str = ""


class _BallCounts(NamedTuple):
    """Balls around centres [N] up to their k-th neighbour, and the queries [M] inside them."""

    by_query: Tensor
    """int64 [M], number of balls that contain each query."""
    strictly: Tensor
    """int64 [M], number of balls that contain each query, without their surface."""
    centre_reached: Tensor
    """bool [N], True for balls that contain a query."""


@dataclass(frozen=True, eq=False)
class _FeatureSets:
    """Features of real images [N, D] and generated ones [M, D], with cached results that several metrics share."""

    real: Tensor
    fake: Tensor
    reference: FeatureStatistics | None

    @cached_property
    def frechet(self) -> Distance:
        return Distance.frechet(self.real, self.fake, self.reference)

    @cached_property
    def in_real(self) -> dict[int, _BallCounts]:
        """Generated images in the balls of real ones, for k = 3 (Kynkaanniemi) and 5 (Naeem)."""
        return _count_in_balls(self.real, self.fake, (3, 5))

    @cached_property
    def equal(self) -> tuple[Tensor, Tensor]:
        """Equal numbers of both sets, evenly spread, because images may be sorted by class."""
        n = min(len(self.real), len(self.fake))
        real, fake = (x[torch.arange(n, device=x.device) * len(x) // n] for x in (self.real, self.fake))
        return real, fake

    @property
    def unequal(self) -> str:
        """Note on the number of images of each set where not all are used, else ""."""
        return "" if len(self.real) == len(self.fake) else f"of {len(self.equal[0]):,} of each"


def compare_features(
    names: Sequence[str],
    real: Tensor,
    fake: Tensor,
    features: Features | None = None,
    reference: FeatureStatistics | None = None,
) -> list[MetricResult]:
    """Compare features of real images [N, D] with those of generated ones [M, D], by the named METRICS.

    `features` names the extractor in the results, and decides whether a Frechet distance is called fid or fd.
    `reference` are the statistics of `real`, where they are known.

    A Frechet distance of n images (the smaller set) is too large by about c / n. Below 10,000 it is marked: compare it
    at equal n alone. At n <= D it is refused: covariances without full rank have most of their distance from n.
    `fd_infinity` takes the c / n away, and needs n >= 2 D to know it; kid has no such term at any n. `fd_infinity` and
    `coverage` are of as many images of both sets, the smaller number, evenly spread over the larger set. RequestError
    for a name that is not a metric, or sets that are not [N, D] with equal D and at least ten images.
    """
    if real.ndim != 2 or fake.ndim != 2 or real.shape[1] != fake.shape[1]:
        raise RequestError(f"features {list(real.shape)} and {list(fake.shape)} must be [N, D] and [M, D]")
    if min(len(real), len(fake)) < 10:
        raise RequestError(f"{len(fake)} images against {len(real)} real images are too few; give at least 10 of each")
    sets = _FeatureSets(real, fake, reference)
    extractor = (features.name, features.resize) if features else ("given", "none")
    frechet = "fid" if is_inception(features) else "fd"
    results = []
    for name in names:
        if name not in METRICS:
            raise RequestError(f"metric = {name!r} is unknown; give one of {', '.join(METRICS)}")
        value, low, high, error, note = METRICS[name](sets)
        printed = frechet + name.removeprefix("fid").removeprefix("fd") if METRICS[name] in _FRECHET else name
        counts = len(fake), len(real)
        results.append(MetricResult(printed, value, low, high, error, *counts, *extractor, note))
    return results


def check_count(
    metric: str, n: int, image: Tensor, features: Features, instead: str, larger: str = "-n", most: float = math.inf
) -> None:
    """Reject what `compare_features` would reject for n images in the smaller set, before they are generated.

    RequestError if a Frechet distance has too few; other metrics are never refused. The message names the option
    `instead` that chooses another metric, and `larger` that raises n, if `most` real images suffice. `image` is any
    one, uint8 [1, C, H, W], to see how many features it has.
    """
    if METRICS[metric] is _frechet and n <= (width := features(image).shape[1]):
        raise RequestError(
            f"{metric} is refused: {n:,} images are too few for the {width:,} features of {features.name}, "
            f"which need more than that; {f'give a larger {larger}, or' if most > width else 'give'} {instead} kid, "
            "which holds at any n"
        )


def _frechet(sets: _FeatureSets) -> _Estimate:
    n, width = min(len(sets.real), len(sets.fake)), sets.real.shape[1]
    if n <= width:
        return _Estimate(None, note=f"{n:,} images are too few for {width:,} features; kid holds at any n")
    note = f"biased upwards, as n < {_FEW:,}: compare only at equal n, or use kid" if n < _FEW else ""
    return _normal_interval(*sets.frechet, note)


def _frechet_infinity(sets: _FeatureSets) -> _Estimate:
    n, width = min(len(sets.real), len(sets.fake)), sets.real.shape[1]
    parts = min(4, n // width)
    if parts < 2:
        return _Estimate(None, note=f"{n:,} images are too few for {width:,} features; kid holds at any n")
    # Of unequal numbers the bias is not a straight line in 1 / n where n is a few times D: far below the truth then.
    whole, error = Distance.frechet(*sets.equal) if sets.unequal else sets.frechet
    value = extrapolate_frechet(*sets.equal, parts, 0, whole)
    return _normal_interval(
        value, error, f"extrapolated from {n // parts:,} to {n:,} images of each to infinitely many"
    )


def _kernel(sets: _FeatureSets) -> _Estimate:
    return _normal_interval(*Distance.kernel(sets.real, sets.fake))


def _precision(sets: _FeatureSets) -> _Estimate:
    """Share of generated images in the balls of real ones (Kynkaanniemi et al. 2019, eq. 1 and 2)."""
    return _proportion(sets.in_real[3].by_query > 0)


def _recall(sets: _FeatureSets) -> _Estimate:
    """Share of real images in the balls of generated ones (Kynkaanniemi et al. 2019, eq. 1 and 2)."""
    counts = _count_in_balls(sets.fake, sets.real, (3,))[3]
    return _proportion(counts.by_query > 0)


def _density(sets: _FeatureSets) -> _Estimate:
    """Mean number of balls around a generated image, over k (Naeem et al. 2020, eq. 4)."""
    # Without the surface, as in the authors' code: there lies the k-th neighbour, so copies of the real images would
    # have (k + 1) / k, and have 1.
    values = sets.in_real[5].strictly.double() / 5
    error = float(values.std()) / math.sqrt(len(values))
    return _normal_interval(float(values.mean()), error)


def _coverage(sets: _FeatureSets) -> _Estimate:
    """Share of balls of real images with a generated one inside (Naeem et al. 2020, eq. 5)."""
    # Of as many of both, as Naeem et al. have it: two samples of one distribution have 0.97 then, and 0.38 if ten real
    # images come to one that is generated.
    counts = _count_in_balls(*sets.equal, (5,)) if sets.unequal else sets.in_real
    return _proportion(counts[5].centre_reached)._replace(note=sets.unequal)


def _normal_interval(value: float, error: float, note: str = "") -> _Estimate:
    return _Estimate(value, value - Z * error, value + Z * error, error, note)


def _proportion(hits: Tensor) -> _Estimate:
    """Share of images [N] that hit, with Wilson's interval."""
    n, p = len(hits), float(hits.double().mean())
    return _Estimate(p, *wilson_interval(p, n), math.sqrt(p * (1 - p) / n))


def wilson_interval(share: float, n: int) -> tuple[float, float]:
    """Return Wilson's 95% interval of a share of n images, which holds at 0 and 1 as well."""
    p, z = share, Z
    middle = (p + z**2 / (2 * n)) / (1 + z**2 / n)
    reach = z / (1 + z**2 / n) * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    # Rounding puts the ends of shares of 0 and 1 off by 1e-16, on either side.
    return min(max(middle - reach, 0.0), p), max(min(middle + reach, 1.0), p)


def _count_in_balls(centres: Tensor, queries: Tensor, neighbours: Sequence[int]) -> dict[int, _BallCounts]:
    """Count queries [M, D] in the nearest-neighbour balls of centres [N, D], for each k of `neighbours`.

    ValueError if fewer than k + 1 centres have no k-th neighbour.
    """
    if len(centres) <= max(neighbours):
        raise ValueError(f"{len(centres)} images have no {max(neighbours)}th neighbour; give more")
    # Centring keeps all distances and makes their rounding relative to the spread of the features.
    origin = centres.double().mean(0)
    centres, queries = centres.double() - origin, queries.double() - origin
    most = max(neighbours) + 1  # the nearest is the image itself
    nearest = torch.cat([d.topk(most, largest=False).values for d in _distances(centres, centres)])
    reached = {k: torch.zeros(len(centres), dtype=torch.bool, device=centres.device) for k in neighbours}
    counts: dict[int, list[Tensor]] = {k: [] for k in neighbours}
    inner: dict[int, list[Tensor]] = {k: [] for k in neighbours}
    for distance in _distances(queries, centres):
        for k in neighbours:
            held = distance <= nearest[:, k]
            reached[k] |= held.any(0)
            counts[k].append(held.sum(1))
            inner[k].append((distance < nearest[:, k] * _INSIDE).sum(1))
    return {k: _BallCounts(torch.cat(counts[k]), torch.cat(inner[k]), reached[k]) for k in neighbours}


def _distances(x: Tensor, y: Tensor) -> Iterator[Tensor]:
    """Squared distances of blocks of rows, [rows, M]."""
    norms = y.square().sum(1)
    # Equal images have a distance of exactly 0, which they would not have by rounding.
    rounding = 1e-13 * float(norms.max())
    rows = max(1, _ENTRIES // len(y))
    for part in torch.split(x, rows):
        distance = torch.addmm(norms, part, y.T, alpha=-2).add_(part.square().sum(1)[:, None])
        yield distance.masked_fill_(distance < rounding, 0)


_FRECHET = (_frechet, _frechet_infinity)
METRICS: dict[str, Callable[[_FeatureSets], _Estimate]] = {
    "fid": _frechet,
    "fd": _frechet,
    "fid_infinity": _frechet_infinity,
    "fd_infinity": _frechet_infinity,
    "kid": _kernel,
    "precision": _precision,
    "recall": _recall,
    "density": _density,
    "coverage": _coverage,
}


def is_inception(features: Features | None) -> bool:
    """Return True if a Frechet distance of these features is FID as in the literature."""
    return features is not None and features.digest == INCEPTION_DIGEST
