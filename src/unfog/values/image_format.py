"""Format of the images of a run: channels, height, width, stored values and model values, and the view of people.

Only this module knows how stored values become model values and back, and what one channel and three channels mean.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple

from unfog.errors import RequestError
from unfog.values import value_maps
from unfog.values.colour_map import COLOUR_MAPS, GREY, colour_table, with_checkers
from unfog.values.unknown import NAN, NONE, filler_of, neighbour_of
from unfog.values.value_maps import ChannelMap

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from PIL import Image
    from torch import Tensor

_GREY, _RGB = 1, 3
CHANNELS = (_GREY, _RGB)
"""Numbers of channels that a picture has: grey or colours."""
MOST_CHANNELS = 64
"""Most channels that an image of a run may have."""
_NAMES = {_GREY: ("grey",), _RGB: ("red", "green", "blue")}
_KINDS = {_GREY: "grey", _RGB: "RGB"}
_MODES = {_GREY: "L", _RGB: "RGB"}
_LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601, as Pillow's "L"

Size = int | str
"""A size as settings have it: 64 for 64x64, "96x64" for width x height, 0 if it is left open."""
LEAST, MOST = 4, 4096
_SIZE = re.compile(r"([0-9]{1,5})(?:[x×]([0-9]{1,5}))?")


def parse_size(size: object, name: str = "size") -> Size:
    """Return a size in its usual form: a number where both sides are equal, else text such as "96x64".

    RequestError if it is not a size, or out of bounds.
    """
    try:
        whole = isinstance(size, Integral) and not isinstance(size, bool)
        text = str(size) if whole or isinstance(size, str) else ""
        shown = text if whole else " ".join(repr(size).split())
    except ValueError:  # a whole number with more digits than Python prints
        text, shown = "", "a number of thousands of digits"
    match = _SIZE.fullmatch(text.strip().lower())
    if match is None:
        raise RequestError(f'{name} = {shown:.60} is not a size; give 64, or width x height as text: "96x64"')
    width, height = int(match[1]), int(match[2] or match[1])
    if not (width == height == 0 or LEAST <= min(width, height) <= max(width, height) <= MOST):
        raise RequestError(f"{name} = {size} is out of range; give {LEAST} to {MOST} pixels, or 0 to choose it")
    return width if width == height else f"{width}x{height}"


def sides_of(size: Size) -> tuple[int, int]:
    """Return (height, width) of a size. RequestError if it is not a size."""
    if isinstance(size, int):
        return size, size
    width, _, height = str(parse_size(size)).partition("x")
    return int(height or width), int(width)


def area(size: Size) -> int:
    """Return the number of pixels of a size."""
    height, width = sides_of(size)
    return height * width


def size_of(height: int, width: int) -> Size:
    """Return the size of images of these sides."""
    return width if width == height else f"{width}x{height}"


def scaled(size: Size, factor: int) -> Size:
    """Return the size with both sides multiplied."""
    height, width = sides_of(size)
    return size_of(height * factor, width * factor)


def check_sides(height: int, width: int, nearest: Callable[[int], int], rule: str, remedy: str = "") -> None:
    """Raise RequestError unless each side is the nearest one that fits; `rule` follows "must be" in the message."""
    near = nearest(height), nearest(width)
    if near != (height, width):
        both = ": both sides" * (height != width)
        size = size_of(height, width)
        raise RequestError(f"size = {size}{both} must be {rule}; try size = {size_of(*near)}{remedy}")


@dataclass(frozen=True)
class StoredValues:
    """The stored values of an image, and the map to those of the model: linear, `low` to -1 and `high` to 1."""

    dtype: str = "uint8"
    low: float = 0.0
    high: float = 255.0
    maps: tuple[ChannelMap, ...] = ()
    """Fitted map of each channel, in place of the linear one; () without any."""
    unknown: str = NONE
    """What stands for unknown values: see `values.unknown`."""

    @cached_property
    def filler(self) -> float | None:
        """NaN or the number that stands for unknown values; None if all are known."""
        return filler_of(self.unknown)

    @cached_property
    def half(self) -> float:
        """Stored units of one model unit."""
        return (self.high - self.low) / 2

    @cached_property
    def middle(self) -> float:
        """The stored value that is 0 for the model."""
        return (self.high + self.low) / 2

    @property
    def bounded(self) -> bool:
        """True if model values are within [-1, 1], so that samplers may clip to that."""
        return not self.floating and not self.maps

    @property
    def floating(self) -> bool:
        """True for types of floating point."""
        return self.dtype.startswith("float")

    @property
    def torch_type(self) -> torch.dtype:
        import torch

        kind: torch.dtype = getattr(torch, self.dtype)
        return kind

    def to_model(self, stored: Tensor) -> Tensor:
        """Convert stored values [..., C, H, W] to float32, about in [-1, 1]; unknown ones become NaN."""
        x0 = self._mapped(stored)
        if self.filler is None or self.unknown == NAN:  # NaN is NaN in every map
            return x0
        return x0.masked_fill(stored.float().eq(self.filler), math.nan)

    def _mapped(self, stored: Tensor) -> Tensor:
        if self.maps:
            return value_maps.to_model(self.maps, stored)
        if self.floating:  # the difference first, as the range may be far from 0
            return (stored.float() - self.middle).div_(self.half)
        values = stored if self.dtype == "uint8" else stored.float()  # torch has no arithmetic of uint16
        return (values / self.half).sub_(self.middle / self.half)

    def to_stored(self, x0: Tensor) -> Tensor:
        """Convert model values [..., C, H, W] to the stored type, or float32: the inverse of `to_model`."""
        if self.filler is not None and self.unknown != NAN:
            stored = replace(self, unknown=NONE).to_stored(x0.nan_to_num(0.0))
            of_unknown, of_known = (stored.new_full((), each) for each in (self.filler, neighbour_of(self.filler)))
            if not stored.dtype.is_floating_point:
                stored = stored.where(stored != of_unknown, of_known)
            return of_unknown.where(x0.isnan(), stored)
        return self.rounded(self.to_units(x0))

    def to_units(self, x0: Tensor) -> Tensor:
        """Convert model values [..., C, H, W] to stored units, without rounding; gradients pass through it."""
        if self.maps:
            return value_maps.to_stored(self.maps, x0)
        if self.floating:
            return x0 * self.half + self.middle
        return (x0 + self.middle / self.half) * self.half

    def rounded(self, values: Tensor) -> Tensor:
        """Return values in stored units, rounded and clamped as an integer type requires; else as float32.

        Samples may be beyond the largest value of float16.
        """
        import torch

        kind = self.torch_type
        if kind.is_floating_point:
            return values.float()
        ends = torch.iinfo(kind)
        low, high = (ends.min, ends.max) if self.maps else (self.low, self.high)
        return values.round().clamp(low, high).to(kind)

    def formula(self, x: str) -> str:
        """Return source code that converts a float in [-1, 1] of this name to stored values, not rounded yet."""
        return f"({x} + {self.middle / self.half:g}) * {self.half:g}"

    def to_bytes(self, stored: NDArray[Any]) -> NDArray[np.uint8]:
        """Return stored values [..., C, H, W] as 8 bits to look at: model values of -1 to 1 as 0 to 255, cut there.

        Bytes stay unchanged.
        """
        import numpy as np
        import torch

        if stored.dtype == np.uint8 and not self.maps:
            return stored
        x0 = self.to_model(torch.from_numpy(np.array(stored)))  # a copy, as mapped files are read-only
        x0 = x0 if self.filler is None else x0.nan_to_num(-1.0)  # unknown values are black
        shown: NDArray[np.uint8] = ((x0 + 1) * 127.5).round().clamp(0, 255).byte().numpy()
        return shown

    def known(self, stored: NDArray[Any]) -> NDArray[np.bool_]:
        """Return which stored values are known, that is, not NaN for the model; of the shape of `stored`."""
        import numpy as np
        import torch

        known: NDArray[np.bool_] = (~self.to_model(torch.from_numpy(np.array(stored))).isnan()).numpy()
        return known

    def levels(self) -> NDArray[np.float64]:
        """Return the model values of the 256 levels of `to_bytes`, in order."""
        import numpy as np

        values: NDArray[np.float64] = np.arange(256.0) / BYTES.half - BYTES.middle / BYTES.half
        return values


BYTES = StoredValues()
"""Values of pictures: 0 to 255, sRGB or grey."""
STORED = {
    "uint8": BYTES,
    "uint16": StoredValues("uint16", 0.0, 65535.0),
    "float32": StoredValues("float32", -1.0, 1.0),
    "float16": StoredValues("float16", -1.0, 1.0),
}
"""Types that stored values may have, with the range that a linear map has by default."""


@dataclass(frozen=True)
class ImageFormat:
    """The format of the images of a run. 0 in `channels`, `height` or `width` is not chosen yet."""

    channels: int
    height: int
    width: int
    values: StoredValues = BYTES

    @classmethod
    def of(cls, channels: int, size: Size, values: StoredValues = BYTES) -> ImageFormat:
        """Return the format of images of a size. RequestError if it is not a size."""
        return cls(channels, *sides_of(size), values)

    def __str__(self) -> str:
        """Return width x height and the kind of channels: "96x64 RGB", "96x64 4 channels float32"."""
        return f"{self.sides} {self.kind}{f' {self.values.dtype}' * (self.values.dtype != BYTES.dtype)}"

    @property
    def is_picture(self) -> bool:
        """True for grey or RGB images of 8 bits, which people, Inception and colour jitter expect."""
        return self.channels in (0, *CHANNELS) and self.values == BYTES

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of a stored image, and of what the model sees of it."""
        return self.channels, self.height, self.width

    @property
    def as_mask(self) -> ImageFormat:
        """The format of a mask of such an image: one channel."""
        return replace(self, channels=_GREY)

    @property
    def sides(self) -> str:
        """Width x height in full, also of a square: "64x64"."""
        return f"{self.width}x{self.height}"

    @property
    def size(self) -> Size:
        """The size as a setting: 64 or "96x64"."""
        return size_of(self.height, self.width)

    @property
    def kind(self) -> str:
        """Name of the channels: "grey" or "RGB"."""
        return describe_channels(self.channels)

    @property
    def pixels(self) -> int:
        return self.height * self.width

    @property
    def square_side(self) -> int:
        """Side of the square with as many pixels, rounded; defaults that depend on the number of pixels use it."""
        return round(math.sqrt(self.pixels))

    @property
    def count(self) -> int:
        """Number of values of an image."""
        return self.channels * self.pixels

    @property
    def nbytes(self) -> int:
        """Bytes of one image in stored values [C, H, W]."""
        return self.count * self.dtype.itemsize

    @property
    def dtype(self) -> np.dtype[Any]:
        """NumPy type of the stored values, such as uint8."""
        import numpy as np

        return np.dtype(self.values.dtype)

    def empty(self, n: int = 0) -> NDArray[Any]:
        """Return memory for n pictures [n, H, W, C], as `to_pictures` makes them."""
        import numpy as np

        return np.empty((n, self.height, self.width, self.channels), self.dtype)

    def empty_stored(self, n: int) -> NDArray[Any]:
        """Return memory for n stored images [n, C, H, W]."""
        import numpy as np

        return np.empty((n, *self.shape), self.dtype)

    def to_model(self, stored: Tensor) -> Tensor:
        """Convert stored values [B, C, H, W] to float32 in about [-1, 1]."""
        return self.values.to_model(stored)

    def to_stored(self, x0: Tensor) -> Tensor:
        """Convert model values [B, C, H, W] to the stored type: the inverse of `to_model`."""
        return self.values.to_stored(x0)

    def to_pictures(self, x0: Tensor) -> NDArray[Any]:
        """Convert model values [B, C, H, W] on any device to stored ones, channels last: an array [B, H, W, C]."""
        pictures: NDArray[Any] = self.to_stored(x0).permute(0, 2, 3, 1).cpu().numpy()
        return pictures

    def to_view(self, x0: Tensor, channels: Sequence[int] = ()) -> NDArray[np.uint8]:
        """Convert model values [B, C, H, W] to what people see: an array uint8 [B, H, W, 3]. Raises as `view`."""
        return self.view(self.to_pictures(x0), channels)

    def view(self, pictures: NDArray[Any], channels: Sequence[int] = (), colours: str = GREY) -> NDArray[np.uint8]:
        """Return pictures uint8 [N, H, W, 3] of stored images [N, H, W, C].

        `channels` are one channel to show in a colour map, or three to show as red, green and blue; () shows the first
        three, or the first one. Unknown values are black in grey and in red, green and blue, where one of three is
        enough, and checkered in other colour maps, whose lowest value is not black. RequestError for other channels.
        """
        if self.is_picture and not channels:
            return to_rgb(pictures)
        chosen = self.shown(channels)
        values = replace(self.values, maps=tuple(self.values.maps[i] for i in chosen)) if self.values.maps else None
        values, stored = values or self.values, pictures[..., chosen].transpose(0, 3, 1, 2)
        planes = values.to_bytes(stored)
        if colours != GREY:
            shown = colour_table(colours)[planes[:, 0]]
            return shown if values.filler is None else with_checkers(shown, values.known(stored)[:, 0])
        if values.filler is not None:  # what is unknown in one of three channels is no colour of the others
            import numpy as np

            planes = np.where(np.all(values.known(stored), 1, keepdims=True), planes, np.uint8(0))
        return to_rgb(planes.transpose(0, 2, 3, 1))

    def planes(self, pictures: NDArray[Any]) -> NDArray[np.uint8]:
        """Return channels of stored images [N, H, W, C] as 8 bits to look at, [N, C, H, W]: -1 to 1 of the model."""
        return self.values.to_bytes(pictures.transpose(0, 3, 1, 2))

    def known_planes(self, pictures: NDArray[Any]) -> NDArray[np.bool_] | None:
        """Return where channels of stored images [N, H, W, C] are known, [N, C, H, W]; None if nothing is unknown."""
        if self.values.filler is None:
            return None
        known = self.values.known(pictures.transpose(0, 3, 1, 2))
        return None if known.all() else known

    def shown(self, channels: Sequence[int] = ()) -> list[int]:
        """Return the channels that a view shows: these, or the first three, or the first. RequestError as `view`."""
        return list(check_view(channels, self.channels) or range(_RGB if self.channels >= _RGB else _GREY))

    def stored_value(self, channel: int, x0: float) -> float:
        """Return the stored value of a channel that the model sees as `x0`."""
        values = self.values
        return value_maps.invert(values.maps[channel], x0) if values.maps else x0 * values.half + values.middle


