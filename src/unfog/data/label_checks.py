"""Look for labels that are probably not the classes that were meant: numbers, lists, masks, two spellings of a word."""

from __future__ import annotations

import os
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from unfog.data.bit_depth import DeepImage
from unfog.data.sources.base import ImageError, Source
from unfog.errors import RequestError
from unfog.text import sanitize

_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)
_MANY = 20  # whole numbers that are taken for classes without a word
_REPEATS = re.compile(r"[1-9]\d{0,2}_\D.*")  # as kohya's trainer counts the repeats of a folder's images
_MASKS = re.compile(
    r"(.*[_-])?(masks?|annotations?|annots?|labels?|seg|segs|segmentations?|segmaps?|semantic|instances?|gt|"
    r"ground[_-]?truths?|alphas?|mattes?|trimaps?)([_-].*)?"
)
_PHOTOS = re.compile(
    r"(.*[_-])?(images?|imgs?|photos?|pictures?|inputs?|rgb|jpe?g(images)?|png|originals?|raw)([_-].*)?"
)
# Ends a name of a mask, and of the image beside it; and either, at the beginning or end.
_MASK_ENDING = re.compile(r"[_-](masks?|seg|gt|label|segmentation|annotation|matte|trimap)$")
_IMAGE_ENDINGS = ("", "_sat", "_image", "_img", "-image", "-img")
_ROLE = re.compile(r"^(mask|seg|gt|label|image|img)[_-]|[_-](mask|seg|gt|label|segmentation|annotation|image|img)$")
_FEW_VALUES = 8  # grey levels of a mask, at most
_MOST_PIXELS = 2**24  # of an image that is decoded for that
_LOOKED_AT = 4  # images of a folder that are opened for that
_MOST_FOLDERS = 8  # where masks are looked for; a data set with more has classes
_NAMES_COMPARED = 20_000  # of a folder, as a part of the images may have masks
_NAMES_PAIRED = 2000
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
        # Of numbers the sign counts, and letters of an alphabet are large and small.
        if len(name) > 1 and not _NUMBER.fullmatch(name):
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
    numbers = {name.partition("_")[0] for name in present}
    numbered = 2 < len(present) == len(numbers)  # 1_cat, 2_dog, 3_cow
    if len(present) > 1 and not numbered and all(map(_REPEATS.fullmatch, present)):
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


def warn_of_masks_beside_images(source: Source, warn: Callable[[str], None]) -> None:
    """Warn of images whose names say that they are masks of others in the same folder: 1.jpg and 1_mask.png."""
    # A source that knows its folders may have a hundred million names, and of sorted names the first show it.
    names = [source.names[i] for i in range(min(_NAMES_PAIRED, len(source.names)))]
    stems = {name.rpartition(".")[0].lower(): name for name in names}
    pairs = list[tuple[str, str]]()
    for stem, name in stems.items():
        image = _MASK_ENDING.sub("", stem)
        partner = next((stems[image + ending] for ending in _IMAGE_ENDINGS if image + ending in stems), None)
        if image != stem and partner is not None:
            pairs.append((name, partner))
    if len(pairs) >= max(2, 0.2 * len(names)):
        mask, image = map(sanitize, pairs[0])
        warn(
            f"{len(pairs):,} of {'the first ' * (len(names) < len(source.names))}{len(names):,} images look like masks "
            f"of others by their names, such as {mask} of {image}, and are trained on as images; move them to another "
            "place"
        )


def check_masks(source: Source, tops: Sequence[str], codes: NDArray[np.int64], parts: Sequence[Sequence[str]]) -> None:
    """RequestError if a folder that would be a class holds masks of the images in another one.

    Args:
        source: where the images are.
        tops: the class of each folder.
        codes: [N], the folder of each image.
        parts: the path of each folder.
    """
    found = sorted(set(tops))
    if not 2 <= len(found) <= _MOST_FOLDERS:
        return
    # A source that knows its folders may have a hundred million names, which are not gone through without a sign.
    if source.folders is not None and not any(_MASKS.fullmatch(_words(top)) for top in found):
        return
    rows = _rows_by_stem(source, tops, codes)
    for masks in found:
        for images in found:
            if masks != images and _are_masks(source, rows, masks, images):
                raise RequestError(
                    f"{sanitize(masks)} and {sanitize(images)} hold files of the same names, and those in "
                    f"{sanitize(masks)} look like masks of the images: a mask is not a class. "
                    f"{_alone(source, images, tops, parts)} to train on the images alone, or --data.labels folders "
                    "to train on both as two classes"
                )


def _alone(source: Source, images: str, tops: Sequence[str], parts: Sequence[Sequence[str]]) -> str:
    """Return how to give the images of a class alone: "Give photos/images"."""
    paths = [list(folder) for folder, top in zip(parts, tops) if top == images]
    places = sorted({"/".join(path[: path.index(images) + 1]) for path in paths})
    if source.resolved and os.path.isdir(source.resolved):
        return f"Give {sanitize(os.path.join(source.name, places[0]))}"
    return f"Unpack it, and give its folder {sanitize(places[0])}"


def _words(name: str) -> str:
    """Return the name of a folder in lower case, with "_" between its words: SegmentationClass, gtFine."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def _rows_by_stem(source: Source, tops: Sequence[str], codes: NDArray[np.int64]) -> Mapping[str, Mapping[str, int]]:
    """Return class -> name of a file below it, without suffix -> its index; of the first images of each class."""
    rows = defaultdict[str, dict[str, int]](dict)
    number = {top: i for i, top in enumerate(sorted(set(tops)))}
    of_image = np.array([number[top] for top in tops], np.int64)[codes]
    for top, i in number.items():
        for row in np.flatnonzero(of_image == i)[:_NAMES_COMPARED].tolist():
            stem = source.names[row].rpartition("/")[2].rpartition(".")[0]
            rows[top][_ROLE.sub("", stem.lower())] = row
    return rows


def _are_masks(source: Source, rows: Mapping[str, Mapping[str, int]], masks: str, images: str) -> bool:
    shared = rows[masks].keys() & rows[images].keys()
    if len(shared) < max(2, 0.8 * len(rows[masks])):
        return False
    named = _MASKS.fullmatch(_words(masks)) is not None and _MASKS.fullmatch(_words(images)) is None
    if named and _PHOTOS.fullmatch(_words(images)):
        return True
    if 2 * len(shared) < len(rows[images]):
        return False
    some = sorted(shared)[:: max(1, len(shared) // _LOOKED_AT)][:_LOOKED_AT]
    # Numbered files of equal names are usual in classes, so that the pixels decide.
    return all(_few_values(source, rows[masks][stem]) for stem in some) and not any(
        _few_values(source, rows[images][stem]) for stem in some
    )


def _few_values(source: Source, row: int) -> bool:
    try:
        with source.read_image(row) as image:
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
