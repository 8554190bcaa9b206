"""Conditions in an export: from the values that a person asks for to numbers for the network, in plain Python.

A description of conditions has for each column its `name` and `kind`, the names of its `categories`, and `statistics`:
mean, deviation, least and largest value of a number; of a vector the means of its numbers, their deviations, and so on.
"""

import math
import unicodedata
import warnings


def read(conditions, given, count):
    """Return a list for each condition, with its values for `count` images: float, or int for a category.

    Args:
        conditions: their descriptions, in order.
        given: values by name, in the units of the source: a number, the name of a category, names of several
            categories as "red;round" or [["red", "round"]], a vector as [[0.1, 0.2]]. Images cycle through a list.
            None, NaN and an omitted condition leave it open.
        count: number of images.

    ValueError if a name or value is unknown. A value beyond those of the training images is used, with a warning.
    """
    given = dict(given or {})
    known = [one["name"] for one in conditions]
    for name in given:
        if name not in known:
            raise ValueError(f"{name!r} is not a condition of this model, which has {', '.join(known) or 'none'}")
    columns = []
    for one in conditions:
        words = _SPLIT.get(one["kind"], _each)(one, given.get(one["name"]))
        values = [_READERS[one["kind"]](one, word) for word in words]
        columns.append(_JOIN.get(one["kind"], list)([values[i % len(values)] for i in range(count)]))
    return columns


def _each(one, value):
    """Return the values that images cycle through; None for NaN."""
    return [None if word != word else word for word in _words(value)]


def _words(value):
    """Return the values of a sequence, or the one value."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, str) or not hasattr(value, "__iter__"):
        return [value]
    return [each.tolist() if hasattr(each, "tolist") else each for each in value] or [None]


def _number(one, word, index=0):
    """Return a number, or the one at `index` of a vector; NaN if it is open. ValueError if it is not a number."""
    size = len(one["statistics"]) // 4
    low, high = (one["statistics"][end * size + index] for end in (2, 3))
    name = one["name"] if size == 1 else f"number {index + 1} of {one['name']}"
    try:
        number = math.nan if word is None else math.inf if isinstance(word, bool) else float(word)
    except (TypeError, ValueError, OverflowError):
        number = math.inf
    if abs(number) >= 1e30:  # float32 ends at 3e38
        said = f"{name} = {str(word)[:60]!r} is not a number"
        raise ValueError(f"{said}; it is {low:g} to {high:g} in the training images")
    if number < low or number > high:
        said = f"{name} = {number:g} is outside of the training images, which have {low:g} to {high:g}"
        warnings.warn(said, stacklevel=4)
    return number


def _category(one, word):
    """Return the number of a category, and -1 for None. ValueError if it is unknown."""
    if word is None:
        return -1
    names = [unicodedata.normalize("NFC", name) for name in one["categories"]]
    text = unicodedata.normalize("NFC", str(word))
    if text not in names:
        shown = ", ".join(names[:20]) + ", …" * (len(names) > 20)
        raise ValueError(f"{one['name']} = {text[:60]!r} is not a value of this condition; give one of {shown}")
    return names.index(text)


def _several(one, word):
    """Return 1.0 for each category that is named, else 0.0; NaN for each if it is open. ";" names none of them."""
    count = len(one["categories"])
    if word is None:
        return [math.nan] * count
    words = [name.strip() for name in word.split(";")] if isinstance(word, str) else _words(word)
    chosen = {_category(one, each) for each in words if each not in ("", None)}
    return [float(i in chosen) for i in range(count)]


def _vector(one, word):
    """Return the numbers of a vector, from a sequence or a text with semicolons; NaN for each if it is open."""
    size = len(one["statistics"]) // 4
    if word is None:
        return [math.nan] * size
    words = word.split(";") if isinstance(word, str) else _words(word)
    if len(words) != size:
        raise ValueError(
            f"{one['name']} = {str(word)[:60]} has {len(words)} numbers, and a vector here has {size}: for all images "
            f"give a list with one list, [{[0.0] * min(size, 3)}]"
        )
    return [_number(one, each, i) for i, each in enumerate(words)]


_READERS = {"number": _number, "category": _category, "several": _several, "vector": _vector}
_SPLIT, _JOIN = {}, {}  # of kinds whose values are not words: to a list, and from the values of images
