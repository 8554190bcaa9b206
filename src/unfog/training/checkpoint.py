"""Checkpoints on disk: whole or absent, named by step, verified by content.

    checkpoints/00001000/manifest.json       step, images, versions, sha256 of every other file; written last
    checkpoints/00001000/model.safetensors   weights under the network's own names
    checkpoints/00001000/ema.safetensors     the average, same names
    checkpoints/00001000/state.pt            optimiser, scaler, position; loads with weights_only=True

Names that begin with a dot are work in progress, or what was broken and set aside; they are never read.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from unfog.errors import RequestError, RunError
from unfog.training.settings import Checkpoint
from unfog.training.state import TrainState

FORMAT = 1
MANIFEST = "manifest.json"


class Saved(NamedTuple):
    """A checkpoint, as its manifest describes it."""

    folder: Path
    step: int
    images: int
    files: dict[str, str]


class Broken(NamedTuple):
    """A folder that should be a checkpoint and is none, and why."""

    folder: Path
    reason: str

    def __str__(self) -> str:
        return f"checkpoint {self.folder.name} is broken and is passed over: {self.reason}"


def save(checkpoints: Path, step: int, state: TrainState, keep: Checkpoint) -> Path:
    """Write a checkpoint of `state` under `checkpoints` and remove those that `keep` no longer wants.

    Everything is written to a hidden folder, synced, and renamed: a crash leaves the other checkpoints as they were.

    Raises:
        RunError: a weight is not finite, or the disk refuses; nothing is saved then.
    """
    weights = {"model": state.model.state_dict(), "ema": state.ema.state_dict(state.model)}
    for kind, tensors in weights.items():
        refuse_non_finite(kind, tensors, step)
    folder, partial = checkpoints / f"{step:08d}", checkpoints / f".partial-{step:08d}"
    try:
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
        for path in [*partial.iterdir(), partial]:
            sync(path)
        if folder.exists():  # the same step once more
            remove(folder)
        partial.rename(folder)
        sync(checkpoints)
    except (OSError, RuntimeError) as error:  # torch's writer raises the latter when the disk is full
        shutil.rmtree(partial, ignore_errors=True)
        raise RunError(
            f"the checkpoint of step {step} could not be written to {checkpoints} ({error}); earlier ones are whole. "
            "Make room, then resume."
        ) from error
    rotate(checkpoints, keep, spare=folder)
    return folder


def refuse_non_finite(kind: str, tensors: dict[str, Tensor], step: int) -> None:
    """Raise RunError if any floating-point tensor holds NaN or infinity."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise RunError(
                f"{name} of the {kind} weights is not finite at step {step}, so this checkpoint was not saved; "
                "the one before it is whole. Resume from there with a lower --lr."
            )


def rotate(checkpoints: Path, keep: Checkpoint, spare: Path | None = None) -> None:
    """Remove all checkpoints but the newest `keep.keep`, the milestones and `spare`, which was just written."""
    saved, _ = described(checkpoints)
    for old in saved[: -keep.keep]:
        if old.folder != spare and not (keep.milestones and old.step % keep.milestones == 0):
            remove(old.folder)


