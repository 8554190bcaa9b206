"""Maps between stored values and those of the network, one for each channel: linear, minmax, percentile, and others.

Every map is a curve (the identity, a logarithm or an inverse hyperbolic sine) followed by a shift and a scale. `fit`
finds these from training images. Each map has an exact inverse on all numbers, so nothing is clipped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from unfog.errors import RequestError

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

KINDS = ("linear", "minmax", "percentile", "standard", "log", "arcsinh")
_USUAL_PERCENTILE = 1.0
_NUMBERS = 3  # that settings hold for each channel
# Bounds of the numbers of a map: settings hold none above, and float32 loses digits below and has little above.
_LEAST_HALF, _LARGEST = 1e-37, 1e30


@dataclass(frozen=True)
class ChannelMap:
    """The map of one channel: x becomes (curve(x) - middle) / half.

    The curve of "log" is log(x) from `knee` on, and its tangent below. The curve of "arcsinh" is asinh(x / knee). All
    other kinds have the identity.
    """

    kind: str
    knee: float
    middle: float
    half: float


def parse_maps(text: str, channels: int = 0) -> tuple[tuple[str, float], ...]:
    """Return (kind, percentile) of each channel: "log", or by channel "log,standard,percentile:2".

    0 channels means that their number is not known yet. RequestError if the text is not a map, or of another number of
    channels.
    """
    maps = tuple(_parse_map(part.strip(), text) for part in text.split(","))
    if len(maps) == 1:
        return maps * max(1, channels)
    if channels and len(maps) != channels:
        raise RequestError(
            f"data.map = {text} has {len(maps)} maps, and the images have {channels} channels; give one map, or one "
            "for each channel"
        )
    return maps


def _parse_map(part: str, text: str) -> tuple[str, float]:
    kind, colon, number = part.partition(":")
    percentile = _USUAL_PERCENTILE
    if kind == "percentile" and colon:
        try:
            percentile = float(number)
        except ValueError:
            percentile = -1.0
        if not 0 <= percentile < 50:
            raise RequestError(f"data.map = {text}: {number!r} is not a percentile; give one from 0 to 50, such as 1")
    elif kind not in KINDS or colon:
        raise RequestError(
            f"data.map = {text} is not a map of values; give {', '.join(KINDS)}, or one for each channel with commas "
            "between"
        )
    return kind, percentile


def maps_of(text: str, numbers: Sequence[float]) -> tuple[ChannelMap, ...]:
    """Return the maps that `flat` stored as numbers; () if nothing was fitted yet. RequestError if they do not fit."""
    if not numbers:
        return ()
    count, rest = divmod(len(numbers), _NUMBERS)
    parts = [tuple(numbers[i : i + _NUMBERS]) for i in range(0, len(numbers), _NUMBERS)]
    if rest or not all(map(math.isfinite, numbers)) or not all(half for *_, half in parts):
        raise RequestError("data.map_values are not the numbers of a map: knee, middle and half of each channel")
    kinds = parse_maps(text, count)
    return tuple(ChannelMap(kind, *part) for (kind, _), part in zip(kinds, parts, strict=True))


def flat(maps: Sequence[ChannelMap]) -> tuple[float, ...]:
    """Return the numbers of maps for settings."""
    return tuple(number for one in maps for number in (one.knee, one.middle, one.half))


def fit(text: str, values: NDArray[Any]) -> tuple[ChannelMap, ...]:
    """Fit the maps of settings to values [N, C, H, W] that are finite, or NaN where they are not known.

    linear takes the least and the most value of all channels to -1 and 1, minmax those of each channel, percentile its
    percentiles. standard takes the mean to 0 and two standard deviations to 1. log and arcsinh take the ends of their
    curves to -1 and 1. RequestError if a channel has no known value, values that the map does not take, or values that
    are too large or too alike for float32.
    """
    import numpy as np

    kinds = parse_maps(text, values.shape[1])
    known = ~np.isnan(values)
    if not known.all():
        channels = [values[:, i][known[:, i]] for i in range(values.shape[1])]
    else:
        channels = [values[:, i] for i in range(values.shape[1])]
    if empty := [i for i, channel in enumerate(channels) if not channel.size]:
        raise RequestError(f"channel {empty[0]} is unknown in all training images; leave it out")
    whole = (float(min(channel.min() for channel in channels)), float(max(channel.max() for channel in channels)))
    if whole[0] == whole[1]:
        raise RequestError(f"all values of the training images are {whole[0]:g}, so there is nothing to learn")
    return tuple(_fit_channel(i, kind, p, channels[i], whole) for i, (kind, p) in enumerate(kinds))


def _fit_channel(
    channel: int, kind: str, percentile: float, values: NDArray[Any], whole: tuple[float, float]
) -> ChannelMap:
    import numpy as np

    low, high, knee = float(values.min()), float(values.max()), 1.0
    _check_size(channel, kind, *(whole if kind == "linear" else (low, high)))
    if low == high and kind != "linear":
        raise RequestError(
            f"channel {channel} has the value {low:g} in all training images, so no map can be fitted to it; leave it "
            "out, or give data.map = linear"
        )
    match kind:
        case "linear":
            low, high = whole
        case "percentile":
            low, high = _percentiles(values, percentile)
        case "standard":
            mean, deviation = float(values.mean(dtype=np.float64)), float(values.std(dtype=np.float64))
            low, high = mean - 2 * deviation, mean + 2 * deviation
        case "log":
            if low <= 0:
                raise RequestError(
                    f"channel {channel} has values of {low:g} and above, and a logarithm takes values above 0; give "
                    "data.map = arcsinh"
                )
            knee, low, high = low, math.log(low), math.log(high)
        case "arcsinh":
            knee = float(np.median(np.abs(values))) or max(abs(low), abs(high))
            low, high = math.asinh(low / knee), math.asinh(high / knee)
    if low == high:
        raise RequestError(
            f"data.map = {kind} finds no range in channel {channel}: all that counts is {low:g}; give data.map = "
            "minmax or standard"
        )
    fitted = ChannelMap(kind, knee, (low + high) / 2, (high - low) / 2)
    _check_numbers(channel, fitted, values)
    return fitted


def _check_size(channel: int, kind: str, low: float, high: float) -> None:
    """Raise RequestError if the values of a channel are too large for their map; a logarithm makes them small."""
    if kind != "log" and max(abs(low), abs(high)) > _LARGEST:
        raise RequestError(
            f"channel {channel} has values from {low:g} to {high:g}, and data.map = {kind} takes values up to "
            f"{_LARGEST:g}; if some stand for missing values, store NaN there and give --data.unknown nan; else "
            "divide all values by a constant"
        )


def _check_numbers(channel: int, fitted: ChannelMap, values: NDArray[Any]) -> None:
    """Raise RequestError if float32 or the settings cannot hold the numbers of a map, or a value on its curve."""
    low, high = float(values.min()), float(values.max())
    curved = max(abs(low), abs(high)) / fitted.knee if fitted.kind == "arcsinh" else 0.0
    if max(abs(fitted.middle), fitted.half, fitted.knee, curved) > _LARGEST or fitted.half < _LEAST_HALF:
        remedy = "data.map = minmax" if curved > _LARGEST else "the values in another unit, multiplied by a constant"
        raise RequestError(
            f"channel {channel} has values from {low:g} to {high:g}, for which float32 has no map {fitted.kind}; give "
            f"{remedy}"
        )


def _percentiles(values: NDArray[Any], percentile: float) -> tuple[float, float]:
    import numpy as np

    low, high = np.percentile(values, [percentile, 100 - percentile])
    return float(low), float(high)


def describe(maps: Sequence[ChannelMap]) -> str:
    """Return the stored values that become -1 and 1: "-3.2 to 4.1", or for each channel "0: -3.2 to 4.1, 1: …"."""
    ends = [" to ".join(f"{invert(one, x):.4g}" for x in (-1, 1)) for one in maps]
    return ends[0] if len(set(ends)) == 1 else ", ".join(f"{i}: {end}" for i, end in enumerate(ends))


def invert(one: ChannelMap, x: float) -> float:
    """Return the stored value of a value of the network."""
    y = x * one.half + one.middle
    if one.kind == "log":
        edge = math.log(one.knee)
        return math.exp(y) if y >= edge else one.knee * (1 + y - edge)
    return math.sinh(y) * one.knee if one.kind == "arcsinh" else y


def to_model(maps: tuple[ChannelMap, ...], stored: Tensor) -> Tensor:
    """Convert stored values [..., C, H, W] to float32 for the network."""
    import torch

    kinds, knee, middle, half = _constants(maps, stored.device)
    x = stored.float()
    if "log" in kinds:
        logarithm = torch.maximum(x, knee).log() + torch.clamp_max(x / knee - 1, 0)
        x = torch.where(kinds["log"], logarithm, x)
    if "arcsinh" in kinds:
        x = torch.where(kinds["arcsinh"], (x / knee).asinh(), x)
    return (x - middle) / half


def to_stored(maps: tuple[ChannelMap, ...], x0: Tensor) -> Tensor:
    """Convert values of the network [..., C, H, W] to stored units, float32: the inverse of `to_model`."""
    import torch

    kinds, knee, middle, half = _constants(maps, x0.device)
    y = x0.float() * half + middle
    x = y
    if "log" in kinds:
        edge = knee.log()
        # Other channels meet 0 in a curve, as an infinite value there would make their gradient NaN.
        log = torch.where(kinds["log"], y, edge)
        exponential = torch.maximum(log, edge).exp() + knee * torch.clamp_max(log - edge, 0)
        x = torch.where(kinds["log"], exponential, x)
    if "arcsinh" in kinds:
        x = torch.where(kinds["arcsinh"], torch.where(kinds["arcsinh"], y, torch.zeros_like(y)).sinh() * knee, x)
    return x


@lru_cache(maxsize=16)
def _constants(maps: tuple[ChannelMap, ...], device: torch.device) -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor]:
    """Return (kind -> mask of its channels; knee, middle, half), each [C, 1, 1] on the device.

    They stay there, as a copy from the host at each step would wait for the device.
    """
    import torch

    with torch.inference_mode(False):
        numbers = torch.tensor([(one.knee, one.middle, one.half) for one in maps], dtype=torch.float32).to(device)
        knee, middle, half = numbers.T[:, :, None, None]
        kinds = {
            kind: torch.tensor([one.kind == kind for one in maps]).to(device)[:, None, None]
            for kind in dict.fromkeys(one.kind for one in maps)
        }
        # A curve of another channel must not meet a knee that it cannot take.
        return kinds, knee.abs(), middle, half
