"""The members of an uncompressed tar archive, from its headers alone: POSIX (ustar, pax) and GNU.

Python's tarfile takes twice the time, keeps every member in memory, and reads whatever length of a name a header
gives. Nothing is extracted, so no member's name or link leads anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from unfog.data.sources.byte_storage import BlockReader
from unfog.data.sources.image_files import ImageError

BLOCK = 512
_NAMING = 2**20  # bytes: longest name, or set of pax attributes, that is believed
_PADDING = 10 * 2**10  # bytes, to a multiple of which writers fill an archive up behind its end mark
_REGULAR = b"0\x007"
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


class TarMember(NamedTuple):
    """A file in an archive."""

    name: bytes
    start: int
    """Where its content begins."""

    size: int
    regular: bool
    """False: a link, a device, or a sparse file."""


class DamagedTarError(Exception):
    """The archive cannot be followed any further. The message is the reason."""


def detect_compression(start: bytes) -> str:
    """How a file that begins so is compressed as a whole; "" if it is not."""
    return next((name for magic, name in _COMPRESSED.items() if start.startswith(magic)), "")


def iter_members(file: BlockReader) -> Iterator[TarMember]:
    """Every member of an archive, in order, less its folders; the last may reach beyond the end.

    Raises:
        DamagedError: what follows is no header, the archive ends without its end mark, or goes on behind it.
        ImageError: it cannot be read.
    """
    at, long_name, attributes = 0, b"", dict[bytes, bytes]()
    while True:
        header = file.at(at, BLOCK)
        if len(header) < BLOCK:
            raise DamagedTarError("a shard that ends too early")
        if header == bytes(BLOCK):
            return _end(file, at)
        kind, length = header[156:157], _number(header[124:136])
        if length is None or not _sum_is_right(header):
            raise DamagedTarError("a shard that is no tar archive" if at == 0 else "a shard damaged from here on")
        start = _behind_map(file, at + BLOCK) if kind == b"S" and header[482] else at + BLOCK
        if kind in b"LKxg":
            if length > _NAMING:
                raise DamagedTarError("a shard damaged from here on")
            content = file.at(start, length)
            if kind == b"L":
                long_name = content.split(b"\0")[0]
            elif kind == b"x":
                attributes = _attributes(content)
        else:
            name = attributes.get(b"path") or long_name or _name(header)
            if re.fullmatch(rb"\d{1,18}", stated := attributes.get(b"size", b"")):
                length = int(stated)
            sparse = any(key.startswith(b"GNU.sparse") for key in attributes)
            # What stands behind a folder's or a link's header is the next header, whatever length it gives.
            length = length if kind not in b"123456" else 0
            if kind != b"5" and not (kind == b"\0" and name.endswith(b"/")):
                yield TarMember(name, start, length, kind in _REGULAR and not sparse)
            long_name, attributes = b"", {}
        at = start + -(-length // BLOCK) * BLOCK


def is_header(block: bytes) -> bool:
    """Whether a block of an archive is the header of a member."""
    return len(block) == BLOCK and any(block) and _sum_is_right(block)


def _end(file: BlockReader, at: int) -> None:
    """DamagedError unless an archive whose first empty block is at `at` ends with the padding behind it.

    What goes on is a file made at its full size and not filled yet, or two archives in one. A single empty block at the
    end of the file is believed, as old writers leave it so.
    """
    rest = file.at(at, 2 * BLOCK + _PADDING + 1)
    if len(rest) > 2 * BLOCK + _PADDING or any(rest):
        raise DamagedTarError("a shard that ends before its file does")


def _behind_map(file: BlockReader, start: int) -> int:
    """Where the content of a sparse file begins whose map goes on behind its header."""
    while any(file.at(start, BLOCK)[504:505]):
        start += BLOCK
    return start + BLOCK


def _number(field: bytes) -> int | None:
    """A header's number: octal text, or with its first bit set the bytes of one; None if neither."""
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


def _sum_is_right(header: bytes) -> bool:
    stated = _number(header[148:156])
    plain = sum(header) - sum(header[148:156]) + 8 * 32
    if stated == plain:
        return True
    # Some old writers added signed bytes.
    return stated is not None and stated == plain - 256 * sum(byte > 127 for byte in header[:148] + header[156:])


def _name(header: bytes) -> bytes:
    name, prefix = header[:100].split(b"\0")[0], header[345:500].split(b"\0")[0]
    return prefix + b"/" + name if prefix and header[257:263] == b"ustar\0" else name


def _attributes(content: bytes) -> dict[bytes, bytes]:
    """Pax records, "LENGTH KEY=VALUE\\n" one after the other; what is none ends them."""
    found, at = dict[bytes, bytes](), 0
    while match := re.compile(rb"(\d{1,7}) ([^=]+)=").match(content, at):
        end = at + int(match[1])
        if end <= match.end() or end > len(content):
            break
        found[match[2]] = content[match.end() : end - 1]
        at = end
    return found


def read_member(file: BlockReader, member: TarMember, most: int) -> bytes:
    """What is in a small member; b"" if it is larger than `most` or not whole."""
    if member.size > most:
        return b""
    try:
        data = file.at(member.start, member.size)
    except ImageError:
        return b""
    return data if len(data) == member.size else b""
