"""Helpers of the kinds of conditions: words of people to values, and statistics of columns; no torch."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

from unfog.errors import RequestError
from unfog.text import suggest, valid_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

SHOWN = 5
"""Categories of a column, or words, in a message."""
MOST_NUMBERS = 512
"""Largest number of numbers of a vector."""


class _Facts(Protocol):
    """The parts of `condition_kinds.ColumnFacts`, whose module imports this one."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def categories(self) -> tuple[str, ...]: ...
    @property
    def statistics(self) -> tuple[float, ...]: ...


def split_several(text: str) -> list[str]:
    """Return the names of "red;round", without those that are empty."""
    return [name.strip() for name in text.split(";") if name.strip()]


def composed(word: object) -> str:
    """Return a word as text in Unicode NFC."""
    # A word of a command line in a locale without UTF-8 is spelled as the name of a folder is.
    return unicodedata.normalize("NFC", valid_text(str(word)))


def number_of(word: object, names: Sequence[str]) -> int | None:
    """Return the number of the category of this name; None if it is unknown."""
    if str(word) in names:
        return names.index(str(word))
    spelled = [unicodedata.normalize("NFC", name) for name in names]
    return spelled.index(composed(word)) if composed(word) in spelled else None


def read_category(facts: _Facts, word: object) -> int:
    """Return the number of the category of this name. RequestError if it is unknown."""
    found = number_of(word, facts.categories)
    if found is None:
        text, names = composed(word), facts.categories
        near = suggest(text, names)
        hint = near if "mean" in near else f"; give one of {some(names)}"
        raise RequestError(f"{facts.name} = {text[:60]!r} is not a value of this column{hint}")
    return found


def read_number(facts: _Facts, word: object) -> float:
    """Return a word as a number. RequestError if it is not a number, or too large."""
    try:
        number = math.nan if isinstance(word, bool) else float(cast(Any, word))
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) < 1e30:  # also of NaN; float32 ends at 3e38
        size = len(facts.statistics) // 4
        low, high = min(facts.statistics[2 * size : 3 * size]), max(facts.statistics[3 * size :])
        raise RequestError(
            f"{facts.name} = {composed(word)[:60]!r} is not a number; it is {low:g} to {high:g} in the training images"
        )
    return number


def some(names: Sequence[str]) -> str:
    """Return the first names, with commas between them."""
    return ", ".join(names[:SHOWN]) + ", …" * (len(names) > SHOWN)


def statistics_of(name: str, values: NDArray[Any]) -> tuple[float, ...]:
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


def check_statistics(facts: _Facts, size: int) -> None:
    """Raise RequestError unless facts have the statistics of so many numbers, and no categories."""
    given = facts.statistics
    right = 1 <= size <= MOST_NUMBERS and len(given) == 4 * size and all(map(math.isfinite, given))
    if facts.categories or not right or not all(each > 0 for each in given[size : 2 * size]):
        raise RequestError(
            f"column {facts.name!r} of kind {facts.kind} needs 1 to {MOST_NUMBERS} numbers, and the mean, deviation, "
            "least and largest of each; start a new run, which finds them"
        )
