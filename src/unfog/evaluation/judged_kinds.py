"""Scores of conditions: whether images have what was asked, by what a judge reads from them, for each kind.

A judge has outputs [N, K] for each column. A new kind is a class here and in `JUDGED`. Conditions that are images, but
for masks, need no judge: `evaluation.image_agreement` has the measures for them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from unfog.evaluation.metrics import wilson_interval
from unfog.values.condition_kinds import ColumnFacts, kind_of

FEWEST = 10
"""Fewest images with a known value that are scored."""
ACCURACY, ERROR, R2, PRECISION = "accuracy", "error", "R2", "average precision"
PIXELS, IOU = "pixel accuracy", "mean IoU"
_LARGEST_GRID = 1024  # pixels at which a judge sees images; larger ones are scaled down
R1, R5 = "R@1", "R@5"
CANDIDATES = 100
"""Captions among which that of an image is looked for."""
_SHARES = (ACCURACY, R1, R5)  # of images, whose interval is Wilson's
_EMBEDDING = 64  # numbers of an image and of a caption that are compared
_SHARPNESS = 10.0  # factor on their cosine in the loss
_DRAWS = 400  # of the bootstrap
_SHUFFLES = 20  # whose mean is the score of shuffled conditions
_VALUES = 2**28  # weighted values that a bootstrap may compute; fewer draws for more images or categories
_FEWEST_DRAWS = 40
# Share of the way from the score of shuffled conditions to that of real images, from which a condition is obeyed.
_REACHED = 0.9


@dataclass(frozen=True)
class ConditionScore:
    """Score of one condition: how well what a judge reads from samples agrees with what was asked; 95% intervals."""

    condition: str
    kind: str
    measure: str
    """Accuracy, error (root mean square, in the units of the source), R2, average precision, R@1, R@5; of masks pixel
    accuracy and mean IoU; of captions CLIP score."""
    value: float
    low: float
    high: float
    n: int
    """Samples that were given a value."""
    real: float | None
    """The same score of real images that the judge was not trained on, with their own values; None if too few have."""
    real_low: float | None
    real_high: float | None
    n_real: int
    shuffled: float
    """The score of the same samples if each is compared with what was asked of another."""

    obeyed: str = ""
    """Whether samples have what was asked: "yes", "partly", "no", or why that is not known."""


def grid_of(height: int, width: int) -> tuple[int, int]:
    """Return the height and width at which a judge sees images of this size."""
    scale = min(1.0, math.sqrt(_LARGEST_GRID / (height * width)))
    return max(1, round(height * scale)), max(1, round(width * scale))


class JudgedKind:
    """Base of the kinds: the outputs of a judge for columns of a kind, their loss and their scores."""

    measures: ClassVar[tuple[str, ...]]
    """Names of the scores. The first one is at most 1, and 1 is perfect."""
    of_pixels: ClassVar[bool] = False
    """Whether each pixel of the grid has K outputs, one for each category, as of a mask. They are flattened."""

    def outputs(self, facts: ColumnFacts) -> int:
        """Return the number K of outputs of the judge."""
        return kind_of(facts.kind).width(facts)

    def target(self, facts: ColumnFacts, values: NDArray[Any]) -> Tensor:
        """Return values [N, …] of a column as float32 [N, T] to train on and to score with; NaN where not known."""
        raise NotImplementedError

    def mirrored(self, facts: ColumnFacts, target: Tensor) -> Tensor:
        """Return the targets [N, T] of the mirror images."""
        return target

    def read(self, facts: ColumnFacts, output: Tensor) -> Tensor:
        """Return the readings [N, …] that scores are computed with, of outputs [N, K] of a judge."""
        return output

    def reader(self, facts: ColumnFacts) -> nn.Module | None:
        """Return the network that embeds targets, such as captions, and is trained with the judge; None without one."""
        return None

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean loss of outputs [N, K] for targets [N, T], all known, or for their embeddings."""
        raise NotImplementedError

    def score(self, measure: str, facts: ColumnFacts, output: Tensor, target: Tensor, weights: Tensor) -> Tensor:
        """Return the score, float64 [G], for each row of the weights [G, N] of images; NaN where it has no value."""
        raise NotImplementedError


class _OneOfSeveral(JudgedKind):
    """Scores of classes and of categories, of which an image has one."""

    measures = (ACCURACY,)

    def outputs(self, facts: ColumnFacts) -> int:
        return len(facts.categories)

    def target(self, facts: ColumnFacts, values: NDArray[Any]) -> Tensor:
        index = torch.from_numpy(np.asarray(values, np.float32))[:, None]
        return index.masked_fill(index < 0, math.nan)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target[:, 0].long())

    def score(self, measure: str, facts: ColumnFacts, output: Tensor, target: Tensor, weights: Tensor) -> Tensor:
        return weights @ (output.argmax(1) == target[:, 0]).double() / weights.sum(1)


