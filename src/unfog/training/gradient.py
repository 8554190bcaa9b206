"""Forward and backward passes of one step: the gradient of the mean loss over a batch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from unfog.device.sharded_rng import rows_of, seed_generators, with_own_seed
from unfog.diffusion.objective import Loss
from unfog.errors import Interrupted
from unfog.training.batches import BatchReader, MicroBatch, local_micro_batches, rng_batch_size
from unfog.training.distributed.world import World
from unfog.training.gradient_clipping import gradients
from unfog.training.hooks import Task, TrainingHooks, augmented
from unfog.training.precision import HalfWeights
from unfog.training.settings import Training
from unfog.training.sharded_tensors import total_norm
from unfog.training.state import TrainState
from unfog.training.statistics import Stopwatch
from unfog.values.conditions import Conditions


class Gradient(NamedTuple):
    """Result of a step's forward and backward passes on this rank; the gradient itself is in `.grad`."""

    micro_batches: list[MicroBatch]
    losses: list[Loss]
    first_square: Tensor | None
    """Squared norm of the gradient of the first micro-batch, 0-d, if there were several; over all ranks if sharded."""
    replay: Callable[[], tuple[list[Loss], Tensor]] | None = None
    """Run a captured step, gradient and update together; None if the gradient is computed already."""
    abandoned: bool = False
    """True if this rank stopped while it waited for images, so that no rank may take the step."""


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
    def reader(self) -> BatchReader:
        return BatchReader(self.task.stream, self.state.precision.device, self.stopwatch)

    @cached_property
    def _half(self) -> HalfWeights | None:
        return HalfWeights.of(self.state.model, self.state.precision) if self.world.size == 1 else None

    @property
    def _step(self) -> int:
        return self.state.seen // self.settings.batch

    def forward(self, batch: MicroBatch, network: nn.Module) -> Loss:
        """Return the losses of a micro-batch, always the same for the same weights."""
        self.world.set_phase("data", self._step)
        try:
            pixels, conditions = self.reader.read(batch.first, batch.images)
        except Interrupted:  # while the images could not be reached
            if self.world.size == 1:
                raise
            pixels, conditions = self.reader.abandon(batch.first, batch.images)
        self.world.set_phase("forward", self._step)
        # By the first image that noise is drawn for, which may be another rank's: a split then changes no number.
        seed_generators(self.settings.seed, batch.rng_first)
        # Noise and augmentation are drawn for the whole rng range, and this micro-batch takes its rows.
        with rows_of(batch.first - batch.rng_first, batch.rng_count) if batch.is_split else nullcontext():
            called = with_own_seed(network, self.settings.seed, batch.first) if batch.is_split else network
            return self._loss(called, pixels, conditions)

    def _loss(self, network: nn.Module, pixels: Tensor, conditions: Conditions) -> Loss:
        x0, conditions = augmented(self.task.augment, pixels, conditions)
        with self.state.precision.autocast():
            return self.task.loss_function(network, x0, conditions)

    def compute(self, hooks: TrainingHooks, rng_size: int | None = None) -> Gradient:
        """Leave the gradient of the mean loss over the next batch in the parameters. Interrupted if `hooks` stop it.

        Noise is drawn for `rng_size` images together; None follows from the settings and from memory.
        """
        state, world = self.state, self.world
        rng_size = rng_size or rng_batch_size(self.settings, state)
        batches, own = local_micro_batches(world, self.settings, state, rng_size)
        losses: list[Loss] = []
        # Made anew in each step, as the weights have moved.
        with nullcontext() if self._half is None else self._half.in_use():
            first_square = self._sum_gradients(hooks, batches, own, losses)
        self.reader.read_ahead(batches[0].first + self.settings.batch, batches[0].images)
        return Gradient(batches, losses, first_square, abandoned=self.reader.abandoned)

    def read_whole_batch(self) -> tuple[Tensor, Conditions]:
        """Return the images and conditions of the next batch for `compute_whole_batch`, with the generators seeded."""
        pixels, conditions = self.reader.read(self.state.seen, self.settings.batch)
        seed_generators(self.settings.seed, self.state.seen)
        return pixels, conditions

    def compute_whole_batch(self, pixels: Tensor, conditions: Conditions) -> Gradient:
        """Leave the gradient of a batch that is one micro-batch in the parameters, by work on the device alone."""
        batch = MicroBatch(self.state.seen, self.settings.batch, self.state.seen, self.settings.batch)
        with nullcontext() if self._half is None else self._half.in_use():
            loss = self._backward(self._loss(self.network, pixels, conditions), last=True, counts=True)
        return Gradient([batch], [loss], None)

    def _sum_gradients(
        self, hooks: TrainingHooks, batches: list[MicroBatch], own: int, losses: list[Loss]
    ) -> Tensor | None:
        """Add the gradients of all micro-batches, and their losses to `losses`. Returns `Gradient.first_square`."""
        state, world, first_square = self.state, self.world, None
        for batch in batches:
            if hooks.stop_requested():
                raise Interrupted  # half a batch is not a loss, as its randomness is a function of the position
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

    def _forward_backward(self, batch: MicroBatch, last: bool, counts: bool) -> Loss:
        with self.world.explain_out_of_memory(last=False):
            loss = self.forward(batch, self.network)
        self.world.set_phase("backward", self._step)
        return self._backward(loss, last, counts)

    def _backward(self, loss: Loss, last: bool, counts: bool) -> Loss:
        world = self.world
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
