"""Metrics of images with any channels and values: power spectrum, histogram and correlation of channels.

Each is compared with real images at the same number: random halves of twice as many real images show how far apart two
sets of real images are. Values are those of the source, in its units, so that any channels and types compare.

Unknown values are left out. A sample has the mask of a real image, of the other half than those that it is compared
with, so that samples differ from real images as two halves do. The power of an image is that of its known values
without their mean, and 0 elsewhere, over its degrees of freedom: the pseudo-spectrum (Hivon et al. 2002, MASTER), which
is not corrected for its mask, as both sides have such masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from unfog.evaluation.metrics import MetricResult
from unfog.evaluation.pixel_metrics import dct
from unfog.evaluation.value_sources import (
    KnownValues,
    SpreadImages,
    ValueSource,
    center_and_scale,
    count_damaged,
    float_parts,
)
from unfog.values.image_format import channel_names
from unfog.values.unknown import UnknownValues

VALUE_METRICS = ("spectrum", "histogram", "correlation")
DRAWS = 20
"""Random halves of the real images. A new set of real images exceeds all of them about once in 21 times."""
_SAMPLED = 2**20  # values of a set whose histograms are compared, at most, in all channels
_BINS = 64  # of the curves of histograms
_TAIL = 0.001  # share of the values on either side that the curves of histograms leave out
_FLOOR = 1e-9  # power, over that of the channel, that counts as none
_NONE = 1e-30  # divisor in place of 0; the dividend is 0 there too
_CONSTANT = 1e-6  # deviation, over that of the channel, that counts as none
_SPECTRUM = "mean over octaves of |ln(power / real power)|: 0.1 is about 10%"
_HISTOGRAM = "Wasserstein-1 distance in standard deviations of the real channel"
_UNITS = "Wasserstein-1 distance in the units of the source"
_CORRELATION = "largest difference of all pairs"


@dataclass(frozen=True)
class Curve:
    """A spectrum or histogram of one channel: of generated images, of real ones, and the range of real halves."""

    metric: str
    """spectrum or histogram."""
    channel: int
    x: Sequence[float]
    """Frequency over Nyquist's, or the middles of bins in the units of the source."""
    generated: Sequence[float]
    """Mean power of a coefficient, or density."""
    real: Sequence[float]
    """That of all real images."""
    low: Sequence[float]
    """The least of all real halves; that of `real` if there are no halves."""
    high: Sequence[float]
    """The most of all real halves."""


class _Rings(NamedTuple):
    """Rings of equal frequency, as wide as one frequency of the shorter side; the mean of an image is in no ring."""

    number: Tensor
    """int64 [H * W], the ring of each coefficient; the last ring holds what is in no ring."""
    counts: Tensor
    """float64 [R], coefficients of each ring."""
    frequency: Tensor
    """float64 [R], over Nyquist's: 1 is the highest along a row or column."""

    @classmethod
    def of(cls, height: int, width: int, wrap: str) -> _Rings:
        axes = [_frequencies(n, axis in wrap) for n, axis in ((height, "y"), (width, "x"))]
        radius = (axes[0][:, None].square() + axes[1].square()).sqrt().flatten()
        step = (2 if wrap else 1) / min(height, width)
        number = (radius / step).round().long()
        used = torch.bincount(number).nonzero().flatten()[1:]
        place = torch.searchsorted(used, number)
        place[number == 0] = len(used)
        return cls(place, torch.bincount(place, minlength=len(used) + 1)[:-1].double(), used.double() * step)

    def mean(self, power: Tensor) -> Tensor:
        """Return the mean of each ring [B, C, R] of the power of coefficients [B, C, H, W]."""
        sums = power.new_zeros(*power.shape[:2], len(self.counts) + 1)
        return sums.index_add_(2, self.number, power.flatten(2))[..., :-1] / self.counts


def _frequencies(n: int, wrapped: bool) -> Tensor:
    """Return the frequency of each coefficient along an axis over Nyquist's, float64 [n]."""
    k = torch.arange(n, dtype=torch.float64)
    return 2 * torch.minimum(k, n - k) / n if wrapped else k / n