class View(NamedTuple):
    """Channels of an image that are shown, and their colour map."""

    channels: tuple[int, ...] = ()
    """One, or three for red, green and blue; () for the first three, or the first."""
    colours: str = GREY
    """Colour map of one channel."""


def parse_view(text: str) -> View:
    """Return the view of "0", "0:viridis", or "3,2,1" for red, green and blue; "" shows the first channels.

    RequestError for other texts.
    """
    before, colon, colours = text.partition(":")
    parts = [part.strip() for part in before.split(",")] if text.strip() else []
    if colon and (len(parts) != 1 or colours.strip() not in COLOUR_MAPS):
        raise RequestError(
            f"view = {text} is not one channel with a colour map; give such as 0:{COLOUR_MAPS[-1]} (colour maps: "
            f"{', '.join(COLOUR_MAPS)})"
        )
    if len(parts) not in (0, _GREY, _RGB) or not all(part.isdecimal() for part in parts):
        raise RequestError(
            f"view = {text} is not one channel, or three for red, green and blue; give such as 0, 0:viridis, or 3,2,1"
        )
    return View(tuple(map(int, parts)), colours.strip() or GREY)


def check_view(channels: Sequence[int], count: int) -> tuple[int, ...]:
    """Return the channels of a view of images with so many channels. RequestError if they do not have one of them."""
    if channels and max(channels) >= count:
        shown = ",".join(map(str, channels))
        raise RequestError(f"view = {shown}: the images have channels 0 to {count - 1}; give some of these")
    return tuple(channels)


