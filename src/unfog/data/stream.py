"""The endless shuffled stream. Position is its only state: a resume stores one integer and seeks at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unfog.data.images import ImageSet
from unfog.data.permutation import epoch_keys, permute
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
    """int64 [B], which image of the set each one is."""


class ImageStream:
    """Images by position: position p is image shuffle(seed, p // N)(p mod N) of the set.

    Every image comes exactly once an epoch; batches run on across epochs, so a set smaller than a batch works
    too.

    Raises:
        RequestError: the set is empty.
    """

    def __init__(self, images: ImageSet, seed: int) -> None:
        if not len(images):
            raise RequestError("there are no images to train on; lower held_out or give more images")
        self.images, self.seed = images, seed

    def batch(self, first: int, size: int) -> Batch:
        """The images at positions first..first+size-1; any position up to 2^62 costs the same."""
        index = self.index(first, size)
        labels = self.images.labels
        return Batch(
            first,
            torch.from_numpy(self.images.pixels.take(index, axis=0)),
            None if labels is None else torch.from_numpy(labels.take(index)),
            torch.from_numpy(index),
        )

    def index(self, first: int, size: int) -> NDArray[np.int64]:
        """Which images of the set are at these positions, int64 [size]."""
        n = len(self.images)
        epoch, place = np.divmod(np.arange(first, first + size, dtype=np.int64), n)
        # Nearly always one epoch, whose key need be made only once.
        keys = epoch_keys(self.seed, epoch[:1] if epoch[0] == epoch[-1] else epoch)
        return permute(place, n, keys)
