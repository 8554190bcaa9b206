"""How much disk a run will take, told before it begins."""

from __future__ import annotations

from pathlib import Path

from unfog.errors import RequestError
from unfog.training.settings import Checkpoint
from unfog.training.state import TrainState
from unfog.training.writer import free_bytes

MARGIN = 16 * 10**6  # bytes, for pictures and records


def forecast(checkpoints: Path, state: TrainState, keep: Checkpoint, steps: int) -> str:
    """A line on what the checkpoints of a new run will need.

    Raises:
        RequestError: there is not even room for two, of which one is always whole while the other is written.
    """
    tensors = [*state.model.parameters(), *state.model.buffers()]
    one = 4 * sum(t.numel() * t.element_size() for t in tensors)  # weights, their average, two moments
    milestones = steps // keep.milestones if keep.milestones else 0
    most = keep.keep + milestones + 4  # the best, two to roll back to, and one that is being written
    free = free_bytes(checkpoints)
    if free < 2 * one + MARGIN:
        raise RequestError(
            f"{checkpoints.parent} has {size(free)} free, and two checkpoints of this network take {size(2 * one)}; "
            "make room, or give another --out or a smaller --network"
        )
    line = f"disk: {size(one)} a checkpoint, {size(most * one)} at most; {size(free)} free"
    return line if free > most * one + MARGIN else f"{line}, so training may have to wait for room"


def size(count: float) -> str:
    """Bytes as people read them."""
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.0f} MB"
