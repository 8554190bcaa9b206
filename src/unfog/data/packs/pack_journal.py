"""The folder of an unfinished pack: its journal, its lock, and writes that survive a crash."""

from __future__ import annotations

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

from unfog.data.packs.pack import FORMAT, JOURNAL, MANIFEST, PACK_SETTINGS, Pack
from unfog.data.packs.pack_columns import COLUMN_FILES
from unfog.data.scan import Scan
from unfog.errors import RequestError, RunError
from unfog.files.flock import LOCK
from unfog.files.folder_lock import lock_of
from unfog.files.owner import OwnedError
from unfog.files.safe_files import read_file, remove
from unfog.settings import is_auto
from unfog.text import sanitize
from unfog.values.columns import columns_digest

FACTS_FILE = "facts.bin"
_LARGEST_JOURNAL = 2**30  # bytes
_CREATED_FIRST = frozenset(["pixels.u8", FACTS_FILE])  # they may exist, empty, before the journal does
_ARRAYS = (*COLUMN_FILES, "treatment.npy", "sides.npy", "grey.npy", "names.npy", "names.bin", "chunks.json")
_PARTIAL = frozenset(f"{name}.partial" for name in (JOURNAL, MANIFEST, *_CREATED_FIRST, *_ARRAYS))
# Every file that an unfinished pack may have.
FILES = frozenset([JOURNAL, *_ARRAYS]) | _CREATED_FIRST | _PARTIAL


class BusyError(RequestError):
    """Another process is writing the same pack."""


@dataclass
class Journal:
    """The progress of an unfinished pack, as stored in journal.jsonl."""

    header: dict[str, Any] = field(default_factory=dict)
    """Source and settings of the pack; {} if nothing has begun."""
    lines: list[dict[str, Any]] = field(default_factory=list)
    """One for each chunk that is safe on disk."""

    @classmethod
    def read(cls, folder: Path) -> Journal:
        """Read the journal in a folder, less a last line that was cut off. Empty if it is missing or damaged."""
        try:
            text = read_file(folder / JOURNAL, folder, _LARGEST_JOURNAL).decode()
            header, *lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        except (OSError, ValueError, RecursionError):
            return cls()
        before = [{"done": 0, "rows": 0}, *lines]
        valid = isinstance(header, dict) and all(_follows(line, last) for line, last in zip(lines, before))
        return cls(header, lines) if valid else cls()

    @property
    def done(self) -> int:
        """Number of images of the source that were decoded or skipped."""
        return int(self.lines[-1]["done"]) if self.lines else 0

    @property
    def rows(self) -> int:
        """Number of usable images, which are in pixels.u8."""
        return int(self.lines[-1]["rows"]) if self.lines else 0

    @staticmethod
    def header_of(scan: Scan, key: str) -> dict[str, Any]:
        """Return the header for a source and its settings, all of which an attempt to go on must share."""
        return {
            "format": FORMAT,
            "key": key,
            "stamp": scan.stamp,
            "settings": [*(getattr(scan.settings, name) for name in PACK_SETTINGS), key],
            "pillow": PIL.__version__,  # another version may decode or resize to other bytes
            "found": len(scan.source.names),
            "channels": scan.channels,
            "size": scan.size,
            "proved": scan.channels_certain,
            # Absent from journals that were begun before there were these.
            **({} if is_auto(scan.settings, "range") else {"range": list(scan.settings.range)}),
            **({"columns": columns} if (columns := columns_digest(scan.columns)) else {}),
        }

    def difference(self, scan: Scan, key: str) -> str:
        """Name the first difference of this journal from one of a source and its settings; "" for none."""
        header = self.header_of(scan, key)
        names = {
            "stamp": "the images",
            "columns": "the columns",
            "settings": "the settings",
            "range": "the range of values",
        }
        names["pillow"] = "the version of Pillow"
        return next((name for key, name in names.items() if self.header.get(key) != header.get(key)), "")


def _follows(line: Any, last: dict[str, Any]) -> bool:
    """Return True if this is a valid journal line of the chunk behind the last line's."""
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
            # Of few digits, as int() takes long for a text of thousands.
            images = images and all(row.isdecimal() and len(row) < 16 and begin <= int(row) < done for row in reasons)
            actions = all(isinstance(one, list) and all(isinstance(text, str) for text in one) for one in treatments)
            counts = (*modes.values(), *sums, *squares, line.get("unused_pages", 0))
            numbers = all(isinstance(number, int) for number in counts)
            return images and actions and numbers and all(isinstance(text, str) for text in reasons.values())
    return False


def remove_work_files(folder: Path) -> None:
    """Remove the files that a finished pack no longer needs."""
    for name in (JOURNAL, FACTS_FILE, LOCK):
        remove(folder / name, folder)


@contextmanager
def pack_folder(folder: Path, remedy: str) -> Iterator[None]:
    """Make the folder of a new or unfinished pack, and turn errors of the disk into messages with a remedy."""
    name = sanitize(str(folder))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"{name} cannot be written ({error.strerror}); {remedy}") from error
    check_replaceable(folder, remedy)
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{name} could not be written ({error.strerror}); what is done is kept; free some space, then "
            f"repeat the command, or {remedy}"
        ) from error


def check_replaceable(folder: Path, remedy: str) -> None:
    """RequestError unless a folder is missing, empty or an unfinished pack."""
    name = sanitize(str(folder))
    try:
        foreign = os.path.lexists(folder) and (Pack.is_at(folder) or _has_foreign_files(folder))
    except OSError as error:
        raise RequestError(f"{name} cannot be written ({error.strerror}); {remedy}") from error
    if foreign:
        raise RequestError(f"{name} exists and is not a pack; give another folder, or remove it")


def _has_foreign_files(folder: Path) -> bool:
    # A pack's own files are overwritten, so without a journal of ours only empty or partial ones pass as its own.
    # Hidden files do no harm: our lock, and what file systems and desktops leave.
    there = [path for path in folder.iterdir() if not path.name.startswith(".")]
    if Pack.is_unfinished_at(folder):
        return any(path.name not in FILES for path in there)
    own = _CREATED_FIRST | _PARTIAL
    return any(path.name not in own or (path.name in _CREATED_FIRST and path.lstat().st_size) for path in there)


def _remove_empty_files(folder: Path) -> None:
    """Remove the files of a pack that no image was written to."""
    with suppress(OSError):
        if not Pack.is_at(folder) and not Journal.read(folder).rows:
            for name in (FACTS_FILE, "pixels.u8", JOURNAL):  # the journal last, as it proves that the others are ours
                remove(folder / name, folder)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder against other processes, and remove it afterwards if nothing was written to it.

    BusyError if another process has the lock.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(lock_of(folder))
        except (OwnedError, FileNotFoundError):  # not found: another process has just moved or removed it
            raise BusyError(f"another process is packing into {sanitize(str(folder))}; wait for it") from None
        try:
            yield
        finally:
            _remove_empty_files(folder)
            stack.close()  # removes the lock's own file, without which the folder may be empty
            with suppress(OSError):
                folder.rmdir()


def sync(file: BinaryIO) -> None:
    """Flush a file, and wait until it is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def append(file: BinaryIO, data: NDArray[Any] | bytes) -> None:
    """Append to a file, and wait until it is on the disk."""
    file.write(data if isinstance(data, bytes) else np.ascontiguousarray(data).data)
    sync(file)
