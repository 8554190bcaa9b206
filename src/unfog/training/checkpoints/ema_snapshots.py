"""Snapshots of the EMAs, written while training goes on: RUN/averages/00001000.safetensors.

They are in float16, which rounds a weight by at most 0.05%, and an EMA rebuilt from them by about 0.02%
(docs/decisions/0014-averages.md). A run can do without a snapshot, so one that cannot be written is reported and left
out.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from unfog.training.checkpoints.posthoc_ema import METADATA_KEY, list_snapshots
from unfog.training.checkpoints.snapshot import sync, system_errors
from unfog.training.settings import MAX_EMA_SNAPSHOTS, EmaSnapshots
from unfog.training.state import TrainState


class EmaSnapshot(NamedTuple):
    """Copy of both EMAs in host memory."""

    step: int
    updates: int
    widths: tuple[float, ...]
    tensors: dict[str, Tensor]
    """float16 under "0/name" and "1/name" for the two EMAs; buffers as they are under "buffer/name"."""


def snapshot_interval(every: int, step: int) -> int:
    """Return the steps between snapshots: `every`, doubled until at most MAX_EMA_SNAPSHOTS lie before `step`.

    A function of position, so that an interrupted run keeps the same snapshots.
    """
    while every > 0 and step // every > MAX_EMA_SNAPSHOTS:
        every *= 2
    return every


def take_snapshot(state: TrainState, step: int) -> EmaSnapshot:
    """Copy the EMAs of a state to host memory in float16."""
    assert state.second_ema is not None
    averages = [state.ema, state.second_ema]
    names = [name for name, _ in state.model.named_parameters()]
    tensors = {
        f"{number}/{name}": tensor.to("cpu", copy=True).contiguous()
        for number, average in enumerate(averages)
        for name, tensor in zip(names, _to_float16(average.parameters))
    }
    buffers = (name for name, _ in state.model.named_buffers())
    kept = state.model.state_dict().keys()
    tensors |= {f"buffer/{n}": b.to("cpu", copy=True) for n, b in zip(buffers, state.ema.buffers) if n in kept}
    return EmaSnapshot(step, state.updates, tuple(average.width for average in averages), tensors)


def _to_float16(tensors: list[Tensor]) -> list[Tensor]:
    """Cast to float16, except tensors with values that would be infinite there."""
    halves = [tensor.to(torch.float16) for tensor in tensors]
    # Stacked, because each value that is read makes the host wait for the device.
    finite = torch.stack([half.isfinite().all() for half in halves]).tolist()
    return [half if good else tensor for half, good, tensor in zip(halves, finite, tensors)]


def write_snapshot(taken: EmaSnapshot, folder: Path) -> None:
    """Write a snapshot. Raises OSError if that fails, and then leaves nothing."""
    folder.mkdir(exist_ok=True)  # without parents: a run that was moved must not be created again
    path, partial = folder / f"{taken.step:08d}.safetensors", folder / f".partial-{taken.step:08d}"
    said = {METADATA_KEY: json.dumps({"step": taken.step, "updates": taken.updates, "widths": taken.widths})}
    try:
        with system_errors():
            save_file(taken.tensors, partial, said)
        partial.chmod(0o666 & folder.stat().st_mode)  # safetensors lets the owner alone read its files
        sync(partial)
        partial.replace(path)
        sync(folder)
    finally:
        partial.unlink(missing_ok=True)


def _remove_surplus(folder: Path, every: int, step: int) -> None:
    """Remove the snapshots that a doubled interval skips."""
    apart = snapshot_interval(every, step)
    for one in list_snapshots(folder):
        if one.step % apart and one.step != step:
            one.path.unlink(missing_ok=True)


def remove_after(folder: Path, step: int) -> None:
    """Remove snapshots after a step that the run has gone back to, and what a crash left half done."""
    for path in folder.glob("[0-9]*.safetensors"):
        if path.stem.isdecimal() and int(path.stem) > step:
            path.unlink(missing_ok=True)
    for path in folder.glob(".partial-*"):
        path.unlink(missing_ok=True)


class EmaSnapshotWriter:
    """Writes snapshots in a thread, one after the other."""

    def __init__(self, settings: EmaSnapshots):
        self.settings = settings
        self._thread: threading.Thread | None = None
        self._failed: deque[tuple[int, str]] = deque()

    def submit(self, taken: EmaSnapshot, folder: Path) -> None:
        """Begin to write a snapshot, once the one before is done."""
        self.wait()
        self._thread = threading.Thread(target=self._work, args=(taken, folder), name="averages", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until nothing is being written: seconds at most, because a full disk is an error here."""
        if self._thread is not None:
            self._thread.join()

    def failures(self) -> list[tuple[int, str]]:
        """Return (step, reason) of the snapshots that could not be written since the last call."""
        return [self._failed.popleft() for _ in range(len(self._failed))]

    def _work(self, taken: EmaSnapshot, folder: Path) -> None:
        if not all(tensor.isfinite().all() for tensor in taken.tensors.values()):
            self._failed.append((taken.step, "it is not finite"))
            return
        try:
            write_snapshot(taken, folder)
            with suppress(OSError):
                _remove_surplus(folder, self.settings.every, taken.step)
        except OSError as error:
            self._failed.append((taken.step, error.strerror or str(error)))
