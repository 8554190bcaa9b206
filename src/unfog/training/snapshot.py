"""A copy of the training state in host memory, and its way to disk while training goes on."""

from __future__ import annotations

import json
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from unfog.training import checkpoint, rotation
from unfog.training.state import HELD_OUT_LOSS, TrainState, metric_of


class Snapshot(NamedTuple):
    """Everything that a checkpoint holds, on the CPU and no longer changing."""

    step: int
    tensors: dict[str, dict[str, Tensor]]
    """By file (model, ema, optimizer), then by name."""
    progress: dict[str, Any]
    """`TrainState.progress`."""
    anchor: bool
    """Whether a roll-back may come back to it: taken at a regular interval, when all was well."""
    for_best: bool
    """Whether it is only for what it measures, and may go when there is a better one."""
    config: str
    """The settings, as TOML."""
    made_on: str
    """`Precision.machine`."""
    seconds: float
    """What the copy took; training stood still meanwhile."""

    @property
    def bytes(self) -> int:
        """Size of the tensors."""
        return sum(t.numel() * t.element_size() for tensors in self.tensors.values() for t in tensors.values())


def take(state: TrainState, step: int, anchor: bool = False, for_best: bool = False, config: str = "") -> Snapshot:
    """Copy a state to host memory. What is in it should be finite: see `TrainState.non_finite`."""
    started = time.perf_counter()
    tensors = {
        file: {name: t.detach().to("cpu", copy=not state.copied).contiguous() for name, t in tensors.items()}
        for file, tensors in state.tensors().items()
    }
    seconds = time.perf_counter() - started
    return Snapshot(step, tensors, state.progress(), anchor, for_best, config, state.precision.machine(), seconds)


def write(snapshot: Snapshot, checkpoints: Path) -> Path:
    """Write a checkpoint: whole, read back and compared with the snapshot, or not at all (OSError).

    It is made in a hidden folder, synced, verified and renamed, so a crash leaves the others as they were.
    """
    folder, partial = checkpoints / f"{snapshot.step:08d}", checkpoints / f".partial-{snapshot.step:08d}"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write_files(snapshot, partial)
        verify(snapshot, partial)
        (partial / checkpoint.MANIFEST).write_text(json.dumps(manifest_of(snapshot, partial), indent=2) + "\n")
        sync(partial / checkpoint.MANIFEST)
        sync(partial)
        rotation.replace(partial, folder)
        sync(checkpoints)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError) or "os error" not in str(error).lower():
            raise
        # safetensors wraps what the system said in an exception of its own.
        raise OSError(system_error(str(error)), str(error)) from error
    return folder


def write_files(snapshot: Snapshot, folder: Path) -> None:
    """Write all but the manifest."""
    (folder / checkpoint.STATE).write_text(json.dumps(snapshot.progress, allow_nan=False))
    (folder / checkpoint.CONFIG).write_bytes(snapshot.config.encode())
    for file, tensors in snapshot.tensors.items():
        save_file(tensors, folder / f"{file}.safetensors")
    for path in folder.iterdir():
        path.chmod((folder / checkpoint.STATE).stat().st_mode)  # safetensors lets the owner alone read its files
        sync(path)


def manifest_of(snapshot: Snapshot, folder: Path) -> dict[str, Any]:
    """What the manifest of these files says."""
    manifest: dict[str, Any] = {
        "format": checkpoint.FORMAT,
        "step": snapshot.step,
        "images": snapshot.progress["seen"],
        "anchor": snapshot.anchor,
        "for_best": snapshot.for_best,
        "held_out_loss": snapshot.progress["last"].get("held_out_loss"),
        "chosen_by": snapshot.progress["keys"].get("best", HELD_OUT_LOSS),
        "value": snapshot.progress["last"].get(metric_of(snapshot.progress["keys"])),
        "measure": snapshot.progress["keys"].get("measure", ""),
        "made_on": snapshot.made_on,
        "files": {
            path.name: {"bytes": path.stat().st_size, "sha256": checkpoint.sha256(path)}
            for path in sorted(folder.iterdir())
        },
    }
    return manifest | {"sha256": checkpoint.digest(manifest)}


def verify(snapshot: Snapshot, folder: Path) -> None:
    """Read the files back and compare them with what was to be written. OSError if they differ."""
    for file, tensors in snapshot.tensors.items():
        path = folder / f"{file}.safetensors"
        found = load_file(path)
        if found.keys() != tensors.keys() or not all(torch.equal(found[name], t) for name, t in tensors.items()):
            raise OSError(f"{path.name} does not read back as it was written")
    if (folder / checkpoint.STATE).read_text() != json.dumps(snapshot.progress):
        raise OSError(f"{checkpoint.STATE} does not read back as it was written")
    if (folder / checkpoint.CONFIG).read_bytes() != snapshot.config.encode():
        raise OSError(f"{checkpoint.CONFIG} does not read back as it was written")


def system_error(text: str) -> int:
    """The errno in "No space left on device (os error 28)"; 0 if there is none."""
    digits = text.lower().partition("os error ")[2].partition(")")[0]
    return int(digits) if digits.isdigit() else 0


def sync(path: Path) -> None:
    """Have the disk hold what was written to a file, or the names in a folder, where the file system can promise it.

    Forgets a file's cached pages where that can be asked for, so that reading it asks the disk.
    """
    if path.is_file():
        with path.open("r+b") as file:
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    elif os.name != "nt":  # Windows keeps folders by itself, and cannot open them
        descriptor = os.open(path, os.O_RDONLY)
        with suppress(OSError):  # some network file systems refuse
            os.fsync(descriptor)
        os.close(descriptor)
