"""All images of the buckets as one set: original sizes by row, and one common size where all must agree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from unfog.data.data_report import SkippedFile
from unfog.data.dataset import ComputedPixels, ImageSet, PixelArray, skipped_images, take_with_rows
from unfog.values.image_format import ImageFormat


@dataclass(frozen=True)
class Rows:
    """Rows of several sets that follow each other, mapped to the rows of each."""

    lengths: tuple[int, ...]

    @cached_property
    def starts(self) -> list[int]:
        """The first row of each set."""
        return list(accumulate(self.lengths, initial=0))[:-1]

    def split(self, rows: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.intp], NDArray[np.int64]]]:
        """Yield (set, places in `rows` [K], rows of the set [K]) for each set that has some of `rows` [B]."""
        which = np.searchsorted(np.cumsum(self.lengths), rows, side="right")
        for number, start in enumerate(self.starts):
            places = np.flatnonzero(which == number)
            if len(places):
                yield number, places, rows[places] - start


class BucketPixels(ComputedPixels):
    """All images of several sets, each scaled to one size: their aspects change, and nothing is cut.

    For checks and pictures of a whole set. Training reads the sets themselves.
    """

    def __init__(self, parts: Sequence[PixelArray], format: ImageFormat) -> None:
        self.parts, self._format = parts, format
        self._rows = Rows(tuple(map(len, parts)))
        self.shape, self.dtype = (sum(self._rows.lengths), *format.shape), format.dtype

    def take_with_rows(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        out, used = self._format.empty_stored(len(rows)), rows.copy()
        for number, places, own in self._rows.split(rows):
            pixels, taken = take_with_rows(self.parts[number], own)
            out[places], used[places] = scale(pixels, self._format), taken + self._rows.starts[number]
        return out, used

    @property
    def skipped(self) -> list[SkippedFile]:
        return [one for part in self.parts for one in skipped_images(part)]

    def is_decodable(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        found = np.ones(len(rows), np.bool_)
        for number, places, own in self._rows.split(rows):
            part = self.parts[number]
            if isinstance(part, ComputedPixels):
                found[places] = part.is_decodable(own)
        return found


def scale(pixels: NDArray[np.uint8], format: ImageFormat) -> NDArray[np.uint8]:
    """Scale images [B, C, H, W] to the height and width of a format."""
    if pixels.shape[2:] == format.shape[1:]:
        return pixels
    import torch
    from torch.nn.functional import interpolate

    images = torch.from_numpy(np.ascontiguousarray(pixels)).float()
    scaled = interpolate(images, format.shape[1:], mode="bilinear", antialias=True, align_corners=False)
    result: NDArray[np.uint8] = format.values.rounded(scaled).numpy()
    return result


def join_sets(parts: Sequence[ImageSet], format: ImageFormat, fingerprint: str) -> ImageSet:
    """Return the images of several sets with the same columns as one set, whose pixels are scaled to one format."""
    known = all(len(part.sides) == len(part) for part in parts)  # sides are unknown before images are decoded
    return ImageSet(
        BucketPixels([part.pixels for part in parts], format),
        [name for part in parts for name in part.names],
        {
            name: replace(column, values=np.concatenate([np.asarray(part.columns[name].values) for part in parts]))
            for name, column in parts[0].columns.items()
        },
        fingerprint,
        np.concatenate([part.sides for part in parts]) if known else parts[0].sides[:0],
        np.concatenate([part.grey for part in parts]) if known else parts[0].grey[:0],
    )
