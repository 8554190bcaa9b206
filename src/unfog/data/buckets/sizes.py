"""Sizes of buckets: which there may be, which bucket each image goes to, and what is cropped away."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from unfog.text import plural
from unfog.values.buckets import Bucket
from unfog.values.image_format import LEAST, Size, area, sides_of, size_of

LONGEST = 3.0
"""Largest ratio of the sides of a bucket."""
_FINENESS = 8  # steps of a side in that of the square of the area
_OFF_AREA = 0.14  # logarithm of the area of a bucket over the wanted one, at most
# Share of the images below which a bucket is merged into its neighbour.
_LEAST_SHARE = 0.01

Fits = Callable[[int, int], bool]
"""Returns True if the network takes images of this height and width."""


def possible_sizes(size: Size, fits: Fits) -> list[Size]:
    """Return the sizes of about the area of `size` that fit, from narrow to wide; `size` itself if it is the only one.

    Sides are multiples of a step, about an eighth of the side of the square, whose multiples the network takes.
    """
    height, width = sides_of(size)
    pixels = area(size)
    side = math.sqrt(pixels)
    step = _step(side, fits)
    found = {(height, width)} if fits(height, width) else set()
    for one in range(step, math.ceil(side * math.sqrt(LONGEST)) + step, step):
        other = step * round(pixels / (one * step))
        if min(one, other) < LEAST or max(one, other) > LONGEST * min(one, other):
            continue
        if abs(math.log(one * other / pixels)) <= _OFF_AREA:
            found |= {pair for pair in ((one, other), (other, one)) if fits(*pair)}
    ordered = sorted(found or {(height, width)}, key=lambda sides: (sides[1] / sides[0], sides))
    return [size_of(*sides) for sides in ordered]


def _step(side: float, fits: Fits) -> int:
    """Return the step of sides: a power of two if the network takes its multiples, else the least that it takes."""
    usual = max(LEAST, 2 ** int(math.log2(max(1.0, side / _FINENESS))))
    # Both sides are multiples of what the network needs only if the step is, as 3 and 5 share no factor.
    return next((step for step in range(usual, math.ceil(side) + 1) if fits(3 * step, 5 * step)), usual)


def nearest_bucket(sizes: Sequence[Size], sides: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return the bucket of each image: that of the nearest logarithm of the aspect.

    Args:
        sizes: of the buckets, from narrow to wide.
        sides: [N, 2], width and height of each image.
    """
    logs = np.log([Bucket(size, 0).aspect for size in sizes])
    aspects = np.log(sides[:, 0] / sides[:, 1])
    return np.searchsorted((logs[1:] + logs[:-1]) / 2, aspects).astype(np.int64)


def nearest_size(sizes: Sequence[Size], width: int, height: int) -> Size:
    """Return the size, of some from narrow to wide, whose aspect is nearest to that of an image."""
    return sizes[int(nearest_bucket(sizes, np.array([(width, height)], np.int32))[0])]


def cropped_away(shapes: NDArray[np.int64], sides: NDArray[np.int32]) -> NDArray[np.float64]:
    """Return the share of each image [N] that is lost if it is scaled to cover a shape.

    Args:
        shapes: [N, 2], height and width of the shape for each image; or [1, 2] for all.
        sides: [N, 2], width and height of each image.
    """
    stretched = sides.astype(np.int64) * shapes  # both are equal where nothing is cropped
    lost: NDArray[np.float64] = 1 - stretched.min(1) / np.maximum(stretched.max(1), 1)
    return lost


