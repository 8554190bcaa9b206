"""Decoded images on disk, so that a large folder is decoded once and not once a run.

An entry is KEY.pixels (raw uint8 [N, C, H, W]) and KEY.json (all else). The key is a hash of the names, sizes
and change times of the files, of the settings, and of Pillow's version; so a changed image makes another
entry. Entries are never deleted; the folder may be, at any time. It is $UNFOG_CACHE, else
$XDG_CACHE_HOME/unfog or ~/.cache/unfog.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import PIL
from numpy.typing import NDArray

from unfog.data.images import ImageSet, Prepared
from unfog.data.ledger import Ledger
from unfog.data.settings import Data
from unfog.data.sources import Source
from unfog.errors import RequestError, RunError

_FORMAT = 2
_ABANDONED_SECONDS = 3600


def cache_folder() -> Path:
    """Where entries are kept; it need not exist yet."""
    if chosen := os.environ.get("UNFOG_CACHE"):
        return Path(chosen).expanduser()
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "unfog"
    except RuntimeError:  # a user without a home, as in some containers
        return Path(tempfile.gettempdir()) / "unfog-cache"


def entry_key(stamps: str, settings: Data) -> str:
    """Name of the entry for a source in this state (see `source_stamp`) under these settings."""
    matters = (settings.size, settings.channels, settings.background, settings.labels, settings.held_out)
    return hashlib.sha256(repr((_FORMAT, PIL.__version__, stamps, matters)).encode()).hexdigest()[:32]


def source_stamp(source: Source) -> tuple[str, int]:
    """(hash of every image's name, size and time of change; bytes in all)."""
    digest, total = hashlib.sha256(repr(source.classes).encode()), 0
    for name, size, changed in source.stamps():
        digest.update(f"{name}\0{size}\0{changed}\0".encode("utf-8", "surrogateescape"))
        total += size
    return digest.hexdigest(), total


def load(key: str) -> Prepared | None:
    """The entry of that key, its pixels mapped and not read; None if there is none that is whole.

    Whatever the files hold, this neither raises nor allocates for it: an entry that is no entry is decoded anew.
    """
    folder = cache_folder()
    try:
        stored = json.loads((folder / f"{key}.json").read_text("utf-8"))
        if re.fullmatch(r"\w+", stored.get("see", "")):  # one hop: an entry that is found by other settings, too
            key = stored["see"]
            stored = json.loads((folder / f"{key}.json").read_text("utf-8"))
        shape, names, classes, labels = stored["shape"], stored["names"], stored["classes"], stored["labels"]
        settings, ledger = Data(**stored["settings"]), Ledger.from_dict(stored["ledger"])
        _check(shape, names, classes, labels)
        _check_rest(stored, settings)
        ledger.line()  # which looks at each of its parts
        if len(ledger.treatment) != len(names):
            return None
        if (folder / f"{key}.pixels").stat().st_size != math.prod(shape):
            return None
        pixels = np.memmap(folder / f"{key}.pixels", np.uint8, "r", shape=tuple(shape))
    except (OSError, ArithmeticError, AttributeError, LookupError, RecursionError, RequestError, TypeError, ValueError):
        return None
    labels = None if labels is None else np.array(labels, np.int64)
    whole = ImageSet(np.asarray(pixels), labels, tuple(names), tuple(classes))
    return split(whole, stored["train"], settings, ledger, stored["fingerprints"])


def _check(shape: Any, names: Any, classes: Any, labels: Any) -> None:
    """ValueError unless these belong together; others for what is of no such type."""
    count = shape[0]
    whole = len(shape) == 4 and all(type(side) is int and side > 0 for side in shape)
    whole = whole and len(names) == count and all(isinstance(name, str) for name in [*names, *classes])
    if labels is not None:
        whole = whole and len(labels) == count and all(type(i) is int and 0 <= i < len(classes) for i in labels)
    if not whole:
        raise ValueError("no entry")


def _check_rest(stored: dict[str, Any], settings: Data) -> None:
    """ValueError unless the settings have their types and are those of these pixels, and the split is one."""
    count, channels, height, width = stored["shape"]
    train, fingerprints = stored["train"], stored["fingerprints"]
    number = (int, float)
    typed = all(
        isinstance(value, number) and type(value) is not bool
        if type(default) is float
        else type(value) is type(default)
        for value, default in zip(asdict(settings).values(), asdict(Data()).values())
    )
    split_is_one = type(train) is int and 0 <= train <= count and len(fingerprints) == 2
    if not (typed and split_is_one and all(isinstance(text, str) for text in fingerprints)):
        raise ValueError("no entry")
    if (settings.channels, settings.size, settings.size) != (channels, height, width):
        raise ValueError("no entry")


def split(
    whole: ImageSet, train: int, settings: Data, ledger: Ledger, fingerprints: tuple[str, str] = ("", "")
) -> Prepared:
    """The first `train` images to train on, the others held out; both share the memory of `whole`."""

    def part(rows: slice, fingerprint: str) -> ImageSet:
        labels = None if whole.labels is None else whole.labels[rows]
        return ImageSet(whole.pixels[rows], labels, whole.names[rows], whole.classes, fingerprint)

    first, second = fingerprints
    return Prepared(settings, part(slice(train), first), part(slice(train, None), second), ledger)


@dataclass(frozen=True, eq=False)
class Writer:
    """An entry in the making: fill `pixels`, then `commit`, or `discard`. Until then it has a temporary name."""

    partial: Path
    pixels: NDArray[np.uint8]

    @classmethod
    def create(cls, shape: tuple[int, int, int, int]) -> Writer:
        """Reserve the room for uint8 pixels of this shape, or raise RequestError."""
        folder, room = cache_folder(), int(np.prod(shape))
        remedy = f"set UNFOG_CACHE to a folder with {room / 1e9:.1f} GB free, or use cache = memory"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(folder)
            if shutil.disk_usage(folder).free < room + 2**20 + 256 * shape[0]:  # the names, too
                raise RequestError(f"{folder} has no room for {room / 1e9:.1f} GB of decoded images; {remedy}")
            partial = folder / f"{os.getpid()}-{time.time_ns()}.partial"
            with open(partial, "wb") as file:
                # Reserved now, because a mapped file that finds the disk full later kills the process.
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, room)
                else:
                    file.truncate(room)
            return cls(partial, np.asarray(np.memmap(partial, np.uint8, "r+", shape=shape)))
        except OSError as error:
            raise RequestError(f"{folder} cannot be written ({error.strerror}); {remedy}") from error

    def commit(self, key: str, asked_key: str, whole: ImageSet, train: int, settings: Data, ledger: Ledger) -> Prepared:
        """Keep `whole`, the first rows of `pixels`, under `key`, found by the settings as asked, too, unless "".

        The JSON comes last, as it makes the entry valid. Returns the entry, read back.
        """
        folder, result = self.partial.parent, split(whole, train, settings, ledger)
        stored = {
            "shape": whole.pixels.shape,
            "train": train,
            "labels": None if whole.labels is None else whole.labels.tolist(),
            "names": whole.names,
            "classes": whole.classes,
            "settings": asdict(settings),
            "ledger": ledger.to_dict(),
            "fingerprints": (result.train.fingerprint, result.held_out.fingerprint),
        }
        try:
            with open(self.partial, "r+b") as file:
                file.truncate(whole.pixels.size)
                os.fsync(file.fileno())
            self.partial.replace(folder / f"{key}.pixels")
            _write_json(folder / f"{key}.json", stored)
            if asked_key and asked_key != key:
                _write_json(folder / f"{asked_key}.json", {"see": key})
        except OSError as error:
            raise RunError(f"{folder} could not be written ({error.strerror}); set UNFOG_CACHE or free it") from error
        return load(key) or result

    def discard(self) -> None:
        """Give the room back."""
        self.partial.unlink(missing_ok=True)


def _write_json(path: Path, values: dict[str, Any]) -> None:
    partial = path.with_name(f"{os.getpid()}-{time.time_ns()}.partial")
    with open(partial, "w", encoding="utf-8") as file:
        json.dump(values, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _remove_abandoned(folder: Path) -> None:
    """Remove what a killed run left unfinished: a partial file that nobody has written to for an hour."""
    for path in folder.glob("*.partial"):
        with suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
                path.unlink()