class _Numbers(JudgedKind):
    """Numbers and vectors, standardised by the training images."""

    measures: ClassVar[tuple[str, ...]] = (R2,)

    def target(self, facts: ColumnFacts, values: NDArray[Any]) -> Tensor:
        size = len(facts.statistics) // 4
        mean, deviation = (np.array(facts.statistics[i * size : (i + 1) * size]) for i in (0, 1))
        return torch.from_numpy(((np.asarray(values).reshape(-1, size) - mean) / deviation).astype(np.float32))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean()

    def score(self, measure: str, facts: ColumnFacts, output: Tensor, target: Tensor, weights: Tensor) -> Tensor:
        shares = weights / weights.sum(1, keepdim=True)
        error = shares @ (output - target).double().square()  # [G, T]
        if measure == ERROR:
            return error[:, 0].sqrt() * facts.statistics[1]
        asked = target.double()
        variance = (shares @ asked.square() - (shares @ asked).square()).sum(1)
        return torch.where(variance > 1e-9, 1 - error.sum(1) / variance, math.nan)


class _Number(_Numbers):
    measures: ClassVar[tuple[str, ...]] = (R2, ERROR)


class _AnyOfSeveral(JudgedKind):
    measures = (PRECISION,)

    def target(self, facts: ColumnFacts, values: NDArray[Any]) -> Tensor:
        present = torch.from_numpy(np.asarray(values, np.float32))
        return present.masked_fill(present < 0, math.nan)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(output, target)

    def score(self, measure: str, facts: ColumnFacts, output: Tensor, target: Tensor, weights: Tensor) -> Tensor:
        each = [average_precision(output[:, k], target[:, k], weights) for k in range(target.shape[1])]
        return torch.stack(each).nanmean(0)


def average_precision(output: Tensor, present: Tensor, weights: Tensor) -> Tensor:
    """Return the average precision of outputs [N] for `present` [N], 1 or 0, for each row of weights [G, N].

    It is the mean over the images that have a category of the share of such images among all whose output is as high.
    NaN where no image has the category, or all have.
    """
    ordered, order = output.sort(descending=True, stable=True)
    sorted_weights = weights[:, order].double()
    hits = present[order].double() * sorted_weights
    found, seen = hits.cumsum(1), sorted_weights.cumsum(1)
    # Images with equal outputs are taken together: at the last of them.
    last = torch.searchsorted(-ordered, -ordered, right=True) - 1
    precision = found[:, last] / seen[:, last].clamp(min=1e-300)
    total = hits.sum(1)
    mean = (hits * precision).sum(1) / total.clamp(min=1e-300)
    return mean.masked_fill((total <= 0) | (total >= weights.sum(1)), math.nan)


class _Masks(JudgedKind):
    """The label of each pixel, at the size of the grid of the judge."""

    measures = (PIXELS, IOU)
    of_pixels = True

    def outputs(self, facts: ColumnFacts) -> int:
        return len(facts.categories) * math.prod(self._grid(facts))

    @staticmethod
    def _grid(facts: ColumnFacts) -> tuple[int, int]:
        return grid_of(*map(int, facts.statistics[1:3]))

    def target(self, facts: ColumnFacts, values: NDArray[Any]) -> Tensor:
        labels = torch.from_numpy(np.asarray(values, np.float32))
        small = F.interpolate(labels, self._grid(facts), mode="nearest-exact").flatten(1)
        return torch.where(small >= 0, small, math.nan)

    def mirrored(self, facts: ColumnFacts, target: Tensor) -> Tensor:
        return target.reshape(-1, *self._grid(facts)).flip(2).flatten(1)

    def read(self, facts: ColumnFacts, output: Tensor) -> Tensor:
        return output.reshape(len(output), len(facts.categories), -1).argmax(1).to(torch.int8)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.reshape(len(output), -1, target.shape[1]), target.long())

    def score(self, measure: str, facts: ColumnFacts, output: Tensor, target: Tensor, weights: Tensor) -> Tensor:
        if measure == PIXELS:
            return weights @ (output == target).double().mean(1) / weights.sum(1)
        found, either = list[Tensor](), list[Tensor]()
        for label in range(len(facts.categories)):
            read, asked = output == label, target == label
            found.append((read & asked).sum(1))
            either.append((read | asked).sum(1))
        shared, all_ = (weights @ torch.stack(each, 1).double() for each in (found, either))
        # A label that is neither in the images nor read from them has no score: 0 / 0 is NaN.
        return (shared / all_).nanmean(1)


