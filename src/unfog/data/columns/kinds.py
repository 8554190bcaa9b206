"""The kind of a column by its cells: number, category, several or vector; or why it cannot be a condition."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unfog.data.sources.base import ImageError
from unfog.data.sources.image_files import SUFFIXES
from unfog.data.sources.label_tables import normalize_label
from unfog.errors import RequestError
from unfog.text import encoding_of_mark, sanitize
from unfog.values.columns import Column
from unfog.values.condition_kinds import MOST_CATEGORIES
from unfog.values.kinds.condition_words import MOST_NUMBERS, split_several

_EMPTY = frozenset(["", "na", "n/a", "nan", "null"])
# Texts of which fewer than two images have each cannot be categories, from so many different ones on.
_UNIQUE, _FEW = 0.5, 8
_LARGEST = 1e30  # float32 ends at 3e38, and squares of deviations must fit float64
_Cell = float | str | tuple[Any, ...] | None


def column_of(name: str, cells: Sequence[Any], names: Sequence[str], kind: str = "") -> Column:
    """Return the column of a cell for each image; None, NaN and texts such as "" and "NA" are not known.

    Args:
        name: of the column.
        cells: texts of a table, or values of JSON or of an array.
        names: of the images.
        kind: to read the cells as; "" to find it.

    Raises:
        RequestError: the cells are of mixed types, all equal, unknown, nearly unique texts, or names of files.
    """
    values = [cell_value(cell) for cell in cells]
    known = [value for value in values if value is not None]
    if not known:
        raise _refused(name, "is empty for all images")
    if any(isinstance(value, tuple) and any(isinstance(each, list | tuple) for each in value) for value in known):
        raise RequestError(
            f"the column {sanitize(name)} has a list of lists for an image, and a condition is one value or one list; "
            f"an image for each image is a source of its own, such as a .npy file or a folder: --condition "
            f'{sanitize(name)}=FILE, from Python condition="{sanitize(name)}=FILE"'
        )
    kind = kind or _find_kind(name, known)
    if kind not in _MAKERS:
        raise RequestError(
            f"condition = {sanitize(name)}:{kind}: {sanitize(name)} has values, and no images; give "
            f"{sanitize(name)}=FOLDER:{kind} with the images, or omit :{kind}"
        )
    return _MAKERS[kind](name, values, names)


def cell_value(cell: Any) -> _Cell:
    """Return a cell of a table, or of JSON or a text file, as a number, a text or a list; None if it is not known."""
    if isinstance(cell, ImageError):  # of a text file
        return None
    if isinstance(cell, bytes):
        cell = cell.decode(encoding_of_mark(cell) or "utf-8", "replace")
    if isinstance(cell, bool):
        return str(cell).lower()
    if isinstance(cell, int | float | Decimal):
        return None if math.isnan(cell) else _float(cell)
    if isinstance(cell, list | tuple):
        return tuple(cell)
    if not isinstance(cell, str):
        # Such as the dates and the dictionaries of a parquet file.
        return None if cell is None else json.dumps(cell, sort_keys=True, default=str)
    text = cell.strip()
    if text.startswith("[") and text.endswith("]"):
        try:
            return tuple(json.loads(text))
        except (ValueError, RecursionError):
            return text
    return None if text.casefold() in _EMPTY else text


def _float(value: float | Decimal) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf  # which is refused, with the name of its image


def _number(value: _Cell) -> float | None:
    """Return a value as a number; None if it is not a number."""
    if isinstance(value, tuple):
        return None
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return None if isinstance(value, str) and "_" in value else number


def _find_kind(name: str, known: Sequence[_Cell]) -> str:
    lists = [value for value in known if isinstance(value, tuple)]
    if lists and len(lists) < len(known):
        other = next(value for value in known if not isinstance(value, tuple))
        raise _mixed(name, lists[0], other, "make all of them lists")
    if lists:
        return "vector" if all(_is_vector(value) for value in lists) and any(lists) else "several"
    if any(isinstance(value, str) and ";" in value for value in known):
        return "vector" if all(_is_vector(_parts(value)) for value in known) else "several"
    numbers = [_number(value) for value in known]
    if None not in numbers:
        # Two whole numbers are usually no and yes.
        few = len({*numbers}) == 2 and all(number is not None and number.is_integer() for number in numbers)
        return "category" if few else "number"
    if any(number is not None for number in numbers):
        text = next(value for value, number in zip(known, numbers) if number is None)
        one = next(value for value, number in zip(known, numbers) if number is not None)
        raise _mixed(name, one, text, f"empty the cells that are not known, or take all for names: {name}:category")
    return "category"


def _parts(value: _Cell) -> tuple[Any, ...]:
    """Return the values of a list, or of a text with semicolons between them."""
    if isinstance(value, tuple):
        return value
    return tuple(split_several(value)) if isinstance(value, str) else (value,)


def _is_vector(values: Sequence[Any]) -> bool:
    return all(not isinstance(each, bool) and _number(each) is not None for each in values)


def _numbers(name: str, values: Sequence[_Cell], names: Sequence[str]) -> Column:
    made = np.full(len(values), np.nan)
    for i, value in enumerate(values):
        if value is not None:
            made[i] = _finite(name, value, names[i])
    if len(np.unique(made[np.isfinite(made)])) < 2:
        raise _refused(name, f"is {_shown(next(each for each in values if each is not None))} for all images")
    return Column(name, "number", made)


def _finite(name: str, value: _Cell, image: str) -> float:
    number = _number(value)
    if number is None or not abs(number) < _LARGEST:
        why = "is not a number" if number is None else "is too large"
        raise RequestError(
            f"the column {sanitize(name)} has {_shown(value)} for {sanitize(image)}, which {why}; correct it, or empty "
            "the cell"
        )
    return number


def _vectors(name: str, values: Sequence[_Cell], names: Sequence[str]) -> Column:
    parts = [None if value is None else _parts(value) for value in values]
    sizes = Counter(len(each) for each in parts if each is not None)
    size = sizes.most_common(1)[0][0]
    if len(sizes) > 1:
        i = next(i for i, each in enumerate(parts) if each is not None and len(each) != size)
        raise RequestError(
            f"the column {sanitize(name)} has {len(parts[i] or ())} numbers for {sanitize(names[i])}, and {size} for "
            "most images; a vector has the same number for each"
        )
    if not 1 <= size <= MOST_NUMBERS:
        raise RequestError(
            f"the column {sanitize(name)} has {size:,} numbers for each image, and a vector has 1 to {MOST_NUMBERS}; "
            "give fewer, such as its principal components"
        )
    made = np.full((len(parts), size), np.nan)
    for i, each in enumerate(parts):
        if each is not None:
            made[i] = [_finite(name, value, names[i]) for value in each]
    known = made[np.isfinite(made).all(1)]
    if (known == known[0]).all():
        raise _refused(name, "is the same vector for all images")
    return Column(name, "vector", made)


def _names_of(name: str, value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = normalize_label(value) or (f"{value:g}" if isinstance(value, float) else "")
    if not text:
        raise _refused(name, f"has {_shown(value)}, which cannot be the name of a category")
    return sanitize(text)


def _categories(name: str, values: Sequence[_Cell], names: Sequence[str]) -> Column:
    words = [None if value is None else _names_of(name, value) for value in values]
    counts = Counter(word for word in words if word is not None)
    _check_names(name, counts, sum(counts.values()), words, names)
    if len(counts) < 2:
        raise _refused(name, f"is {_shown(next(iter(counts)))} for all images")
    categories = _sorted(counts)
    number = {word: i for i, word in enumerate(categories)}
    made = np.array([-1 if word is None else number[word] for word in words], np.int64)
    return Column(name, "category", made, categories)


def _several(name: str, values: Sequence[_Cell], names: Sequence[str]) -> Column:
    words = [None if value is None else [_names_of(name, each) for each in _parts(value)] for value in values]
    known = [each for each in words if each is not None]
    counts = Counter(word for each in known for word in {*each})
    if not counts:
        raise _refused(name, "is an empty list for all images")
    _check_names(name, counts, len(known), [each[0] if each else None for each in words if each is not None], names)
    if len({frozenset(each) for each in known}) < 2:
        raise _refused(name, f"is {_shown(';'.join(known[0]))} for all images")
    categories = _sorted(counts)
    number = {word: i for i, word in enumerate(categories)}
    made: NDArray[np.int8] = np.zeros((len(words), len(categories)), np.int8)
    for i, each in enumerate(words):
        if each is None:
            made[i] = -1
        else:
            made[i, [number[word] for word in each]] = 1
    return Column(name, "several", made, categories)


def _check_names(
    name: str, counts: Counter[str], known: int, words: Sequence[str | None], names: Sequence[str]
) -> None:
    """Raise RequestError if these cannot be categories: names of files, or too many different ones."""
    files = sum(word is not None and word.lower().endswith(tuple(SUFFIXES)) for word in words)
    stems = {each.rpartition("/")[2].rpartition(".")[0] for each in names}
    if 2 * files > known or (len(counts) > _FEW and 2 * len(stems & counts.keys()) > len(counts)):
        raise _refused(name, f"holds names of files, such as {_shown(next(iter(counts)))}")
    if len(counts) > max(_FEW, _UNIQUE * known) or len(counts) > MOST_CATEGORIES:
        few = "most of which no two images share" if len(counts) > _UNIQUE * known else f"over {MOST_CATEGORIES:,}"
        raise RequestError(
            f"the column {sanitize(name)} has {len(counts):,} different values for {known:,} images, {few}, and cannot "
            f"be a category; if these are captions, take {sanitize(name)}:text, else group them"
        )


def _sorted(counts: Counter[str]) -> tuple[str, ...]:
    """Return names in the order of numbers if all are numbers ("2" before "10"), else of texts."""
    numbers = all(_number(word) is not None for word in counts)
    return tuple(sorted(counts, key=lambda word: (float(word) if numbers else 0.0, word)))


def _refused(name: str, why: str) -> RequestError:
    return RequestError(f"the column {sanitize(name)} {why}: it cannot be a condition; leave it out of data.condition")


def _mixed(name: str, one: object, other: object, remedy: str) -> RequestError:
    return RequestError(
        f"the column {sanitize(name)} mixes values of different types, {_shown(one)} and {_shown(other)}; {remedy}"
    )


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return repr(sanitize(str(list(value) if isinstance(value, tuple) else value)[:40]))


_MAKERS: dict[str, Callable[[str, Sequence[_Cell], Sequence[str]], Column]] = {
    "number": _numbers,
    "category": _categories,
    "several": _several,
    "vector": _vectors,
}
