"""A file or folder of a scientific format as a source: all files are listed, and each may hold many images."""

from __future__ import annotations

import logging
import os
import threading
import warnings
from abc import abstractmethod
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from unfog.data.bit_depth import depth_of, describe_depths
from unfog.data.data_report import SkippedFile
from unfog.data.scans.stack import ImageStack, check_shape
from unfog.data.settings import Data
from unfog.data.sources.base import ImageError, LabelTable, LazyNames, OpenOptions, Source, SourceLocation
from unfog.data.sources.folder import files_digest, list_files
from unfog.data.sources.image_files import SUFFIXES, image_error
from unfog.errors import RequestError, install_command
from unfog.files.safe_files import regular_file
from unfog.text import plural, sanitize
from unfog.values.arrays.slices import Slices

_LOOKED_AT = 1000  # entries of a folder, by which its format is known
_FOLDERS_LOOKED_AT = 100
_MOST_OPEN, _MOST_OPEN_PACKED = 8, 2  # files that are kept open; a compressed one is in memory meanwhile
_MOST_IMAGES = 10_000_000  # in one file
_PACKED = ".gz"
_TIFF = frozenset([".tif", ".tiff"])
_Header = tuple[int, tuple[int, int, int], str]  # images of a file, their shape and their type


class ScanSource(Source):
    """Images in files of one format, sorted by path. A file of several images gives NAME:0, NAME:1, ….

    A folder is listed as one of pictures is. Files that cannot be read are in `unreadable`. RequestError if all cannot
    be, or the package that reads them is missing.
    """

    prefix: ClassVar[str]
    """Names the format in a SOURCE, such as dicom:FOLDER, where the names of the files do not."""
    kind: ClassVar[str]
    mixes_scales: ClassVar[bool] = True
    """True if values of different types are on different scales; False if files have slope and intercept."""
    package: ClassVar[str]

    def __init__(self, location: SourceLocation, options: OpenOptions) -> None:
        check_installed(self.kind, self.package)
        self.name, self._axes, self._is_folder = location.name, options.axes, location.form == "folder"
        self._slices = Slices.of(options.slices)
        path = Path(location.paths[0])
        self.resolved = f"{self.prefix}:{path}"
        if self._is_folder:
            self.folder = path
            files, self.ignored, unreadable, self.second_names = list_files(path, self.has_name)
        else:
            self.folder, files, unreadable = path.parent, [path.name], []
        silence(self.package)
        self._read_headers(files, unreadable, options)
        self._lock, self._open = threading.Lock(), OrderedDict[int, tuple[ImageStack, threading.Lock]]()

    @classmethod
    def has_name(cls, name: str) -> bool:
        """Return True if a file of this name is one of the format."""
        return _suffix(name) in cls.suffixes

    @classmethod
    def match(cls, location: SourceLocation) -> SourceLocation | None:
        if location.form == "name":
            before, colon, path = location.resolved.partition(":")
            return _place(location.name, path) if colon and before == cls.prefix else None
        if location.form == "file":
            return location if cls.has_name(os.path.basename(location.resolved)) else None
        if location.form == "folder" and cls.is_folder_of(location.resolved):
            return replace(location, paths=(location.resolved,))
        return None

    @classmethod
    def is_folder_of(cls, folder: str) -> bool:
        """Return True if the first files of a folder are of this format, and none of them is a picture."""
        return any(cls.has_name(os.path.basename(path)) for path in first_files(folder))

    @classmethod
    def load(cls, location: SourceLocation, options: OpenOptions) -> ScanSource:
        return cls(location, options)

    @abstractmethod
    def open_stack(self, path: Path) -> ImageStack:
        """Open a file and read its headers. ImageError, or what the library raises, if it cannot be used."""

    def _read_headers(self, files: list[str], unreadable: list[SkippedFile], options: OpenOptions) -> None:
        """Open each file once, for the number of its images."""
        self._files, counts, done = list[str](), list[int](), 0
        self._kinds, notes, types = Counter[tuple[tuple[int, int, int], str]](), Counter[str](), set[np.dtype[Any]]()
        depths, known = dict[str, list[str]](), dict[_Header, _Header]()
        self._headers = list[_Header]()
        for name in files:
            path = self.folder / name
            try:
                done += path.stat().st_size
                stack = self._checked(path)
            except RequestError:
                raise
            except Exception as error:  # libraries raise almost anything on damaged files
                unreadable.append(SkippedFile(name, str(image_error(error))))
            else:
                self._files.append(name)
                counts.append(stack.count)
                header = _header_of(stack)
                self._headers.append(known.setdefault(header, header))  # one object for all files alike
                self._kinds[stack.shape, str(stack.dtype)] += stack.count
                notes.update([stack.note] * bool(stack.note))
                types.add(stack.dtype)
                depths.setdefault(depth_of(stack.dtype), []).append(name)
                stack.close()
            if options.progress is not None:
                options.progress(done >> 20, 0)
        self.unreadable = sorted(unreadable)
        if not self._files:
            raise self._no_images_error()
        self._number_images(counts)
        self._types, self.found = types, self._describe()
        self.reading_warnings = [f"{sanitize(self.name)}: {note}" for note, _ in notes.most_common(5)]
        if self.mixes_scales and (line := describe_depths(self.name, depths)):
            self.reading_warnings.append(line)

    def _number_images(self, counts: Sequence[int]) -> None:
        """Number the images of all files in their order; `counts` are those of each file."""
        packed = any(_suffix(name).endswith(_PACKED) for name in self._files)
        self._most_open = _MOST_OPEN_PACKED if packed else _MOST_OPEN
        self._starts = [0, *accumulate(counts)]
        self.names = LazyNames(self._image_name, range(self._starts[-1]))
        channels = Counter[int]()
        for (_, shape, _), count in zip(self._headers, counts):
            channels[shape[2]] += count
        usual = channels.most_common(1)[0][0]
        self.usual_image = next(start for (_, shape, _), start in zip(self._headers, self._starts) if shape[2] == usual)
        self.groups = self._files, np.repeat(np.arange(len(counts), dtype=np.int64), counts)

    def _no_images_error(self) -> RequestError:
        reasons = Counter(reason for _, reason in self.unreadable)
        listed = "; ".join(
            f"{count:,} {reason}: {sanitize(next(name for name, of in self.unreadable if of == reason))}"
            for reason, count in reasons.most_common(3)
        )
        remedy = "restore them, or give others" if listed else "looked for files"
        return RequestError(
            f"found no {self.kind} image in {sanitize(self.name)}{f' ({listed})' * bool(listed)}; {remedy}: "
            f"{' '.join(self.suffixes)}"
        )

    def _describe(self) -> str:
        """Return a line on the files, their images and their type."""
        files, images = len(self._files), self._starts[-1]
        (shape, dtype), _ = self._kinds.most_common(1)[0]
        height, width, channels = shape
        others = f", and {len(self._kinds) - 1:,} other shapes or types" * (len(self._kinds) > 1)
        return (
            f"{plural(files, f'{self.kind} file')}, {plural(images)}, {width}x{height}, "
            f"{channels} channel{'s'[: channels - 1]} {dtype}{others}"
        )

    def fill_settings(self, settings: Data) -> Data:
        """Keep the values of all types but those of 8 bits, unless settings say how."""
        if not settings.may_keep or settings.requested_dtype or all(t.itemsize == 1 for t in self._types):
            return settings
        whole = all(t.kind in "ub" and t.itemsize <= 2 for t in self._types)
        return replace(settings, dtype="uint16" if whole else "float32")

    def read(self, i: int) -> NDArray[Any]:
        file = bisect_right(self._starts, i) - 1
        with self._stack(file) as stack:
            values = stack.read(i - self._starts[file])
            if values.shape != stack.shape:
                raise ImageError(f"an array of {values.dtype} {list(values.shape)}")
            return values

    def table(self, name: str) -> LabelTable | None:
        return LabelTable.inside(self.folder, name) if self._is_folder else None

    def stamp(self) -> tuple[str, int]:
        return files_digest(self.folder, self._files)

    def _image_name(self, i: int) -> str:
        file = bisect_right(self._starts, i) - 1
        start, end = self._starts[file : file + 2]
        return self._files[file] if end - start == 1 else f"{self._files[file]}:{i - start}"

    def _checked(self, path: Path) -> ImageStack:
        stack = self.open_stack(regular_file(path, self.folder, follow=True))
        try:
            check_shape(stack.shape, stack.dtype)
            if not 1 <= stack.count <= _MOST_IMAGES:
                raise ImageError(f"{stack.count:,} images")
        except ImageError:
            stack.close()
            raise
        return stack

    def _opened(self, file: int) -> ImageStack:
        """Open a file again. ImageError if it has other images than when they were counted."""
        stack = self._checked(self.folder / self._files[file])
        if _header_of(stack) != self._headers[file]:
            stack.close()
            raise ImageError("changed since its images were counted")
        return stack

    @contextmanager
    def _stack(self, file: int) -> Iterator[ImageStack]:
        """Yield an open file, which one thread has at a time."""
        with self._lock:
            held = self._open.pop(file, None)
            entry = held or (self._opened(file), threading.Lock())
            self._open[file] = entry
            while len(self._open) > self._most_open:
                _, (stack, busy) = self._open.popitem(last=False)
                with busy:
                    stack.close()
        with entry[1]:
            if entry[0].closed:  # between the two locks, by a thread that opened others
                stack = self._opened(file)
                try:
                    yield stack
                finally:
                    stack.close()
            else:
                yield entry[0]


