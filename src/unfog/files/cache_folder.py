"""The cache folder, for files that can be made again, and its size limit: least recently used entries go first.

An entry is a file or a folder that Unfog made here: decoded images, latents, features, remote shards. It is known by
its name and by the names of all files in it, as people keep other files here too. `hold` marks one as in use, by a
shared lock on the file `.used/NAME`, whose time is that of the last use. `note_run` writes into that file which run is
trained on images that were given from Python, so that they stay as long as it is there.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from unfog.errors import RequestError
from unfog.files.locks import LOCK, OWNER, is_at, lock_alone, lock_shared, notify
from unfog.files.safe_files import (
    LARGEST_TEXT,
    discard,
    disk_usage,
    make_folder,
    open_file,
    read_file,
    remove,
    remove_tree,
)
from unfog.text import is_address, sanitize

_MARKS = ".used"  # folder of a file for each entry; not in the entry, which others may read only
_REMOVED = re.compile(r"\.removed-[0-9]+-[0-9]{19}")
_KEY = "[0-9a-f]{32}"
_REDIRECT = re.compile(rf"{_KEY}\.json")
_UNFINISHED = rf"(\.[0-9]+-[0-9]+)?\.partial|{re.escape(LOCK)}"
_LIMIT = 50e9


class _Kind(NamedTuple):
    """A kind of entry, known by names."""

    text: str
    name: str
    """Pattern of the path below the cache folder."""
    files: str = ""
    """Pattern of all paths in the entry; "" if it is a file."""
    evictable: bool = True
    """Whether entries may go without being asked for: not where the cache does not know what it takes to make anew."""
    nested: bool = False
    """Whether an entry has folders of its own."""


_KINDS = (
    _Kind(
        "decoded images",
        rf"{_KEY}(\.{OWNER}\.partial)?",
        r"pack\.json|journal\.jsonl|pixels\.u8|facts\.bin|names\.bin|chunks\.json|"
        r"(labels|column-[0-9]+|treatment|sides|grey|names)\.npy",
    ),
    _Kind(
        "latents", rf"latents-{_KEY}((\.{OWNER})?\.partial)?", r"latents\.f16|rows\.i64|(latents|done)\.json(\.new)?"
    ),
    _Kind("array", rf"array-{_KEY}\.npz", evictable=False),
    _Kind("images", rf"images-{_KEY}\.images", evictable=False),
    _Kind("table", rf"table-{_KEY}\.jsonl", evictable=False),
    _Kind("condition", rf"condition-{_KEY}\.npy", evictable=False),
    _Kind("sides of images", rf"sides-{_KEY}\.i32"),
    _Kind("features", rf"features/{_KEY}", r"([0-9]{8}|statistics)\.safetensors"),
    _Kind("encoded captions", rf"texts-{_KEY}\.safetensors"),
    _Kind("judges of conditions", rf"judge-{_KEY}\.safetensors"),
    _Kind("read from remote shards", "members", rf"{_KEY}-[0-9]{{6}}\.members"),
    _Kind("drawings of the page", rf"drawings-{_KEY}", r"[0-9]{8}\.drawing"),
    _Kind("index of shards", "shards", rf"{_KEY}\.(rows|codes|names|json|seen\.json|piece\.npz|[0-9a-f]{16}\.cells)"),
    # As the datasets library names them.
    _Kind("Hugging Face sets", "hf", r"[^/]*\.lock|parquet(/default-[0-9a-f]+(/.*)?)?", evictable=False, nested=True),
    # As torch names them; the two letters begin a hash.
    _Kind(
        "compiled code",
        "compiled",
        r"([a-z0-9]{2}|aotautograd|fxgraph|locks|triton|temp|cache|autotune|precompiled_headers)(/.*)?",
        nested=True,
    ),
)
_trusted = set[Path]()  # cache folders that were looked at
_warned = set[Path]()  # folders that a warning was printed for
# Descriptors of the locks that this process holds until it ends.
_held: dict[Path, int] = {}


def cache_folder() -> Path:
    """Return $UNFOG_CACHE, else $XDG_CACHE_HOME/unfog or ~/.cache/unfog; it may not exist yet.

    A user whose home is missing or cannot be written gets a private folder among the temporary files. RequestError if
    UNFOG_CACHE is not a folder, or another user made the folder or may replace it: runs train on its content.
    """
    if chosen := path_variable("UNFOG_CACHE"):
        folder = chosen
        if os.path.exists(folder) and not os.path.isdir(folder):
            raise RequestError(f"UNFOG_CACHE = {sanitize(str(folder))} is not a folder; set UNFOG_CACHE to a folder")
    else:
        try:
            folder = (path_variable("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "unfog"
        except RuntimeError:  # a user without a home, as in some containers
            folder = _temporary_folder()
        if not _can_exist(folder):
            folder = _temporary_folder()
    if hasattr(os, "getuid") and folder not in _trusted:
        _check_trusted(folder, named=bool(chosen))
        if folder.is_dir():
            _trusted.add(folder)
    return folder


def path_variable(name: str) -> Path | None:
    """Return the path in an environment variable, with ~ expanded; None if it is not set or empty.

    RequestError for an address, and for the home of an unknown user.
    """
    if not (given := os.environ.get(name)):
        return None
    if is_address(given):
        raise RequestError(
            f"{name} = {sanitize(given)[:200]!r} is an address and not a path on a disk; set {name} to a path on a "
            "disk, or below the mount of a bucket"
        )
    try:
        return Path(given).expanduser()
    except RuntimeError:
        raise RequestError(
            f"{name} = {sanitize(given)!r}: there is no such home folder; give the path in full"
        ) from None


def _can_exist(folder: Path) -> bool:
    """Return True if a folder is there, or the first one above it that is there can be written."""
    with suppress(OSError):
        if folder.is_dir():
            return True
        above = next(path for path in folder.parents if path.is_dir())
        return os.access(above, os.W_OK | os.X_OK)
    return False


def _temporary_folder() -> Path:
    """Make and return this user's folder among the temporary files, which nobody else may read or write."""
    folder = Path(tempfile.gettempdir()) / (f"unfog-{os.getuid()}" if hasattr(os, "getuid") else "unfog-cache")
    with suppress(OSError):
        folder.mkdir(mode=0o700)
    return folder


