"""Disk space of the checkpoints of a run, and size of its decoded images."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from unfog.config.schema import Config
from unfog.data.dataset import Dataset
from unfog.data.file_rows import FileRows
from unfog.errors import RequestError
from unfog.pipeline.build import build_network
from unfog.process.run_folder import next_folder
from unfog.reporting.findings import Finding
from unfog.text import format_bytes
from unfog.training.checkpoints.writer import free_bytes
from unfog.training.precision import Precision
from unfog.training.settings import MAX_EMA_SNAPSHOTS, Checkpoint, EmaSnapshots
from unfog.training.state import TrainState

_NO_SNAPSHOTS = EmaSnapshots(every=-1)
_COPIES = 4  # of the weights in a checkpoint: themselves, their EMA, and the two moments of AdamW
_RECORDS = 16 * 10**6  # bytes for previews, metrics and logs


class _DiskSpace(NamedTuple):
    checkpoint: int
    """Bytes of one checkpoint."""
    checkpoints: int
    """Largest number of checkpoints at a time."""
    snapshots: int = 0
    """Bytes of all EMA snapshots."""

    @property
    def minimum(self) -> int:
        """Bytes without which no run can begin."""
        return 2 * self.checkpoint + _RECORDS  # the old checkpoint is deleted only when the new one is complete

    @property
    def maximum(self) -> int:
        """Bytes with which the run never has to wait for space."""
        return self.checkpoints * self.checkpoint + self.snapshots + _RECORDS


def disk_space_needed(
    parameters: int, keep: Checkpoint, steps: int, averages: EmaSnapshots = _NO_SNAPSHOTS
) -> _DiskSpace:
    """Return the disk space for a run of `steps` steps with `parameters` fp32 numbers."""
    # Besides those that are kept: the best one, two to roll back to, and one that is being written.
    checkpoints = keep.keep + (steps // keep.milestones if keep.milestones else 0) + 4
    checkpoint = (_COPIES + (averages.every > 0)) * 4 * parameters
    return _DiskSpace(checkpoint, checkpoints, snapshot_bytes(parameters, averages.every, steps))


def snapshot_bytes(parameters: int, every: int, steps: int) -> int:
    """Return the bytes of all EMA snapshots of a run."""
    # Two averages in float16 each time; one more snapshot than is kept while one is deleted, and one at the end.
    return 4 * parameters * (min(steps // every, MAX_EMA_SNAPSHOTS + 1) + 1) if every > 0 else 0


def check_disk_room(
    checkpoints: Path, state: TrainState, keep: Checkpoint, steps: int, averages: EmaSnapshots = _NO_SNAPSHOTS
) -> str:
    """Return a line on the disk space that the checkpoints and EMA snapshots of a new run need.

    RequestError if there is no room for two checkpoints; the old one stays until the new one is complete.
    """
    tensors = [*state.model.parameters(), *state.model.buffers()]
    room, free = disk_space_needed(sum(t.numel() for t in tensors), keep, steps, averages), free_bytes(checkpoints)
    if free < room.minimum:
        raise RequestError(
            f"{checkpoints.parent} has {format_bytes(free)} free, and two checkpoints of this network take "
            f"{format_bytes(2 * room.checkpoint)}; free some space, or give another --out or a smaller "
            "--network"
        )
    beside = f" and {format_bytes(room.snapshots)} of averages" if room.snapshots else ""
    most = format_bytes(room.checkpoints * room.checkpoint)
    line = f"disk: {format_bytes(room.checkpoint)} a checkpoint, {most} at most{beside}; {format_bytes(free)} free"
    return line if free > room.maximum else f"{line}, so training may have to wait for free space"


def decoded_bytes(prepared: Dataset, config: Config) -> int:
    return (len(prepared.train) + len(prepared.held_out)) * config.image_format.nbytes


def condition_bytes(prepared: Dataset) -> int:
    """Return the bytes of conditions that are images, which stay in memory; 0 of those in a mapped file."""
    columns = [column.values for part in (prepared.train, prepared.held_out) for column in part.columns.values()]
    images = [each for each in columns if isinstance(each, np.ndarray) and each.ndim == 4]
    return sum(each.nbytes for each in images if not _is_mapped(each))


def bytes_to_decode(prepared: Dataset, config: Config) -> int:
    """Return the bytes of images that the run has yet to decode into memory."""
    return decoded_bytes(prepared, config) if config.data.cache == "memory" and is_memory_mapped(prepared) else 0


def is_memory_mapped(prepared: Dataset) -> bool:
    """True if the pixels are in a file, whose memory the system can reclaim."""
    return _is_mapped(prepared.of_one_size.train.pixels)


def _is_mapped(pixels: Any) -> bool:
    # A view of a mapped file is a plain array whose base, or the base of that, is the map.
    while isinstance(pixels, np.ndarray):
        if isinstance(pixels, np.memmap):
            return True
        pixels = pixels.base
    return pixels is not None  # an array that owns its memory has no base


def disk_lines(config: Config, prepared: Dataset, in_memory: int) -> tuple[list[str], list[Finding]]:
    """Return lines on what a run writes, with `in_memory` bytes of decoded images, and findings about room for it."""
    lines: list[str] = []
    if not in_memory and config.data.cache != "none":
        there = isinstance(prepared.of_one_size.train.pixels, np.ndarray | FileRows)
        when = "in the cache already" if there else "which the run decodes first"
        lines.append(f"{format_bytes(decoded_bytes(prepared, config))} of decoded images, {when}")
    if cached := config.representation.cache_bytes(len(prepared.train) + len(prepared.held_out)):
        lines.append(f"{format_bytes(cached)} of {config.representation.name}, in the cache")
    steps = config.training.images // config.training.batch
    with FakeTensorMode():  # only the sizes are needed
        state = TrainState(build_network(config), config.optimizer, config.ema, Precision("fp32", torch.device("cpu")))
    try:
        line = check_disk_room(
            next_folder(config.source).absolute() / "checkpoints", state, config.checkpoint, steps, config.ema_snapshots
        )
    except RequestError as error:
        return lines, [Finding("plan.disk", "fatal", str(error))]
    waits = "may have to wait" in line
    lines.append(line.removeprefix("disk: "))
    return lines, [Finding("plan.disk", "warning" if waits else "fine", line)]
