"""Checkpoints on disk: whole or absent, named by step, verified by content.

checkpoints/00001000/manifest.json       step, images, versions, sha256 of every other file; written last
checkpoints/00001000/model.safetensors   weights under the network's own names
checkpoints/00001000/ema.safetensors     the average, same names
checkpoints/00001000/state.pt            optimiser, scaler, position; loads with weights_only=True
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from unfog.errors import RequestError, RunError
from unfog.training.settings import Checkpoint
from unfog.training.state import TrainState

FORMAT = 1
MANIFEST = "manifest.json"


class Saved(NamedTuple):
    """A whole checkpoint."""

    folder: Path
    step: int
    images: int


def save(checkpoints: Path, step: int, state: TrainState, keep: Checkpoint) -> Path:
    """Write a checkpoint of `state` under `checkpoints` and remove those that `keep` no longer wants.

    Everything is written to a temporary folder, synced, and renamed: a crash leaves the old checkpoints as they were.

    Raises:
        RunError: a weight is not finite; nothing is saved then.
    """
    weights = {"model": state.model.state_dict(), "ema": state.ema.state_dict(state.model)}
    for kind, tensors in weights.items():
        refuse_non_finite(kind, tensors, step)
    folder, partial = checkpoints / f"{step:08d}", checkpoints / f".partial-{step:08d}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for kind, tensors in weights.items():
        save_file({n: t.detach().cpu().contiguous() for n, t in tensors.items()}, partial / f"{kind}.safetensors")
    torch.save(state.progress(), partial / "state.pt")
    manifest = {
        "format": FORMAT,
        "step": step,
        "images": state.seen,
        "torch": torch.__version__,
        "files": {path.name: sha256(path) for path in sorted(partial.iterdir())},
    }
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    for path in partial.iterdir():
        sync(path)
    sync(partial)
    if folder.exists():  # the same step again, after going back to an older checkpoint
        shutil.rmtree(folder)
    partial.rename(folder)
    sync(checkpoints)
    rotate(checkpoints, keep)
    return folder


def refuse_non_finite(kind: str, tensors: dict[str, Tensor], step: int) -> None:
    """Raise RunError if any floating-point tensor holds NaN or infinity."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise RunError(
                f"{name} of the {kind} weights is not finite at step {step}, so this checkpoint was not saved; "
                "the one before it is whole. Resume from there with a lower --lr."
            )


def rotate(checkpoints: Path, keep: Checkpoint) -> None:
    """Remove all but the newest `keep.keep` whole checkpoints and the milestones."""
    saved, _ = whole(checkpoints, verify=False)
    for old in saved[: -keep.keep or None] if keep.keep > 0 else []:
        if not (keep.milestones and old.step % keep.milestones == 0):
            shutil.rmtree(old.folder)


def whole(checkpoints: Path, verify: bool = True) -> tuple[list[Saved], list[str]]:
    """All whole checkpoints, oldest first, and a line on each that is not.

    What a folder holds decides, not what it is called. With `verify` every file's sha256 is compared.
    """
    found, broken = [], []
    for folder in sorted(checkpoints.iterdir()) if checkpoints.is_dir() else []:
        if not folder.is_dir() or folder.name.startswith("."):
            continue
        try:
            manifest = json.loads((folder / MANIFEST).read_text())
            if manifest["format"] != FORMAT:
                raise ValueError(f"format {manifest['format']} is not {FORMAT}")
            for name, digest in manifest["files"].items():
                path = folder / Path(name).name
                if not path.is_file():
                    raise ValueError(f"{name} is missing")
                if verify and sha256(path) != digest:
                    raise ValueError(f"{name} is not what was saved (sha256 differs)")
            found.append(Saved(folder, int(manifest["step"]), int(manifest["images"])))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            broken.append(f"checkpoint {folder.name} is broken and was passed over: {error}")
    return sorted(found, key=lambda saved: (saved.images, saved.folder.name)), broken


def newest(checkpoints: Path) -> tuple[Saved | None, list[str]]:
    """The newest whole checkpoint, verified, and a line on each broken one; None if nothing was ever saved.

    Raises:
        RunError: there are checkpoints, and all of them are broken.
    """
    found, broken = whole(checkpoints)
    if broken and not found:
        raise RunError(f"no whole checkpoint in {checkpoints}: {'; '.join(broken)}")
    return (found[-1] if found else None), broken


def find(checkpoints: Path, step: int | None) -> Saved:
    """The whole checkpoint of a step; the newest for None.

    Raises:
        RequestError: there is none of that step.
        RunError: there is none at all, or all are broken.
    """
    if step is None:
        saved, _ = newest(checkpoints)
        if saved is None:
            raise RunError(f"nothing has been saved in {checkpoints} yet; go on with unfog resume")
        return saved
    found, _ = whole(checkpoints)
    for saved in found:
        if saved.step == step:
            return saved
    steps = ", ".join(str(saved.step) for saved in found) or "none"
    raise RequestError(f"there is no whole checkpoint of step {step}; there is {steps}")


def load(folder: Path, state: TrainState) -> None:
    """Restore `state` from a whole checkpoint, on whatever device it lives."""
    state.model.load_state_dict(load_weights(folder, "model"), strict=True)
    state.ema.load_state_dict(state.model, load_weights(folder, "ema"))
    saved: dict[str, Any] = torch.load(folder / "state.pt", map_location=state.precision.device, weights_only=True)
    state.load_progress(saved)


def load_weights(folder: Path, kind: str) -> dict[str, Tensor]:
    """Weights of a checkpoint on the CPU; `kind` is "model" or "ema"."""
    weights: dict[str, Tensor] = load_file(folder / f"{kind}.safetensors")
    return weights


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Have the disk hold what was written to a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
