"""Kinds of conditions: from a column to a tensor of `Conditions`, and from what people ask for to a value; no torch.

A new kind is a class here and in `KINDS`, a field of `Conditions`, and a part of `models.condition_embedding`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from unfog.errors import RequestError
from unfog.text import suggest
from unfog.values.columns import CLASS, Column, name_problem
from unfog.values.kinds.condition_words import (
    SHOWN,
    check_statistics,
    composed,
    number_of,
    read_category,
    read_number,
    some,
    split_several,
    statistics_of,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

Span: TypeAlias = tuple[str, int, int]
"""(a field of `Conditions`, first of its values, and the one after the last) of a column."""


@dataclass(frozen=True)
class ColumnFacts:
    """Facts on a column that a run keeps: enough to build the layer, and to read what people ask for."""

    name: str = ""
    kind: str = ""
    categories: tuple[str, ...] = ()
    """Names of the values, if they are numbers of categories."""
    statistics: tuple[float, ...] = ()
    """Numbers that the kind computes from the training images, such as mean and deviation."""

    def __post_init__(self) -> None:
        if self.kind:
            if problem := name_problem(self.name, self.kind):
                raise RequestError(f"a column of this run is called {self.name[:100]!r}: {problem}")
            kind_of(self.kind, self.name).check(self)

    def __str__(self) -> str:
        of = kind_of(self.kind, self.name).summary(self)
        return f"{self.name} ({self.kind}{f' of {of}' if of else ''})"

    @property
    def identity(self) -> tuple[str, str, tuple[str, ...], int]:
        """All but the values of the statistics: equal for one column of two sets of images."""
        return self.name, self.kind, self.categories, len(self.statistics)

    @property
    def inputs(self) -> int:
        """Number of inputs of the layer that embeds the column: see `ConditionKind.inputs`."""
        return kind_of(self.kind).inputs(self)


class ConditionKind:
    """Base of the kinds of conditions. Values are in the units of the source."""

    name: ClassVar[str]
    field: ClassVar[str]
    """The field of `Conditions` that columns of this kind fill together, in the order of their names."""

    def check(self, facts: ColumnFacts) -> None:
        """Raise RequestError unless these are facts of such a column; they may be read from a file."""

    def facts(self, column: Column) -> ColumnFacts:
        """Return the facts that a run keeps of a column of its training images."""
        return ColumnFacts(column.name, column.kind, column.categories)

    def inputs(self, facts: ColumnFacts) -> int:
        """Return the number of rows that the column adds to the layers of a network, at most."""
        raise NotImplementedError

    def width(self, facts: ColumnFacts) -> int:
        """Return the number of values that an image has in the field of `Conditions`."""
        return 1

    def known(self, values: NDArray[Any]) -> NDArray[np.bool_]:
        """Return whether each of the values [N, …] is known, bool [N]: integers below 0 and NaN are not."""
        import numpy as np

        flat = values.reshape(len(values), math.prod(values.shape[1:]))
        return np.asarray(np.isfinite(flat).all(1) if values.dtype.kind == "f" else flat[:, 0] >= 0)

    def summary(self, facts: ColumnFacts) -> str:
        """Describe the categories for people, in a few words."""
        return f"{', '.join(facts.categories[:SHOWN])}{', ...' * (len(facts.categories) > SHOWN)}"

    def is_one_value(self, facts: ColumnFacts, text: str) -> bool:
        """Return whether a text of a command line is one value of the column, even if it has commas."""
        return text in facts.categories

    def evidence(self, facts: ColumnFacts) -> str:
        """Describe the values for people, such as "20 to 89"."""
        return f"{len(facts.categories)} of them"

    def pick(self, values: NDArray[Any], turn: NDArray[np.int64] | None) -> NDArray[Any]:
        """Return values [B, …] with one of several that an image has: that of its `turn` [B], by default the first."""
        return values

    def concern(self, facts: ColumnFacts, value: Any) -> str:
        """Return why samples of this value may be poor; "" if the training images have such values."""
        return ""

    def tensor(self, columns: Sequence[NDArray[Any]]) -> Tensor:
        """Return the condition [B, …] of images with these values, an array [B, …] for each column, on the CPU.

        Computes with NumPy alone.
        """
        raise NotImplementedError

    def argument(self, facts: ColumnFacts, values: Tensor) -> Tensor:
        """Return the condition of B images as the argument of somebody's own network, from `tensor` of this column."""
        return values

    def parse(self, facts: ColumnFacts, word: object) -> Any:
        """Return the value of a word of a command line, or of a Python value. RequestError if it does not fit."""
        raise NotImplementedError

    def usual(self, facts: ColumnFacts) -> tuple[Any, ...]:
        """Return the values that samples cycle through by default, such as all classes."""
        raise NotImplementedError

    def unknown(self, facts: ColumnFacts) -> Any:
        """Return the value of an image whose value is not known."""
        (value,) = self.usual(facts)
        return value

    def listed(self, values: NDArray[Any]) -> tuple[Any, ...]:
        """Return the values [B, …] of images as those of samples: see `parse`."""
        return tuple(values.tolist())

    def stacked(self, values: Sequence[Any]) -> NDArray[Any]:
        """Return values of samples as those of images, [B, …]."""
        import numpy as np

        return np.array(values)

    def show(self, facts: ColumnFacts, value: Any) -> str:
        """Return a value as text, for people and names of files; "" if it is not known."""
        return f"{value}"

    def captions(self, facts: ColumnFacts, values: Sequence[Any]) -> list[str]:
        """Return values as short texts for captions; "" if one is not known."""
        return [self.show(facts, value) for value in values]

    def cell(self, facts: ColumnFacts, value: Any) -> str:
        """Return a value as a cell of a table, from which `parse` makes the same value; "" if it is not known."""
        return self.show(facts, value)