class _CaptionReader(nn.Module):
    """Tokens [N, L], -1 after the end -> an embedding of unit length, and the tokens again, [N, D + L]."""

    def __init__(self, vocabulary: int):
        super().__init__()
        self.words = nn.Embedding(vocabulary + 1, _EMBEDDING)  # the last for "after the end"
        self.pairs = nn.Conv1d(_EMBEDDING, _EMBEDDING, 3, padding=1)  # of neighbours, as their order may matter
        self.last = nn.Linear(2 * _EMBEDDING, _EMBEDDING)

    def forward(self, target: Tensor) -> Tensor:
        tokens, there = target.long(), (target >= 0)[:, :, None]
        words = self.words(tokens.where(tokens >= 0, self.words.num_embeddings - 1)) * there
        pairs = F.relu(self.pairs(words.transpose(1, 2)).transpose(1, 2))
        mean = (torch.cat([words, pairs], 2) * there).sum(1) / there.sum(1).clamp(min=1)
        return torch.cat([F.normalize(self.last(mean)), target], 1)


class _Captions(JudgedKind):
    """Captions. Images and captions are mapped to vectors, which are near to each other if they belong together."""

    measures = (R1, R5)

    def outputs(self, facts: ColumnFacts) -> int:
        return _EMBEDDING

    def target(self, facts: ColumnFacts, values: NDArray[Any]) -> Tensor:
        first = kind_of(facts.kind).pick(values, None)
        tokens = torch.from_numpy(np.asarray(first, np.float32))
        return tokens.masked_fill(tokens[:, :1] < 0, math.nan)

    def reader(self, facts: ColumnFacts) -> nn.Module | None:
        return _CaptionReader(int(facts.statistics[0]))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        embedding, tokens = target[:, :_EMBEDDING], target[:, _EMBEDDING:]
        scores = _SHARPNESS * F.normalize(output) @ embedding.T
        # Images of one caption belong to it alike.
        same = (tokens[:, None] == tokens[None]).all(2).float()
        right = same / same.sum(1, keepdim=True)
        return (F.cross_entropy(scores, right) + F.cross_entropy(scores.T, right)) / 2


class Retrieval(_Captions):
    """Scores of captions: the share of images whose own caption is among the 1 or 5 nearest of up to `CANDIDATES`.

    Args:
        reader: the network of a trained judge that embeds captions.
        facts: the facts on the column of captions.
        captions: tokens of sets of images, [N, L] or [N, K, L], from which the others are drawn from a fixed seed.
    """

    def __init__(self, reader: nn.Module, facts: ColumnFacts, captions: Sequence[NDArray[Any]]) -> None:
        self._reader = reader
        known = torch.cat([super(Retrieval, self).target(facts, each) for each in captions])
        different = np.unique(known[known.isfinite().all(1)].numpy(), axis=0)
        chosen = np.random.default_rng(0).permutation(len(different))[:CANDIDATES]
        self._tokens = torch.from_numpy(different[chosen])
        self._others = self._embed(self._tokens)

    def __str__(self) -> str:
        count = len(self._tokens)
        if not count:
            return "no captions to look for"
        return f"{count} captions to look for, of which chance finds {1 / count:.1%} and {min(1, 5 / count):.1%}"

    @torch.inference_mode()
    def _embed(self, tokens: Tensor) -> Tensor:
        embedding: Tensor = self._reader(tokens)[:, :_EMBEDDING]
        return embedding.clone()

    def target(self, facts: ColumnFacts, values: NDArray[Any]) -> Tensor:
        """Return embeddings, and last the number of the caption among the candidates, -1 for another one."""
        tokens = super().target(facts, values)
        known = tokens.isfinite().all(1)
        equal = (tokens[:, None] == self._tokens[None]).all(2)
        number = torch.where(equal.any(1), equal.float().argmax(1) if equal.shape[1] else -1, -1)
        found = torch.cat([self._embed(tokens.nan_to_num(-1)), number[:, None].float()], 1)
        return found.masked_fill(~known[:, None], math.nan)

    def score(self, measure: str, facts: ColumnFacts, output: Tensor, target: Tensor, weights: Tensor) -> Tensor:
        images, number = F.normalize(output), target[:, -1].long()
        own, others = (images * target[:, :-1]).sum(1), images @ self._others.T
        # The caption itself is left out of the others, or else the last, so that there are equally many.
        place = torch.arange(others.shape[1])
        others = others.masked_fill(place == torch.where(number < 0, others.shape[1] - 1, number)[:, None], -math.inf)
        before = (others >= own[:, None]).sum(1)
        return weights @ (before < (1 if measure == R1 else 5)).double() / weights.sum(1)