def power_of_coefficients(images: Tensor, wrap: str = "") -> Tensor:
    """Return the power of each coefficient of images float64 [N, C, H, W].

    Its mean over the coefficients is the mean square of an image (Parseval), and white noise has its variance in all of
    them. Axes of `wrap`, such as "xy", continue at their other side, and have a Fourier transform. Others have a cosine
    transform (DCT-II), which sees no edge between both sides.
    """
    x = images
    for n, axis, dim in ((images.shape[2], "y", 2), (images.shape[3], "x", 3)):
        if axis not in wrap:
            x = (x.movedim(dim, -1) @ dct(n).T).movedim(-1, dim)
    if dims := [dim for axis, dim in (("y", 2), ("x", 3)) if axis in wrap]:
        transformed: Tensor = torch.fft.fftn(x, dim=dims, norm="ortho")
        return transformed.abs().square()
    return x.square()


def channel_spectra(images: ValueSource, wrap: str = "") -> tuple[Tensor, Tensor]:
    """Return (frequency [R] over Nyquist's, mean power of a coefficient in rings, float64 [C, R]), in squared units."""
    height, width = images[0:1].shape[2:]
    rings, total = _Rings.of(height, width, wrap), torch.zeros(())
    for part in float_parts(images):
        total = total + rings.mean(power_of_coefficients(torch.from_numpy(part), wrap)).sum(0)
    return rings.frequency, total / len(images)


class _Moments(NamedTuple):
    """Means over G groups of images, of values that are scaled by channel."""

    power: Tensor
    """float64 [G, C, R], by ring."""
    freedom: Tensor
    """float64 [G, C], degrees of freedom of `power` over those without unknown values."""
    mean: Tensor
    """float64 [G, C, C], of the first channel over the pixels that are known in both."""
    square: Tensor
    """float64 [G, C, C], mean square, as `mean`."""
    second: Tensor
    """float64 [G, C, C], mean products of two channels, over the pixels that are known in both."""

    @property
    def correlation(self) -> Tensor:
        """Correlation of channels over all pixels that are known in both, float64 [G, C, C].

        0 for a channel that is constant, and for two that are never known together.
        """
        covariance = self.second - self.mean * self.mean.mT
        deviation = (self.square - self.mean.square()).clamp(min=0).sqrt()
        constant = deviation < _CONSTANT
        covariance = covariance.masked_fill(constant | constant.mT, 0)
        return covariance / (deviation * deviation.mT).clamp(min=_CONSTANT**2)


class MeasuredSamples(NamedTuple):
    """Moments and values of samples, from which `RealImages` compares them."""

    moments: _Moments
    values: Tensor
    """float64 [C, N, K]; NaN is unknown."""


class _Differences(NamedTuple):
    """Distances of G pairs of sets, by channel or pair of channels."""

    spectrum: Tensor
    """[G, C]."""
    histogram: Tensor
    """[G, C], in the units of the source."""
    correlation: Tensor
    """[G, C, C]."""


