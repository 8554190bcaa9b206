"""Files of images: finding them below a folder, and opening one, whatever it turns out to be."""

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
from unfog.errors import RequestError
from unfog.text import sanitize

SUFFIXES = frozenset(
    f".{kind}"
    for kind in (
        *("png", "apng", "jpg", "jpeg", "jpe", "jfif", "webp", "bmp", "dib", "gif", "tif", "tiff", "avif"),
        *("heic", "heif", "jp2", "j2k", "ppm", "pgm", "pbm", "pnm", "tga", "ico"),
    )
)
"""What counts as an image in a folder. The content decides how it is read, so a misnamed one works; HEIC needs a
plugin of the user's, and is listed so that it is named as skipped rather than passed over."""

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
"""In what Pillow says of a PNG's text that unpacks to over a megabyte, or of texts that do to over 64."""


GONE = "no longer there"
CHANGED = "in an archive that was changed meanwhile"
ARCHIVE_GONE = f"in an archive {GONE}"
"""What is said of an image whose file, or archive, is not what it was when the source was opened."""


class ImageError(Exception):
    """An image that cannot be used. The message is the reason, in the same few words for the same trouble."""


class TransientImageError(ImageError):
    """An image that could not be read just now, and may be another time: the network or the disk failed."""


class ShardReadError(TransientImageError):
    """An image far away whose shard could not be read just now."""


class FailedShardError(ImageError):
    """An image in a shard that has been given up; the message says why."""


@dataclass
class FolderListing:
    """What is below a folder."""

    names: list[str] = field(default_factory=list)
    """Files with a suffix of images, by their path below the folder, "/" between folders; in no order."""

    ignored: Counter[str] = field(default_factory=Counter)
    """How many others there are of each suffix; hidden ones (a hidden folder is one) are "hidden"."""

    unreadable: list[SkippedFile] = field(default_factory=list)
    """Folders that could not be listed."""


def ignored_kind(name: str) -> str | None:
    """Why a member of an archive is no image to use, as `Found.ignored` counts it; None if it is one.

    `name` is its path in the archive, "/" between folders. The rules are those of a folder.
    """
    *folders, base = name.split("/")
    if base.startswith(".") or any(part.startswith(".") or part in _SKIPPED_FOLDERS for part in folders):
        return "hidden"
    suffix = os.path.splitext(base)[1].lower()
    return None if suffix in SUFFIXES else suffix or "without suffix"


def no_images_error(name: str, ignored: Mapping[str, int], unreadable: Sequence[SkippedFile]) -> RequestError:
    """What to say of a source called `name` that has no images, but has these."""
    others = sum(ignored.values())
    listed = ", ".join(f"{count:,} {sanitize(kind)}" for kind, count in Counter(ignored).most_common(3))
    closed = "".join(f"; {reason}: {sanitize(below)}" for below, reason in unreadable[:3])
    return RequestError(
        f"found 0 images; looked for .png .jpg .jpeg .webp .gif .tif .bmp ... in {sanitize(name)} ({others:,} other "
        f"file{'s' * (others != 1)}{': ' * (others > 0)}{listed}{closed}); give a folder with images"
    )


def list_images(folder: Path) -> FolderListing:
    """Look at everything below a folder, links followed; each folder once, and by its own name rather than a link's.

    Of several names the first in their order counts, rather than the one that the file system lists first.

    Raises:
        RequestError: the folder itself cannot be read.
    """
    found = FolderListing()
    pending, links, entered = [""], list[str](), set[tuple[int, int]]()  # no recursion: folders may be thousands deep
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
        if here in entered and status.st_ino:  # which not every file system has
            continue
        entered.add(here)
        if below and {"config.toml", "checkpoints"} <= {entry.name for entry in entries}:
            found.ignored["a run's folder"] += 1  # previews are no photographs; one may train inside one's images
            continue
        for entry in entries:
            if entry.name.startswith(".") or entry.name in _SKIPPED_FOLDERS:
                found.ignored["hidden"] += 1
            elif _is_folder(entry):
                heappush(links if entry.is_symlink() else pending, f"{below}{entry.name}/")
            elif (suffix := os.path.splitext(entry.name)[1].lower()) in SUFFIXES:
                # Also a broken link or a pipe, which will be named as skipped.
                found.names.append(below + entry.name)
            else:
                found.ignored[suffix or "without suffix"] += 1
    return found


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link in a circle, or into a folder that may not be entered
        return False


