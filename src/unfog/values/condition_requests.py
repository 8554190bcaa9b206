"""Requests on conditions by name: a weight of guidance for each, and grids of their values. Imports no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from numbers import Real
from typing import Any, NamedTuple, TypeAlias

from unfog.errors import RequestError
from unfog.values.condition_kinds import ColumnFacts, kind_of
from unfog.values.kinds.text_kind import TextKind

Weights: TypeAlias = tuple[tuple[str, float], ...]
"""(name of a condition, its weight); a condition without an entry has the weight 1."""
GuidanceScale = float | Weights
_LARGEST = 1e30  # as of other settings: float32 has little beyond it


def parse_weights(given: object, setting: str = "guidance") -> Weights:
    """Return the weights of text such as "age=2,stain=1", of a dict, or of pairs. RequestError if they are invalid."""
    pairs: Iterable[object]
    if isinstance(given, str):
        pairs = [tuple(word.split("=")) for word in given.split(",")]
    else:
        pairs = given.items() if isinstance(given, Mapping) else given if isinstance(given, Iterable) else [given]
    found = dict[str, float]()
    for pair in pairs:
        name, weight = pair if isinstance(pair, tuple) and len(pair) == 2 else ("", "")
        name = name.strip() if isinstance(name, str) else ""
        number = _number(weight)
        if not name:
            raise RequestError(
                f"{setting} = {given!r:.60} must be a number, or NAME=NUMBER for each condition: age=2,stain=1"
            )
        if not abs(number) <= _LARGEST:  # also of NaN
            raise RequestError(f"{setting} of {name[:60]} = {weight!r:.60} must be a finite number; 1 to 3 is usual")
        if name in found:
            raise RequestError(f"{setting} of {name[:60]} is given twice; give one weight")
        found[name] = number
    if not found:
        raise RequestError(f"{setting} names no condition; give one number for all: 2")
    return tuple(found.items())


def _number(weight: object) -> float:
    if type(weight) is bool or not isinstance(weight, str | Real):
        return math.nan
    try:
        return float(weight)
    except (ValueError, OverflowError):
        return math.nan


def spell_guidance(scale: GuidanceScale) -> str:
    """Return a scale as `--guidance` takes it: "2", or "age=2,stain=1"."""
    if isinstance(scale, tuple):
        return ",".join(f"{name}={weight:g}" for name, weight in scale)
    return f"{scale:g}"


def in_turn(weights: Weights) -> list[tuple[float, list[str]]]:
    """Return (weight, names) in the order in which the network gets conditions, after those of weight 1.

    Weights above 1 come first, from weak to strong, then those below 1, from strong to weak, and 0 last. Where two
    weights cross above 1, or below, their conditions have equal weights, and their order has no effect.
    """

    def place(weight: float) -> tuple[int, float]:
        return (0, weight) if weight > 1 else (2, 0.0) if weight == 0 else (1, -weight)

    told = sorted((place(weight), weight, name) for name, weight in weights if weight != 1)
    return [(weight, [name for *_, name in group]) for weight, group in groupby(told, lambda each: each[1])]


def passes(scale: GuidanceScale) -> int:
    """Return the number of estimates of a guided call: the outputs of the network at one noise level."""
    if isinstance(scale, tuple):
        return 1 + sum(weight != 0 for weight, _ in in_turn(scale))
    return 1 if scale == 1 else 2


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
        """Number of cells of the grid, each of one sample."""
        return len(self.across) * max(1, len(self.down))


def parse_grid(given: Mapping[str, object] | Iterable[str]) -> ConditionGrid:
    """Return the grid of a dict, or of words such as "age=20..80". RequestError if it is not a grid."""
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
    if not isinstance(asked, str):
        return list(asked) if isinstance(asked, Iterable) else [asked]
    if facts.kind == TextKind.name:  # a caption may have commas, and any other word
        return [text.strip() for text in asked.split(";")]
    names = facts.categories
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
    between = [((count - 1 - i) * low + i * high) / (count - 1) for i in range(1, count - 1)]
    return [low, *between, high]  # the ends exactly, as a value beyond the training images is warned of