JUDGED: dict[str, JudgedKind] = {
    "class": _OneOfSeveral(),
    "category": _OneOfSeveral(),
    "number": _Number(),
    "several": _AnyOfSeveral(),
    "vector": _Numbers(),
    "mask": _Masks(),
    "text": _Captions(),
}


def score_condition(
    facts: ColumnFacts,
    samples: tuple[Tensor, NDArray[Any]],
    real: tuple[Tensor, NDArray[Any]],
    kind: JudgedKind | None = None,
) -> list[ConditionScore]:
    """Return the scores of a condition; [] if too few samples were given a value.

    A measure without a value is left out, such as R2 of samples that were all asked for the same number.
    `samples` and `real` are outputs of the judge [N, K] and values [N, …] of the column: those that were asked, and
    those of real images. Captions need a `Retrieval` as their `kind`. All is computed from fixed seeds.
    """
    kind, found = kind or JUDGED[facts.kind], list[ConditionScore]()
    output, target = _known(kind, facts, *samples)
    real_output, real_target = _known(kind, facts, *real)
    if len(target) < FEWEST:
        return found
    for measure in kind.measures:
        value, low, high = _with_interval(kind, measure, facts, output, target)
        if math.isnan(value):
            continue
        reached = _NONE if len(real_target) < FEWEST else _with_interval(kind, measure, facts, real_output, real_target)
        real_value, real_low, real_high = (None if math.isnan(each) else each for each in reached)
        shuffled = _shuffled(kind, measure, facts, output, target)
        drawn = facts.name, facts.kind, measure, value, low, high, len(target)
        one = ConditionScore(*drawn, real_value, real_low, real_high, len(real_target), shuffled)
        found.append(replace(one, obeyed=verdict_of(one)))
    return found


def verdict_of(one: ConditionScore) -> str:
    """Return whether samples have what was asked, by how far the score is from shuffled to that of real images."""
    if one.real is None or one.real_low is None or one.real_high is None:
        return "too few real images"
    way = one.real - one.shuffled
    sign = -1 if one.measure == ERROR else 1
    if sign * way <= 0 or one.real_low <= one.shuffled <= one.real_high:
        return "the judge cannot see it"
    low, high = sorted((end - one.shuffled) / way for end in (one.low, one.high))
    if low <= 0:
        return "no" if high < _REACHED else "too few samples"
    return "yes" if high >= _REACHED else "partly"


_NONE = (math.nan, math.nan, math.nan)


def main_scores(scores: Sequence[ConditionScore]) -> list[ConditionScore]:
    """Return the first score of each condition, which is at most 1."""
    return [one for one in scores if one.measure == JUDGED[one.kind].measures[0]]


def _known(kind: JudgedKind, facts: ColumnFacts, output: Tensor, values: NDArray[Any]) -> tuple[Tensor, Tensor]:
    target = kind.target(facts, values)
    known = target.isfinite().all(1)
    return output[known], target[known]


def _with_interval(
    kind: JudgedKind, measure: str, facts: ColumnFacts, output: Tensor, target: Tensor
) -> tuple[float, float, float]:
    """Return a score with its 95% interval: Wilson's for a share of images, else of the bootstrap over images."""
    n = len(target)
    value = float(kind.score(measure, facts, output, target, torch.ones(1, n, dtype=torch.float64)))
    if measure in _SHARES:
        return value, *wilson_interval(value, n)
    draws = max(_FEWEST_DRAWS, min(_DRAWS, _VALUES // (n * target.shape[1])))
    chosen = torch.randint(n, (draws, n), generator=torch.Generator().manual_seed(0))
    weights = torch.zeros(draws, n, dtype=torch.float64).scatter_add_(1, chosen, torch.ones(draws, n).double())
    scores = kind.score(measure, facts, output, target, weights)
    scores = scores[scores.isfinite()]
    if not len(scores):
        return value, value, value
    low, high = torch.quantile(scores, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return value, min(low, value), max(high, value)


def _shuffled(kind: JudgedKind, measure: str, facts: ColumnFacts, output: Tensor, target: Tensor) -> float:
    generator, ones = torch.Generator().manual_seed(0), torch.ones(1, len(target), dtype=torch.float64)
    orders = [torch.randperm(len(target), generator=generator) for _ in range(_SHUFFLES)]
    return float(torch.cat([kind.score(measure, facts, output, target[order], ones) for order in orders]).mean())
