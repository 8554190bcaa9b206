"""Open one image file by its content, within limits on its head, and explain why one cannot be opened.

Pillow goes through heads in Python, piece by piece: a comment of 100 MB byte by byte, each of two million empty chunks,
each of a million strips. What one look at the file shows is refused before; the rest by counting the reads.
"""

from __future__ import annotations

import ctypes
import errno
import io
import logging
import math
import re
import stat
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import IO

from PIL import Image, ImageFile, JpegImagePlugin, UnidentifiedImageError, _imaging

from unfog.data.sources.base import ImageError, MissingImageError, TransientImageError

# Suffixes of image files. The content decides how a file is read, so a misnamed one works.
SUFFIXES = frozenset(
    f".{kind}"
    for kind in (
        *("png", "apng", "jpg", "jpeg", "jpe", "jfif", "webp", "bmp", "dib", "gif", "tif", "tiff", "avif"),
        *("heic", "heif", "jp2", "j2k", "ppm", "pgm", "pbm", "pnm", "tga", "ico"),
    )
)
# HEIC needs a plugin of the user's; it is listed so that it is reported as skipped rather than ignored.

MAX_FILE_BYTES = 512 * 2**20  # of an image in an archive; a larger one is skipped

# Pillow's names for those, the commonest first. It would open others, too, whatever their suffix: PostScript by
# running Ghostscript on it. TGA comes last, as it has no signature and fits much that is damaged.
_FORMATS = (
    *("JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP", "DIB", "AVIF", "HEIF", "JPEG2000", "MPO", "PPM", "ICO", "TGA"),
)
_PNG_SIGNATURE, _JPEG_SIGNATURE = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"
_SIGNATURES = (_PNG_SIGNATURE, _JPEG_SIGNATURE, b"GIF8", b"RIFF", b"II*\0", b"MM\0*")
# Not the zero behind a byte of data, a restart or TEM, which alone have no length behind them.
_JPEG_MARKER = re.compile(rb"\xff+([\x02-\xcf\xd8-\xfe])")
_START_OF_SCAN, _END_OF_JPEG, _PROGRESSIVE = b"\xda", b"\xd9", (b"\xc2", b"\xca")
# A scan goes over all pixels, and may have a dozen bytes: 100,000 of 80 megapixels take a quarter of an hour. Encoders
# write about ten, and libtiff decodes at most a hundred.
_MAX_SCANS = 100
_PNG_TEXTS = frozenset([b"tEXt", b"zTXt", b"iTXt"])
# Part of Pillow's message for a PNG with a text over a megabyte unpacked, or texts over 64 in all.
TEXT_TOO_LARGE = "MAX_TEXT_"

# Errors of the system that another attempt would meet again.
_PERMANENT_ERRORS = frozenset(
    getattr(errno, name)
    for name in ("ENOENT", "EACCES", "EPERM", "ENOTDIR", "EISDIR", "ENAMETOOLONG", "ELOOP", "EINVAL", "EOVERFLOW")
)

_DESCRIPTION = 270  # the TIFF tag in which ImageJ states the number of images
_STACK = re.compile(r"\AImageJ=.*?^images=(\d{1,9})$", re.DOTALL | re.MULTILINE)
_MOST_PAGES = 10_000  # that are counted

# Those of a file that is gone, or whose disk is.
_MISSING_ERRORS = frozenset([errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR])

GONE = "no longer there"
CHANGED = "in an archive that was changed meanwhile"
# Reasons for an image whose file or archive has changed since the source was opened.
ARCHIVE_GONE = f"in an archive {GONE}"
NO_PARTS = "on a server that serves no parts of a file (no Range requests)"

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


def open_image(path: Path) -> Image.Image:
    """Open an image file and read its header; pixels are read on use. Raises ImageError, and what Pillow raises."""
    try:
        status = path.stat()
    except OSError as error:
        if path.is_symlink():
            raise ImageError("a link that leads nowhere") from error
        raise
    if not stat.S_ISREG(status.st_mode):
        raise ImageError("not a regular file")  # opening a pipe would wait for its writer
    if not status.st_size:
        raise ImageError("empty")
    return _open(path, path.name)


def open_bytes(data: bytes, name: str) -> Image.Image:
    """Open an image from the content of a file called `name`. Raises as `open_image`."""
    if not data:
        raise ImageError("empty")
    return _open(BytesIO(data), name)


