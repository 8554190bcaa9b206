"""Splitting of a batch into micro-batches, and the random seed of each."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from unfog.training.distributed.world import World
from unfog.training.settings import Training
from unfog.training.stability.out_of_memory import microbatch_size
from unfog.training.state import TrainState

_OWN_SEED = 0x5EED  # distinguishes the seed of a split micro-batch from that of the batch that its noise is drawn for


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
        """Return whether noise is drawn for more images than these."""
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
        place = share.stop if share.stop < end else share.start - 1
        batches += [*split(range(place, place + 1))] * (needed - own)
    return batches, own


def split_batch(first: int, batch: int, rng_size: int, share: range, most: int) -> Iterator[MicroBatch]:
    """Yield the micro-batches of the positions `share` of a batch, with at most `most` images each.

    Args:
        first: position of the batch's first image.
        batch: images of the batch.
        rng_size: images whose noise is drawn together.
        share: positions of this rank.
        most: images of a micro-batch.
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
    """Return the images whose noise is drawn together: a micro-batch of a single process, or the whole batch."""
    return settings.batch if settings.noise == "batch" else microbatch_size(settings, state)


def seed_generators(seed: int, position: int) -> None:
    """Seed every generator from a position in the stream, so that randomness needs no saved state."""
    # SplitMix64's finaliser keeps neighbouring positions from giving related seeds (Steele et al. 2014).
    z = (seed * 0xD1342543DE82EF95 + (position + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    z = (z ^ (z >> 31)) % 2**63
    if _has_accelerator():
        torch.manual_seed(z)
    else:  # torch.manual_seed would keep the seed, and a stack trace with it, for accelerators that may turn up later
        torch.default_generator.manual_seed(z)


@cache
def _has_accelerator() -> bool:
    return torch.accelerator.is_available()


def with_own_seed(network: nn.Module, seed: int, first: int) -> nn.Module:
    """Wrap a network so that its dropout gets a seed of this micro-batch's own.

    Dropout cannot be drawn for more images than go through the network, and with a common seed all parts of a split
    batch would drop the same.
    """

    def call(*inputs: Tensor | None) -> Any:
        seed_generators(seed ^ _OWN_SEED, first)
        return network(*inputs)

    return cast(nn.Module, call)
