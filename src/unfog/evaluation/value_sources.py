"""Images of any values by parts of bounded size, for metrics of values; unknown values are NaN."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unfog.values.unknown import UnknownValues

_VALUES = 2**22  # of images in memory at once


class ValueSource(Protocol):
    """Images [N, C, H, W] of any type by slices."""

    def __len__(self) -> int: ...

    def __getitem__(self, key: slice, /) -> NDArray[Any]: ...


class SpreadImages:
    """Every `step`-th image of a source from the one at `start` on, at most `count` of them."""

    def __init__(self, images: ValueSource, count: int, start: int = 0, step: int = 1):
        self._images, self._start, self._step = images, start, step
        self._count = min(count, len(range(start, len(images), step)))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, key: slice) -> NDArray[Any]:
        first, last, _ = key.indices(self._count)
        return self._images[self._start + first * self._step : self._start + last * self._step : self._step]


class KnownValues:
    """Images whose unknown values are NaN, float64.

    Args:
        images: [N, C, H, W], with the filler of `unknown` at unknown values.
        unknown: what is unknown in images and samples.
        masks: as many real images; what is unknown in one of them is unknown in the image of the same number too.
    """

    def __init__(self, images: ValueSource, unknown: UnknownValues, masks: ValueSource | None = None):
        self._images, self._unknown, self._masks = images, unknown, masks

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, key: slice) -> NDArray[np.float64]:
        values = self._images[key]
        known = self._unknown.known(values)
        if self._masks is not None:
            known = known & self._unknown.known(self._masks[key])
        return np.where(known, np.asarray(values, np.float64), np.nan)


def float_parts(images: ValueSource) -> Iterator[NDArray[np.float64]]:
    """Yield all images, float64 [n, C, H, W], a bounded number at once."""
    for part in _parts(images):
        yield np.asarray(part, np.float64)


def _parts(images: ValueSource) -> Iterator[NDArray[Any]]:
    each = max(1, _VALUES // max(1, images[0:1].size))
    for first in range(0, len(images), each):
        yield images[first : min(first + each, len(images))]


def count_damaged(images: ValueSource, unknown: UnknownValues | None, samples: bool) -> int:
    """Return the number of images with values that are not finite, though they are known.

    Samples are known wherever a training image is, so that the filler is damage there.
    """
    if images[0:1].dtype.kind != "f" and unknown is None:
        return 0
    count = 0
    for part in _parts(images):
        wrong = ~np.isfinite(part)
        if unknown is not None:
            hidden = unknown.hidden(part)
            wrong = wrong | hidden if samples else wrong & ~hidden
            if unknown.in_samples is not None:
                wrong &= unknown.in_samples
        count += int(wrong.any((1, 2, 3)).sum())
    return count


def center_and_scale(images: ValueSource) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of the known values of each channel, float64 [C] each.

    The deviation is 1 for a channel that is constant.
    """
    count, mean, squares = np.zeros(1), np.zeros(1), np.zeros(1)
    for part in float_parts(images):  # merged as by Chan et al. 1979, as values may be far from 0
        known = ~np.isnan(part)
        n = known.sum((0, 2, 3))
        own = np.where(known, part, 0).sum((0, 2, 3)) / n.clip(1)
        apart = np.where(known, part - own[:, None, None], 0)
        together = (count + n).clip(1)
        squares = squares + (apart**2).sum((0, 2, 3)) + (own - mean) ** 2 * (count * n / together)
        mean, count = mean + (own - mean) * (n / together), count + n
    deviation = np.sqrt(squares / count.clip(1))
    # Of a channel that is constant, only the rounding of its mean is left.
    return torch.from_numpy(mean), torch.from_numpy(np.where(deviation <= 1e-9 * np.abs(mean), 1.0, deviation))
