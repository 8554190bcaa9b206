"""`DeepImage`: an image of values deeper than 8 bits that Pillow has no mode for; and arrays as images."""

from __future__ import annotations

import math
from io import BytesIO
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from unfog.data.values.value_range import FULL, Ranges
from unfog.values.image_format import to_pillow


class DeepImage:
    """An image of integers or floating point that Pillow has no mode for. It is opened as Pillow's images are."""

    def __init__(self, values: NDArray[Any], info: dict[Any, Any] | None = None) -> None:
        """Take values [H, W] or [H, W, C] with C from 1 to 4, and the colour profile and EXIF of `Image.info`."""
        self.values = values[..., 0] if values.ndim == 3 and values.shape[2] == 1 else values
        self.size = (values.shape[1], values.shape[0])
        self.mode = str(values.dtype)
        self.info = info or {}

    @classmethod
    def from_npy(cls, data: bytes) -> Self:
        """Return the image in the content of a .npy file. ValueError if there is none."""
        file = BytesIO(data)
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError("a .npy file of another version")
        shape, by_column, dtype = np.lib.format.read_array_header_1_0(file)
        if by_column or dtype.kind not in "iuf" or len(shape) != 3 or shape[2] not in (1, 3, 4) or 0 in shape:
            raise ValueError("no image")
        return cls(np.frombuffer(data, dtype, math.prod(shape), file.tell()).reshape(shape))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Do nothing, as there is no open file."""

    def to_pil(self, ranges: Ranges, full: int = FULL) -> Image.Image:
        """Return the image with values from 0 to 255; `full` as in `Ranges.to_uint8`, which says what it raises."""
        image = Image.fromarray(np.ascontiguousarray(ranges.to_uint8(self.values, full)))
        image.info = dict(self.info)
        return image


def as_image(picture: Image.Image | DeepImage | NDArray[Any]) -> Image.Image | DeepImage:
    """Return an array [H, W] or [H, W, C] with C = 1, 3 or 4 as an image, True as white; an image unchanged.

    ValueError if the array is not an image.
    """
    if not isinstance(picture, np.ndarray):
        return picture
    sides, channels = picture.shape[:2], picture.shape[2:]
    if channels not in ((), (1,), (3,), (4,)) or len(sides) != 2 or 0 in sides or picture.dtype.kind not in "uifb":
        raise ValueError(f"an array of {picture.dtype} {list(picture.shape)}")
    if picture.dtype == np.bool_:
        picture = picture.astype(np.uint8) * np.uint8(255)
    return to_pillow(picture) if picture.dtype == np.uint8 else DeepImage(picture)
