"""Sliced Wasserstein distance between patches of images, by scale: needs no network (Karras et al. 2018, sect. 5)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from unfog.errors import RequestError
from unfog.evaluation.metrics import MetricResult

_PATCH = 7
# Side of the last level of the pyramid at least: a patch of it is most of an image (Karras et al. stop at 16).
_SMALLEST = 8
_PATCHES = 2**17  # of a set at most, which bounds memory; of an image at most 32
_DIRECTIONS = 64
_ROWS = 1000


def _sliced_wasserstein(real: Tensor, fake: Tensor, seed: int = 0) -> dict[int, float]:
    """Distance by side of the level, times 1,000: patches of a Laplacian pyramid of pixels uint8 [N, C, H, W].

    Unlike there, both sets are scaled by the real one's mean and deviation of each channel, as each by its own would
    not see a wrong brightness, contrast or tint. Of sets of unequal size the first of the larger are taken. It is
    biased upwards where n is small, like every distance of two samples, and does not see errors that no single patch
    shows.

    Raises:
        RequestError: images that are smaller than a patch, or of two shapes.
    """
    if real.shape[1:] != fake.shape[1:] or min(real.shape[2:]) < _PATCH:
        raise RequestError(
            f"images {list(real.shape)} and {list(fake.shape)} must be of one shape, of {_PATCH} pixels or more"
        )
    n = min(len(real), len(fake), _PATCHES)
    generator = torch.Generator().manual_seed(seed)
    distances = {}
    for side in _sides(min(real.shape[2:])):
        # Both sets are cut at the same places, so that equal sets are at distance 0.
        state = generator.get_state()
        cut = []
        for images in (real[:n], fake[:n]):
            generator.set_state(state)
            cut.append(_patches(images, side, generator))
        # Of the real set alone, for both: each by its own would hide a wrong brightness, contrast or tint.
        mean, deviation = cut[0].mean((0, 2)), cut[0].std((0, 2)).clamp(min=1e-6)
        a, b = (((patches - mean[:, None]) / deviation[:, None]).flatten(1) for patches in cut)
        directions = F.normalize(torch.randn(_DIRECTIONS, a.shape[1], generator=generator)).to(a.device)
        apart = [
            # In one dimension the optimal transport pairs values in their order.
            ((a @ d.T).sort(0).values - (b @ d.T).sort(0).values).abs().mean()
            for d in torch.split(directions, 16)
        ]
        distances[side] = 1000 * float(torch.stack(apart).mean())
    return distances


def compare_sliced(real: Tensor, fake: Tensor) -> list[MetricResult]:
    """Compare patches of pixels uint8 [N, C, H, W], [M, C, H, W]: `sliced`, the mean over levels, and each level.

    Raises:
        RequestError: images that are too small or of two shapes.
    """
    levels = _sliced_wasserstein(real, fake)
    note = "biased upwards by small n: compare only at equal n"
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
