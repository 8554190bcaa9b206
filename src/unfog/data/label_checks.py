"""Look for labels that are probably not the classes that were meant: numbers, lists, masks, two spellings of a word."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from unfog.data.sources.base import ImageError, Source
from unfog.data.values.deep_image import DeepImage
from unfog.errors import RequestError
from unfog.text import sanitize

_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)
_MANY = 20  # whole numbers that are taken for classes without a word
_REPEATS = re.compile(r"[1-9]\d{0,3}_\D.*")  # as kohya's trainer counts the repeats of a folder's images
_MASKS = re.compile(
    r"(.*[_-])?(masks?|annotations?|annots?|labels?|seg|segs|segmentations?|segmaps?|semantic|instances?|gt|"
    r"ground[_-]?truths?|alphas?|mattes?|trimaps?)([_-].*)?"
)
_PHOTOS = re.compile(
    r"(.*[_-])?(images?|imgs?|photos?|pictures?|inputs?|rgb|jpe?g(images)?|png|originals?|raw)([_-].*)?"
)
_FEW_VALUES = 8  # grey levels of a mask, at most
_MOST_PIXELS = 2**24  # of an image that is decoded for that
_LOOKED_AT = 4  # images of a folder that are opened for that
_MOST_FOLDERS = 8  # where masks are looked for; a data set with more has classes
_NAMES_COMPARED = 2000
_SEPARATORS = ";|,"


def merge_spellings(
    classes: Sequence[str], labels: NDArray[np.int64], warn: Callable[[str], None]
) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """Return (classes, labels [N]) in which classes that differ only in their form of Unicode are one, in form NFC.

    Without such classes nothing changes, as earlier runs know classes as they are spelled. `warn` is called with a line
    on classes that became one, and on classes that differ in case or spaces only.
    """
    composed = [unicodedata.normalize("NFC", name) for name in classes]
    merged = tuple(classes)
    if len(set(composed)) < len(classes):
        merged = tuple(sorted(set(composed)))
        twice = [name for name, count in Counter(composed).items() if count > 1]
        warn(f"{_listed(twice)}: spelled in two forms of Unicode, and taken as one class")
        position = {name: i for i, name in enumerate(merged)}
        labels = np.array([position[name] for name in composed], np.int64)[labels]
    alike = defaultdict[str, list[str]](list)
    for name in merged:
        alike[" ".join(name.casefold().replace("_", " ").replace("-", " ").split())].append(name)
    for names in alike.values():
        if len(names) > 1:
            warn(f"the classes {_listed(names)} differ in spelling only; if they are one class, give them one name")
    return merged, labels


def warn_of_labels(
    source: Source, classes: Sequence[str], labels: NDArray[np.int64], warn: Callable[[str], None]
) -> None:
    """Warn of classes that look like numbers, like several labels an image, or like names of another trainer."""
    present = [classes[i] for i in np.unique(labels)]
    if present and all(_NUMBER.fullmatch(name) for name in present):
        _warn_of_numbers(present, warn)
    for separator in _SEPARATORS:
        words = {word.strip() for name in present for word in name.split(separator)}
        joined = sum(separator in name for name in present)
        if 2 * joined >= len(present) > len(words) > 1:
            warn(
                f"{joined:,} of {len(present):,} classes are words joined by {separator!r}, such as "
                f"{sanitize(next(name for name in present if separator in name))}: each image has one class, so each "
                "combination is a class of its own; several labels an image are not supported"
            )
    if len(present) > 1 and all(map(_REPEATS.fullmatch, present)):
        texts = "; captions (.txt) are not read" if source.ignored.get(".txt") else ""
        warn(
            f"class names such as {sanitize(present[0])} look like the repeats of kohya's trainer: here they are "
            f"names, and every image counts once{texts}"
        )


def are_measurements(classes: Sequence[str], labels: NDArray[np.int64]) -> bool:
    """Return True if the labels are whole numbers with fewer than four images each: ages, say, or identities."""
    present = len(np.unique(labels))
    return present > max(_MANY, len(labels) / 4) and all(map(_NUMBER.fullmatch, classes))


def _warn_of_numbers(names: Sequence[str], warn: Callable[[str], None]) -> None:
    values = [float(name) for name in names]
    if len(values) > _MANY or any(not value.is_integer() for value in values):
        warn(
            f"the labels are {len(values):,} numbers, from {min(values):g} to {max(values):g}: each is a class of its "
            "own. If they measure something, such as an age, make a few ranges of them, or give --data.labels none"
        )


def check_masks(source: Source, tops: Sequence[str], codes: NDArray[np.int64]) -> None:
    """RequestError if a folder that would be a class holds masks of the images in another one.

    Args:
        source: where the images are.
        tops: the class of each folder.
        codes: [N], the folder of each image.
    """
    found = sorted(set(tops))
    if not 2 <= len(found) <= _MOST_FOLDERS:
        return
    # A source that knows its folders may have a hundred million names, which are not gone through without a sign.
    if source.folders is not None and not any(_MASKS.fullmatch(top.lower()) for top in found):
        return
    rows = _rows_by_stem(source, tops, codes)
    for masks in found:
        for images in found:
            if masks != images and _are_masks(source, rows, masks, images):
                below = f"{source.name.rstrip('/')}/{images}"
                raise RequestError(
                    f"{sanitize(masks)} and {sanitize(images)} hold files of the same names, and those in "
                    f"{sanitize(masks)} look like masks of the images: a mask is no class. Give {sanitize(below)} to "
                    "train on the images alone, or --data.labels folders to train on both as two classes"
                )


def _rows_by_stem(source: Source, tops: Sequence[str], codes: NDArray[np.int64]) -> Mapping[str, Mapping[str, int]]:
    """Return class -> name of a file below it, without suffix -> its index; of the first images of each class."""
    rows = defaultdict[str, dict[str, int]](dict)
    number = {top: i for i, top in enumerate(sorted(set(tops)))}
    of_image = np.array([number[top] for top in tops], np.int64)[codes]
    for top, i in number.items():
        for row in np.flatnonzero(of_image == i)[:_NAMES_COMPARED].tolist():
            stem = source.names[row].rpartition("/")[2].rpartition(".")[0]
            rows[top][re.sub(r"[_-](mask|seg|gt|label|segmentation|annotation)$", "", stem.lower())] = row
    return rows


def _are_masks(source: Source, rows: Mapping[str, Mapping[str, int]], masks: str, images: str) -> bool:
    shared = rows[masks].keys() & rows[images].keys()
    if len(shared) < max(2, 0.8 * len(rows[masks])) or 2 * len(shared) < len(rows[images]):
        return False
    named = _MASKS.fullmatch(masks.lower()) is not None and _MASKS.fullmatch(images.lower()) is None
    if named and _PHOTOS.fullmatch(images.lower()):
        return True
    some = sorted(shared)[:: max(1, len(shared) // _LOOKED_AT)][:_LOOKED_AT]
    # Numbered files of equal names are usual in classes, so that the pixels decide.
    return all(_few_values(source, rows[masks][stem]) for stem in some) and not any(
        _few_values(source, rows[images][stem]) for stem in some
    )


def _few_values(source: Source, row: int) -> bool:
    try:
        with source.open(row) as image:
            if image.size[0] * image.size[1] > _MOST_PIXELS:
                return False
            if isinstance(image, DeepImage) or image.mode[0] in "IF":  # whose values `convert` would cut at 255
                return (
                    len(np.unique(image.values if isinstance(image, DeepImage) else np.asarray(image))) <= _FEW_VALUES
                )
            histogram = image.convert("L").histogram()
    except (ImageError, OSError, ValueError, SyntaxError):
        return False
    return sum(count > 0 for count in histogram) <= _FEW_VALUES


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(sanitize(name) for name in names[:3])
    return shown + ", …" * (len(names) > 3)
