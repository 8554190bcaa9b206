"""Kinds of conditions: from a column to a tensor of `Conditions`, and from what people ask for to a value; no torch.

A new kind is a class here and in `KINDS`, a field of `Conditions`, and a part of `models.condition_layers`.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, cast

from unfog.errors import RequestError
from unfog.text import suggest, valid_text
from unfog.values.columns import CLASS, Column, name_problem

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

_SHOWN = 5  # categories of a column in a message
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
        of = f" of {', '.join(self.categories[:_SHOWN])}{', ...' * (len(self.categories) > _SHOWN)}"
        return f"{self.name} ({self.kind}{of * bool(self.categories)})"

    @property
    def identity(self) -> tuple[str, str, tuple[str, ...], int]:
        """All but the values of the statistics: equal for one column of two sets of images."""
        return self.name, self.kind, self.categories, len(self.statistics)


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
        """Return whether each of the values [N, …] is known, bool [N]."""
        import numpy as np

        return np.ones(len(values), bool)

    def evidence(self, facts: ColumnFacts) -> str:
        """Describe the values for people, such as "20 to 89"."""
        return f"{len(facts.categories)} of them"

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
        """Return the value of a word of a command line, or of a Python value. RequestError if it is none."""
        raise NotImplementedError

    def usual(self, facts: ColumnFacts) -> tuple[Any, ...]:
        """Return the values that samples cycle through by default, such as all classes."""
        raise NotImplementedError

    def unknown(self, facts: ColumnFacts) -> Any:
        """Return the value of an image whose value is not known."""
        (value,) = self.usual(facts)
        return value

    def show(self, facts: ColumnFacts, value: Any) -> str:
        """Return a value as text, for people and names of files; "" if it is not known."""
        return f"{value}"


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
        text = _composed(word)
        if not isinstance(word, bool) and isinstance(word, Integral):
            label = int(word)
        elif (named := _number_of(word, classes)) is not None:
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


class NumberKind(ConditionKind):
    """A number in the units of the source, float64 [N]; NaN where it is not known."""

    name = "number"
    field = "numbers"

    def check(self, facts: ColumnFacts) -> None:
        _check_statistics(facts, 1)

    def facts(self, column: Column) -> ColumnFacts:
        return ColumnFacts(column.name, column.kind, statistics=_statistics(column.name, column.values[:, None]))

    def inputs(self, facts: ColumnFacts) -> int:
        return NUMBER_INPUTS

    def tensor(self, columns: Sequence[NDArray[Any]]) -> Tensor:
        import numpy as np
        import torch

        return torch.from_numpy(np.stack(columns, 1).astype(np.float32))

    def known(self, values: NDArray[Any]) -> NDArray[np.bool_]:
        import numpy as np

        return np.asarray(np.isfinite(values))

    def evidence(self, facts: ColumnFacts) -> str:
        mean, deviation, low, high = facts.statistics
        return f"{low:g} to {high:g}, mean {mean:.4g}, deviation {deviation:.3g}"

    def argument(self, facts: ColumnFacts, values: Tensor) -> Tensor:
        """Return float32 [B]; NaN where it is not known or hidden."""
        return values[:, 0]

    def parse(self, facts: ColumnFacts, word: object) -> float:
        return _number(facts, word)

    def usual(self, facts: ColumnFacts) -> tuple[float, ...]:
        return (math.nan,)

    def show(self, facts: ColumnFacts, value: float) -> str:
        return f"{value:g}" if value == value else ""

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

    def known(self, values: NDArray[Any]) -> NDArray[np.bool_]:
        import numpy as np

        return np.asarray(values >= 0)

    def evidence(self, facts: ColumnFacts) -> str:
        return f"{len(facts.categories)} values: {_some(facts.categories)}"

    def argument(self, facts: ColumnFacts, values: Tensor) -> Tensor:
        """Return int64 [B]; the number of categories where it is not known or hidden, as for an embedding."""
        return values[:, 0].masked_fill(values[:, 0] < 0, len(facts.categories))

    def parse(self, facts: ColumnFacts, word: object) -> int:
        return _category(facts, word)

    def usual(self, facts: ColumnFacts) -> tuple[int, ...]:
        return (-1,)

    def show(self, facts: ColumnFacts, value: int) -> str:
        return facts.categories[value] if value >= 0 else ""


class SeveralKind(_CategoriesKind):
    """Any of several categories, int8 [N, K]: 1 for each that an image has, else 0; -1 where they are not known."""

    name = "several"
    field = "several"

    def width(self, facts: ColumnFacts) -> int:
        return len(facts.categories)

    def tensor(self, columns: Sequence[NDArray[Any]]) -> Tensor:
        import numpy as np
        import torch

        values = np.concatenate(columns, 1).astype(np.float32)
        return torch.from_numpy(np.where(values < 0, np.float32("nan"), values))

    def known(self, values: NDArray[Any]) -> NDArray[np.bool_]:
        import numpy as np

        return np.asarray(values[:, 0] >= 0)

    def evidence(self, facts: ColumnFacts) -> str:
        return f"any of {len(facts.categories)}: {_some(facts.categories)}"

    def parse(self, facts: ColumnFacts, word: object) -> tuple[int, ...]:
        """Return 0 or 1 for each category. A text has names between semicolons: ";" is none of them."""
        words = split_several(word) if isinstance(word, str) else [*word] if isinstance(word, Iterable) else [word]
        chosen = {_category(facts, each) for each in words}
        return tuple(int(i in chosen) for i in range(len(facts.categories)))

    def usual(self, facts: ColumnFacts) -> tuple[tuple[int, ...], ...]:
        return ((-1,) * len(facts.categories),)

    def show(self, facts: ColumnFacts, value: Sequence[int]) -> str:
        names = ";".join(name for name, each in zip(facts.categories, value) if each > 0)
        return names or ";" * (value[0] >= 0)


class VectorKind(ConditionKind):
    """Numbers that belong together, float64 [N, D]; all of them NaN where they are not known."""

    name = "vector"
    field = "vectors"

    def check(self, facts: ColumnFacts) -> None:
        _check_statistics(facts, len(facts.statistics) // 4)

    def facts(self, column: Column) -> ColumnFacts:
        return ColumnFacts(column.name, column.kind, statistics=_statistics(column.name, column.values))

    def inputs(self, facts: ColumnFacts) -> int:
        return self.width(facts) + 1

    def width(self, facts: ColumnFacts) -> int:
        return len(facts.statistics) // 4

    def tensor(self, columns: Sequence[NDArray[Any]]) -> Tensor:
        import numpy as np
        import torch

        return torch.from_numpy(np.concatenate(columns, 1).astype(np.float32))

    def known(self, values: NDArray[Any]) -> NDArray[np.bool_]:
        import numpy as np

        return np.asarray(np.isfinite(values).all(1))

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
                f"{facts.name} = {_composed(word)[:60]} has {len(words)} numbers, and a vector here has {size}; give "
                f"{facts.name}='{';'.join(['0'] * min(size, 3))}{';…' * (size > 3)}', in Python a list of lists"
            )
        return tuple(_number(facts, each) for each in words)

    def usual(self, facts: ColumnFacts) -> tuple[tuple[float, ...], ...]:
        return ((math.nan,) * self.width(facts),)

    def show(self, facts: ColumnFacts, value: Sequence[float]) -> str:
        return ";".join(f"{each:g}" for each in value) if value[0] == value[0] else ""

    def concern(self, facts: ColumnFacts, value: Sequence[float]) -> str:
        size = self.width(facts)
        low, high = facts.statistics[2 * size : 3 * size], facts.statistics[3 * size :]
        for i, each in enumerate(value):
            if each == each and not low[i] <= each <= high[i]:
                has = f"which have {low[i]:g} to {high[i]:g}"
                return f"number {i + 1} of {facts.name} = {each:g} is outside of the training images, {has}"
        return ""


NUMBER_INPUTS = 12
"""Inputs of the layer for each number: itself, waves of it, and whether it is not known."""
MOST_CATEGORIES, MOST_NUMBERS = 1000, 512
"""Largest number of categories of a column, and of numbers of a vector."""
KINDS: dict[str, ConditionKind] = {
    kind.name: kind for kind in (ClassKind(), NumberKind(), CategoryKind(), SeveralKind(), VectorKind())
}


def kind_of(name: str, column: str = "") -> ConditionKind:
    """Return the kind of this name. RequestError if there is none."""
    if name not in KINDS:
        of = f"column {column!r}: " if column else ""
        raise RequestError(f"{of}kind {name!r} of a condition is unknown{suggest(name, KINDS)}")
    return KINDS[name]


def split_several(text: str) -> list[str]:
    """Return the names of "red;round", without those that are empty."""
    return [name.strip() for name in text.split(";") if name.strip()]


def _composed(word: object) -> str:
    # A word of a command line in a locale without UTF-8 is spelled as the name of a folder is.
    return unicodedata.normalize("NFC", valid_text(str(word)))


def _number_of(word: object, names: Sequence[str]) -> int | None:
    """Return the number of the category of this name; None if there is none."""
    if str(word) in names:
        return names.index(str(word))
    composed = [unicodedata.normalize("NFC", name) for name in names]
    return composed.index(_composed(word)) if _composed(word) in composed else None


def _category(facts: ColumnFacts, word: object) -> int:
    found = _number_of(word, facts.categories)
    if found is None:
        text, names = _composed(word), facts.categories
        near = suggest(text, names)
        hint = near if "mean" in near else f"; give one of {_some(names)}"
        raise RequestError(f"{facts.name} = {text[:60]!r} is not a value of this column{hint}")
    return found


def _number(facts: ColumnFacts, word: object) -> float:
    try:
        number = math.nan if isinstance(word, bool) else float(cast(Any, word))
    except (TypeError, ValueError):
        number = math.nan
    if not abs(number) < 1e30:  # also of NaN; float32 ends at 3e38
        size = len(facts.statistics) // 4
        low, high = min(facts.statistics[2 * size : 3 * size]), max(facts.statistics[3 * size :])
        raise RequestError(
            f"{facts.name} = {_composed(word)[:60]!r} is not a number; it is {low:g} to {high:g} in the training images"
        )
    return number


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + ", …" * (len(names) > _SHOWN)


def _statistics(name: str, values: NDArray[Any]) -> tuple[float, ...]:
    """Return the means, deviations, least and largest of values [N, D] that are known, each [D], one after the other.

    A number of a vector that never differs has the deviation 1. RequestError if all numbers are equal or unknown.
    """
    import numpy as np

    values = np.asarray(values, np.float64)
    known = values[np.isfinite(values).all(1)]
    if not len(known) or (deviations := known.std(0)).max() <= 1e-12 * max(1e-300, np.abs(known).max()):
        raise RequestError(f"column {name!r} has one value in all training images, or none; leave it out")
    deviations = np.where(deviations > 0, deviations, 1.0)
    return tuple(map(float, np.concatenate([known.mean(0), deviations, known.min(0), known.max(0)])))


def _check_statistics(facts: ColumnFacts, size: int) -> None:
    given = facts.statistics
    right = 1 <= size <= MOST_NUMBERS and len(given) == 4 * size and all(map(math.isfinite, given))
    if facts.categories or not right or not all(each > 0 for each in given[size : 2 * size]):
        raise RequestError(
            f"column {facts.name!r} of kind {facts.kind} needs 1 to {MOST_NUMBERS} numbers, and the mean, deviation, "
            "least and largest of each; start a new run, which finds them"
        )
