"""Find the axis of the channels of an image in an array: by its length, or as `data.axes` says."""

from __future__ import annotations

from collections.abc import Sequence

from unfog.values.image_format import MOST_CHANNELS

USUAL = (1, 3, 4)
"""Numbers of channels of pictures, with transparency or without."""
_FEWER = 4  # times as many values along both sides, for an axis to be that of channels


def channel_axis(shape: Sequence[int], channels_first: bool = False, axes: str = "auto") -> int | None:
    """Return the axis of the channels of an image of three axes, 0 or 2; None if its shape leaves that open.

    `axes` is NCHW or NHWC, or auto: the axis that has 1, 3 or 4 values, the last one if both do, or the first with
    `channels_first`; else the only one that is a quarter of both sides at most.
    """
    if axes in ("NCHW", "NHWC"):
        return 0 if axes == "NCHW" else 2
    sides = (0, 2) if channels_first else (2, 0)
    usual = [axis for axis in sides if shape[axis] in USUAL]
    if usual:
        return usual[0]
    few = [axis for axis in sides if _is_few(shape, axis)]
    return few[0] if len(few) == 1 else None


def _is_few(shape: Sequence[int], axis: int) -> bool:
    """Return True if an axis of an image is so much shorter than both others that its values are channels."""
    others = min(side for i, side in enumerate(shape) if i != axis)
    return shape[axis] <= MOST_CHANNELS and _FEWER * shape[axis] <= others
