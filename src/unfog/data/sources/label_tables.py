"""Labels from a table: a CSV or JSONL file with a column of file names and one of classes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from unfog.data.report import SkippedFile
from unfog.data.settings import LABELS, TABLES
from unfog.data.sources.folder import FolderSource
from unfog.data.sources.label_match import match_rows
from unfog.data.sources.label_rows import LabelTable, read_table
from unfog.data.sources.source import Source, read_labels
from unfog.data.webdataset.index_builder import sort_labels
from unfog.data.webdataset.remote_shards import RemoteShards
from unfog.errors import RequestError
from unfog.text import sanitize

OWN_TABLES = tuple(f"{name}{suffix}" for name in ("metadata", "labels") for suffix in TABLES)
"""Tables at the top of a folder or archive that labels = auto looks for; metadata.csv is Hugging Face's convention."""

_NAMED = 1000


class LabelTableSource:
    """A source with the labels of a table. What has no row, and what has a row and is not there, is `unreadable`.

    Raises:
        RequestError: the table cannot be read, has no such columns, contradicts itself, or names fewer than half of
            the images.
    """

    held_out: frozenset[str] | None

    def __init__(self, source: Source, table: LabelTable) -> None:
        self._source = source
        self.table = table.resolved
        self.name, self.resolved = source.name, source.resolved
        self.held_out, self.ignored, self.remote = source.held_out, source.ignored, source.remote
        rows, self._digest = read_table(table)
        found, left = match_rows(source.names, rows)
        _refuse_few(source, table, rows, found)
        values = [rows[row] for row in found.values()]
        self.classes = tuple(sort_labels(set(values) - {""}))
        number = {name: i for i, name in enumerate(self.classes)}
        known = [(i, number[value]) for i, value in zip(found, values) if value]
        self._rows = np.array([i for i, _ in known], np.int64)
        self.labels: NDArray[np.int64] | None = np.array([label for _, label in known], np.int64)
        self.names: Sequence[str] = [source.names[i] for i in self._rows]
        self.remote_shards: RemoteShards | None = getattr(source, "remote_shards", None)
        unlabelled = set(self._rows.tolist())
        self.unlabelled = [name for i, name in enumerate(source.names) if i not in unlabelled]
        self.unreadable: Sequence[SkippedFile] = [
            *source.unreadable,
            *(SkippedFile(name, f"without a label in {table.base}") for name in self.unlabelled),
            *_not_there(left, table.base),
        ]
        if not self.classes:
            raise RequestError(f"{sanitize(table.name)} leaves every label empty; fill its label column")

    def open(self, i: int) -> Image.Image:
        """Image i, as the source opens it."""
        return self._source.open(self.within(i))

    def within(self, i: int) -> int:
        """Which image of the source image i is, for whoever has to do with its shards."""
        return int(self._rows[i])

    def stamp(self) -> tuple[str, int]:
        """Digest of the source's and of the table."""
        digest, size = self._source.stamp()
        return hashlib.sha256(f"{digest} {self._digest}".encode()).hexdigest(), size


def apply_label_table(source: Source, mode: str, tell: Callable[[str], None] = lambda said: None) -> Source:
    """The source with the labels of the table that `mode` is the path of, or that "auto" finds; else as it is.

    A table is looked for where it says, then at the top of a folder or archive of images. "auto" uses one at the top
    when the source has no labels of its own, its folders give no classes, every image has a row, and each class four
    images on average.

    `tell` is called with a line for each table that "auto" finds and leaves out, and for what a source says of columns
    of its own that it left out.

    Raises:
        RequestError: as LabelTableSource; there is no such table.
    """
    if mode in LABELS:
        if mode != "none" and (left_out := getattr(source, "left_out", "")):
            tell(left_out)
        return _found(source, tell) if mode == "auto" and source.labels is None else source
    if isinstance(source, LabelTableSource):
        return source
    return LabelTableSource(source, _named(mode, source))


