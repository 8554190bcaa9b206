"""Labels from a table: a CSV or JSONL file with a column of file names and one of classes."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from unfog.data.formats.far_shards import FarShards
from unfog.data.formats.files import SUFFIXES, why
from unfog.data.formats.folder import FolderSource
from unfog.data.formats.shard_piece import in_order, label_text, plain
from unfog.data.ledger import Quarantined, shown
from unfog.data.settings import LABELS, TABLES
from unfog.data.sources import Source, labels_of, member_of
from unfog.errors import RequestError

FILE_COLUMNS = (
    *("file_name", "filename", "file", "filepath", "file_path", "path"),
    *("image", "image_name", "image_path", "img", "name", "id"),
)
LABEL_COLUMNS = ("label", "class", "category", "cls", "class_name", "label_name", "target", "class_id", "label_id")
"""What the two columns may be called, capitals or not; the first that there is counts."""

OWN_TABLES = tuple(f"{name}{suffix}" for name in ("metadata", "labels") for suffix in TABLES)
"""Tables at the top of a folder that labels = auto looks for; metadata.csv is Hugging Face's convention."""

_NAMED = 1000


class Labelled:
    """A source with the labels of a table. What has no row, and what has a row and is not there, is `unreadable`.

    Raises:
        RequestError: the table cannot be read, has no such columns, contradicts itself, or matches no image.
    """

    held_out: frozenset[str] | None

    def __init__(self, source: Source, table: Path) -> None:
        self._source = source
        self.table = str(table.resolve())
        self.name, self.resolved = source.name, source.resolved
        self.held_out, self.ignored, self.far = source.held_out, source.ignored, source.far
        rows, self._digest = read_table(table)
        found, left = _match(source.names, rows)
        if not found:
            row, image = shown(next(iter(rows))), shown(source.names[0])
            raise RequestError(
                f"no row of {shown(str(table))} names an image of {shown(source.name)}: rows are such as {row!r}, "
                f"images such as {image!r}; write paths as below the source"
            )
        values = [rows[row] for row in found.values()]
        self.classes = tuple(in_order(set(values) - {""}))
        number = {name: i for i, name in enumerate(self.classes)}
        known = [(i, number[value]) for i, value in zip(found, values) if value]
        self._rows = np.array([i for i, _ in known], np.int64)
        self.labels: NDArray[np.int64] | None = np.array([label for _, label in known], np.int64)
        self.names: Sequence[str] = [source.names[i] for i in self._rows]
        self.far_shards: FarShards | None = getattr(source, "far_shards", None)
        unlabelled = set(self._rows.tolist())
        self.unlabelled = [name for i, name in enumerate(source.names) if i not in unlabelled]
        self.unreadable: Sequence[Quarantined] = [
            *source.unreadable,
            *(Quarantined(name, f"without a label in {table.name}") for name in self.unlabelled),
            *_not_there(left, table.name),
        ]
        if not self.classes:
            raise RequestError(f"{shown(str(table))} leaves every label empty; fill its label column")

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


def labelled(source: Source, mode: str) -> Source:
    """The source with the labels of the table that `mode` is the path of, or that "auto" finds; else as it is.

    A table is looked for where it says, then at the top of a folder of images. "auto" uses one at the top when the
    source has no labels of its own, its folders give no classes, every image has a row, and each class four images on
    average.

    Raises:
        RequestError: as Labelled; there is no such table.
    """
    top = source.folder if isinstance(source, FolderSource) else None
    if mode == "auto" and top and source.labels is None:
        return _found_at(source, top) or source
    table = find_table(mode, top)
    return source if table is None or isinstance(source, Labelled) else Labelled(source, table)


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
        raise RequestError(f"labels = {shown(mode)} is not there; give a .csv or .jsonl file, or auto")
    return table


def settled(source: Source, labels: NDArray[np.int64] | None) -> str:
    """The setting that gives the same labels another time: the path of a table, "folders" or "none"."""
    if labels is None:
        return "none"
    return source.table if isinstance(source, Labelled) else "folders"


def _found_at(source: Source, top: Path) -> Labelled | None:
    tables = [top / name for name in OWN_TABLES if (top / name).is_file()]
    if not tables or labels_of(source, "auto")[1] is not None:
        return None
    for table in tables:
        try:
            found = Labelled(source, table)
        except RequestError:  # a table of something else: captions, say
            continue
        if not found.unlabelled and 1 < len(found.classes) <= len(found.names) / 4:
            return found
    return None


def read_table(table: Path) -> tuple[dict[str, str], str]:
    """(label by file name, "" where it is empty; digest of the file).

    Raises:
        RequestError: see Labelled.
    """
    said = shown(str(table))
    try:
        content = table.read_bytes()
        text = content.decode("utf-8-sig")
        rows = _json_rows(text) if table.suffix.lower() in (".jsonl", ".ndjson") else _csv_rows(text, table)
        found = _labels(rows, said)
    except OSError as error:
        raise RequestError(f"{said} is a table {why(error)}; check it") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"{said} is no text in UTF-8 (byte {error.start:,}); save it as that") from None
    except (csv.Error, ValueError, RecursionError) as error:
        raise RequestError(f"{said} is damaged: {str(error)[:100]}; write it anew") from None
    if not found:
        raise RequestError(f"{said} has no rows; write a line for each image")
    return found, hashlib.sha256(content).hexdigest()


