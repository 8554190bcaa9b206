"""`ImageSet`, images of one size in a fixed order, and `Dataset`, the training set and the held-out set of a source."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from unfog.data.data_report import DataReport, SkippedFile
from unfog.data.settings import Data
from unfog.errors import RequestError
from unfog.values.buckets import Bucket
from unfog.values.columns import Column, classes_of, in_order, labels_of, of_labels, rows_of, update_digest
from unfog.values.condition_format import conditions_of
from unfog.values.image_format import Size

if TYPE_CHECKING:
    from unfog.values.conditions import Conditions


def evenly_spaced(n: int, most: int) -> NDArray[np.int64]:
    """Return at most `most` increasing indices of 0 … n - 1, evenly spaced and with both ends."""
    return np.linspace(0, n - 1, min(most, n)).round().astype(np.int64)


class PixelArray(Protocol):
    """uint8 [N, C, H, W]: an array, a mapped file, or `ComputedPixels`."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, key: Any, /) -> NDArray[np.uint8]: ...

    def take(self, indices: Any, axis: Any) -> NDArray[np.uint8]:
        """Return a copy of the images at these indices along axis 0."""


class ComputedPixels(ABC):
    """Base of a `PixelArray` whose images are computed as they are read, such as `lazy.LazyPixels`."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @abstractmethod
    def take_with_rows(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Return (the images at these rows [B], uint8 [B, C, H, W]; the rows of the images used [B])."""

    @property
    @abstractmethod
    def skipped(self) -> list[SkippedFile]:
        """Images that could not be decoded so far, in the order in which they were met."""

    @abstractmethod
    def is_decodable(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return False for those of these rows [B] that are known, so far, to be undecodable."""

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> NDArray[np.uint8]:
        """Return a row, a slice of rows, or those that an array of integers or booleans selects."""
        if isinstance(key, slice):
            return self.take(np.arange(*key.indices(len(self))))
        return self.take(np.arange(len(self))[key])

    def take(self, indices: Any, axis: int = 0) -> NDArray[np.uint8]:
        """Return the images at these rows: integers of any shape [...] -> uint8 [..., C, H, W].

        Raises as `take_with_rows`.
        """
        if axis != 0:
            raise ValueError("images are taken along axis 0")
        rows = np.asarray(indices, np.int64)
        return self.take_with_rows(rows.ravel())[0].reshape(*rows.shape, *self.shape[1:])


def take_with_rows(pixels: PixelArray, rows: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return (the images at these rows [B]; their rows [B], others than these where an image cannot be decoded)."""
    if isinstance(pixels, ComputedPixels):
        return pixels.take_with_rows(rows)
    return pixels.take(rows, axis=0), rows


def skipped_images(pixels: PixelArray) -> list[SkippedFile]:
    """Return the images that could not be decoded so far; decoded images have no such ones."""
    return pixels.skipped if isinstance(pixels, ComputedPixels) else []


class _ImageBatch(NamedTuple):
    """Images of a set, with their columns and rows."""

    pixels: NDArray[np.uint8]
    """[B, C, H, W]."""
    columns: Mapping[str, Column]
    """Columns of these images."""
    rows: NDArray[np.int64]
    """[B], the row of each image in its set: not the requested one where that image could not be decoded."""

    @property
    def labels(self) -> NDArray[np.int64] | None:
        """[B], an index into the classes of the set; None without classes."""
        return labels_of(self.columns)

    @property
    def conditions(self) -> Conditions:
        """Conditions of the images, on the CPU."""
        return conditions_of(self.columns.values())


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images in a fixed order: in memory, in a mapped file, or decoded as they are read."""

    pixels: PixelArray
    """[N, C, H, W], 0 to 255, sRGB or grey."""
    names: Sequence[str]
    """[N], path inside the source."""
    columns: Mapping[str, Column] = field(default_factory=dict)
    """What is known about each image, by name: "class" first, then the others in the order of their names."""
    known_fingerprint: str = ""
    """`fingerprint`, where it is known already."""
    sides: NDArray[np.int32] = field(default_factory=lambda: np.zeros((0, 2), np.int32))
    """[N, 2], width and height of the upright original; [0, 2] where unknown."""
    grey: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    """[N], True if all channels of the original are equal; [0] where unknown."""

    @classmethod
    def labelled(
        cls, pixels: PixelArray, labels: NDArray[np.int64] | None, names: Sequence[str], classes: tuple[str, ...]
    ) -> ImageSet:
        """Return images with class labels [N] alone; None for no classes."""
        return cls(pixels, names, of_labels(labels, classes))

    def __len__(self) -> int:
        return len(self.pixels)

    @property
    def labels(self) -> NDArray[np.int64] | None:
        """[N], an index into `classes`; None without classes."""
        return labels_of(self.columns)

    @property
    def classes(self) -> tuple[str, ...]:
        """Name of each class; () without classes."""
        return classes_of(self.columns)

    @property
    def nbytes(self) -> int:
        """Bytes of all pixels, or latents."""
        return len(self) * self.image_bytes

    @property
    def image_bytes(self) -> int:
        """Bytes of the pixels, or latents, of one image."""
        return math.prod(self.pixels.shape[1:]) * getattr(self.pixels, "dtype", np.dtype(np.uint8)).itemsize

    @property
    def device_bytes(self) -> int:
        """Bytes of all pixels, or latents, and of the conditions that are images, as they are kept on a GPU."""
        shapes = (column.values.shape for column in self.columns.values())
        return self.nbytes + sum(4 * math.prod(shape) for shape in shapes if len(shape) == 4)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of pixels, columns and order, by which a resume knows that it sees the same images.

        Unless it is known, computing it reads every pixel, at about 1 GB/s.
        """
        if self.known_fingerprint:
            return self.known_fingerprint
        # The shape too: the same bytes could be other images of another size.
        digest = hashlib.sha256(repr((self.pixels.shape, self.classes)).encode())
        for start in range(0, len(self), 4096):  # in parts, as a mapped file may be larger than the memory
            digest.update(np.ascontiguousarray(self.pixels[start : start + 4096]).data)
        update_digest(digest, self.columns)
        return digest.hexdigest()

    def take(self, rows: NDArray[np.int64]) -> _ImageBatch:
        """Return the images at these rows [B], each with its own columns.

        Raises RequestError as `columns_of`, and RunError if images that are decoded as they are read cannot be.
        """
        pixels, rows = take_with_rows(self.pixels, rows)
        return _ImageBatch(pixels, self.columns_of(rows), rows)

    def columns_of(self, rows: NDArray[np.int64]) -> dict[str, Column]:
        """Return the columns of the images at these rows [B]. RequestError if the mapped file is damaged."""
        columns = rows_of(self.columns, rows)
        labels = labels_of(columns)
        # Of a mapped file nothing is known before it is read, and an index out of range ends the process on CUDA.
        if labels is not None and len(labels) and not 0 <= labels.min() <= labels.max() < len(self.classes):
            raise RequestError("the number of a class is out of range: the pack is damaged (labels.npy); pack it again")
        return columns

    def columns_at(self, rows: NDArray[np.int64]) -> dict[str, Column]:
        """Return the result of `columns_of`, but values that are computed as they are read are not computed yet."""
        at = {name: column.values.at(rows) for name, column in self.columns.items() if hasattr(column.values, "at")}
        known = replace(self, columns={name: one for name, one in self.columns.items() if name not in at})
        lazy = {name: replace(self.columns[name], values=values) for name, values in at.items()}
        return in_order({**known.columns_of(rows), **lazy})

    def labels_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Return the labels at these rows [B]; None without classes. Raises as `columns_of`."""
        return labels_of(self.columns_of(rows))

    def conditions_of(self, rows: NDArray[np.int64], turn: NDArray[np.int64] | None = None) -> Conditions:
        """Return the conditions of the images at these rows, on the CPU. Raises as `columns_of`.

        `turn` is that of `condition_format.conditions_of`.
        """
        return conditions_of(self.columns_of(rows).values(), turn)

    def subset(self, rows: slice, fingerprint: str = "") -> ImageSet:
        """Return some of the images, sharing the memory of this set."""
        part = getattr(self.pixels, "rows", None)  # of `file_rows.FileRows`, whose slices are copies
        return ImageSet(
            part(rows) if part else self.pixels[rows],
            self.names[rows],
            rows_of(self.columns, rows),
            fingerprint,
            self.sides[rows],  # stays empty if they are unknown
            self.grey[rows],
        )


@dataclass(frozen=True, eq=False)
class Dataset:
    """The training images and the held-out images of a source, as `prepare` returns them."""

    settings: Data
    """The settings with size, channels and labels resolved, which a run stores."""
    train: ImageSet
    held_out: ImageSet
    """Empty, and so false, when nothing is held out."""
    report: DataReport
    placement: str = ""
    """A line on where decoded images are kept and why, where that was chosen automatically."""
    warnings: tuple[str, ...] = ()
    """See `Scan.warnings`."""
    latents: tuple[ImageSet, ImageSet] | None = None
    """(train, held_out) with latents in place of pixels, for latent diffusion: see `data.latent_cache`."""
    buckets: tuple[Dataset, ...] = ()
    """Sets of the same classes by their size, where aspects are kept; () otherwise. `train` and `held_out` then have
    the images of all of them in this order, scaled to one size: see `data.buckets.joined_set`."""

    @classmethod
    def split(
        cls,
        images: ImageSet,
        train: int,
        settings: Data,
        report: DataReport,
        fingerprints: tuple[str, str] = ("", ""),
    ) -> Dataset:
        """Make the first `train` images the training set and the others the held-out set, in the same memory."""
        first, second = fingerprints
        return cls(settings, images.subset(slice(train), first), images.subset(slice(train, None), second), report)

    @property
    def size_buckets(self) -> list[Bucket]:
        """Size and number of training images of each of `buckets`."""
        return [Bucket(part.settings.size, len(part.train)) for part in self.buckets]

    @property
    def of_one_size(self) -> Dataset:
        """The dataset, or that of the bucket whose size stands for all of them: the one with most training images."""
        return self.at_size(self.settings.size)

    def at_size(self, size: Size) -> Dataset:
        """Return the dataset of the bucket of this size; this dataset without such a bucket."""
        return next((bucket for bucket in self.buckets if bucket.settings.size == size), self)

    @property
    def as_network_input(self) -> Dataset:
        """The dataset as the network sees it: with the latents in place of the images, if it has any."""
        return self if self.latents is None else replace(self, train=self.latents[0], held_out=self.latents[1])
