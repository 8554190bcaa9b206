"""Checkpoints on disk: whole or absent, named by step, verified by content.

    checkpoints/00001000/manifest.json           step, images, what made it, size and sha256 of every other file
    checkpoints/00001000/model.safetensors       weights under the network's own names
    checkpoints/00001000/ema.safetensors         the average, same names
    checkpoints/00001000/ema2.safetensors        a second average, where there is one: see `posthoc`
    checkpoints/00001000/optimizer.safetensors   its moments, as "exp_avg/" and the name of the weight
    checkpoints/00001000/state.json              position, guard, loss scaler, sums for the log
    checkpoints/00001000/config.toml             the settings that it was trained with

A network that is divided among processes is saved by all of them, each its rows: in place of model.safetensors there
are model-00001-of-00004.safetensors and so on, and of the others likewise. Whoever reads need not know: see `parts`.

Names that begin with a dot are work in progress, or what was broken and set aside; they are never read. Nothing is a
pickle, so nothing in a checkpoint can run code. `snapshot` and `joint` write them, `rotation` removes them.
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
    """What a file of a checkpoint must be."""

    bytes: int
    sha256: str


class CheckpointInfo(NamedTuple):
    """A checkpoint, as its manifest describes it."""

    folder: Path
    step: int
    images: int
    anchor: bool
    """Whether a roll-back may come back to it."""
    for_best: bool
    """Whether it was saved only for what it measures."""
    held_out_loss: float | None
    """Where it was measured at this step."""
    measure: str
    """Digest of how it was measured: only equals can be compared."""
    chosen_by: str
    """What the best is chosen by: held_out_loss, or kid, …, and a digest of how; only equals compare."""
    value: float | None
    """Of that, where it was measured at this step."""

    @property
    def metric(self) -> str:
        """The name of what the best is chosen by."""
        return self.chosen_by.partition(":")[0]

    made_on: str
    """What computed it, in words; the same again repeats it to the bit."""
    files: dict[str, CheckpointFile]

    def holds(self, name: str) -> bool:
        """Whether it has this file, such as ema2.safetensors, whole or in parts."""
        return name in merge_shard_names(self.files)


class BrokenCheckpoint(NamedTuple):
    """A folder that should be a checkpoint and is none, and why."""

    folder: Path
    reason: str

    def __str__(self) -> str:
        return f"checkpoint {self.folder.name} is broken and is passed over: {self.reason}"


def best_of(saved: list[CheckpointInfo]) -> CheckpointInfo | None:
    """The best by the metric that was chosen last, measured as it was last; None if none was."""
    measured = [one for one in saved if one.value is not None and math.isfinite(one.value)]
    best: CheckpointInfo | None = None
    for one in measured:
        if (one.chosen_by, one.measure) != (measured[-1].chosen_by, measured[-1].measure):
            continue
        if best is None or is_better(one.metric, one.value or 0.0, best.value or 0.0):
            best = one
    return best


def list_checkpoints(checkpoints: Path) -> tuple[list[CheckpointInfo], list[BrokenCheckpoint]]:
    """What there is by its manifests, oldest first, and the folders without a usable one. Reads no weights."""
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
    """A checkpoint by its manifest. One of several exceptions, ValueError mostly, for anything that is none."""
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
    """sha256 of a manifest's values, which the manifest holds as well."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """A small JSON object from a file. ValueError if it is not, OSError if it cannot be read."""
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
    """What is wrong with the files of a checkpoint, after reading them all; None if nothing is."""
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
    """The newest whole checkpoint, verified, and the broken ones passed over; None if nothing was ever saved.

    What the folders hold decides, not what they are called.

    Raises:
        RunError: there are checkpoints, and all of them are broken.
    """
    saved, broken = newest_intact(checkpoints)
    if saved is None and broken:
        more = f"; and {len(broken) - 2} more" if len(broken) > 2 else ""
        raise RunError(f"no whole checkpoint in {checkpoints}: {'; '.join(map(str, broken[:2]))}{more}")
    return saved, broken


def newest_intact(checkpoints: Path) -> tuple[CheckpointInfo | None, list[BrokenCheckpoint]]:
    """As `newest`, for those who have something to say of broken ones also where no other is left."""
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
    """The whole checkpoint of a step; the best by what the run measures it by for "best", the newest for None.

    `tell` is told of each broken one that the newest was looked for among.

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
    """The newest whole checkpoint, of at most so many images, that a roll-back may come back to; None if none is."""
    found, _ = list_checkpoints(checkpoints)
    good = (saved for saved in reversed(found) if saved.anchor and saved.images <= images)
    return next((saved for saved in good if find_damage(saved) is None), None)


def find_rollback_checkpoint(checkpoints: Path, state: TrainState, patience: int) -> CheckpointInfo | None:
    """The checkpoint that a roll-back of this state returns to; None if there is none.

    The newest anchor; but if fewer than `patience` ordinary steps have followed the last roll-back, that did not help,
    so those weights may be past help, and it is the anchor before, if there is one.
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
    """Restore `state` from a whole checkpoint, on whatever device it lives. RunError if it is of another network."""
    load_tensors(folder, state)
    state.load_progress(read_state(folder))


def roll_back(folder: Path, state: TrainState) -> None:
    """Return to the weights of a whole checkpoint, while the position stays where it is."""
    load_tensors(folder, state)
    state.roll_back_to(read_state(folder))


def load_tensors(folder: Path, state: TrainState) -> None:
    """Put the weights, their average and the optimiser's moments into `state`: where it is divided, the rows that are
    here, so that nobody holds the whole. RunError if they do not fit."""
    _load_into(folder, "model", state.model.state_dict())
    _load_into(folder, "ema", state.ema.state_dict(state.model))
    if state.second_ema is not None:
        kind = "ema2" if shard_paths(folder / EMA2)[0].exists() else "ema"  # as near as an older run comes
        _load_into(folder, kind, state.second_ema.state_dict(state.model))
    stored, parameters = TensorFile(folder / "optimizer.safetensors"), dict(state.model.named_parameters())
    moments = {name: stored.tensor(name, parameters.get(name.partition("/")[2])) for name in stored.shapes}
    try:
        state.load_optimizer(moments, read_state(folder))
    except ValueError as error:
        raise RunError(f"the optimiser's moments in {folder} do not fit the network: {error}") from None


def read_state(folder: Path) -> dict[str, Any]:
    """state.json. RunError if it cannot be read."""
    try:
        return read_json(folder / STATE)
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{folder / STATE} cannot be read: {error}") from None


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, or of its parts. RunError if it is damaged."""
    stored = TensorFile(path)
    return {name: stored.tensor(name) for name in stored.shapes}


def load_weights(folder: Path, kind: str, network: nn.Module) -> None:
    """Put the weights of a checkpoint into a network; `kind` is "model", "ema" or "ema2".

    Raises:
        RunError: they are those of another network.
    """
    _load_into(folder, kind, network.state_dict())


def _load_into(folder: Path, kind: str, tensors: dict[str, Tensor]) -> None:
    """Put the weights of a checkpoint into these tensors of a network. RunError if they are those of another one."""
    stored = TensorFile(folder / f"{kind}.safetensors")
    try:
        stored.load_into(tensors)
    except ValueError as error:
        raise RunError(
            f"the weights in {folder} do not fit the network that config.toml describes; was it edited? The settings "
            f"that they were trained with are in {folder / CONFIG} ({error})"
        ) from None
