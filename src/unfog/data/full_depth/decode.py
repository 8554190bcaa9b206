"""Decode an image that keeps its values: channels, resize and crop in floating point, and a check for NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from unfog.data.bit_depth import UNKNOWN_REMEDY
from unfog.data.sources.base import ImageError
from unfog.values.image_format import ImageFormat
from unfog.values.unknown import find_unknown, neighbour_of

# Crops and resizes one channel, an image of Pillow's mode "F", to the sides of the result.
Fit = Callable[[Image.Image], Image.Image]


def to_planes(values: NDArray[Any], format: ImageFormat, fit: Fit | None) -> NDArray[Any]:
    """Return values [H, W] or [H, W, C] as an image [C, H, W] of a format's type; `fit` is None for one of its sides.

    ImageError if they are of another number of channels, not finite, or beyond the type.
    """
    planes = values[None] if values.ndim == 2 else values.transpose(2, 0, 1)
    if len(planes) != format.channels:
        raise ImageError(f"{len(planes)} channels instead of {format.channels}")
    dtype, filler = format.dtype, format.values.filler
    unknown = None if filler is None else find_unknown(planes, filler)
    if unknown is not None and unknown.all():
        raise ImageError("unknown as a whole")
    _check_type(planes, dtype)
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            planes = planes.astype(dtype, copy=False)
        if not (np.isfinite(planes) if unknown is None else np.isfinite(planes) | unknown).all():
            raise ImageError(_not_finite(values, dtype))
        # One bit pattern of NaN, so that fingerprints and packs depend on the mask alone.
        planes = planes if unknown is None or not unknown.any() else np.where(unknown, dtype.type(np.nan), planes)
    if fit is not None:
        planes = _fitted(planes, unknown, filler, dtype, fit)
        if unknown is not None and find_unknown(planes, np.nan if dtype.kind == "f" else filler or 0.0).all():
            raise ImageError("unknown as a whole once it is resized, as each pixel is computed from unknown ones")
    result: NDArray[Any] = planes.astype(dtype, copy=False)
    return result


def _not_finite(values: NDArray[Any], dtype: np.dtype[Any]) -> str:
    """Return why values cannot be kept as a floating type."""
    if np.isnan(values).any():
        return f"with NaN in it ({UNKNOWN_REMEDY})"
    remedy = " (--data.dtype float32)" if dtype.itemsize < 4 else ""
    return f"values beyond {dtype}{remedy}" if np.isfinite(values).all() else "with infinity in it"


def _fitted(
    planes: NDArray[Any], unknown: NDArray[np.bool_] | None, filler: float | None, dtype: np.dtype[Any], fit: Fit
) -> NDArray[Any]:
    """Return planes [C, H, W] cropped and resized. What is computed from an unknown value is unknown."""
    floating = planes.astype(np.float32)
    if unknown is not None:
        floating[unknown] = np.nan
    fitted = np.stack([np.asarray(fit(Image.fromarray(plane))) for plane in floating])
    if dtype.kind == "f":
        return fitted
    ends = np.iinfo(dtype)
    rounded: NDArray[Any] = fitted.round().clip(ends.min, ends.max)
    if unknown is None or filler is None:
        return rounded
    rounded[rounded == filler] = neighbour_of(filler)  # computed, and not unknown
    return np.where(np.isnan(fitted), filler, rounded)


def _check_type(planes: NDArray[Any], dtype: np.dtype[Any]) -> None:
    """Raise ImageError if values are not of the kind that an integer type holds."""
    if dtype.kind == "f" or not planes.size:
        return
    ends = np.iinfo(dtype)
    if planes.dtype.kind not in "uib" or planes.min() < ends.min or planes.max() > ends.max:
        raise ImageError(f"values beside the integers from {ends.min:,} to {ends.max:,} (--data.dtype float32)")
