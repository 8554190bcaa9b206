"""Limits on the head of an image file, so that no file makes Pillow work for minutes on what are not pixels.

Pillow goes through heads in Python, piece by piece: a comment of 100 MB byte by byte, each of two million empty chunks,
each of a million strips. What one look at the file shows is refused before; the rest by counting the reads.
"""

from __future__ import annotations

import io
import math
import struct
from pathlib import Path

from PIL import Image

from unfog.data.sources.base import ImageError

_PNG_SIGNATURE, _JPEG_SIGNATURE = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"
_TIFF_ORDERS = {b"II*\0": "<", b"MM\0*": ">", b"II\0*": "<", b"MM*\0": ">", b"II+\0": "<", b"MM\0+": ">"}
_TIFF_PARTS = (273, 324)  # tags of the offsets of strips and of tiles

_MOST_CHUNKS = 10_000  # of a PNG, and one more for each 4 kB: encoders make chunks of 8 kB and larger
_MOST_PROFILES = 16  # in a PNG, which has one; each is unpacked
_MOST_PARTS = 50_000  # strips or tiles of a TIFF: one strip a row are 9,000 for 80 megapixels
# All Exif of an image: a JPEG's has 64 kB. Entries that share their bytes take the square of it in memory.
MOST_EXIF_BYTES = 2**17
# Of a PPM as text, or with a maximum that is not of 8 or 16 bits: Pillow decodes each value by itself, 1 MB/s.
_LARGEST_SLOW_PPM, _MOST_COMMENTS = 2**25, 1_000

# A read takes about a microsecond. Honest files have few below a hundred bytes, but run lengths of a BMP have two, and
# pixels of a PPM with an unusual maximum three.
_MORE_READS = {"bmp_rle": 4_000_000, "ppm": 2**25 / 3}
_USUAL_READS = 500_000
_BYTES_PER_READ = 100
_MOST_HEAD_BYTES = 2**25  # read in pieces before the pixels; a format that is read as a whole has no such head


class _Counted:
    """A count of reads, for a class of files."""

    reads_left, head_left = float(_USUAL_READS), float(_MOST_HEAD_BYTES)

    def count(self, size: int) -> None:
        """Count a read of so many bytes. ImageError if it is one too many."""
        self.reads_left += size / _BYTES_PER_READ - 1
        self.head_left -= size
        if self.reads_left < 0 or self.head_left < 0:
            raise ImageError("made of too many small pieces, or with too much before its pixels")

    def head_is_read(self, codec: str) -> None:
        """Note that the head was read, and that the pixels are of this codec of Pillow's."""
        self.head_left = math.inf
        self.reads_left += _MORE_READS.get(codec, 0)


class CountedFile(_Counted, io.BufferedReader):
    """A file on the disk, opened for Pillow."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path))

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self.count(len(data) if size is not None and size >= 0 else 0)
        return data


class CountedBytes(_Counted, io.BytesIO):
    """The content of a file, opened for Pillow."""

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self.count(len(data) if size is not None and size >= 0 else 0)
        return data


Counted = CountedFile | CountedBytes


def check_head(file: Counted) -> None:
    """Raise ImageError if the head of an image file would take Pillow long; else the file is at its beginning."""
    start = file.read(16)
    if start.startswith(_PNG_SIGNATURE):
        _check_chunks(file)
    elif start.startswith(_JPEG_SIGNATURE):
        _check_exif(file)
    elif start[:4] in _TIFF_ORDERS:
        _check_parts(file, start)
    file.seek(0)


def check_pixels(image: Image.Image, file: Counted) -> None:
    """Raise ImageError if the pixels of an image, whose head was read, would take Pillow far longer than others."""
    tiles = getattr(image, "tile", None)
    codec = str(tiles[0][0]) if tiles else ""
    file.head_is_read(codec)
    if codec in ("ppm", "ppm_plain"):
        place = file.tell()
        file.seek(0)
        content = file.read(_LARGEST_SLOW_PPM + 1)
        file.seek(place)
        if len(content) > _LARGEST_SLOW_PPM or (content.count(b"#") > _MOST_COMMENTS and content[1:2] in b"123"):
            raise ImageError("a PPM as text, or of an unusual maximum, of over 32 MB or 1,000 comments")


def _check_chunks(file: Counted) -> None:
    most = _MOST_CHUNKS + file.seek(0, 2) // 4096
    at, count, profiles = len(_PNG_SIGNATURE), 0, 0
    while True:
        file.seek(at)
        head = file.read(8)
        if len(head) < 8 or head[4:] == b"IEND":
            return
        count, profiles = count + 1, profiles + (head[4:] == b"iCCP")
        if count > most or profiles > _MOST_PROFILES:
            raise ImageError(f"a PNG of over {_MOST_CHUNKS:,} small chunks, or {_MOST_PROFILES} colour profiles")
        at += 12 + int.from_bytes(head[:4])


def _check_exif(file: Counted) -> None:
    at, exif = 2, 0
    while True:
        file.seek(at)
        head = file.read(10)
        if len(head) < 4 or head[:1] != b"\xff" or head[1] in (0xDA, 0xD9):  # the pixels, the end
            return
        if head[1] == 0xFF:  # may precede any marker
            at += 1
            continue
        length = int.from_bytes(head[2:4])
        exif += length if head[1] == 0xE1 and head[4:8] == b"Exif" else 0
        if exif > MOST_EXIF_BYTES:
            raise ImageError(f"a JPEG with over {MOST_EXIF_BYTES >> 10} kB of Exif")
        at += 2 + max(2, length)


def _check_parts(file: Counted, start: bytes) -> None:
    order, big = _TIFF_ORDERS[start[:4]], b"+" in start[:4]
    # An entry of a BigTIFF has 20 bytes, its count of values 8, and the number of entries 8.
    offset, count, entry = ("Q", "Q", "HHQ") if big else ("I", "H", "HHI")
    try:
        file.seek(struct.unpack_from(order + offset, start, 8 if big else 4)[0])
        entries = struct.unpack(order + count, file.read(struct.calcsize(order + count)))[0]
        content = file.read(min(entries, 2**16) * (20 if big else 12))
    except (struct.error, OSError, ValueError, OverflowError):
        return  # which Pillow refuses as well
    size = 20 if big else 12
    for at in range(0, len(content) - size + 1, size):
        tag, _, values = struct.unpack_from(order + entry, content, at)
        if tag in _TIFF_PARTS and values > _MOST_PARTS:
            raise ImageError(f"a TIFF of over {_MOST_PARTS:,} strips or tiles")
