"""The members of an uncompressed tar archive, from its headers: POSIX (ustar, pax) and GNU.

Python's tarfile takes twice the time, keeps every member in memory, and allocates any length of a name that a header
gives. Nothing is extracted, so no member's name or link is followed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from unfog.data.sources.base import ImageError
from unfog.data.sources.storage import BlockReader

BLOCK = 512
_MAX_NAME_BYTES = 2**20  # longest name, or set of pax attributes, that is read
_PADDING = 10 * 2**10  # bytes; writers pad an archive behind its end mark to a multiple of them
_REGULAR = b"0\x007"
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


class TarMember(NamedTuple):
    """A file in an archive: its name and its byte range."""

    name: bytes
    start: int
    """Position of its content."""

    size: int
    regular: bool
    """False for a link, a device or a sparse file."""

    def read(self, file: BlockReader, max_bytes: int) -> bytes:
        """Return the content of a small member, b"" if it is larger than `max_bytes` or not whole."""
        if self.size > max_bytes:
            return b""
        try:
            data = file.read_at(self.start, self.size)
        except ImageError:
            return b""
        return data if len(data) == self.size else b""

    @classmethod
    def iterate(cls, file: BlockReader) -> Iterator[TarMember]:
        """Yield every member of an archive but its folders, in order. The last one may reach beyond the end.

        Raises:
            DamagedTarError: a header is damaged, or the archive ends without its end mark or goes on behind it.
            ImageError: it cannot be read.
        """
        at, long_name, attributes = 0, b"", dict[bytes, bytes]()
        while True:
            header = file.read_at(at, BLOCK)
            if len(header) < BLOCK:
                raise DamagedTarError("a shard that ends too early")
            if header == bytes(BLOCK):
                return _check_end(file, at)
            kind, length = header[156:157], _parse_number(header[124:136])
            if length is None or not _has_valid_checksum(header):
                raise DamagedTarError("a shard that is not a tar file" if at == 0 else "a shard damaged from here on")
            start = _skip_sparse_map(file, at + BLOCK) if kind == b"S" and header[482] else at + BLOCK
            if kind in b"LKxg":  # GNU's long name and long link; pax attributes of the next member, and of all
                if length > _MAX_NAME_BYTES:
                    raise DamagedTarError("a shard damaged from here on")
                content = file.read_at(start, length)
                if kind == b"L":
                    long_name = content.split(b"\0")[0]
                elif kind == b"x":
                    attributes = _parse_attributes(content)
            else:
                name = attributes.get(b"path") or long_name or _member_name(header)
                if re.fullmatch(rb"\d{1,18}", stated := attributes.get(b"size", b"")):
                    length = int(stated)
                sparse = any(key.startswith(b"GNU.sparse") for key in attributes)
                # A folder or link has no content, whatever length its header gives.
                length = length if kind not in b"123456" else 0
                if kind != b"5" and not (kind == b"\0" and name.endswith(b"/")):
                    yield cls(name, start, length, kind in _REGULAR and not sparse)
                long_name, attributes = b"", {}
            at = start + -(-length // BLOCK) * BLOCK  # content is padded to whole blocks


class DamagedTarError(Exception):
    """The archive cannot be read any further. The message is the reason."""


def detect_compression(start: bytes) -> str:
    """Return the compression of a file that begins so, "" for none."""
    return next((name for magic, name in _COMPRESSED.items() if start.startswith(magic)), "")


def is_header(block: bytes) -> bool:
    """Return whether a block of an archive is the header of a member."""
    return len(block) == BLOCK and any(block) and _has_valid_checksum(block)


def _check_end(file: BlockReader, at: int) -> None:
    """Raise DamagedTarError unless an archive whose first empty block is at `at` ends with the padding behind it."""
    # Otherwise it is a file preallocated at its full size and not filled yet, or two archives in one. A single empty
    # block at the end is accepted, as old writers leave it.
    rest = file.read_at(at, 2 * BLOCK + _PADDING + 1)
    if len(rest) > 2 * BLOCK + _PADDING or any(rest):
        raise DamagedTarError("a shard that ends before its file does")


def _skip_sparse_map(file: BlockReader, start: int) -> int:
    """Return where the content of a sparse file begins whose map goes on behind its header."""
    while any(file.read_at(start, BLOCK)[504:505]):
        start += BLOCK
    return start + BLOCK


def _parse_number(field: bytes) -> int | None:
    """Return a header's number, None if it is not a number: octal text, or binary if its first bit is set (GNU)."""
    if field[0] == 0x80:
        value = int.from_bytes(field[1:], "big")
        return value if value < 2**62 else None
    text = field.split(b"\0")[0].strip()
    if not text.isdigit():
        return None if text else 0
    try:
        return int(text, 8)
    except ValueError:
        return None


def _has_valid_checksum(header: bytes) -> bool:
    stated = _parse_number(header[148:156])
    plain = sum(header) - sum(header[148:156]) + 8 * 32
    if stated == plain:
        return True
    # Some old writers added signed bytes.
    return stated is not None and stated == plain - 256 * sum(byte > 127 for byte in header[:148] + header[156:])


def _member_name(header: bytes) -> bytes:
    name, prefix = header[:100].split(b"\0")[0], header[345:500].split(b"\0")[0]
    return prefix + b"/" + name if prefix and header[257:263] == b"ustar\0" else name


def _parse_attributes(content: bytes) -> dict[bytes, bytes]:
    """Parse pax records, "LENGTH KEY=VALUE\\n" one after the other, up to the first malformed one."""
    found, at = dict[bytes, bytes](), 0
    while match := re.compile(rb"(\d{1,7}) ([^=]+)=").match(content, at):
        end = at + int(match[1])
        if end <= match.end() or end > len(content):
            break
        found[match[2]] = content[match.end() : end - 1]
        at = end
    return found
