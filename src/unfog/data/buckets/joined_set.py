"""All images of the buckets as one set: original sizes by row, and one common size, scaled or cropped, for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from unfog.data.data_report import SkippedFile
from unfog.data.dataset import ComputedPixels, Dataset, ImageSet, PixelArray, skipped_images, take_with_rows
from unfog.data.decode import Fit
from unfog.values.columns import Column
from unfog.values.image_format import ImageFormat, Size
from unfog.values.kinds.image_kinds import IMAGE_KINDS

if TYPE_CHECKING:
    from torch import Tensor


def _resized(values: NDArray[Any], sides: tuple[int, ...], smooth: bool = True) -> Tensor:
    """Return values [B, C, H, W] as float32 at other sides; without `smooth` by the nearest pixel."""
    import torch
    from torch.nn.functional import interpolate

    floats = torch.from_numpy(np.ascontiguousarray(values)).float()
    if smooth:
        return interpolate(floats, sides, mode="bilinear", antialias=True, align_corners=False)
    return interpolate(floats, sides, mode="nearest-exact")


def scale(pixels: NDArray[np.uint8], format: ImageFormat) -> NDArray[np.uint8]:
    """Scale images [B, C, H, W] to the height and width of a format."""
    if pixels.shape[2:] == format.shape[1:]:
        return pixels
    result: NDArray[np.uint8] = format.values.rounded(_resized(pixels, format.shape[1:])).numpy()
    return result


def cover(pixels: NDArray[np.uint8], format: ImageFormat) -> NDArray[np.uint8]:
    """Crop images [B, C, H, W] at their centre to the shape of a format, and scale them to its height and width."""
    fit = Fit.of(pixels.shape[3], pixels.shape[2], format)
    left, top = ((whole - part) // 2 for whole, part in zip(fit.original, fit.kept))
    return scale(pixels[:, :, top : top + fit.kept[1], left : left + fit.kept[0]], format)


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
    """All images of several sets, each brought to one size by `fit`: `scale` changes aspects, `cover` crops.

    For checks and pictures of a whole set. Training reads the sets themselves.
    """

    def __init__(
        self,
        parts: Sequence[PixelArray],
        format: ImageFormat,
        fit: Callable[[NDArray[np.uint8], ImageFormat], NDArray[np.uint8]] = scale,
    ) -> None:
        self.parts, self._format, self._fit = parts, format, fit
        self._rows = Rows(tuple(map(len, parts)))
        self.shape, self.dtype = (sum(self._rows.lengths), *format.shape), format.dtype

    def take_with_rows(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        out, used = self._format.empty_stored(len(rows)), rows.copy()
        for number, places, own in self._rows.split(rows):
            pixels, taken = take_with_rows(self.parts[number], own)
            out[places], used[places] = self._fit(pixels, self._format), taken + self._rows.starts[number]
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


class BucketValues:
    """Image condition [N, C, H, W] of several sets joined; values are scaled to one size when they are read.

    Masks are scaled by the nearest pixel.
    """

    def __init__(self, columns: Sequence[Column], format: ImageFormat) -> None:
        self._columns, self._sides = columns, format.shape[1:]
        self._rows = Rows(tuple(len(one.values) for one in columns))
        self.dtype = np.result_type(*(one.values.dtype for one in columns))
        self.shape = (sum(self._rows.lengths), columns[0].values.shape[1], *self._sides)

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def parts(self) -> list[NDArray[Any]]:
        """The values of each set at its own size, [N, C, H, W]."""
        return [np.asarray(one.values) for one in self._columns]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return self[:].astype(dtype or self.dtype, copy=False)

    def __getitem__(self, key: Any) -> NDArray[Any]:
        """Return the values that an index of an array selects."""
        if isinstance(key, tuple):
            # An integer in place of rows leaves their axis out, as in an array.
            own = self[key[0]]
            return own[key[1:]] if own.ndim < len(self.shape) else own[:, *key[1:]]
        rows = np.asarray(np.arange(len(self))[key])
        if not rows.ndim:
            one: NDArray[Any] = self[rows[None]][0]
            return one
        out = np.empty((len(rows), *self.shape[1:]), self.dtype)
        for number, places, own in self._rows.split(rows):
            column = self._columns[number]
            out[places] = scale_values(np.asarray(column.values[own]), column.kind, self._sides)
        return out


def scale_values(values: NDArray[Any], kind: str, sides: tuple[int, ...]) -> NDArray[Any]:
    """Scale values [B, C, H, W] of a condition that is an image of this kind to other sides (height, width)."""
    if values.shape[2:] == sides:
        return values
    if not len(values):
        return values.reshape(0, values.shape[1], *sides)
    found = _resized(values, sides, IMAGE_KINDS[kind].smooth).numpy()
    result: NDArray[Any] = (found.round() if values.dtype.kind in "iu" else found).astype(values.dtype)
    return result


def join_columns(columns: Sequence[Column], format: ImageFormat) -> Column:
    """Return a column of several sets as one. Conditions that are images are scaled to the sides of a format."""
    if columns[0].kind in IMAGE_KINDS:
        return replace(columns[0], values=BucketValues(columns, format))  # type: ignore[arg-type]
    return replace(columns[0], values=np.concatenate([np.asarray(one.values) for one in columns]))


def join_sets(parts: Sequence[ImageSet], format: ImageFormat, fingerprint: str) -> ImageSet:
    """Return the images of several sets with the same columns as one set, whose pixels are scaled to one format."""
    known = all(len(part.sides) == len(part) for part in parts)  # sides are unknown before images are decoded
    return ImageSet(
        BucketPixels([part.pixels for part in parts], format),
        [name for part in parts for name in part.names],
        {name: join_columns([part.columns[name] for part in parts], format) for name in parts[0].columns},
        fingerprint,
        np.concatenate([part.sides for part in parts]) if known else parts[0].sides[:0],
        np.concatenate([part.grey for part in parts]) if known else parts[0].grey[:0],
    )


def cropped_to(dataset: Dataset, size: Size) -> Dataset:
    """Return a dataset with all images at one size, those of buckets of another shape cropped at their centre to it.

    A dataset without buckets is returned unchanged. Conditions keep the size that they have in it.
    """
    if not dataset.buckets:
        return dataset
    settings = replace(dataset.settings, size=size)

    def cropped(images: ImageSet, parts: Sequence[ImageSet]) -> ImageSet:
        return replace(images, pixels=BucketPixels([part.pixels for part in parts], settings.image_format, cover))

    train = cropped(dataset.train, [part.train for part in dataset.buckets])
    held_out = cropped(dataset.held_out, [part.held_out for part in dataset.buckets])
    return replace(dataset, settings=settings, train=train, held_out=held_out)
