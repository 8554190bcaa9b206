"""The network of an export, which takes a tensor for each condition."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from unfog.models.image_conditions import IMAGES
from unfog.values.conditions import Conditions


class NamedInputs(nn.Module):
    """A network with an input for each condition: (x [B, C, H, W], c_noise [B], *conditions) -> y [B, C', H, W].

    The conditions are the label, int64 [B], if there are classes, and then the columns in order: a number float32 [B],
    a category int64 [B], several categories float32 [B, K] with 1 for each that is present and 0 elsewhere, a vector
    float32 [B, D], a text its tokens int64 [B, L] with -1 after its end. Numbers are in the units of their source. An
    image is float32 [B, K, H, W]: a mask has the number of the category of each pixel, what is made of the image has
    values of about -1 to 1, and others are in the units of their source. NaN, or -1 for a category and in all tokens,
    stands for a value that is not known. y is NaN where `known`, bool [C, H, W], is False. There NaN of x counts as 0.

    Args:
        network: called with `Conditions`.
        has_classes: the first condition is the label.
        kinds: of the columns.
        known: which values of the images are known; None if the network has no input for a mask.
    """

    known: Tensor | None

    def __init__(self, network: nn.Module, has_classes: bool, kinds: Sequence[str], known: Tensor | None = None):
        super().__init__()
        self.network, self.has_classes, self.kinds = network, has_classes, tuple(kinds)
        self.register_buffer("known", known)

    def forward(self, x: Tensor, c_noise: Tensor, *conditions: Tensor) -> Tensor:
        if len(conditions) != self.has_classes + len(self.kinds):
            names = ", ".join([*["label"] * self.has_classes, *self.kinds])
            raise ValueError(f"{len(conditions)} conditions were given to a network with {names}; give one for each")
        label, columns = (conditions[0], conditions[1:]) if self.has_classes else (None, conditions)
        if not self.kinds and self.known is None:
            y: Tensor = self.network(x, c_noise, label)
            return y
        if self.known is not None:  # from a loop that hands y on as it is; convolutions would spread it
            x = x.masked_fill(x.isnan() & ~self.known, 0.0)
        kinds = ("number", "category", "several", "vector", "text", "image")
        of: dict[str, list[Tensor]] = {kind: [] for kind in kinds}
        for kind, column in zip(self.kinds, columns):
            of["image" if kind in IMAGES else kind].append(column)
        told = Conditions(
            label,
            known=None if self.known is None else self.known.to(x.dtype).expand_as(x),
            numbers=torch.stack(of["number"], 1) if of["number"] else None,
            categories=torch.stack(of["category"], 1) if of["category"] else None,
            several=torch.cat(of["several"], 1) if of["several"] else None,
            vectors=torch.cat(of["vector"], 1) if of["vector"] else None,
            image=torch.cat(of["image"], 1) if of["image"] else None,
            tokens=of["text"][0] if of["text"] else None,
        )
        y = self.network(x, c_noise, told)
        return y if self.known is None else y.where(self.known, float("nan"))
