"""Snapshots: a copy of the training state in host memory, and its writing to disk while training goes on."""

from __future__ import annotations

import json
import math
import os
import re
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

from unfog.device.copies import HostCopies
from unfog.files.safe_files import (
    LARGEST_TEXT,
    file_digest,
    make_folder,
    new_file,
    open_file,
    read_file,
    remove_tree,
    tensor_file,
    write_atomic,
)
from unfog.training.checkpoints import format as checkpoint
from unfog.training.checkpoints import rotation
from unfog.training.checkpoints.format import SHARDING, run_of
from unfog.training.sharded_tensors import first_local_row, is_sharded, to_local
from unfog.training.state import HELD_OUT_LOSS, TrainState, best_metric

# Bytes and sha256 of a file, as in the manifest.
FileEntry = dict[str, Any]


class Snapshot(NamedTuple):
    """Everything that a checkpoint holds, copied to host memory."""

    step: int
    tensors: dict[str, dict[str, Tensor]]
    """By file (model, ema, optimizer), then by name."""
    progress: dict[str, Any]
    """`TrainState.progress`."""
    anchor: bool
    """Whether a roll-back may return to it: taken at a regular interval, when training was stable."""
    for_best: bool
    """Whether it is kept only until there is a better one."""
    config: str
    """The settings, as TOML."""
    made_on: str
    """`Precision.machine`."""
    seconds: float
    """Duration of the copy, during which training stood still."""
    first_rows: dict[str, dict[str, int]] | None = None
    """Index of the first row in the full tensor, by file and name, if the state is sharded."""
    rank: int = 0
    size: int = 1
    """Ranks that hold a shard of it."""

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for tensors in self.tensors.values() for t in tensors.values())

    def publish(self, partial: Path, folder: Path, files: Mapping[str, FileEntry]) -> None:
        """Make files on disk a checkpoint: write the manifest and rename the folder. Raises OSError if that fails."""
        text = _manifest_text(checkpoint.FORMAT if self.size == 1 else checkpoint.FORMAT_SHARDED, _facts(self), files)
        write_atomic(partial / checkpoint.MANIFEST, text.encode(), run_of(partial))
        # By the reader itself, before an older checkpoint goes.
        checkpoint.CheckpointInfo.read(partial)
        checkpoint.read_state_json(partial)
        # The folder's names too: after a power cut a renamed folder with no files in it would be a broken checkpoint.
        sync(partial)
        rotation.replace_checkpoint(partial, folder)
        sync(folder.parent)

    def verify_files(self, folder: Path) -> None:
        """Read the files back and compare them with the snapshot. Raises OSError if they differ."""
        for file, tensors in self.tensors.items():
            path = folder / _shard_name(file, self.rank, self.size)
            # From the disk, as `sync` has dropped the cached pages; a checksum would be of what was written.
            found = load_file(tensor_file(path, run_of(folder)))
            if found.keys() != tensors.keys() or not all(torch.equal(found[name], t) for name, t in tensors.items()):
                raise OSError(f"{path.name} does not read back as it was written")
        for name, content in _small_files(self).items():
            if read_file(folder / name, run_of(folder), LARGEST_TEXT) != content:
                raise OSError(f"{name} does not read back as it was written")

    def write_files(self, folder: Path) -> list[Path]:
        """Write all files but the manifest; of a sharded snapshot, this rank's. Returns the files."""
        written = []
        for name, content in _small_files(self).items():
            write_atomic(folder / name, content, run_of(folder), durable=False)  # flushed below
            written.append(folder / name)
        for file, tensors in self.tensors.items():
            path = folder / _shard_name(file, self.rank, self.size)
            rows = None if self.first_rows is None else _shard_metadata(tensors, self.first_rows[file])
            save_file(tensors, new_file(path, run_of(folder)), rows)
            written.append(path)
        for path in written:
            path.chmod(0o666 & folder.stat().st_mode)  # safetensors lets the owner alone read its files
            sync(path)
        return written


def take_snapshot(
    state: TrainState,
    step: int,
    anchor: bool = False,
    for_best: bool = False,
    config: str = "",
    most_pinned: float = math.inf,
) -> Snapshot:
    """Copy a state to host memory: of a sharded state this rank's rows, and on rank 0 what is not sharded.

    At most `most_pinned` bytes of it are pinned. The caller checks that the state is finite: see
    `TrainState.non_finite`.
    """
    started = time.perf_counter()
    held = state.tensors()
    shared = any(is_sharded(tensor) for tensors in held.values() for tensor in tensors.values())
    rank, size = (dist.get_rank(), dist.get_world_size()) if shared else (0, 1)
    copies: dict[str, dict[str, Tensor]] = {file: {} for file in held}
    rows: dict[str, dict[str, int]] = {file: {} for file in held}
    memory = HostCopies(sum(to_local(t).nbytes for tensors in held.values() for t in tensors.values()), most_pinned)
    for file, tensors in held.items():
        for name, tensor in tensors.items():
            local = to_local(tensor)
            # The last ranks may hold no rows, and what is not sharded is the same on every rank.
            if not len(local) if is_sharded(tensor) else rank > 0:
                continue
            copies[file][name] = memory.add(local.detach(), state.in_host_memory)
            if is_sharded(tensor):
                rows[file][name] = first_local_row(tensor)
    if state.precision.device.type == "cuda":
        torch.cuda.current_stream().synchronize()
    seconds, machine = time.perf_counter() - started, state.precision.describe_machine()
    facts = (anchor, for_best, config, machine, seconds, rows if shared else None, rank, size)
    return Snapshot(step, copies, state.progress(), *facts)


