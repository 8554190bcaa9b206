"""Images of one size and the pair of sets that training gets."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from unfog.data.report import DataReport
from unfog.data.settings import Data
from unfog.errors import RequestError


def evenly_spaced(n: int, most: int) -> NDArray[np.int64]:
    """At most `most` of 0 … n - 1, with both ends, evenly spread: increasing, all of them where there are no more."""
    return np.linspace(0, n - 1, min(most, n)).round().astype(np.int64)


class PixelArray(Protocol):
    """uint8 [N, C, H, W]: an array, a mapped file, or `lazy.LazyPixels`, which decodes what is asked for."""

    @property
    def shape(self) -> tuple[int, ...]:
        """[N, C, H, W]."""

    def __len__(self) -> int: ...

    def __getitem__(self, key: Any, /) -> NDArray[np.uint8]: ...

    def take(self, indices: Any, axis: Any) -> NDArray[np.uint8]:
        """The images at these places along axis 0, in memory of their own."""


class ImageBatch(NamedTuple):
    """Some images of a set."""

    pixels: NDArray[np.uint8]
    """[B, C, H, W]."""

    labels: NDArray[np.int64] | None
    """[B]; None without classes."""

    rows: NDArray[np.int64]
    """[B], which image of the set each one is: another than was asked for where that one could not be decoded."""


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images in a fixed order; in memory, in a file that the system pages in as it is read, or still to be decoded."""

    pixels: PixelArray
    """[N, C, H, W], 0 to 255, sRGB or grey."""

    labels: NDArray[np.int64] | None
    """[N], an index into `classes`; None without classes."""

    names: Sequence[str]
    """[N], path inside the source."""

    classes: tuple[str, ...]
    """Name of each class; () without classes."""

    known_fingerprint: str = ""
    """What `fingerprint` is, where it was computed before."""

    sides: NDArray[np.int32] = field(default_factory=lambda: np.zeros((0, 2), np.int32))
    """[N, 2], width and height of the upright original; [0, 2] where unknown."""

    grey: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    """[N], whether its channels were equal, whatever the file said; [0] where unknown."""

    def __len__(self) -> int:
        return len(self.pixels)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over pixels, labels and order: equal exactly when training would see the same images in the
        same order. Unless it is known, it reads every pixel once, at about 1 GB/s.
        """
        if self.known_fingerprint:
            return self.known_fingerprint
        digest = hashlib.sha256(repr((self.pixels.shape, self.classes)).encode())
        for start in range(0, len(self), 4096):
            digest.update(np.ascontiguousarray(self.pixels[start : start + 4096]).data)
        if self.labels is not None:
            digest.update(self.labels.tobytes())
        return digest.hexdigest()

    def take(self, rows: NDArray[np.int64]) -> ImageBatch:
        """The images at these rows [B], each with the label that is its own.

        Raises:
            RequestError: a label is none of the classes, in a mapped file that is damaged.
            RunError: images that are decoded only now cannot be.
        """
        taken = getattr(self.pixels, "taken", None)  # of `lazy.LazyPixels`
        pixels, rows = taken(rows) if taken else (self.pixels.take(rows, axis=0), rows)
        return ImageBatch(pixels, self.labels_of(rows), rows)

    def labels_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """The labels at these rows [B], checked; None without classes."""
        if self.labels is None:
            return None
        labels = np.asarray(self.labels.take(rows))
        if len(labels) and not 0 <= labels.min() <= labels.max() < len(self.classes):
            raise RequestError("a label is none of the classes: the pack is damaged (labels.npy); pack it again")
        return labels

    def part(self, rows: slice, fingerprint: str = "") -> ImageSet:
        """Some of these images, in the same memory."""
        return ImageSet(
            self.pixels[rows],
            None if self.labels is None else self.labels[rows],
            self.names[rows],
            self.classes,
            fingerprint,
            self.sides[rows],  # of those where they are unknown, none
            self.grey[rows],
        )


@dataclass(frozen=True, eq=False)
class Dataset:
    """What `prepare` returns."""

    settings: Data
    """As asked, with size, channels and labels settled: store these."""

    train: ImageSet
    held_out: ImageSet
    """Empty (and so false) when nothing is held out."""

    report: DataReport
    """What became of every file."""

    placement: str = ""
    """Where decoded images live and why, in a line, where that was chosen rather than asked for."""

    warnings: tuple[str, ...] = ()
    """What was found and left out that may have been meant to count, a line for each: a table of labels, say."""

    latents: tuple[ImageSet, ImageSet] | None = None
    """(train, held_out) with latents in place of pixels, where the network is to see those: see `data.latents`."""

    @property
    def as_network_input(self) -> Dataset:
        """The same as the network sees it."""
        return self if self.latents is None else replace(self, train=self.latents[0], held_out=self.latents[1])


def split(
    whole: ImageSet, train: int, settings: Data, report: DataReport, fingerprints: tuple[str, str] = ("", "")
) -> Dataset:
    """The first `train` images to train on, the others held out; both share the memory of `whole`."""
    first, second = fingerprints
    return Dataset(settings, whole.part(slice(train), first), whole.part(slice(train, None), second), report)
