"""Images in an array: a .npy or .npz file, or an array or tensor in memory."""

from __future__ import annotations

import hashlib
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from lzma import LZMAError
from pathlib import Path
from tokenize import TokenError
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from unfog.data.cache import cache_folder, remove_stale_entries
from unfog.data.report import SkippedFile
from unfog.data.sources.fingerprint import sample_digest
from unfog.errors import RequestError
from unfog.text import sanitize

_IMAGES = ("x", "images", "arr_0")
_LABELS = ("y", "labels")
"""What the arrays in an .npz file may be called."""

_DAMAGED = (
    *(OSError, EOFError, ValueError, TypeError, SyntaxError, MemoryError, OverflowError, LookupError),
    *(NotImplementedError, RuntimeError, struct.error, zlib.error, LZMAError, TokenError),
)
"""What the readers of NumPy and of zip archives raise of a file that is damaged, encrypted or packed by an unknown
method; a header of NumPy's is read by Python's own parser."""

_SHARE = 0.5
"""Of the memory that is free, what an .npz file may unpack to."""

_SHAPES = "[N, H, W], [N, H, W, C] or [N, C, H, W] with C = 1, 3 or 4"


class NumberedNames(Sequence[str]):
    """ "00000000", "00000001", …, made as they are asked for; behind a prefix."""

    def __init__(self, numbers: range, prefix: str = "") -> None:
        self._numbers, self._prefix = numbers, prefix

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> NumberedNames: ...
    def __getitem__(self, index: int | slice) -> str | NumberedNames:
        if isinstance(index, slice):
            return NumberedNames(self._numbers[index], self._prefix)
        return f"{self._prefix}{self._numbers[index]:08}"


class ArraySource:
    """uint8 images in a file of NumPy's; `store` makes one of images in memory.

    A .npy file is mapped. An .npz file has the images as x, images or arr_0, and maybe their labels as y or labels.
    Labels are whole numbers or texts; each that occurs is a class.

    Raises:
        RequestError: it cannot be read, or holds no images of uint8.
    """

    remote = False
    held_out: frozenset[str] | None = None
    ignored: Mapping[str, int] = {}
    unreadable: Sequence[SkippedFile] = ()
    classes: tuple[str, ...] = ()
    labels: NDArray[np.int64] | None = None

    def __init__(self, path: Path, name: str) -> None:
        self._path, self.resolved = path, str(path.resolve())
        try:
            images, labels = _read(path, name)
            self._stamp = _state(path)
        except RequestError:
            raise
        except _DAMAGED as error:
            why = " ".join(sanitize(str(error)).split())[:160] or type(error).__name__
            raise RequestError(f"{sanitize(name)} cannot be read: {why}; give uint8 images, {_SHAPES}") from None
        except zipfile.BadZipFile:
            raise RequestError(f"{sanitize(name)} is no .npz file, or a damaged one") from None
        self._mapped = isinstance(images, np.memmap)
        self._take(name, images, labels)

    def _take(self, name: str, images: NDArray[Any], labels: NDArray[Any] | None) -> None:
        self.name, self._images = name, _images(name, images)
        self.names: Sequence[str] = NumberedNames(range(len(images)))
        if labels is not None:
            self.classes, self.labels = _classes(name, labels, len(images))

    def open(self, i: int) -> Image.Image:
        """Image i, decoded."""
        pixels = np.ascontiguousarray(self._images[i])
        return Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)

    def stamp(self) -> tuple[str, int]:
        """Digest of the file's size, time of change and a sample of its bytes; of an .npz file, as it was read."""
        if self._mapped:
            with suppress(OSError):
                return _state(self._path), self._images.nbytes
        return self._stamp, self._images.nbytes