def _header_of(stack: ImageStack) -> _Header:
    return stack.count, stack.shape, str(stack.dtype)


def check_installed(kind: str, package: str) -> None:
    """Raise RequestError if the package that reads a format is missing."""
    if find_spec(package) is None:
        raise RequestError(f"{kind} files need {package}, which is not installed: {install_command('science')}")


def first_files(folder: str) -> list[str]:
    """Return the paths of the first files of a folder and its sub-folders; [] if one of them is a picture."""
    found, pending, left = list[str](), [folder], _LOOKED_AT
    for _ in range(_FOLDERS_LOOKED_AT):
        if not pending or left <= 0:
            break
        with suppress(OSError), os.scandir(pending.pop(0)) as entries:
            for entry in entries:
                left -= 1
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    pending.append(entry.path)
                elif _suffix(entry.name) in SUFFIXES - _TIFF:
                    return []
                else:
                    found.append(entry.path)
                if left <= 0:
                    break
    return found


def _suffix(name: str) -> str:
    """Return the lower-case suffix of a file name, with the one before it if the file is compressed: .nii.gz."""
    stem, suffix = os.path.splitext(name.lower())
    return os.path.splitext(stem)[1] + suffix if suffix == _PACKED else suffix


def _place(text: str, path: str) -> SourceLocation:
    """Return the place of FORMAT:PATH. RequestError if there is no such file or folder."""
    place = os.path.expanduser(path)
    if not os.path.exists(place):
        raise RequestError(f"{sanitize(text)}: {sanitize(path)} does not exist; give a file or folder")
    resolved = str(Path(place).resolve())
    return SourceLocation(text, resolved, "folder" if os.path.isdir(place) else "file", (resolved,))


def silence(package: str) -> None:
    """Keep a library's warnings on damaged files from the terminal: the report names these files."""
    import_module(package)  # first, as astropy makes its logger then
    warnings.filterwarnings("ignore", module=rf"{package}\b")  # for good, as catch_warnings is not safe in threads
    logging.getLogger(package).setLevel(logging.CRITICAL + 1)
