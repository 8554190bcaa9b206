"""The bucket of each step: a function of the step and the seed, in proportion to the images of the buckets."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unfog.data.permutation import epoch_keys, permute

# Seeds of the order of buckets differ from those of the order of images by this.
_SEED = 0xB0C4E7
_USUAL_ROUND = 256  # steps: enough for any order, and quickly computed


class Turn(NamedTuple):
    """The bucket of a step, and how many steps before it had the same bucket."""

    bucket: int
    earlier: int


class BucketSchedule:
    """Steps of a batch from one bucket each.

    Steps come in rounds. By the end of each round, every bucket has had its share of all steps so far, rounded: the
    rest is carried over, so that shares are exact in the long run. Within a round the order is a seeded permutation.

    Args:
        counts: images of each bucket; one without images has no steps.
        batch: images of a step.
        seed: of the order.

    ValueError if no bucket has images.
    """

    def __init__(self, counts: Sequence[int], batch: int, seed: int) -> None:
        if not any(counts):
            raise ValueError("no bucket has images")
        self._cumulative = list(accumulate(counts))
        self._seed = seed ^ _SEED
        n = self._cumulative[-1]
        # An epoch at most, unless that would leave a bucket without a step in some rounds: then the counts of a round
        # could be negative.
        fewest = min(count for count in counts if count)
        self.round = max(min(-(-n // batch), _USUAL_ROUND), -(-n // fewest))
        self._order = lru_cache(maxsize=4)(self._order_of_round)

    def turn(self, step: int) -> Turn:
        """Return the turn of a step 0, 1, … Any step takes the same time."""
        number, place = divmod(step, self.round)
        bucket, within = self._order(number)
        own = int(bucket[place])
        return Turn(own, self._before(number)[own] + int(within[place]))

    def steps_before(self, step: int) -> list[int]:
        """Return how many of the steps before this one each bucket had."""
        number, place = divmod(step, self.round)
        before = self._before(number)
        within = np.bincount(self._order(number)[0][:place], minlength=len(before))
        return [a + int(b) for a, b in zip(before, within)]

    def _before(self, number: int) -> list[int]:
        """Return the steps of each bucket before a round: differences of rounded cumulative shares."""
        n, steps = self._cumulative[-1], number * self.round
        ends = [0, *((2 * steps * part + n) // (2 * n) for part in self._cumulative)]  # in whole numbers: exact
        return [b - a for a, b in pairwise(ends)]

    def _order_of_round(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (bucket of each step of a round, earlier steps of the round with the same bucket)."""
        counts = np.array(self._before(number + 1)) - np.array(self._before(number))
        places = permute(np.arange(self.round), self.round, epoch_keys(self._seed, np.array([number])))
        bucket = np.repeat(np.arange(len(counts)), counts)[places]
        within = np.zeros(self.round, np.int64)
        for one in range(len(counts)):
            own = bucket == one
            within[own] = np.arange(own.sum())
        return bucket, within
