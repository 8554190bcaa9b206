"""The endless shuffled stream of training images, whose only state is the position; and the same kept on a device."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unfog.data.dataset import ImageSet, take_with_rows
from unfog.data.lazy import LazyPixels, PendingDecode
from unfog.data.permutation import epoch_keys, permute
from unfog.device.copies import to_device
from unfog.errors import RequestError
from unfog.values.condition_format import TEXT
from unfog.values.conditions import Conditions

_BLOCK = 16  # positions that are decoded as one piece of work
# Read ahead by so many positions, and so many batches, as far as these bytes go; always by one batch.
_BYTES = 256 * 2**20
_LEAST, _BATCHES = 256, 8


@dataclass(frozen=True, eq=False)
class Batch:
    """Images at consecutive positions of the stream."""

    first: int
    """Position of the first image, counted from the start of training."""
    pixels: Tensor
    """uint8 [B, C, H, W]."""
    conditions: Conditions
    """Conditions of the images."""
    index: Tensor
    """int64 [B], the row of each image in its set: not the requested one where that image could not be decoded."""


class ImageStream:
    """Images by position: position p is image shuffle(seed, p // N)(p mod N) of the N images of a set.

    Every image comes exactly once an epoch. Batches run on across epochs, so a set may be smaller than a batch. Images
    that are decoded as they are read are prefetched in threads; `close` ends these. RequestError if the set is empty.
    """

    def __init__(self, images: ImageSet, seed: int) -> None:
        if not len(images):
            raise RequestError("no images are left to train on; lower held_out or add images")
        self.images, self.seed = images, seed
        # Not `self.index`: that would be a reference cycle, and the threads would outlive the stream.
        index = partial(_index, len(images), seed)
        self._prefetcher = _Prefetcher(images.pixels, index) if isinstance(images.pixels, LazyPixels) else None

    def batch(self, first: int, size: int) -> Batch:
        """Return the images at positions first … first + size - 1. Any position up to 2^62 takes the same time.

        Raises:
            RunError: images cannot be decoded: a hundred in a row, or one that cannot be read now.
            RequestError: an image is of no known class: the mapped file is damaged.
        """
        if self._prefetcher is not None:
            pixels, index = self._prefetcher.read(first, size)
        else:
            pixels, index = take_with_rows(self.images.pixels, self.index(first, size))
        return Batch(first, torch.from_numpy(pixels), self.conditions(first, index), torch.from_numpy(index))

    def conditions(self, first: int, index: NDArray[np.int64]) -> Conditions:
        """Return the conditions of the images at positions from `first` on, which are rows `index` [B] of the set.

        Of several captions an image has the next one at each epoch. Raises as `ImageSet.columns_of`.
        """
        epoch = np.arange(first, first + len(index), dtype=np.int64) // len(self.images)
        return self.images.conditions_of(index, epoch + index)

    def prefetch_share(self, begin: int, count: int, batch: int, first: int = 0) -> None:
        """Prefetch only the share of a rank: `count` positions behind the `begin`th of every batch.

        Batches have `batch` positions each, the first of them from position `first` on. `batch()` still returns any
        position. Rank 1 of 2 calls `prefetch_share(32, 32, 64, first=seen)`. ValueError if a batch has no such share.
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


class ReadOrder(NamedTuple):
    """The positions that a rank will read: of each `batch` positions from `first` on, the `share` behind `begin`.

    Index 0 is position first + begin. The default reads all positions.
    """

    first: int = 0
    batch: int = 1
    begin: int = 0
    share: int = 1

    def positions(self, index: int, size: int) -> NDArray[np.int64]:
        """Return the positions with indices index … index + size - 1, int64 [size]."""
        batch, place = np.divmod(np.arange(index, index + size, dtype=np.int64), self.share)
        return self.first + batch * self.batch + self.begin + place

    def index_of(self, position: int, size: int) -> int | None:
        """Return the index of the first of `size` consecutive positions; None if not all of them will be read."""
        batch, place = divmod(position - self.first, self.batch)
        place -= self.begin
        whole = self.share == self.batch or place + size <= self.share
        return batch * self.share + place if batch >= 0 and place >= 0 and whole else None


class _Prefetcher:
    """Reads images by position, and decodes those of the next positions ahead. Results do not depend on it.

    It decodes in blocks, so that batches of any size use what was prefetched. It follows one reader, the one that goes
    on where the last call ended; other reads, such as a preview's, are served without disturbing it. `index` maps
    positions [count] to rows of `pixels` [count].
    """

    def __init__(self, pixels: LazyPixels, index: Callable[[NDArray[np.int64]], NDArray[np.int64]]) -> None:
        self._pixels, self._index, self._order = pixels, index, ReadOrder()
        self._blocks: dict[int, PendingDecode] = {}  # by their first index
        # The index at which the followed reader goes on, and that at which another reader's last call ended.
        self._next = self._last = -1

    def set_order(self, order: ReadOrder) -> None:
        """Prefetch only positions of this order from now on, beginning with its first."""
        self._cancel(list(self._blocks))
        self._order, self._next, self._last = order, 0, -1

    def read(self, first: int, size: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Return the images at positions first … first + size - 1, uint8 [size, C, H, W], and their rows [size].

        Raises RunError if they cannot be decoded; errors of prefetched images are raised once these are read.
        """
        begin = self._order.index_of(first, size)
        if begin is None:
            return self._read_now(first, size)
        end = begin + size
        if begin not in (self._next, self._last):
            # Perhaps a single read, perhaps a new reader: the next call decides, by whether it continues here.
            self._last = end
            return self._read_now(first, size)
        self._next, self._last = end, -1
        # At a multiple, so that batches of any size share their blocks.
        start = begin - begin % _BLOCK
        self._prefetch(start, end + self._reach(size))
        try:
            parts = [self._blocks[block].result() for block in range(start, end, _BLOCK)]
        except Exception:  # of one of these images, or of another in their blocks, which must not raise yet
            self._cancel([block for block in self._blocks if block < end])
            return self._read_now(first, size)
        for block in [block for block in self._blocks if block + _BLOCK <= end]:
            del self._blocks[block]
        pixels, rows = (np.concatenate(some)[begin - start : end - start] for some in zip(*parts))
        return pixels, rows

    def close(self) -> None:
        """Cancel what is prefetched and end the threads."""
        self._cancel(list(self._blocks))
        self._pixels.close()

    def _read_now(self, first: int, size: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        return self._pixels.take_with_rows(self._index(np.arange(first, first + size, dtype=np.int64)))

    def _reach(self, size: int) -> int:
        """Return the number of positions to prefetch behind a batch of `size`."""
        fit = _BYTES // (math.prod(self._pixels.shape[1:]) * self._pixels.dtype.itemsize)
        # At least the next batch, however large its images are: without it nothing would be read ahead.
        return max(size, min(fit, max(_LEAST, _BATCHES * size)))

    def _prefetch(self, start: int, end: int) -> None:
        """Have the blocks from `start` to that of `end` in work, and no others."""
        ahead = range(start, end, _BLOCK)
        self._cancel([block for block in self._blocks if block not in ahead])
        for block in ahead:
            if block not in self._blocks:
                rows = self._index(self._order.positions(block, _BLOCK))
                self._blocks[block] = self._pixels.start_decoding(rows)

    def _cancel(self, blocks: list[int]) -> None:
        for block in blocks:
            self._blocks.pop(block).cancel()


# Of the memory of a GPU. The choice of a micro-batch leaves three times as much.
_SHARE = 0.05
_WINDOW = 2**16  # positions whose rows are copied together, 512 kB
_CHUNK = 2**28  # bytes of images that are copied together, through pinned memory


class DeviceStream:
    """The batches of an `ImageStream`, indexed on the device that holds all of its images; to the bit the same.

    RequestError if an image is of no known class.
    """

    def __init__(self, stream: ImageStream, device: torch.device) -> None:
        self._stream, self._device = stream, device
        images = stream.images
        rows = max(1, _CHUNK * len(images) // max(1, images.nbytes))
        some = torch.from_numpy(np.ascontiguousarray(images.pixels[:1]))
        self._pixels = torch.empty((len(images), *some.shape[1:]), dtype=some.dtype, device=device)
        for first in range(0, len(images), rows):
            part = np.ascontiguousarray(images.pixels[first : first + rows])
            self._pixels[first : first + rows] = to_device(torch.from_numpy(part), device)
        # One of several captions is picked on the host, as which one depends on the position.
        several = any(column.kind == TEXT and column.values.ndim > 2 for column in images.columns.values())
        self._conditions = None if several else images.conditions_of(np.arange(len(images))).to(device)
        self._window: tuple[int, Tensor, Tensor] = (-1, torch.zeros(0), torch.zeros(0))

    def batch(self, first: int, size: int) -> Batch:
        """Return the images at positions first … first + size - 1, on the device; their rows on the host."""
        begin, here, there = self._window
        if not 0 <= begin <= first <= first + size <= begin + len(here):
            # Many at once, as each copy is a launch and an allocation of pinned memory.
            begin, here = first, torch.from_numpy(self._stream.index(first, max(size, _WINDOW)))
            self._window = begin, here, (there := to_device(here, self._device))
        rows = there[first - begin : first - begin + size]
        index = here[first - begin : first - begin + size]
        if self._conditions is None:
            conditions = self._stream.conditions(first, index.numpy()).to(self._device)
        else:
            conditions = self._conditions.rows(rows)
        return Batch(first, self._pixels[rows], conditions, index)

    @staticmethod
    def fits(size: int, memory: int) -> bool:
        """Return whether decoded images of so many bytes are kept on a GPU with so much memory."""
        return size <= _SHARE * memory

    @classmethod
    def open(cls, stream: ImageStream, device: torch.device, memory: int) -> ImageStream | DeviceStream:
        """Return the stream on a CUDA device of so many bytes, if its images fit there; else the stream unchanged."""
        decoded = not isinstance(stream.images.pixels, LazyPixels)
        fits = device.type == "cuda" and decoded and cls.fits(stream.images.device_bytes, memory)
        return cls(stream, device) if fits else stream