def _check_trusted(folder: Path, named: bool) -> None:
    """RequestError if a user other than this one and root may exchange what lies in the folder.

    A folder that a person has `named` may be of another user, as a group shares one, but not where everybody can take
    that name, as in /tmp.
    """
    remedy = "set UNFOG_CACHE to a folder of yours"
    for path, status in _with_parents(folder):
        last, foreign = path == folder.resolve(), status.st_uid not in (os.getuid(), 0)
        shared = bool(status.st_mode & stat.S_IWOTH) and (last or not status.st_mode & stat.S_ISVTX)
        if shared and foreign:
            raise RequestError(
                f"the cache {folder} is not used: every user may write {path}, of user {status.st_uid}; {remedy}"
            )
        if shared and not (named and status.st_mode & stat.S_ISVTX) and path not in _warned:
            _warned.add(path)
            notify(f"every user may write {path}, and so exchange images in the cache {folder}; chmod o-w {path}")
        if last and foreign and (_everybody_writes(path.parent) or not (named or os.getuid() == 0)):
            raise RequestError(f"the cache {folder} is not used: it is user {status.st_uid}'s; {remedy}")


def _with_parents(folder: Path) -> list[tuple[Path, os.stat_result]]:
    """Return a folder and those above it that exist, with what the system says of each."""
    found = list[tuple[Path, os.stat_result]]()
    with suppress(OSError, RuntimeError):
        whole = folder.resolve()
        for path in (whole, *whole.parents):
            with suppress(FileNotFoundError):
                found.append((path, path.stat()))
    return found


def _everybody_writes(folder: Path) -> bool:
    return bool(folder.stat().st_mode & stat.S_IWOTH)


def is_private(folder: Path) -> bool:
    """Return True if no user but this one and root may exchange what lies in a folder, which is not a link.

    Also true of a folder that its group may write if the group is this user's own, as some systems set it up.
    """
    if not hasattr(os, "getuid"):
        return True
    if not stat.S_ISDIR(folder.lstat().st_mode):
        return False
    (_, last), (_, above), *others = _with_parents(folder)
    group = above.st_mode & stat.S_IWGRP and not _is_own_group(above.st_gid)
    open_to_all = any(one.st_mode & stat.S_IWOTH and not one.st_mode & stat.S_ISVTX for _, one in others)
    owned = last.st_uid == os.getuid() and above.st_uid in (os.getuid(), 0)
    closed = not (last.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or group or above.st_mode & stat.S_IWOTH or open_to_all)
    return owned and closed


def _is_own_group(group: int) -> bool:
    """Return True if a group has this user's name and no other member."""
    import grp  # Windows has neither
    import pwd

    with suppress(KeyError):
        name = pwd.getpwuid(os.getuid()).pw_name
        return grp.getgrgid(group).gr_name == name and set(grp.getgrgid(group).gr_mem) <= {name}
    return False


