"""Class labels of a source, those of folders, or of a table beside the images or in them; and its other columns."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from unfog.data.data_report import SkippedFile
from unfog.data.label_checks import are_measurements, check_masks, merge_spellings, warn_of_labels
from unfog.data.settings import LABELS, TABLES, table_and_columns
from unfog.data.sources.base import LabelTable, SomeImages, Source
from unfog.data.sources.label_tables import match_rows, read_table, sort_labels, strip_shard
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
_AUTO_TABLES = tuple(f"{name}{suffix}" for name in ("metadata", "labels") for suffix in TABLES)
_MAX_NAMED = 1000


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
            f"{sanitize(source.name)} has a label that is none of its {len(classes):,} classes: it is damaged; "
            "make it again from the originals"
        )
    elif mode == AUTO and are_measurements(classes, labels):
        warn(
            f"the labels are not used: they are {len(np.unique(labels)):,} numbers for {len(labels):,} images, fewer "
            "than four images each; --data.labels folders takes each for a class all the same"
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
        rows, self._digest = read_table(table, source.second_names)
        row_of, unmatched = match_rows(source.names, rows)
        _refuse_few_matches(source, table, rows, row_of)
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


def apply_label_table(source: Source, mode: str, warn: Callable[[str], None] = lambda line: None) -> Source:
    """Return the source with the labels of a table, or unchanged.

    Args:
        source: the source.
        mode: the path of a table, perhaps with its columns, as in "t.csv:id,breed"; it is also looked for at the top of
            the source. Or "auto": a table at the top is used if the source has no labels of its own, its folders give
            no classes, every image has a row, and each class has four images on average. Or "folders" or "none": no
            table is used.
        warn: called with a line for each table, and each column of labels of the source's own, that is not used.

    Raises:
        RequestError: there is no such table, or it is refused: see `_LabelTableSource`.
    """
    if mode in LABELS:
        if mode != "none" and source.label_warning:
            warn(source.label_warning)
        return _find_labels(source, warn) if mode == AUTO and _own_labels(source)[1] is None else source
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


def _find_labels(source: Source, warn: Callable[[str], None]) -> Source:
    tables = [table for name in _AUTO_TABLES if (table := source.table(name)) is not None]
    chosen, used = source, ""
    if tables and read_labels(source, AUTO)[1] is not None:
        used = "the folders are the classes"
    for table in tables:
        insist = f"--data.labels {sanitize(table.base_name)} uses it all the same"
        found = f"{used}; {insist}" if used else _try_table(source, table, insist)
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


def _refuse_few_matches(source: Source, table: LabelTable, rows: Mapping[str, str], row_of: Mapping[int, str]) -> None:
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
