"""Buckets: the sizes of a run that keeps the aspects of its images, and the images that each size has."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from unfog.errors import RequestError
from unfog.values.image_format import ImageFormat, Size, parse_size, sides_of

_MOST = 100  # far more than there are sizes of an area
_ENTRY = re.compile(r"([0-9x]{1,11}):([0-9]{1,12})")


class Bucket(NamedTuple):
    """A size, and the number of training images that are decoded to it."""

    size: Size
    images: int

    @property
    def sides(self) -> str:
        """Width x height in full, also of a square: "64x64"."""
        return ImageFormat.of(0, self.size).sides

    @property
    def aspect(self) -> float:
        """Width of the images over their height."""
        height, width = sides_of(self.size)
        return width / height


def bucket_texts(buckets: Sequence[Bucket]) -> tuple[str, ...]:
    """Return buckets as config.toml has them: ("80x48:120", "64x64:310")."""
    return tuple(f"{bucket.sides}:{bucket.images}" for bucket in buckets)


def parse_buckets(texts: Sequence[str]) -> tuple[Bucket, ...]:
    """Return the buckets that `bucket_texts` wrote. RequestError for any other text, and for too many buckets."""
    found = []
    if len(texts) > _MOST:
        raise RequestError(f"buckets has {len(texts):,} sizes; at most {_MOST} are possible")
    for text in texts:
        if (match := _ENTRY.fullmatch(text)) is None or not (size := parse_size(match[1], "buckets")):
            raise RequestError(f"buckets has {text!r:.60}, which is not WIDTHxHEIGHT:IMAGES, such as 80x48:120")
        found.append(Bucket(size, int(match[2])))
    return tuple(found)


def share_samples(buckets: Sequence[Bucket], count: int) -> list[int]:
    """Return how many of `count` samples each bucket gets, in proportion to its images, by largest remainders."""
    total = sum(bucket.images for bucket in buckets) or 1
    exact = [count * bucket.images / total for bucket in buckets]
    shares = [int(each) for each in exact]
    by_remainder = sorted(range(len(buckets)), key=lambda i: shares[i] - exact[i])
    for i in by_remainder[: count - sum(shares)]:
        shares[i] += 1
    return shares
