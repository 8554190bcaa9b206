"""Recovery from out-of-memory errors: go on with smaller micro-batches, for the same mean over the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from unfog.errors import RunError
from unfog.training.hooks import TrainingHooks
from unfog.training.settings import Training
from unfog.training.state import TrainState

T = TypeVar("T")

# Messages of CUDA, MPS, the CPU allocator and C++, where they raise no error type of their own.
_MESSAGES = (
    *("out of memory", "out_of_memory", "allocate memory", "bad_alloc", "unable to allocate"),
    "could not create a primitive",  # oneDNN
    "alloc_failed",  # cuBLAS and cuDNN
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether fewer or smaller tensors would have avoided the error."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _MESSAGES)


def retry_with_smaller_micro_batches(
    settings: Training, state: TrainState, hooks: TrainingHooks, attempt: Callable[[], T], ranks: int = 1
) -> T:
    """Return the result of `attempt`, repeated with half the micro-batch each time that memory does not suffice.

    The mean over the batch stays exact. RunError if not even one image fits.
    """
    while True:
        try:
            return attempt()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            # The error's traceback refers to the tensors of the attempt; they are freed when this clause ends.
            _halve_micro_batch(settings, state, hooks, error, ranks)


def _halve_micro_batch(
    settings: Training, state: TrainState, hooks: TrainingHooks, error: Exception, ranks: int
) -> None:
    now = min(microbatch_size(settings, state), -(-settings.batch // ranks))  # no more than a rank's share
    with hooks.defer_interrupts():
        state.optimizer.zero_grad(set_to_none=True)  # the attempt begins anew, and needs the memory
        if now > 1:
            # Noise that is drawn for each micro-batch is different from here on. A checkpoint holds this number, which
            # makes that reproducible.
            state.microbatch = (now + 1) // 2
        elif not getattr(state.model, "checkpointing", True):
            # Slower by a third, so it comes last.
            state.model.checkpointing = True  # type: ignore[assignment]
        else:
            raise RunError(
                f"out of memory with one image at a time ({' '.join(str(error).split())[:200]}); choose a "
                "smaller --size or --network"
            ) from error
        hooks.on_out_of_memory(state)


def microbatch_size(settings: Training, state: TrainState | None = None) -> int:
    """Return the images of one forward pass: as set, or fewer if `state` ran out of memory before."""
    size = settings.microbatch or settings.batch
    return size if state is None else min(state.microbatch or settings.batch, size)
