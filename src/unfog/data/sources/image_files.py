"""Image files: list those below a folder, and open one by its content."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import stat
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from heapq import heappop, heappush
from io import BytesIO
from pathlib import Path

from PIL import Image, UnidentifiedImageError, _imaging

from unfog.data.report import SkippedFile
from unfog.data.sources.base import ImageError
from unfog.errors import RequestError
from unfog.text import sanitize

SUFFIXES = frozenset(
    f".{kind}"
    for kind in (
        *("png", "apng", "jpg", "jpeg", "jpe", "jfif", "webp", "bmp", "dib", "gif", "tif", "tiff", "avif"),
        *("heic", "heif", "jp2", "j2k", "ppm", "pgm", "pbm", "pnm", "tga", "ico"),
    )
)
"""Suffixes of the files that a folder is searched for. The content decides how a file is read, so a misnamed one works.
HEIC needs a plugin of the user's; it is listed so that it is reported as skipped rather than ignored."""

MAX_FILE_BYTES = 512 * 2**20
"""Largest image file in an archive that is read."""

# Pillow's names for those, the commonest first. It would open others, too, whatever their suffix: PostScript by
# running Ghostscript on it. TGA comes last, as it has no signature and fits much that is damaged.
_FORMATS = (
    *("JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP", "DIB", "AVIF", "HEIF", "JPEG2000", "MPO", "PPM", "ICO", "TGA"),
)
_SKIPPED_FOLDERS = frozenset(["__MACOSX", "@eaDir", "$RECYCLE.BIN"])
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_SIGNATURES = (_PNG_SIGNATURE, b"\xff\xd8\xff", b"GIF8", b"RIFF", b"II*\0", b"MM\0*")
_PNG_TEXTS = frozenset([b"tEXt", b"zTXt", b"iTXt"])
TEXT_TOO_LARGE = "MAX_TEXT_"
"""Part of Pillow's message for a PNG with a text over a megabyte unpacked, or texts over 64 in all."""

GONE = "no longer there"
CHANGED = "in an archive that was changed meanwhile"
ARCHIVE_GONE = f"in an archive {GONE}"
"""Reasons for an image whose file or archive has changed since the source was opened."""


@dataclass
class _FolderListing:
    names: list[str] = field(default_factory=list)
    """Image files, as paths below the folder with "/" between folders; in no order."""

    ignored: Counter[str] = field(default_factory=Counter)
    """Number of other files by suffix; those that are hidden, or in a hidden folder, are "hidden"."""

    unreadable: list[SkippedFile] = field(default_factory=list)
    """Folders that could not be listed."""


def normalize_path(name: str) -> str:
    """Return a path in an archive without empty and "." parts: "./a//b.png" and "/a/b.png" are "a/b.png"."""
    return "/".join(part for part in name.split("/") if part not in ("", "."))


def ignored_kind(name: str) -> str | None:
    """Return how `_FolderListing.ignored` counts a member of an archive, None if it is an image to use.

    `name` is its path in the archive, "/" between folders. The rules are those of a folder.
    """
    *folders, base = name.split("/")
    if base.startswith(".") or any(part.startswith(".") or part in _SKIPPED_FOLDERS for part in folders):
        return "hidden"
    suffix = os.path.splitext(base)[1].lower()
    return None if suffix in SUFFIXES else suffix or "without suffix"


def no_images_error(name: str, ignored: Mapping[str, int], unreadable: Sequence[SkippedFile]) -> RequestError:
    """Return the error for a source called `name` without images, which names what else it holds."""
    others = sum(ignored.values())
    listed = ", ".join(f"{count:,} {sanitize(kind)}" for kind, count in Counter(ignored).most_common(3))
    closed = "".join(f"; {reason}: {sanitize(below)}" for below, reason in unreadable[:3])
    return RequestError(
        f"found 0 images; looked for .png .jpg .jpeg .webp .gif .tif .bmp ... in {sanitize(name)} ({others:,} other "
        f"file{'s' * (others != 1)}{': ' * (others > 0)}{listed}{closed}); give a folder with images"
    )