def describe_channels(count: int) -> str:
    """Return the kind of this many channels in a word or two: "grey", "RGB", "5 channels"."""
    return _KINDS.get(count, f"{count} channels")


def channel_names(count: int) -> tuple[str, ...]:
    """Return a name for each channel: "red", "green", "blue"; "grey"; else "channel 0", …"""
    return _NAMES.get(count) or tuple(f"channel {i}" for i in range(count))


def in_colour(count: int) -> bool:
    """Return True if images with this many channels have colours."""
    return count == _RGB


def colour_channels(in_colour: bool) -> int:
    """Return the number of channels of images in colour, or of grey ones."""
    return _RGB if in_colour else _GREY


def pillow_mode(count: int) -> str:
    """Return Pillow's mode of images with this many channels: "L" or "RGB"."""
    return _MODES[count]


def luma_weights(count: int) -> tuple[float, ...]:
    """Return the share of each channel in the brightness of an image."""
    return _LUMA if in_colour(count) else (1 / count,) * count


def are_pictures(images: NDArray[Any]) -> bool:
    """Return True if these can be shown without conversion: uint8 [N, H, W, 1 or 3]."""
    return images.dtype == "uint8" and images.ndim == 4 and images.shape[3] in CHANNELS


def to_rgb(pictures: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return pictures uint8 [N, H, W, 1 or 3] as [N, H, W, 3], without a copy. ValueError for any other shape."""
    if not are_pictures(pictures):
        raise ValueError(f"expected uint8 [N, H, W, 1 or 3], got {pictures.dtype} {list(pictures.shape)}")
    import numpy as np

    return np.broadcast_to(pictures, (*pictures.shape[:3], _RGB))


def planes_to_rgb(images: Tensor) -> Tensor:
    """Return images [N, 1 or 3, H, W] as [N, 3, H, W], without a copy."""
    return images.expand(-1, _RGB, -1, -1)


def to_pillow(picture: NDArray[Any]) -> Image.Image:
    """Return a picture uint8 [H, W], [H, W, 1], [H, W, 3] or [H, W, 4] as an image of Pillow."""
    import numpy as np
    from PIL import Image

    grey = picture.ndim == 3 and picture.shape[2] == _GREY
    return Image.fromarray(np.ascontiguousarray(picture[..., 0] if grey else picture))