def cache_limit() -> float:
    """Return $UNFOG_CACHE_LIMIT in bytes, which is given in GB; 50 GB without it. RequestError if it is not a size."""
    given = os.environ.get("UNFOG_CACHE_LIMIT", "").strip()
    if not given:
        return _LIMIT
    try:
        limit = float(given.lower().removesuffix("gb")) * 1e9
    except ValueError:
        limit = math.nan
    if not limit >= 0:
        raise RequestError(f"UNFOG_CACHE_LIMIT = {given[:40]!r} is not a size; give gigabytes, such as 50, or inf")
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
    evictable: bool
    """Whether it may go without being asked for."""

    def in_use(self) -> bool:
        """Return True if a process uses or writes the entry, or a run names it, or locks are not supported."""
        if not os.path.lexists(_mark(self.path)):
            return False
        with _locked_alone(self.path) as alone:
            return not alone or self._named_by_run()

    def remove(self) -> bool:
        """Remove the entry unless it is in use. Return True if it is gone."""
        with _locked_alone(self.path) as alone:
            return alone and self.remove_locked()

    def remove_locked(self) -> bool:
        """Remove the entry, whose mark this process has locked. Return True if it is gone."""
        with suppress(OSError):
            # Looked at again, as somebody may have put a file of theirs into it.
            if not self._named_by_run() and _kind_of(self.path) is not None:
                # Renamed first, so that no process finds one half removed.
                discard(self.path, cache_folder() / f".removed-{os.getpid()}-{time.time_ns()}", cache_folder())
                remove(_mark(self.path), cache_folder())
        return not os.path.lexists(self.path)

    def _named_by_run(self) -> bool:
        """Return True if a run that `note_run` noted is still there with these images."""
        with suppress(OSError, ValueError):
            for line in read_file(_mark(self.path), cache_folder(), LARGEST_TEXT).splitlines():
                with suppress(OSError, ValueError, TypeError):
                    run = Path(json.loads(line))
                    if self.path.name.encode() in read_file(run / "config.toml", run, LARGEST_TEXT, follow=True):
                        return True
        return False

    @classmethod
    def all(cls) -> list[CacheEntry]:
        """Return all entries of the cache, least recently used first."""
        folder, found = cache_folder(), list[CacheEntry]()
        for place in (folder, folder / "features"):
            with suppress(OSError):
                for path in [] if place != folder and place.is_symlink() else list(place.iterdir()):
                    with suppress(OSError):  # another process has just removed it
                        if (kind := _kind_of(path)) is not None:
                            mark = _mark(path)
                            used = (mark if mark.is_file() else path).stat().st_mtime
                            found.append(cls(path, kind.text, disk_usage(path), used, kind.evictable))
        return sorted(found, key=lambda entry: entry.used)


def _kind_of(path: Path) -> _Kind | None:
    """Return the kind of an entry; None if it is unknown, empty, or holds anything that Unfog does not write there."""
    name = path.relative_to(cache_folder()).as_posix()
    kind = next((kind for kind in _KINDS if re.fullmatch(kind.name, name)), None)
    if kind is None or not kind.files:
        return kind if kind is not None and stat.S_ISREG(path.lstat().st_mode) else None
    # One file of a person's is enough to leave the whole folder alone.
    known, empty = re.compile(rf"({kind.files})?({_UNFINISHED})?"), True
    for place, folders, files in () if path.is_symlink() else os.walk(path):
        below = "" if place == str(path) else f"{Path(place).relative_to(path).as_posix()}/"
        if not all(known.fullmatch(below + one) for one in (*folders, *files)):
            return None
        if folders and not kind.nested:
            return None
        empty = empty and not files
    return None if empty else kind


def hold(entry: Path) -> None:
    """Mark an entry as used now, and as in use until `release` or the end of this process.

    Call it before an entry is opened or written. Without effect where the cache cannot be written.
    """
    mark = _mark(entry)
    with suppress(OSError):
        if (held := _held.get(mark)) is None or not is_at(held, mark):
            cache_folder().mkdir(parents=True, exist_ok=True)
            make_folder(mark.parent, cache_folder())
            with suppress(BlockingIOError):  # another process removes the entry now, or hangs in that
                descriptor = lock_shared(mark)
                # After the new lock is held: in between another process could evict the entry.
                release(entry)
                _held[mark] = descriptor
        os.utime(mark)