class RealImages:
    """Real images that samples are compared with, and random halves of them, which are computed once.

    Args:
        images: [N, C, H, W], N even if there are halves. Samples are compared with every second one then, else with
            all.
        halves: whether to compare halves with each other.
        wrap: axes along which images continue at their other side: "", "x", "y" or "xy".
        unknown: what is unknown in images and samples; None if nothing is.
    """

    def __init__(self, images: ValueSource, halves: bool = True, wrap: str = "", unknown: UnknownValues | None = None):
        self.count, self._wrap = len(images) // 2 if halves else len(images), wrap
        first = images[0:1]
        self.shape, self._whole = first.shape[1:], first.dtype.kind in "ui"
        self._unknown = unknown
        # Of the half that samples are not compared with, if there are halves.
        self._masks = SpreadImages(images, self.count, *((1, 2) if halves else (0, 1)))
        self._refused = ""
        if damaged := count_damaged(images, unknown, samples=False):
            self._refused = f"{damaged:,} of the real images have NaN or infinity in them"
            return
        images = images if unknown is None else KnownValues(images, unknown)
        self._rings = _Rings.of(self.shape[1], self.shape[2], wrap)
        self._center, self._scale = center_and_scale(images)
        self._groups = _groups(len(images), halves)
        self._moments = self._compute_moments(images, self._groups)
        self._values = self._sample(images)
        self._refused = self._too_few_known()

    def _too_few_known(self) -> str:
        """Return why sets cannot be compared: a channel that a group, or the masks of samples, hide; else ""."""
        if self._unknown is None:
            return ""
        # Group 0 has the images of even places; one place further are those whose masks samples have.
        masks = self._groups[:1].roll(1, 1)
        counts = (~self._values.isnan()).sum(2).double()
        known = torch.cat([self._groups, masks]) @ counts.T > 0
        known[:-1] &= self._moments.freedom > 0
        dark = (~known.all(0)).nonzero().flatten().tolist()
        names = channel_names(self.shape[0])
        return f"{names[dark[0]]} has too few known values in a half of the real images" if dark else ""

    @cached_property
    def halves(self) -> _Differences | None:
        """Distances of the random halves from each other; None without halves."""
        if len(self._groups) == 1:
            return None
        a, b = self._groups[1::2], self._groups[2::2]
        one, other = (_Moments(*(part[i::2] for part in self._moments)) for i in (1, 2))
        return self._differences(one, other, self._values, a - b)

    def measure(self, samples: ValueSource) -> MeasuredSamples | str:
        """Return moments and values of samples, for `compare` and `curves`, or the reason why they cannot be compared.

        `samples` [M, C, H, W] are of the shape of the real images; the first `count` of them are measured.
        """
        compared, refused = self._as_compared(samples)
        if refused:
            return refused
        whole = _groups(len(compared), halves=False)
        return MeasuredSamples(self._compute_moments(compared, whole), self._sample(compared))

    def compare(
        self, names: Sequence[str], samples: ValueSource | MeasuredSamples | str
    ) -> dict[str, list[MetricResult]]:
        """Return the results of each of the named VALUE_METRICS: its value, then its parts.

        `samples` are as `measure` takes or returns them.
        """
        measured = samples if isinstance(samples, MeasuredSamples | str) else self.measure(samples)
        if isinstance(measured, str):
            return {name: [self._result(name, None, None, "values", measured)] for name in names}
        drawn, values = measured
        whole = _groups(values.shape[1], halves=False)
        # Weights of the samples are positive, and those of the real images that they are compared with negative.
        weights = torch.cat([whole, -self._groups[:1]], 1)
        real = _Moments(*(part[:1] for part in self._moments))
        pooled = torch.cat([values, self._values], 1)
        found = self._differences(drawn, real, pooled, weights)
        return {name: self._results(name, found, drawn.correlation[0], real.correlation[0]) for name in names}

    def curves(self, names: Sequence[str], samples: ValueSource | MeasuredSamples | str) -> list[Curve]:
        """Return spectra and histograms of each channel, if they are among `names`; arguments as `compare`."""
        measured = samples if isinstance(samples, MeasuredSamples | str) else self.measure(samples)
        if isinstance(measured, str):
            return []
        curves = self._spectra(measured.moments) if "spectrum" in names else []
        return curves + (self._histograms(measured.values) if "histogram" in names else [])

    def _as_compared(self, samples: ValueSource) -> tuple[ValueSource, str]:
        """Return the samples that are compared, with the masks of real images, and why they cannot be, or ""."""
        samples = SpreadImages(samples, self.count)
        if damaged := count_damaged(samples, self._unknown, samples=True):
            return samples, f"{damaged:,} of the samples have NaN or infinity in them"
        if self._unknown is not None:
            samples = KnownValues(samples, self._unknown, self._masks)
        return samples, self._refused

    def _compute_moments(self, images: ValueSource, groups: Tensor) -> _Moments:
        channels, pixels = self.shape[0], self.shape[1] * self.shape[2]
        power, freedom, share, mean, square, second = (
            torch.zeros(len(groups), count, dtype=torch.float64)
            for count in (channels * len(self._rings.counts), channels, *[channels**2] * 4)
        )
        done = 0
        for part in float_parts(images):
            x = (torch.from_numpy(part) - self._center[:, None, None]) / self._scale[:, None, None]
            known = ~x.isnan()
            x = x.where(known, 0.0)
            weights = groups[:, done : done + len(x)]
            centred, degrees = _centred(x, known)
            power += weights @ self._rings.mean(power_of_coefficients(centred, self._wrap)).flatten(1)
            freedom += weights @ degrees
            flat, mask = x.flatten(2), known.flatten(2).double()
            products = (share, mask, mask), (mean, flat, mask), (square, flat.square(), mask), (second, flat, flat)
            for total, one, other in products:
                total += weights @ (one @ other.mT / pixels).flatten(1)
            done += len(x)
        # What has no known values has sums of 0.
        power = power.view(len(groups), channels, -1) / freedom.clamp(min=_NONE)[..., None]
        of_pairs = (total / share.clamp(min=_NONE) for total in (mean, square, second))
        return _Moments(power, freedom, *(total.view(len(groups), channels, channels) for total in of_pairs))

    def _sample(self, images: ValueSource) -> Tensor:
        """Return some values of each image, at places that are spread over it, float64 [C, N, K]; NaN is unknown."""
        channels, pixels = self.shape[0], self.shape[1] * self.shape[2]
        each = max(1, min(pixels, _SAMPLED // (channels * 2 * self.count)))
        spread = torch.arange(each) * pixels // each
        generator, found = torch.Generator().manual_seed(0), []
        for part in float_parts(images):
            x = torch.from_numpy(part).flatten(2)
            places = (torch.randint(pixels, (len(x), 1), generator=generator) + spread) % pixels
            found.append(x.gather(2, places[:, None].expand(-1, channels, -1)))
        return torch.cat(found).movedim(1, 0)

    def _differences(self, a: _Moments, b: _Moments, values: Tensor, weights: Tensor) -> _Differences:
        """Return the distances of pairs of groups.

        `weights` [G, N] of images are positive in one group of a pair, and negative in the other.
        """
        # What rounding to integers adds, as white noise.
        floor = _FLOOR + self._whole / 12 / self._scale.square()[:, None]
        octaves = 1 / self._rings.frequency
        ratio = ((a.power + floor) / (b.power + floor)).log().abs()
        spectrum = ratio @ (octaves / octaves.sum())
        apart = torch.stack([_wasserstein(one, weights) for one in values], 1)
        return _Differences(spectrum, apart, (a.correlation - b.correlation).abs())

    def _results(self, name: str, found: _Differences, drawn: Tensor, real: Tensor) -> list[MetricResult]:
        channels, names, halves = self.shape[0], channel_names(self.shape[0]), self.halves
        if name == "correlation":
            if len(names) == 1:
                return [self._result(name, None, None, "channels", "images of one channel have no correlation")]
            apart = found.correlation[0]
            i, j = divmod(int(apart.argmax()), channels)
            note = (
                f"{_CORRELATION}: {names[i]} and {names[j]} have {float(drawn[i, j]):.3f}, real {float(real[i, j]):.3f}"
            )
            usual = None if halves is None else halves.correlation.flatten(1).amax(1)
            return [self._result(name, apart.max(), usual, "channels", note)]
        own, usual = getattr(found, name)[0], None if halves is None else getattr(halves, name)
        scale = self._scale if name == "histogram" else torch.ones(channels)
        farthest = None if usual is None else (usual / scale).amax(1)
        where = "farthest channel" if len(names) > 1 else names[0]
        note = _HISTOGRAM if name == "histogram" else _SPECTRUM
        results = [self._result(name, (own / scale).max(), farthest, where, note)]
        if len(names) == 1 and name == "spectrum":
            return results
        note = _UNITS if name == "histogram" else _SPECTRUM
        for c in range(channels):
            halved = None if usual is None else usual[:, c]
            results.append(self._result(f"{name}_{c}", own[c], halved, names[c], note))
        return results

    def _result(self, name: str, value: Tensor | None, halves: Tensor | None, where: str, note: str) -> MetricResult:
        real = low = high = None
        if halves is not None:
            real, low, high = (float(x) for x in (halves.median(), halves.min(), halves.max()))
        number = None if value is None else float(value)
        counts = self.count, self.count
        return MetricResult(
            name, number, None, None, None, *counts, where, "none", note, real=real, real_low=low, real_high=high
        )

    def _spectra(self, drawn: _Moments) -> list[Curve]:
        units, frequency = self._scale.square()[:, None], self._rings.frequency.tolist()
        generated, real = drawn.power[0] * units, self._moments.power * units
        return [_curve("spectrum", c, frequency, generated[c], real[:, c]) for c in range(self.shape[0])]

    def _histograms(self, drawn: Tensor) -> list[Curve]:
        curves, whole = list[Curve](), _groups(drawn.shape[1], halves=False)
        for c, (own, real) in enumerate(zip(drawn, self._values, strict=True)):
            edges = _edges(own, real, self._whole)
            densities = [_densities(values, edges, groups) for values, groups in ((own, whole), (real, self._groups))]
            middles = ((edges[1:] + edges[:-1]) / 2).tolist()
            curves.append(_curve("histogram", c, middles, densities[0][0], densities[1]))
        return curves


def _groups(count: int, halves: bool) -> Tensor:
    """Return weights [G, N] of images in groups: those compared with samples, then pairs of random halves."""
    if not halves:
        return torch.full((1, count), 1 / count, dtype=torch.float64)
    n, generator = count // 2, torch.Generator().manual_seed(0)
    groups = torch.zeros(1 + 2 * DRAWS, count, dtype=torch.float64)
    groups[0, torch.arange(n) * 2] = 1 / n
    for draw in range(DRAWS):
        order = torch.randperm(count, generator=generator)
        groups[1 + 2 * draw, order[:n]] = 1 / n
        groups[2 + 2 * draw, order[n : 2 * n]] = 1 / n
    return groups


def _wasserstein(values: Tensor, weights: Tensor) -> Tensor:
    """Return the Wasserstein-1 distances [G] of values [N, K] of images with positive from those with negative weights.

    `weights` are [G, N]. The distance is the integral of the difference of both distribution functions. NaN is unknown:
    images weigh by their known values.
    """
    known = ~values.isnan()
    ordered, order = values[known].sort()
    owner = known.nonzero()[:, 0][order]
    gaps, share = ordered[1:] - ordered[:-1], known.double().mean(1)
    found = list[Tensor]()
    for row in weights:
        one, other = row.clamp(min=0), row.clamp(max=0)
        row = one / (one @ share) - other / (other @ share)
        found.append(((row / values.shape[1])[owner].cumsum(0)[:-1].abs() * gaps).sum())
    return torch.stack(found)


def _centred(x: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """Return images [N, C, H, W] without the mean of their known values, and 0 where they are unknown.

    Images without unknown values keep their mean, which is in no ring. The second tensor, float64 [N, C], has degrees
    of freedom over those of such images.
    """
    pixels, count = x.shape[2] * x.shape[3], known.sum((2, 3), keepdim=True)
    mean = (x.sum((2, 3), keepdim=True) / count.clamp(min=1)).masked_fill(count == pixels, 0)
    return (x - mean) * known, (count[..., 0, 0] - 1).clamp(min=0).double() / max(1, pixels - 1)


def _edges(drawn: Tensor, real: Tensor, whole: bool) -> Tensor:
    """Return edges of bins, float64 [B + 1], over nearly all values of both, and at most thrice the range of `real`."""
    # In order by `kthvalue`, as torch has quantiles of up to 2^24 values only.
    ends = []
    for values in (real.flatten(), drawn.flatten()):
        values = values[~values.isnan()]
        k = max(1, round(_TAIL * len(values)))
        ends.append((float(values.kthvalue(k).values), float(values.kthvalue(len(values) + 1 - k).values)))
    (low, high), other = ends
    reach = high - low or abs(low) or 1.0
    low, high = max(low - reach, min(low, other[0])), min(high + reach, max(high, other[1]))
    if whole:  # bins hold equally many integers
        width = -(-(round(high) - round(low) + 1) // _BINS)
        count = -(-(round(high) - round(low) + 1) // width)
        return round(low) - 0.5 + width * torch.arange(count + 1, dtype=torch.float64)
    return torch.linspace(low, high if high > low else low + reach, _BINS + 1, dtype=torch.float64)


def _densities(values: Tensor, edges: Tensor, groups: Tensor) -> Tensor:
    """Return the densities [G, B] of values [N, K] of images in groups of weights [G, N]; NaN is unknown."""
    bins, width = len(edges) - 1, edges[1] - edges[0]
    place = torch.bucketize(values.contiguous(), edges, right=True).clamp(0, bins + 1)  # 0 is below, and bins + 1 above
    place[values == edges[-1]] = bins
    place[values.isnan()] = bins + 1
    number = place + torch.arange(len(values))[:, None] * (bins + 2)
    counts = torch.bincount(number.flatten(), minlength=len(values) * (bins + 2)).view(len(values), bins + 2)
    known = groups @ (~values.isnan()).sum(1).double()
    return groups @ counts[:, 1:-1].double() / (known[:, None] * width)


def _curve(metric: str, channel: int, x: list[float], generated: Tensor, groups: Tensor) -> Curve:
    """Return a curve from that of generated images [R] and those of groups of real images [G, R]."""
    halves = groups[1:] if len(groups) > 1 else groups
    real = halves.mean(0)
    lines = generated, real, halves.amin(0), halves.amax(0)
    return Curve(metric, channel, x, *(line.tolist() for line in lines))
