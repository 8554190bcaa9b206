"""Decode the images of the next positions while a step computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unfog.data.lazy import LazyPixels, PendingDecode

_BLOCK = 16  # positions that are decoded as one piece of work
_BYTES = 256 * 2**20
_LEAST, _BATCHES = 256, 8
"""How far ahead is read: so many positions, and so many batches, as far as _BYTES go; always a batch."""


class ReadOrder(NamedTuple):
    """Which positions the reader will ask for: in each `batch` of them from `first` on, the `share` behind `begin`.

    They are counted in turns: turn 0 is position first + begin. As it is, all positions are.
    """

    first: int = 0
    batch: int = 1
    begin: int = 0
    share: int = 1

    def positions(self, turn: int, size: int) -> NDArray[np.int64]:
        """The positions of these turns, int64 [size]."""
        batch, place = np.divmod(np.arange(turn, turn + size, dtype=np.int64), self.share)
        return self.first + batch * self.batch + self.begin + place

    def turn(self, position: int, size: int) -> int | None:
        """The turn of the first of so many consecutive positions; None unless all of them will be asked for."""
        batch, place = divmod(position - self.first, self.batch)
        place -= self.begin
        whole = self.share == self.batch or place + size <= self.share
        return batch * self.share + place if batch >= 0 and place >= 0 and whole else None


class Prefetcher:
    """Images by position, each the same as if it were decoded when asked for.

    Positions are worked on in blocks, so that batches of any size find what they need. It reads ahead of whoever
    reads on where the last call ended; anybody else gets what they ask for, and nothing changes for the former.

    Args:
        pixels: what to read from.
        index: positions [count] -> rows of `pixels`, int64 [count].
    """

    def __init__(self, pixels: LazyPixels, index: Callable[[NDArray[np.int64]], NDArray[np.int64]]) -> None:
        self._pixels, self._index, self._course = pixels, index, ReadOrder()
        self._blocks: dict[int, PendingDecode] = {}  # by their first turn
        self._next = self._last = -1  # the turn with which the reader goes on, or the last call of any other ended

    def follow(self, course: ReadOrder) -> None:
        """Read ahead of whoever begins on this course, and only of what is on it."""
        self._drop(list(self._blocks))
        self._course, self._next, self._last = course, 0, -1

    def read(self, first: int, size: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """The images at positions first … first + size - 1, uint8 [size, C, H, W], and the rows that they are [size].

        Raises:
            RunError: they cannot be decoded; images of later positions raise nothing yet.
        """
        turn = self._course.turn(first, size)
        if turn is None:
            return self._at_once(first, size)
        end = turn + size
        if turn not in (self._next, self._last):
            self._last = end
            return self._at_once(first, size)
        self._next, self._last = end, -1
        start = turn - turn % _BLOCK
        self._look_ahead(start, end + self._reach(size))
        try:
            parts = [self._blocks[block].result() for block in range(start, end, _BLOCK)]
        except Exception:  # of one of these, or of their neighbours in a block, which are nobody's business yet
            self._drop([block for block in self._blocks if block < end])
            return self._at_once(first, size)
        for block in [block for block in self._blocks if block + _BLOCK <= end]:
            del self._blocks[block]
        pixels, rows = (np.concatenate(some)[turn - start : end - start] for some in zip(*parts))
        return pixels, rows

    def close(self) -> None:
        """Decode nothing more."""
        self._drop(list(self._blocks))
        self._pixels.close()

    def _at_once(self, first: int, size: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        return self._pixels.taken(self._index(np.arange(first, first + size, dtype=np.int64)))

    def _reach(self, size: int) -> int:
        """How many positions behind a batch are worked on."""
        fit = _BYTES // int(np.prod(self._pixels.shape[1:]))
        return max(size, min(fit, max(_LEAST, _BATCHES * size)))

    def _look_ahead(self, start: int, end: int) -> None:
        """Have the blocks from `start` to that of `end` in work, and no others."""
        wanted = range(start, end, _BLOCK)
        self._drop([block for block in self._blocks if block not in wanted])
        for block in wanted:
            if block not in self._blocks:
                self._blocks[block] = self._pixels.start(self._index(self._course.positions(block, _BLOCK)))

    def _drop(self, blocks: list[int]) -> None:
        for block in blocks:
            self._blocks.pop(block).cancel()
