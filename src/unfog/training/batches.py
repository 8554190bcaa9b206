"""Batches of a step: which images pass through the network together, on which rank, and their reading."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from unfog.device.copies import to_device
from unfog.errors import Interrupted
from unfog.training.distributed.world import World
from unfog.training.hooks import Stream
from unfog.training.settings import Training
from unfog.training.stability.out_of_memory import microbatch_size
from unfog.training.state import TrainState
from unfog.training.statistics import Stopwatch
from unfog.values.conditions import Conditions


class MicroBatch(NamedTuple):
    """Positions of images that go through the network together.

    Their noise is drawn together with that of the images rng_first … rng_first + rng_count - 1, so that it does not
    depend on how a batch is split.
    """

    first: int
    images: int
    rng_first: int
    rng_count: int

    @property
    def is_split(self) -> bool:
        return self.images != self.rng_count


def local_micro_batches(
    world: World, settings: Training, state: TrainState, rng_size: int
) -> tuple[list[MicroBatch], int]:
    """Return this rank's micro-batches of the next batch, and how many of them, from the first on, count.

    A rank needs at least one, and of a sharded network as many as every other rank, because each forward pass is a
    collective. Missing ones are filled up with an image of another rank, whose loss does not count.
    """
    split = partial(split_batch, state.seen, settings.batch, rng_size, most=microbatch_size(settings, state))
    share, needed = world.batch_range(state.seen, settings.batch), 1
    batches = list(split(share))
    if world.shards is not None:
        shares = (world.batch_range(state.seen, settings.batch, rank) for rank in range(world.size))
        needed = max(len(list(split(each))) for each in shares)
    own, end = len(batches), state.seen + settings.batch
    if own < needed:
        # Any image will do, as its loss does not count; this one lies beside the rank's own.
        place = share.stop if share.stop < end else share.start - 1
        batches += [*split(range(place, place + 1))] * (needed - own)
    return batches, own


def split_batch(first: int, batch: int, rng_size: int, share: range, most: int) -> Iterator[MicroBatch]:
    """Yield the micro-batches, of `most` images at most, of a rank's positions `share` of a batch.

    The batch has `batch` images from position `first` on. Noise is drawn for `rng_size` images together.
    """
    for rng_first, rng_count in split_range(first, batch, rng_size):
        start, stop = max(rng_first, share.start), min(rng_first + rng_count, share.stop)
        for place, count in split_range(start, stop - start, most):
            yield MicroBatch(place, count, rng_first, rng_count)


def split_range(first: int, count: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield (first position, count) of consecutive parts of `size` positions; the last may be smaller."""
    for start in range(first, first + count, size):
        yield start, min(size, first + count - start)


def rng_batch_size(settings: Training, state: TrainState) -> int:
    """Return how many images' noise is drawn together: a micro-batch of a single process, or the whole batch."""
    return settings.batch if settings.noise == "batch" else microbatch_size(settings, state)


class BatchReader:
    """Reads images at positions of a stream, uint8 [B, C, H, W] or latents, and their conditions."""

    def __init__(self, stream: Stream, device: torch.device, stopwatch: Stopwatch):
        self._stream, self._device, self._stopwatch = stream, device, stopwatch
        self._ahead: dict[tuple[int, int], tuple[Tensor, Conditions]] = {}  # by position and count; one at most
        self._read: tuple[Tensor, Conditions] | None = None  # the last images, for their format
        self.abandoned = False
        """True once the images of a batch were abandoned: see `abandon`."""

    def read(self, first: int, count: int) -> tuple[Tensor, Conditions]:
        """Return images and conditions at positions from `first` on, on the device; zeros once `abandoned`."""
        if self.abandoned and self._read is not None:
            pixels, conditions = self._read
            return _zeros(pixels, count), conditions.apply(lambda each: _zeros(each, count))
        if (first, count) in self._ahead:
            return self._ahead.pop((first, count))
        with self._stopwatch.waiting_for_data():
            images = self._stream.batch(first, count)
        self._read = to_device(images.pixels, self._device), images.conditions.to(self._device)
        return self._read

    def abandon(self, first: int, count: int) -> tuple[Tensor, Conditions]:
        """Return zeros in place of images that are not waited for any longer, here and from now on.

        The other ranks wait for this one in the step, which none of them takes then. Interrupted before the first
        images, whose format is not known: nothing is trained by then.
        """
        if self._read is None:
            raise Interrupted
        self.abandoned = True
        return self.read(first, count)

    def read_ahead(self, first: int, count: int) -> None:
        """Read and copy images of the next step on a GPU, before the host waits for this one."""
        self._ahead.clear()
        if self._device.type == "cuda":
            # What cannot be read is reported once it is needed: the run may end before.
            with suppress(Exception, Interrupted):
                self._ahead[first, count] = self.read(first, count)


def _zeros(tensor: Tensor, count: int) -> Tensor:
    """Return zeros in the format of a batch, of so many images."""
    return tensor.new_zeros(count, *tensor.shape[1:])
