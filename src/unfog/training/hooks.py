"""Interface of the training loop: the task to train on, and hooks that record, preview and save."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from unfog.diffusion.objective import Loss
from unfog.errors import RunError
from unfog.training.checkpoints.writer import ShardStatusStore
from unfog.training.length import LengthPlan
from unfog.training.stability.nan_debug import NanReport
from unfog.training.state import TrainState
from unfog.values.conditions import Conditions

# Pixels uint8 [B, C, H, W] -> (images float32 [B, C, H, W] in [-1, 1], augmentation parameters [B, 9] or None).
Augmentation = Callable[[Tensor], tuple[Tensor, Tensor | None]]
# (network, images float [B, C, H, W] in [-1, 1], their conditions) -> loss.
LossFunction = Callable[[nn.Module, Tensor, Conditions], Loss]


def augmented(augment: Augmentation, pixels: Tensor, conditions: Conditions) -> tuple[Tensor, Conditions]:
    """Return the images of a batch as the network sees them, and their conditions, moved and completed with them."""
    together = getattr(augment, "with_conditions", None)  # of `AugmentWithConditions`
    if together is not None:
        both: tuple[Tensor, Conditions] = together(pixels, conditions)
        return both
    x0, told = augment(pixels)
    return x0, conditions._replace(augment=told)


class _Batch(Protocol):
    """Images at consecutive positions of the stream."""

    @property
    def pixels(self) -> Tensor:
        """Images uint8 [B, C, H, W], or stored latents."""

    @property
    def conditions(self) -> Conditions:
        """Conditions of the images, such as classes int64 [B]."""


class Stream(Protocol):
    """Training images in the order of training, each a pure function of its position."""

    def batch(self, first: int, size: int) -> _Batch:
        """Return the images at positions first … first + size - 1."""


class Task(NamedTuple):
    """Training images, their augmentation, and the loss."""

    stream: Stream
    augment: Augmentation
    loss_function: LossFunction


class TrainingHooks:
    """Base class of what the training loop calls. Every hook does nothing unless a subclass overrides it.

    With several ranks, `CoordinatedHooks` wraps the hooks of each rank and calls most of them on rank 0 alone.
    """

    def log(self, step: int, images: int, record: dict[str, Any]) -> None:
        """Record metrics. Called on every rank."""

    def evaluate(self, state: TrainState) -> dict[str, Any]:
        """Return held-out metrics of the EMA weights, to be logged."""
        return {}

    def preview(self, state: TrainState) -> None:
        """Generate a grid of samples; for an autoencoder, of reconstructions."""

    def save(self, state: TrainState, for_best: bool = False) -> None:
        """Save a checkpoint. One that is `for_best` is kept only until a better one is saved."""

    def save_ema_snapshot(self, state: TrainState) -> None:
        """Store a snapshot of both EMAs, from which `posthoc_ema` rebuilds one of any length."""

    def roll_back(self, state: TrainState, reason: str) -> str:
        """Restore a good checkpoint with `TrainState.roll_back_to`. Returns its folder, which other ranks read too."""
        return ""

    def on_step_end(self, step: int) -> None:
        """Show progress. Called every step, so it must be cheap and must not wait for the device.

        `TrainState.last` is of this step, as its verdict is known. On a GPU the next step may be on its way.
        """

    def on_skipped_step(self, state: TrainState, norm: float, report: NanReport | None) -> None:
        """Record that a step was skipped because its gradient was not finite. `report` is None if not debugged."""

    def on_capture(self, message: str) -> None:
        """Report that each step is one CUDA graph from here on, or why `training.capture` has no effect."""

    def on_capture_lost(self, state: TrainState, reason: str) -> None:
        """Save the state, and raise RunError with the way to go on without `training.capture`."""
        raise RunError(f"CUDA ended the capture of a step ({reason}); train without training.capture")

    def on_out_of_memory(self, state: TrainState) -> None:
        """Record the micro-batch size or gradient checkpointing with which training goes on."""

    def stop_requested(self) -> bool:
        """Return True to end the run as soon as it can; may raise `Interrupted` outside `defer_interrupts`."""
        return False

    def save_requested(self) -> bool:
        """Return whether a checkpoint is wanted now, besides those at regular intervals."""
        return False

    def preview_requested(self) -> bool:
        """Return whether a preview is wanted now, besides those at regular intervals."""
        return False

    def plan_due(self) -> bool:
        """Return whether `plan_length` is to be called after this step. Called every step, so it must be cheap."""
        return False

    # Apart from `plan_due`: with several ranks planning is work of rank 0 that the others wait for.
    def plan_length(self, state: TrainState) -> LengthPlan | None:
        """Return how the run goes on from here to its end, if that is to change."""
        return None

    def defer_interrupts(self) -> AbstractContextManager[None]:
        """Return a context in which `Interrupted` must not be raised, because the state changes in several places."""
        return nullcontext()

    # Only for a state that is sharded over several ranks:

    def prepare_save(self, state: TrainState) -> str:
        """Wait, on rank 0, for what must precede a checkpoint. Returns the folder of checkpoints."""
        return ""

    def save_shards(self, state: TrainState, for_best: bool, place: str, store: ShardStatusStore) -> None:
        """Save this rank's rows of the state in the folder of checkpoints `place`."""

    def needs_final_save(self, state: TrainState) -> bool:
        """Return whether the state must be saved before the ranks part. Nothing interrupts from then on."""
        return False