def find_table(mode: str, top: Path | None) -> Path | None:
    """The table that a setting names, as it says or at the top of the folder `top`; None if it names none.

    Raises:
        RequestError: it is in neither place.
    """
    if mode in LABELS:
        return None
    paths = [Path(os.path.expanduser(mode)), *([top / os.path.basename(mode)] if top else [])]
    table = next((path for path in paths if os.path.isfile(path)), None)
    if table is None:
        raise RequestError(f"labels = {sanitize(mode)} is not there; give a .csv or .jsonl file, or auto")
    return table


def labels_setting(source: Source, labels: NDArray[np.int64] | None) -> str:
    """The setting that gives the same labels another time: the path of a table, "folders" or "none"."""
    if labels is None:
        return "none"
    return source.table if isinstance(source, LabelTableSource) else "folders"


def _named(mode: str, source: Source) -> LabelTable:
    """The table that a setting names, a member of the archive where there is no such file."""
    members: Mapping[str, LabelTable] = getattr(source, "tables", {})
    base = os.path.basename(mode)
    if base in members and not os.path.isfile(os.path.expanduser(mode)):
        return members[base]
    path = find_table(mode, source.folder if isinstance(source, FolderSource) else None)
    assert path is not None  # it is none of LABELS
    return LabelTable.at(path)


def _at_the_top(source: Source) -> list[LabelTable]:
    """Those of OWN_TABLES that there are."""
    if isinstance(source, FolderSource):
        return [LabelTable.at(source.folder / name) for name in OWN_TABLES if (source.folder / name).is_file()]
    members: Mapping[str, LabelTable] = getattr(source, "tables", {})
    return [members[name] for name in OWN_TABLES if name in members]


def _found(source: Source, tell: Callable[[str], None]) -> Source:
    """The source with the labels of the first table at its top that will do, else as it is; see `labelled`."""
    tables = _at_the_top(source)
    chosen, taken = source, ""
    if tables and read_labels(source, "auto")[1] is not None:
        taken = "the folders are the classes"
    for table in tables:
        insist = f"give --data.labels {sanitize(table.base)} to insist"
        found = f"{taken}; {insist}" if taken else _tried(source, table, insist)
        if isinstance(found, str):
            tell(f"{sanitize(table.base)} is left out: {found}")
        else:
            chosen, taken = found, f"{table.base} has the labels"
    return chosen


def _tried(source: Source, table: LabelTable, insist: str) -> LabelTableSource | str:
    """The source with the labels of that table, or why it is left out; it may be of something else: captions, say."""
    try:
        found = LabelTableSource(source, table)
    except RequestError as error:
        return str(error).replace(sanitize(table.name), "it")
    classes, without = len(found.classes), len(found.unlabelled)
    if without:
        many = f"{without:,} of {len(source.names):,} images"
        return f"it has no label for {many}, such as {sanitize(found.unlabelled[0])}; {insist}"
    if classes < 2:
        return f"it has no class but {sanitize(found.classes[0])}; {insist}"
    if classes > len(found.names) / 4:
        return f"it has {classes:,} classes for {len(found.names):,} images, fewer than four for each; {insist}"
    return found


def _refuse_few(source: Source, table: LabelTable, rows: Mapping[str, str], found: Mapping[int, str]) -> None:
    """RequestError if the rows found name fewer than half of the images: those left would hardly be the data meant."""
    names = source.names
    if 2 * len(found) >= len(names):
        return
    matched = set(found.values())
    row = next((sanitize(row) for row in rows if row not in matched), None)
    image = sanitize(next(name for i, name in enumerate(names) if i not in found))
    few = f"{sanitize(table.name)} names only {len(found):,} of the {len(names):,} images of {sanitize(source.name)}"
    none = f"no row of {sanitize(table.name)} names an image of {sanitize(source.name)}"
    examples = f"rows are such as {row!r}, images such as {image!r}" if row is not None else f"none is {image!r}"
    also = ", and a row with an empty label for each image to leave out" if found else ""
    raise RequestError(f"{few if found else none}: {examples}; write paths as below the source{also}")


def _not_there(rows: set[str], table: str) -> Iterator[SkippedFile]:
    reason = f"named in {table} and not there"
    yield from (SkippedFile(name, reason) for name in sorted(rows)[:_NAMED])
    if len(rows) > _NAMED:
        yield SkippedFile(f"{len(rows) - _NAMED:,} more", reason)
