"""Values deeper than 8 bits: the range of a whole set, found before any image is scaled, and how values become 8 bits.

Integers of 16 or 32 bits and floating point become 0 to 255 by one range for all images of a set, because a range of
each image would change the brightness of each image differently. `DeepImage` is an image of such values, as Pillow has
no mode for them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from unfog.errors import RequestError
from unfog.text import sanitize
from unfog.values.arrays.axes import USUAL
from unfog.values.image_format import to_pillow

# Least and most value of an image.
Extent = tuple[float, float]

_SIXTEEN_BITS = re.compile(r";16[BLN]")  # of each channel, in a raw mode of Pillow; "BGR;16" is a pixel of 16 bits
_TOLERANCE = 1e-3  # of a range of floating point: rounding and resizing leave values beyond it
_FLOAT_RANGES = ((0, 1), (-1, 1), (0, 255))
_OVERSHOOT = 2  # no image of 0 to 255 is known by values below
FLOAT_RANGES = "from 0 to 1, from -1 to 1, or from 0 to 255"
# Bits that sensors have. The smallest that holds all integers of a set is the range of the set.
_BITS = (8, 10, 12, 14, 16)
FULL = 2**16 - 1
_INFINITE, _UNDEFINED = "floating point with NaN or infinity in it", "floating point with NaN in it"
UNKNOWN_REMEDY = "--data.unknown nan: unknown pixels"


class OutOfRangeError(ValueError):
    """Values are outside of the range of their set. The message is a short reason, the same for the same cause."""


@dataclass(frozen=True)
class ValueRange:
    """The values that become 0 and 255."""

    low: float
    high: float

    def holds(self, extent: Extent, floating: bool = True) -> bool:
        """Return True if an image's values are inside of the range, those of floating point with a tolerance."""
        slack = _TOLERANCE * (self.high - self.low) if floating else 0
        return self.low - slack <= extent[0] and extent[1] <= self.high + slack

    def to_uint8(self, values: NDArray[Any], clip: bool = False) -> NDArray[np.uint8]:
        """Return values of this range as 0 to 255, rounded. OutOfRangeError if one is outside of it.

        `clip` cuts such values at the ends of the range instead.
        """
        if not values.size:
            return values.astype(np.uint8)
        floating = values.dtype.kind == "f"
        if floating and not np.isfinite(values).all():
            raise OutOfRangeError(_not_finite(values))
        if not clip and not self.holds((values.min(), values.max()), floating):
            raise OutOfRangeError(f"values beyond {self}, the range of the set (--data.range)")
        # float32 holds integers of 16 bits exactly, and so does float64 with integers of 32.
        kind = np.dtype(np.float64 if values.dtype.kind in "iu" and values.dtype.itemsize > 2 else np.float32)
        scaled = (values.astype(kind) - kind.type(self.low)) * kind.type(255 / (self.high - self.low))
        rounded: NDArray[np.uint8] = np.rint(scaled).clip(0, 255).astype(np.uint8)
        return rounded

    def to_uint8_with_alpha(self, values: NDArray[Any], usual: ValueRange, clip: bool) -> NDArray[np.uint8]:
        """Return `to_uint8` of an image, [H, W] or [H, W, C], whose transparency may have its `usual` range.

        Programs write full opacity as 65535, or as 1 in floating point, whatever range the colours have.
        """
        if not values.size or values.ndim != 3 or values.shape[2] not in (2, 4):
            return self.to_uint8(values, clip)
        alpha, floating = values[..., -1:], values.dtype.kind == "f"
        extent = (alpha.min(), alpha.max())
        as_colours = self.holds(extent, floating) and not (floating and extent[1] <= usual.high < self.high)
        of_alpha = self if as_colours else usual
        return np.concatenate([self.to_uint8(values[..., :-1], clip), of_alpha.to_uint8(alpha)], -1)

    def __str__(self) -> str:
        return f"{self.low:.6g} to {self.high:.6g}"

    @classmethod
    def of_floats(cls, extents: Sequence[Extent], subject: str) -> Self:
        """Return the range of images of floating point: 0 to 1, -1 to 1 or 0 to 255, whichever most images have.

        An image inside of several ranges counts for the first. RequestError if most images have another range.
        """
        ranges = [cls(*ends) for ends in _FLOAT_RANGES]
        first = [next((k for k, one in enumerate(ranges) if one.holds(extent)), None) for extent in extents]
        # Values of 0 to 1 that a sharp resize took beyond it would be black in 0 to 255.
        first = [None if k == 2 and high <= _OVERSHOOT else k for k, (_, high) in zip(first, extents)]
        counts = [first.count(k) for k in range(len(ranges))]
        if 2 * sum(counts) <= len(extents):
            raise _no_range(extents, subject, f"images are {FLOAT_RANGES}")
        return ranges[counts.index(max(counts))]

    @classmethod
    def of_integers(cls, extents: Sequence[Extent], subject: str) -> Self:
        """Return the range of images of integers deeper than 8 bits: 0 to the most that 8, 10, 12, 14 or 16 bits hold.

        RequestError if most images have negative values, or values beyond 16 bits.
        """
        inside = [high for low, high in extents if low >= 0 and high <= FULL]
        if 2 * len(inside) <= len(extents):
            raise _no_range(extents, subject, "images of integers are from 0 to 65535 at most")
        return cls(0, next(2**bits - 1 for bits in _BITS if max(inside) < 2**bits))


