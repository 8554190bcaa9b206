"""Micro-batches: which images of a batch pass through the network together, and on which rank."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from unfog.training.distributed.world import World
from unfog.training.settings import Training
from unfog.training.stability.out_of_memory import microbatch_size
from unfog.training.state import TrainState


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
