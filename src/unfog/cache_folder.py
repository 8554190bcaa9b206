"""The cache folder, for files that can be made again, and its size limit: least recently used entries go first.

An entry is a file or a folder that Unfog made here: decoded images, latents, features, remote shards. `hold` marks one
as in use, by a shared lock on the file `.used/NAME`, whose time is that of the last use. `note_run` writes into that
file which run is trained on images that were given from Python, so that they stay as long as it is there.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from unfog.errors import RequestError
from unfog.locks import is_at, lock_alone, lock_shared
from unfog.safe_files import move, open_file, read_file, remove, remove_tree

_MARKS = ".used"  # folder of a file for each entry; not in the entry, which others may read only
_REMOVED = re.compile(r"\.removed-[0-9]+-[0-9]+")
_REDIRECT = re.compile(r"([0-9a-f]{32})\.json")
_KEY = "[0-9a-f]{32}"
_LIMIT = 50e9
_KINDS = {  # by the path below the cache folder; other files are not Unfog's, and are left alone
    _KEY: "decoded images",
    rf"latents-{_KEY}(\.partial)?": "latents",
    rf"array-{_KEY}\.npz": "array",
    rf"images-{_KEY}\.images": "images",
    rf"features/{_KEY}": "features",
    "members": "read from remote shards",
    "shards": "index of shards",
    "hf": "Hugging Face sets",
}
_FROM_PYTHON = ("array", "images")  # no path leads back to where they came from
_held: dict[Path, int] = {}
"""Descriptors of the locks that this process holds until it ends."""


def cache_folder() -> Path:
    """Return $UNFOG_CACHE, else $XDG_CACHE_HOME/unfog or ~/.cache/unfog; it may not exist yet."""
    if chosen := os.environ.get("UNFOG_CACHE"):
        return Path(chosen).expanduser()
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "unfog"
    except RuntimeError:  # a user without a home, as in some containers
        return Path(tempfile.gettempdir()) / "unfog-cache"


def cache_limit() -> float:
    """Return $UNFOG_CACHE_LIMIT in bytes, which is given in GB; 50 GB without it. RequestError if it is no size."""
    given = os.environ.get("UNFOG_CACHE_LIMIT", "").strip()
    if not given:
        return _LIMIT
    try:
        limit = float(given.lower().removesuffix("gb")) * 1e9
    except ValueError:
        limit = math.nan
    if not limit >= 0:
        raise RequestError(f"UNFOG_CACHE_LIMIT = {given[:40]!r} is no size; give gigabytes, such as 50, or inf")
    return limit


@dataclass(frozen=True)
class CacheEntry:
    """An entry of the cache, which is a file or a folder."""

    path: Path
    kind: str
    nbytes: int
    """Bytes on disk."""
    used: float
    """Time of the last use, in seconds since 1970."""

    def in_use(self) -> bool:
        """Return True if a process uses or writes the entry, or a run names it, or nobody can tell without locks."""
        mark = _mark(self.path)
        try:
            if not mark.exists():
                return False
            if self._named_by_run():
                return True
            with lock_alone(mark) as alone:
                return not alone
        except OSError:
            return True

    def remove(self) -> bool:
        """Remove the entry unless it is in use. Return True if it is gone."""
        mark = _mark(self.path)
        with suppress(OSError):
            mark.parent.mkdir(exist_ok=True)
            with lock_alone(mark) as alone:
                if not alone or self._named_by_run():
                    return False
                # Renamed first, so that no process finds one half removed.
                gone = cache_folder() / f".removed-{os.getpid()}-{time.time_ns()}"
                move(self.path, gone)
                remove_tree(gone)
                remove(mark)
        return not os.path.lexists(self.path)

    def _named_by_run(self) -> bool:
        """Return True if a run that `note_run` noted is still there with these images."""
        with suppress(OSError, ValueError):
            for line in read_file(_mark(self.path)).splitlines():
                with suppress(OSError, ValueError, TypeError):
                    if self.path.name.encode() in read_file(Path(json.loads(line)) / "config.toml", follow=True):
                        return True
        return False


def cache_entries() -> list[CacheEntry]:
    """Return all entries of the cache, least recently used first."""
    folder, found = cache_folder(), list[CacheEntry]()
    for place in (folder, folder / "features"):
        with suppress(OSError):
            for path in list(place.iterdir()):
                name = path.relative_to(folder).as_posix()
                kind = next((kind for known, kind in _KINDS.items() if re.fullmatch(known, name)), "")
                with suppress(OSError):  # another process has just removed it
                    if kind and not path.is_symlink():
                        mark = _mark(path)
                        used = (mark if mark.is_file() else path).stat().st_mtime
                        found.append(CacheEntry(path, kind, disk_usage(path), used))
    return sorted(found, key=lambda entry: entry.used)


def hold(entry: Path) -> None:
    """Mark an entry as used now, and as in use until `release` or the end of this process.

    Call it before an entry is opened or written. Without effect where the cache cannot be written.
    """
    mark = _mark(entry)
    with suppress(OSError):
        if (held := _held.get(mark)) is None or not is_at(held, mark):
            mark.parent.mkdir(parents=True, exist_ok=True)
            descriptor = lock_shared(mark)
            release(entry)
            _held[mark] = descriptor
        os.utime(mark)


def note_run(source: str, run: Path) -> None:
    """Note that a run is trained on the entry of the cache that `source` names; without effect if it names none."""
    if Path(source).parent != cache_folder().resolve():
        return
    mark, line = _mark(cache_folder() / Path(source).name), json.dumps(str(run.resolve())).encode()
    with suppress(OSError, ValueError):
        mark.parent.mkdir(parents=True, exist_ok=True)
        with open_file(mark, "a+b") as file:
            file.seek(0)
            if line not in file.read().splitlines():
                file.write(line + b"\n")


def release(entry: Path) -> None:
    """End the use of an entry by this process."""
    if (descriptor := _held.pop(_mark(entry), None)) is not None:
        os.close(descriptor)


def _mark(entry: Path) -> Path:
    folder = cache_folder()
    return folder / _MARKS / "-".join(entry.relative_to(folder).parts)


def make_room(needed: float = 0, limit: float | None = None, keep: Path | None = None) -> bool:
    """Remove the least recently used entries until the cache has room for so many bytes more.

    Args:
        needed: bytes that will be written next.
        limit: bytes of the whole cache; None for that of the settings.
        keep: an entry that will be finished, whose bytes are among those needed.

    Returns:
        True if they fit. Arrays and images given from Python are counted and kept.
    """
    limit = cache_limit() if limit is None else limit
    _remove_remains()
    entries = [entry for entry in cache_entries() if entry.path != keep]
    total = sum(entry.nbytes for entry in entries) + needed
    for entry in entries:
        if total <= limit:
            break
        if entry.kind not in _FROM_PYTHON and entry.remove():
            total -= entry.nbytes
    return total <= limit


def fits_limit(needed: float, keep: Path | None = None) -> bool:
    """Return True if `make_room` can make room for so many bytes."""
    limit = cache_limit()
    if needed > limit:
        return False
    fixed = (e for e in cache_entries() if e.path != keep and (e.kind in _FROM_PYTHON or e.in_use()))
    return needed + sum(entry.nbytes for entry in fixed) <= limit


def clear_cache() -> list[CacheEntry]:
    """Remove all entries that are not in use, and return those that are."""
    left = [entry for entry in cache_entries() if not entry.remove()]
    _remove_remains()
    return left


def disk_usage(path: Path) -> int:
    """Return the bytes on disk of a file or folder; 0 if there is none."""
    files = [path] if not path.is_dir() else [Path(place) / name for place, _, names in os.walk(path) for name in names]
    total = 0
    for file in files:
        with suppress(OSError):
            status = file.lstat()
            # Blocks, as a file may have holes.
            total += 512 * status.st_blocks if hasattr(status, "st_blocks") else status.st_size
    return total


def _remove_remains() -> None:
    """Remove what a killed process left of an entry, files KEY.json that lead to no entry, and marks of no entry."""
    folder = cache_folder()
    with suppress(OSError):
        names = {_mark(entry.path).name for entry in cache_entries()}
        for mark in list((folder / _MARKS).iterdir()):
            if mark.name not in names:
                with lock_alone(mark) as alone:
                    if alone:
                        remove(mark)
    with suppress(OSError):
        for path in list(folder.iterdir()):
            if _REMOVED.fullmatch(path.name):
                remove_tree(path)
            elif _REDIRECT.fullmatch(path.name) and not _leads_somewhere(path):
                remove(path)


def _leads_somewhere(redirect: Path) -> bool:
    with suppress(OSError, UnicodeDecodeError):
        with open_file(redirect, "rb") as file:
            names = re.findall(_KEY, file.read(4096).decode())
        return any((redirect.parent / name).exists() for name in names)
    return True
