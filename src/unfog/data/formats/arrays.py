"""Images in an array: a .npy or .npz file, or an array or tensor in memory."""

from __future__ import annotations

import hashlib
import math
import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from unfog.data.cache import cache_folder
from unfog.data.ledger import Quarantined, shown
from unfog.errors import RequestError

_IMAGES = ("x", "images", "arr_0")
_LABELS = ("y", "labels")
"""What the arrays in an .npz file may be called."""

_SHAPES = "[N, H, W], [N, H, W, C] or [N, C, H, W] with C = 1, 3 or 4"


class Numbered(Sequence[str]):
    """ "00000000", "00000001", …, made as they are asked for; behind a prefix."""

    def __init__(self, numbers: range, prefix: str = "") -> None:
        self._numbers, self._prefix = numbers, prefix

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Numbered: ...
    def __getitem__(self, index: int | slice) -> str | Numbered:
        if isinstance(index, slice):
            return Numbered(self._numbers[index], self._prefix)
        return f"{self._prefix}{self._numbers[index]:08}"


class ArraySource:
    """uint8 images in a file of NumPy's; `store` makes one of images in memory.

    A .npy file is mapped. An .npz file has the images as x, images or arr_0, and maybe their labels as y or labels.
    Labels are whole numbers or texts; each that occurs is a class.

    Raises:
        RequestError: it cannot be read, or holds no images of uint8.
    """

    far = False
    held_out: frozenset[str] | None = None
    ignored: Mapping[str, int] = {}
    unreadable: Sequence[Quarantined] = ()
    classes: tuple[str, ...] = ()
    labels: NDArray[np.int64] | None = None

    def __init__(self, path: Path, name: str) -> None:
        self.resolved = str(path.resolve())
        try:
            images, labels = _read(path)
            status = path.stat()
        except (OSError, EOFError, ValueError, TypeError, SyntaxError, MemoryError, OverflowError) as error:
            why = " ".join(shown(str(error)).split())[:160] or type(error).__name__
            raise RequestError(f"{shown(name)} cannot be read: {why}; give uint8 images, {_SHAPES}") from None
        except zipfile.BadZipFile:
            raise RequestError(f"{shown(name)} is no .npz file, or a damaged one") from None
        self._take(name, images, labels)
        state = f"{status.st_size} {status.st_mtime_ns} {images.shape} {images.dtype}"
        self._stamp = hashlib.sha256(state.encode()).hexdigest()

    def _take(self, name: str, images: NDArray[Any], labels: NDArray[Any] | None) -> None:
        self.name, self._images = name, _images(name, images)
        self.names: Sequence[str] = Numbered(range(len(images)))
        if labels is not None:
            self.classes, self.labels = _classes(name, labels, len(images))

    def open(self, i: int) -> Image.Image:
        """Image i, decoded."""
        pixels = np.ascontiguousarray(self._images[i])
        return Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)

    def stamp(self) -> tuple[str, int]:
        """Digest of the file's size and time of change, or of what is in memory."""
        return self._stamp, self._images.nbytes


def store(array: Any, labels: Any = None) -> Path:
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
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.stem}.{os.getpid()}.partial")
        with partial.open("wb") as file:
            np.savez(file, **named)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise RequestError(f"{path.parent} cannot be written ({error.strerror}); set UNFOG_CACHE to another") from None
    return path


def _as_array(values: Any) -> NDArray[Any]:
    """Without importing torch for it: a tensor knows how to become an array."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().numpy()
    return np.asarray(values)


def _read(path: Path) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """(images, labels or None), whatever they are."""
    if path.suffix.lower() == ".npy":
        return np.load(path, mmap_mode="r", allow_pickle=False), None
    with zipfile.ZipFile(path) as archive:
        names = [entry.removesuffix(".npy") for entry in archive.namelist()]
        images = next((name for name in _IMAGES if name in names), None)
        labels = next((name for name in _LABELS if name in names), None)
        if images is None:
            held = ", ".join(shown(name) for name in names[:5]) or "nothing"
            raise ValueError(f"it holds {held}, and no array called {', '.join(_IMAGES)}")
        return _member(archive, images), None if labels is None else _member(archive, labels)


def _member(archive: zipfile.ZipFile, name: str) -> NDArray[Any]:
    """An array in an .npz file, after a look at whether it can be as large as it says."""
    entry = f"{name}.npy" if f"{name}.npy" in archive.namelist() else name
    with archive.open(entry) as file:
        version = np.lib.format.read_magic(file)
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = header(file)
    if math.prod(shape) * dtype.itemsize > archive.getinfo(entry).file_size:
        raise ValueError(f"{name} is cut off")
    with archive.open(entry) as file:
        return np.asarray(np.lib.format.read_array(file, allow_pickle=False))


def _images(name: str, images: NDArray[Any]) -> NDArray[np.uint8]:
    """[N, H, W, C], a view."""
    said, found = shown(name), "x".join(map(str, images.shape))
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
            f"the labels of {shown(name)} are {found}; give a whole number or a text for each of the {n:,} images"
        )
    present, index = np.unique(labels, return_inverse=True)
    return tuple(str(value) for value in present.tolist()), index.astype(np.int64)
