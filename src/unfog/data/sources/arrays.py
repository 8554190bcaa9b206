"""Images in an array: a .npy or .npz file, or an array or tensor in memory.

Images of 8 bits are used as they are. Deeper integers and floating point are scaled by one range for the whole set, as
those of image files are (`data.bit_depth`); of booleans, True is white.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from lzma import LZMAError
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unfog.data.cache import remove_stale_entries
from unfog.data.file_rows import FileRows, is_local, load_rows
from unfog.data.sources.base import LazyNames, OpenOptions, Source, SourceLocation
from unfog.data.sources.folder import sample_digest
from unfog.data.sources.image_objects import as_array, is_array
from unfog.errors import RequestError
from unfog.files.cache_folder import cache_folder, hold, make_room
from unfog.files.safe_files import replace_file
from unfog.text import plural, sanitize
from unfog.values.arrays.axes import USUAL, channel_axis
from unfog.values.image_format import MOST_CHANNELS

_IMAGE_KEYS, _LABEL_KEYS = ("x", "images", "arr_0"), ("y", "labels")

# What the readers of NumPy and of zip archives raise on a file that is damaged, encrypted or packed by an unknown
# method. SyntaxError and TokenError, as Python's own parser reads NumPy's headers.
DAMAGE_ERRORS = (
    *(OSError, EOFError, ValueError, TypeError, SyntaxError, MemoryError, OverflowError, LookupError),
    *(NotImplementedError, RuntimeError, struct.error, zlib.error, LZMAError, TokenError),
)
_MAX_MEMORY_SHARE = 0.5  # of the free memory, for what an .npz file unpacks to
_AXES = "axes"  # an array in an .npz file: NCHW or NHWC
_SHAPES = "[N, H, W], [N, H, W, C] or [N, C, H, W]"


class ArraySource(Source):
    """Images in a NumPy file; `store` writes one from memory.

    A .npy file is read image by image, or mapped if it is in column-major order. An .npz file has the
    images as x, images or arr_0, and may have labels as y or labels: whole numbers or texts, of which each value is a
    class. RequestError if it cannot be read or holds no images.
    """

    suffixes = (".npy", ".npz")

    def __init__(self, path: Path, name: str, axes: str = "auto", key: str = "") -> None:
        """`key` is that of another array of an .npz file, whose images are taken in place of the usual ones."""
        self._path, self.name, self.resolved = path, name, str(path.resolve())
        self._beside = dict[str, Source]()
        try:
            images, labels, others, stored_axes = _read(path, name, key)
            self._stamp = sampled_digest(path)
        except RequestError:
            raise
        except DAMAGE_ERRORS as error:
            reason = " ".join(sanitize(str(error)).split())[:160] or type(error).__name__
            raise RequestError(f"{sanitize(name)} cannot be read: {reason}; give images, {_SHAPES}") from None
        except zipfile.BadZipFile:
            raise RequestError(f"{sanitize(name)} is not an .npz file, or is damaged; write it anew") from None
        self._mapped = isinstance(images, np.memmap | FileRows)
        self.in_place = self._mapped and is_local(path)
        self._rows = images if isinstance(images, FileRows) else None
        if isinstance(images, FileRows):  # its shape decides how each image is turned
            images = np.broadcast_to(np.zeros((), images.dtype), images.shape)
        self._axes = stored_axes or axes
        self._images, reading = as_nhwc(name, images, axes=self._axes)
        self.reading_warnings = [reading] if reading else []
        self.names = LazyNames("{:08}".format, range(len(images)))
        if labels is not None:
            self.classes, self.labels = index_labels(name, labels, len(images))
            self.label_column = next(key for key in _LABEL_KEYS if key in others)
        elif others:
            unused = [sanitize(each) for each in others[:5]]
            self.label_warning = (
                f"{sanitize(name)} also holds {', '.join(unused)}, which is not used; labels are an array called "
                f"{' or '.join(_LABEL_KEYS)}, and --condition {unused[0]} makes it a condition"
            )
        self._others = others

    @classmethod
    def load(cls, location: SourceLocation, options: OpenOptions) -> ArraySource:
        return cls(Path(location.resolved), location.name, options.axes)

    @staticmethod
    def store(
        array: Any,
        labels: Any = None,
        say: Callable[[str], None] = lambda line: None,
        channels_first: bool | None = None,
        axes: str = "auto",
        conditions: Mapping[str, Any] | None = None,
    ) -> Path:
        """Write images from memory into the cache, once, as an .npz file that is a SOURCE, and return its path.

        Args:
            array: images: a NumPy array, a tensor, or what NumPy makes an array of; shapes as in a file.
            labels: a whole number or a text for each image; None without classes.
            say: called with a line on how the shape was understood, where it could be meant otherwise.
            channels_first: read the first axis of an image as its channels where the last could be, too; None for
                tensors alone.
            axes: order of the axes, NCHW or NHWC; auto = by their lengths.
            conditions: a number, text, list or vector for each image, by name.

        Raises:
            RequestError: they are not images or not as many labels, or the cache cannot be written.
        """
        first = hasattr(array, "detach") if channels_first is None else channels_first
        images, reading = as_nhwc("the array", as_array(array), first, axes)
        if reading:
            say(f"  {reading}")
        arrays, digest = _arrays_of(images, labels, conditions or {}, axes)
        path = cache_folder() / f"array-{digest[:32]}.npz"
        hold(path)
        if path.exists():
            return path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            remove_stale_entries(path.parent)
            make_room(images.nbytes)
            with replace_file(path, path.parent, shared=True) as file:
                np.savez(file, **arrays)
        except OSError as error:
            raise RequestError(
                f"{path.parent} cannot be written ({error.strerror}); set UNFOG_CACHE to another"
            ) from None
        return path

    def read(self, i: int) -> NDArray[Any]:
        if self._rows is None:
            return np.asarray(self._images[i])
        row = self._rows[i]
        return np.asarray(as_nhwc(self.name, np.broadcast_to(row, (2, *row.shape)), axes=self._axes)[0][0])

    def value_names(self) -> Sequence[str]:
        return self._others

    def values_of(self, names: Sequence[str]) -> Mapping[str, Sequence[Any]]:
        return {name: self._array(name).tolist() for name in names if name in self._others}

    def images_of(self, names: Collection[str]) -> Mapping[str, Source]:
        others = {*self._others} - {*_LABEL_KEYS} - {*self._beside}
        for name in [name for name in names if name in others and self._sides(name) > 2]:
            # Read once, as it may be asked for again.
            self._beside[name] = ArraySource(self._path, f"{self.name}:{name}", self._axes, name)
        return {name: self._beside[name] for name in names if name in self._beside}

    def _sides(self, key: str) -> int:
        """Return how many axes another array has; 0 if it cannot be read, which `values_of` says."""
        with suppress(*DAMAGE_ERRORS, zipfile.BadZipFile), zipfile.ZipFile(self._path) as archive:
            return len(_header_of(archive, _entry_of(archive, key))[0])
        return 0

    def _array(self, key: str) -> NDArray[Any]:
        """Return another array of an .npz file. RequestError if it is damaged, or is not of the images."""
        said, count = f"the array {sanitize(key)} of {sanitize(self.name)}", len(self.names)
        try:
            with zipfile.ZipFile(self._path) as archive:
                found = _read_member(archive, key, self.name)
        except (*DAMAGE_ERRORS, zipfile.BadZipFile) as error:
            raise RequestError(f"{said} cannot be read: {str(error)[:160]}; store it again") from None
        if found.shape[:1] != (count,):
            shape = "x".join(map(str, found.shape)) or "one value"
            raise RequestError(f"{said} is {shape}, and there are {count:,} images; give a value for each")
        return np.char.decode(found, "utf-8", "replace") if found.dtype.kind == "S" else found

    def stamp(self) -> tuple[str, int]:
        # An .npz file was read whole, so changes since do not matter; a mapped one shows them.
        if self._mapped:
            with suppress(OSError):
                return sampled_digest(self._path), self._images.nbytes
        return self._stamp, self._images.nbytes


def _of_images(name: str, values: Any, count: int) -> NDArray[Any]:
    """Return a condition as an array [N, …]; lists of different lengths, and texts with None, as texts of JSON."""
    if name in (*_IMAGE_KEYS, *_LABEL_KEYS, _AXES, "file"):  # which is an argument of `np.savez`
        raise RequestError(f"a condition cannot be called {name}, as the images or labels are; give another name")
    values = as_array(values) if is_array(values) else values
    rows = values.tolist() if isinstance(values, np.ndarray) and values.dtype.kind == "O" else values
    try:
        found = np.asarray(rows)
        plain = found.dtype.kind in "biufU" and not (found.dtype.kind == "U" and _mixes(rows))
    except ValueError:
        plain = False
    if not plain:
        try:
            found = np.array([_as_text(each) for each in rows])
        except (TypeError, ValueError):
            raise RequestError(
                f"the condition {name} holds other values than numbers, texts and lists of them"
            ) from None
    if found.shape[:1] != (count,):
        shape = "x".join(map(str, found.shape)) or "one value"
        raise RequestError(f"the condition {name} is {shape}, and there are {count:,} images; give a value for each")
    return found


def _mixes(rows: Any) -> bool:
    """Return True for a list with other values than texts, which NumPy would turn into texts."""
    return isinstance(rows, list | tuple) and not all(isinstance(each, str) for each in rows)


def _as_text(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    value = value.tolist() if hasattr(value, "tolist") else value
    return json.dumps(sorted(value) if isinstance(value, set | frozenset) else value)


def _content_digest(images: NDArray[Any], labels: NDArray[Any] | None, with_axes: bool) -> str:
    shape = repr(images.shape) if images.dtype == np.uint8 else repr((images.shape, images.dtype.str))
    digest = hashlib.sha256(shape.encode())
    for start in range(0, len(images), 4096):
        digest.update(np.ascontiguousarray(images[start : start + 4096]).data)
    if labels is not None:
        digest.update(repr(labels.tolist()).encode())
    digest.update(b"NHWC" * with_axes)
    return digest.hexdigest()


def sampled_digest(path: Path) -> str:
    """Return a digest of the size, the time and a sample of the bytes of a file."""
    status = path.stat()
    digest = hashlib.sha256(f"{status.st_size} {status.st_mtime_ns}".encode())
    digest.update(sample_digest(path))  # with the end of an .npz file, which has the checksums of its members
    return digest.hexdigest()


def _read(path: Path, name: str, key: str) -> tuple[NDArray[Any] | FileRows, NDArray[Any] | None, list[str], str]:
    """Return (images, labels or None, names of all arrays but the images, order of the axes or "").

    With `key`, its array is the images, and there are no labels and no others.
    """
    if path.suffix.lower() == ".npy":
        array = load_rows(path, path.parent)
        if not isinstance(array, np.ndarray | FileRows):
            raise ValueError("it is an .npz file by another name")
        return array, None, [], ""
    with zipfile.ZipFile(path) as archive:
        keys = [entry.removesuffix(".npy") for entry in archive.namelist()]
        images = next((key for key in _IMAGE_KEYS if key in keys), None)
        labels = next((key for key in _LABEL_KEYS if key in keys), None)
        if images is None:
            held = ", ".join(sanitize(key) for key in keys[:5]) or "nothing"
            raise ValueError(f"it holds {held}, and no array called {', '.join(_IMAGE_KEYS)}")
        axes = str(_read_member(archive, _AXES, name)) if _AXES in keys else ""
        if axes not in ("", "NCHW", "NHWC"):
            raise ValueError(f"{_AXES} is {sanitize(axes):.20}, and neither NCHW nor NHWC")
        if key:
            return _read_member(archive, key, name), None, [], axes
        others = [key for key in keys if key not in (images, _AXES)]
        found = None if labels is None else _read_member(archive, labels, name)
        return _read_member(archive, images, name), found, others, axes


def _read_member(archive: zipfile.ZipFile, key: str, name: str) -> NDArray[Any]:
    """Read an array of an .npz file, if its size is true and fits into memory. It is never unpickled."""
    entry = _entry_of(archive, key)
    shape, dtype = _header_of(archive, entry)
    size, free = math.prod(shape) * dtype.itemsize, free_memory()
    if dtype.hasobject:
        raise RequestError(
            f"{sanitize(name)} cannot be read: {key} holds Python objects, which are never unpickled; store numbers or "
            f"texts: np.array({key}.tolist())"
        )
    # A header may claim any size, and NumPy would make room for it before it reads.
    if size > archive.getinfo(entry).file_size:
        raise ValueError(f"{key} is cut off")
    if free is not None and size > _MAX_MEMORY_SHARE * free:
        raise RequestError(
            f"{sanitize(name)} unpacks to {size / 1e9:,.1f} GB, over half of the {free / 1e9:,.1f} GB of memory that "
            "are free; save its images as .npy with numpy.save, which is read in place"
        )
    with archive.open(entry) as file:
        return np.asarray(np.lib.format.read_array(file, allow_pickle=False))


def _entry_of(archive: zipfile.ZipFile, key: str) -> str:
    return f"{key}.npy" if f"{key}.npy" in archive.namelist() else key


def _header_of(archive: zipfile.ZipFile, entry: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return the shape and the type that an array of an .npz file claims to have."""
    with archive.open(entry) as file:
        version = np.lib.format.read_magic(file)
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = header(file)
    return shape, dtype


