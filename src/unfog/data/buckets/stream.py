"""The endless stream of batches from buckets: each batch is of one bucket, and a function of its position."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace

import torch

from unfog.data.buckets.schedule import BucketSchedule
from unfog.data.buckets.view import Rows
from unfog.data.dataset import ImageSet
from unfog.data.stream import Batch, DeviceStream, ImageStream
from unfog.errors import RequestError


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
        if DeviceStream.fits(sum(stream.images.nbytes for stream in streams), memory):
            kept = copy(self)
            kept._streams = [
                DeviceStream.open(stream, device, memory) if isinstance(stream, ImageStream) else stream
                for stream in self._streams
            ]
            return kept
        return self