def _no_range(extents: Sequence[Extent], subject: str, rule: str) -> RequestError:
    least, most = min(low for low, _ in extents), max(high for _, high in extents)
    low, high = outward(least, most)
    return RequestError(
        f"{subject} has values from {least:.4g} to {most:.4g}, and {rule}; give the values of black and white: "
        f"--data.range {low:.10g} {high:.10g}, in Python data={{'range': ({low:.10g}, {high:.10g})}}"
    )


def outward(least: float, most: float) -> Extent:
    """Return a range of few digits around these values."""
    largest = max(abs(least), abs(most), 1e-30)
    step = 10.0 ** (math.floor(math.log10(largest)) - 3)
    low, high = math.floor(least / step) * step, math.ceil(most / step) * step
    return low, high if high > low else low + step


def usual_or_outward(least: float, most: float) -> Extent:
    """Return the usual range of floats that holds these values, or one of few digits around them."""
    held = (ends for ends in _FLOAT_RANGES if ValueRange(*ends).holds((least, most)))
    return next(held, outward(least, most))


FULL_RANGE = ValueRange(0, FULL)


class Ranges(NamedTuple):
    """The ranges of the deep images of a set."""

    integers: ValueRange | None = None
    """None: that of the type, 0 to 65535."""
    floats: ValueRange | None = None
    """None if the set has no images of floating point."""
    clip: bool = False
    """Values beyond a range are cut at its ends; without it, an image with such values cannot be used."""

    @classmethod
    def of_setting(cls, setting: Sequence[float], clip: bool = False) -> Self:
        """Return the ranges of `data.range`: LOW HIGH of all deep images, or of integers and then of floating point."""
        if not setting:
            return cls(clip=clip)
        return cls(ValueRange(*setting[:2]), ValueRange(*setting[-2:]), clip)

    def of(self, values: NDArray[Any]) -> ValueRange | None:
        """Return the range of an image of this type; None if it has none."""
        return self.floats if values.dtype.kind == "f" else self.integers

    @property
    def setting(self) -> tuple[float, ...]:
        """The value of `data.range` that gives these ranges; () if it is not needed."""
        given = list(dict.fromkeys(one for one in self[:2] if one is not None))  # once, if they are equal
        return tuple(float(value) for one in given for value in (one.low, one.high))

    def describe(self) -> str:
        """Describe the ranges in a few words: "16-bit values use 0 to 4095 (12 bits)"; "" for those of the type."""
        integers, floats, _ = self
        if integers is not None and integers == floats:
            return f"values of {integers} become 0 to 255"
        parts = []
        if integers is not None:
            bits = next((f" ({bits} bits)" for bits in _BITS if integers == ValueRange(0, 2**bits - 1)), "")
            parts.append(f"16-bit values use {integers}{bits}")
        return ", ".join([*parts, *[f"floating point is from {floats}"] * (floats is not None)])

    def to_uint8(self, values: NDArray[Any], full: int = FULL) -> NDArray[np.uint8]:
        """Return an image, [H, W] or [H, W, C], as 0 to 255. OutOfRangeError if values are outside of their range.

        `full` is the most that the type of its integers holds.
        """
        if values.dtype.kind == "b":
            return values.astype(np.uint8) * np.uint8(255)
        if values.dtype.kind == "f":
            if self.floats is None:
                if not np.isfinite(values).all():
                    raise OutOfRangeError(_not_finite(values))
                raise OutOfRangeError("floating point, unlike the images that the range was read from (--data.range)")
            return self.floats.to_uint8_with_alpha(values, ValueRange(0, 1), self.clip)
        if self.integers is None:
            if values.size and not (values.min() >= 0 and values.max() <= full):
                raise OutOfRangeError("integers beyond 16 bits (--data.range)")
            return ValueRange(0, full).to_uint8(values)
        return self.integers.to_uint8_with_alpha(values, ValueRange(0, full), self.clip)


