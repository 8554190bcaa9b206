"""Checkpoints on disk: whole or absent, named by step, verified by content.

    checkpoints/00001000/manifest.json           step, images, what made it, size and sha256 of every other file
    checkpoints/00001000/model.safetensors       weights under the network's own names
    checkpoints/00001000/ema.safetensors         EMA of the weights, same names
    checkpoints/00001000/ema2.safetensors        a second EMA, if there is one: see `posthoc_ema`
    checkpoints/00001000/optimizer.safetensors   optimiser moments, as "exp_avg/" and the name of the weight
    checkpoints/00001000/state.json              `TrainState.progress`: position, guard, loss scaler, sums for the log
    checkpoints/00001000/config.toml             the settings that it was trained with

Of a sharded network every rank saves its rows: instead of model.safetensors there are
model-00001-of-00004.safetensors and so on, and likewise for the other tensor files. Readers need not know: see
`shard_files`.

Names that begin with a dot are work in progress, or broken and set aside; they are never read. Nothing is a pickle, so
nothing in a checkpoint can run code. `snapshot` and `sharded` write checkpoints, `rotation` removes them.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from unfog.errors import RequestError, RunError
from unfog.training.checkpoints.shard_files import TensorFile, merge_shard_names, sha256, shard_paths
from unfog.training.state import HELD_OUT_LOSS, TrainState, is_better

FORMAT, FORMAT_SHARDED = 2, 3
MANIFEST, STATE, CONFIG = "manifest.json", "state.json", "config.toml"
FILES = frozenset(["model.safetensors", "ema.safetensors", "optimizer.safetensors", STATE, CONFIG])
EMA2 = "ema2.safetensors"
LARGEST_JSON = 2**20  # bytes; ours have a few thousand


class CheckpointFile(NamedTuple):
    """Expected size and digest of a file."""

    bytes: int
    sha256: str


class CheckpointInfo(NamedTuple):
    """A checkpoint as described by its manifest."""

    folder: Path
    step: int
    images: int
    anchor: bool
    """Whether a roll-back may return to it: taken at a regular interval, when training was stable."""
    for_best: bool
    """Whether it was saved only because its metric was the best so far."""
    held_out_loss: float | None
    """None if it was not measured at this step."""
    measure: str
    """Digest of the evaluation settings; values compare only under equal digests."""
    chosen_by: str
    """Metric of the best checkpoint, such as held_out_loss or kid, and a digest of its settings."""
    value: float | None
    """Value of that metric, or None if it was not measured at this step."""

    @property
    def metric(self) -> str:
        """Name of the metric by which the best checkpoint is chosen."""
        return self.chosen_by.partition(":")[0]

    made_on: str
    """`Precision.describe_machine`; an equal machine repeats the run to the bit."""
    files: dict[str, CheckpointFile]

    def holds(self, name: str) -> bool:
        """Return whether it has this file, such as ema2.safetensors, in one piece or as shards."""
        return name in merge_shard_names(self.files)


class BrokenCheckpoint(NamedTuple):
    """A folder that should be a checkpoint and is not, and the reason."""

    folder: Path
    reason: str

    def __str__(self) -> str:
        return f"checkpoint {self.folder.name} is broken and is passed over: {self.reason}"


def best_of(saved: list[CheckpointInfo]) -> CheckpointInfo | None:
    """Return the best checkpoint by the metric and evaluation settings of the last one measured, or None."""
    measured = [one for one in saved if one.value is not None and math.isfinite(one.value)]
    best: CheckpointInfo | None = None
    for one in measured:
        if (one.chosen_by, one.measure) != (measured[-1].chosen_by, measured[-1].measure):
            continue
        if best is None or is_better(one.metric, one.value or 0.0, best.value or 0.0):
            best = one
    return best


def list_checkpoints(checkpoints: Path) -> tuple[list[CheckpointInfo], list[BrokenCheckpoint]]:
    """Read all manifests: checkpoints, oldest first, and folders without a usable manifest. Reads no weights."""
    found: list[CheckpointInfo] = []
    broken: list[BrokenCheckpoint] = []
    for folder in sorted(checkpoints.iterdir()) if checkpoints.is_dir() else []:
        if folder.name.startswith(".") or not (folder.is_dir() or folder.name.isdecimal()):
            continue  # somebody's notes, say
        try:
            found.append(read_manifest(folder))
        except (OSError, ValueError, KeyError, TypeError, ArithmeticError, AttributeError, RecursionError) as error:
            reason = (isinstance(error, OSError) and error.strerror) or str(error)
            broken.append(BrokenCheckpoint(folder, f"{MANIFEST}: {reason}"))
    return sorted(found, key=lambda saved: (saved.images, saved.folder.name)), broken


def read_manifest(folder: Path) -> CheckpointInfo:
    """Read a checkpoint's manifest. Raises one of several exceptions, mostly ValueError, if it is not valid."""
    if folder.is_symlink():
        raise ValueError("the folder is a link")
    manifest = read_json(folder / MANIFEST)
    if manifest["format"] not in (FORMAT, FORMAT_SHARDED):
        raise ValueError(f"its format is {manifest['format']}, and this version reads {FORMAT} and {FORMAT_SHARDED}")
    if manifest.pop("sha256") != manifest_digest(manifest):
        raise ValueError("it is not what was saved (sha256 differs)")
    files = {name: CheckpointFile(int(file["bytes"]), str(file["sha256"])) for name, file in manifest["files"].items()}
    if (listed := merge_shard_names(files)) - {EMA2} != FILES:
        raise ValueError(f"it lists {sorted(listed)}, not {sorted(FILES)}")
    loss = manifest["held_out_loss"]
    return CheckpointInfo(
        folder,
        int(manifest["step"]),
        int(manifest["images"]),
        bool(manifest["anchor"]),
        bool(manifest["for_best"]),
        None if loss is None else float(loss),
        str(manifest["measure"]),
        str(manifest.get("chosen_by", HELD_OUT_LOSS)),  # which the first checkpoints did not hold
        None if (value := manifest.get("value", loss)) is None else float(value),
        str(manifest["made_on"]),
        files,
    )


