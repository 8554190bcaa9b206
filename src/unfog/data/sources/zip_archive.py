"""The images in a zip archive, local or remote. They are read in place and never unpacked to disk."""

from __future__ import annotations

import hashlib
import os
import struct
import threading
import zipfile
import zlib
from collections import Counter
from contextlib import nullcontext, suppress
from functools import partial
from typing import NamedTuple

from PIL import Image

from unfog.data.bit_depth import DeepImage
from unfog.data.data_report import OWN, RUN, SkippedFile
from unfog.data.settings import TABLES
from unfog.data.sources.base import ImageError, LabelTable, Source, SourceLocation, TransientImageError
from unfog.data.sources.folder import ignored_kind, normalize_path, own_pictures, run_folders, sample_digest
from unfog.data.sources.image_files import MAX_FILE_BYTES, has_image_signature, open_bytes
from unfog.data.sources.storage import BlockReader, FileState, open_storage
from unfog.errors import RequestError
from unfog.text import sanitize

_BLOCK_BYTES = 2**16
_MAX_MEMBERS = 10_000_000
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_ENCRYPTED = 1  # bit of a member's flags
_LARGE_BYTES = 64 * 2**20
_SIGNATURE_BYTES = 64
_HEADER_BYTES = 30  # of a member, before its name
# Half a megabyte may inflate to half a gigabyte, in each of many threads. So larger members are inflated one at a time,
# and only if they begin like an image.
_large_members = threading.BoundedSemaphore(1)


class _Member(NamedTuple):
    header: int  # position of its local header
    packed: int
    size: int
    method: int
    checksum: int

    @classmethod
    def of(cls, info: zipfile.ZipInfo) -> _Member:
        return cls(info.header_offset, info.compress_size, info.file_size, info.compress_type, info.CRC)