def remove(folder: Path) -> None:
    """Delete a checkpoint so that it is whole or gone, never half there under its name."""
    aside = folder.with_name(f".old-{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def described(checkpoints: Path) -> tuple[list[Saved], list[Broken]]:
    """What there is by its manifests, oldest first, and the folders without a usable one. Reads no weights."""
    found: list[Saved] = []
    broken: list[Broken] = []
    for folder in sorted(checkpoints.iterdir()) if checkpoints.is_dir() else []:
        if not folder.is_dir() or folder.name.startswith("."):
            continue
        try:
            manifest = json.loads((folder / MANIFEST).read_text())
            if manifest["format"] != FORMAT:
                raise ValueError(f"its format is {manifest['format']}, and this version reads {FORMAT}")
            files = {Path(name).name: str(digest) for name, digest in manifest["files"].items()}
            found.append(Saved(folder, int(manifest["step"]), int(manifest["images"]), files))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            broken.append(Broken(folder, f"{MANIFEST}: {error}"))
    return sorted(found, key=lambda saved: (saved.images, saved.folder.name)), broken


def damage(saved: Saved) -> str | None:
    """What is wrong with the files of a checkpoint, after reading them all; None if nothing is."""
    for name, digest in saved.files.items():
        try:
            if sha256(saved.folder / name) != digest:
                return f"{name} is not what was saved (sha256 differs)"
        except OSError as error:
            return f"{name}: {error.strerror}"
    return None


def newest(checkpoints: Path) -> tuple[Saved | None, list[Broken]]:
    """The newest whole checkpoint, verified, and the broken ones passed over; None if nothing was ever saved.

    What the folders hold decides, not what they are called.

    Raises:
        RunError: there are checkpoints, and all of them are broken.
    """
    found, broken = described(checkpoints)
    for saved in reversed(found):
        wrong = damage(saved)
        if wrong is None:
            return saved, broken
        broken.append(Broken(saved.folder, wrong))
    if broken:
        raise RunError(f"no whole checkpoint in {checkpoints}: {'; '.join(map(str, broken))}")
    return None, []


def find(checkpoints: Path, step: int | None) -> Saved:
    """The whole checkpoint of a step; the newest for None.

    Raises:
        RequestError: there is none of that step.
        RunError: it is broken, or nothing has been saved.
    """
    if step is None:
        saved, _ = newest(checkpoints)
        if saved is None:
            raise RunError(f"nothing has been saved in {checkpoints} yet; go on with unfog resume")
        return saved
    found, _ = described(checkpoints)
    wanted = next((saved for saved in found if saved.step == step), None)
    if wanted is None:
        steps = ", ".join(str(saved.step) for saved in found) or "none"
        raise RequestError(f"there is no checkpoint of step {step}; there is {steps}")
    if wrong := damage(wanted):
        raise RunError(str(Broken(wanted.folder, wrong)))
    return wanted


def clear_away(checkpoints: Path, broken: list[Broken]) -> None:
    """Remove what a crash left half done, and hide what is broken, so that it is not counted among those to keep."""
    for folder in checkpoints.glob(".[po]*"):
        if folder.name.startswith((".partial-", ".old-")):
            shutil.rmtree(folder, ignore_errors=True)
    for folder, _ in broken:
        aside = folder.with_name(f".broken-{folder.name}")
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)


def load(folder: Path, state: TrainState) -> None:
    """Restore `state` from a whole checkpoint, on whatever device it lives."""
    load_weights(folder, "model", state.model)
    with state.ema.swapped_into(state.model):
        load_weights(folder, "ema", state.model)
    saved: dict[str, Any] = torch.load(folder / "state.pt", map_location=state.precision.device, weights_only=True)
    state.load_progress(saved)


def load_weights(folder: Path, kind: str, network: nn.Module) -> None:
    """Put the weights of a checkpoint into a network; `kind` is "model" or "ema".

    Raises:
        RunError: they are those of another network.
    """
    try:
        network.load_state_dict(load_file(folder / f"{kind}.safetensors"), strict=True)
    except RuntimeError as error:
        raise RunError(
            f"the weights in {folder} do not fit the network that config.toml describes; was it edited? ({error})"
        ) from None


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Have the disk hold what was written to a file, or the names in a folder, where the file system can promise it."""
    if path.is_file():
        with path.open("r+b") as file:
            os.fsync(file.fileno())
    elif os.name != "nt":  # Windows keeps folders by itself, and cannot open them
        descriptor = os.open(path, os.O_RDONLY)
        with suppress(OSError):  # some network file systems refuse
            os.fsync(descriptor)
        os.close(descriptor)
