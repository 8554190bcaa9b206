"""A copy of the training state in host memory, and its way to disk while training goes on."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from unfog.training.checkpoints import format as checkpoint
from unfog.training.checkpoints import rotation
from unfog.training.checkpoints.shard_files import sha256, shard_metadata, shard_name
from unfog.training.sharded_tensors import first_local_row, is_sharded, to_local
from unfog.training.state import HELD_OUT_LOSS, TrainState, best_metric

FileEntry = dict[str, Any]
"""Bytes and sha256 of a file, for JSON."""


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
    first_rows: dict[str, dict[str, int]] | None = None
    """Where a state is divided, by file and name: in the whole tensor the first of the rows that are here."""
    rank: int = 0
    size: int = 1
    """Processes that have a part of it."""

    @property
    def bytes(self) -> int:
        """Size of the tensors."""
        return sum(t.numel() * t.element_size() for tensors in self.tensors.values() for t in tensors.values())


def take_snapshot(
    state: TrainState, step: int, anchor: bool = False, for_best: bool = False, config: str = ""
) -> Snapshot:
    """Copy a state to host memory; of one that is divided, the rows that are here, and what is whole everywhere at the
    first process alone. What is in it should be finite: see `TrainState.non_finite`."""
    started = time.perf_counter()
    held = state.tensors()
    shared = any(is_sharded(tensor) for tensors in held.values() for tensor in tensors.values())
    rank, size = (dist.get_rank(), dist.get_world_size()) if shared else (0, 1)
    for tensors in held.values():
        for name in [n for n, t in tensors.items() if (not len(to_local(t)) if is_sharded(t) else rank > 0)]:
            del tensors[name]
    rows = {
        file: {n: first_local_row(t) for n, t in tensors.items() if is_sharded(t)} for file, tensors in held.items()
    }
    copies = {
        file: {
            n: to_local(t).detach().to("cpu", copy=not state.in_host_memory).contiguous() for n, t in tensors.items()
        }
        for file, tensors in held.items()
    }
    seconds, machine = time.perf_counter() - started, state.precision.describe_machine()
    facts = (anchor, for_best, config, machine, seconds, rows if shared else None, rank, size)
    return Snapshot(step, copies, state.progress(), *facts)


def write_checkpoint(snapshot: Snapshot, checkpoints: Path) -> Path:
    """Write a checkpoint: whole, read back and compared with the snapshot, or not at all (OSError).

    It is made in a hidden folder, synced, verified and renamed, so a crash leaves the others as they were.
    """
    folder, partial = checkpoints / f"{snapshot.step:08d}", checkpoints / f".partial-{snapshot.step:08d}"
    try:
        with system_errors():
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            write_files(snapshot, partial)
            verify_files(snapshot, partial)
            publish_checkpoint(snapshot, partial, folder, file_entries(partial.iterdir()))
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return folder


def publish_checkpoint(snapshot: Snapshot, partial: Path, folder: Path, files: Mapping[str, FileEntry]) -> None:
    """Make a checkpoint of files that are on disk: with a manifest, and by its name. OSError if that cannot be."""
    (partial / checkpoint.MANIFEST).write_text(json.dumps(_build_manifest(snapshot, files), indent=2) + "\n")
    sync(partial / checkpoint.MANIFEST)
    sync(partial)
    rotation.replace_checkpoint(partial, folder)
    sync(folder.parent)


@contextmanager
def system_errors() -> Iterator[None]:
    """Raise OSError where safetensors has put what the system said into an exception of its own."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(_errno_of(str(error)), str(error)) from error


def write_files(snapshot: Snapshot, folder: Path) -> list[Path]:
    """Write all but the manifest; of a snapshot that is a part, what it has. Returns the files."""
    written = []
    if snapshot.rank == 0:
        (folder / checkpoint.STATE).write_text(json.dumps(snapshot.progress, allow_nan=False))
        (folder / checkpoint.CONFIG).write_bytes(snapshot.config.encode())
        written += [folder / checkpoint.STATE, folder / checkpoint.CONFIG]
    for file, tensors in snapshot.tensors.items():
        path = folder / shard_name(file, snapshot.rank, snapshot.size)
        if snapshot.first_rows is None:
            save_file(tensors, path)
        else:
            save_file(tensors, path, shard_metadata(tensors, snapshot.first_rows[file]))
        written.append(path)
    for path in written:
        path.chmod(0o666 & folder.stat().st_mode)  # safetensors lets the owner alone read its files
        sync(path)
    return written


def file_entries(files: Iterable[Path]) -> dict[str, FileEntry]:
    """What a manifest says of files."""
    return {f.name: {"bytes": f.stat().st_size, "sha256": sha256(f)} for f in sorted(files)}


def _build_manifest(snapshot: Snapshot, files: Mapping[str, FileEntry]) -> dict[str, Any]:
    """What the manifest of these files says."""
    manifest: dict[str, Any] = {
        "format": checkpoint.FORMAT if snapshot.size == 1 else checkpoint.FORMAT_SHARDED,
        "step": snapshot.step,
        "images": snapshot.progress["seen"],
        "anchor": snapshot.anchor,
        "for_best": snapshot.for_best,
        "held_out_loss": snapshot.progress["last"].get("held_out_loss"),
        "chosen_by": snapshot.progress["keys"].get("best", HELD_OUT_LOSS),
        "value": snapshot.progress["last"].get(best_metric(snapshot.progress["keys"])),
        "measure": snapshot.progress["keys"].get("measure", ""),
        "made_on": snapshot.made_on,
        "files": dict(sorted(files.items())),
    }
    return manifest | {"sha256": checkpoint.manifest_digest(manifest)}


def verify_files(snapshot: Snapshot, folder: Path) -> None:
    """Read the files back and compare them with what was to be written. OSError if they differ."""
    for file, tensors in snapshot.tensors.items():
        path = folder / shard_name(file, snapshot.rank, snapshot.size)
        found = load_file(path)
        if found.keys() != tensors.keys() or not all(torch.equal(found[name], t) for name, t in tensors.items()):
            raise OSError(f"{path.name} does not read back as it was written")
    if snapshot.rank > 0:
        return
    if (folder / checkpoint.STATE).read_text() != json.dumps(snapshot.progress):
        raise OSError(f"{checkpoint.STATE} does not read back as it was written")
    if (folder / checkpoint.CONFIG).read_bytes() != snapshot.config.encode():
        raise OSError(f"{checkpoint.CONFIG} does not read back as it was written")


def _errno_of(text: str) -> int:
    """The errno in "No space left on device (os error 28)", or in "Os { code: 28, …" of before; 0 if there is none."""
    found = re.search(r"(?:os error|code:) (\d+)", text, re.IGNORECASE)
    return int(found[1]) if found else 0


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