class ZipSource(Source):
    """Every image in a zip archive, at any depth, sorted by path. Hidden files are left out, as in a folder.

    Raises RequestError if it is not a whole zip archive, or holds no image that can be read.
    """

    suffixes = (".zip",)
    tables_inside = True

    def __init__(self, location: SourceLocation) -> None:
        super().__init__(location)
        self._path = location.paths[0]
        self._storage = open_storage(self._path)
        self.remote = self._storage.remote
        ((self._path, self._state),) = self._storage.states([self._path]).items()
        ignored, self.unreadable = Counter[str](), list[SkippedFile]()
        self.ignored = ignored
        self._members: dict[str, _Member] = {}
        self._tables: dict[str, zipfile.ZipInfo] = {}
        self._texts: dict[str, zipfile.ZipInfo] = {}
        directory = self._read_directory()
        for info in directory:
            if not info.filename.endswith("/"):  # a folder; `is_dir` raises if there is no name at all
                self._add(info, ignored, self.unreadable)
        self._remove_overlapping(self.unreadable)
        self._leave_out_own(directory, ignored)
        self.names = sorted(self._members)
        self.unreadable.sort()
        # The directory has the checksum of every member, so that its digest stands for the contents.
        self._contents = hashlib.sha256(repr(sorted(self._members.items())).encode("utf-8", "replace")).digest()
        if not self.names:
            raise self._no_images_error()

    @classmethod
    def match(cls, location: SourceLocation) -> SourceLocation | None:
        return location if location.suffix in cls.suffixes and len(location.paths) == 1 else None

    def open(self, i: int) -> Image.Image | DeepImage:
        name = self.names[i]
        member = self._members[name]
        with _large_members if member.size > _LARGE_BYTES else nullcontext():
            return open_bytes(self._content(member, image=True), name)

    def folder_problem(self, i: int) -> str:
        return self._storage.folder_problem(self._path)

    def stamp(self) -> tuple[str, int]:
        # A remote archive counts as it was when opened; a local one is looked at again, and sampled.
        state, sample = self._state, b""
        if not self.remote:
            try:
                (state,) = self._storage.states([self._path]).values()
            except RequestError:
                state = FileState(0, "")
            with suppress(OSError):
                sample = sample_digest(self._path)
        return hashlib.sha256(repr((*state, self._contents, sample)).encode()).hexdigest(), state.size

    def read_beside(self, i: int, suffix: str, most: int) -> bytes | None:
        info = self._texts.get(f"{os.path.splitext(self.names[i])[0]}{suffix}")
        if info is None:
            return None
        if reason := _unusable_reason(info):
            raise ImageError(reason)
        return self._content(_Member.of(info), most=most)

    def table(self, name: str) -> LabelTable | None:
        # In no folder, or in folders that all images are below, as where a folder was zipped rather than its content.
        for path in sorted(self._tables, key=lambda path: path.count("/")):
            folder, slash, base = path.rpartition("/")
            below = all(image.startswith(folder + slash) for image in (self.names[0], self.names[-1]))  # as sorted
            if base == name and below:
                read = partial(self._read_table, self._tables[path])
                return LabelTable(f"{self.name}/{path}", f"{self.resolved}/{path}", read)
        return None

    def _read_table(self, info: zipfile.ZipInfo) -> bytes:
        if reason := _unusable_reason(info):
            raise ImageError(reason)
        return self._content(_Member.of(info))

    def _read_directory(self) -> list[zipfile.ZipInfo]:
        try:
            with zipfile.ZipFile(BlockReader(self._storage, self._path, self._state.size, _BLOCK_BYTES)) as archive:
                infos = archive.infolist()
        except ImageError as error:
            raise RequestError(f"{sanitize(self.name)} cannot be read: {error}; check it and try again") from error
        except (zipfile.BadZipFile, EOFError, NotImplementedError, OSError, ValueError, struct.error) as error:
            raise RequestError(
                f"{sanitize(self.name)} is not a complete zip archive ({error}); copy or download it again"
            ) from error
        if len(infos) > _MAX_MEMBERS:
            raise RequestError(f"{sanitize(self.name)} holds over {_MAX_MEMBERS:,} files; make tar shards of it")
        return infos

    def _add(self, info: zipfile.ZipInfo, ignored: Counter[str], unreadable: list[SkippedFile]) -> None:
        name = normalize_path(info.filename.replace("\\", "/"))  # as some Windows programs write it
        if kind := ignored_kind(name):
            ignored[kind] += 1
            if kind in TABLES:
                self._tables[name] = info
            elif kind == ".txt":
                self._texts[name] = info
            return
        if name in self._members:  # as in unpacking, the last one counts
            unreadable.append(SkippedFile(name, "replaced by a later member of its name"))
        self._members.pop(name, None)
        if reason := _unusable_reason(info):
            unreadable.append(SkippedFile(name, reason))
        else:
            self._members[name] = _Member.of(info)

    def _leave_out_own(self, directory: list[zipfile.ZipInfo], ignored: Counter[str]) -> None:
        """Leave out runs, and pictures that Unfog has written, unless there are no others. As in a folder."""
        runs = run_folders(normalize_path(info.filename.replace("\\", "/")) for info in directory) - {""}
        of_runs = [name for name in self._members if runs and name.startswith(tuple(runs))]
        for name in of_runs:
            del self._members[name]
        ignored.update({RUN: len(runs)} if runs else {})
        # Of a remote archive each of them would be a request.
        own = set() if self.remote else own_pictures(self._members, self._head)
        if len(own) < len(self._members):
            self._members = {name: member for name, member in self._members.items() if name not in own}
            ignored.update({OWN: len(own)} if own else {})

    def _head(self, name: str, size: int) -> bytes:
        with suppress(ImageError):
            return self._content(self._members[name])[:size]
        return b""

    def _remove_overlapping(self, unreadable: list[SkippedFile]) -> None:
        """Drop members that overlap others: with those, a small archive could hold any number of large images."""
        end = -(2**63)  # as a damaged entry may begin before the archive
        # By their ends, so that a damaged entry drops as few others as possible.
        for name, member in sorted(self._members.items(), key=lambda item: (_least_end(item[1]), -item[1].header)):
            if member.header < end:
                unreadable.append(SkippedFile(name, "overlapping another member of its archive"))
                del self._members[name]
            else:
                end = _least_end(member)

    def _read(self, start: int, size: int) -> bytes:
        if start + size > self._state.size:
            raise ImageError("truncated")
        try:
            data = self._storage.read(self._path, start, size)
        except ImageError as error:
            if not self.remote:
                raise
            raise TransientImageError(str(error)) from error  # it could be read when it was opened
        if len(data) < size:
            if self.remote:
                raise TransientImageError("in an archive that ends earlier than it did")
            raise ImageError("truncated")
        return data

    def _content(self, member: _Member, image: bool = False, most: int = 0) -> bytes:
        """Return the bytes of a member, or only its first `most`. No more are inflated than it declares."""
        header = self._read(member.header, _HEADER_BYTES)
        if not header.startswith(b"PK\3\4"):
            raise ImageError("not where its archive says")
        start = member.header + _HEADER_BYTES + sum(struct.unpack("<HH", header[26:30]))
        if most and member.size > most:
            data = self._read(start, min(member.packed, 2 * most))  # deflating makes nothing twice as long
            return (_inflate(data, most - 1) if member.method == zipfile.ZIP_DEFLATED else data)[:most]
        data = self._read(start, member.packed)
        if member.method == zipfile.ZIP_DEFLATED:
            check = image and member.size > _LARGE_BYTES
            if check and not has_image_signature(_inflate(data[:_BLOCK_BYTES], _SIGNATURE_BYTES)):
                raise ImageError("not an image")
            data = _inflate(data, member.size)
        if len(data) != member.size:
            raise ImageError("not as long as its archive says")
        if zlib.crc32(data) != member.checksum:
            raise ImageError("damaged (its checksum is another)")
        return data


def _least_end(member: _Member) -> int:
    return member.header + _HEADER_BYTES + member.packed


def _unusable_reason(info: zipfile.ZipInfo) -> str:
    """Return the reason for which a member cannot be read, "" if it can."""
    if info.flag_bits & _ENCRYPTED:
        return "encrypted"
    if max(info.file_size, info.compress_size) > MAX_FILE_BYTES:
        return f"over {MAX_FILE_BYTES // 2**20} MB"
    if info.compress_type not in _METHODS:
        return f"packed by method {info.compress_type}, not deflate"
    return ""


def _inflate(data: bytes, size: int) -> bytes:
    unpacker = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        return unpacker.decompress(data, size + 1)  # one more, so that a longer member is noticed
    except zlib.error as error:
        raise ImageError("damaged (it does not unpack)") from error
