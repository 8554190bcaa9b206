"""The endless stream of batches from buckets: each batch is of one bucket, and a function of its position.

The bucket of a step is a function of the step and the seed, in proportion to the images of the buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from unfog.data.buckets.joined_set import Rows
from unfog.data.dataset import ImageSet
from unfog.data.permutation import epoch_keys, permute
from unfog.data.stream import Batch, DeviceStream, ImageStream
from unfog.errors import RequestError

# Seeds of the order of buckets differ from those of the order of images by this.
_SEED = 0xB0C4E7
_USUAL_ROUND = 256  # steps: enough for any order, and quickly computed


class BucketStream:
    """Images by position. Those of step k, at positions batch * k … batch * (k + 1) - 1, are of one bucket.

    The `BucketSchedule` gives the bucket of each step. Within a bucket, images come in the order of an `ImageStream`,
    whose position is the batch times the number of earlier steps of the bucket. Rows of batches count through the sets
    of all buckets.

    Args:
        sets: training images of each bucket; a bucket without any has no steps.
        batch: images of a step.
        seed: of both orders.

    RequestError if all sets are empty.
    """

    def __init__(self, sets: Sequence[ImageSet], batch: int, seed: int) -> None:
        counts = [len(images) for images in sets]
        if not any(counts):
            raise RequestError("no images are left to train on; lower held_out or add images")
        self._schedule, self._batch, self._rows = BucketSchedule(counts, batch, seed), batch, Rows(tuple(counts))
        self._streams: list[ImageStream | DeviceStream | None] = [
            ImageStream(images, seed) if len(images) else None for images in sets
        ]

    def batch(self, first: int, size: int) -> Batch:
        """Return the images at positions first … first + size - 1.

        Raises as `ImageStream.batch`, and ValueError if they are of several steps.
        """
        step, place = divmod(first, self._batch)
        if place + size > self._batch:
            raise ValueError(f"positions {first} to {first + size} are of several steps of {self._batch}")
        turn = self._schedule.turn(step)
        stream = self._streams[turn.bucket]
        assert stream is not None  # the schedule gives no turn to a bucket without images
        batch = stream.batch(turn.earlier * self._batch + place, size)
        return replace(batch, first=first, index=batch.index + self._rows.starts[turn.bucket])

    def prefetch_share(self, begin: int, count: int, batch: int, first: int = 0) -> None:
        """Prefetch only the share of a rank; arguments as those of `ImageStream`, with the batch of this stream."""
        if batch != self._batch or first % batch:
            raise ValueError(f"a stream of batches of {self._batch} cannot prefetch those of {batch} from {first} on")
        for stream, earlier in zip(self._streams, self._schedule.steps_before(first // batch)):
            if isinstance(stream, ImageStream):
                stream.prefetch_share(begin, count, batch, earlier * batch)

    def close(self) -> None:
        """End the threads that prefetch, if any."""
        for stream in self._streams:
            if isinstance(stream, ImageStream):
                stream.close()

    def on_device(self, device: torch.device, memory: int) -> BucketStream:
        """Return the stream with all images kept on a CUDA device of so many bytes, if they fit; else this one."""
        streams = [stream for stream in self._streams if isinstance(stream, ImageStream)]
        if DeviceStream.fits(sum(stream.images.device_bytes for stream in streams), memory):
            kept = copy(self)
            kept._streams = [
                DeviceStream.open(stream, device, memory) if isinstance(stream, ImageStream) else stream
                for stream in self._streams
            ]
            return kept
        return self


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
