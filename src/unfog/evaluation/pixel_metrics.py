"""Metrics of pixels themselves, which need no network: sliced Wasserstein distance, and detail by frequency.

Sliced Wasserstein is the distance between patches of images, by scale (Karras et al. 2018, section 5).

Detail is the variance of luma and of colour in bands of frequency, of generated images against real ones. Blurred
images lack variance at high frequencies, and noisy ones have too much: a figure for what the eye calls smooth or
grainy. Frequencies come from the cosine transform (DCT-II, orthonormal), which continues an image as in a mirror: a
Fourier transform would see an edge where left and right do not meet, and count it as detail.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from unfog.errors import RequestError
from unfog.evaluation.metrics import MetricResult, Z
from unfog.values.image_format import BYTES, in_colour, luma_weights

PIXEL_METRICS = ("sliced", "detail")
_PATCH = 7
# Side of the last level of the pyramid at least: a patch of it is most of an image (Karras et al. stop at 16).
_SMALLEST = 8
_PATCHES = 2**17  # of a set at most, which bounds memory; of an image at most 32
_DIRECTIONS = 64
_ROWS = 1000
# Edges of the six bands, as frequency over the highest along a row or column (Nyquist's); above 1 are diagonals.
_EDGES = (0.0, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, math.inf)
FINE = 2  # the last bands, which the metric `detail` itself is of
_NOTE = "variance over that of real images, by share of the highest frequency; 1 is as real"
_COLOUR = ((-0.168736, -0.331264, 0.5), (0.5, -0.418688, -0.081312))  # Cb and Cr of ITU-R BT.601
_LEAST_DEVIATION = 12**-0.5  # deviation of the rounding to whole levels, of 255
_ROUNDING = (2 / 255) ** 2 / 12  # variance that rounding to 256 levels adds, as white noise, for images in [-1, 1]
_VALUES = 2**24  # of pixels in memory at once


def compare_pixels(names: Sequence[str], real: Tensor, fake: Tensor) -> list[MetricResult]:
    """Return metrics of pixels uint8 [N, C, H, W], [M, C, H, W]: of each name its value, then its parts by scale.

    RequestError for a name that is not one of these metrics; images that are too small, too few or of two shapes.
    """
    results = list[MetricResult]()
    for name in names:
        if name not in PIXEL_METRICS:
            raise RequestError(f"metric = {name!r} of pixels is unknown; give one of {', '.join(PIXEL_METRICS)}")
        results += _compare_sliced(real, fake) if name == "sliced" else compare_detail(real, fake)
    return results


def _sliced_wasserstein(real: Tensor, fake: Tensor) -> dict[int, float]:
    """Distance by side of the level, times 1,000: patches of a Laplacian pyramid of pixels uint8 [N, C, H, W].

    Unlike in the paper, both sets are scaled by the real one's mean and deviation of each channel, as each by its own
    would not see a wrong brightness, contrast or tint. A channel that varies less than by the rounding to 256 levels is
    scaled by that. Of sets of unequal size the first of the larger are taken. It is
    biased upwards where n is small, like every distance of two samples, and does not see errors that no single patch
    shows. RequestError for images that are smaller than a patch, or of two shapes.
    """
    if real.shape[1:] != fake.shape[1:] or min(real.shape[2:]) < _PATCH:
        raise RequestError(
            f"images {list(real.shape)} and {list(fake.shape)} must be of one shape, of {_PATCH} pixels or more"
        )
    n = min(len(real), len(fake), _PATCHES)
    generator = torch.Generator().manual_seed(0)
    distances = {}
    for side in _sides(min(real.shape[2:])):
        # Both sets are cut at the same places, so that equal sets are at distance 0.
        state = generator.get_state()
        cut = []
        for images in (real[:n], fake[:n]):
            generator.set_state(state)
            cut.append(_patches(images, side, generator))
        # Of the real set alone, for both: each by its own would hide a wrong brightness, contrast or tint.
        mean, deviation = cut[0].mean((0, 2)), cut[0].std((0, 2)).clamp(min=_LEAST_DEVIATION)
        a, b = (((patches - mean[:, None]) / deviation[:, None]).flatten(1) for patches in cut)
        directions = F.normalize(torch.randn(_DIRECTIONS, a.shape[1], generator=generator)).to(a.device)
        apart = [
            # In one dimension the optimal transport pairs values in their order.
            ((a @ d.T).sort(0).values - (b @ d.T).sort(0).values).abs().mean()
            for d in torch.split(directions, 16)
        ]
        distances[side] = 1000 * float(torch.stack(apart).mean())
    return distances


def _compare_sliced(real: Tensor, fake: Tensor) -> list[MetricResult]:
    """Compare patches of pixels uint8 [N, C, H, W], [M, C, H, W]: `sliced`, the mean over levels, and each level.

    RequestError for images that are too small or of two shapes.
    """
    levels = _sliced_wasserstein(real, fake)
    note = "biased upwards by small n: compare only at equal n"
    if bool((real.flatten(2).amax((0, 2)) == real.flatten(2).amin((0, 2))).any()):
        note += "; a channel of the real images is constant, and is scaled by the rounding to 256 levels"
    values = {"sliced": sum(levels.values()) / len(levels)}
    values |= {f"sliced_{side}": value for side, value in levels.items()}
    return [
        MetricResult(metric, value, None, None, None, len(fake), len(real), "7x7 patches", "none", note)
        for metric, value in values.items()
    ]


def _sides(side: int) -> list[int]:
    """Return the sides of all levels, the largest first."""
    sides = [side]
    while (half := -(-sides[-1] // 2)) >= _SMALLEST:  # of an odd side one more than the other half is kept
        sides.append(half)
    return sides


def _patches(images: Tensor, side: int, generator: torch.Generator) -> Tensor:
    """Cut patches from one level of pixels [N, C, H, W], at random places: [M, C, _PATCH * _PATCH]."""
    count = max(1, min(32, _PATCHES // len(images)))
    offsets = torch.arange(_PATCH)
    cut = []
    for part in torch.split(images, _ROWS):
        level = _level(part.float(), side)
        height, width = level.shape[2:]
        y = torch.randint(height - _PATCH + 1, (len(part), count, 1, 1), generator=generator) + offsets[:, None]
        x = torch.randint(width - _PATCH + 1, (len(part), count, 1, 1), generator=generator) + offsets
        which = torch.arange(len(part))[:, None, None, None]
        found = level.movedim(1, 3)[which, y, x]  # [rows, count, _PATCH, _PATCH, C]
        cut.append(found.flatten(0, 1).flatten(1, 2).movedim(2, 1))
    return torch.cat(cut)


def _level(x: Tensor, side: int) -> Tensor:
    """Return one level of the Laplacian pyramid of x; the last level is the low-pass residual."""
    while min(x.shape[2:]) > side:
        x = _smooth(x)[:, :, ::2, ::2]
    if -(-side // 2) < _SMALLEST:
        return x
    spread = torch.zeros_like(x)
    spread[:, :, ::2, ::2] = _smooth(x)[:, :, ::2, ::2]
    # 4, as three of four pixels were left at zero when the image was doubled.
    return x - 4 * _smooth(spread)


def _smooth(x: Tensor) -> Tensor:
    """The binomial filter of Burt & Adelson 1983."""
    row = torch.tensor([1.0, 4, 6, 4, 1], device=x.device) / 16
    kernel = torch.outer(row, row).expand(x.shape[1], 1, 5, 5)
    return F.conv2d(F.pad(x, (2, 2, 2, 2), mode="reflect"), kernel, groups=x.shape[1])


def band_powers(images: Tensor, of: Sequence[float] = ()) -> Tensor:
    """Return the variance of luma in each band, float64 [N, 6], of images uint8 [N, C, H, W] seen as in [-1, 1].

    The sum over the bands is the variance of an image over its pixels: the mean brightness is in none (Parseval). `of`
    are weights [C] of the channels that are added up in place of luma.
    """
    masks = torch.stack([mask.flatten() for mask in _masks(*images.shape[2:])]).double().to(images.device)
    return torch.cat([power.flatten(1) @ masks.T for power in _powers(images, of)])


def radial_spectrum(images: Tensor) -> tuple[Tensor, Tensor]:
    """Return (frequency [R], power [R]) of images uint8 [N, C, H, W]: mean power of a coefficient in rings.

    White noise is flat. Rings are as wide as one frequency of the shorter side.
    """
    radius, side = _radius(*images.shape[2:]), min(images.shape[2:])
    ring = (radius * side).round().long().flatten().to(images.device)
    total = torch.zeros(int(ring.max()) + 1, dtype=torch.float64, device=images.device)
    for power in _powers(images):
        total.index_add_(0, ring, power.flatten(1).sum(0))
    mean = total / torch.bincount(ring).clamp(min=1) / len(images) * (images.shape[2] * images.shape[3])
    # The first ring holds the mean brightness alone; a ring of long images may hold nothing.
    used = torch.bincount(ring) > 0
    used[0] = False
    return (torch.arange(len(mean), device=used.device) / side)[used], mean[used]


def compare_detail(real: Tensor, fake: Tensor) -> list[MetricResult]:
    """Compare variances by band: `detail` of luma in the finest two together, then `detail_1` (coarse) to `detail_6`.

    Images are uint8 [N, C, H, W] and [M, C, H, W]. Of RGB there is also `detail_colour`: Cb and Cr, in the finest two
    bands. Photographs have little colour there, as JPEG and cameras store it more coarsely than luma, so it shows noise
    that a network left.

    The interval is from the sampling of images: the delta method for the logarithm of a ratio of means. A band in which
    real images have no more than the rounding to 256 levels is refused. RequestError for images of two shapes, or fewer
    than two of either.
    """
    if real.shape[1:] != fake.shape[1:] or min(len(real), len(fake)) < 2:
        raise RequestError(
            f"images {list(real.shape)} and {list(fake.shape)} must be of one shape, two of each or more"
        )
    one, other = band_powers(real), band_powers(fake)
    floors, counts = band_floors(*real.shape[2:]), (len(fake), len(real))
    fine = [_ratio("detail", _where(-1 - FINE), one[:, -FINE:].sum(1), other[:, -FINE:].sum(1), floors[-FINE:])]
    if in_colour(real.shape[1]):
        colour, coloured = (
            torch.stack([band_powers(images, of)[:, -FINE:] for of in _COLOUR]).sum((0, 2)) for images in (real, fake)
        )
        fine += [_ratio("detail_colour", _where(-1 - FINE, what="colour"), colour, coloured, floors[-FINE:])]
    bands = [
        _ratio(f"detail_{i + 1}", _where(i, i + 1), one[:, i], other[:, i], floors[i : i + 1])
        for i in range(len(floors))
        if floors[i]  # a small image has no frequencies in the coarsest band
    ]
    return [MetricResult(name, *row, *counts, where, "none", note) for name, where, row, note in fine + bands]


# Name, where, (value, low, high, error), note.
_Row = tuple[str, str, tuple[float | None, float | None, float | None, float | None], str]


def _where(first: int, last: int | None = None, what: str = "luma") -> str:
    """Return the frequencies between two edges of bands in words; None is the highest of all."""
    low, high = _EDGES[first], math.inf if last is None else _EDGES[last]
    return f"{what} above {Fraction(low)}" if high == math.inf else f"{what} {Fraction(low)} to {Fraction(high)}"


def _ratio(name: str, where: str, real: Tensor, fake: Tensor, floors: Sequence[float]) -> _Row:
    """Return the ratio of the means of fake [M] and real [N] variances, with its interval and error."""
    if float(real.mean()) <= 2 * sum(floors):
        note = "the real images have no detail here beyond the rounding of levels"
        return name, where, (None, None, None, None), note
    if float(fake.mean()) < 1e-9 * sum(floors):  # flat images, of which a logarithm knows no interval
        return name, where, (0.0, None, None, None), _NOTE
    ratio = float(fake.mean() / real.mean())
    relative = math.sqrt(sum(float(x.var() / x.mean().square()) / len(x) for x in (real, fake)))
    around = math.exp(Z * relative)
    return name, where, (ratio, ratio / around, ratio * around, ratio * relative), _NOTE


def _powers(images: Tensor, of: Sequence[float] = ()) -> Iterator[Tensor]:
    """Yield the power of each coefficient, float64 [n, H, W], of parts of the images; its sum is the mean square."""
    rows, columns = (dct(side).to(images.device) for side in images.shape[2:])
    channels, pixels = images.shape[1], images.shape[2] * images.shape[3]
    weights = torch.tensor(of or luma_weights(channels), dtype=torch.float64, device=images.device)
    for part in torch.split(images, max(1, _VALUES // (channels * pixels))):
        # Without the shift to [-1, 1], which is of the mean alone.
        mixed = torch.einsum("nchw,c->nhw", part.double(), weights) / BYTES.half
        power = (rows @ mixed @ columns.T).square_() / pixels
        power[:, 0, 0] = 0
        yield power


def dct(n: int) -> Tensor:
    """Return the matrix of the orthonormal DCT-II, float64 [n, n]."""
    k, i = torch.arange(n, dtype=torch.float64)[:, None], torch.arange(n, dtype=torch.float64)
    matrix = (math.pi / n * (i + 0.5) * k).cos() * math.sqrt(2 / n)
    matrix[0] /= math.sqrt(2)
    return matrix


def _radius(height: int, width: int) -> Tensor:
    """Return the frequency of each coefficient over Nyquist's, float64 [H, W]: along a row or column below 1."""
    y, x = (torch.arange(n, dtype=torch.float64) / n for n in (height, width))
    return (y[:, None].square() + x.square()).sqrt()


def _masks(height: int, width: int) -> list[Tensor]:
    """Return the coefficients of each band, bool [H, W]; the mean brightness is in none."""
    radius = _radius(height, width)
    return [(low < radius) & (radius <= high) for low, high in pairwise(_EDGES)]


def band_floors(height: int, width: int) -> list[float]:
    """Return the variance that rounding adds to each band; 0 for a band without frequencies."""
    return [float(mask.double().mean()) * _ROUNDING for mask in _masks(height, width)]