def _open(file: Path | BytesIO, name: str) -> Image.Image:
    try:
        image = _open_counted(file)
        if isinstance(image, JpegImagePlugin.JpegImageFile):
            image.info["scans"] = _count_scans(_read(file), image.layers)
        return image
    except UnidentifiedImageError as error:
        raise _unidentified(_read(file, 8), name) from error
    except ValueError as error:
        if TEXT_TOO_LARGE not in str(error):
            raise
        return _open_without_texts(_read(file))


def _open_counted(file: Path | BytesIO) -> Image.Image:
    counted = CountedFile(file) if isinstance(file, Path) else CountedBytes(file.getbuffer())
    try:
        check_head(counted)
        image = Image.open(counted, formats=_readable_formats())
        check_pixels(image, counted)
    except BaseException:
        counted.close()
        raise
    if isinstance(image, ImageFile.ImageFile):
        image._exclusive_fp = True  # it closes the file after its pixels, as one that it opened itself
    return image


def _count_scans(jpeg: bytes, channels: int) -> int:
    """Return 1, or about the number of scans that decoding goes through. Raises ImageError if they are too many."""
    scans, at, progressive = 0, 2, False
    while (marker := _JPEG_MARKER.search(jpeg, at)) is not None and marker[1] != _END_OF_JPEG:
        at = marker.end() + int.from_bytes(jpeg[marker.end() : marker.end() + 2])
        progressive = progressive or marker[1] in _PROGRESSIVE
        if marker[1] == _START_OF_SCAN:
            scans += 1
            if not progressive and jpeg[marker.end() + 2 : marker.end() + 3] >= bytes([channels]):
                break  # all channels are in this scan
            if scans == 1 and (at_most := jpeg.count(b"\xff\xda", marker.start())) <= _MAX_SCANS:
                return max(2, at_most)  # ten times as fast as to pass over the data from marker to marker
        if scans > _MAX_SCANS:
            raise ImageError(f"a JPEG of over {_MAX_SCANS} scans")
    return scans


def _read(file: Path | BytesIO, size: int | None = None) -> bytes:
    with file.open("rb") if isinstance(file, Path) else BytesIO(file.getvalue()) as stream:
        return stream.read(size)


def count_pages(image: Image.Image) -> int:
    """Return the number of pages or frames in the file of an open image that is not loaded, at most 10,000."""
    # A phone's JPEG with a second, smaller image in it (MPO) has one page.
    if image.format == "MPO":
        return 1
    if image.format == "TIFF":
        # ImageJ may write one header, and the pixels of all images behind it.
        stack = _STACK.search(str(image.tag_v2.get(_DESCRIPTION, "")))  # type: ignore[attr-defined]
        return max(_count(image, _tiff_pages), min(int(stack[1]), _MOST_PAGES) if stack else 1)
    if not getattr(image, "is_animated", False):
        return 1
    if image.format == "GIF":
        return _count(image, _gif_frames)
    return min(int(getattr(image, "n_frames", 1)), _MOST_PAGES)  # other formats state it in their header


def _count(image: Image.Image, walk: Callable[[IO[bytes]], Iterator[None]]) -> int:
    # Not by Pillow, which takes the square of their number for a TIFF, and sets each frame of a GIF up.
    file: IO[bytes] | None = getattr(image, "fp", None)
    if file is None:
        return 1
    position = file.tell()
    try:
        return max(1, sum(1 for _ in islice(walk(file), _MOST_PAGES)))
    except (OSError, struct.error, ValueError, OverflowError, IndexError):
        return 1  # damaged further on; decoding shows whether the first page is
    finally:
        file.seek(position)


def _tiff_pages(file: IO[bytes]) -> Iterator[None]:
    """Yield once for each directory of a TIFF."""
    file.seek(0)
    head = file.read(16)
    order = "<" if head[:2] == b"II" else ">"
    big = struct.unpack_from(f"{order}H", head, 2)[0] == 43
    count_size, entry_size, link = (8, 20, f"{order}Q") if big else (2, 12, f"{order}I")
    (at,) = struct.unpack_from(link, head, 8 if big else 4)
    seen = set[int]()
    while at and at not in seen:
        seen.add(at)
        yield
        file.seek(at)
        entries = int.from_bytes(file.read(count_size), "little" if order == "<" else "big")
        file.seek(at + count_size + entries * entry_size)
        (at,) = struct.unpack(link, file.read(struct.calcsize(link)))


def _gif_frames(file: IO[bytes]) -> Iterator[None]:
    """Yield once for each frame of a GIF."""
    file.seek(0)
    flags = file.read(13)[10]
    file.seek(13 + _table_size(flags))
    while (kind := file.read(1)) in (b"!", b","):
        if kind == b"!":
            file.read(1)
        else:
            yield
            file.seek(_table_size(file.read(9)[8]) + 1, 1)
        while length := file.read(1)[0]:
            file.seek(length, 1)


