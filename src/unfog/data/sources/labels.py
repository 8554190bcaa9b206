"""Class labels of a source, those of folders, or of a table beside the images or in them; and its other columns.

Warnings name labels that are probably not the classes that were meant: numbers, lists, masks, two spellings of a word.
"""

from __future__ import annotations

import hashlib
import os
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from unfog.data.bit_depth import DeepImage
from unfog.data.data_report import SkippedFile
from unfog.data.settings import LABELS, TABLES, table_and_columns
from unfog.data.sources.base import LabelTable, SomeImages, Source
from unfog.data.sources.label_tables import match_images, read_table, sort_labels, strip_shard
from unfog.errors import RequestError
from unfog.settings import AUTO
from unfog.text import sanitize
from unfog.values.columns import (
    CLASS,
    Column,
    check_columns,
    classes_of,
    labels_of,
    of_labels,
    without_class,
)

# Folder names that are splits of a data set rather than classes.
SPLITS = frozenset(["train", "training", "test", "testing", "val", "valid", "validation", "dev", "eval"])

# Tables at the top of a source that labels = auto looks for; metadata.csv is Hugging Face's convention.
AUTO_TABLES = tuple(f"{name}{suffix}" for name in ("metadata", "labels") for suffix in TABLES)
"""Names of tables at the top of a source that are looked for, of labels and of conditions."""
_MAX_NAMED = 1000

_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)
_MANY_NUMBERS = 20  # whole numbers that are taken for classes without a word
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


def read_labels(
    source: Source, mode: str, warn: Callable[[str], None] = lambda line: None
) -> tuple[tuple[str, ...], NDArray[np.int64] | None]:
    """Return (classes, label of each image int64 [N]), or ((), None) without classes.

    Args:
        source: its own labels are used where it has some, except in mode "none", and in mode "auto" if they are numbers
            with fewer than four images each.
        mode: "none": no classes. "folders": a class is a top folder below the folders that all images share
            ("photos/cats/a.jpg", "photos/dogs/1/b.jpg": cats, dogs). "auto": the same, if there are at least two such
            folders, no image lies beside them, each has four images on average, and they are not a train/test split.
            Below such a split the classes are one level down ("train/cats", "val/cats") in both modes.
        warn: called with a line on labels that may not be the classes that were meant.

    Raises:
        RequestError: mode "folders", and an image is in no sub-folder; or mode "auto", and a folder holds the masks of
            the images in another; or a label is not an index into the classes.
    """
    if mode == "none":
        return (), None
    classes, labels = _own_labels(source)
    if labels is None:
        classes, labels = _read_folders(source, mode)
    elif len(labels) != len(source.names):
        raise RequestError(
            f"{sanitize(source.name)} has {len(labels):,} labels for {len(source.names):,} images; give one for each"
        )
    elif len(labels) and not 0 <= labels.min() <= labels.max() < len(classes):
        raise RequestError(
            f"{sanitize(source.name)} has a label that is not one of its {len(classes):,} classes: it is damaged; "
            "make it again from the originals"
        )
    elif mode == AUTO and are_measurements(classes, labels):
        warn(
            f"the labels are not used: they are {len(np.unique(labels)):,} numbers for {len(labels):,} images, fewer "
            f"than four images each; {_as_number(source, 'or ')}--data.labels folders takes each for a class all the "
            "same"
        )
        return (), None
    if labels is None:
        return (), None
    classes, labels = merge_spellings(classes, labels, warn)
    warn_of_labels(source, classes, labels, warn)
    # Class names end up in files, figures and terminals, so control characters must not act there.
    return tuple(sanitize(name) for name in classes), labels


def _own_labels(source: Source) -> tuple[tuple[str, ...], NDArray[np.int64] | None]:
    """Return the classes and labels that the source itself has; its classes and None without labels."""
    if source.labels is not None or CLASS not in source.columns:
        return source.classes, source.labels
    columns = check_columns({CLASS: source.columns[CLASS]}, len(source.names), sanitize(source.name))
    return classes_of(columns), labels_of(columns)


def read_columns(source: Source, mode: str, warn: Callable[[str], None] = lambda line: None) -> dict[str, Column]:
    """Return the columns of a source: its labels as `read_labels` finds them, then all others.

    RequestError as `read_labels`, or if a column does not fit the images.
    """
    classes, labels = read_labels(source, mode, warn)
    return of_labels(labels, classes) | _own_columns(source)


def _own_columns(source: Source) -> dict[str, Column]:
    """Return the columns of a source but that of its labels. RequestError if one does not fit the images."""
    return check_columns(without_class(source.columns), len(source.names), sanitize(source.name))


