"""Choose the stored type and the channels of a source: 8 bits for pictures, and float32 for other arrays."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from unfog.data.bit_depth import DeepImage, depth_of, describe_depths, is_deep, is_grey
from unfog.data.settings import Data, KeptType
from unfog.data.sources.base import Source
from unfog.errors import RequestError
from unfog.text import sanitize
from unfog.values.arrays.axes import USUAL
from unfog.values.image_format import CHANNELS, MOST_CHANNELS, ImageFormat, colour_channels, describe_channels

_DEPTHS_LOOKED_AT = 256  # images, whose types are compared
_LOOKED_AT = 16  # first images, of which one that can be read is looked at
_Image: TypeAlias = "Image.Image | DeepImage | NDArray[Any]"


class Kept(NamedTuple):
    """The stored type and the channels of images that keep their values."""

    dtype: Literal["uint8"] | KeptType
    channels: int


def kept_line(format: ImageFormat) -> str:
    """Return a line that says which values are kept, and how to make pictures of them instead."""
    kind = f"{format.kind} {format.values.dtype}"
    if format.values.dtype == "uint16":
        kind += f", {format.values.low:,.6g} to {format.values.high:,.6g}"
    remedy = "; --data.range LOW HIGH makes pictures of 8 bits of them" if format.channels in CHANNELS else ""
    return f"values are kept as they are: {kind}{remedy}"


def choose_kept(source: Source, settings: Data, began: bool = False) -> Kept | None:
    """Return how the images of a source keep their values, by the settings and the first image; None for pictures.

    Arrays of other channels than 1, 3 or 4 keep their values. Whether other arrays do is found by their values, which
    `find_ranges` looks at later: see `keep_array`. A run that began without settings of kept values has pictures.
    RequestError if the settings do not fit the images.
    """
    asked, wanted = settings.requested_dtype, settings.channels
    if began and not settings.asks_to_keep:
        return None
    first = first_image(source)
    if first is None:
        return None
    is_array, held = isinstance(first, np.ndarray), channels_of(first)
    # The fourth channel is transparency, unless four are asked for.
    unusual = is_array and held not in (CHANNELS if wanted == held else USUAL)
    if not (settings.asks_to_keep or unusual):
        return None
    if wanted not in (0, held) and (is_array or wanted not in CHANNELS):
        raise RequestError(
            f"data.channels = {wanted}, which may come from init, and {sanitize(source.name)} has images of "
            f"{describe_channels(held)}; omit --data.channels, or --init"
        )
    if held > MOST_CHANNELS:
        raise RequestError(
            f"{sanitize(source.name)} has {held} channels, and images have at most {MOST_CHANNELS}; choose some: "
            f"x[..., :{MOST_CHANNELS}]"
        )
    eight = isinstance(first, np.ndarray) and first.dtype in (np.uint8, np.bool_)
    if unusual and settings.dtype == "uint8" and not eight:
        raise RequestError(
            f"data.dtype = uint8 makes pictures of 8 bits, and {sanitize(source.name)} has images of "
            f"{describe_channels(held)}; omit it"
        )
    if asked == "uint16" and _is_floating(first):
        raise RequestError(
            f"data.dtype = uint16 keeps integers, and {sanitize(source.name)} has floating point; give float32"
        )
    if settings.clip:
        raise RequestError("data.clip cuts values that become 8 bits, and these keep their values; omit it")
    return Kept(asked or ("uint8" if eight else "float32"), wanted or held)


def keep_array(source: Source, settings: Data) -> Kept | None:
    """Return how arrays without a usual range keep their values; None if these images are not, or must be pictures."""
    first = first_image(source)
    if not (settings.may_keep and isinstance(first, np.ndarray)):
        return None
    return Kept("float32", channels_of(first))


def mixed_depths_line(source: Source) -> str:
    """Return a line on images of other depths than most have, whose values are on another scale; "" without such.

    The first of evenly spread images are looked at, of whose files the headers alone are read.
    """
    found = dict[str, list[str]]()
    if source.files_differ:
        count = len(source.names)
        for i in range(0, count, max(1, -(-count // _DEPTHS_LOOKED_AT))):
            with suppress(Exception):  # as in `first_image`
                image = source.read(i)
                found.setdefault(_depth(image), []).append(source.names[i])
                if not isinstance(image, np.ndarray):
                    image.close()
    return describe_depths(source.name, found)


def _depth(image: _Image) -> str:
    values = image.values if isinstance(image, DeepImage) else image
    if isinstance(values, np.ndarray):
        return depth_of(values.dtype)
    if values.mode == "F":
        return "floating point"
    return "16 bits" if is_deep(values) else "8 bits"


def first_image(source: Source) -> _Image | None:
    """Return an image like most others, as the source reads it; None if the first fail too, which decoding reports.

    The file of an image is closed, so only its header is known.
    """
    for i in (source.usual_image, *range(min(_LOOKED_AT, len(source.names)))):
        with suppress(Exception):  # decoders raise almost anything on damaged files
            image = source.read(i)
            if not isinstance(image, np.ndarray):
                image.close()
            return image
    return None


def _is_floating(image: _Image) -> bool:
    values = image.values if isinstance(image, DeepImage) else image
    return values.dtype.kind == "f" if isinstance(values, np.ndarray) else values.mode == "F"


def channels_of(image: _Image) -> int:
    """Return the channels of an image; of a file those without transparency."""
    values = image.values if isinstance(image, DeepImage) else image
    if isinstance(values, np.ndarray):
        return 1 if values.ndim == 2 else int(values.shape[2])
    return colour_channels(not is_grey(values.mode))
