"""What the training loop asks of the things it is given."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import Tensor, nn

from unfog.diffusion.objective import Loss
from unfog.training.checkpoints.sharded import ShardStatusStore
from unfog.training.stability.nan_debug import NanReport
from unfog.training.state import TrainState

Augmentation = Callable[[Tensor], tuple[Tensor, Tensor | None]]
"""Pixels uint8 [B, C, H, W] -> (images float32 of that shape in [-1, 1], what was done to them [B, 9] or None)."""
LossFunction = Callable[[nn.Module, Tensor, Tensor | None, Tensor | None], Loss]
"""(network, images float [B, C, H, W] in [-1, 1], label int64 [B] or None, augmentation [B, 9] or None) -> its cost."""


class Batch(Protocol):
    """Images at consecutive positions of the stream."""

    @property
    def pixels(self) -> Tensor:
        """uint8 [B, C, H, W]."""

    @property
    def label(self) -> Tensor | None:
        """int64 [B], or None without classes."""


class Stream(Protocol):
    """Training images, each a pure function of its position."""

    def batch(self, first: int, size: int) -> Batch:
        """The images at positions first … first + size - 1; always the same."""


class Run(Protocol):
    """Who writes things down, draws, saves and goes back, when the loop says so."""

    def log(self, step: int, images: int, record: dict[str, Any]) -> None:
        """Record numbers."""

    def on_skipped_step(self, state: TrainState, norm: float, culprit: NanReport | None) -> None:
        """Record that the step just taken was refused, and why, if that was looked into."""

    def roll_back(self, state: TrainState, reason: str) -> str:
        """Return weights, average and optimiser to where all was well; `TrainState.go_back` the rest. Returns the
        checkpoint's folder, from which other processes read their rows of a divided state."""

    def on_out_of_memory(self, state: TrainState) -> None:
        """Record that memory did not suffice, and with what the loop goes on: `state.microbatch`, checkpointing."""

    def on_step_end(self, step: int) -> None:
        """Show progress; called every step, so it must be cheap and must not wait for the device."""

    def preview(self, state: TrainState) -> None:
        """Draw a sample grid."""

    def save_ema_snapshot(self, state: TrainState) -> None:
        """Store a snapshot of both averages, for `posthoc`."""

    def evaluate(self, state: TrainState) -> dict[str, Any]:
        """Held-out metrics, to be recorded."""

    def save(self, state: TrainState, for_best: bool = False) -> None:
        """Save a checkpoint; `for_best` if only for its held-out loss, until there is a better one."""

    def save_requested(self) -> bool:
        """Whether a checkpoint is wanted out of turn."""

    def stop_requested(self) -> bool:
        """Whether the run should end as soon as it can; may also raise Interrupted, but for the following."""

    def defer_interrupts(self) -> AbstractContextManager[None]:
        """A stretch in which Interrupted must not be raised, as what it changes belongs together."""


class Rank(Run, Protocol):
    """A run as one of the processes has it that train it together; what all of them do of a divided state."""

    def prepare_save(self, state: TrainState) -> str:
        """Before `save_shards`, at the first process: what a checkpoint has to wait for. Returns where they are."""

    def save_shards(self, state: TrainState, for_best: bool, place: str, post: ShardStatusStore) -> None:
        """Save the rows that this process has of a divided state, with all others, in the folder of checkpoints."""

    def needs_final_save(self, state: TrainState) -> bool:
        """Whether a divided state has to be saved before each process goes its way; from then on nothing interrupts."""


class TrainingHooks:
    """A run that keeps and tells nothing; what it goes back to, there is not."""

    def log(self, step: int, images: int, record: dict[str, Any]) -> None:
        """Nothing is recorded."""

    def on_skipped_step(self, state: TrainState, norm: float, culprit: NanReport | None) -> None:
        """Nothing is recorded."""

    def roll_back(self, state: TrainState, reason: str) -> str:
        """There is nothing to go back to."""
        return ""

    def on_out_of_memory(self, state: TrainState) -> None:
        """Nothing is recorded."""

    def on_step_end(self, step: int) -> None:
        """Nothing is shown."""

    def preview(self, state: TrainState) -> None:
        """Nothing is drawn."""

    def save_ema_snapshot(self, state: TrainState) -> None:
        """Nothing is stored."""

    def evaluate(self, state: TrainState) -> dict[str, Any]:
        """Nothing is measured."""
        return {}

    def save(self, state: TrainState, for_best: bool = False) -> None:
        """Nothing is saved."""

    def prepare_save(self, state: TrainState) -> str:
        """Nothing is saved."""
        return ""

    def save_shards(self, state: TrainState, for_best: bool, place: str, post: ShardStatusStore) -> None:
        """Nothing is saved."""

    def needs_final_save(self, state: TrainState) -> bool:
        """Nothing is saved."""
        return False

    def save_requested(self) -> bool:
        """Nobody asks."""
        return False

    def stop_requested(self) -> bool:
        """Nobody asks."""
        return False

    def defer_interrupts(self) -> AbstractContextManager[None]:
        """Nothing here has to stay together."""
        return nullcontext()
