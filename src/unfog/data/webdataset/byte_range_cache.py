"""What was read of shards far away, kept on disk for later epochs and for other runs, up to so many bytes.

Of a set that does not fit, always the same part is kept: of images that come once an epoch in ever another order, the
least recently read would nearly always be gone before it comes again. What is left of other sets goes first.

In the folder: KEY-NUMBER.members for each 64 MB of a shard, named by the shard's key and its number: a table of the
checksums of the members that begin there, then those members, each where it is in the shard. What has not been kept is
a hole. A member without its checksum is not there, so one cut short by a crash is not, and any number of processes may
read and write at once. All of it may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_SEGMENT_BYTES = 64 * 2**20
"""Bytes of a shard that one file is for: what is kept, and what is removed, at once."""

_UNIT = 512  # of a tar archive: two members do not begin in the same one
_MARK = 4  # bytes of a checksum
_FILE = re.compile(r"[0-9a-f]{32}-[0-9]{6}\.members")
_FILL = 0.9  # of the limit, so that what is kept of one set never has to make room for more of it
_TIDIES = 32  # times the folder is looked through while as much is written as may be kept
_USED_SECONDS = 60.0  # how exactly is known when a file was last used


class ByteRangeCache:
    """Members of shards by their place.

    Args:
        folder: where they are kept; nothing else in it is touched.
        limit: bytes on disk in all, of all sets; at most half of what is free besides.
        total: bytes of the set that this process reads.
        processes: that write to the folder at once; each looks through it the more often, as it knows of its own alone.
    """

    def __init__(self, folder: Path, limit: int, total: int, processes: int = 1) -> None:
        self.folder, self.limit = folder, limit
        self.trouble = ""
        """Why nothing more is kept, once that is so."""
        self._unseen = limit / _TIDIES / processes  # bytes written until the folder is looked through
        self._share = min(1.0, _FILL * limit / max(1, total))
        self._written: int | None = None  # since the folder was looked through
        self._used: dict[str, float] = {}
        self._lock = threading.Lock()

    def read(self, key: str, start: int, size: int) -> bytes | None:
        """The member of that size at that place of a shard; None if it is not kept whole."""
        name, mark_at, data_at = _place(key, start)
        with suppress(OSError), _opened(self.folder / name, os.O_RDONLY) as file:
            mark = os.pread(file, _MARK, mark_at)
            if any(mark) and (data := os.pread(file, size, data_at)) and _mark(data, size) == mark:
                self._touch(name, file)
                return data
        return None

    def write(self, key: str, start: int, data: bytes) -> None:
        """Keep a member, if it is of the part of the set that is kept and the disk does not refuse."""
        name, mark_at, data_at = _place(key, start)
        if self.trouble or not self._chosen(name):
            return
        try:
            self._make_room(len(data))
            with _opened(self.folder / name, os.O_RDWR | os.O_CREAT) as file:
                _write(file, data, data_at)
                _write(file, _mark(data, len(data)), mark_at)
        except OSError as error:
            self.trouble = f"{self.folder} cannot be written ({error.strerror or error})"

    def forget(self, key: str, start: int) -> None:
        """Let a member be as if it had not been kept."""
        name, mark_at, _ = _place(key, start)
        with suppress(OSError), _opened(self.folder / name, os.O_WRONLY) as file:
            _write(file, bytes(_MARK), mark_at)

    def _chosen(self, name: str) -> bool:
        """Whether this part of a shard is one of those that are kept, evenly spread over all."""
        return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big") / 2**48 < self._share

    def _touch(self, name: str, file: int) -> None:
        """Note on disk, now and then, that a file is in use."""
        if (now := time.monotonic()) - self._used.get(name, -_USED_SECONDS) >= _USED_SECONDS:
            self._used[name] = now
            with suppress(OSError):
                os.utime(file)

    def _make_room(self, size: int) -> None:
        """Look through the folder once in a while, and remove what is over the limit."""
        with self._lock:
            if self._written is not None and self._written <= self._unseen:
                self._written += size
                return
            self._written = size
            self.folder.mkdir(parents=True, exist_ok=True)
            self._remove_oldest()

    def _remove_oldest(self) -> None:
        """Remove the files used least recently, down to a little less than the limit."""
        found: list[tuple[float, int, Path]] = []
        for entry in os.scandir(self.folder):
            with suppress(OSError):  # gone meanwhile, by another process that does the same
                if _FILE.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    stat = entry.stat(follow_symlinks=False)
                    found.append((stat.st_mtime, getattr(stat, "st_blocks", stat.st_size // 512) * 512, Path(entry)))
        used = sum(size for _, size, _ in found)
        limit = min(self.limit, (used + shutil.disk_usage(self.folder).free) // 2)
        if used <= limit:
            return
        for _, size, path in sorted(found):
            if used <= _FILL * limit:
                break
            with suppress(OSError):
                path.unlink()
            used -= size


def _place(key: str, start: int) -> tuple[str, int, int]:
    """(file, where in it the checksum is, where the member is)."""
    number, begin = divmod(start, _SEGMENT_BYTES)
    return f"{key}-{number:06}.members", begin // _UNIT * _MARK, _SEGMENT_BYTES // _UNIT * _MARK + begin


def _mark(data: bytes, size: int) -> bytes:
    """A checksum of a member of that size that is never all zeros, which is what a hole is."""
    return (zlib.crc32(data, size) or 1).to_bytes(_MARK, "little")


def _write(file: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, at)
        view, at = view[written:], at + written


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    file = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        yield file
    finally:
        os.close(file)
