"""Decoded images and the pair of sets that training gets."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from unfog.data.ledger import Ledger
from unfog.data.settings import Data


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Decoded images in a fixed order; in memory, or in a file that the system pages in as it is read."""

    pixels: NDArray[np.uint8]
    """[N, C, H, W], 0 to 255, sRGB or grey."""

    labels: NDArray[np.int64] | None
    """[N], an index into `classes`; None without classes."""

    names: tuple[str, ...]
    """[N], path inside the source."""

    classes: tuple[str, ...]
    """Name of each class; () without classes."""

    known_fingerprint: str = ""
    """What `fingerprint` is, where it was computed before."""

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
            digest.update(self.pixels[start : start + 4096].tobytes())
        if self.labels is not None:
            digest.update(self.labels.tobytes())
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class Prepared:
    """What `prepare` returns."""

    settings: Data
    """As asked, with size, channels and labels settled: store these."""

    train: ImageSet
    held_out: ImageSet
    """Empty (and so false) when nothing is held out."""

    ledger: Ledger
    """What became of every file."""