class ClassKind(ConditionKind):
    """One of several classes; an image has one such condition, the column "class"."""

    name = CLASS
    field = "label"

    def inputs(self, facts: ColumnFacts) -> int:
        return len(facts.categories)

    def tensor(self, columns: Sequence[NDArray[Any]]) -> Tensor:
        import numpy as np
        import torch

        (labels,) = columns
        return torch.from_numpy(np.asarray(labels, np.int64))

    def parse(self, facts: ColumnFacts, word: object) -> int:
        """Return a label. An integer is the number of a class, a text its name or, if no name is one, a number."""
        classes, label = facts.categories, -1
        text = composed(word)
        if not isinstance(word, bool) and isinstance(word, Integral):
            label = int(word)
        elif (named := number_of(word, classes)) is not None:
            label = named
        elif text.isdecimal() and not any(name.isdecimal() for name in classes):
            label = int(text)
        if not 0 <= label < len(classes):
            raise RequestError(f"class = {text!r} is not a class of this run; give one of {', '.join(classes)}")
        return label

    def usual(self, facts: ColumnFacts) -> tuple[int, ...]:
        return tuple(range(len(facts.categories)))

    def unknown(self, facts: ColumnFacts) -> int:
        return -1

    def show(self, facts: ColumnFacts, value: int) -> str:
        return facts.categories[value] if value >= 0 else ""


class _NumbersKind(ConditionKind):
    """Base of the kinds whose values are numbers."""

    def captions(self, facts: ColumnFacts, values: Sequence[Any]) -> list[str]:
        return _rounded([self.show(facts, value) for value in values])