def write_checkpoint(snapshot: Snapshot, checkpoints: Path) -> Path:
    """Write a checkpoint and read it back. Raises OSError if that fails, and then leaves nothing.

    A crash leaves the others as they were: files are written to a hidden folder, synced, verified, and then renamed.
    """
    folder, partial = checkpoints / f"{snapshot.step:08d}", checkpoints / f".partial-{snapshot.step:08d}"
    try:
        with system_errors():
            remove_tree(partial, checkpoints.parent)
            make_folder(partial, checkpoints.parent)
            snapshot.write_files(partial)
            snapshot.verify_files(partial)
            snapshot.publish(partial, folder, file_entries(partial.iterdir()))
    except BaseException:
        remove_tree(partial, checkpoints.parent)
        raise
    return folder


@contextmanager
def system_errors() -> Iterator[None]:
    """Raise OSError where safetensors wraps an error of the system in an exception of its own."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(_errno_of(str(error)), str(error)) from error


def _small_files(snapshot: Snapshot) -> dict[str, bytes]:
    """Return the contents of the files besides tensors, which rank 0 writes."""
    if snapshot.rank > 0:
        return {}
    progress = json.dumps(snapshot.progress, allow_nan=False)
    return {checkpoint.STATE: progress.encode(), checkpoint.CONFIG: snapshot.config.encode()}


def file_entries(files: Iterable[Path]) -> dict[str, FileEntry]:
    """Return the manifest's entries for files."""
    return {f.name: {"bytes": f.stat().st_size, "sha256": file_digest(f, run_of(f.parent))} for f in sorted(files)}


def write_weights_manifest(folder: Path, of: checkpoint.CheckpointInfo) -> None:
    """Write the manifest of a folder of EMA weights alone; step and measurements are those of the checkpoint `of`."""
    facts = {name: getattr(of, name) for name in of._fields if name not in ("folder", "files")}
    facts |= {"anchor": False, "for_best": False}  # neither is of use without a state to go back to
    text = _manifest_text(checkpoint.FORMAT_WEIGHTS, facts, file_entries([folder / checkpoint.EMA]))
    write_atomic(folder / checkpoint.MANIFEST, text.encode(), run_of(folder))


def _facts(snapshot: Snapshot) -> dict[str, Any]:
    """Return the facts of a manifest besides its files: progress, measurements and the machine."""
    progress = snapshot.progress
    return {
        "step": snapshot.step,
        "images": progress["seen"],
        "anchor": snapshot.anchor,
        "for_best": snapshot.for_best,
        "held_out_loss": progress["last"].get("held_out_loss"),
        "chosen_by": progress["keys"].get("best", HELD_OUT_LOSS),
        "value": progress["last"].get(best_metric(progress["keys"])),
        "measure": progress["keys"].get("measure", ""),
        "made_on": snapshot.made_on,
    }


def _manifest_text(format: int, facts: Mapping[str, Any], files: Mapping[str, FileEntry]) -> str:
    """Return the text of a manifest: facts on the checkpoint, its files, and a digest of both."""
    manifest = {"format": format, **facts, "files": dict(sorted(files.items()))}
    return json.dumps(manifest | {"sha256": checkpoint.manifest_digest(manifest)}, indent=2) + "\n"


def _errno_of(text: str) -> int:
    """Return the errno in "No space left on device (os error 28)", or in "Os { code: 28, …"; 0 without one."""
    found = re.search(r"(?:os error|code:) (\d+)", text, re.IGNORECASE)
    return int(found[1]) if found else 0


def _shard_metadata(tensors: Mapping[str, Tensor], first_rows: Mapping[str, int]) -> dict[str, str]:
    """Return a shard's metadata in torch's format: where the rows of each tensor begin in the full tensor."""
    starts = {n: [first_rows.get(n, 0), *[0] * (t.ndim - 1)] if t.ndim else [] for n, t in tensors.items()}
    offsets = {name: {"saved_offsets": start} for name, start in starts.items()}
    return {"format": "pt", "DCP_VERSION": "1.0", SHARDING: json.dumps(offsets)}


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk."""
    if path.is_file():
        with open_file(path, "r+b", path.parent) as file:
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):  # drops the cached pages, so that verification reads the disk
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    elif hasattr(os, "O_DIRECTORY"):  # Windows keeps folders by itself, and cannot open them
        descriptor = os.open(path, os.O_RDONLY)
        with suppress(OSError):  # some network file systems refuse
            os.fsync(descriptor)
        os.close(descriptor)


def _shard_name(file: str, rank: int, size: int) -> str:
    """Return the name of a rank's shard of `file`.safetensors; that itself if there is one rank."""
    return f"{file}-{rank + 1:05d}-of-{size:05d}.safetensors" if size > 1 else f"{file}.safetensors"
