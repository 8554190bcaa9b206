"""`ConditionGrid`: conditions whose values are drawn against each other, such as age=20..80 stain=all. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from unfog.errors import RequestError
from unfog.values.condition_kinds import ColumnFacts, kind_of

MOST_CELLS = 1000
"""Most cells of a grid of conditions."""
_COUNT = 7  # values of a range without a count: 20..80 is 20, 30, ..., 80
_RANGE = re.compile(r"([^:]+?)\.\.([^:]+?)(?::([0-9]{1,4}))?")


@dataclass(frozen=True)
class ConditionGrid:
    """One or two conditions as they were asked for, each with its values: a text or a sequence."""

    axes: tuple[tuple[str, object], ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.axes) <= 2:
            raise RequestError(
                f"grid has {len(self.axes)} conditions, and a picture has room for one or two; give others one value: "
                "--given NAME=VALUE"
            )


class CellNames(NamedTuple):
    """Captions of a grid of conditions: of its columns, of its rows (() for one), and of what all cells share."""

    across: tuple[str, ...]
    down: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()

    @property
    def cells(self) -> int:
        """Number of samples."""
        return len(self.across) * max(1, len(self.down))


def parse_grid(given: Mapping[str, object] | Iterable[str]) -> ConditionGrid:
    """Return the grid of a dict, or of words such as "age=20..80". RequestError if it is none."""
    if isinstance(given, Mapping):
        return ConditionGrid(tuple((str(name), values) for name, values in given.items()))
    axes = dict[str, object]()
    for word in given:
        name, equals, text = word.partition("=")
        if not (name and equals and text):
            raise RequestError(f"grid {word!r:.60} must be NAME=LOW..HIGH, NAME=VALUE,VALUE or NAME=all")
        if name in axes:
            raise RequestError(f"grid {name!r:.60} comes twice; separate its values by commas: {name}=VALUE,VALUE")
        axes[name] = text
    return ConditionGrid(tuple(axes.items()))


def axis_values(facts: ColumnFacts, asked: object) -> tuple[Any, ...]:
    """Return the values of a condition along a grid: those of "20..80:7", "all", "HE,PAS", or of a sequence.

    "all" is all categories, or of a number the range of the training images. RequestError if two are equal.
    """
    kind, words = kind_of(facts.kind), _words(facts, asked)
    values = tuple(kind.parse(facts, word) for word in words)
    shown = [kind.show(facts, value) for value in values]
    if not shown:
        raise RequestError(f"grid {facts.name} has no value; give {facts.name}=all")
    if twice := next((one for one in shown if shown.count(one) > 1), ""):
        raise RequestError(f"grid {facts.name} has {twice[:60]} twice; give each value once")
    return values


def _words(facts: ColumnFacts, asked: object) -> Sequence[object]:
    names = facts.categories
    if not isinstance(asked, str):
        return list(asked) if isinstance(asked, Iterable) else [asked]
    if asked in names:
        return [asked]
    if asked == "all":
        if names:
            return names
        if facts.kind == "number":
            _, _, low, high = facts.statistics
            return _evenly(low, high, _COUNT)
        raise RequestError(f"grid {facts.name}=all needs categories or numbers; give the values: {facts.name}=A,B")
    if (ends := _RANGE.fullmatch(asked)) is not None and not names:
        if facts.kind != "number":
            raise RequestError(
                f"grid {facts.name} = {asked[:60]} is a range, and only a number has one; give its values"
            )
        low, high = (kind_of(facts.kind).parse(facts, end) for end in ends.groups()[:2])
        count = int(ends[3] or _COUNT)
        if not 2 <= count <= MOST_CELLS or low == high:
            raise RequestError(f"grid {facts.name} = {asked[:60]} must have two ends and 2 to {MOST_CELLS:,} values")
        return _evenly(low, high, count)
    return asked.split(",")


def _evenly(low: float, high: float, count: int) -> list[float]:
    return [((count - 1 - i) * low + i * high) / (count - 1) for i in range(count)]
