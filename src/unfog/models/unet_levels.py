"""Rules that the settings of both U-Nets share: levels of resolution, attention heads, dropout. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from unfog.errors import RequestError


class LevelBound(NamedTuple):
    """Bounds on one level of a U-Net."""

    number: int
    channels: int
    pixels: float
    blocks: int
    widest: int
    """Channels that a block may see: those of the levels around it, concatenated."""
    attention_maps: float
    """Numbers of all attention maps of the level, if it has attention."""


def level_bounds(channels: tuple[int, ...], blocks: int, head_channels: int, side: int) -> Iterator[LevelBound]:
    count = 2 * blocks + 4  # down, up, the middle ones and resampling
    for number, own in enumerate(channels):
        pixels, heads = (side / 2**number) ** 2, own / (head_channels or own)
        widest = channels[max(0, number - 1)] + own + channels[min(number + 1, len(channels) - 1)]
        yield LevelBound(number, own, pixels, count, widest, count * 4 * heads * pixels**2)


def check_levels(channels: tuple[int, ...], blocks: int, attention: tuple[bool, ...]) -> None:
    """Raise `RequestError` unless these make the levels of a U-Net."""
    if len(channels) > 12 or max(channels, default=0) > 16384 or blocks > 100:
        raise RequestError(
            f"channels = {list(channels)[:16]} and blocks = {blocks} are beyond any network; "
            "there are at most 12 levels, 16384 channels and 100 blocks"
        )
    if min(channels, default=0) < 4 or blocks < 1:
        raise RequestError(
            f"channels = {list(channels)} and blocks = {blocks} make no network; "
            "give at least one level of 4 channels, and one block"
        )
    if len(attention) != len(channels):
        raise RequestError(
            f"attention has {len(attention)} entries for {len(channels)} levels of channels; "
            "give one true or false for each level"
        )


def check_condition(dropout: float, time_scale: float) -> None:
    """Raise `RequestError` unless these are in range."""
    if not 0 <= dropout < 1:
        raise RequestError(f"dropout = {dropout} is no probability below 1; try 0.1")
    if not 1e-6 <= time_scale <= 1e6:
        raise RequestError(f"time_scale = {time_scale} must be from 1e-6 to 1e6; 1 leaves timesteps as they are")


def check_heads(attending: tuple[int, ...], head_channels: int) -> None:
    """Raise `RequestError` unless the channels of all places with attention are whole heads."""
    if head_channels < 0:
        raise RequestError(f"head_channels = {head_channels} must not be negative; 0 is one head, 32 is usual")
    for channels in attending:
        if head_channels and channels % head_channels:
            raise RequestError(
                f"channels = {channels} with attention is not a multiple of head_channels = "
                f"{head_channels}; try {common_divisor(attending, 32)}, or 0 for one head"
            )


def check_halving(levels: int, size: int | tuple[int, int]) -> None:
    """Raise `RequestError` unless both sides can be halved between that many levels."""
    factor = 2 ** (levels - 1)
    for side in (size, size) if isinstance(size, int) else size:
        # A single pixel at the lowest level could not be normalised when one image is sampled.
        if side < 2 * factor or side % factor:
            nearest = max(2, round(side / factor)) * factor
            raise RequestError(
                f"size = {side} is no multiple of {factor} from {2 * factor} on, as {levels} levels "
                f"need; try size = {nearest}, or fewer levels"
            )


def describe_levels(levels: int, height: int, width: int) -> str:
    return f"in {levels} levels for {width}x{height} pixels, the lowest at {height // 2 ** (levels - 1)}"


def common_divisor(values: tuple[int, ...], limit: int) -> int:
    """Return the largest number up to `limit` that divides all `values`."""
    return next(n for n in range(limit, 0, -1) if all(value % n == 0 for value in values))
