"""Forward and backward passes of one step: the gradient of the mean loss over a batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from unfog.diffusion.objective import Loss
from unfog.errors import Interrupted
from unfog.sharded_rng import rows_of, seed_generators, with_own_seed
from unfog.training.batch_reader import BatchReader
from unfog.training.distributed.world import World
from unfog.training.half_weights import HalfWeights
from unfog.training.hooks import Task, TrainingHooks
from unfog.training.precision import gradients
from unfog.training.settings import Training
from unfog.training.sharded_tensors import total_norm
from unfog.training.stability.out_of_memory import microbatch_size
from unfog.training.state import TrainState
from unfog.training.statistics import Stopwatch


class _MicroBatch(NamedTuple):
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


def _local_micro_batches(
    world: World, settings: Training, state: TrainState, rng_size: int
) -> tuple[list[_MicroBatch], int]:
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


def split_batch(first: int, batch: int, rng_size: int, share: range, most: int) -> Iterator[_MicroBatch]:
    """Yield the micro-batches, of `most` images at most, of a rank's positions `share` of a batch.

    The batch has `batch` images from position `first` on. Noise is drawn for `rng_size` images together.
    """
    for rng_first, rng_count in _split_range(first, batch, rng_size):
        start, stop = max(rng_first, share.start), min(rng_first + rng_count, share.stop)
        for place, count in _split_range(start, stop - start, most):
            yield _MicroBatch(place, count, rng_first, rng_count)


def _split_range(first: int, count: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield (first position, count) of consecutive parts of `size` positions; the last may be smaller."""
    for start in range(first, first + count, size):
        yield start, min(size, first + count - start)


def rng_batch_size(settings: Training, state: TrainState) -> int:
    """Return how many images' noise is drawn together: a micro-batch of a single process, or the whole batch."""
    return settings.batch if settings.noise == "batch" else microbatch_size(settings, state)


class Gradient(NamedTuple):
    """Result of a step's forward and backward passes on this rank; the gradient itself is in `.grad`."""

    micro_batches: list[_MicroBatch]
    losses: list[Loss]
    first_square: Tensor | None
    """Squared norm of the gradient of the first micro-batch, 0-d, if there were several; over all ranks if sharded."""


@dataclass(frozen=True)
class GradientComputer:
    """Computes gradients of a task's loss."""

    settings: Training
    state: TrainState
    task: Task
    world: World
    stopwatch: Stopwatch
    network: nn.Module
    """The network as wrapped for data parallelism."""

    @cached_property
    def _reader(self) -> BatchReader:
        return BatchReader(self.task.stream, self.state.precision.device, self.stopwatch)

    @cached_property
    def _half(self) -> HalfWeights | None:
        return HalfWeights.of(self.state.model, self.state.precision) if self.world.size == 1 else None

    @property
    def _step(self) -> int:
        return self.state.seen // self.settings.batch

    def forward(self, batch: _MicroBatch, network: nn.Module) -> Loss:
        """Return the losses of a micro-batch, always the same for the same weights."""
        self.world.set_phase("data", self._step)
        pixels, label = self._reader.read(batch.first, batch.images)
        self.world.set_phase("forward", self._step)
        # By the first image that noise is drawn for, which may be another rank's: a split then changes no number.
        seed_generators(self.settings.seed, batch.rng_first)
        # Noise and augmentation are drawn for the whole rng range, and this micro-batch takes its rows.
        with rows_of(batch.first - batch.rng_first, batch.rng_count) if batch.is_split else nullcontext():
            x0, condition = self.task.augment(pixels)
            called = with_own_seed(network, self.settings.seed, batch.first) if batch.is_split else network
            with self.state.precision.autocast():
                return self.task.loss_function(called, x0, label, condition)

    def compute(self, hooks: TrainingHooks, rng_size: int | None = None) -> Gradient:
        """Leave the gradient of the mean loss over the next batch in the parameters. Interrupted if `hooks` stop it.

        Noise is drawn for `rng_size` images together; None follows from the settings and from memory.
        """
        state, world = self.state, self.world
        rng_size = rng_size or rng_batch_size(self.settings, state)
        batches, own = _local_micro_batches(world, self.settings, state, rng_size)
        losses: list[Loss] = []
        # Made anew in each step, as the weights have moved.
        with nullcontext() if self._half is None else self._half.in_use():
            first_square = self._sum_gradients(hooks, batches, own, losses)
        self._reader.read_ahead(batches[0].first + self.settings.batch, batches[0].images)
        return Gradient(batches, losses, first_square)

    def _sum_gradients(
        self, hooks: TrainingHooks, batches: list[_MicroBatch], own: int, losses: list[Loss]
    ) -> Tensor | None:
        """Add the gradients of all micro-batches, and their losses to `losses`. Returns `Gradient.first_square`."""
        state, world, first_square = self.state, self.world, None
        for batch in batches:
            if hooks.stop_requested():
                raise Interrupted  # half a batch is no loss, as its randomness is a function of the position
            last, counts = len(losses) + 1 == len(batches), len(losses) < own
            with world.accumulate_gradients(self.network, more=not last):
                losses.append(self._forward_backward(batch, last, counts))
            # A single micro-batch gives no second batch size, which the noise scale compares with.
            first = len(losses) == 1 < len(batches)
            if world.shards is not None and (first or last):
                world.shards.reduce_unsharded_gradients(state.model)
            if first:
                # DDP has not averaged this gradient yet, so it is `size` times as long as its share of the mean.
                times = world.size if world.shards is None else 1
                first_square = _squared_gradient_norm(state.optimizer) / times**2
        return first_square

    def _forward_backward(self, batch: _MicroBatch, last: bool, counts: bool) -> Loss:
        world = self.world
        with world.explain_out_of_memory(last=False):
            loss = self.forward(batch, self.network)
        world.set_phase("backward", self._step)
        # Divide by the whole batch, not by this micro-batch: the sum over micro-batches is then the exact mean, also
        # when the last one is smaller. The wrapper divides by the number of ranks, so multiply by it.
        mean = loss.per_image.sum() / self.settings.batch
        with world.explain_out_of_memory(last):
            self.state.precision.backward(mean if world.size == 1 else mean * (float(counts) * world.size))
            if self._half is not None:
                self._half.collect_gradients()
        return loss.detached()  # kept until the log, without its graph


def _squared_gradient_norm(optimizer: torch.optim.Optimizer) -> Tensor:
    """Return the squared norm of the gradients, 0-d, on the device. A collective if they are sharded."""
    return total_norm(gradients(optimizer)).square()