def _table_size(flags: int) -> int:
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0


def has_image_signature(start: bytes) -> bool:
    """Return True if a file that begins so may be an image."""
    readers = [Image.OPEN[name][1] for name in _readable_formats()]
    # TGA has no signature; its third byte is the kind of pixels, of which there are six.
    targa = start[2:3] in (b"\1", b"\2", b"\3", b"\x09", b"\x0a", b"\x0b")
    return targa or any(accepts is not None and accepts(start[:16]) for accepts in readers)


def _unidentified(start: bytes, name: str) -> ImageError:
    if name.lower().endswith((".heic", ".heif")):
        return ImageError("HEIC, to be converted to JPEG or PNG first")
    if start == b"version ":
        return ImageError("a pointer of Git LFS, whose file is not downloaded")
    return ImageError("damaged at its beginning" if start.startswith(_SIGNATURES) else "not an image")


@cache
def _readable_formats() -> tuple[str, ...]:
    Image.init()
    _silence_decoders()
    return tuple(name for name in _FORMATS if name in Image.OPEN)


def _silence_decoders() -> None:
    # What they write to stderr of a damaged file is in the exception as well. Pillow switches only the warnings of
    # libtiff off. Where libtiff is not a library of its own (Windows), its errors stay.
    logging.getLogger("PIL").addHandler(logging.NullHandler())
    with suppress(AttributeError, OSError):
        set_handler = ctypes.CDLL(_imaging.__file__).TIFFSetErrorHandler
        set_handler.argtypes, set_handler.restype = [ctypes.c_void_p], ctypes.c_void_p
        set_handler(None)


def _open_without_texts(png: bytes) -> Image.Image:
    # Texts, or texts and the colour profile, unpack to too much; the pixels are intact.
    try:
        return Image.open(_without_chunks(png, _PNG_TEXTS), formats=["PNG"])
    except ValueError:
        image = Image.open(_without_chunks(png, _PNG_TEXTS | {b"iCCP"}), formats=["PNG"])
        image.info["icc_profile"] = None  # as Pillow marks a broken one
        return image


def _without_chunks(png: bytes, kinds: frozenset[bytes]) -> BytesIO:
    kept, start = [_PNG_SIGNATURE], len(_PNG_SIGNATURE)
    while start + 12 <= len(png):
        length, kind = struct.unpack_from(">I4s", png, start)
        end = start + 12 + length
        if kind not in kinds:
            kept.append(png[start:end])
        start = end
    return BytesIO(b"".join(kept))


def os_error_reason(error: OSError) -> str:
    """Return the reason for which a file or folder cannot be read, in a few words."""
    if isinstance(error, PermissionError):
        return "not permitted to be read"
    if isinstance(error, FileNotFoundError):
        return GONE
    if error.errno == errno.ENAMETOOLONG:
        return "whose path is too long"
    return f"that cannot be read ({error.strerror})"


def image_error(error: Exception) -> ImageError:
    """Return the ImageError for an exception that opening or decoding raised."""
    kind = TransientImageError if _is_transient(error) else MissingImageError if _is_missing(error) else ImageError
    return kind(_reason(error))


def _is_missing(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, OSError) and error.errno in _MISSING_ERRORS:
            return True
        error = error.__cause__
    return False


def _is_transient(error: BaseException | None) -> bool:
    while error is not None:
        # Pillow's errors on damaged files have no errno, except EINVAL of a seek to before the beginning.
        transient = isinstance(error, MemoryError | TimeoutError | ConnectionError | TransientImageError)
        if transient or (isinstance(error, OSError) and error.errno and error.errno not in _PERMANENT_ERRORS):
            return True
        error = error.__cause__
    return False


def _reason(error: Exception) -> str:
    text = str(error)
    match error:
        case ImageError():
            return text
        case Image.DecompressionBombError() | Image.DecompressionBombWarning():
            return f"over {(Image.MAX_IMAGE_PIXELS or 0) / 1e6:.0f} megapixels, the most that is read: save it smaller"
        case OSError() if error.errno:
            return os_error_reason(error)
        case EOFError():
            return "truncated"
        case MemoryError():
            return "too large for the memory there is"
    if "truncated" in text.lower() or "broken" in text:
        return "truncated"
    return f"damaged ({type(error).__name__}: {text[:60]})"


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
