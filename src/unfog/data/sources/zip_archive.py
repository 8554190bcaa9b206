"""The images in a zip archive, here or far away, read in place: nothing is ever unpacked to disk."""

from __future__ import annotations

import hashlib
import struct
import threading
import zipfile
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from unfog.data.report import SkippedFile
from unfog.data.settings import TABLES
from unfog.data.sources.byte_storage import BlockReader, FileState, open_storage
from unfog.data.sources.fingerprint import sample_digest
from unfog.data.sources.image_files import (
    ImageError,
    TransientImageError,
    has_image_signature,
    ignored_kind,
    no_images_error,
    open_bytes,
)
from unfog.data.sources.label_rows import LabelTable
from unfog.data.sources.locate import SourceLocation
from unfog.data.webdataset.index_builder import MAX_FILE_BYTES, normalize_path
from unfog.errors import RequestError
from unfog.text import sanitize

_PIECE = 2**16
_START = 64
_LARGE = 64 * 2**20
"""Bytes over which members take turns to be unpacked, and are not if they begin like no image, in `_START` bytes."""
_large_members = threading.BoundedSemaphore(1)
_MOST_MEMBERS = 10_000_000
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_ENCRYPTED = 1  # bit of a member's flags


class _Member(NamedTuple):
    header: int  # where its own header begins
    packed: int
    size: int
    method: int
    checksum: int