class NumberKind(_NumbersKind):
    """A number in the units of the source, float64 [N]; NaN where it is not known."""

    name = "number"
    field = "numbers"

    def check(self, facts: ColumnFacts) -> None:
        check_statistics(facts, 1)

    def facts(self, column: Column) -> ColumnFacts:
        return ColumnFacts(column.name, column.kind, statistics=statistics_of(column.name, column.values[:, None]))

    def inputs(self, facts: ColumnFacts) -> int:
        return NUMBER_INPUTS

    def tensor(self, columns: Sequence[NDArray[Any]]) -> Tensor:
        import numpy as np
        import torch

        return torch.from_numpy(np.stack(columns, 1).astype(np.float32))

    def evidence(self, facts: ColumnFacts) -> str:
        mean, deviation, low, high = facts.statistics
        return f"{low:g} to {high:g}, mean {mean:.4g}, deviation {deviation:.3g}"

    def argument(self, facts: ColumnFacts, values: Tensor) -> Tensor:
        """Return float32 [B]; NaN where it is not known or hidden."""
        return values[:, 0]

    def parse(self, facts: ColumnFacts, word: object) -> float:
        return read_number(facts, word)

    def usual(self, facts: ColumnFacts) -> tuple[float, ...]:
        return (math.nan,)

    def show(self, facts: ColumnFacts, value: float) -> str:
        return f"{value:g}" if value == value else ""

    def cell(self, facts: ColumnFacts, value: float) -> str:
        return repr(float(value)) if value == value else ""

    def concern(self, facts: ColumnFacts, value: float) -> str:
        low, high = facts.statistics[2:]
        outside = value == value and not low <= value <= high
        return f"{facts.name} = {value:g} is outside of the training images, which have {low:g} to {high:g}" * outside


class _CategoriesKind(ConditionKind):
    """Base of the kinds whose facts are names of categories."""

    def check(self, facts: ColumnFacts) -> None:
        names = facts.categories
        if facts.statistics or not 1 <= len(names) <= MOST_CATEGORIES or len({*names}) < len(names):
            raise RequestError(
                f"column {facts.name!r} of kind {facts.kind} needs 1 to {MOST_CATEGORIES:,} categories of different "
                f"names, and has {len(names):,}; group rare ones in the table"
            )

    def inputs(self, facts: ColumnFacts) -> int:
        return len(facts.categories) + 1


class CategoryKind(_CategoriesKind):
    """One of several categories, int64 [N], an index into their names; -1 where it is not known."""

    name = "category"
    field = "categories"

    def tensor(self, columns: Sequence[NDArray[Any]]) -> Tensor:
        import numpy as np
        import torch

        return torch.from_numpy(np.stack(columns, 1).astype(np.int64))

    def evidence(self, facts: ColumnFacts) -> str:
        return f"{len(facts.categories)} values: {some(facts.categories)}"

    def argument(self, facts: ColumnFacts, values: Tensor) -> Tensor:
        """Return int64 [B]; the number of categories where it is not known or hidden, as for an embedding."""
        return values[:, 0].masked_fill(values[:, 0] < 0, len(facts.categories))

    def parse(self, facts: ColumnFacts, word: object) -> int:
        return read_category(facts, word)

    def usual(self, facts: ColumnFacts) -> tuple[int, ...]:
        return (-1,)

    def show(self, facts: ColumnFacts, value: int) -> str:
        return facts.categories[value] if value >= 0 else ""


class SeveralKind(_CategoriesKind):
    """Any of several categories, int8 [N, K]: 1 for each that an image has, else 0; -1 where they are not known."""

    name = "several"
    field = "several"

    def is_one_value(self, facts: ColumnFacts, text: str) -> bool:
        names = split_several(text)
        return bool(names) and all(name in facts.categories for name in names)

    def width(self, facts: ColumnFacts) -> int:
        return len(facts.categories)

    def tensor(self, columns: Sequence[NDArray[Any]]) -> Tensor:
        import numpy as np
        import torch

        values = np.concatenate(columns, 1).astype(np.float32)
        return torch.from_numpy(np.where(values < 0, np.float32("nan"), values))

    def evidence(self, facts: ColumnFacts) -> str:
        return f"any of {len(facts.categories)}: {some(facts.categories)}"

    def parse(self, facts: ColumnFacts, word: object) -> tuple[int, ...]:
        """Return 0 or 1 for each category. A text has names between semicolons: ";" has no names."""
        words = split_several(word) if isinstance(word, str) else [*word] if isinstance(word, Iterable) else [word]
        chosen = {read_category(facts, each) for each in words}
        return tuple(int(i in chosen) for i in range(len(facts.categories)))

    def usual(self, facts: ColumnFacts) -> tuple[tuple[int, ...], ...]:
        return ((-1,) * len(facts.categories),)

    def show(self, facts: ColumnFacts, value: Sequence[int]) -> str:
        names = ";".join(name for name, each in zip(facts.categories, value) if each > 0)
        return names or ";" * (value[0] >= 0)