def manifest_digest(manifest: dict[str, Any]) -> str:
    """Return the sha256 of a manifest's values, which the manifest itself holds too."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """Read a small JSON object. Raises ValueError if it is not one, OSError if it cannot be read."""
    if path.is_symlink() or (path.exists() and not path.is_file()):  # a pipe would be waited for
        raise ValueError("not a plain file")
    with path.open("rb") as file:
        data = file.read(LARGEST_JSON + 1)
    if len(data) > LARGEST_JSON:
        raise ValueError(f"over {LARGEST_JSON:,} bytes")
    value = json.loads(data)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def find_damage(saved: CheckpointInfo) -> str | None:
    """Read all files of a checkpoint, and return what is wrong with them, or None."""
    for name, file in saved.files.items():
        path = saved.folder / name
        try:
            if path.is_symlink():
                return f"{name} is a link"
            if (size := path.stat().st_size) != file.bytes:
                return f"{name} has {size:,} bytes of {file.bytes:,}"
            if sha256(path) != file.sha256:
                return f"{name} is not what was saved (sha256 differs)"
        except OSError as error:
            return f"{name}: {error.strerror}"
    others = {path.name for path in saved.folder.glob("*.safetensors")} - saved.files.keys()
    if others and len(merge_shard_names(saved.files)) < len(saved.files):  # one more would be taken for a part
        return f"{min(others)} does not belong to it"
    return None


def newest(checkpoints: Path) -> tuple[CheckpointInfo | None, list[BrokenCheckpoint]]:
    """Return the newest intact checkpoint, verified, and the broken ones passed over; None if nothing was ever saved.

    Contents decide the order, not folder names.

    Raises:
        RunError: there are checkpoints, and all of them are broken.
    """
    saved, broken = newest_intact(checkpoints)
    if saved is None and broken:
        more = f"; and {len(broken) - 2} more" if len(broken) > 2 else ""
        raise RunError(f"no whole checkpoint in {checkpoints}: {'; '.join(map(str, broken[:2]))}{more}")
    return saved, broken


def newest_intact(checkpoints: Path) -> tuple[CheckpointInfo | None, list[BrokenCheckpoint]]:
    """Return the same as `newest`, but None where all checkpoints are broken."""
    found, broken = list_checkpoints(checkpoints)
    for saved in reversed(found):
        wrong = find_damage(saved)
        if wrong is None:
            return saved, broken
        broken.append(BrokenCheckpoint(saved.folder, wrong))
    return None, broken


def find_checkpoint(
    checkpoints: Path,
    which: int | Literal["best"] | None,
    tell: Callable[[str], None] = lambda broken: None,
) -> CheckpointInfo:
    """Return the intact checkpoint of a step, the best one for "best", or the newest for None.

    `tell` is called with a message for each broken checkpoint that the newest was looked for among.

    Raises:
        RequestError: there is no such checkpoint.
        RunError: it is broken, or nothing has been saved.
    """
    if which is None:
        saved, broken = newest(checkpoints)
        if saved is None:
            raise RunError(f"nothing has been saved in {checkpoints} yet; go on with unfog resume")
        for one in broken:
            tell(str(one))
        return saved
    found, _ = list_checkpoints(checkpoints)
    wanted = best_of(found) if which == "best" else next((saved for saved in found if saved.step == which), None)
    if wanted is None:
        steps = ", ".join(str(saved.step) for saved in found) or "none"
        what = "that was measured" if which == "best" else f"of step {which}"
        raise RequestError(f"there is no checkpoint {what}; there is {steps}")
    if wrong := find_damage(wanted):
        raise RunError(str(BrokenCheckpoint(wanted.folder, wrong)))
    return wanted


def _newest_rollback_checkpoint(checkpoints: Path, images: int) -> CheckpointInfo | None:
    """Return the newest intact rollback checkpoint of at most so many images, or None."""
    found, _ = list_checkpoints(checkpoints)
    good = (saved for saved in reversed(found) if saved.anchor and saved.images <= images)
    return next((saved for saved in good if find_damage(saved) is None), None)


def find_rollback_checkpoint(checkpoints: Path, state: TrainState, patience: int) -> CheckpointInfo | None:
    """Return the checkpoint that a roll-back of this state returns to, or None.

    That is the newest rollback checkpoint. But if fewer than `patience` ordinary steps have followed the last
    roll-back, its weights may be bad already, and the one before it is chosen, if there is one.
    """
    guard = state.guard
    if guard.roll_backs and guard.ordinary < patience:
        before = _newest_rollback_checkpoint(checkpoints, guard.rollback_images - 1)
        return (
            before
            or _newest_rollback_checkpoint(checkpoints, guard.rollback_images)
            or _newest_rollback_checkpoint(checkpoints, state.seen)
        )
    return _newest_rollback_checkpoint(checkpoints, state.seen)


def load(folder: Path, state: TrainState) -> None:
    """Restore `state` from a checkpoint, on any device. Raises RunError if it is of another network."""
    load_tensors(folder, state)
    state.load_progress(read_state(folder))


def roll_back(folder: Path, state: TrainState) -> None:
    """Return to the weights of a checkpoint, while the position stays where it is."""
    load_tensors(folder, state)
    state.roll_back_to(read_state(folder))


def load_tensors(folder: Path, state: TrainState) -> None:
    """Load weights, EMAs and optimiser state into `state`; of a sharded state, only this rank's rows are read.

    Raises:
        RunError: they do not fit.
    """
    _load_into(folder, "model", state.model.state_dict())
    _load_into(folder, "ema", state.ema.state_dict(state.model))
    if state.second_ema is not None:
        # A run without a second EMA has nothing nearer than its first.
        kind = "ema2" if shard_paths(folder / EMA2)[0].exists() else "ema"
        _load_into(folder, kind, state.second_ema.state_dict(state.model))
    stored, parameters = TensorFile(folder / "optimizer.safetensors"), dict(state.model.named_parameters())
    moments = {name: stored.tensor(name, parameters.get(name.partition("/")[2])) for name in stored.shapes}
    try:
        state.load_optimizer(moments, read_state(folder))
    except ValueError as error:
        raise RunError(f"the optimiser's moments in {folder} do not fit the network: {error}") from None


def read_state(folder: Path) -> dict[str, Any]:
    """Read state.json. Raises RunError if it cannot be read."""
    try:
        return read_json(folder / STATE)
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{folder / STATE} cannot be read: {error}") from None


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a file, or of its shards. Raises RunError if it is damaged."""
    stored = TensorFile(path)
    return {name: stored.tensor(name) for name in stored.shapes}


def load_weights(folder: Path, kind: str, network: nn.Module) -> None:
    """Load the weights "model", "ema" or "ema2" into a network. Raises RunError if they do not fit."""
    _load_into(folder, kind, network.state_dict())


def _load_into(folder: Path, kind: str, tensors: dict[str, Tensor]) -> None:
    """Load the weights of a checkpoint into tensors. Raises RunError if they are of another network."""
    stored = TensorFile(folder / f"{kind}.safetensors")
    try:
        stored.load_into(tensors)
    except ValueError as error:
        raise RunError(
            f"the weights in {folder} do not fit the network that config.toml describes; was it edited? The settings "
            f"that they were trained with are in {folder / CONFIG} ({error})"
        ) from None