def _read_folders(source: Source, mode: str) -> tuple[tuple[str, ...], NDArray[np.int64] | None]:
    """Return the classes that folders give, and the label of each image int64 [N]; ((), None) if they give none."""
    parts, codes = _folders(source)
    of_folders = _class_of_folders(source, mode, parts, codes)
    if of_folders is None:
        return (), None
    if mode == AUTO and not source.remote:
        check_masks(source, of_folders, codes, parts)
    classes = source.classes or tuple(sorted(set(of_folders)))
    index = {name: i for i, name in enumerate(classes)}
    return classes, np.array([index[name] for name in of_folders], np.int64)[codes]


def _class_of_folders(
    source: Source, mode: str, parts: list[tuple[str, ...]], codes: NDArray[np.int64]
) -> list[str] | None:
    """Return the class of each folder, None if mode "auto" finds no classes. See `_folders` for parts and codes."""
    shared = len(os.path.commonprefix(parts))  # noqa: RUF071  of tuples, so whole folders
    tops = [folder[shared] if len(folder) > shared else "" for folder in parts]
    found = sorted(set(tops))
    if mode == "folders" and shared and found[0] == "":
        # All images lie in one folder, or in it and below: that folder is the class.
        shared, tops = shared - 1, [folder[shared - 1] for folder in parts]
        found = sorted(set(tops))
    if mode == "folders" and found[0] == "":
        loose = sanitize(source.names[int(np.argmax(np.array([top == "" for top in tops])[codes]))])
        raise RequestError(
            f"labels = folders needs every image in a sub-folder, and {loose} is in none; move it or use labels = none"
        )
    split = not source.classes and all(name.lower() in SPLITS for name in found)
    if split and all(len(folder) > shared + 1 for folder in parts):
        tops = [folder[shared + 1] for folder in parts]
        found, split = sorted(set(tops)), False
    unclear = len(found) < 2 or found[0] == "" or split or len(codes) < 4 * len(found)
    return None if mode == AUTO and not source.classes and unclear else tops


def _folders(source: Source) -> tuple[list[tuple[str, ...]], NDArray[np.int64]]:
    """Return (each folder as its parts, [N] index of the folder of each image)."""
    # Labels are made from folders rather than from images, as those are few if there are a million images.
    known = source.folders
    if known is None:
        found = dict[str, int]()
        folders = (strip_shard(name).rpartition("/")[0] for name in source.names)
        codes = np.fromiter((found.setdefault(folder, len(found)) for folder in folders), np.int64, len(source.names))
        known = list(found), codes
    return [tuple(folder.split("/")) if folder else () for folder in known[0]], known[1]


class _LabelTableSource(SomeImages):
    """A source with the labels of a table. Images without a row, and rows without an image, are in `unreadable`.

    Raises RequestError if the table cannot be read, contradicts itself, or names fewer than half of the images.
    """

    def __init__(self, source: Source, table: LabelTable) -> None:
        self.table_setting = table.setting
        rows, self._digest, self.label_column = read_table(table, source.second_names)
        row_of, unmatched = match_images(source, rows)
        refuse_few_matches(source, table, rows, row_of)
        values = [rows[row] for row in row_of.values()]
        self.classes = tuple(sort_labels(set(values) - {""}))
        number = {name: i for i, name in enumerate(self.classes)}
        known = [(i, number[value]) for i, value in zip(row_of, values) if value]
        super().__init__(source, np.array([i for i, _ in known], np.int64), _own_columns(source))
        self.held_out, self.ignored = source.held_out, source.ignored
        self.labels = np.array([label for _, label in known], np.int64)
        labelled = set(self._rows.tolist())
        self.unlabelled = [name for i, name in enumerate(source.names) if i not in labelled]
        self.unreadable = [
            *source.unreadable,
            *(SkippedFile(name, f"without a label in {table.base_name}") for name in self.unlabelled),
            *_rows_without_image(unmatched, table.base_name),
        ]
        if not self.classes:
            raise RequestError(f"{sanitize(table.name)} leaves every label empty; fill its label column")

    def stamp(self) -> tuple[str, int]:
        digest, size = self._source.stamp()
        return hashlib.sha256(f"{digest} {self._digest}".encode()).hexdigest(), size


def apply_label_table(
    source: Source, mode: str, warn: Callable[[str], None] = lambda line: None, conditions: Collection[str] = ()
) -> Source:
    """Return the source with the labels of a table, or unchanged.

    Args:
        source: the source.
        mode: the path of a table, perhaps with its columns, as in "t.csv:id,breed"; it is also looked for at the top of
            the source. Or "auto": a table at the top is used if the source has no labels of its own, its folders give
            no classes, every image has a row, and each class has four images on average. Or "folders" or "none": no
            table is used.
        warn: called with a line for each table, and each column of labels of the source's own, that is not used.
        conditions: names of columns that are conditions. Tables and arrays hold them, so that one without labels needs
            no warning; and a table whose column of labels is among them has no labels.

    Raises:
        RequestError: there is no such table, or it is refused: see `_LabelTableSource`.
    """
    if mode in LABELS:
        if mode != "none" and source.label_warning and not conditions:
            warn(source.label_warning)
        return _find_labels(source, warn, conditions) if mode == AUTO and _own_labels(source)[1] is None else source
    if isinstance(source, _LabelTableSource):
        return source
    path, columns = table_and_columns(mode)
    table = None if os.path.isfile(os.path.expanduser(path)) else source.table(os.path.basename(path))
    return _LabelTableSource(source, replace(table or LabelTable.find(path), columns=columns))


