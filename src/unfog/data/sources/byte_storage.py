"""Bytes of large files, by position. Safe to use from threads."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterable
from io import RawIOBase
from typing import NamedTuple, Protocol

from unfog.data.sources.image_files import CHANGED, ImageError, os_error_reason
from unfog.errors import RequestError
from unfog.text import sanitize

_MAX_OPEN_FILES = 128
"""How many files are kept open at once."""


class FileState(NamedTuple):
    """What a file was like; another one when it was changed."""

    size: int
    version: str
    """Time of change, or ETag."""


class Storage(Protocol):
    """Files that can be read by position."""

    remote: bool
    """Whether each reading takes its time, so that many are best done at once."""

    def states(self, paths: Iterable[str], absent: dict[str, str] | None = None) -> dict[str, FileState]:
        """The state of each file, sorted by path; patterns are looked up. `absent` is for files far away.

        Raises:
            RequestError: one cannot be looked at, or a pattern stands for none.
        """

    def read(self, path: str, start: int, size: int) -> bytes:
        """At most `size` bytes from `start`; fewer where the file ends. Raises ImageError."""


class LocalStorage:
    """Files of this machine."""

    remote = False

    def __init__(self) -> None:
        self._files: OrderedDict[str, _Descriptor] = OrderedDict()
        self._lock = threading.Lock()
        self._listed: dict[str, FileState] = {}  # as they were at first; positions in a file changed since mean nothing

    def states(self, paths: Iterable[str], absent: dict[str, str] | None = None) -> dict[str, FileState]:
        """See Storage."""
        found = {path: self._state(path) for path in sorted(paths)}
        self._listed = self._listed or found
        return found

    def read(self, path: str, start: int, size: int) -> bytes:
        """See Storage."""
        try:
            file = self._open(path)
            stat = os.fstat(file.number)  # each time, as what is open may be written over in place
            if self._listed.get(path, stat) not in (stat, (stat.st_size, str(stat.st_mtime_ns))):
                raise ImageError(CHANGED)
            parts: list[bytes] = []
            while size > 0 and (part := os.pread(file.number, size, start)):  # at most 2 GB at once
                parts.append(part)
                start, size = start + len(part), size - len(part)
        except OSError as error:
            raise ImageError(f"in an archive {os_error_reason(error)}") from error
        return parts[0] if len(parts) == 1 else b"".join(parts)

    @staticmethod
    def _state(path: str) -> FileState:
        try:
            stat = os.stat(path)
        except OSError as error:
            raise RequestError(
                f"{sanitize(path)} is a file {os_error_reason(error)}; bring it, or leave it out"
            ) from None
        return FileState(stat.st_size, str(stat.st_mtime_ns))

    def _open(self, path: str) -> _Descriptor:
        with self._lock:
            if path not in self._files:
                self._files[path] = _Descriptor(path)
                if len(self._files) > _MAX_OPEN_FILES:
                    # Whoever reads from it holds it, too, so it is closed when the last of them is done.
                    self._files.popitem(last=False)
            self._files.move_to_end(path)
            return self._files[path]


class _Descriptor:
    """An open file, closed when nobody holds it any more."""

    def __init__(self, path: str) -> None:
        self.number = -1
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)


class BlockReader(RawIOBase):
    """A file as Python's own readers want it: seekable, reading a piece at a time and holding one.

    Args:
        storage: what holds it.
        path: its path there.
        size: its bytes.
        piece: how many bytes are read at least.
    """

    def __init__(self, storage: Storage, path: str, size: int, piece: int) -> None:
        self._storage, self._path, self._size, self._piece = storage, path, size, piece
        self._position = self._start = 0
        self._held = b""

    def at(self, start: int, size: int) -> bytes:
        """At most `size` bytes from `start`; fewer where the file ends."""
        size = max(0, min(size, self._size - start))
        if not self._start <= start <= start + size <= self._start + len(self._held):
            want = min(max(size, self._piece), self._size - start) if size else 0
            self._start, self._held = start, self._storage.read(self._path, start, want)
        return self._held[start - self._start : start - self._start + size]

    def seekable(self) -> bool:
        """It is."""
        return True

    def readable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """Where the next reading begins."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go elsewhere."""
        self._position = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence])
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        """The next bytes."""
        rest = max(0, self._size - self._position)
        data = self.at(self._position, rest if size is None or size < 0 else min(size, rest))
        self._position += len(data)
        return data


def open_storage(path: str) -> Storage:
    """What reads this path or URL."""
    if "://" not in path:
        return LocalStorage()
    from unfog.data.sources.remote_files import RemoteStorage

    return RemoteStorage(path)