def _not_finite(values: NDArray[Any]) -> str:
    """Return why floating point is refused that is not finite."""
    return f"{_UNDEFINED} ({UNKNOWN_REMEDY})" if np.isnan(values).any() else _INFINITE


def without_alpha(values: NDArray[Any]) -> NDArray[Any]:
    """Return the values of an image without its transparency, if it has one."""
    return values[..., :-1] if values.ndim == 3 and values.shape[2] in (2, 4) else values


def extent_of(values: NDArray[Any]) -> Extent | None:
    """Return the least and the most value, without transparency; None if they say nothing, as with NaN."""
    values = without_alpha(values)
    if values.dtype.kind not in "iuf" or not values.size:
        return None
    low, high = float(values.min()), float(values.max())
    return (low, high) if math.isfinite(low) and math.isfinite(high) else None


class DeepImage:
    """An image of integers or floating point that Pillow has no mode for. It is opened as Pillow's images are."""

    def __init__(self, values: NDArray[Any], info: dict[Any, Any] | None = None) -> None:
        """Take values [H, W] or [H, W, C], and the colour profile and EXIF of `Image.info`."""
        self.values = values[..., 0] if values.ndim == 3 and values.shape[2] == 1 else values
        self.size = (values.shape[1], values.shape[0])
        self.mode = str(values.dtype)
        self.info = info or {}

    @classmethod
    def from_npy(cls, data: bytes) -> Self:
        """Return the image in the content of a .npy file. ValueError for other arrays."""
        file = BytesIO(data)
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError("a .npy file of another version")
        shape, by_column, dtype = np.lib.format.read_array_header_1_0(file)
        if by_column or dtype.kind not in "iufb" or len(shape) != 3 or 0 in shape:
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
    """Return an array [H, W] or [H, W, C] as an image, True as white; an image unchanged.

    With other channels than 1, 3 or 4 it is a `DeepImage` of any type.

    ValueError if the array is not an image.
    """
    if not isinstance(picture, np.ndarray):
        return picture
    sides, channels = picture.shape[:2], picture.shape[2:]
    if len(channels) > 1 or len(sides) != 2 or 0 in picture.shape or picture.dtype.kind not in "uifb":
        raise ValueError(f"an array of {picture.dtype} {list(picture.shape)}")
    if picture.dtype == np.bool_:
        picture = picture.astype(np.uint8) * np.uint8(255)
    return to_pillow(picture) if picture.dtype == np.uint8 and has_usual_channels(picture) else DeepImage(picture)


def has_usual_channels(array: NDArray[Any]) -> bool:
    """Return True for an array [H, W] or [H, W, C] of the channels of a picture, with transparency or without."""
    return array.ndim <= 2 or (array.ndim == 3 and array.shape[2] in USUAL)


def is_deep(image: Image.Image | DeepImage) -> bool:
    """Return True if an image, which need not be loaded, has integers deeper than 8 bits, or floating point."""
    return isinstance(image, DeepImage) or image.mode[0] in "IF" or has_deep_colours(image)


def is_grey(mode: str) -> bool:
    """Return True for a mode of Pillow that has no colours, with transparency or without."""
    return mode in ("1", "L", "LA", "F") or mode.startswith("I")


def has_deep_colours(image: Image.Image | DeepImage) -> bool:
    """Return True if an image has colours or transparency of 16 bits, of which Pillow reads the upper 8."""
    deep = _SIXTEEN_BITS.search(str(getattr(image, "tile", "")))
    return isinstance(image, Image.Image) and deep is not None and image.mode[0] not in "IF"


def describe_depths(name: str, found: Mapping[str, Sequence[str]]) -> str:
    """Return a line on depth -> names of images or files, in which different depths are mixed; "" for one depth."""
    if len(found) < 2:
        return ""
    most, *others = sorted(found, key=lambda depth: -len(found[depth]))
    listed = "; ".join(f"{len(found[one]):,} of {one}, such as {sanitize(found[one][0])}" for one in others)
    return (
        f"{sanitize(name)} has {most} and, among {sum(map(len, found.values())):,} that were looked at, {listed}: "
        "values are kept as they are, each depth on its own scale; leave the others out, or store all in one type"
    )


def depth_of(dtype: np.dtype[Any]) -> str:
    """Return the depth of values as words: images of one depth have one scale."""
    if dtype.kind == "f":
        return "floating point"
    return f"{8 * dtype.itemsize} bits" if dtype.kind in "ub" else "signed integers"