def labels_setting(source: Source, labels: NDArray[np.int64] | None) -> str:
    """Return the setting that gives these labels another time: that of a table, "folders" or "none"."""
    if labels is None:
        return "none"
    return source.table_setting if isinstance(source, _LabelTableSource) else "folders"


def _find_labels(source: Source, warn: Callable[[str], None], conditions: Collection[str]) -> Source:
    tables = [table for name in AUTO_TABLES if (table := source.table(name)) is not None]
    chosen, used = source, ""
    if tables and read_labels(source, AUTO)[1] is not None:
        used = "the folders are the classes"
    for table in tables:
        insist = f"--data.labels {sanitize(table.base_name)} uses it all the same"
        found = f"{used}; {insist}" if used else _try_table(source, table, insist)
        if conditions and (isinstance(found, str) and "no column of labels" in found):
            continue
        if isinstance(found, Source) and found.label_column in conditions:
            continue
        if isinstance(found, str):
            warn(f"{sanitize(table.base_name)} is ignored: {found}")
        else:
            chosen, used = found, f"{table.base_name} has the labels"
    return chosen


def _try_table(source: Source, table: LabelTable, insist: str) -> _LabelTableSource | str:
    """Return the source with the labels of a table, or the reason to leave it out: it may hold captions, say."""
    try:
        found = _LabelTableSource(source, table)
    except RequestError as error:
        return str(error).replace(sanitize(table.name), "it")
    classes, without = len(found.classes), len(found.unlabelled)
    if without:
        many = f"{without:,} of {len(source.names):,} images"
        return f"it has no label for {many}, such as {sanitize(found.unlabelled[0])}; {insist}"
    if classes < 2:
        return f"it has only the class {sanitize(found.classes[0])}; {insist}"
    if classes > len(found.names) / 4:
        return f"it has {classes:,} classes for {len(found.names):,} images, fewer than four images each; {insist}"
    return found


def refuse_few_matches(source: Source, table: LabelTable, rows: Iterable[str], row_of: Mapping[int, str]) -> None:
    """Raise RequestError if a table names fewer than half of the images; `row_of` is of `match_images`."""
    # A table that names fewer than half of the images is most likely one of other images.
    names = source.names
    if 2 * len(row_of) >= len(names):
        return
    matched = set(row_of.values())
    row = next((sanitize(row) for row in rows if row not in matched), None)
    image = sanitize(next(name for i, name in enumerate(names) if i not in row_of))
    few = f"{sanitize(table.name)} names only {len(row_of):,} of the {len(names):,} images of {sanitize(source.name)}"
    none = f"no row of {sanitize(table.name)} names an image of {sanitize(source.name)}"
    examples = f"rows are such as {row!r}, images such as {image!r}" if row is not None else f"none is {image!r}"
    also = ", and a row with an empty label for each image to leave out" if row_of else ""
    raise RequestError(f"{few if row_of else none}: {examples}; write paths as below the source{also}")


def _rows_without_image(rows: set[str], table: str) -> Iterator[SkippedFile]:
    reason = f"named in {table} and not there"
    yield from (SkippedFile(name, reason) for name in sorted(rows)[:_MAX_NAMED])
    if len(rows) > _MAX_NAMED:
        yield SkippedFile(f"{len(rows) - _MAX_NAMED:,} more", reason)


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
        _warn_of_numbers(present, _as_number(source), warn)
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
    return present > max(_MANY_NUMBERS, len(labels) / 4) and all(map(_NUMBER.fullmatch, classes))


def _as_number(source: Source, then: str = "") -> str:
    """Return the remedy for labels that are numbers, and `then`; "" if the labels have no name."""
    column = sanitize(source.label_column)
    return f"--condition {column} learns them as a number, {then}" if column else ""


def _warn_of_numbers(names: Sequence[str], remedy: str, warn: Callable[[str], None]) -> None:
    values = [float(name) for name in names]
    if len(values) > _MANY_NUMBERS or any(not value.is_integer() for value in values):
        warn(
            f"the labels are {len(values):,} numbers, from {min(values):g} to {max(values):g}: each is a class of its "
            f"own. If they measure something, such as an age, {remedy}make a few ranges of them, or give --data.labels "
            "none"
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
    except Exception:  # decoders raise almost anything on damaged files, which decoding reports
        return False
    return sum(count > 0 for count in histogram) <= _FEW_VALUES


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(sanitize(name) for name in names[:3])
    return shown + ", …" * (len(names) > 3)