def store_array(array: Any, labels: Any = None) -> Path:
    """Write images that are in memory into the cache, once, as a file that is a source like any other; its path.

    Args:
        array: uint8 images: a NumPy array, a tensor, or what NumPy makes an array of; shapes as in a file.
        labels: for each image a whole number or a text; None without classes.

    Raises:
        RequestError: they are no images of uint8, or not as many labels; or the cache cannot be written.
    """
    images = _images("the array", _as_array(array))
    named: dict[str, Any] = {"images": images}
    digest = hashlib.sha256(repr(images.shape).encode())
    for start in range(0, len(images), 4096):
        digest.update(np.ascontiguousarray(images[start : start + 4096]).data)
    if labels is not None:
        named["labels"] = _as_array(labels)
        _classes("the array", named["labels"], len(images))  # which refuses what are none
        digest.update(repr(named["labels"].tolist()).encode())
    path = cache_folder() / f"array-{digest.hexdigest()[:32]}.npz"
    if path.exists():
        return path
    partial = path.with_name(f"{path.stem}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_stale_entries(path.parent)
        with partial.open("wb") as file:
            np.savez(file, **named)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise RequestError(f"{path.parent} cannot be written ({error.strerror}); set UNFOG_CACHE to another") from None
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
    return path


def _as_array(values: Any) -> NDArray[Any]:
    """Without importing torch for it: a tensor knows how to become an array."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().numpy()
    return np.asarray(values)


def _state(path: Path) -> str:
    """Digest of what is told of a file without reading all of it; an .npz file's end has the checksums of its parts."""
    status = path.stat()
    digest = hashlib.sha256(f"{status.st_size} {status.st_mtime_ns}".encode())
    digest.update(sample_digest(path))
    return digest.hexdigest()


def _read(path: Path, name: str) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """(images, labels or None), whatever they are."""
    if path.suffix.lower() == ".npy":
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(array, np.ndarray):
            raise ValueError("it is an .npz file by another name")
        return array, None
    with zipfile.ZipFile(path) as archive:
        names = [entry.removesuffix(".npy") for entry in archive.namelist()]
        images = next((one for one in _IMAGES if one in names), None)
        labels = next((one for one in _LABELS if one in names), None)
        if images is None:
            held = ", ".join(sanitize(one) for one in names[:5]) or "nothing"
            raise ValueError(f"it holds {held}, and no array called {', '.join(_IMAGES)}")
        return _member(archive, images, name), None if labels is None else _member(archive, labels, name)


def _member(archive: zipfile.ZipFile, name: str, said: str) -> NDArray[Any]:
    """An array in an .npz file, after a look at whether it can be as large as it says, and whether there is room."""
    entry = f"{name}.npy" if f"{name}.npy" in archive.namelist() else name
    with archive.open(entry) as file:
        version = np.lib.format.read_magic(file)
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = header(file)
    size, free = math.prod(shape) * dtype.itemsize, _free_memory()
    if size > archive.getinfo(entry).file_size:
        raise ValueError(f"{name} is cut off")
    if free is not None and size > _SHARE * free:
        raise RequestError(
            f"{sanitize(said)} unpacks to {size / 1e9:,.1f} GB, over half of the {free / 1e9:,.1f} GB of memory that "
            "are free; save its images as .npy with numpy.save, which is read in place"
        )
    with archive.open(entry) as file:
        return np.asarray(np.lib.format.read_array(file, allow_pickle=False))


def _free_memory() -> int | None:
    """Bytes that may be used without others going to disk; None where the system does not say."""
    with suppress(OSError, ValueError, StopIteration), open("/proc/meminfo", encoding="ascii") as lines:
        return int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024
    with suppress(AttributeError, OSError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def _images(name: str, images: NDArray[Any]) -> NDArray[np.uint8]:
    """[N, H, W, C], a view."""
    said, found = sanitize(name), "x".join(map(str, images.shape))
    if images.dtype != np.uint8:
        scale = "(255 * x).round().clip(0, 255)" if images.dtype.kind == "f" else "x.clip(0, 255)"
        raise RequestError(
            f"{said} holds {images.dtype}, and images are uint8, 0 to 255; convert them: {scale}.astype('uint8')"
            + (", if they are from 0 to 1" if images.dtype.kind == "f" else "")
        )
    if images.ndim == 3:
        images = images[..., None]
    elif images.ndim == 4 and images.shape[3] not in (1, 3, 4) and images.shape[1] in (1, 3, 4):
        images = images.transpose(0, 2, 3, 1)
    if images.ndim != 4 or images.shape[3] not in (1, 3, 4) or 0 in images.shape:
        raise RequestError(f"{said} has the shape {found}; images are {_SHAPES}")
    return images


def _classes(name: str, labels: NDArray[Any], n: int) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """(classes, label of each image)."""
    if labels.shape != (n,) or labels.dtype.kind not in "iuUb":
        found = f"{labels.dtype} {'x'.join(map(str, labels.shape))}"
        raise RequestError(
            f"the labels of {sanitize(name)} are {found}; give a whole number or a text for each of the {n:,} images"
        )
    present, index = np.unique(labels, return_inverse=True)
    return tuple(str(value) for value in present.tolist()), index.astype(np.int64)