def list_images(folder: Path) -> _FolderListing:
    """List the files below a folder, following links; each folder once, by its own name rather than a link's.

    Raises:
        RequestError: the folder itself cannot be read.
    """
    found = _FolderListing()
    # Heaps, so that of several links to a folder the first by name counts, whatever order the file system lists them
    # in. Links wait until all folders are done. No recursion, as folders may be thousands deep.
    pending, links, entered = [""], list[str](), set[tuple[int, int]]()
    while pending or links:
        below = heappop(pending or links)
        try:
            status = os.stat(folder / below)
            entries = list(os.scandir(folder / below))
        except OSError as error:
            if not below:
                raise RequestError(f"{folder} cannot be read: {error.strerror}; check its permissions") from error
            found.unreadable.append(SkippedFile(below, f"a folder {os_error_reason(error)}"))
            continue
        here = (status.st_dev, status.st_ino)
        if here in entered and status.st_ino:  # 0 on file systems that have no inodes
            continue
        entered.add(here)
        if below and {"config.toml", "checkpoints"} <= {entry.name for entry in entries}:
            found.ignored["a run's folder"] += 1  # its previews are no data; a run may lie inside one's images
            continue
        for entry in entries:
            if entry.name.startswith(".") or entry.name in _SKIPPED_FOLDERS:
                found.ignored["hidden"] += 1
            elif _is_folder(entry):
                heappush(links if entry.is_symlink() else pending, f"{below}{entry.name}/")
            elif (suffix := os.path.splitext(entry.name)[1].lower()) in SUFFIXES:
                found.names.append(below + entry.name)  # also a broken link or a pipe, which opening reports
            else:
                found.ignored[suffix or "without suffix"] += 1
    return found


def list_only(folder: str, suffix: str) -> list[str]:
    """Return the sorted names of the files of a suffix in a folder without sub-folders and images, else []."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            ending = os.path.splitext(entry.name)[1].lower()
            if ending in SUFFIXES or entry.is_dir():
                return []  # at the first one, as an ordinary folder may hold millions
            if ending == suffix:
                found.append(entry.name)
    return sorted(found)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link in a circle, or into a folder that may not be entered
        return False


def open_image(path: Path) -> Image.Image:
    """Open an image file and read its header; pixels are read on use.

    Raises:
        ImageError: it is no regular file, or no image.
        Exception: what else Pillow raises on a damaged file.
    """
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
    try:
        return Image.open(path, formats=_readable_formats())
    except UnidentifiedImageError as error:
        with path.open("rb") as file:
            raise _unidentified(file.read(8), path.name) from error
    except ValueError as error:
        if TEXT_TOO_LARGE not in str(error):
            raise
        return _open_without_texts(path.read_bytes())


def open_bytes(data: bytes, name: str) -> Image.Image:
    """Open an image from the content of a file called `name`. Raises as `open_image`."""
    if not data:
        raise ImageError("empty")
    try:
        return Image.open(BytesIO(data), formats=_readable_formats())
    except UnidentifiedImageError as error:
        raise _unidentified(data[:8], name) from error
    except ValueError as error:
        if TEXT_TOO_LARGE not in str(error):
            raise
        return _open_without_texts(data)


def has_image_signature(start: bytes) -> bool:
    """Return whether a file that begins so may be an image."""
    readers = [Image.OPEN[name][1] for name in _readable_formats()]
    # TGA has no signature; its third byte is the kind of pixels, of which there are six.
    targa = start[2:3] in (b"\1", b"\2", b"\3", b"\x09", b"\x0a", b"\x0b")
    return targa or any(accepts is not None and accepts(start[:16]) for accepts in readers)


def _unidentified(start: bytes, name: str) -> ImageError:
    if name.lower().endswith((".heic", ".heif")):
        return ImageError("HEIC, to be converted to JPEG or PNG first")
    return ImageError("damaged at its beginning" if start.startswith(_SIGNATURES) else "not an image")


@cache
def _readable_formats() -> tuple[str, ...]:
    """Return those of _FORMATS that this Pillow and its plugins can read."""
    Image.init()
    _silence_decoders()
    return tuple(name for name in _FORMATS if name in Image.OPEN)


def _silence_decoders() -> None:
    # What they write to stderr of a damaged file is in the exception as well. Pillow switches only the warnings of
    # libtiff off. Where libtiff is no library of its own (Windows), its errors stay.
    logging.getLogger("PIL").addHandler(logging.NullHandler())
    with suppress(AttributeError, OSError):
        set_handler = ctypes.CDLL(_imaging.__file__).TIFFSetErrorHandler
        set_handler.argtypes, set_handler.restype = [ctypes.c_void_p], ctypes.c_void_p
        set_handler(None)


def _open_without_texts(png: bytes) -> Image.Image:
    """Open a PNG without its texts, or without its colour profile too, which unpack to too much. Pixels are intact."""
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
    """Return in a few words why a file or folder cannot be read."""
    if isinstance(error, PermissionError):
        return "not permitted to be read"
    if isinstance(error, FileNotFoundError):
        return GONE
    if error.errno == errno.ENAMETOOLONG:
        return "whose path is too long"
    return f"that cannot be read ({error.strerror})"
