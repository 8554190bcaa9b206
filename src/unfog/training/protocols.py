"""What the training loop asks of the things it is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn

from unfog.training.state import TrainState

LossFunction = Callable[[nn.Module, Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""(network, images float [B, C, H, W] in [-1, 1], label int64 [B] or None) -> loss [B], noise quantile [B]."""


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
    """Who writes things down, draws and saves, when the loop says so."""

    def log(self, step: int, images: int, record: dict[str, Any]) -> None:
        """Record numbers."""

    def refused(self, step: int, images: int, norm: float) -> None:
        """Record that a step was refused."""

    def advance(self, step: int) -> None:
        """Show progress; called every step, so it must be cheap and must not wait for the device."""

    def preview(self, state: TrainState) -> None:
        """Draw a sample grid."""

    def evaluate(self, state: TrainState) -> dict[str, Any]:
        """Held-out metrics, to be recorded."""

    def save(self, state: TrainState) -> None:
        """Save a checkpoint."""

    def stop_requested(self) -> bool:
        """Whether the run should end after the step at hand."""
