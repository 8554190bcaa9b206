"""One step's forward and backward passes: which images go through the network together, and by which random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from unfog.diffusion.objective import Loss
from unfog.errors import Interrupted
from unfog.training.distributed.world import World
from unfog.training.hooks import Run
from unfog.training.noise_scale import squared_gradient_norm
from unfog.training.settings import Training
from unfog.training.stability.out_of_memory import microbatch_size
from unfog.training.state import TrainState

_OWN_SEED = 0x5EED
"""What the seed of a part differs by from that of what it was drawn with."""


class MicroBatch(NamedTuple):
    """Images that go through the network at once, and those that their randomness is drawn with."""

    first: int
    images: int
    rng_first: int
    rng_count: int

    @property
    def is_split(self) -> bool:
        """Whether it is only a part of what is drawn together."""
        return self.images != self.rng_count


def compute_gradient(
    forward: Callable[[MicroBatch, nn.Module], Loss],
    network: nn.Module,
    world: World,
    drawn: int | None,
    settings: Training,
    state: TrainState,
    run: Run,
) -> tuple[list[MicroBatch], list[Loss], Tensor | None]:
    """Leave the gradient of the mean loss over the next batch in the parameters.

    Args:
        network: the one of `state`, as `World.wrapped` gives it.
        drawn: images whose randomness is drawn together; None as settings and memory say.

    Returns:
        What went through the network here, the losses of each pass, and where there were several the squared norm of
        the first one's gradient, a 0-d tensor, for the noise scale: of the first pass here, or of all processes where
        they divide the network.
    """
    drawn = drawn or rng_batch_size(settings, state)
    passes, own = _local_micro_batches(world, settings, state, drawn)
    losses: list[Loss] = []
    part_square = None
    for one in passes:
        if run.stop_requested():
            raise Interrupted  # half a batch is no loss: its randomness is a function of the position
        last, weight = len(losses) + 1 == len(passes), float(len(losses) < own)
        with world.accumulate_gradients(network, more=not last):
            with world.explain_out_of_memory(last=False):
                loss = forward(one, network)
            world.set_phase("backward", state.seen // settings.batch)
            # Divide by the whole batch, not by this micro-batch: the sum of the passes is then the exact mean, also
            # when the last pass is smaller. The wrapper divides by the number of processes, so multiply by it.
            mean = loss.per_image.sum() / settings.batch
            with world.explain_out_of_memory(last):
                state.precision.backward(mean if world.size == 1 else mean * (weight * world.size))
        losses.append(loss.detached())
        first = len(losses) == 1 < len(passes)
        if world.shards is not None and (first or last):
            world.shards.reduce_unsharded_gradients(state.model)
        if first:
            # Where it has not been averaged yet, it is as many times as long as there are processes.
            times = world.size if world.shards is None else 1
            part_square = squared_gradient_norm(state.optimizer) / times**2
    return passes, losses, part_square


def _local_micro_batches(
    world: World, settings: Training, state: TrainState, drawn: int
) -> tuple[list[MicroBatch], int]:
    """The passes of this process over the next batch, and how many of them, from the first on, count.

    Whoever has fewer than are needed, as there are more processes than images, or as all have to take part in each
    pass of a divided network, takes part without adding anything, with an image of another's share.
    """
    of = partial(split_batch, state.seen, settings.batch, drawn, most=microbatch_size(settings, state))
    share, needed = world.batch_range(state.seen, settings.batch), 1
    passes = list(of(share))
    if world.shards is not None:
        shares = (world.batch_range(state.seen, settings.batch, rank) for rank in range(world.size))
        needed = max(len(list(of(each))) for each in shares)
    own, end = len(passes), state.seen + settings.batch
    if own < needed:
        place = share.stop if share.stop < end else share.start - 1
        passes += [*of(range(place, place + 1))] * (needed - own)
    return passes, own


def split_batch(first: int, batch: int, drawn: int, share: range, most: int) -> Iterator[MicroBatch]:
    """The passes over the positions `share` of a batch that is drawn for `drawn` images at once, `most` at a time."""
    for drawn_first, drawn_count in split_range(first, batch, drawn):
        start, stop = max(drawn_first, share.start), min(drawn_first + drawn_count, share.stop)
        for place, count in split_range(start, stop - start, most):
            yield MicroBatch(place, count, drawn_first, drawn_count)


def split_range(first: int, batch: int, microbatch: int) -> Iterator[tuple[int, int]]:
    """(first position, count) of each pass over one batch; the last may be smaller."""
    for start in range(first, first + batch, microbatch):
        yield start, min(microbatch, first + batch - start)


def rng_batch_size(settings: Training, state: TrainState) -> int:
    """Images whose randomness is drawn together: those of a micro-batch of one process, or the whole batch."""
    return settings.batch if settings.noise == "batch" else microbatch_size(settings, state)


def seed_generators(seed: int, position: int) -> None:
    """Seed every generator from a position in the stream, so that randomness needs no saved state.

    SplitMix64's finaliser keeps neighbouring positions from giving related seeds (Steele et al. 2014).
    """
    z = (seed * 0xD1342543DE82EF95 + (position + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    z = (z ^ (z >> 31)) % 2**63
    if _accelerated():
        torch.manual_seed(z)
    else:  # torch would keep the seed, and a trace of the stack with it, for accelerators that may turn up later
        torch.default_generator.manual_seed(z)


@cache
def _accelerated() -> bool:
    """Whether there are other generators than the CPU's."""
    return torch.accelerator.is_available()


def with_own_seed(network: nn.Module, seed: int, first: int) -> nn.Module:
    """The network with randomness of its own (dropout), for a part of what is drawn together.

    As a part cannot be had of what it draws, and parts that began alike would all draw the same.
    """

    def call(*inputs: Tensor | None) -> Any:
        seed_generators(seed ^ _OWN_SEED, first)
        return network(*inputs)

    return cast(nn.Module, call)