def free_memory() -> int | None:
    """Return the bytes of memory that can be used without swapping, None if the system has no such number."""
    with suppress(OSError, ValueError, StopIteration), open("/proc/meminfo", encoding="ascii") as lines:
        return int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024
    with suppress(AttributeError, OSError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def _arrays_of(
    images: NDArray[Any], labels: Any, conditions: Mapping[str, Any], axes: str
) -> tuple[dict[str, Any], str]:
    """Return the arrays of a stored file by name, and their digest. RequestError if they are not one an image."""
    arrays: dict[str, Any] = {"images": images}
    if labels is not None:
        arrays["labels"] = _without_objects(as_array(labels))
        index_labels("the array", arrays["labels"], len(images))  # only to refuse what are not labels
    arrays |= {name: _of_images(name, values, len(images)) for name, values in conditions.items()}
    # What the lengths of the axes leave open, a later reader would ask for.
    if axes != "auto" or images.shape[3] not in USUAL:
        arrays[_AXES] = np.array("NHWC")
    digest = _content_digest(images, arrays.get("labels"), _AXES in arrays)
    if conditions:
        told = repr((digest, [(name, arrays[name].tolist()) for name in conditions]))
        digest = hashlib.sha256(told.encode()).hexdigest()
    return arrays, digest


def as_nhwc(
    name: str, images: NDArray[Any], channels_first: bool = False, axes: str = "auto"
) -> tuple[NDArray[Any], str]:
    """Return images as [N, H, W, C], a view, and a line on how they were read if they could be meant otherwise.

    Where both sides of an image could be channels of a picture, these are the last, as NumPy and Pillow have them, or
    the first of a tensor, unless `axes` says otherwise. RequestError if they are not images, or nothing says which
    axis is that of channels.
    """
    if images.dtype.kind not in "uifb" or images.dtype.itemsize > 8:
        raise RequestError(
            f"{sanitize(name)} holds {images.dtype}, and images are integers, floating point or booleans; of complex "
            "numbers, give their magnitude: x = np.abs(x)"
        )
    shape, sides = "x".join(map(str, images.shape)), images.shape
    if images.ndim == 3 and (sides[2] in USUAL or (sides[0] in (3, 4) and sides[2] not in USUAL)):
        raise RequestError(
            f"{sanitize(name)} has the shape {shape}, which is one image or {sides[0]} grey ones; give x[None] for one "
            "image, or x[..., None] for grey ones"
        )
    reading = ""
    if images.ndim == 3:
        images = images[..., None]
    elif images.ndim == 4 and 0 not in sides:
        axis = channel_axis(sides[1:], channels_first, axes)
        if axis is None:
            raise RequestError(
                f"{sanitize(name)} has the shape {shape}, which does not show the channels of an image; say where they "
                "are: --data.axes NCHW (first) or NHWC (last)"
            )
        if axes == "auto" and sides[1] in USUAL and sides[3] in USUAL and sides[1:] != (1, 1, 1):
            order = ("[N, C, H, W], as tensors have it", "[N, H, W, C], as arrays have it")[axis == 2]
            reading = f"{sanitize(name)} has the shape {shape}, with channels first or last; it is read as {order}"
        images = images.transpose(0, 2, 3, 1) if axis == 0 else images
    if images.ndim != 4 or 0 in images.shape:
        single = "; x[None] makes one image of it" * (images.ndim == 2)
        raise RequestError(f"{sanitize(name)} has the shape {shape}; images are {_SHAPES}{single}")
    if images.shape[3] > MOST_CHANNELS:
        raise RequestError(
            f"{sanitize(name)} has the shape {shape}, and {images.shape[3]} channels; images have at most "
            f"{MOST_CHANNELS}; choose some, or give the other order: --data.axes {'NHWC' if axis == 0 else 'NCHW'}"
        )
    return images, reading


def index_labels(name: str, labels: NDArray[Any], n: int) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """Return (classes, [N] class of each image)."""
    said, shape = f"the labels of {sanitize(name)}", "x".join(map(str, labels.shape))
    remedy = f"give a whole number or a text for each of the {n:,} images"
    if labels.shape == (n, 1):
        labels = labels[:, 0]
    if labels.ndim == 2 and len(labels) == n and labels.dtype.kind in "iufb":
        one_hot = bool((labels != 0).sum(1).min() == (labels != 0).sum(1).max() == 1)
        what = "one-hot: give labels.argmax(1)" if one_hot else f"several labels an image are not supported: {remedy}"
        raise RequestError(f"{said} are {labels.shape[1]} values for each image, {what}")
    if labels.shape != (n,):
        raise RequestError(f"{said} are {labels.dtype} {shape}; {remedy}")
    if labels.dtype.kind == "f":
        labels = _whole_labels(labels, said)
    if labels.dtype.kind == "S":  # texts of C, as HDF5 files have them
        labels = np.char.decode(labels, "utf-8", "replace")
    if labels.dtype.kind not in "iuUb":
        raise RequestError(f"{said} are {labels.dtype} {shape}; {remedy}")
    if labels.dtype.kind == "U" and (empty := np.flatnonzero(np.char.strip(labels) == "")).size:
        raise RequestError(
            f"{said} are empty for {plural(empty.size)}, such as image {int(empty[0]):,}; give a label for each "
            "image, or leave those images out"
        )
    present, index = np.unique(labels, return_inverse=True)
    return tuple(str(value) for value in present.tolist()), index.astype(np.int64)


def _without_objects(labels: NDArray[Any]) -> NDArray[Any]:
    """Return labels that are Python objects, as those of a table are, as the texts or numbers that they are."""
    plain = labels.dtype.kind == "O" and all(isinstance(value, str | int | float) for value in labels.flat)
    return np.array(labels.tolist()) if plain else labels


def _whole_labels(labels: NDArray[Any], said: str) -> NDArray[np.int64]:
    """Return labels of floating point as whole numbers. RequestError if they are not whole."""
    if not np.isfinite(labels).all():
        raise RequestError(f"{said} hold NaN or infinity; give a label for each image, or leave those images out")
    if (labels != labels.round()).any() or np.abs(labels).max(initial=0) >= 2**53:
        raise RequestError(
            f"{said} are numbers with a fraction, from {labels.min():g} to {labels.max():g}, and each label is a "
            "class; make a few ranges of them, such as numpy.digitize(labels, edges), or leave the labels out"
        )
    return labels.astype(np.int64)
