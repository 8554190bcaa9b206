"""Coordination of ranks: rank 0 writes files and logs; decisions are all-reduced so that every rank takes the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from unfog.device.copies import to_device
from unfog.diffusion.objective import Loss
from unfog.errors import Interrupted
from unfog.training.checkpoints.load import roll_back
from unfog.training.distributed.world import World
from unfog.training.gradient import Gradient
from unfog.training.gradient_clipping import clip_factor
from unfog.training.hooks import TrainingHooks
from unfog.training.length import LengthPlan
from unfog.training.settings import Training
from unfog.training.stability.nan_debug import NanReport
from unfog.training.state import TrainState

T = TypeVar("T")


class _RankStatus(NamedTuple):
    """Numbers that each rank contributes to a step's decisions, all-reduced with the losses."""

    norm: float
    """Of the gradient of the whole batch, which should be the same on every rank."""
    first_square: float
    """Squared norm of the gradient of the rank's first micro-batch, if there were several."""
    first_images: float
    """Images of that micro-batch; 0 if there was only one."""
    stop: float
    save: float
    preview: float
    plan: float
    microbatch: float
    """Images of a forward pass if memory did not suffice for more; else 0."""
    abandoned: float = 0.0
    """Of the step: see `Gradient`."""


class StepResult(NamedTuple):
    """Loss and gradient norm of a step; the same on every rank."""

    losses: list[Loss]
    norm: Tensor
    """Of the gradient, 0-d, on the device."""
    norm_value: float
    relative_loss: float
    """Loss over the null loss: that of answering 0 at the same noise levels."""
    first_images: int
    """Images of the first micro-batch, over all ranks that count."""
    first_square: Tensor | None
    """Squared norm of its gradient, for the noise scale; None with a single micro-batch."""
    scale: float
    """Loss scale of the gradient; 1 except in fp16."""

    @classmethod
    def of(
        cls,
        losses: list[Loss],
        read: tuple[float, float, float],
        norm: Tensor,
        first_images: int,
        first_square: Tensor | None,
        scale: float = 1.0,
    ) -> StepResult:
        """Return the result of a step of which the host has `read` norm, loss and null loss."""
        norm_value, loss, null_loss = read
        relative = loss / max(null_loss, 1e-30)  # 0 / 0 if all weights of a small batch are 0
        return cls(losses, norm, norm_value, relative, first_images, first_square, scale)

    @property
    def outcome(self) -> Literal["accepted", "skipped", "overflow"]:
        """Decision on the step. An overflow of fp16 is not accepted either, but nothing is wrong with the network."""
        if math.isfinite(self.norm_value) and math.isfinite(self.relative_loss):
            return "accepted"
        # A loss scale that can still fall may be all that made the gradient infinite.
        return "overflow" if math.isfinite(self.relative_loss) and self.scale > 1 else "skipped"


def reduce_step(
    settings: Training, state: TrainState, gradient: Gradient, hooks: TrainingHooks, world: World
) -> StepResult:
    """Unscale the gradient, and read its norm and the loss from the device, reduced over all ranks."""
    norm = state.precision.gradient_norm(state.optimizer)
    losses, first_images, first_square = gradient.losses, gradient.micro_batches[0].images, gradient.first_square
    scale = state.precision.scale_tensors()
    # Each path reads all its numbers at once, because reading makes the host wait for the device.
    if isinstance(hooks, CoordinatedHooks):
        losses, norm, statuses = hooks.all_reduce_step(settings, state, gradient, norm)
        numbers = torch.cat([torch.stack([norm, *sum_losses(losses), *scale]), statuses.flatten()])
        norm_value, loss, null_loss, *values = numbers.tolist()
        first_images, first_square = hooks.apply_statuses(values[len(scale) :], statuses, state)
    else:
        norm_value, loss, null_loss, *values = torch.stack([norm, *sum_losses(losses), *scale]).tolist()
    read, scale_value = (norm_value, loss, null_loss), values[0] if scale else 1.0
    return StepResult.of(losses, read, norm, first_images, first_square, scale_value)


def judge(
    halted: Tensor, norm: Tensor, losses: list[Loss], scale: list[Tensor], clip: float
) -> tuple[Tensor, Tensor | None]:
    """Set `halted` to 1 if a step with this gradient must not be taken. Returns its numbers, and `clip_factor`."""
    numbers = torch.stack([norm, *sum_losses(losses), *scale])
    halted.copy_(torch.maximum(halted, _is_bad(numbers)))
    return numbers, clip_factor(clip, norm)