class VectorKind(_NumbersKind):
    """Numbers that belong together, float64 [N, D]; all of them NaN where they are not known."""

    name = "vector"
    field = "vectors"

    def check(self, facts: ColumnFacts) -> None:
        check_statistics(facts, len(facts.statistics) // 4)

    def facts(self, column: Column) -> ColumnFacts:
        return ColumnFacts(column.name, column.kind, statistics=statistics_of(column.name, column.values))

    def inputs(self, facts: ColumnFacts) -> int:
        return self.width(facts) + 1

    def width(self, facts: ColumnFacts) -> int:
        return len(facts.statistics) // 4

    def tensor(self, columns: Sequence[NDArray[Any]]) -> Tensor:
        import numpy as np
        import torch

        return torch.from_numpy(np.concatenate(columns, 1).astype(np.float32))

    def evidence(self, facts: ColumnFacts) -> str:
        size = self.width(facts)
        low, high = facts.statistics[2 * size : 3 * size], facts.statistics[3 * size :]
        return f"{size} numbers each, {min(low):g} to {max(high):g}"

    def parse(self, facts: ColumnFacts, word: object) -> tuple[float, ...]:
        """Return the numbers of a sequence, or of a text with semicolons between them."""
        words = word.split(";") if isinstance(word, str) else [*word] if isinstance(word, Iterable) else [word]
        size = self.width(facts)
        if len(words) != size:
            raise RequestError(
                f"{facts.name} = {composed(word)[:60]} has {len(words)} numbers, and a vector here has {size}; give "
                f"{facts.name}='{';'.join(['0'] * min(size, 3))}{';…' * (size > 3)}', in Python a list of lists"
            )
        return tuple(read_number(facts, each) for each in words)

    def usual(self, facts: ColumnFacts) -> tuple[tuple[float, ...], ...]:
        return ((math.nan,) * self.width(facts),)

    def show(self, facts: ColumnFacts, value: Sequence[float]) -> str:
        return ";".join(f"{each:g}" for each in value) if value[0] == value[0] else ""

    def cell(self, facts: ColumnFacts, value: Sequence[float]) -> str:
        return ";".join(repr(float(each)) for each in value) if value[0] == value[0] else ""

    def concern(self, facts: ColumnFacts, value: Sequence[float]) -> str:
        size = self.width(facts)
        low, high = facts.statistics[2 * size : 3 * size], facts.statistics[3 * size :]
        for i, each in enumerate(value):
            if each == each and not low[i] <= each <= high[i]:
                has = f"which have {low[i]:g} to {high[i]:g}"
                return f"number {i + 1} of {facts.name} = {each:g} is outside of the training images, {has}"
        return ""


def _rounded(shown: Sequence[str]) -> list[str]:
    """Return numbers, joined by semicolons, with as few digits as tell the texts apart: 3 to 6, or all whole ones."""

    def number(text: str, digits: int) -> str:
        whole = len(f"{abs(float(text)):.0f}")
        return f"{float(text):.{max(digits, min(whole, 6))}g}"

    for digits in (3, 4, 5):
        short = [";".join(number(part, digits) for part in text.split(";")) if text else "" for text in shown]
        if len({*short}) == len({*shown}):
            return short
    return [*shown]


NUMBER_INPUTS = 12
"""Inputs of the layer for each number: itself, waves of it, and whether it is not known."""
MOST_CATEGORIES = 1000
"""Largest number of categories of a column."""
KINDS: dict[str, ConditionKind] = {
    kind.name: kind for kind in (ClassKind(), NumberKind(), CategoryKind(), SeveralKind(), VectorKind())
}


def kind_of(name: str, column: str = "") -> ConditionKind:
    """Return the kind of this name. RequestError if it is unknown."""
    if name not in KINDS:
        of = f"column {column!r}: " if column else ""
        raise RequestError(f"{of}kind {name!r} of a condition is unknown{suggest(name, KINDS)}")
    return KINDS[name]
