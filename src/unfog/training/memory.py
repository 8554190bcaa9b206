"""Going on when memory does not suffice: with fewer images at once, for the same mean over the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from unfog.errors import RunError
from unfog.training.protocols import Run
from unfog.training.settings import Training
from unfog.training.state import TrainState

T = TypeVar("T")

# How CUDA, MPS, the CPU allocator, oneDNN and C++ say it, where they do not raise an error of its own kind.
_SAID = ("out of memory", "out_of_memory", "allocate memory", "bad_alloc", "unable to allocate")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that fewer or smaller tensors would have fitted."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _SAID)


def within_memory(settings: Training, state: TrainState, run: Run, action: Callable[[], T]) -> T:
    """What `action` gives; done again with fewer images at once each time that memory does not suffice.

    The mean over the batch stays exact. The noise of a micro-batch is drawn for its first position, so it is other
    noise from here on, and `state.microbatch`, which a checkpoint holds, says from where.

    Raises:
        RunError: not even one image fits.
    """
    while True:
        try:
            return action()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            shrink(settings, state, run)  # the tensors that the failure still refers to go with it, right after this


def shrink(settings: Training, state: TrainState, run: Run) -> None:
    """Halve what goes through the network at once; a single image gets gradient checkpointing instead."""
    now = at_once(settings, state)
    with run.undivided():
        state.optimizer.zero_grad(set_to_none=True)
        if now > 1:
            state.microbatch = (now + 1) // 2
        elif not getattr(state.model, "checkpointing", True):
            state.model.checkpointing = True  # type: ignore[assignment]
        else:
            raise RunError("out of memory, with one image at a time; choose a smaller --size or --network")
        run.shrunk(state)


def at_once(settings: Training, state: TrainState) -> int:
    """Images that go through the network at once."""
    return min(state.microbatch or settings.batch, settings.microbatch or settings.batch)
