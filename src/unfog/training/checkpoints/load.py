"""Load checkpoints: tensor files in one piece or in shards, copied into a training state or a network.

model.safetensors stands for itself or, if it does not exist, for its shards model-00001-of-00004.safetensors and so on.
A shard stores where the rows of each tensor begin, as torch's `HuggingFaceStorageWriter(save_distributed=True)` does,
so `torch.distributed.checkpoint` reads the same files.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from unfog.errors import RunError
from unfog.files.safe_files import file_digest, replace_file, tensor_file
from unfog.training.checkpoints.format import (
    CONFIG,
    EMA2,
    SHARDING,
    STATE,
    BrokenCheckpoint,
    CheckpointInfo,
    list_checkpoints,
    read_state_json,
    run_of,
)
from unfog.training.sharded_tensors import first_local_row, is_sharded, to_local
from unfog.training.state import TrainState


class _Rows(NamedTuple):
    """Rows of a tensor in one file."""

    first: int
    rows: int
    file: Any
    """An open `safe_open`."""


class TensorFile:
    """The tensors of a file or of its shards, memory-mapped. RunError if it cannot be read, or rows are missing."""

    def __init__(self, path: Path, root: Path):
        self.path = path
        self.shapes: dict[str, list[int]] = {}
        """Shapes of the full tensors."""
        self._pieces: dict[str, list[_Rows]] = {}
        with self._reading():
            for part in _shard_paths(path):
                self._add(safe_open(tensor_file(part, root), "pt"))
            for name, pieces in self._pieces.items():
                pieces.sort(key=lambda piece: piece.first)
                ends = [0, *(piece.first + piece.rows for piece in pieces)]
                if ends[:-1] != [piece.first for piece in pieces]:
                    raise ValueError(f"rows of {name} are missing, or there twice")
                if self.shapes[name]:
                    self.shapes[name][0] = ends[-1]

    def _add(self, file: Any) -> None:
        told = (file.metadata() or {}).get(SHARDING)
        starts = {} if told is None else json.loads(told)
        for name in file.keys():  # noqa: SIM118  it is not a dict
            shape = list(file.get_slice(name).get_shape())
            start = starts[name]["saved_offsets"] if told is not None else [0] * len(shape)
            # Also one that torch wrote for another way of sharding, which is not read here.
            if len(start) != len(shape) or any(start[1:]) or self.shapes.setdefault(name, shape)[1:] != shape[1:]:
                raise ValueError(f"{name} is not divided by rows")
            first, rows = (int(start[0]), shape[0]) if shape else (0, 0)
            self._pieces.setdefault(name, []).append(_Rows(first, rows, file))

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunError(f"{self.path} cannot be read: {error}") from None

    def copy_into(self, name: str, tensor: Tensor) -> None:
        """Copy a stored tensor into one of the same shape; into a sharded one, this rank's rows."""
        mine, first = to_local(tensor.detach()), first_local_row(tensor)
        with self._reading():
            if not mine.ndim:
                mine.copy_(self._pieces[name][0].file.get_tensor(name))
                return
            for at, rows, file in self._pieces[name]:
                # It may be of a run with another number of ranks, so pieces and rows need not fit each other.
                begin, end = max(at, first), min(at + rows, first + len(mine))
                if begin < end:
                    mine[begin - first : end - first].copy_(file.get_slice(name)[begin - at : end - at])

    def tensor(self, name: str, like: Tensor | None = None) -> Tensor:
        """Read a tensor to host memory; if `like` is sharded and of its shape, this rank's rows to `like`'s device."""
        dtype = self._dtype(name)
        if like is not None and is_sharded(like) and list(like.shape) == self.shapes[name]:
            made = torch.empty_like(like, dtype=dtype)
        else:
            made = torch.empty(self.shapes[name], dtype=dtype)
        self.copy_into(name, made)
        return made

    def _dtype(self, name: str) -> torch.dtype:
        with self._reading():
            some = self._pieces[name][0].file
            found: Tensor = some.get_slice(name)[:0] if self.shapes[name] else some.get_tensor(name)
            return found.dtype

    def header_entry(self, name: str, begin: int) -> dict[str, Any]:
        """Return the entry of a full tensor in a safetensors header whose data begins at byte `begin`."""
        shape, kind = self.shapes[name], self._pieces[name][0].file.get_slice(name).get_dtype()
        size = self._dtype(name).itemsize * math.prod(shape)
        return {"dtype": kind, "shape": shape, "data_offsets": [begin, begin + size]}

    def load_into(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy all stored tensors into `tensors`. Raises ValueError if names or shapes differ."""
        wrong = [name for name in sorted({*tensors, *self.shapes}) if name not in tensors or name not in self.shapes]
        wrong += [n for n, t in tensors.items() if n in self.shapes and self.shapes[n] != list(t.shape)]
        if wrong:
            more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            raise ValueError(f"{wrong[0]} is in one of them only, or of another shape{more}")
        for name, tensor in tensors.items():
            self.copy_into(name, tensor)


def write_merged(path: Path, out: Path) -> None:
    """Merge the shards of `path`, a file of a checkpoint, into the file `out`, with no more than one tensor in memory.

    Raises:
        RunError: it cannot be read.
        OSError: it cannot be written.
    """
    # By hand: safetensors writes only what is all in memory, and torch's `consolidate_safetensors_files` loses tensors
    # without dimensions.
    stored, begin = TensorFile(path, run_of(path.parent)), 0
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name in stored.shapes:
        header[name] = stored.header_entry(name, begin)
        begin = header[name]["data_offsets"][1]
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)  # aligns the tensors
    with replace_file(out, out.parent) as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for name in stored.shapes:
            file.write(stored.tensor(name).reshape(-1).view(torch.uint8).numpy().data)


def load_checkpoint(folder: Path, state: TrainState) -> None:
    """Restore `state` from a checkpoint, on any device. Raises RunError if it is of another network."""
    load_tensors(folder, state)
    state.load_progress(read_state(folder))


def roll_back(folder: Path, state: TrainState) -> None:
    """Return to the weights of a checkpoint, while the position stays where it is."""
    load_tensors(folder, state)
    state.roll_back_to(read_state(folder))


def find_rollback_checkpoint(
    checkpoints: Path, state: TrainState, patience: int
) -> tuple[CheckpointInfo | None, list[BrokenCheckpoint]]:
    """Return the checkpoint that a roll-back of this state returns to, or None, and the broken ones passed over.

    That is the newest rollback checkpoint. But if fewer than `patience` ordinary steps have followed the last
    roll-back, its weights may be bad already, and the one before it is chosen, if there is one.

    Raises:
        RunError: one that would be passed over cannot be read now, and may be whole.
    """
    guard, limits = state.guard, [state.seen]
    if guard.roll_backs and guard.ordinary < patience:
        # In order of preference: strictly before the checkpoint of the last roll-back, that one again, then any.
        limits = [guard.rollback_images - 1, guard.rollback_images, state.seen]
    saved, unusable = list_checkpoints(checkpoints)
    found: CheckpointInfo | None = None
    # Kept, as one may lie within several limits, and looking for damage reads all of its files.
    damaged: dict[Path, str] = {}
    for one in (one for limit in limits for one in reversed(saved) if one.anchor and one.images <= limit):
        if one.folder in damaged:
            continue
        if (wrong := one.find_damage()) is None:
            found = one
            break
        damaged[one.folder] = wrong
    # Without a manifest nobody knows whether a roll-back might have returned to them, so they count by their names.
    newer = [one for one in unusable if one.folder.name > ("" if found is None else found.folder.name)]
    if unreadable := next((one for one in newer if one.unreadable), None):
        raise RunError(str(unreadable))
    return found, newer + [BrokenCheckpoint(folder, wrong) for folder, wrong in damaged.items()]


def load_tensors(folder: Path, state: TrainState) -> None:
    """Load weights, EMAs and moments into `state`, of a sharded one this rank's rows. RunError if they do not fit."""
    _load_into(folder, "model", state.model.state_dict())
    _load_into(folder, "ema", state.ema.state_dict(state.model))
    if state.second_ema is not None:
        # A run without a second EMA has nothing nearer than its first.
        kind = "ema2" if _shard_paths(folder / EMA2)[0].exists() else "ema"
        _load_into(folder, kind, state.second_ema.state_dict(state.model))
    stored = TensorFile(folder / "optimizer.safetensors", run_of(folder))
    parameters = dict(state.model.named_parameters())
    moments = {name: stored.tensor(name, parameters.get(name.partition("/")[2])) for name in stored.shapes}
    try:
        state.load_optimizer(moments, read_state(folder))
    except (ValueError, LookupError) as error:
        raise RunError(f"the optimiser's moments in {folder} do not fit the network: {error}") from None


def read_state(folder: Path) -> dict[str, Any]:
    """Read state.json. Raises RunError if it cannot be read."""
    try:
        return read_state_json(folder)
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{folder / STATE} cannot be read: {error}") from None


def read_tensors(path: Path, root: Path) -> dict[str, Tensor]:
    """Read the tensors of a file below `root`, or of its shards. Raises RunError if it is damaged."""
    stored = TensorFile(path, root)
    return {name: stored.tensor(name) for name in stored.shapes}


def load_weights(folder: Path, kind: str, network: nn.Module) -> None:
    """Load the weights "model", "ema" or "ema2" into a network. Raises RunError if they do not fit."""
    _load_into(folder, kind, network.state_dict())


def _load_into(folder: Path, kind: str, tensors: dict[str, Tensor]) -> None:
    try:
        TensorFile(folder / f"{kind}.safetensors", run_of(folder)).load_into(tensors)
    except ValueError as error:
        raise RunError(
            f"the weights in {folder} do not fit the network that config.toml describes; was it edited? The settings "
            f"that they were trained with are in {folder / CONFIG} ({error})"
        ) from None


def _shard_paths(path: Path) -> list[Path]:
    """Return the file, or its shards in order."""
    return [path] if path.exists() else sorted(path.parent.glob(f"{path.stem}-*-of-*.safetensors")) or [path]


def sha256_of(path: Path, root: Path) -> str:
    """Return the hex digest of a file below `root`; of a sharded one, that of its shards' digests."""
    digests = [file_digest(file, root) for file in _shard_paths(path)]
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