def open_image(path: Path) -> Image.Image:
    """An image with its header read; its pixels are read on use.

    Raises:
        ImageError: it is not a file, or no image.
        Exception: whatever else Pillow raises on a damaged one.
    """
    try:
        status = path.stat()
    except OSError as error:
        if path.is_symlink():
            raise ImageError("a link that leads nowhere") from error
        raise
    if not stat.S_ISREG(status.st_mode):
        raise ImageError("not a regular file")  # to open a pipe would be to wait for its writer
    if not status.st_size:
        raise ImageError("empty")
    try:
        return Image.open(path, formats=_readable())
    except UnidentifiedImageError as error:
        with path.open("rb") as file:
            raise _unidentified(file.read(8), path.name) from error
    except ValueError as error:
        if TEXT_TOO_LARGE not in str(error):
            raise
        return _open_without_texts(path.read_bytes())


def open_bytes(data: bytes, name: str) -> Image.Image:
    """As `open_image`, of a file's content; `name` is what it was called."""
    if not data:
        raise ImageError("empty")
    try:
        return Image.open(BytesIO(data), formats=_readable())
    except UnidentifiedImageError as error:
        raise _unidentified(data[:8], name) from error
    except ValueError as error:
        if TEXT_TOO_LARGE not in str(error):
            raise
        return _open_without_texts(data)


def has_image_signature(start: bytes) -> bool:
    """Whether a file that begins so may be an image, by the signatures of the formats that have one."""
    readers = [Image.OPEN[name][1] for name in _readable()]
    targa = start[2:3] in (b"\1", b"\2", b"\3", b"\x09", b"\x0a", b"\x0b")  # the kind of pixels, where it has that
    return targa or any(accepts is not None and accepts(start[:16]) for accepts in readers)


def _unidentified(start: bytes, name: str) -> ImageError:
    """What a file is that begins so and that Pillow does not know."""
    if name.lower().endswith((".heic", ".heif")):
        return ImageError("HEIC, to be converted to JPEG or PNG first")
    return ImageError("damaged at its beginning" if start.startswith(_SIGNATURES) else "not an image")


@cache
def _readable() -> tuple[str, ...]:
    """Those of _FORMATS that this Pillow and its plugins can read."""
    Image.init()
    _silence()
    return tuple(name for name in _FORMATS if name in Image.OPEN)


def _silence() -> None:
    """Keep what finds a file damaged from writing to stderr: it is in the exception as well.

    Pillow logs, and switches only the warnings of libtiff off. Where that is no library of its own (Windows), its
    errors stay.
    """
    logging.getLogger("PIL").addHandler(logging.NullHandler())
    with suppress(AttributeError, OSError):
        set_handler = ctypes.CDLL(_imaging.__file__).TIFFSetErrorHandler
        set_handler.argtypes, set_handler.restype = [ctypes.c_void_p], ctypes.c_void_p
        set_handler(None)


def _open_without_texts(png: bytes) -> Image.Image:
    """A PNG file whose texts, or whose colour profile, unpack to too much; its pixels are unharmed."""
    try:
        return Image.open(_without(png, _PNG_TEXTS), formats=["PNG"])
    except ValueError:
        image = Image.open(_without(png, _PNG_TEXTS | {b"iCCP"}), formats=["PNG"])
        image.info["icc_profile"] = None  # as Pillow says of one that is broken
        return image


def _without(png: bytes, kinds: frozenset[bytes]) -> BytesIO:
    """The file less its chunks of these kinds."""
    kept, start = [_PNG_SIGNATURE], len(_PNG_SIGNATURE)
    while start + 12 <= len(png):
        length, kind = struct.unpack_from(">I4s", png, start)
        end = start + 12 + length
        if kind not in kinds:
            kept.append(png[start:end])
        start = end
    return BytesIO(b"".join(kept))


def os_error_reason(error: OSError) -> str:
    """Why a file or folder cannot be read, in a few words."""
    if isinstance(error, PermissionError):
        return "not permitted to be read"
    if isinstance(error, FileNotFoundError):
        return GONE
    if error.errno == errno.ENAMETOOLONG:
        return "whose path is too long"
    return f"that cannot be read ({error.strerror})"
