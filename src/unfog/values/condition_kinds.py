"""Kinds of conditions: how a column becomes a tensor of `Conditions`, and what people may ask for.

A new kind is a class here and in `KINDS`, a field of `Conditions`, and a layer in `models.layers`. Imports no torch.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any, ClassVar

from unfog.errors import RequestError
from unfog.text import suggest, valid_text
from unfog.values.columns import CLASS, Column, name_problem

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from unfog.values.conditions import Conditions


_SHOWN = 5  # categories of a column in a message


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
    def identity(self) -> tuple[str, str, tuple[str, ...]]:
        """All but the statistics: equal for one column of two sets of images."""
        return self.name, self.kind, self.categories


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

    def tensor(self, columns: Sequence[NDArray[Any]]) -> Tensor:
        """Return the condition [B, …] of images with these values, an array [B, …] for each column, on the CPU.

        Computes with NumPy alone.
        """
        raise NotImplementedError

    def parse(self, facts: ColumnFacts, word: object) -> Any:
        """Return the value of a word of a command line, or of a Python value. RequestError if it is none."""
        raise NotImplementedError

    def usual(self, facts: ColumnFacts) -> tuple[Any, ...]:
        """Return the values that samples cycle through by default, such as all classes."""
        raise NotImplementedError

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
        # A word of a command line in a locale without UTF-8 is spelled as the name of a folder is.
        text = unicodedata.normalize("NFC", valid_text(str(word)))
        if not isinstance(word, bool) and isinstance(word, Integral):
            label = int(word)
        elif str(word) in classes:
            label = classes.index(str(word))
        elif text in (composed := [unicodedata.normalize("NFC", name) for name in classes]):
            label = composed.index(text)
        elif text.isdecimal() and not any(name.isdecimal() for name in classes):
            label = int(text)
        if not 0 <= label < len(classes):
            raise RequestError(f"class = {text!r} is not a class of this run; give one of {', '.join(classes)}")
        return label

    def usual(self, facts: ColumnFacts) -> tuple[int, ...]:
        return tuple(range(len(facts.categories)))

    def show(self, facts: ColumnFacts, value: int) -> str:
        return facts.categories[value]


KINDS: dict[str, ConditionKind] = {kind.name: kind for kind in (ClassKind(),)}


def kind_of(name: str, column: str = "") -> ConditionKind:
    """Return the kind of this name. RequestError if there is none."""
    if name not in KINDS:
        of = f"column {column!r}: " if column else ""
        raise RequestError(f"{of}kind {name!r} of a condition is unknown{suggest(name, KINDS)}")
    return KINDS[name]


def conditions_of(columns: Iterable[Column]) -> Conditions:
    """Return the conditions of B images from their columns, with values [B, …], on the CPU."""
    from unfog.values.conditions import Conditions

    parts: dict[str, list[NDArray[Any]]] = {}
    for column in sorted(columns, key=lambda each: each.name):
        parts.setdefault(column.kind, []).append(column.values)
    kinds = ((kind_of(name), values) for name, values in parts.items())
    return Conditions(**{kind.field: kind.tensor(values) for kind, values in kinds})