class ZipSource:
    """Every image in a zip archive, at any depth, sorted by path; hidden ones are left out, as in a folder.

    Raises:
        RequestError: it is no whole zip archive, or holds no image that can be read.
    """

    classes: tuple[str, ...] = ()
    labels: NDArray[np.int64] | None = None
    held_out: frozenset[str] | None = None

    def __init__(self, located: SourceLocation) -> None:
        self.name, self.resolved = located.name, located.resolved
        self._path = located.paths[0]
        self._storage = open_storage(self._path)
        self.remote = self._storage.remote
        ((self._path, self._state),) = self._storage.states([self._path]).items()
        ignored = Counter[str]()
        skipped: list[SkippedFile] = []
        self._members: dict[str, _Member] = {}
        self._tables: dict[str, zipfile.ZipInfo] = {}
        for info in self._directory():
            self._add(info, ignored, skipped)
        self.ignored: Mapping[str, int] = ignored
        self.names: Sequence[str] = sorted(self._members)
        # Its table of contents has the checksum of every member.
        self._contents = hashlib.sha256(repr(sorted(self._members.items())).encode("utf-8", "replace")).digest()
        self.unreadable: Sequence[SkippedFile] = sorted(skipped)
        if not self.names:
            raise no_images_error(self.name, ignored, self.unreadable)

    def open(self, i: int) -> Image.Image:
        """Image i, its file unpacked in memory and its pixels not yet. Raises ImageError."""
        name = self.names[i]
        member = self._members[name]
        # Half a megabyte may unpack to half a gigabyte, in each of many threads.
        with _large_members if member.size > _LARGE else nullcontext():
            return open_bytes(self._content(member, image=True), name)

    def stamp(self) -> tuple[str, int]:
        """Digest of the bytes, time of change and members' checksums of the archive, and, unless it is far away, of a
        sample of its bytes now; of one far away, as it was when opened."""
        state, sample = self._state, b""
        if not self._storage.remote:
            try:
                (state,) = self._storage.states([self._path]).values()
            except RequestError:
                state = FileState(0, "")
            with suppress(OSError):
                sample = sample_digest(self._path)
        return hashlib.sha256(repr((*state, self._contents, sample)).encode()).hexdigest(), state.size

    @property
    def tables(self) -> dict[str, LabelTable]:
        """The tables at the top, by name: in no folder, or in folders that all images are below, as where the folder
        was put into the archive and not what is in it."""
        found: dict[str, LabelTable] = {}
        for path in sorted(self._tables, key=lambda path: path.count("/")):
            folder, slash, base = path.rpartition("/")
            if all(name.startswith(folder + slash) for name in (self.names[0], self.names[-1])):  # sorted, as they are
                read = partial(self._table, self._tables[path])
                found.setdefault(base, LabelTable(f"{self.name}/{path}", f"{self.resolved}/{path}", read))
        return found

    def _table(self, info: zipfile.ZipInfo) -> bytes:
        if trouble := _trouble(info):
            raise ImageError(trouble)
        return self._content(_member(info))

    def _directory(self) -> list[zipfile.ZipInfo]:
        """The archive's table of contents."""
        try:
            with zipfile.ZipFile(BlockReader(self._storage, self._path, self._state.size, _PIECE)) as archive:
                infos = archive.infolist()
        except ImageError as error:
            raise RequestError(f"{sanitize(self.name)} cannot be read: {error}; check it and try again") from error
        except (zipfile.BadZipFile, EOFError, NotImplementedError, OSError, ValueError, struct.error) as error:
            raise RequestError(
                f"{sanitize(self.name)} is no whole zip archive ({error}); copy or download it again"
            ) from error
        if len(infos) > _MOST_MEMBERS:
            raise RequestError(f"{sanitize(self.name)} holds over {_MOST_MEMBERS:,} files; make tar shards of it")
        return infos

    def _add(self, info: zipfile.ZipInfo, ignored: Counter[str], skipped: list[SkippedFile]) -> None:
        if info.is_dir():
            return
        name = normalize_path(info.filename.replace("\\", "/"))  # as Windows programs write it
        if kind := ignored_kind(name):
            ignored[kind] += 1
            if kind in TABLES:
                self._tables[name] = info
            return
        if name in self._members:
            skipped.append(SkippedFile(name, "replaced by a later member of its name"))
        self._members.pop(name, None)
        if trouble := _trouble(info):
            skipped.append(SkippedFile(name, trouble))
        else:
            self._members[name] = _member(info)

    def _read(self, start: int, size: int) -> bytes:
        """Return bytes of the archive. A remote one that was readable before raises TransientImageError."""
        if start + size > self._state.size:
            raise ImageError("truncated")
        try:
            data = self._storage.read(self._path, start, size)
        except ImageError as error:
            if not self.remote:
                raise
            raise TransientImageError(str(error)) from error
        if len(data) < size:
            raise (
                TransientImageError("in an archive that ends earlier than it did")
                if self.remote
                else ImageError("truncated")
            )
        return data

    def _content(self, member: _Member, image: bool = False) -> bytes:
        """A member's bytes, never more of them than it says."""
        header = self._read(member.header, 30)
        if not header.startswith(b"PK\3\4"):
            raise ImageError("not where its archive says")
        data = self._read(member.header + 30 + sum(struct.unpack("<HH", header[26:30])), member.packed)
        if member.method == zipfile.ZIP_DEFLATED:
            if image and member.size > _LARGE and not has_image_signature(_inflated(data[:_PIECE], _START)):
                raise ImageError("not an image")
            data = _inflated(data, member.size)
        if len(data) != member.size:
            raise ImageError("not as long as its archive says")
        if zlib.crc32(data) != member.checksum:
            raise ImageError("damaged (its checksum is another)")
        return data


def _member(info: zipfile.ZipInfo) -> _Member:
    return _Member(info.header_offset, info.compress_size, info.file_size, info.compress_type, info.CRC)


def _trouble(info: zipfile.ZipInfo) -> str:
    """Why a member cannot be read; "" if it can."""
    if info.flag_bits & _ENCRYPTED:
        return "encrypted"
    if max(info.file_size, info.compress_size) > MAX_FILE_BYTES:
        return f"over {MAX_FILE_BYTES // 2**20} MB"
    if info.compress_type not in _METHODS:
        return f"packed by method {info.compress_type}, not deflate"
    return ""


def _inflated(data: bytes, size: int) -> bytes:
    unpacker = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        return unpacker.decompress(data, size + 1)  # one more, to see that there is one
    except zlib.error as error:
        raise ImageError("damaged (it does not unpack)") from error
