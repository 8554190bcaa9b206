"""Conditions that are images as channels of the network's input: masks become one-hot, other images are scaled."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unfog.errors import RequestError

if TYPE_CHECKING:
    from unfog.values.condition_kinds import ColumnFacts

IMAGES = ("degrade", "grey", "hole", "image", "mask")
"""Kinds of the columns that are images; written out, as this module is copied into exports."""


class ImageInput(nn.Module):
    """Columns that are images -> channels beside the image [B, C, H, W] that the network takes.

    A column has its values in [-1, 1], or a channel for each category of a mask, and behind them 1 where they are not
    known; there the others are 0. If the network takes latents, a square of pixels lies behind each of them, and its
    values become channels.

    Args:
        columns: facts on the columns, all of which are images.
        factor: pixels along the side of one input of the network.
    """

    def __init__(self, columns: Sequence[ColumnFacts], factor: int = 1) -> None:
        super().__init__()
        self._factor = factor
        # The first of their statistics is the number of channels.
        ends = [0, *accumulate(int(one.statistics[0]) for one in columns)]
        self._parts = [
            (one.kind, slice(*span), f"ends_{k}", len(one.categories))
            for k, (one, span) in enumerate(zip(columns, pairwise(ends)))
        ]
        for (kind, _, name, _), one in zip(self._parts, columns):
            if kind == "image":  # a buffer, as a copy in each call would make a GPU wait
                low_and_high = torch.tensor(one.statistics[3:], dtype=torch.float32).view(2, -1, 1, 1)
                self.register_buffer(name, low_and_high, persistent=False)
        self.channels = factor**2 * sum(one.inputs for one in columns)
        """Channels that are added to those of the image; 0 without such columns."""

    def forward(self, x: Tensor, image: Tensor | None) -> Tensor:
        """Return x with the channels of `Conditions.image`; None is not known. RequestError for another size."""
        if image is None:
            count = self._parts[-1][1].stop
            sides = [self._factor * side for side in x.shape[2:]]
            image = x.new_full((len(x), count, *sides), float("nan"), dtype=torch.float32)
        if image.shape[2] != self._factor * x.shape[2] or image.shape[3] != self._factor * x.shape[3]:
            has, wanted = (f"{w}x{h}" for h, w in (image.shape[2:], [self._factor * side for side in x.shape[2:]]))
            raise RequestError(f"a condition has {has} pixels, and the network takes {wanted}")
        parts: list[Tensor] = []
        for kind, span, name, categories in self._parts:
            values = image[:, span]
            known = values.isfinite().all(1, keepdim=True)
            if kind == "mask":
                place = torch.arange(categories, device=values.device)[:, None, None]
                values = (values.nan_to_num(-1.0) == place).float()
            elif kind == "image":
                low, high = self.get_buffer(name)
                values = (values - low) * (2 / (high - low)) - 1
            parts += [torch.where(known, values, 0).to(x.dtype), (~known).to(x.dtype)]
        if self._factor > 1:
            parts = [F.pixel_unshuffle(torch.cat(parts, 1), self._factor)]
        return torch.cat([x, *parts], 1)
