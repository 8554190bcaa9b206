"""`ImageStack`, the images in one open file of a scientific format, and the checks that all formats share."""

from __future__ import annotations

import gzip
import math
import os
import zlib
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from unfog.data.sources.base import ImageError
from unfog.files.deflate import unpacks_to
from unfog.files.positions import fill
from unfog.values.image_format import MOST_CHANNELS

MOST_BYTES = 2**30
"""Of one image; a larger one is left out."""
MOST_UNPACKED = 2**29
"""Bytes of a file that is compressed as a whole, of which a few are in memory at a time."""
TOO_MUCH = f"compressed, and over {MOST_UNPACKED >> 20} MB unpacked: unpack it (gunzip)"


class ImageStack(ABC):
    """Images [H, W, C] in one open file, whose headers alone are read until `read`. Used by one thread at a time.

    Constructors raise ImageError, and what the library of the format raises, if the file has no images.
    """

    count: int = 1
    shape: tuple[int, int, int]
    """[H, W, C] of each image."""
    dtype: np.dtype[Any]
    """Type of the values of `read`."""
    closed: bool = False
    note: str = ""
    """How the file was understood, where it could be meant otherwise; the same text for files of one kind."""

    @abstractmethod
    def read(self, i: int) -> NDArray[Any]:
        """Return image i, [H, W, C]. ImageError, or what the library raises, if it is damaged."""

    def close(self) -> None:
        """Close the file. Extended by formats that keep it open."""
        self.closed = True


def check_shape(shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Raise ImageError for an array that is not an image [H, W, C], or too large to be safe."""
    if dtype.kind not in "uifb" or dtype.itemsize > 8:
        raise ImageError(f"values of the type {dtype}, and images are integers or floating point")
    if len(shape) != 3 or min(shape) < 1:
        raise ImageError(f"an array of {dtype} {list(shape)}")
    height, width, channels = shape
    if Image.MAX_IMAGE_PIXELS and height * width > Image.MAX_IMAGE_PIXELS:
        most = Image.MAX_IMAGE_PIXELS / 1e6
        raise ImageError(f"{width:,} x {height:,}, over {most:.0f} megapixels, the most that is read: save it smaller")
    if channels > MOST_CHANNELS:
        raise ImageError(f"{channels:,} channels, and images have at most {MOST_CHANNELS}")
    if math.prod(shape) * dtype.itemsize > MOST_BYTES:
        raise ImageError(f"an image of over {MOST_BYTES >> 30} GB, the most that is read")


def check_length(path: Path, needed: int) -> None:
    """Raise ImageError if a file is shorter than its header says."""
    if os.stat(path).st_size < needed:
        raise ImageError("truncated")


def unpack(path: Path) -> bytes:
    """Return the unpacked content of a file of gzip. ImageError if that is too much for the memory."""
    with gzip.open(path) as file:
        content = file.read(MOST_UNPACKED + 1)
    if len(content) > MOST_UNPACKED:
        raise ImageError(TOO_MUCH)
    return content


def check_unpacked(packed: bytes, most: int, wbits: int = zlib.MAX_WBITS) -> None:
    """Raise ImageError if a part of an image unpacks to `most` bytes or more: see `unpacks_to`."""
    if unpacks_to(packed, most, wbits):
        raise ImageError("parts that unpack to more than the image")


def read_part(path: Path, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Read an array in row-major order at an offset of a file. ImageError if the file ends before."""
    out = np.empty(shape, dtype)
    with open(path, "rb", buffering=0) as file:
        if not fill(file.fileno(), out.reshape(-1).view(np.uint8).data, offset):
            raise ImageError("truncated")
    return out


def native(values: NDArray[Any]) -> NDArray[Any]:
    """Return values in the byte order of this machine."""
    return values.astype(values.dtype.newbyteorder("="), copy=False)


def scaled(values: NDArray[Any], slope: float, intercept: float) -> NDArray[Any]:
    """Return slope * values + intercept: integers if both numbers and the values are, else float32."""
    whole = values.dtype.kind in "iu" and float(slope).is_integer() and float(intercept).is_integer()
    if (slope, intercept) == (1, 0):
        return values
    largest = abs(slope) * 2.0 ** (8 * values.dtype.itemsize) + abs(intercept)
    if whole and largest < 2.0**62:
        return values.astype(np.int32 if largest < 2.0**31 else np.int64) * int(slope) + int(intercept)
    result: NDArray[Any] = (values.astype(np.float64) * slope + intercept).astype(np.float32)
    return result


def scaled_type(dtype: np.dtype[Any], slope: float, intercept: float) -> np.dtype[Any]:
    """Return the type of the array that `scaled` makes of values of this type."""
    return scaled(np.zeros(0, dtype), slope, intercept).dtype