@dataclass(frozen=True, eq=False)
class BucketPlan:
    """Buckets for the images of a set."""

    sizes: list[Size]
    """Of the buckets, from narrow to wide."""
    bucket: NDArray[np.int64]
    """[N], index into `sizes` of each image."""
    merged: list[Bucket]
    """Sizes that had too few images, which went to the nearest other one."""
    least: int
    """Images that a bucket needs."""

    @classmethod
    def of(cls, sizes: Sequence[Size], sides: NDArray[np.int32], least: int) -> BucketPlan:
        """Choose from these sizes, narrow to wide, those with at least so many of the images `sides` [N, 2].

        The smallest bucket is left out, and its images go to the nearest other ones, until all have enough or only one
        is left.
        """
        own = dict(zip(sizes, np.bincount(nearest_bucket(sizes, sides), minlength=len(sizes)).tolist()))
        left, merged = [size for size in sizes if own[size]] or list(sizes[:1]), list[Bucket]()
        while True:
            bucket = nearest_bucket(left, sides)
            counts = np.bincount(bucket, minlength=len(left))
            smallest = int(counts.argmin())
            if counts[smallest] >= least or len(left) == 1:
                return cls(left, bucket, merged, least)
            size = left.pop(smallest)
            merged.append(Bucket(size, own[size]))  # without those that came from buckets merged before

    @property
    def _counts(self) -> NDArray[np.int64]:
        """Number of images that go to each bucket."""
        return np.bincount(self.bucket, minlength=len(self.sizes))

    @classmethod
    def known(cls, sizes: Sequence[Size], sides: NDArray[np.int32]) -> BucketPlan:
        """Return the plan for the sizes that a run has, from narrow to wide."""
        return cls(list(sizes), nearest_bucket(sizes, sides), [], 0)

    def with_unreadable(self, readable: NDArray[np.bool_]) -> BucketPlan:
        """Return the plan for all N images: this one for the `readable` [N], and the largest bucket for the others."""
        bucket = np.full(len(readable), self._counts.argmax(), np.int64)
        bucket[readable] = self.bucket
        return replace(self, bucket=bucket)

    def without(self, size: Size) -> BucketPlan:
        """Return the plan without the bucket of this size, whose images go to the largest other one."""
        number = self.sizes.index(size)
        counts = self._counts
        counts[number] = -1
        bucket = np.where(self.bucket == number, counts.argmax(), self.bucket)
        left = [each for each in self.sizes if each != size]
        return replace(self, sizes=left, bucket=bucket - (bucket > number))

    def lines(self, sides: NDArray[np.int32]) -> list[str]:
        """Describe the buckets for people: their images, what is cropped away, and what was merged.

        `sides` [N, 2] are width and height of the images.
        """
        buckets = [Bucket(each, int(count)) for each, count in zip(self.sizes, self._counts)]
        listed = ", ".join(f"{bucket.sides} ({bucket.images:,})" for bucket in buckets)
        areas = [area(each) for each in self.sizes]
        pixels = f"{min(areas):,} to {max(areas):,}" if min(areas) < max(areas) else f"{areas[0]:,}"
        lines = [f"{plural(len(buckets), 'bucket')} of {pixels} pixels: {listed}"]
        shapes = np.array([sides_of(each) for each in self.sizes])[self.bucket]
        lost, by_crop = cropped_away(shapes, sides), cropped_away(np.array([(1, 1)]), sides)
        lines.append(
            f"cropped away: {lost.mean():.1%} of an image on average, {lost.max():.1%} at most; squares would lose "
            f"{by_crop.mean():.1%} and {by_crop.max():.1%}"
        )
        if self.merged:
            small = ", ".join(f"{bucket.sides} ({bucket.images:,})" for bucket in self.merged)
            most = max(self.merged, key=lambda bucket: bucket.images)
            # A batch of so many images is enough, unless it is under the least share of the set.
            smaller = f"; --batch {most.images} gives {most.sides} one" * (most.images >= least_images(len(sides), 1))
            lines.append(f"no bucket of their own, as they have under {self.least:,} images: {small}{smaller}")
        ratio = sides.max(1) / sides.min(1)
        if beyond := int((ratio > LONGEST * 1.1).sum()):
            lines.append(f"{beyond:,} longer than {LONGEST:g}:1, and cropped to the nearest bucket")
        return lines


def least_images(n: int, batch: int) -> int:
    """Return how many of n images a bucket needs: a batch, if the set has many batches, and a hundredth of the set."""
    return max(1, math.ceil(_LEAST_SHARE * n), min(batch, n // 4))
