"""Embedding of the conditions of images: standardised numbers and their waves, one-hot categories, and vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from unfog.errors import RequestError
from unfog.values.conditions import Conditions

if TYPE_CHECKING:
    from unfog.values.condition_kinds import ColumnFacts

_WAVES = (0.5, 1.0, 2.0, 4.0, 8.0)  # radians for each deviation of a number


class ColumnEmbedding(nn.Module):
    """Columns of B images -> [B, width]: one linear layer on features of all columns.

    The layers of the network behind it, an activation and a linear layer, make it an MLP of the columns and the noise
    level together. Each column has an input for "not known", and so a vector of its own for images without a value.

    Args:
        columns: facts on the columns, which standardise the numbers.
        layer: makes the linear layer of so many inputs.
        balanced: scale the features of each column to the same power, with a mean of 1 over all inputs; for layers
            whose weights have a fixed length. Otherwise new weights are scaled.
    """

    scale: Tensor
    number_mean: Tensor
    number_deviation: Tensor
    vector_mean: Tensor
    vector_deviation: Tensor
    waves: Tensor

    def __init__(self, columns: Sequence[ColumnFacts], layer: Callable[[int], nn.Module], balanced: bool = False):
        super().__init__()
        of = _by_kind(columns)
        ordered = [one for each in of.values() for one in each]
        if len(ordered) < len(columns):
            raise RequestError("the network has no layer for a column of this run; leave the column out")
        vectors = [(one.statistics, len(one.statistics) // 4) for one in of["vector"]]
        self._categories = [len(one.categories) for one in of["category"]]
        self._several = [len(one.categories) for one in of["several"]]
        self._vectors = [size for _, size in vectors]
        self._numbers = len(of["number"])
        # Not in checkpoints, as config.toml has the facts that they are made of.
        buffers = {
            "number_mean": [one.statistics[0] for one in of["number"]],
            "number_deviation": [one.statistics[1] for one in of["number"]],
            "vector_mean": [each for values, size in vectors for each in values[:size]],
            "vector_deviation": [each for values, size in vectors for each in values[size : 2 * size]],
            "waves": list(_WAVES),
            "scale": _scales(ordered, balanced),
        }
        for name, values in buffers.items():
            self.register_buffer(name, torch.tensor(values, dtype=torch.float32), persistent=False)
        self.linear = layer(len(buffers["scale"]))
        if not balanced and isinstance(self.linear, nn.Linear):
            with torch.no_grad():
                self.linear.weight.mul_(_initial_factors(ordered, self.linear.weight))

    def forward(self, told: Conditions, count: int, dtype: torch.dtype) -> Tensor:
        """Return the embedding [B, width] of `count` images; a field that is absent is known of none of them."""
        parts = []
        if self._numbers:
            parts.append(self._of_numbers(self._field(told.numbers, count, self._numbers)))
        if self._categories:
            index = self._field(told.categories, count, len(self._categories), -1)
            parts += [_one_hot(index[:, k], size) for k, size in enumerate(self._categories)]
        if self._several:
            several = self._field(told.several, count, sum(self._several))
            parts += [_with_flag(each) for each in torch.split(several, self._several, 1)]
        if self._vectors:
            vectors = self._field(told.vectors, count, sum(self._vectors))
            standard = (vectors - self.vector_mean) / self.vector_deviation
            parts += [_with_flag(each) for each in torch.split(standard, self._vectors, 1)]
        embedding: Tensor = self.linear((torch.cat(parts, 1) * self.scale).to(dtype))
        return embedding

    def _field(self, values: Tensor | None, count: int, width: int, hidden: float = float("nan")) -> Tensor:
        if values is None:
            values = self.scale.new_full((count, width), hidden)
        return values

    def _of_numbers(self, numbers: Tensor) -> Tensor:
        known = numbers.isfinite()
        standard = torch.where(known, (numbers - self.number_mean) / self.number_deviation, 0)[:, :, None]
        angle = standard * self.waves
        features = torch.cat([standard, angle.sin(), angle.cos()], 2) * known[:, :, None]
        return torch.cat([features, (~known)[:, :, None]], 2).flatten(1)


def column_inputs(columns: Sequence[ColumnFacts]) -> dict[str, slice]:
    """Return the places of each column, by its name, among the inputs of the linear layer of `ColumnEmbedding`."""
    places, end = dict[str, slice](), 0
    for each in _by_kind(columns).values():
        for one in each:
            start, end = end, end + one.inputs
            places[one.name] = slice(start, end)
    return places


def _by_kind(columns: Sequence[ColumnFacts]) -> dict[str, list[ColumnFacts]]:
    return {name: [one for one in columns if one.kind == name] for name in _POWER}


def _one_hot(index: Tensor, size: int) -> Tensor:
    """Return [B, size + 1], the last for an index of -1."""
    place = torch.arange(size + 1, device=index.device)
    return (index.where(index >= 0, size)[:, None] == place).float()


def _with_flag(values: Tensor) -> Tensor:
    """Return values [B, K] and, last, whether they are not known: then all of them are 0."""
    known = values.isfinite().all(1, keepdim=True)
    return torch.cat([torch.where(known, values, 0), ~known], 1)


# Mean of the sum of the squares of the features of a column, by its kind: of a number itself and five waves.
_POWER: dict[str, Callable[[ColumnFacts], float]] = {
    "number": lambda facts: len(_WAVES) + 1.0,
    "category": lambda facts: 1.0,
    "several": lambda facts: max(1.0, len(facts.categories) / 2),
    "vector": lambda facts: len(facts.statistics) / 4,
}


def _scales(columns: Sequence[ColumnFacts], balanced: bool) -> list[float]:
    """Return the factor of each input; see `ColumnEmbedding`."""
    inputs = [one.inputs for one in columns]
    powers = [_POWER[one.kind](one) if balanced else sum(inputs) / len(columns) for one in columns]
    shares = [(sum(inputs) / len(columns) / power) ** 0.5 for power in powers]
    return [share for share, size in zip(shares, inputs) for _ in range(size)]


def _initial_factors(columns: Sequence[ColumnFacts], weight: Tensor) -> Tensor:
    """Return factors [inputs] of the new weights [width, inputs] that torch drew for a linear layer.

    torch draws weights of deviation 1/sqrt(3 inputs) for all inputs together. Then those of a number or vector have the
    deviation 1/sqrt(3 inputs) for its own inputs, as in a linear layer of theirs. Those of a category have 1, as in an
    embedding, and of several their sum has. Otherwise 300 categories would begin with 0.03, and be learned slowly.
    """
    total = weight.shape[1]
    alike = ("category", "several")
    factors = [(3 * total / _POWER[one.kind](one) if one.kind in alike else total / one.inputs) for one in columns]
    each = [factor**0.5 for factor, one in zip(factors, columns) for _ in range(one.inputs)]
    return torch.tensor(each, device=weight.device)
