"""Decode an image that keeps its values: channels, resize and crop in floating point, and a check for NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from unfog.data.sources.base import ImageError
from unfog.values.image_format import ImageFormat

# Crops and resizes one channel, an image of Pillow's mode "F", to the sides of the result.
Fit = Callable[[Image.Image], Image.Image]


def to_planes(values: NDArray[Any], format: ImageFormat, fit: Fit | None) -> NDArray[Any]:
    """Return values [H, W] or [H, W, C] as an image [C, H, W] of a format's type; `fit` is None for one of its sides.

    ImageError if they are of another number of channels, not finite, or beyond the type.
    """
    planes = values[None] if values.ndim == 2 else values.transpose(2, 0, 1)
    if len(planes) != format.channels:
        raise ImageError(f"{len(planes)} channels instead of {format.channels}")
    dtype = format.dtype
    _check_type(planes, dtype)
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            planes = planes.astype(dtype, copy=False)
        if not np.isfinite(planes).all():
            finite = np.isfinite(values).all()
            raise ImageError(f"values beyond {dtype}" if finite else "with NaN or infinity in it")
    if fit is not None:
        fitted = np.stack([np.asarray(fit(Image.fromarray(plane.astype(np.float32)))) for plane in planes])
        planes = fitted if dtype.kind == "f" else fitted.round().clip(np.iinfo(dtype).min, np.iinfo(dtype).max)
    result: NDArray[Any] = planes.astype(dtype, copy=False)
    return result


def _check_type(planes: NDArray[Any], dtype: np.dtype[Any]) -> None:
    """Raise ImageError if values are not of the kind that an integer type holds."""
    if dtype.kind == "f" or not planes.size:
        return
    ends = np.iinfo(dtype)
    if planes.dtype.kind not in "uib" or planes.min() < ends.min or planes.max() > ends.max:
        raise ImageError(f"values beside the integers from {ends.min:,} to {ends.max:,} (--data.dtype float32)")
