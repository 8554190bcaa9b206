"""Worth of a condition: the rise of the loss of held-out images without it, or with that of another image.

The noise, its levels and the images are the same, so that the differences are paired.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeAlias

import torch
from torch import Tensor

from unfog.evaluation.held_out import HeldOut, HeldOutBuckets, LossAt, MeanEstimate
from unfog.evaluation.metrics import Z
from unfog.values.condition_kinds import Span
from unfog.values.conditions import Conditions

ALL = "all"
"""Name of all conditions together."""
_Difference: TypeAlias = tuple[float | None, float | None, float | None]  # and the ends of its interval


@dataclass(frozen=True)
class ConditionWorth:
    """Differences of the held-out loss to that with the right conditions, with 95% intervals; None if not measured."""

    condition: str
    """Its name; `ALL` for all of them together."""
    loss: float
    """With the right conditions."""
    shuffled: float | None
    """How much higher the loss is with the condition of another image."""
    shuffled_low: float | None
    shuffled_high: float | None
    none: float | None
    """How much higher the loss is without the condition; None if the network was not trained without it."""
    none_low: float | None
    none_high: float | None
    n: int
    """Held-out images."""
    loss_low: float | None = None
    """95% interval of `loss` itself, which is far wider than those of the differences."""
    loss_high: float | None = None


def condition_worth(
    held_out: HeldOut | HeldOutBuckets,
    loss_at: LossAt,
    places: Mapping[str, Span],
    trained_without: Callable[[str], bool],
    batch: int,
    progress: Callable[[int], None] = lambda images: None,
) -> list[ConditionWorth]:
    """Return the worth of each condition, and then of all together, if there are several.

    Args:
        held_out: two images or more.
        loss_at: the loss of the network.
        places: of each condition, by name.
        trained_without: says whether the condition of a name, or `ALL`, was hidden from some training images.
        batch: images in one forward pass.
        progress: called with the number of images of each pass.
    """
    parts = held_out.parts if isinstance(held_out, HeldOutBuckets) else (held_out,)
    told = [part.conditions for part in parts]
    hidden = [each.dropped() for each in told]
    other, changed = _of_other_images(told, [part.images for part in parts])

    def losses(conditions: Iterable[Conditions]) -> Tensor:
        own = HeldOutBuckets(tuple(part._replace(conditions=each) for part, each in zip(parts, conditions)))
        return own.losses(loss_at, batch, progress=progress)[0]

    def taking(spans: Sequence[Span], others: Sequence[Conditions]) -> Tensor:
        return losses(own.taking(spans, each) for own, each in zip(told, others))

    right, worth = losses(told), list[ConditionWorth]()
    own, *ends_of_own = _difference(right, torch.zeros_like(right))
    assert own is not None
    for name, spans in _groups(places):
        swapped = taking(spans, other)[:, changed]
        shuffled: _Difference = (None, None, None)
        if swapped.shape[1]:
            shuffled = _difference(swapped, right[:, changed])
        without: _Difference = (None, None, None)
        if trained_without(name):
            without = _difference(taking(spans, hidden), right)
        found = ConditionWorth(name, own, *shuffled, *without, held_out.images, *ends_of_own)
        worth.append(found)
    return worth


def passes(places: Mapping[str, Span], trained_without: Callable[[str], bool]) -> int:
    """Return how often `condition_worth` computes the loss of all images at all levels."""
    return 1 + sum(1 + trained_without(name) for name, _ in _groups(places))


def another_image(count: int) -> Tensor:
    """Return the number of another image for each of `count` images, int64 [count]: one cycle, of a fixed seed."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    other = torch.empty_like(order)
    other[order] = order.roll(1)
    return other


def _of_other_images(told: Sequence[Conditions], counts: Sequence[int]) -> tuple[list[Conditions], Tensor]:
    """Return the conditions of another image for each image, and which images [N] have those of another.

    Conditions that are images of several sizes are exchanged within each size, where a single image keeps its own.
    """
    ends, images = [*pairwise([0, *accumulate(counts)])], [one.image for one in told]
    masks = [one.known for one in told]  # which are not exchanged
    by_size = any(len({None if one is None else one.shape[1:] for one in each}) > 1 for each in (images, masks))
    joined, *rest = [one._replace(image=None, known=None) for one in told] if by_size else told
    for one in rest:
        joined = joined.cat(one)
    mixed = joined.rows(another_image(sum(counts)))
    other = [mixed.rows(slice(*one)) for one in ends]
    if not by_size:
        return other, torch.ones(sum(counts), dtype=torch.bool)
    other = [
        each._replace(image=None if image is None else image[another_image(len(image))])
        for each, image in zip(other, images)
    ]
    return other, torch.cat([torch.full((count,), count > 1) for count in counts])


def _groups(places: Mapping[str, Span]) -> Iterator[tuple[str, Sequence[Span]]]:
    yield from ((name, (place,)) for name, place in places.items())
    if len(places) > 1:
        yield ALL, tuple(places.values())


def _difference(losses: Tensor, right: Tensor) -> _Difference:
    found = MeanEstimate.over_images(losses - right)
    if found.error != found.error:  # of a single image
        return found.value, None, None
    return found.value, found.value - Z * found.error, found.value + Z * found.error
