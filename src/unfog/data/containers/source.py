"""The images in an array of a container: FILE, or FILE:NAME for one of several arrays."""

from __future__ import annotations

import math
import os
import re
import threading
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unfog.data.containers.packing import Packing
from unfog.data.containers.stored_array import StoredArray
from unfog.data.file_rows import is_local
from unfog.data.outages import KnownFolders
from unfog.data.sources.arrays import as_nhwc, free_memory, index_labels
from unfog.data.sources.base import ImageError, LazyNames, OpenOptions, Source, SourceLocation
from unfog.errors import RequestError
from unfog.text import sanitize
from unfog.values.arrays.dimensions import Layout, layout_of

_BLOCK_BYTES = 2**26  # of the images of one chunk, which are read together up to this size
_BLOCKS = 4  # that are kept


class ContainerSource(Source):
    """Images in an array of a container, read one by one or by chunks. Subclasses open their format.

    Dimensions with known names are found by these, others by their lengths, as those of a .npy file. `data.axes` goes
    before both.

    Raises:
        RequestError: there is no such array, it does not hold images, or the container cannot be read.
    """

    marks: re.Pattern[str]
    """What a container and the name of an array look like as SOURCE: the groups are both."""

    def __init__(self, location: SourceLocation, options: OpenOptions) -> None:
        self.path, self.array_name = location.paths
        self.name = location.name
        self._array = self.open_array(self.path, self.array_name)
        self._array.check()
        self.resolved = location.resolved
        array = self._array
        layout = None if options.axes != "auto" and len(array.shape) == 4 else layout_of(array.names)
        self._layout, self._axes = layout, options.axes
        self.reading_warnings = list[str]()
        count = self._count(array, layout)
        self._packing = Packing.of(array.attributes, array.place)
        if self._packing is not None:
            self.reading_warnings.append(f"{array.place}: {self._packing.line}")
        if array.missing_line:
            self.reading_warnings.append(array.missing_line)
        self.names = LazyNames("{:08}".format, range(count))
        self._blocks = _Blocks()
        self._folder = self.path if os.path.isdir(self.path) else os.path.dirname(self.path)
        self._known_folder = KnownFolders.of(self._folder)
        # A copy in the cache reads no faster where each image is stored as it is.
        self.in_place = not array.chunk and is_local(Path(self.path))
        if array.labels is not None:
            try:
                self.classes, self.labels = index_labels(self.name, array.labels, count)
            except RequestError as error:
                self.label_warning = f"{error}; they are not used"

    @classmethod
    @abstractmethod
    def open_array(cls, path: str, name: str) -> StoredArray:
        """Open the array of that name, or the only one for "". Raises RequestError."""

    @classmethod
    def is_container(cls, path: str) -> bool:
        """Return True if the path is a container of this format, by its name."""
        return os.path.isfile(path) and path.lower().endswith(cls.suffixes)

    @classmethod
    def match(cls, location: SourceLocation) -> SourceLocation | None:
        if location.form in ("file", "folder"):
            taken = cls.is_container(location.resolved)
            return replace(location, paths=(location.resolved, "")) if taken else None
        if location.form == "files":
            return None
        # NAME may have slashes, and then FILE:NAME is not a path.
        text = location.resolved
        if (found := cls.marks.fullmatch(text)) is None or os.path.lexists(os.path.expanduser(text)):
            return None
        path = os.path.realpath(os.path.expanduser(found[1]))
        if not cls.is_container(path):
            return None
        name = found[2].strip("/")
        return SourceLocation(text, f"{path}:{name}", "file", (path, name))

    @classmethod
    def load(cls, location: SourceLocation, options: OpenOptions) -> ContainerSource:
        return cls(location, options)

    def read(self, i: int) -> NDArray[Any]:
        try:
            values = self._stored(i)
        except OSError as error:
            number = error.errno or _errno(error)
            if number:  # of the file system, after which a later read may succeed
                raise OSError(number, os.strerror(number), self.path) from error
            raise ImageError(_damage(error)) from error
        except (ValueError, RuntimeError, TypeError, KeyError, OverflowError) as error:  # of decompressors
            raise ImageError(_damage(error)) from error
        if self._packing is not None:
            values = self._packing.unpack(values)
        values = values.astype(values.dtype.newbyteorder("="), copy=False)
        if self._layout is not None:
            return self._layout.as_image(values)
        image = values[0]
        return np.asarray(as_nhwc(self.name, np.broadcast_to(image, (2, *image.shape)), axes=self._axes)[0][0])

    def folder_problem(self, i: int) -> str:
        return self._known_folder.problem(os.path.join(self._folder, "any"))

    def _count(self, array: StoredArray, layout: Layout | None) -> int:
        """Return the number of images. RequestError if the shape is not that of images."""
        name, shape = array.place, array.shape
        if layout is None:
            if array.names and self._axes == "auto" and len(shape) > 3:
                dimensions = ", ".join(f"{one or '?'} {length}" for one, length in zip(array.names, shape))
                ask = "; say what they are: --data.axes NCHW or NHWC" if len(shape) == 4 else ""
                raise RequestError(
                    f"{name} has the dimensions {sanitize(dimensions)}, of which the names do not show images, rows, "
                    f"columns and channels, such as time, y, x, channel{ask or '; give an array of fewer'}"
                )
            images, reading = as_nhwc(name, np.broadcast_to(np.zeros((), array.dtype), shape), axes=self._axes)
            self.reading_warnings = [reading] if reading else []
            count, sides = len(images), images.shape[1:]
        else:
            count = layout.count(shape)
            sides = tuple(1 if axis in layout.images else length for axis, length in enumerate(shape))
        nbytes, free = math.prod(sides) * array.dtype.itemsize, free_memory()
        if free is not None and 4 * nbytes > free:
            raise RequestError(
                f"an image of {name} has {nbytes / 1e9:,.1f} GB, over a quarter of the {free / 1e9:,.1f} GB of memory "
                "that are free; store it in parts"
            )
        return count

    def _stored(self, i: int) -> NDArray[Any]:
        """Read the stored numbers of image i, with all dimensions; those of images have a length of 1."""
        array = self._array
        axes = (0,) if self._layout is None else self._layout.images
        places = np.unravel_index(i, [array.shape[axis] for axis in axes])
        key = [slice(None)] * len(array.shape)
        for axis, place in zip(axes, places):
            key[axis] = slice(int(place), int(place) + 1)
        last, at = axes[-1], int(places[-1])
        together = min(array.chunk[last], array.shape[last]) if array.chunk else 1
        each = math.prod(length for axis, length in enumerate(array.shape) if axis not in axes) * array.dtype.itemsize
        if together == 1 or together * each > _BLOCK_BYTES:
            return array.read(tuple(key))
        first = at - at % together
        key[last] = slice(first, min(first + together, array.shape[last]))
        block = self._blocks.get(tuple((one.start, one.stop) for one in key), lambda: array.read(tuple(key)))
        return np.take(block, [at - first], axis=last)


