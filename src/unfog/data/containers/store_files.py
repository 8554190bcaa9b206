"""`StoreFiles`, the files of a Zarr store by their keys: those below a folder, or the members of a zip archive."""

from __future__ import annotations

import os
import stat
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, cast

from unfog.data.sources.arrays import DAMAGE_ERRORS
from unfog.data.sources.folder import files_digest
from unfog.errors import RequestError
from unfog.files.safe_files import open_file, regular_file
from unfog.text import sanitize

_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_ENCRYPTED = 1  # bit of a member's flags
_MOST_MEMBERS = 10_000_000


class StoreFiles(ABC):
    """Files whose keys are paths with "/" between folders, "" for the whole."""

    @abstractmethod
    def open(self, key: str) -> tuple[BinaryIO, int]:
        """Open a file, and return it with its size. FileNotFoundError if it is missing, OSError if it is not a file."""

    @abstractmethod
    def has(self, key: str) -> bool:
        """Return True if there is a file of that key."""

    @abstractmethod
    def folders(self, key: str) -> list[str]:
        """Return the names of the folders in one, sorted."""

    @abstractmethod
    def sizes(self, key: str) -> Iterator[tuple[str, int]]:
        """Yield (path relative to the folder, stored bytes) of all files below a folder."""

    def read(self, key: str, most: int) -> bytes:
        """Return the content of a file. Raises as `open`, and ValueError above `most` bytes or if it is damaged."""
        file, size = self.open(key)
        try:
            with file:
                content = file.read(most + 1) if size <= most else b""
        except (zipfile.BadZipFile, zlib.error) as error:
            raise ValueError(str(error)) from None
        if max(size, len(content)) > most:
            raise ValueError(f"{os.path.basename(key)} has over {most:,} bytes")
        return content


class FolderFiles(StoreFiles):
    """The files below a folder. A link, to a file or on the way to it, is an OSError."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def open(self, key: str) -> tuple[BinaryIO, int]:
        file = open_file(self._root / key, "rb", self._root)
        return file, os.fstat(file.fileno()).st_size

    def has(self, key: str) -> bool:
        return (self._root / key).is_file()

    def folders(self, key: str) -> list[str]:
        with suppress(OSError), os.scandir(self._root / key) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
        return []

    def sizes(self, key: str) -> Iterator[tuple[str, int]]:
        folder = self._root / key
        for path in self._paths(folder):
            with suppress(OSError):
                status = os.lstat(folder / path)
                yield path, status.st_size if stat.S_ISREG(status.st_mode) else 0

    def stamp(self, key: str) -> tuple[str, int]:
        """Return (a digest of the state of the files below a folder, their bytes)."""
        folder = self._root / key
        return files_digest(folder, sorted(self._paths(folder)))

    def _paths(self, folder: Path) -> Iterator[str]:
        pending = [""]
        while pending:
            prefix = pending.pop()
            with suppress(OSError), os.scandir(folder / prefix) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(f"{prefix}{entry.name}/")
                    elif entry.is_file(follow_symlinks=False):
                        yield f"{prefix}{entry.name}"


class ZipFiles(StoreFiles):
    """The members of a zip archive, also of one that has all of them in one folder. It is open as long as this object.

    RequestError if it is not an archive, or damaged.
    """

    def __init__(self, path: Path, marks: tuple[str, ...]) -> None:
        """Open an archive; `marks` are the names of files, one of which is in the first folder of a store."""
        try:
            self._archive = zipfile.ZipFile(regular_file(path, path.parent, follow=True))
            infos = self._archive.infolist()
        except (*DAMAGE_ERRORS, zipfile.BadZipFile) as error:
            raise RequestError(
                f"{sanitize(str(path))} is not a complete zip archive ({sanitize(str(error))[:80]}); copy it again"
            ) from None
        if len(infos) > _MOST_MEMBERS:
            raise RequestError(f"{sanitize(str(path))} holds over {_MOST_MEMBERS:,} files; unpack it")
        members = {info.filename: info for info in infos if not info.filename.endswith("/")}
        tops = {name.partition("/")[0] for name in members}
        top = f"{next(iter(tops))}/" if len(tops) == 1 and not any(mark in members for mark in marks) else ""
        self._members = {name.removeprefix(top): info for name, info in members.items()}

    def open(self, key: str) -> tuple[BinaryIO, int]:
        info = self._members.get(key)
        if info is None:
            raise FileNotFoundError(key)
        if info.compress_type not in _METHODS or info.flag_bits & _ENCRYPTED:
            raise OSError(f"{key} is encrypted, or compressed in another way than deflate")
        try:
            return cast(BinaryIO, self._archive.open(info)), info.file_size
        except zipfile.BadZipFile as error:
            raise OSError(f"{key} is damaged: {error}") from None

    def has(self, key: str) -> bool:
        return key in self._members

    def folders(self, key: str) -> list[str]:
        start = f"{key}/" if key else ""
        below = (name[len(start) :] for name in self._members if name.startswith(start))
        return sorted({name.partition("/")[0] for name in below if "/" in name})

    def sizes(self, key: str) -> Iterator[tuple[str, int]]:
        start = f"{key}/" if key else ""
        for name, info in self._members.items():
            if name.startswith(start):
                yield name[len(start) :], info.compress_size
