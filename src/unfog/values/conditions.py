"""`Conditions`: inputs of a network for each image of a batch, besides the image and its noise level.

A new kind of condition is a field here, a class in `condition_kinds`, and a part of `models.condition_embedding`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch import Tensor

from unfog.device.copies import to_device

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from unfog.values.condition_kinds import Span

ConditionsLike: TypeAlias = "Conditions | Tensor | None"
"""Conditions, a label alone, int64 [B], or None for no condition."""
# Value of each condition for an image whose condition is hidden. Conditions not listed here are never dropped.
_NAN = float("nan")
_NOT_TOLD: dict[str, float] = {
    "label": -1,
    "numbers": _NAN,
    "categories": -1,
    "several": _NAN,
    "vectors": _NAN,
    "image": _NAN,
    "tokens": -1,
}


class Conditions(NamedTuple):
    """The conditions of a batch of B images, each a tensor whose first axis is the batch, or None if it is absent.

    A tuple of tensors, so that torch can compile, copy and shard what takes one.
    """

    label: Tensor | None = None
    """int64 [B], the class of each image; -1 where it is not told."""
    augment: Tensor | None = None
    """float32 [B, 9], how each image was augmented; 0 if it was not. It is never dropped, as the image shows it."""
    known: Tensor | None = None
    """float32 [B, C, H, W], 1 where a value of the image is known and 0 elsewhere; None if all are. Never dropped."""
    numbers: Tensor | None = None
    """float32 [B, K], a number for each column, in the units of the source; NaN where it is not known or hidden."""
    categories: Tensor | None = None
    """int64 [B, K], a category for each column; -1 where it is not known or hidden."""
    several: Tensor | None = None
    """float32 [B, K], 1 for each category that an image has, else 0, of all columns; NaN where they are not known."""
    vectors: Tensor | None = None
    """float32 [B, D], the numbers of all columns, in the units of the source; NaN where they are not known."""
    image: Tensor | None = None
    """float32 [B, K, H, W], channels of all images that are conditions, NaN where not known. Those that are made of
    the image are in model values, others in the units of their source, and a mask has the numbers of its labels."""
    tokens: Tensor | None = None
    """int64 [B, L], the tokens of a text, and -1 after its end; all -1 where the text is not known or hidden."""

    @classmethod
    def of(cls, given: ConditionsLike) -> Conditions:
        """Return conditions unchanged; a tensor is the label, and None means no condition."""
        return given if isinstance(given, Conditions) else cls(given)

    @property
    def droppable(self) -> tuple[str, ...]:
        """Names of the conditions that are present and that `dropped` hides."""
        return tuple(name for name in _NOT_TOLD if getattr(self, name) is not None)

    def apply(self, function: Callable[[Tensor], Tensor]) -> Conditions:
        """Return the conditions with `function` applied to each that is present."""
        return Conditions(*(None if each is None else function(each) for each in self))

    def rows(self, index: slice | Tensor | NDArray[np.int64]) -> Conditions:
        """Return the conditions of these images, by whatever indexes a tensor."""
        return self.apply(lambda each: each[index])

    def to(self, device: torch.device) -> Conditions:
        """Copy the conditions to a device, without waiting; those that are there already are not copied."""
        return self.apply(lambda each: to_device(each, device))

    def copy_(self, other: Conditions) -> None:
        """Write the values of other conditions, of the same kinds and sizes, into these tensors."""
        for mine, theirs in zip(self, other):
            if mine is not None and theirs is not None:
                mine.copy_(theirs)

    def cat(self, other: Conditions) -> Conditions:
        """Return the conditions of these images and then of others. ValueError if one has a condition alone."""
        if any((mine is None) != (theirs is None) for mine, theirs in zip(self, other)):
            raise ValueError("conditions of different kinds cannot be joined")
        return Conditions(*(None if a is None or b is None else torch.cat([a, b]) for a, b in zip(self, other)))

    def dropped(self, hidden: Tensor | None = None, only: str = "") -> Conditions:
        """Return the conditions without those of the images `hidden`, bool [B]; None hides those of all images.

        `only` names the one condition that is hidden; by default all are.
        """
        changed = {}
        for name in (only,) if only else self.droppable:
            each: Tensor = getattr(self, name)
            if hidden is None:
                changed[name] = torch.full_like(each, _NOT_TOLD[name])
            else:
                changed[name] = each.masked_fill(hidden.reshape(-1, *(1 for _ in each.shape[1:])), _NOT_TOLD[name])
        return self._replace(**changed)

    def with_text(self, tokens: Tensor | None) -> Conditions:
        """Return the conditions with these tokens, int64 [L], for the text of all images; None changes nothing."""
        if tokens is None or self.tokens is None:
            return self
        return self._replace(tokens=tokens.expand_as(self.tokens))

    def dropped_each(self, hidden: Tensor, spans: Sequence[Span]) -> Conditions:
        """Return the conditions without those that are `hidden`, bool [B, S]: a column of it for each of S `spans`."""
        changed = dict[str, Tensor]()
        for k, (name, start, stop) in enumerate(spans):
            each = changed.get(name, getattr(self, name))
            if each is None:
                continue
            which = hidden[:, k]
            if each.ndim > 1:
                place = torch.arange(each.shape[1], device=each.device)
                which = which[:, None] & (place >= start) & (place < stop)
                which = which.reshape(*which.shape, *(1 for _ in each.shape[2:]))
            changed[name] = each.masked_fill(which, _NOT_TOLD[name])
        return self._replace(**changed)

    def without(self, spans: Sequence[Span]) -> Conditions:
        """Return the conditions with those at the places `spans` hidden from all images."""
        present = next((each for each in self if each is not None), None)
        if present is None or not spans:
            return self
        return self.dropped_each(present.new_ones(len(present), len(spans), dtype=torch.bool), spans)

    def taking(self, spans: Iterable[Span], other: Conditions) -> Conditions:
        """Return the conditions with the values at these places taken from other ones, of as many images."""
        changed = dict[str, Tensor]()
        for name, start, stop in spans:
            mine, theirs = changed.get(name, getattr(self, name)), getattr(other, name)
            if mine is None or theirs is None:
                continue
            whole = mine.ndim == 1
            changed[name] = theirs if whole else torch.cat([mine[:, :start], theirs[:, start:stop], mine[:, stop:]], 1)
        return self._replace(**changed)

    def label_or(self, null: int) -> Tensor | None:
        """Return the labels, int64 [B], with the number `null` for images whose class is hidden; None if absent."""
        return None if self.label is None else self.label.masked_fill(self.label < 0, null)


NO_CONDITIONS = Conditions()
"""No condition at all, for which a network with classes takes the null class."""
