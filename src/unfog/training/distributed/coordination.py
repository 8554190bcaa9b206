"""A run on several processes: what leaves traces, the first does; what is decided, all decide alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from unfog.diffusion.objective import Loss
from unfog.training.checkpoints import format as checkpoint
from unfog.training.distributed.world import World
from unfog.training.hooks import Rank, Run
from unfog.training.micro_batches import MicroBatch
from unfog.training.precision import to_device
from unfog.training.settings import Training
from unfog.training.stability.nan_debug import NanReport
from unfog.training.state import TrainState

T = TypeVar("T")


class RankStatus(NamedTuple):
    """What a process has to say about a step; the rest follows from what all say."""

    norm: float
    """Of the gradient of the whole batch, which should be the same everywhere."""
    part_square: float
    """Squared norm of the gradient of its first pass, where there were several; of a divided network, of all of
    their first passes."""
    part: float
    """Images that it added to that gradient; 0 where there was only one pass."""
    stop: float
    save: float
    microbatch: float
    """Images at once where memory did not suffice for more; else 0."""


class CoordinatedHooks:
    """A run that several processes train: a `Run` for the loop of each of them.

    A signal that reaches one process counts for all, at the end of the step: until then nothing cuts through, as the
    others would wait for ever. Only what the first process does alone can be left in the middle.
    """

    def __init__(self, run: Rank, world: World):
        self.run, self.world = run, world
        self.stopping = self.saving = False

    def all_reduce_step(
        self,
        state: TrainState,
        settings: Training,
        passes: Sequence[MicroBatch],
        losses: Sequence[Loss],
        norm: Tensor,
        part_square: Tensor | None,
    ) -> tuple[list[Loss], Tensor, Tensor]:
        """From what each has of a step: the losses of the batch, the norm of its gradient, and all `Voice`s."""
        self.world.set_phase("agreeing", state.seen // settings.batch)
        counts = part_square is not None and passes[0].first in self.world.batch_range(state.seen, settings.batch)
        part = passes[0].images if counts else 0
        told = [part, self.run.stop_requested(), self.run.save_requested(), state.microbatch]
        square = torch.zeros_like(norm) if part_square is None else part_square
        voice = torch.cat([torch.stack([norm, square]), to_device(torch.tensor(told, dtype=norm.dtype), norm.device)])
        loss, voices = all_reduce_losses(self.world, state.seen, settings.batch, passes, losses, voice)
        # The first one's, to the bit; not finite if anybody's is not, so that all refuse the step.
        return [loss], voices[0, 0] + 0 * voices[:, 0].sum(), voices

    def apply_statuses(self, said: Sequence[float], voices: Tensor, state: TrainState) -> tuple[int, Tensor | None]:
        """Take over what was agreed on, `voices` as read from the device; returns what the noise scale needs."""
        width = len(RankStatus._fields)
        all_said = [RankStatus(*said[i : i + width]) for i in range(0, len(said), width)]
        self.stopping = any(voice.stop for voice in all_said)
        self.saving = bool(all_said[0].save)
        fewest = min((int(voice.microbatch) for voice in all_said if voice.microbatch), default=0)
        if fewest and fewest != state.microbatch:
            state.microbatch = fewest
            self.on_out_of_memory(state)
        part = int(sum(voice.part for voice in (all_said[:1] if self.world.shards is None else all_said)))
        return part, voices[0, 1] if part else None

    def log(self, step: int, images: int, record: dict[str, Any]) -> None:
        """The first process records; the others may have something to tell it."""
        self.run.log(step, images, record)

    def on_skipped_step(self, state: TrainState, norm: float, culprit: NanReport | None) -> None:
        """The first process records."""
        if self.world.is_main:
            self.run.on_skipped_step(state, norm, culprit)

    def on_out_of_memory(self, state: TrainState) -> None:
        """The first process records."""
        if self.world.is_main:
            self.run.on_out_of_memory(state)

    def on_step_end(self, step: int) -> None:
        """The first process shows progress."""
        if self.world.is_main:
            self.run.on_step_end(step)

    def roll_back(self, state: TrainState, reason: str) -> str:
        """The first process goes back, and the others get its state; where that is divided, from the same place."""
        place = self._alone("roll-back", lambda: self.run.roll_back(state, reason))
        if self.world.shards is not None and not self.world.is_main:
            checkpoint.roll_back(Path(place), state)
        self.world.broadcast_state(state)
        return place

    def preview(self, state: TrainState) -> None:
        """The first process draws."""
        with self.world.full_state(state, "ema"):
            self._alone("preview", lambda: self.run.preview(state))

    def save_ema_snapshot(self, state: TrainState) -> None:
        """The first process stores them."""
        with self.world.full_state(state, "ema", "ema2"):
            self._alone("averages", lambda: self.run.save_ema_snapshot(state))

    def evaluate(self, state: TrainState) -> dict[str, Any]:
        """The first process measures, and all get the numbers."""
        with self.world.full_state(state, "ema"):
            return self._alone("evaluation", lambda: self.run.evaluate(state))

    def save(self, state: TrainState, for_best: bool = False) -> None:
        """The first process saves; what is divided, all do."""
        if self.world.shards is None:
            self._alone("checkpoint", lambda: self.run.save(state, for_best))
        else:
            place = self._alone("checkpoint", lambda: self.run.prepare_save(state))
            self.run.save_shards(state, for_best, place, self.world.new_shard_status_store())

    def finish(self, state: TrainState) -> None:
        """At the end of what is trained together: save what no checkpoint holds of a divided state, and have the first
        process go on with the average alone."""
        if self.world.shards is not None:
            if self.world.run_on_main("checkpoint", lambda: self.run.needs_final_save(state)):
                self.save(state)
            self.world.gather_ema(state)

    def save_requested(self) -> bool:
        """Whether the first process was asked for a checkpoint."""
        return self.saving

    def stop_requested(self) -> bool:
        """Whether all know that one of them was asked to stop."""
        return self.stopping

    def defer_interrupts(self) -> AbstractContextManager[None]:
        """As the run has it."""
        return self.run.defer_interrupts()

    def _alone(self, phase: str, work: Callable[[], T]) -> T:
        def opened() -> T:
            with _allow_interrupts(self.run):
                return work()

        return self.world.run_on_main(phase, opened)


@contextmanager
def _allow_interrupts(run: Run) -> Iterator[None]:
    """A stretch inside `run.defer_interrupts()` in which an interruption is let through again."""
    around = run.defer_interrupts()
    around.__exit__(None, None, None)
    try:
        yield
    finally:
        around.__enter__()


def all_reduce_losses(
    world: World, first: int, batch: int, passes: Sequence[MicroBatch], losses: Sequence[Loss], voice: Tensor
) -> tuple[Loss, Tensor]:
    """The losses of the whole batch, in order, and what all processes say, [size, len(voice)].

    Everybody adds zeros to what is not theirs, so each number arrives to the bit, and all decide by the same. One
    message a step, however many numbers; the device is not waited for.

    Args:
        first: position of the batch's first image.
        passes: of this process, with their losses; those beyond the share of this process do not count.
    """
    rows, share = torch.zeros(4, batch, device=voice.device), world.batch_range(first, batch)
    for one, loss in zip(passes, losses):
        if one.first in share:
            importance = torch.ones_like(loss.u) if loss.importance is None else loss.importance
            numbers = torch.stack([loss.measured, loss.u, loss.null_loss, importance])
            rows[:, one.first - first : one.first - first + one.images] = numbers
    voices = torch.zeros(world.size, len(voice), device=rows.device)
    voices[world.rank] = voice
    flat = world.all_reduce(torch.cat([rows.flatten(), voices.flatten()]))
    rows, voices = flat[: rows.numel()].view_as(rows), flat[rows.numel() :].view_as(voices)
    even = all(loss.importance is None for loss in losses)
    measured, u, reference, importance = rows
    return Loss(measured, u, reference, None, None if even else importance), voices