def _is_bad(numbers: Tensor) -> Tensor:
    """Return 1.0, 0-d, unless norm and relative loss are finite, by the arithmetic of `StepResult.of`; else 0.0."""
    norm, loss, null_loss = numbers[:3].double().unbind()
    finite = norm.isfinite() & (loss / null_loss.clamp(min=1e-30)).isfinite()
    return 1 - finite.float()


class CoordinatedHooks(TrainingHooks):
    """The hooks of one rank, coordinated with those of the others.

    A signal that reaches one rank counts for all, at the end of the step. Until then it interrupts nothing, as the
    other ranks would wait forever in a collective. Only what rank 0 does alone can be interrupted.
    """

    def __init__(self, hooks: TrainingHooks, world: World):
        self.hooks, self.world = hooks, world
        self.stopping = self.saving = self.previewing = self.planning = False

    def all_reduce_step(
        self, settings: Training, state: TrainState, gradient: Gradient, norm: Tensor
    ) -> tuple[list[Loss], Tensor, Tensor]:
        """Return the losses of the whole batch, the norm of its gradient, and each rank's `_RankStatus` as a row."""
        self.world.set_phase("agreeing", state.seen // settings.batch)
        first, square = gradient.micro_batches[0], gradient.first_square
        counts = square is not None and first.first in self.world.batch_range(state.seen, settings.batch)
        hooks = self.hooks
        wanted = [hooks.stop_requested(), hooks.save_requested(), hooks.preview_requested(), hooks.plan_due()]
        # All in one message with the losses: each collective costs a round trip, whatever its size.
        numbers = [first.images if counts else 0, *wanted]
        norms = torch.stack([norm, torch.zeros_like(norm) if square is None else square])
        rest = torch.tensor([*numbers, state.microbatch, gradient.abandoned], dtype=norm.dtype)
        status = torch.cat([norms, to_device(rest, norm.device)])
        loss, statuses = _all_reduce_losses(self.world, state.seen, settings.batch, gradient, status)
        # Rank 0's norm, to the bit; not finite if any rank's is not, so that all ranks skip the step.
        return [loss], statuses[0, 0] + 0 * statuses[:, 0].sum(), statuses

    def apply_statuses(self, values: Sequence[float], statuses: Tensor, state: TrainState) -> tuple[int, Tensor | None]:
        """Adopt the decisions that follow from the statuses [size, 9], of which `values` are the numbers on the host.

        `state` gets the smallest micro-batch size of all ranks. Returns images of the first micro-batch and squared
        norm of its gradient, over the ranks that count. Interrupted, on all ranks, if one abandoned the step.
        """
        width = len(_RankStatus._fields)
        ranks = [_RankStatus(*values[i : i + width]) for i in range(0, len(values), width)]
        # A stop of any rank counts, as a job manager may signal one alone; requests in files are read by rank 0 only.
        self.stopping = any(rank.stop for rank in ranks)
        self.saving, self.previewing = bool(ranks[0].save), bool(ranks[0].preview)
        self.planning = bool(ranks[0].plan)
        if any(rank.abandoned for rank in ranks):
            raise Interrupted
        smallest = min((int(rank.microbatch) for rank in ranks if rank.microbatch), default=0)
        if smallest and smallest != state.microbatch:
            state.microbatch = smallest
            self.on_out_of_memory(state)
        # The squared norm of a sharded gradient is already that of all ranks; of a whole one, rank 0's is taken.
        images = int(sum(rank.first_images for rank in (ranks[:1] if self.world.shards is None else ranks)))
        return images, statuses[0, 1] if images else None

    def log(self, step: int, images: int, record: dict[str, Any]) -> None:
        # On every rank: the others report skipped images to rank 0.
        self.hooks.log(step, images, record)

    def on_skipped_step(self, state: TrainState, norm: float, report: NanReport | None) -> None:
        if self.world.is_main:
            self.hooks.on_skipped_step(state, norm, report)

    def on_capture(self, message: str) -> None:
        if self.world.is_main:
            self.hooks.on_capture(message)

    def on_out_of_memory(self, state: TrainState) -> None:
        if self.world.is_main:
            self.hooks.on_out_of_memory(state)

    def on_step_end(self, step: int) -> None:
        if self.world.is_main:
            self.hooks.on_step_end(step)

    def roll_back(self, state: TrainState, reason: str) -> str:
        """Roll back rank 0. The others get its state, or their rows of a sharded one from the same checkpoint."""
        place = self._on_main("roll-back", lambda: self.hooks.roll_back(state, reason))
        if self.world.shards is not None and not self.world.is_main:
            roll_back(Path(place), state)
        self.world.broadcast_state(state)
        return place

    def preview(self, state: TrainState) -> None:
        with self.world.full_state(state, "ema"):
            self._on_main("preview", lambda: self.hooks.preview(state), shared=self.world.shards is None)

    def save_ema_snapshot(self, state: TrainState) -> None:
        with self.world.full_state(state, "ema", "ema2"):
            self._on_main("averages", lambda: self.hooks.save_ema_snapshot(state))

    def evaluate(self, state: TrainState) -> dict[str, Any]:
        with self.world.full_state(state, "ema"):
            return self._on_main("evaluation", lambda: self.hooks.evaluate(state), shared=self.world.shards is None)

    def save(self, state: TrainState, for_best: bool = False) -> None:
        if self.world.shards is None:
            self._on_main("checkpoint", lambda: self.hooks.save(state, for_best))
        else:
            place = self._on_main("checkpoint", lambda: self.hooks.prepare_save(state))
            self.hooks.save_shards(state, for_best, place, self.world.new_shard_status_store())

    def finish(self, state: TrainState) -> None:
        """End training on several ranks: save a sharded state if needed, and leave rank 0 with the EMA alone."""
        if self.world.shards is not None:
            if self.world.run_on_main("checkpoint", lambda: self.hooks.needs_final_save(state)):
                self.save(state)
            self.world.gather_ema(state)

    def save_requested(self) -> bool:
        return self.saving

    def preview_requested(self) -> bool:
        return self.previewing

    def plan_due(self) -> bool:
        return self.planning

    def plan_length(self, state: TrainState) -> LengthPlan | None:
        plan = self.world.run_on_main("length", lambda: self.hooks.plan_length(state))
        return plan and LengthPlan(*plan)  # a list on the other ranks

    def stop_requested(self) -> bool:
        return self.stopping

    def defer_interrupts(self) -> AbstractContextManager[None]:
        return self.hooks.defer_interrupts()

    def _on_main(self, phase: str, work: Callable[[], T], shared: bool = False) -> T:
        # The other ranks cannot share the work of a sharded network: only rank 0 has all of it then.
        def interruptible() -> T:
            with _allow_interrupts(self.hooks):
                return work()

        return self.world.run_on_main(phase, interruptible, shared)


@contextmanager
def _allow_interrupts(hooks: TrainingHooks) -> Iterator[None]:
    """Let interrupts through again, inside `hooks.defer_interrupts()`."""
    around = hooks.defer_interrupts()
    # Deferral is a count, so leaving it undoes the caller's entering; an alarm that came meanwhile rings again at once.
    around.__exit__(None, None, None)
    try:
        yield
    finally:
        around.__enter__()


def _all_reduce_losses(world: World, first: int, batch: int, gradient: Gradient, status: Tensor) -> tuple[Loss, Tensor]:
    """All-reduce the losses of a batch and the ranks' statuses in one message, without waiting for the device.

    `first` is the position of the batch's first image, and `batch` their number. Micro-batches outside this rank's
    share of the batch do not count.

    Returns:
        The losses of the whole batch in order, and the statuses [size, len(status)].
    """
    rows, share = torch.zeros(4, batch, device=status.device), world.batch_range(first, batch)
    for one, loss in zip(gradient.micro_batches, gradient.losses):
        if one.first in share:
            importance = torch.ones_like(loss.u) if loss.importance is None else loss.importance
            numbers = torch.stack([loss.measured, loss.u, loss.null_loss, importance])
            rows[:, one.first - first : one.first - first + one.images] = numbers
    statuses = torch.zeros(world.size, len(status), device=rows.device)
    statuses[world.rank] = status
    # Every rank adds zeros to the numbers of others, so each number arrives to the bit.
    flat = world.all_reduce(torch.cat([rows.flatten(), statuses.flatten()]))
    measured, u, null_loss, importance = flat[: rows.numel()].view_as(rows)
    even = all(loss.importance is None for loss in gradient.losses)
    reduced = Loss(measured, u, null_loss, None, None if even else importance)
    return reduced, flat[rows.numel() :].view_as(statuses)


def sum_losses(losses: Sequence[Loss]) -> tuple[Tensor, Tensor]:
    """Return the sums of weighted squared errors and of null losses of a step, 0-d."""
    loss, null_loss = [loss.measured.sum() for loss in losses], [loss.null_loss.sum() for loss in losses]
    return (loss[0], null_loss[0]) if len(losses) == 1 else (torch.stack(loss).sum(), torch.stack(null_loss).sum())