class _Blocks:
    """The blocks of images that were read last, so that a chunk is decompressed once for all of its images."""

    def __init__(self) -> None:
        self._lock, self._kept = threading.Lock(), OrderedDict[Any, NDArray[Any]]()

    def get(self, key: Any, read: Callable[[], NDArray[Any]]) -> NDArray[Any]:
        with self._lock:  # also while it reads, or several threads would decompress the same chunk
            if key not in self._kept:
                self._kept[key] = read()
                while len(self._kept) > _BLOCKS:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(key)
            return self._kept[key]


def unreadable(path: str, error: BaseException, remedy: str) -> RequestError:
    """Return the error for a container that its library cannot read."""
    reason = " ".join(sanitize(str(error)).split())[:160] or type(error).__name__
    return RequestError(f"{sanitize(path)} cannot be read: {reason}; {remedy}")


def _errno(error: OSError) -> int:
    """Return the number of the system's error in an error of HDF5, which has it in its text alone; 0 without."""
    found = re.search(r"errno = (\d{1,4})\b", str(error))
    return int(found[1]) if found else 0


def _damage(error: BaseException) -> str:
    return f"damaged ({' '.join(sanitize(str(error)).split())[:80]})"


def file_bytes(path: str) -> int:
    """Return the size of a file, 0 if it is not there."""
    with suppress(OSError):
        return os.path.getsize(path)
    return 0
