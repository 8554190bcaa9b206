"""All images of the buckets as one set: original sizes by row, and one common size where all must agree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unfog.data.data_report import SkippedFile
from unfog.data.dataset import ImageSet, PixelArray
from unfog.values.image_format import ImageFormat


@dataclass(frozen=True)
class Rows:
    """Rows of several sets that follow each other, mapped to the rows of each."""

    lengths: tuple[int, ...]

    @property
    def starts(self) -> list[int]:
        """The first row of each set."""
        return [sum(self.lengths[:i]) for i in range(len(self.lengths))]

    def split(self, rows: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.intp], NDArray[np.int64]]]:
        """Yield (set, places in `rows` [K], rows of the set [K]) for each set that has some of `rows` [B]."""
        which = np.searchsorted(np.cumsum(self.lengths), rows, side="right")
        for number, start in enumerate(self.starts):
            places = np.flatnonzero(which == number)
            if len(places):
                yield number, places, rows[places] - start


class BucketPixels:
    """A `PixelArray` of all images of several sets, each scaled to one size: their aspects change, and nothing is cut.

    For checks and pictures of a whole set. Training reads the sets themselves.
    """

    def __init__(self, parts: Sequence[PixelArray], format: ImageFormat) -> None:
        self.parts, self._format = parts, format
        self._rows = Rows(tuple(map(len, parts)))
        self.shape, self.dtype = (sum(self._rows.lengths), *format.shape), format.dtype

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def skipped(self) -> list[SkippedFile]:
        """Images that could not be decoded so far, where they are decoded as they are read."""
        return [one for part in self.parts for one in getattr(part, "skipped", [])]

    def __getitem__(self, key: Any) -> NDArray[np.uint8]:
        """Return a row, a slice of rows, or those that an array of integers or booleans selects."""
        if isinstance(key, slice):
            return self.take(np.arange(*key.indices(len(self))))
        return self.take(np.arange(len(self))[key])

    def take(self, indices: Any, axis: int = 0) -> NDArray[np.uint8]:
        """Return the images at these rows: integers of any shape [...] -> uint8 [..., C, H, W]."""
        if axis != 0:
            raise ValueError("images are taken along axis 0")
        rows = np.asarray(indices, np.int64)
        return self.take_with_rows(rows.ravel())[0].reshape(*rows.shape, *self.shape[1:])

    def take_with_rows(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Return the images at these rows [B], and the rows of the images used [B]."""
        out, used = self._format.empty_stored(len(rows)), rows.copy()
        for number, places, own in self._rows.split(rows):
            part = self.parts[number]
            take = getattr(part, "take_with_rows", None)  # of images that are decoded as they are read
            pixels, taken = take(own) if take else (part.take(own, axis=0), own)
            out[places], used[places] = scale(pixels, self._format), taken + self._rows.starts[number]
        return out, used


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