def _csv_rows(text: str, table: Path) -> Iterator[Mapping[str, Any]]:
    head = re.sub(r'"[^"]*"', "", text.partition("\n")[0])
    separator = "\t" if table.suffix.lower() == ".tsv" else max(",;\t", key=head.count)
    # Not splitlines, which ends a line at characters that a text may hold, such as U+2028.
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True, skipinitialspace=True)
    header, said = next((line for line in lines if line), []), shown(str(table))
    if not header:
        return
    _column(header, FILE_COLUMNS, "file names", said)  # here, as a dictionary would keep one of two of a name
    _column(header, LABEL_COLUMNS, "labels", said)
    for values in lines:
        if any(value.strip() for value in values[len(header) :]):
            raise RequestError(
                f"{said} has {len(values)} fields in line {lines.line_num:,} and {len(header)} in its header; put "
                f"quotes around what has a {separator!r} in it"
            )
        if values:
            yield dict(zip(header, values))


def _json_rows(text: str) -> Iterator[Mapping[str, Any]]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError(f"line {number:,} is no object in braces")
            yield row


def _labels(rows: Iterable[Mapping[str, Any]], said: str) -> dict[str, str]:
    found: dict[str, str] = {}
    columns: tuple[str, str] | None = None
    for row in rows:
        columns = columns or (
            _column(list(row), FILE_COLUMNS, "file names", said),
            _column(list(row), LABEL_COLUMNS, "labels", said),
        )
        file, value = (row.get(column) for column in columns)
        name = plain(str(file).strip().replace("\\", "/")) if isinstance(file, str | int) else ""
        label = label_text(value)
        if not name or (not label and value not in (None, "")):
            row_says = f"file {shown(str(file)[:60])} and label {shown(str(value)[:60])}"
            raise RequestError(
                f"{said} has a row of {row_says}; each needs a name and one label, a text or a whole number"
            )
        if found.setdefault(name, label) != label:
            raise RequestError(f"{said} calls {shown(name)} both {shown(found[name])} and {shown(label)}; keep one row")
    return found


def _column(header: Sequence[str], known: Sequence[str], of: str, said: str) -> str:
    there: dict[str, list[str]] = {}
    for name in header:
        there.setdefault(name.strip().lower(), []).append(name)
    columns = next((there[name] for name in known if name in there), [])
    if not columns:
        has = ", ".join(shown(name[:30]) for name in list(there)[:8])
        raise RequestError(f"{said} has no column of {of}, but {has}; call one {known[0]} (or {', '.join(known[1:4])})")
    if len(columns) > 1:
        raise RequestError(f"{said} has {len(columns)} columns called {shown(columns[0].strip())}; keep one")
    return columns[0]


def _match(names: Sequence[str], rows: Mapping[str, str]) -> tuple[dict[int, str], set[str]]:
    """(row of each image that has one; rows without an image), by the first way of writing names that fits any.

    Only one way, as else the row of an image elsewhere, of the same base name, would be taken for one here; for the
    same reason a row that names another folder than the image's, val/0.png for train/0.png, is not that image's.
    """
    for spelling in (str, member_of, _base, _stem):
        of_images, of_rows = _unique(names, spelling), _unique(rows, spelling)
        found = {
            i: row
            for key, (i, name) in of_images.items()
            if (row := of_rows.get(key, (0, ""))[1]) and _in_one_folder(member_of(name), row)
        }
        if found:
            return dict(sorted(found.items())), set(rows) - set(found.values())
    return {}, set(rows)


def _unique(names: Iterable[str], spelling: Callable[[str], str]) -> dict[str, tuple[int, str]]:
    """Those names that no other is written like: spelling -> (which, name)."""
    spelt = list(map(spelling, names))
    counts = Counter(spelt)
    return {key: (i, name) for i, (key, name) in enumerate(zip(spelt, names)) if counts[key] == 1}


def _in_one_folder(name: str, row: str) -> bool:
    """Whether two paths may be of one file: the folders of one are the last of the other's."""
    one, other = sorted((name.split("/")[:-1], row.split("/")[:-1]), key=len)
    return one == other[len(other) - len(one) :]


def _base(name: str) -> str:
    return name.rpartition("/")[2]


def _stem(name: str) -> str:
    stem, suffix = os.path.splitext(_base(name))
    return stem if suffix.lower() in SUFFIXES else _base(name)


def _not_there(rows: set[str], table: str) -> Iterator[Quarantined]:
    reason = f"named in {table} and not there"
    yield from (Quarantined(name, reason) for name in sorted(rows)[:_NAMED])
    if len(rows) > _NAMED:
        yield Quarantined(f"{len(rows) - _NAMED:,} more", reason)
