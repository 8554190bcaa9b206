"""The endless shuffled stream of training images. Its only state is the position, so a resume stores one integer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unfog.data.dataset import ImageSet
from unfog.data.lazy import LazyPixels
from unfog.data.permutation import epoch_keys, permute
from unfog.data.prefetch import Prefetcher, ReadOrder
from unfog.errors import RequestError


@dataclass(frozen=True, eq=False)
class Batch:
    """Images at consecutive positions of the stream."""

    first: int
    """Position of the first image, counted from the start of training."""

    pixels: Tensor
    """uint8 [B, C, H, W]."""

    label: Tensor | None
    """int64 [B], or None without classes."""

    index: Tensor
    """int64 [B], the row of each image in its set: not the requested one where that image could not be decoded."""


class ImageStream:
    """Images by position: position p is image shuffle(seed, p // N)(p mod N) of the N images of a set.

    Every image comes exactly once an epoch. Batches run on across epochs, so a set may be smaller than a batch. Images
    that are decoded as they are read are prefetched in threads; `close` ends these.

    Raises:
        RequestError: the set is empty.
    """

    def __init__(self, images: ImageSet, seed: int) -> None:
        if not len(images):
            raise RequestError("there are no images to train on; lower held_out or give more images")
        self.images, self.seed = images, seed
        # Not `self.index`: that would be a reference cycle, and the threads would outlive the stream.
        index = partial(_index, len(images), seed)
        self._prefetcher = Prefetcher(images.pixels, index) if isinstance(images.pixels, LazyPixels) else None

    def batch(self, first: int, size: int) -> Batch:
        """Return the images at positions first … first + size - 1. Any position up to 2^62 takes the same time.

        Raises:
            RunError: images cannot be decoded: a hundred in a row, or one that cannot be read now.
            RequestError: a label is not an index into the classes: the mapped file is damaged.
        """
        if self._prefetcher is not None:
            pixels, index = self._prefetcher.read(first, size)
            label = self.images.labels_of(index)
        else:
            pixels, label, index = self.images.take(self.index(first, size))
        return Batch(
            first,
            torch.from_numpy(pixels),
            None if label is None else torch.from_numpy(label),
            torch.from_numpy(index),
        )

    def prefetch_share(self, begin: int, count: int, batch: int, first: int = 0) -> None:
        """Prefetch only the share of a rank: `count` positions behind the `begin`th of every batch.

        Batches have `batch` positions each, the first of them from position `first` on. `batch()` still returns any
        position. Rank 1 of 2 calls `prefetch_share(32, 32, 64, first=seen)`.

        Raises:
            ValueError: a batch has no such share.
        """
        if not 0 <= begin <= begin + count <= batch or batch < 1 or first < 0:
            raise ValueError(f"positions {begin} to {begin + count} of batches of {batch} from {first} on")
        if self._prefetcher is not None:
            self._prefetcher.set_order(ReadOrder(first, batch, begin, count))

    def close(self) -> None:
        """End the threads that prefetch, if any. The next read starts them anew."""
        if self._prefetcher is not None:
            self._prefetcher.close()

    def index(self, first: int, size: int) -> NDArray[np.int64]:
        """Return the rows of the set at these positions, int64 [size]."""
        return _index(len(self.images), self.seed, np.arange(first, first + size, dtype=np.int64))


def _index(n: int, seed: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    epoch, place = np.divmod(positions, n)
    # Nearly always one epoch, whose key need be made only once.
    keys = epoch_keys(seed, epoch[:1] if epoch[0] == epoch[-1] else epoch)
    return permute(place, n, keys)
