"""Checkpoints on disk: whole or absent, named by step, verified by content.

    checkpoints/00001000/manifest.json           step, images, what made it, size and sha256 of every other file
    checkpoints/00001000/model.safetensors       weights under the network's own names
    checkpoints/00001000/ema.safetensors         EMA of the weights, same names
    checkpoints/00001000/ema2.safetensors        a second EMA, if there is one: see `posthoc_ema`
    checkpoints/00001000/optimizer.safetensors   optimiser moments, as "exp_avg/" and the name of the weight
    checkpoints/00001000/state.json              `TrainState.progress`: position, guard, loss scaler, sums for the log
    checkpoints/00001000/config.toml             the settings that it was trained with

An export as a run holds EMA weights alone, and no run goes on from it: manifest.json and ema.safetensors.

Of a sharded network every rank saves its rows: instead of model.safetensors there are
model-00001-of-00004.safetensors and so on, and likewise for the other tensor files. Readers need not know: see
`load.TensorFile`.

Names that begin with a dot are work in progress, or broken and set aside; they are never read. Nothing is a pickle, so
nothing in a checkpoint can run code. `snapshot` and `writer` write checkpoints, and `rotation` replaces and removes
them. An error of the system that may pass is not taken for damage.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import re
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from unfog.errors import RequestError, RunError
from unfog.files.safe_files import file_digest, list_folder, read_file
from unfog.training.checkpoints.state_schema import check_state
from unfog.training.state import HELD_OUT_LOSS, is_better

FORMAT, FORMAT_SHARDED, FORMAT_WEIGHTS = 2, 3, 4
MANIFEST, STATE, CONFIG = "manifest.json", "state.json", "config.toml"
EMA, EMA2 = "ema.safetensors", "ema2.safetensors"
FILES = frozenset(["model.safetensors", EMA, "optimizer.safetensors", STATE, CONFIG])
LARGEST_JSON = 2**24  # bytes; ours have a few thousand, and with 100,000 failed shards ten million
SHARDING = "DCP_SHARDING_INFO"  # torch's key for the rows of a shard, in the metadata of a file
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.safetensors)")
# Nothing, or no regular file, is under the name.
_MISSING = frozenset(
    getattr(errno, name)
    for name in ("ENOENT", "ENOTDIR", "EISDIR", "ELOOP", "EINVAL", "ENXIO", "ENODEV", "ENAMETOOLONG")
)
_RETRY_SECONDS = (0.2, 1.0)  # pauses after an error that may pass

_T = TypeVar("_T")


class _CheckpointFile(NamedTuple):
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
    made_on: str
    """`Precision.describe_machine`; an equal machine repeats the run to the bit."""
    files: dict[str, _CheckpointFile]

    @property
    def metric(self) -> str:
        """Name of the metric by which the best checkpoint is chosen."""
        return self.chosen_by.partition(":")[0]

    def holds(self, name: str) -> bool:
        """Return whether it has this file, such as ema2.safetensors, in one piece or as shards."""
        return name in _merge_shard_names(self.files)

    @property
    def is_weights_only(self) -> bool:
        """Return whether it holds EMA weights alone, as an export does: no raw weights, and nothing to resume from."""
        return not self.holds(STATE)

    def find_damage(self) -> str | None:
        """Read all files of a checkpoint, and return what is wrong with them, or None.

        Raises:
            RunError: a file cannot be read now, and may be whole.
        """
        try:
            return _with_retries(partial(_find_damage, self))
        except OSError as error:
            name = Path(error.filename or "").name
            raise RunError(str(BrokenCheckpoint(self.folder, f"{name}: {error.strerror}", unreadable=True))) from None

    @classmethod
    def read(cls, folder: Path) -> CheckpointInfo:
        """Read a checkpoint's manifest. Raises ValueError, OSError, KeyError or another if it is not valid."""
        # Nothing in a run is read through a link: it may lead to files that somebody else changes.
        if folder.is_symlink():
            raise ValueError("the folder is a link")
        manifest = read_json(folder / MANIFEST, run_of(folder))
        if manifest["format"] not in (FORMAT, FORMAT_SHARDED, FORMAT_WEIGHTS):
            raise ValueError(f"its format is {manifest['format']}, and this version reads {FORMAT} to {FORMAT_WEIGHTS}")
        if manifest.pop("sha256") != manifest_digest(manifest):
            raise ValueError("it is not what was saved (sha256 differs)")
        files = {
            name: _CheckpointFile(int(file["bytes"]), str(file["sha256"])) for name, file in manifest["files"].items()
        }
        # Neither fewer, which would be no whole checkpoint, nor others, which nothing here has written.
        expected = frozenset([EMA]) if manifest["format"] == FORMAT_WEIGHTS else FILES
        if (listed := _merge_shard_names(files)) - {EMA2} != expected:
            raise ValueError(f"it lists {sorted(listed)}, not {sorted(expected)}")
        if not all(0 <= int(manifest[name]) < 2**53 for name in ("step", "images")):
            raise ValueError("step or images is not a count")
        loss = manifest["held_out_loss"]
        return cls(
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


class BrokenCheckpoint(NamedTuple):
    """A folder that should be a checkpoint and is not, and the reason."""

    folder: Path
    reason: str
    unreadable: bool = False
    """Whether it cannot be read now, and may be whole: such a one is neither passed over nor set aside."""

    def __str__(self) -> str:
        if self.unreadable:
            return (
                f"checkpoint {self.folder.name} cannot be read now ({self.reason}) and is kept as it is; make it "
                "readable, then do the same again"
            )
        return f"checkpoint {self.folder.name} is broken and is passed over: {self.reason}"


# What `CheckpointInfo.read` raises.
_INVALID = (OSError, ValueError, KeyError, TypeError, ArithmeticError, AttributeError, RecursionError)


def best_of(saved: list[CheckpointInfo]) -> CheckpointInfo | None:
    """Return the best checkpoint by the metric and evaluation settings of the last one measured, or None."""
    measured = [one for one in saved if one.value is not None and math.isfinite(one.value)]
    best: CheckpointInfo | None = None
    for one in measured:
        # Losses on other held-out images or noise levels cannot be compared, however good they look.
        if (one.chosen_by, one.measure) != (measured[-1].chosen_by, measured[-1].measure):
            continue
        if best is None or is_better(one.metric, one.value or 0.0, best.value or 0.0):
            best = one
    return best


def list_checkpoints(checkpoints: Path) -> tuple[list[CheckpointInfo], list[BrokenCheckpoint]]:
    """Read all manifests: checkpoints, oldest first, and folders without a usable manifest. Reads no weights.

    RunError if the folder is a link.
    """
    found: list[CheckpointInfo] = []
    broken: list[BrokenCheckpoint] = []
    if checkpoints.is_symlink():
        raise RunError(f"{checkpoints} is a link, which is not followed; put the real folder there")
    for folder in list_folder(checkpoints, checkpoints.parent):
        if folder.name.startswith(".") or not (folder.is_dir() or folder.name.isdecimal()):
            continue  # somebody's notes, say
        try:
            found.append(_with_retries(partial(CheckpointInfo.read, folder)))
        except _INVALID as error:
            reason = (isinstance(error, OSError) and error.strerror) or str(error)
            broken.append(BrokenCheckpoint(folder, f"{MANIFEST}: {reason}", _is_unreadable(error)))
    # By contents, as a folder may have been renamed or copied.
    return sorted(found, key=lambda saved: (saved.images, saved.folder.name)), broken


def run_of(folder: Path) -> Path:
    """Return the run of a checkpoint RUN/checkpoints/STEP: the folder below which no link is followed."""
    return folder.parent.parent


# Over the values rather than the bytes, so that white space and the order of keys do not matter.
def manifest_digest(manifest: dict[str, Any]) -> str:
    """Return the sha256 of a manifest's values, which the manifest itself holds too."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def read_json(path: Path, root: Path) -> dict[str, Any]:
    """Read a small JSON object. Raises ValueError if it is not one, OSError if it cannot be read."""
    value = json.loads(read_file(path, root, LARGEST_JSON))
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def read_state_json(folder: Path) -> dict[str, Any]:
    """Read state.json, checked by its schema. Raises OSError, ValueError or RecursionError if it is not valid."""
    state = read_json(folder / STATE, run_of(folder))
    check_state(state)
    return state


def _find_damage(saved: CheckpointInfo) -> str | None:
    for name, file in saved.files.items():
        path = saved.folder / name
        try:
            # The size first: a torn file is found without reading gigabytes.
            if (size := path.stat().st_size) != file.bytes:
                return f"{name} has {size:,} bytes of {file.bytes:,}"
            if file_digest(path, run_of(saved.folder)) != file.sha256:
                return f"{name} is not what was saved (sha256 differs)"
        except OSError as error:
            if _is_unreadable(error):
                raise
            return f"{name}: {error.strerror}"
    try:
        if not saved.is_weights_only and read_state_json(saved.folder)["seen"] != saved.images:
            return f"{STATE} is of another number of images"
    except (ValueError, RecursionError) as error:
        return f"{STATE}: {error}"
    there = {path.name for path in list_folder(saved.folder, run_of(saved.folder)) if path.suffix == ".safetensors"}
    others = there - saved.files.keys()
    if others and len(_merge_shard_names(saved.files)) < len(saved.files):  # one more would be taken for a part
        return f"{min(others)} does not belong to it"
    return None


def newest(checkpoints: Path) -> tuple[CheckpointInfo | None, list[BrokenCheckpoint]]:
    """Return the newest intact checkpoint, verified, and the broken ones passed over; None if nothing was ever saved.

    Raises:
        RunError: there are checkpoints, and all of them are broken.
    """
    saved, broken = newest_intact(checkpoints)
    if saved is None and broken:
        more = f"; and {len(broken) - 2} more" if len(broken) > 2 else ""
        raise RunError(f"no intact checkpoint in {checkpoints}: {'; '.join(map(str, broken[:2]))}{more}")
    return saved, broken


def newest_intact(checkpoints: Path) -> tuple[CheckpointInfo | None, list[BrokenCheckpoint]]:
    """Return the same as `newest`, but None if all checkpoints are broken. RunError if one cannot be read now."""
    found, broken = list_checkpoints(checkpoints)
    if unreadable := next((one for one in broken if one.unreadable), None):
        raise RunError(str(unreadable))
    # Newest first, and all bytes of each: a resume from a damaged checkpoint is worse than one from an older one.
    for saved in reversed(found):
        wrong = saved.find_damage()
        if wrong is None:
            return saved, broken
        broken.append(BrokenCheckpoint(saved.folder, wrong))
    return None, broken


def find_checkpoint(
    checkpoints: Path, which: int | Literal["best"] | None, tell: Callable[[str], None] = lambda broken: None
) -> CheckpointInfo:
    """Return the intact checkpoint of a step, the best one for "best", or the newest for None.

    `tell` is called with a message for each broken checkpoint that is newer than the newest intact one.

    Raises:
        RequestError: there is no such checkpoint.
        RunError: it is broken, or nothing has been saved.
    """
    if which is None:
        saved, broken = newest(checkpoints)
        if saved is None:
            raise RunError(f"nothing has been saved in {checkpoints} yet; train further with unfog resume")
        for one in broken:
            tell(str(one))
        return saved
    found, broken = list_checkpoints(checkpoints)
    wanted = best_of(found) if which == "best" else next((saved for saved in found if saved.step == which), None)
    if wanted is None and (unreadable := next((one for one in broken if one.unreadable), None)):
        raise RunError(str(unreadable))
    if wanted is None:
        if which == "best":
            raise RequestError(
                "no checkpoint has a held-out loss, as sets of fewer than 100 images hold nothing out by themselves; "
                "omit --best, and the newest is taken"
            )
        steps = ", ".join(str(saved.step) for saved in found) or "none"
        raise RequestError(f"there is no checkpoint of step {which}; there is {steps}")
    # Rotation keeps it until there is a better one, but untrained weights draw noise.
    if which == "best" and wanted.step == 0 and not any(saved.step and saved.value is not None for saved in found):
        raise RequestError(
            "the only evaluation that is kept is that of the untrained network (step 0); omit --best, and the newest "
            "checkpoint is taken"
        )
    if wrong := wanted.find_damage():
        raise RunError(str(BrokenCheckpoint(wanted.folder, wrong)))
    return wanted


def _merge_shard_names(names: Iterable[str]) -> set[str]:
    """Replace the names of a file's shards by the file's name, if none is missing."""
    found, parts = set[str](), dict[tuple[str, str], set[int]]()
    for name in names:
        if match := _PART.fullmatch(name):
            stem, rank, size, ending = match.groups()
            parts.setdefault((stem + ending, size), set()).add(int(rank))
        else:
            found.add(name)
    for (name, size), ranks in parts.items():
        # A file in one piece beside its shards is two different weights under one name, so neither is taken.
        complete = ranks == set(range(1, int(size) + 1)) and name not in found
        found.add(name if complete else f"{len(ranks)} of {int(size)} parts of {name}")
    return found


def is_broken(folder: Path) -> bool:
    """Read a checkpoint, and return whether it is broken. Raises OSError or RunError if it cannot be read now."""
    try:
        return _with_retries(partial(CheckpointInfo.read, folder)).find_damage() is not None
    except _INVALID as error:
        if _is_unreadable(error):
            raise
        return True


def _is_unreadable(error: BaseException) -> bool:
    """Return True for an error of the system after which a file may still be whole, such as EIO, EACCES or EMFILE."""
    return isinstance(error, OSError) and error.errno is not None and error.errno not in _MISSING


def _with_retries(read: Callable[[], _T]) -> _T:
    """Call `read`, and again after an error that may pass. Raises its last error."""
    for pause in _RETRY_SECONDS:
        try:
            return read()
        except OSError as error:
            if not _is_unreadable(error):
                raise
        time.sleep(pause)
    return read()
