"""A folder of image files: which files count as images, and a digest that shows when one has changed.

Pictures that Unfog has written, and run folders, do not count.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import islice
from pathlib import Path, PurePosixPath

from PIL import Image

from unfog.data.data_report import OWN, RUN, SECOND_NAME, SkippedFile
from unfog.data.outages import FolderIdentity, KnownFolders, folder_identity
from unfog.data.sources.base import ImageError, LabelTable, OpenOptions, Source, SourceLocation
from unfog.data.sources.image_files import SUFFIXES, open_image, os_error_reason
from unfog.errors import RequestError
from unfog.files.positions import READ, pread
from unfog.text import MARK

_ICLOUD = ".icloud"  # .NAME.png.icloud stands for NAME.png, which is not on this disk
_SKIPPED_FOLDERS = frozenset(["__MACOSX", "@eaDir", "$RECYCLE.BIN"])
# Number of files of which `files_digest` reads a sample, and bytes at the beginning, middle and end of each.
_SAMPLED_FILES, _SAMPLED_BYTES = 256, 64

_HEAD_BYTES = 2048  # with the largest palette of a GIF
# "Settings" is what samples of earlier versions hold in place of the mark.
_OWN_SIGNS = (f"tEXtSoftware\0{MARK}".encode(), b"tEXtSettings\0", b"\x21\xfe\x05%b\0" % MARK.encode())
XMP = f"<{MARK}/>".encode()
"""Metadata of a WebP file that Unfog has written."""
_MAX_ANIMATION = 2**26  # bytes
# Names that Unfog gives to pictures: samples and previews by number, grids and sheets by a word.
_OWN_NAMES = re.compile(
    r"(\d{6}(-[\w-]*)?|\d{8}|grid|strip|samples|contact-sheet|drawn)(-\d+)?\.png|.*\.(gif|webp)", re.I
)
_PROBES = 16  # files of a folder that are read before all candidates are
_MAX_LOOKED_AT = 200  # entries of a folder in which images are looked for

Head = Callable[[str, int], bytes]
"""Function of (name, n) that returns the first n bytes of a file, or all of them; b"" if it cannot be read."""


class FolderSource(Source):
    """Every image below a folder, at any depth, sorted by path. Hidden files are left out, links are followed.

    Runs are left out, and pictures that Unfog has written, unless there are no others. Raises RequestError if no file
    below it has a suffix of images, or the folder cannot be read.
    """

    files_differ = True

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.resolved = str(folder.resolve())
        listing = _list_images(folder)
        self.names, self.ignored, self.unreadable = listing.names, listing.ignored, sorted(listing.unreadable)
        self.second_names = listing.second_names
        self._known = KnownFolders(str(folder), listing.identities)
        if not self.names:
            raise self._no_images_error()

    @classmethod
    def match(cls, location: SourceLocation) -> SourceLocation | None:
        return location if location.form == "folder" else None

    @classmethod
    def load(cls, location: SourceLocation, options: OpenOptions) -> FolderSource:
        return cls(Path(location.name).expanduser(), location.name)

    def open(self, i: int) -> Image.Image:
        return open_image(self.folder / self.names[i])

    def folder_problem(self, i: int) -> str:
        return self._known.problem(os.path.join(self.folder, self.names[i]))

    def stamp(self) -> tuple[str, int]:
        return files_digest(self.folder, self.names)

    def read_beside(self, i: int, suffix: str, most: int) -> bytes | None:
        path = os.path.splitext(self.folder / self.names[i])[0] + suffix
        if not os.path.lexists(path):
            return None
        if not os.path.isfile(path):
            raise ImageError("that is a folder, a broken link or a device")
        return _read_start(path, most)

    def table(self, name: str) -> LabelTable | None:
        return LabelTable.inside(self.folder, name)


def normalize_path(name: str) -> str:
    """Return a path in an archive without empty and "." parts: "./a//b.png" and "/a/b.png" are "a/b.png"."""
    return "/".join(part for part in name.split("/") if part not in ("", "."))


def ignored_kind(name: str) -> str | None:
    """Return the key of `Source.ignored` for a path in an archive, None if it is an image. As in a folder."""
    *folders, base = name.split("/")
    if base.startswith(".") or any(part.startswith(".") or part in _SKIPPED_FOLDERS for part in folders):
        return "hidden"
    suffix = os.path.splitext(base)[1].lower()
    return None if suffix in SUFFIXES else suffix or "without suffix"


def _has_suffix(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in SUFFIXES


@dataclass
class _Listing:
    """Files and folders below a folder."""

    names: list[str] = field(default_factory=list)
    """Paths of the images, sorted."""
    ignored: Counter[str] = field(default_factory=Counter)
    """Number of the other files by suffix, "hidden" or one of `data_report.LEFT_OUT`."""
    unreadable: list[SkippedFile] = field(default_factory=list)
    second_names: dict[str, str] = field(default_factory=dict)
    """Another path of a folder -> the one under which its images are listed; both end in "/"."""
    identities: dict[str, FolderIdentity] = field(default_factory=dict)
    """Of each folder that was listed, by its path."""
    is_image: Callable[[str], bool] = _has_suffix
    """Says whether a file of this name counts."""

    def add(self, below: str, entry: os.DirEntry[str]) -> None:
        """Add a file of the folder `below`."""
        suffix = os.path.splitext(entry.name)[1].lower()
        if entry.name in _SKIPPED_FOLDERS:
            self.ignored["hidden"] += 1
        elif not entry.name.startswith("."):
            if self.is_image(entry.name):
                self.names.append(below + entry.name)  # also a broken link or a pipe, which opening reports
            else:
                self.ignored[suffix or "without suffix"] += 1
        elif suffix == _ICLOUD and self.is_image(entry.name[1 : -len(_ICLOUD)]):
            self.unreadable.append(SkippedFile(below + entry.name[1 : -len(_ICLOUD)], "not downloaded from iCloud"))
        else:
            self.ignored["hidden"] += 1

    def leave_out_own(self, folder: Path) -> None:
        """Leave out the pictures that Unfog has written, unless there are no others."""
        own = own_pictures(self.names, lambda name, size: _head(folder / name, size))
        if len(own) < len(self.names):
            self.names = [name for name in self.names if name not in own]
            self.ignored += Counter({OWN: len(own)})


def _head(path: Path, size: int) -> bytes:
    with suppress(OSError):
        return _read_start(path, size)
    return b""


def _read_start(path: str | Path, size: int) -> bytes:
    """Return the first bytes of a regular file, b"" of another kind. OSError if it cannot be read."""
    descriptor = os.open(path, READ)  # a pipe would wait for its writer
    with open(descriptor, "rb") as file:
        return file.read(size) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""


def list_files(
    folder: Path, is_image: Callable[[str], bool]
) -> tuple[list[str], Counter[str], list[SkippedFile], dict[str, str]]:
    """List a folder as one of pictures is listed, for files of other names.

    Returns (paths, sorted; `Source.ignored`; `Source.unreadable`; `Source.second_names`). RequestError if the folder
    cannot be read.
    """
    found = _list_images(folder, is_image)
    return found.names, found.ignored, sorted(found.unreadable), found.second_names


def _list_images(folder: Path, is_image: Callable[[str], bool] = _has_suffix) -> _Listing:
    """List the content of a folder. Links are followed; each folder is listed once, by its own name if it has one."""
    found = _Listing(is_image=is_image)
    # Heaps, so that of several links to a folder the first by name counts, whatever order the file system lists them
    # in. Links wait until all folders are done. No recursion, as folders may be thousands deep.
    pending, links, entered = [""], list[str](), dict[FolderIdentity, str]()
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
        here = folder_identity(status)
        first = entered.setdefault(here, below) if any(here) else below  # zeros on file systems that have no inodes
        if first != below:
            if not below.startswith(first):  # a link to a folder above it is a circle, which hides nothing
                found.second_names[below] = first
            continue
        found.identities[os.path.join(folder, below.removesuffix("/"))] = here
        if below and {"config.toml", "checkpoints"} <= {entry.name for entry in entries}:
            found.ignored[RUN] += 1  # its previews are not data; a run may lie inside one's images
            continue
        for entry in entries:
            if not entry.name.startswith(".") and entry.name not in _SKIPPED_FOLDERS and _is_folder(entry):
                heappush(links if entry.is_symlink() else pending, f"{below}{entry.name}/")
            else:
                found.add(below, entry)
    found.names.sort()
    found.leave_out_own(folder)
    found.ignored += Counter({SECOND_NAME: len(found.second_names)})
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


def first_image_folder() -> str:
    """Return the name of the first folder in the current one that has images; "" without such a folder."""
    # A limit, as the current folder may be a home folder with any number of entries.
    for folder in sorted(path for path in islice(Path().iterdir(), _MAX_LOOKED_AT) if path.is_dir()):
        if not folder.name.startswith(".") and folder.name not in ("runs", "doctor"):
            files = (file for _, _, names in islice(os.walk(folder), 3) for file in islice(names, _MAX_LOOKED_AT))
            if any(Path(file).suffix.lower() in SUFFIXES for file in files):
                return folder.name
    return ""


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link in a circle, or into a folder that may not be entered
        return False


def sample_digest(path: str | os.PathLike[str], blocks: int = 64, block: int = 4096) -> bytes:
    """Return a digest of a regular file's first and last block and of `blocks` spread evenly between."""
    # Content is sampled too, as size and time of change may be the same after a change.
    digest = hashlib.sha256()
    file = os.open(path, READ)
    try:
        size = os.fstat(file).st_size
        last = max(0, size - block)
        for start in sorted({last * i // (blocks + 1) for i in range(blocks + 2)}):
            digest.update(pread(file, block, start))
    finally:
        os.close(file)
    return digest.digest()


def files_digest(folder: Path, names: Sequence[str]) -> tuple[str, int]:
    """Return (a digest of files below a folder, their bytes in all).

    The digest covers the name, size and mtime of each file, zeros for one that cannot be looked at, and a few bytes of
    at most 512 files, spread evenly, as opening each of a million would take minutes.
    """
    digest, total = hashlib.sha256(), 0
    step = max(1, len(names) // _SAMPLED_FILES)
    for i, name in enumerate(names):
        size = changed = 0
        with suppress(OSError):
            status = os.stat(folder / name)
            size, changed = status.st_size, status.st_mtime_ns
            if i % step == 0 and stat.S_ISREG(status.st_mode):  # opening a pipe would wait for its writer
                digest.update(sample_digest(folder / name, 1, _SAMPLED_BYTES))
        digest.update(f"{name}\0{size}\0{changed}\0".encode("utf-8", "surrogateescape"))
        total += size
    return digest.hexdigest(), total


def is_own(start: bytes) -> bool:
    """Return True if an image file that begins with these bytes was written by Unfog."""
    return any(sign in start[:_HEAD_BYTES] for sign in _OWN_SIGNS) or (_is_animation(start) and XMP in start)


def own_pictures(names: Iterable[str], read_head: Head) -> set[str]:
    """Return those of the names, paths with "/", that are pictures which Unfog has written.

    Only files with a name that Unfog gives are read, and of many in one folder a few first.
    """
    folders = defaultdict[str, list[str]](list)
    for name in names:
        folder, _, base = name.rpartition("/")
        if _OWN_NAMES.fullmatch(base):
            folders[folder].append(name)
    return {name for candidates in folders.values() for name in _own_of_folder(candidates, read_head)}


def _own_of_folder(names: list[str], read_head: Head) -> list[str]:
    probes = names[:: max(1, len(names) // _PROBES)]
    if len(probes) < len(names) and not any(_probe(name, read_head) for name in probes):
        return []  # an image set whose files are numbered, too
    return [name for name in names if _probe(name, read_head)]


def _probe(name: str, read_head: Head) -> bool:
    head = read_head(name, _HEAD_BYTES)
    return is_own(read_head(name, _MAX_ANIMATION) if _is_animation(head) else head)


def _is_animation(start: bytes) -> bool:
    """Return True for an animated WebP file, whose metadata stand at its end."""
    return start[:4] == b"RIFF" and start[8:16] == b"WEBPVP8X" and bool(start[20] & 2)


def run_folders(names: Iterable[str]) -> set[str]:
    """Return the folders in an archive that hold config.toml and checkpoints/. Each ends in "/" or is ""."""
    configs, checkpoints = set[str](), set[str]()
    for name in names:
        parts = PurePosixPath(name).parts
        if parts[-1:] == ("config.toml",):
            configs.add(name.removesuffix("config.toml"))
        if "checkpoints" in parts[:-1]:
            above = parts[: parts.index("checkpoints")]
            checkpoints.add("".join(f"{part}/" for part in above))
    return configs & checkpoints
