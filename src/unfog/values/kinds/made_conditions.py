"""Conditions that are made of the image itself: a smaller copy, its brightness, or all but a rectangle of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from unfog.values.conditions import Conditions
from unfog.values.image_format import luma_weights
from unfog.values.kinds.image_kinds import IMAGE_KINDS, image_spans

if TYPE_CHECKING:
    from unfog.values.condition_kinds import ColumnFacts

# Sides of the rectangle of `hole`, as shares of those of the image.
_LEAST_HOLE, _MOST_HOLE = 0.25, 0.75
_HOLE_SEED = 0x401E  # of the rectangles of images outside of training


def made_of(x0: Tensor, kind: str, factor: int, draws: Callable[[], Tensor]) -> Tensor:
    """Return the condition of this kind of images x0 [B, C, H, W], in model values.

    Args:
        x0: the images, in model values.
        kind: "degrade", "grey" or "hole".
        factor: of "degrade".
        draws: returns numbers uniform in [0, 1), [B, 4], which place the rectangle of "hole".
    """
    if kind == "degrade":
        return enlarged(reduced(x0, factor), x0.shape[2], x0.shape[3])
    if kind == "grey":
        weights = luma_weights(x0.shape[1])
        first, *others = (weight * x0[:, c : c + 1] for c, weight in enumerate(weights))
        return sum(others, first)
    return x0.masked_fill(_rectangle(draws(), x0.shape[2], x0.shape[3]), float("nan"))


def reduced(x: Tensor, factor: int) -> Tensor:
    """Return images [B, C, H, W] made smaller by the mean of squares of `factor` pixels a side."""
    return F.avg_pool2d(x, factor)


def enlarged(x: Tensor, height: int, width: int) -> Tensor:
    """Return small images as large ones, by bicubic interpolation."""
    return F.interpolate(x, (height, width), mode="bicubic", align_corners=False)


def fixed_draws(rows: Sequence[int]) -> Tensor:
    """Return the draws of `hole` for the images at these rows of a set, the same each time: float32 [B, 4]."""
    drawn = [torch.rand(4, generator=torch.Generator().manual_seed(_HOLE_SEED + row)) for row in rows]
    return torch.stack(drawn) if drawn else torch.zeros(0, 4)


def _rectangle(draws: Tensor, height: int, width: int) -> Tensor:
    """Return a mask [B, 1, H, W] of a rectangle in each image, by draws [B, 4] of height, width, top and left."""
    inside = []
    for k, side in enumerate((height, width)):
        length = ((_LEAST_HOLE + (_MOST_HOLE - _LEAST_HOLE) * draws[:, k]) * side).round().clamp(1, side)
        start = (draws[:, k + 2] * (side - length + 1)).floor()
        place = torch.arange(side, device=draws.device)
        inside.append((place >= start[:, None]) & (place < (start + length)[:, None]))
    down, across = inside
    return (down[:, :, None] & across[:, None, :])[:, None]


def with_made(
    columns: Sequence[ColumnFacts], conditions: Conditions, x0: Tensor, draws: Callable[[], Tensor]
) -> Conditions:
    """Return the conditions of images x0 with those that are made of them, in the order of the columns.

    `conditions.image` has the channels of the other columns alone, or of all columns, of which those that are made are
    replaced. `draws` is that of `made_of`.
    """
    spans = image_spans(columns)
    given, parts, at = conditions.image, list[Tensor](), 0
    whole = given is not None and bool(spans) and given.shape[1] == spans[-1][1].stop
    for one, span in spans:
        if IMAGE_KINDS[one.kind].made:
            factor = int(one.statistics[3]) if one.kind == "degrade" else 0
            parts.append(made_of(x0.float(), one.kind, factor, draws))
        elif given is not None:
            start = span.start if whole else at
            parts.append(given[:, start : start + span.stop - span.start])
            at += span.stop - span.start
    return conditions._replace(image=torch.cat(parts, 1)) if parts else conditions
