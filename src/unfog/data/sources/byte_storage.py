"""Byte ranges of large files, local or remote; safe to use from threads."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterable
from io import RawIOBase
from typing import NamedTuple, Protocol

from unfog.data.sources.base import ImageError
from unfog.data.sources.image_files import CHANGED, os_error_reason
from unfog.errors import RequestError
from unfog.text import sanitize

_MAX_OPEN_FILES = 128


class FileState(NamedTuple):
    """Size and version of a file, which differ once it has changed."""

    size: int
    version: str
    """Time of change, or ETag."""


class Storage(Protocol):
    """Files that are read by byte range."""

    remote: bool
    """True if each read waits for a network, so that many at once are faster."""

    def states(self, paths: Iterable[str], absent: dict[str, str] | None = None) -> dict[str, FileState]:
        """Return the state of each file, sorted by path, with remote patterns expanded.

        Remote files that cannot be looked at go into `absent`, path -> reason, where that is given.

        Raises:
            RequestError: a file cannot be looked at, or a pattern matches none.
        """

    def read(self, path: str, start: int, size: int) -> bytes:
        """Return up to `size` bytes from `start`, fewer where the file ends. Raises ImageError."""


class LocalStorage:
    """Storage that reads files of this machine by position."""

    remote = False

    def __init__(self) -> None:
        self._files: OrderedDict[str, _Descriptor] = OrderedDict()
        self._lock = threading.Lock()
        self._first_states: dict[str, FileState] = {}  # byte ranges of a file that changed since mean nothing

    def states(self, paths: Iterable[str], absent: dict[str, str] | None = None) -> dict[str, FileState]:
        found = {path: self._state(path) for path in sorted(paths)}
        self._first_states = self._first_states or found
        return found

    def read(self, path: str, start: int, size: int) -> bytes:
        try:
            file = self._open(path)
            stat = os.fstat(file.number)  # at each read, as an open file may be written over in place
            if self._first_states.get(path, stat) not in (stat, (stat.st_size, str(stat.st_mtime_ns))):
                raise ImageError(CHANGED)
            parts: list[bytes] = []
            while size > 0 and (part := os.pread(file.number, size, start)):  # Linux reads at most 2 GB at once
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
                    # Only forgotten here: a thread that reads from it holds it, and the last one closes it.
                    self._files.popitem(last=False)
            self._files.move_to_end(path)
            return self._files[path]


class _Descriptor:
    """An open file that is closed with its last reference."""

    def __init__(self, path: str) -> None:
        self.number = -1
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)


class BlockReader(RawIOBase):
    """A seekable file object over a storage, for zipfile and tar headers. It holds one block of at least `block` bytes.

    Args:
        storage: the storage that holds the file.
        path: its path there.
        size: its bytes.
        block: bytes to read at least.
    """

    def __init__(self, storage: Storage, path: str, size: int, block: int) -> None:
        self._storage, self._path, self._size, self._block = storage, path, size, block
        self._position = self._start = 0
        self._held = b""

    def read_at(self, start: int, size: int) -> bytes:
        """Return up to `size` bytes from `start`, fewer where the file ends."""
        size = max(0, min(size, self._size - start))
        if not self._start <= start <= start + size <= self._start + len(self._held):
            want = min(max(size, self._block), self._size - start) if size else 0
            self._start, self._held = start, self._storage.read(self._path, start, want)
        return self._held[start - self._start : start - self._start + size]

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence])
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        rest = max(0, self._size - self._position)
        data = self.read_at(self._position, rest if size is None or size < 0 else min(size, rest))
        self._position += len(data)
        return data
