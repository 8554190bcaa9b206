"""Figures that compare generated with real images, with intervals and notes on bias."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from unfog.errors import RequestError
from unfog.evaluation.features import Features, is_inception
from unfog.evaluation.frechet_distance import Distance, FeatureStatistics, extrapolate_frechet, frechet_with_error
from unfog.evaluation.kernel_distance import kernel_distance
from unfog.evaluation.precision_recall import BallCounts, Estimate, Z, count_in_balls, mean, proportion

_FEW = 10_000
"""Pictures below which a Frechet distance is marked."""


@dataclass(frozen=True)
class MetricResult:
    """A figure. 95% interval and standard error are of the choice of pictures; None where none is known to hold."""

    metric: str
    value: float | None
    """None where it was refused; `note` says why."""
    low: float | None
    high: float | None
    error: float | None
    n: int
    n_reference: int
    features: str
    resize: str
    note: str = ""
    drawn: str = ""
    """How the pictures were drawn: sampler, steps, seed, weights; for the caller to add (`dataclasses.replace`)."""

    def __str__(self) -> str:
        value = "refused" if self.value is None else f"{self.value:.4g}"
        within = "" if self.low is None or self.high is None else f" [{self.low:.4g}, {self.high:.4g}]"
        told = [
            f"n = {self.n:,}",
            f"reference {self.n_reference:,}",
            f"features {self.features}",
            f"resize {self.resize}",
        ]
        return f"{self.metric} {value}{within} ({', '.join([*told, *filter(None, [self.drawn])])})" + (
            f": {self.note}" if self.note else ""
        )


@dataclass(frozen=True, eq=False)
class _FeatureSets:
    """Features of real images [N, D] and generated ones [M, D], with cached results that several metrics share."""

    real: Tensor
    fake: Tensor
    seed: int
    reference: FeatureStatistics | None

    @cached_property
    def frechet(self) -> Distance:
        return frechet_with_error(self.real, self.fake, self.reference)

    @cached_property
    def in_real(self) -> dict[int, BallCounts]:
        """Generated images in the balls of real ones, for k = 3 (Kynkaanniemi) and 5 (Naeem)."""
        return count_in_balls(self.real, self.fake, (3, 5))

    @cached_property
    def in_generated(self) -> dict[int, BallCounts]:
        """Real images in the balls of generated ones, for k = 3."""
        return count_in_balls(self.fake, self.real, (3,))

    @cached_property
    def alike(self) -> tuple[Tensor, Tensor]:
        """Equal numbers of both sets, evenly spread, because images may be sorted by class."""
        n = min(len(self.real), len(self.fake))
        real, fake = (x[torch.arange(n, device=x.device) * len(x) // n] for x in (self.real, self.fake))
        return real, fake

    @property
    def unequal(self) -> str:
        """Note on the number of images of each set where not all are used, else ""."""
        return "" if len(self.real) == len(self.fake) else f"of {len(self.alike[0]):,} of each"


class _Value(NamedTuple):
    """Value and interval of a metric."""

    value: float | None
    low: float | None = None
    high: float | None = None
    error: float | None = None
    note: str = ""


def compare_features(
    names: Sequence[str],
    real: Tensor,
    fake: Tensor,
    seed: int = 0,
    features: Features | None = None,
    reference: FeatureStatistics | None = None,
) -> list[MetricResult]:
    """Compare features of real images [N, D] with those of generated ones [M, D], by the named METRICS.

    `features` names the extractor in the results, and decides whether a Frechet distance is called fid or fd.
    `reference` are the statistics of `real`, where they are known. `seed` determines how sets are split.

    A Frechet distance of n pictures (the smaller set) is too large by about c / n. Below 10,000 it is marked: compare
    it at equal n alone. At n <= D it is refused: covariances without full rank have most of their distance from n.
    `fd_infinity` takes the c / n away, and needs n >= 2 D to know it; kid has no such term at any n. `fd_infinity` and
    `coverage` are of as many pictures of both sets, the smaller number, evenly spread over the larger set.

    Raises:
        RequestError: a name that is no metric, or sets that are not [N, D] with equal D and at least ten pictures.
    """
    if real.ndim != 2 or fake.ndim != 2 or real.shape[1] != fake.shape[1]:
        raise RequestError(f"features {list(real.shape)} and {list(fake.shape)} must be [N, D] and [M, D]")
    if min(len(real), len(fake)) < 10:
        raise RequestError(f"{len(fake)} pictures against {len(real)} real ones are too few; give at least 10 of each")
    sets = _FeatureSets(real, fake, seed, reference)
    told = (features.name, features.resize) if features else ("given", "none")
    frechet = "fid" if is_inception(features) else "fd"
    found = []
    for name in names:
        if name not in METRICS:
            raise RequestError(f"metric = {name!r} is none; there is {', '.join(METRICS)}")
        figure = METRICS[name](sets)
        printed = frechet + name.removeprefix("fid").removeprefix("fd") if METRICS[name] in _FRECHET else name
        found.append(
            MetricResult(
                printed, figure.value, figure.low, figure.high, figure.error, len(fake), len(real), *told, figure.note
            )
        )
    return found


def check_count(metric: str, n: int, picture: Tensor, features: Features, option: str) -> None:
    """Reject what `compare_features` would reject for n images, before they are generated.

    Args:
        metric: of METRICS. None but the Frechet distance is refused.
        n: pictures in the smaller set.
        picture: uint8 [1, C, H, W], any one, to see how many features it has.
        features: what makes them.
        option: by which another metric is chosen, such as --metric.

    Raises:
        RequestError: they are too few.
    """
    if METRICS[metric] is _frechet and n <= (width := features(picture).shape[1]):
        raise RequestError(
            f"{metric} is refused: {n:,} pictures are not more than the {width:,} features of {features.name}; give a "
            f"larger -n where there are more images, or {option} kid, which holds at any n"
        )


def _frechet(sets: _FeatureSets) -> _Value:
    n, width = min(len(sets.real), len(sets.fake)), sets.real.shape[1]
    if n <= width:
        return _Value(None, note=f"n = {n:,} is not more than the {width:,} features; kid holds at any n")
    value, error = sets.frechet
    note = "the interval is of noise, not of the bias of small n"
    if n < _FEW:
        note = f"n < {_FEW:,}: biased upwards, compare at equal n alone; kid is not biased. {note}"
    return _Value(value, value - Z * error, value + Z * error, error, note)


def _frechet_infinity(sets: _FeatureSets) -> _Value:
    n, width = min(len(sets.real), len(sets.fake)), sets.real.shape[1]
    parts = min(4, n // width)
    if parts < 2:
        return _Value(None, note=f"n = {n:,} is less than twice the {width:,} features; kid holds at any n")
    # Of unequal numbers the bias is no straight line in 1 / n where n is a few times D: far below the truth then.
    whole, error = frechet_with_error(*sets.alike) if sets.unequal else sets.frechet
    value = extrapolate_frechet(*sets.alike, parts, sets.seed, whole)
    note = f"extrapolated from {n // parts:,} to {n:,} pictures of each to infinitely many"
    return _Value(value, value - Z * error, value + Z * error, error, note)


def _kernel(sets: _FeatureSets) -> _Value:
    value, error = kernel_distance(sets.real, sets.fake, sets.seed)
    return _Value(value, value - Z * error, value + Z * error, error)


def _given(share: Estimate, which: str) -> _Value:
    return _Value(*share, f"the interval takes the {which} pictures as given")


def _precision(sets: _FeatureSets) -> _Value:
    return _given(proportion(sets.in_real[3].by_query > 0), "real")


def _recall(sets: _FeatureSets) -> _Value:
    return _given(proportion(sets.in_generated[3].by_query > 0), "drawn")


def _density(sets: _FeatureSets) -> _Value:
    return _given(mean(sets.in_real[5].by_query.double() / 5), "real")


def _coverage(sets: _FeatureSets) -> _Value:
    # Of as many of both, as Naeem et al. have it: two samples of one distribution have 0.97 then, and 0.38 if ten real
    # pictures come to one that is drawn.
    lies = count_in_balls(*sets.alike, (5,)) if sets.unequal else sets.in_real
    found = _given(proportion(lies[5].centre_reached), "drawn")
    return found._replace(note="; ".join(filter(None, [sets.unequal, found.note])))


_FRECHET = (_frechet, _frechet_infinity)
METRICS: dict[str, Callable[[_FeatureSets], _Value]] = {
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
