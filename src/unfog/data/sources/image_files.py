"""Open one image file by its content, and explain why one cannot be opened."""

from __future__ import annotations

import ctypes
import errno
import logging
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

from unfog.data.files.image_heads import CountedBytes, CountedFile, check_head, check_pixels
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
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_SIGNATURES = (_PNG_SIGNATURE, b"\xff\xd8\xff", b"GIF8", b"RIFF", b"II*\0", b"MM\0*")
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
