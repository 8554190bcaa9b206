"""CLIP score: the mean cosine of images and their captions, as a pretrained model sees both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from unfog.evaluation.held_out import MeanEstimate
from unfog.evaluation.judged_kinds import FEWEST, ConditionScore, verdict_of
from unfog.evaluation.metrics import Z
from unfog.values.condition_kinds import ColumnFacts

CLIP_SCORE = "CLIP score"
"""Name of the measure. It is the cosine itself, which other programs multiply by 100 and cut off at 0."""


class Captioned(NamedTuple):
    """Images and their captions, as vectors of length 1."""

    images: Tensor
    """float32 [N, D]."""
    texts: Tensor
    """float32 [N, D]."""
    captions: Sequence[str]
    """N captions, by which equal ones are known."""


def clip_score(facts: ColumnFacts, samples: Captioned, real: Captioned) -> ConditionScore | None:
    """Return the score of samples, with that of real images and of captions of others; None of too few samples.

    Intervals are mean +- 1.96 standard errors over images. `shuffled` is the mean over all pairs of a sample and a
    caption other than its own, or the score itself if all have the same.
    """
    if len(samples.captions) < FEWEST:
        return None
    own, other = _interval(samples), (_interval(real) if len(real.captions) >= FEWEST else None)
    real_value, real_low, real_high = other or (None, None, None)
    found = ConditionScore(
        facts.name,
        facts.kind,
        CLIP_SCORE,
        *own,
        len(samples.captions),
        real_value,
        real_low,
        real_high,
        len(real.captions),
        _with_other_captions(samples, own[0]),
    )
    return replace(found, obeyed=verdict_of(found))


def _interval(pairs: Captioned) -> tuple[float, float, float]:
    mean = MeanEstimate.over_images((pairs.images * pairs.texts).sum(1)[None])
    return mean.value, mean.value - Z * mean.error, mean.value + Z * mean.error


def _with_other_captions(pairs: Captioned, own: float) -> float:
    """Return the mean cosine over all pairs of an image and another caption; `own` if all captions are equal."""
    place = {text: i for i, text in enumerate(dict.fromkeys(pairs.captions))}
    group = torch.tensor([place[text] for text in pairs.captions])
    # The sum over all pairs of images and texts is the product of their sums; less those of equal captions.
    empty = torch.zeros(len(place), pairs.images.shape[1], dtype=torch.float64)
    images, texts = (empty.index_add(0, group, each.double()) for each in pairs[:2])
    equal = (images * texts).sum()
    pairs_of_others = len(group) ** 2 - int((group.bincount() ** 2).sum())
    if not pairs_of_others:
        return own
    return float(images.sum(0) @ texts.sum(0) - equal) / pairs_of_others