def note_run(source: str, run: Path) -> None:
    """Note that a run is trained on the entry of the cache that `source` names; without effect if it names none."""
    if Path(source).parent != cache_folder().resolve():
        return
    mark, line = _mark(cache_folder() / Path(source).name), json.dumps(str(run.resolve())).encode()
    with suppress(OSError, ValueError):
        make_folder(mark.parent, cache_folder())
        with open_file(mark, "a+b", cache_folder()) as file:
            file.seek(0)
            if line not in file.read().splitlines():
                file.write(line + b"\n")


def release(entry: Path) -> None:
    """End the use of an entry by this process."""
    if (descriptor := _held.pop(_mark(entry), None)) is not None:
        os.close(descriptor)


def _mark(entry: Path) -> Path:
    folder = cache_folder()
    # An entry that a process is working on has the mark of the finished one.
    name = re.sub(rf"(\.{OWNER})?\.partial$", "", "-".join(entry.relative_to(folder).parts))
    return folder / _MARKS / name


@contextmanager
def _locked_alone(entry: Path) -> Iterator[bool]:
    """Lock the mark of an entry. Yields False if the entry is in use, or its use is unknown."""
    with ExitStack() as stack:
        alone = False
        with suppress(OSError):
            make_folder(_mark(entry).parent, cache_folder())
            alone = stack.enter_context(lock_alone(_mark(entry)))
        yield alone


def make_room(needed: float = 0, limit: float | None = None, keep: Path | None = None) -> bool:
    """Remove the least recently used entries until the cache has room for so many bytes more.

    Args:
        needed: bytes that will be written next. If they do not fit even then, nothing is removed for them.
        limit: bytes of the whole cache; None for that of the settings.
        keep: an entry that will be finished, whose bytes are among those needed.

    Returns:
        True if they fit. Arrays and images given from Python are counted and kept, as no path leads back to where they
        came from, and so are Hugging Face sets, which are the datasets library's.
    """
    limit = cache_limit() if limit is None else limit
    _remove_remains()
    entries = [entry for entry in CacheEntry.all() if keep is None or _mark(entry.path) != _mark(keep)]
    surplus = sum(entry.nbytes for entry in entries) + needed - limit
    chosen = list[CacheEntry]()
    with ExitStack() as locks:
        for entry in entries:
            if surplus > 0 and entry.evictable and locks.enter_context(_locked_alone(entry.path)):
                chosen.append(entry)
                surplus -= entry.nbytes
        # All or nothing: entries that go without making enough room were worth more than nothing.
        if needed and surplus > 0:
            return False
        return surplus + sum(entry.nbytes for entry in chosen if not entry.remove_locked()) <= 0


def fits_limit(needed: float, keep: Path | None = None) -> bool:
    """Return True if `make_room` can make room for so many bytes."""
    limit = cache_limit()
    if needed > limit:
        return False
    others = (e for e in CacheEntry.all() if keep is None or _mark(e.path) != _mark(keep))
    fixed = (e for e in others if not e.evictable or e.in_use())
    return needed + sum(entry.nbytes for entry in fixed) <= limit


def clear_cache() -> list[CacheEntry]:
    """Remove all entries that are not in use, and return those that are."""
    left = [entry for entry in CacheEntry.all() if not entry.remove()]
    _remove_remains()
    return left


def _remove_remains() -> None:
    """Remove what a killed process left of an entry, files KEY.json that lead to no entry, and marks of no entry."""
    folder = cache_folder()
    with suppress(OSError):
        names = {_mark(entry.path).name for entry in CacheEntry.all()}
        for mark in [] if (folder / _MARKS).is_symlink() else list((folder / _MARKS).iterdir()):
            ours = any(re.fullmatch(kind.name.replace("/", "-"), mark.name) for kind in _KINDS)
            if ours and mark.name not in names and stat.S_ISREG(mark.lstat().st_mode):
                with lock_alone(mark) as alone:
                    if alone:
                        remove(mark, folder)
    with suppress(OSError):
        for path in list(folder.iterdir()):
            if _REMOVED.fullmatch(path.name):
                remove_tree(path, folder)
            elif _REDIRECT.fullmatch(path.name) and _leads_nowhere(path):
                remove(path, folder)


def _leads_nowhere(redirect: Path) -> bool:
    with suppress(OSError, ValueError, RecursionError, TypeError, AttributeError):
        content = json.loads(read_file(redirect, redirect.parent, 4096))
        if content.keys() == {"see"} and re.fullmatch(_KEY, content["see"]):  # nothing else is ours
            return not (redirect.parent / content["see"]).exists()
    return False
