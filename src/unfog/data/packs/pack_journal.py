"""The folder of a pack in the making: its journal, who may work on it, and writes that a crash cannot cut in two."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import PIL
from numpy.typing import NDArray

from unfog.data.packs.pack import PACK_SETTINGS
from unfog.data.packs.pack_files import FORMAT, JOURNAL, MANIFEST, is_begun, is_pack
from unfog.data.scan import Scan
from unfog.errors import RequestError, RunError
from unfog.locks import LOCK, lock_of
from unfog.text import sanitize

FACTS_FILE = "facts.bin"
_BEGINS = frozenset(["pixels.u8", FACTS_FILE])  # may be there, and empty, before the journal is
_ARRAYS = ("labels.npy", "treatment.npy", "sides.npy", "grey.npy", "names.npy", "names.bin", "chunks.json")
_PARTIAL = frozenset(f"{name}.partial" for name in (JOURNAL, "chunks.json", MANIFEST))
FILES = frozenset([JOURNAL, *_ARRAYS]) | _BEGINS | _PARTIAL
"""What may be in the folder of a pack in the making."""


class BusyError(RequestError):
    """Another process is at work on that pack."""


@dataclass
class Journal:
    """How far a pack is, as its journal says."""

    header: dict[str, Any] = field(default_factory=dict)
    """What it is made from and of; {} where nothing has begun."""

    lines: list[dict[str, Any]] = field(default_factory=list)
    """One for each whole chunk."""

    @classmethod
    def read(cls, folder: Path) -> Journal:
        """What the journal in a folder says; a line that was cut off counts for nothing; {} if one is damaged."""
        try:
            text = (folder / JOURNAL).read_text("utf-8")
            header, *lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        except (OSError, ValueError, RecursionError):
            return cls()
        before = [{"done": 0, "rows": 0}, *lines]
        whole = isinstance(header, dict) and all(_follows(line, last) for line, last in zip(lines, before))
        return cls(header, lines) if whole else cls()

    @property
    def done(self) -> int:
        """Images looked at."""
        return int(self.lines[-1]["done"]) if self.lines else 0

    def differs(self, header: dict[str, Any]) -> str:
        """What it was begun with that is another than in this header; "" for nothing."""
        said = {"stamp": "the images", "settings": "the settings", "pillow": "the version of Pillow"}
        return next((words for key, words in said.items() if self.header.get(key) != header[key]), "")


def _follows(line: Any, last: dict[str, Any]) -> bool:
    """Whether it is a line of a journal, of the chunk behind the last one's."""
    match line:
        case {
            "done": int(done),
            "rows": int(rows),
            "sha256": str(),
            "reasons": dict(reasons),
            "treatments": list(treatments),
            "modes": dict(modes),
            "sums": [list(sums), list(squares)],
        }:
            begin = last["done"]
            images = begin < done < 2**48 and rows - last["rows"] == done - begin - len(reasons)
            images = images and all(row.isdecimal() and len(row) < 16 and begin <= int(row) < done for row in reasons)
            actions = all(isinstance(one, list) and all(isinstance(text, str) for text in one) for one in treatments)
            numbers = all(isinstance(number, int) for number in (*modes.values(), *sums, *squares))
            return images and actions and numbers and all(isinstance(text, str) for text in reasons.values())
    return False


def header_of(scan: Scan, key: str) -> dict[str, Any]:
    """What says that a pack in the making is that of this source, under these settings."""
    matters = [getattr(scan.settings, name) for name in PACK_SETTINGS]
    return {
        "format": FORMAT,
        "key": key,
        "stamp": scan.stamp,
        "settings": [*matters, key],
        "pillow": PIL.__version__,
        "found": len(scan.source.names),
        "channels": scan.channels,
        "size": scan.size,
        "proved": scan.channels_certain,
    }


def clear(folder: Path) -> None:
    """Remove what is of no use in a finished pack."""
    for name in (JOURNAL, FACTS_FILE, LOCK):
        (folder / name).unlink(missing_ok=True)


@contextmanager
def made(folder: Path, remedy: str) -> Iterator[None]:
    """Make the folder; the disk's refusals become errors for a person."""
    said = sanitize(str(folder))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        foreign = _holds_others(folder)
    except OSError as error:
        raise RequestError(f"{said} cannot be written ({error.strerror}); {remedy}") from error
    if is_pack(folder) or foreign:
        raise RequestError(f"{said} exists and holds something else; give another folder, or remove it")
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{said} could not be written ({error.strerror}); what is done is kept: make room, and do the same again"
        ) from error


def _holds_others(folder: Path) -> bool:
    """Whether there are files that no pack in the making has; its own are written over, so of those we must be sure.

    What is hidden never harms: our lock, and what file systems and desktops leave.
    """
    there = [path for path in folder.iterdir() if not path.name.startswith(".")]
    if is_begun(folder):
        return any(path.name not in FILES for path in there)
    return any(path.name not in _BEGINS | _PARTIAL or (path.name in _BEGINS and path.stat().st_size) for path in there)


def _remove_empty_files(folder: Path) -> None:
    """Remove what was begun where no image came into it."""
    with suppress(OSError):
        if not is_pack(folder) and not any(line["rows"] for line in Journal.read(folder).lines):
            for name in (FACTS_FILE, "pixels.u8", JOURNAL):  # the journal last, as it says that the others are ours
                (folder / name).unlink(missing_ok=True)


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes from making this pack meanwhile; the system gives the lock back however we end.

    A folder that nothing came into is gone after it.
    """
    with ExitStack() as stack:
        stack.callback(_remove_if_empty, folder)  # when the lock is no longer in it
        try:
            stack.enter_context(lock_of(folder))
        except (BlockingIOError, FileNotFoundError):  # gone is what another has just moved away or removed
            raise BusyError(f"another process is packing into {sanitize(str(folder))}; wait for it") from None
        try:
            yield
        finally:
            _remove_empty_files(folder)


def append(file: BinaryIO, data: NDArray[Any] | bytes) -> None:
    """Write behind what is there; on the disk when this returns."""
    file.write(data if isinstance(data, bytes) else np.ascontiguousarray(data).data)
    sync(file)


def sync(file: BinaryIO) -> None:
    """What was written is on the disk when this returns."""
    file.flush()
    os.fsync(file.fileno())


def save(path: Path, array: NDArray[Any]) -> None:
    """An array as a .npy file."""
    with open(path, "wb") as file:
        np.save(file, array, allow_pickle=False)
        sync(file)


def write(path: Path, data: bytes) -> None:
    """Whole or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    with open(partial, "wb") as file:
        file.write(data)
        sync(file)
    partial.replace(path)


def file_digest(path: Path) -> str:
    """sha256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
