"""How much disk a run will take, told before it begins; and how large its decoded images are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from unfog.config.schema import Config
from unfog.data.dataset import Prepared
from unfog.doctor.settings.machine_checks import NO_AVERAGES, room_for
from unfog.errors import RequestError
from unfog.reporting.progress import size as size  # as this module's own, for those that also forecast
from unfog.training.checkpoints.writer import free_bytes
from unfog.training.settings import Averages, Checkpoint
from unfog.training.state import TrainState


def forecast(
    checkpoints: Path, state: TrainState, keep: Checkpoint, steps: int, averages: Averages = NO_AVERAGES
) -> str:
    """A line on what the checkpoints and the snapshots of averages of a new run will need.

    Raises:
        RequestError: there is not even room for two, of which one is always whole while the other is written.
    """
    tensors = [*state.model.parameters(), *state.model.buffers()]
    room, free = room_for(sum(t.numel() for t in tensors), keep, steps, averages), free_bytes(checkpoints)
    if free < room.least:
        raise RequestError(
            f"{checkpoints.parent} has {size(free)} free, and two checkpoints of this network take "
            f"{size(2 * room.one)}; make room, or give another --out or a smaller --network"
        )
    beside = f" and {size(room.beside)} of averages" if room.beside else ""
    line = f"disk: {size(room.one)} a checkpoint, {size(room.most * room.one)} at most{beside}; {size(free)} free"
    return line if free > room.ample else f"{line}, so training may have to wait for room"


def image_bytes(prepared: Prepared, config: Config) -> int:
    """Bytes of the decoded set."""
    return (len(prepared.train) + len(prepared.held_out)) * config.data.channels * config.data.size**2


def to_decode(prepared: Prepared, config: Config) -> int:
    """Bytes that the run will decode into memory, and that are not there yet."""
    return image_bytes(prepared, config) if config.data.cache == "memory" and in_file(prepared) else 0


def in_file(prepared: Prepared) -> bool:
    """Whether the pixels are in a file, which takes no memory that is not given back."""
    pixels: Any = prepared.train.pixels
    while isinstance(pixels, np.ndarray):
        if isinstance(pixels, np.memmap):
            return True
        pixels = pixels.base
    return pixels is not None  # an array of its own has no base; what decodes as it is read has no pixels
