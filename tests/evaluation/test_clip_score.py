"""CLIP score: mean cosine with its interval, and over all pairs of an image and another caption, by loops."""

import statistics

import pytest
import torch
from torch.nn import functional as F

from unfog.evaluation.clip_score import Captioned, clip_score
from unfog.values.condition_kinds import ColumnFacts

FACTS = ColumnFacts("text", "text", statistics=(256.0, 16.0))
CAPTIONS = ["a", "b", "a", "c"] * 6


def pairs(captions, near: float, seed: int = 0) -> Captioned:
    """Images at random, of which a share `near` is the vector of their caption."""
    generator = torch.Generator().manual_seed(seed)
    of = {text: F.normalize(torch.randn(8, generator=generator), dim=0) for text in sorted({*captions})}
    texts = torch.stack([of[text] for text in captions])
    noise = F.normalize(torch.randn(len(captions), 8, generator=generator))
    return Captioned(F.normalize(near * texts + (1 - near) * noise), texts, captions)


def test_it_is_the_mean_cosine_beside_that_of_other_captions():
    made, real = pairs(CAPTIONS, 0.3), pairs(CAPTIONS, 0.5, 1)
    found = clip_score(FACTS, made, real)
    own, others = [], []
    for image, caption in zip(made.images.double(), CAPTIONS, strict=True):
        for text, other in zip(made.texts.double(), CAPTIONS, strict=True):
            if other != caption:
                others.append(float(image @ text))
        own.append(float(image @ made.texts[CAPTIONS.index(caption)].double()))
    half = 1.96 * statistics.stdev(own) / len(own) ** 0.5
    assert found.value == pytest.approx(statistics.mean(own), abs=1e-6)
    assert (found.low, found.high) == pytest.approx((found.value - half, found.value + half), abs=1e-5)
    assert found.shuffled == pytest.approx(statistics.mean(others), abs=1e-6)
    assert found.real == pytest.approx(clip_score(FACTS, real, made).value)
    assert (found.n, found.n_real, found.condition) == (24, 24, "text")


@pytest.mark.parametrize(("near", "verdict"), [(0.5, "yes"), (0.0, "no"), (0.2, "partly")])
def test_samples_are_between_captions_of_others_and_real_images(near, verdict):
    assert clip_score(FACTS, pairs(CAPTIONS * 20, near), pairs(CAPTIONS * 20, 0.5)).obeyed == verdict


def test_what_says_nothing_is_said_so():
    assert clip_score(FACTS, pairs(CAPTIONS[:9], 0.5), pairs(CAPTIONS, 0.5)) is None
    few = clip_score(FACTS, pairs(CAPTIONS, 0.5), pairs(CAPTIONS[:3], 0.5))
    assert (few.real, few.n_real, few.obeyed) == (None, 3, "too few real images")
    same = clip_score(FACTS, pairs(["a"] * 12, 0.5), pairs(["a"] * 12, 0.5))
    assert same.shuffled == same.value
    assert same.obeyed == "the judge cannot see it"
