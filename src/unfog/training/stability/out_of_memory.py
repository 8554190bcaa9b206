"""Going on when memory does not suffice: with fewer images at once, for the same mean over the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from unfog.errors import RunError
from unfog.training.hooks import Run
from unfog.training.settings import Training
from unfog.training.state import TrainState

T = TypeVar("T")

# How CUDA, MPS, the CPU allocator and C++ say it, where they do not raise an error of its own kind.
_SAID = (
    *("out of memory", "out_of_memory", "allocate memory", "bad_alloc", "unable to allocate"),
    "could not create a primitive",  # oneDNN
    "alloc_failed",  # cuBLAS and cuDNN
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that fewer or smaller tensors would have fitted."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _SAID)


def retry_with_smaller_micro_batches(
    settings: Training, state: TrainState, run: Run, attempt: Callable[[Training, TrainState, Run], T], size: int = 1
) -> T:
    """What `attempt` gives; made again with fewer images at once each time that memory does not suffice.

    The mean over the batch stays exact. Noise that is drawn by micro-batch is other noise from here on, and
    `state.microbatch`, which a checkpoint holds, says from where.

    Raises:
        RunError: not even one image fits.
    """
    while True:
        try:
            return attempt(settings, state, run)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            # The tensors that the error still refers to go with it, right after this.
            _halve_micro_batch(settings, state, run, error, size)


def _halve_micro_batch(settings: Training, state: TrainState, run: Run, error: Exception, size: int = 1) -> None:
    """Halve what goes through the network at once, in one of `size` processes; a single image gets gradient
    checkpointing instead."""
    now = min(microbatch_size(settings, state), -(-settings.batch // size))
    with run.defer_interrupts():
        state.optimizer.zero_grad(set_to_none=True)
        if now > 1:
            state.microbatch = (now + 1) // 2
        elif not getattr(state.model, "checkpointing", True):
            state.model.checkpointing = True  # type: ignore[assignment]
        else:
            raise RunError(
                f"out of memory, with one image at a time ({' '.join(str(error).split())[:200]}); choose a smaller "
                "--size or --network"
            ) from error
        run.on_out_of_memory(state)


def microbatch_size(settings: Training, state: TrainState | None = None) -> int:
    """Images that go through the network at once: as is set, or fewer where the state had to do with fewer."""
    asked = settings.microbatch or settings.batch
    return asked if state is None else min(state.microbatch or settings.batch, asked)
