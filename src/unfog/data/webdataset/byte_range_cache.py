"""A disk cache of byte ranges of remote shards, for later epochs and other runs, up to a limit.

Of a set that does not fit, a fixed part is cached: in a new random order each epoch, the least recently used range
would nearly always be evicted before it is read again. Ranges of other sets are evicted first.

Each file KEY-NUMBER.members holds 64 MB of a shard: a table of checksums of the members that begin there, then the
members at their offsets; what is not cached is a hole. A member without its checksum counts as not cached, so a write
that a crash cut short does no harm, and any number of processes may read and write at once. All of it may be deleted.
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

from unfog.files.safe_files import Mode, open_file, remove

_SEGMENT_BYTES = 64 * 2**20  # of a shard in one file, which is evicted as a whole
_UNIT = 512  # of a tar archive: no two members begin in the same one
_CHECKSUM_BYTES = 4
_FILE = re.compile(r"[0-9a-f]{32}-[0-9]{6}\.members")
_FILL = 0.9  # of the limit, so that a set never evicts its own ranges
_SCANS = 32  # of the folder while as much is written as may be cached
_TOUCH_SECONDS = 60.0  # between two updates of a file's time of use


class ByteRangeCache:
    """Members of shards, by shard and position.

    Args:
        folder: the folder of the cache; other files in it are left alone.
        limit: bytes on disk of all sets together; at most half of what is free besides.
        total: bytes of the set that this process reads.
        processes: number of processes that write at once; each scans the folder more often, as it sees only its own
            writes between two scans.
    """

    def __init__(self, folder: Path, limit: int, total: int, processes: int = 1) -> None:
        self.folder, self.limit = folder, limit
        self.error = ""
        """Why nothing more is cached, after a write failed."""
        self._scan_bytes = limit / _SCANS / processes
        self._share = min(1.0, _FILL * limit / max(1, total))
        self._written: int | None = None  # since the last scan
        self._used: dict[str, float] = {}
        self._lock = threading.Lock()

    def read(self, key: str, start: int, size: int) -> bytes | None:
        """Return the member of that size at that position of a shard, None if it is not cached whole."""
        name, checksum_at, data_at = _place(key, start)
        with suppress(OSError), _open(self.folder / name, "rb") as file:
            checksum = os.pread(file, _CHECKSUM_BYTES, checksum_at)
            if any(checksum) and (data := os.pread(file, size, data_at)) and _checksum(data, size) == checksum:
                self._touch(name, file)
                return data
        return None

    def write(self, key: str, start: int, data: bytes) -> None:
        """Cache a member, if it belongs to the part of the set that is cached and the disk accepts it."""
        name, checksum_at, data_at = _place(key, start)
        if self.error or not self._is_cached_part(name):
            return
        try:
            self._make_room(len(data))
            with _open(self.folder / name, "a+b") as file:
                _write_all(file, data, data_at)
                _write_all(file, _checksum(data, len(data)), checksum_at)
        except OSError as error:
            self.error = f"{self.folder} cannot be written ({error.strerror or error})"

    def discard(self, key: str, start: int) -> None:
        """Remove a member from the cache."""
        name, checksum_at, _ = _place(key, start)
        with suppress(OSError), _open(self.folder / name, "r+b") as file:
            _write_all(file, bytes(_CHECKSUM_BYTES), checksum_at)

    def _is_cached_part(self, name: str) -> bool:
        # By a hash, so that every process and epoch chooses the same parts, evenly spread over the shards.
        return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big") / 2**48 < self._share

    def _touch(self, name: str, file: int) -> None:
        if (now := time.monotonic()) - self._used.get(name, -_TOUCH_SECONDS) >= _TOUCH_SECONDS:
            self._used[name] = now
            with suppress(OSError):
                os.utime(file)

    def _make_room(self, size: int) -> None:
        """Scan the folder now and then, and evict what is over the limit."""
        with self._lock:
            if self._written is not None and self._written <= self._scan_bytes:
                self._written += size
                return
            self._written = size
            self.folder.mkdir(parents=True, exist_ok=True)
            self._evict()

    def _evict(self) -> None:
        """Remove the files used least recently, down to a little less than the limit."""
        found: list[tuple[float, int, Path]] = []
        for entry in os.scandir(self.folder):
            with suppress(OSError):  # another process has just evicted it
                if _FILE.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    stat = entry.stat(follow_symlinks=False)
                    found.append((stat.st_mtime, stat.st_blocks * 512, Path(entry)))  # the size counts holes, too
        used = sum(size for _, size, _ in found)
        limit = min(self.limit, (used + shutil.disk_usage(self.folder).free) // 2)
        if used <= limit:
            return
        for _, size, path in sorted(found):
            if used <= _FILL * limit:
                break
            with suppress(OSError):
                remove(path, self.folder)
            used -= size


def _place(key: str, start: int) -> tuple[str, int, int]:
    """Return (file name, position of the checksum in it, position of the member in it)."""
    number, begin = divmod(start, _SEGMENT_BYTES)
    checksums = _SEGMENT_BYTES // _UNIT * _CHECKSUM_BYTES
    return f"{key}-{number:06}.members", begin // _UNIT * _CHECKSUM_BYTES, checksums + begin


def _checksum(data: bytes, size: int) -> bytes:
    # Seeded by the size, and never all zeros, which is what a hole reads as.
    return (zlib.crc32(data, size) or 1).to_bytes(_CHECKSUM_BYTES, "little")


def _write_all(file: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, at)
        view, at = view[written:], at + written


@contextmanager
def _open(path: Path, mode: Mode) -> Iterator[int]:
    with open_file(path, mode, path.parent, buffering=0) as file:
        yield file.fileno()
