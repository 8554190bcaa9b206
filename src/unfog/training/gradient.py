"""Forward and backward passes of one step: the gradient of the mean loss over a batch."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from unfog.diffusion.objective import Loss
from unfog.errors import Interrupted
from unfog.sharded_rng import rows_of
from unfog.training.distributed.world import World
from unfog.training.hooks import Task, TrainingHooks
from unfog.training.log_window import Stopwatch
from unfog.training.micro_batches import MicroBatch, local_micro_batches, rng_batch_size, seed_generators, with_own_seed
from unfog.training.noise_scale import squared_gradient_norm
from unfog.training.precision import to_device
from unfog.training.settings import Training
from unfog.training.state import TrainState


class Gradient(NamedTuple):
    """Result of a step's forward and backward passes on this rank; the gradient itself is in `.grad`."""

    micro_batches: list[MicroBatch]
    losses: list[Loss]
    first_square: Tensor | None
    """Squared norm of the gradient of the first micro-batch, 0-d, if there were several; of those of all ranks where
    the network is sharded. For the gradient noise scale."""


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

    @property
    def _step(self) -> int:
        return self.state.seen // self.settings.batch

    def forward(self, batch: MicroBatch, network: nn.Module) -> Loss:
        """Return the losses of a micro-batch, always the same for the same weights."""
        self.world.set_phase("data", self._step)
        with self.stopwatch.waiting_for_data():
            images = self.task.stream.batch(batch.first, batch.images)
        device = self.state.precision.device
        pixels = to_device(images.pixels, device)
        label = None if images.label is None else to_device(images.label, device)
        self.world.set_phase("forward", self._step)
        seed_generators(self.settings.seed, batch.rng_first)
        # Noise and augmentation are drawn for the whole rng range, and this micro-batch takes its rows.
        with rows_of(batch.first - batch.rng_first, batch.rng_count) if batch.is_split else nullcontext():
            x0, condition = self.task.augment(pixels)
            called = with_own_seed(network, self.settings.seed, batch.first) if batch.is_split else network
            with self.state.precision.autocast():
                return self.task.loss_function(called, x0, label, condition)

    def compute(self, hooks: TrainingHooks, rng_size: int | None = None) -> Gradient:
        """Leave the gradient of the mean loss over the next batch in the parameters.

        Args:
            hooks: may request a stop.
            rng_size: images whose noise is drawn together; None follows from the settings and from memory.

        Raises:
            Interrupted: a stop was requested. Half a batch is no loss: its randomness is a function of the position.
        """
        state, world = self.state, self.world
        batches, own = local_micro_batches(
            world, self.settings, state, rng_size or rng_batch_size(self.settings, state)
        )
        losses: list[Loss] = []
        first_square = None
        for batch in batches:
            if hooks.stop_requested():
                raise Interrupted
            last, counts = len(losses) + 1 == len(batches), len(losses) < own
            with world.accumulate_gradients(self.network, more=not last):
                losses.append(self._forward_backward(batch, last, counts))
            first = len(losses) == 1 < len(batches)
            if world.shards is not None and (first or last):
                world.shards.reduce_unsharded_gradients(state.model)
            if first:
                # DDP has not averaged this gradient yet, so it is `size` times as long as its share of the mean.
                times = world.size if world.shards is None else 1
                first_square = squared_gradient_norm(state.optimizer) / times**2
        return Gradient(batches, losses, first_square)

    def _forward_backward(self, batch: MicroBatch, last: bool, counts: bool) -> Loss:
        world = self.world
        with world.explain_out_of_memory(last=False):
            loss = self.forward(batch, self.network)
        world.set_phase("backward", self._step)
        # Divide by the whole batch, not by this micro-batch: the sum over micro-batches is then the exact mean, also
        # when the last one is smaller. The wrapper divides by the number of ranks, so multiply by it.
        mean = loss.per_image.sum() / self.settings.batch
        with world.explain_out_of_memory(last):
            self.state.precision.backward(mean if world.size == 1 else mean * (float(counts) * world.size))
        return loss.detached()
