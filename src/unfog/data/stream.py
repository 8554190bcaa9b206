"""The endless shuffled stream. Position is its only state: a resume stores one integer and seeks at once."""

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
    """Some consecutive images of the stream."""

    first: int
    """Position of the first image, counted from the start of training."""

    pixels: Tensor
    """uint8 [B, C, H, W]."""

    label: Tensor | None
    """int64 [B], or None without classes."""

    index: Tensor
    """int64 [B], which image of the set each one is, also where another was asked for that cannot be decoded."""


class ImageStream:
    """Images by position: position p is image shuffle(seed, p // N)(p mod N) of the set.

    Every image comes exactly once an epoch; batches run on across epochs, so a set smaller than a batch works
    too. Where images are decoded only now, those of the next positions are being decoded in threads meanwhile, which
    changes nothing but the time it takes; `close` ends the threads.

    Raises:
        RequestError: the set is empty.
    """

    def __init__(self, images: ImageSet, seed: int) -> None:
        if not len(images):
            raise RequestError("there are no images to train on; lower held_out or give more images")
        self.images, self.seed = images, seed
        # Not `self.index`: in a circle with this, the threads would outlive it.
        index = partial(_index, len(images), seed)
        self._ahead = Prefetcher(images.pixels, index) if isinstance(images.pixels, LazyPixels) else None

    def batch(self, first: int, size: int) -> Batch:
        """The images at positions first..first+size-1; any position up to 2^62 costs the same.

        Raises:
            RunError: images that are decoded only now cannot be: a hundred in a row, or one just now.
            RequestError: a label is none of the classes, in a mapped file that is damaged.
        """
        if self._ahead is not None:
            pixels, index = self._ahead.read(first, size)
            label = self.images.labels_of(index)
        else:
            pixels, label, index = self.images.take(self.index(first, size))
        return Batch(
            first,
            torch.from_numpy(pixels),
            None if label is None else torch.from_numpy(label),
            torch.from_numpy(index),
        )

    def share(self, begin: int, count: int, batch: int, first: int = 0) -> None:
        """Expect to be asked only for these positions of each batch: `count` of them behind its `begin`th.

        Batches are of `batch` positions each, the first of them begins at position `first`. What is decoded ahead is
        of this share alone, so that of several ranks each reads only its own images; `batch` goes on to give any
        position, and the same images. Rank 1 of 2 says `share(32, 32, 64, first=seen)`; a single process need not.

        Raises:
            ValueError: there is no such share of a batch.
        """
        if not 0 <= begin <= begin + count <= batch or batch < 1 or first < 0:
            raise ValueError(f"positions {begin} to {begin + count} of batches of {batch} from {first} on")
        if self._ahead is not None:
            self._ahead.follow(ReadOrder(first, batch, begin, count))

    def close(self) -> None:
        """End the threads that read ahead, if any; whoever reads on starts them anew."""
        if self._ahead is not None:
            self._ahead.close()

    def index(self, first: int, size: int) -> NDArray[np.int64]:
        """Which images of the set are at these positions, int64 [size]."""
        return _index(len(self.images), self.seed, np.arange(first, first + size, dtype=np.int64))


def _index(n: int, seed: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    epoch, place = np.divmod(positions, n)
    # Nearly always one epoch, whose key need be made only once.
    keys = epoch_keys(seed, epoch[:1] if epoch[0] == epoch[-1] else epoch)
    return permute(place, n, keys)
