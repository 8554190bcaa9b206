"""The rows of a table of labels: a CSV or JSONL file with a column of file names and one of classes."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unfog.data.sources.image_files import ImageError, os_error_reason
from unfog.data.webdataset.index_builder import normalize_label, normalize_path
from unfog.errors import RequestError
from unfog.text import sanitize

FILE_COLUMNS = (
    *("file_name", "filename", "file", "filepath", "file_path", "path"),
    *("image", "image_name", "image_path", "img", "name", "id"),
)
LABEL_COLUMNS = ("label", "class", "category", "cls", "class_name", "label_name", "target", "class_id", "label_id")
"""What the two columns may be called, capitals or not; the first that there is counts."""


@dataclass(frozen=True)
class LabelTable:
    """A file of labels, maybe a member of an archive."""

    name: str
    """Its path as the user wrote it, for messages."""

    resolved: str
    """How to find it again from anywhere; of a member, ARCHIVE.zip/labels.csv."""

    read: Callable[[], bytes]
    """Its content. Raises OSError or ImageError."""

    @classmethod
    def at(cls, path: Path) -> LabelTable:
        """A file of its own."""
        return cls(str(path), str(path.resolve()), path.read_bytes)

    @property
    def base(self) -> str:
        """Its name without folders."""
        return os.path.basename(self.resolved)


def read_table(table: LabelTable) -> tuple[dict[str, str], str]:
    """(label by file name, "" where it is empty; digest of the file).

    Raises:
        RequestError: it cannot be read, has no such columns, or contradicts itself.
    """
    said = sanitize(table.name)
    try:
        content = table.read()
        text = content.decode("utf-8-sig")
        rows = _json_rows(text) if table.base.lower().endswith((".jsonl", ".ndjson")) else _csv_rows(text, table)
        found = _labels(rows, said)
    except OSError as error:
        raise RequestError(f"{said} is a table {os_error_reason(error)}; check it") from None
    except ImageError as error:
        raise RequestError(f"{said} cannot be read ({error}); put it beside the archive, or make that anew") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"{said} is no text in UTF-8 (byte {error.start:,}); save it as that") from None
    except (csv.Error, ValueError, RecursionError) as error:
        raise RequestError(f"{said} is damaged: {str(error)[:100]}; write it anew") from None
    if not found:
        raise RequestError(f"{said} has no rows; write a line for each image")
    return found, hashlib.sha256(content).hexdigest()


def _csv_rows(text: str, table: LabelTable) -> Iterator[Mapping[str, Any]]:
    head = re.sub(r'"[^"]*"', "", text.partition("\n")[0])
    separator = "\t" if table.base.lower().endswith(".tsv") else max(",;\t", key=head.count)
    # Not splitlines, which ends a line at characters that a text may hold, such as U+2028.
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True, skipinitialspace=True)
    header, said = next((line for line in lines if line), []), sanitize(table.name)
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
        if _is_empty(row):
            continue
        columns = columns or (
            _column(list(row), FILE_COLUMNS, "file names", said),
            _column(list(row), LABEL_COLUMNS, "labels", said),
        )
        file, value = (row.get(column) for column in columns)
        written = unicodedata.normalize("NFC", str(file).strip())  # as `match` compares names
        name = normalize_path(written.replace("\\", "/")) if isinstance(file, str | int) else ""
        label = normalize_label(value)
        if not name or (not label and value not in (None, "")):
            row_says = f"file {sanitize(str(file)[:60])} and label {sanitize(str(value)[:60])}"
            raise RequestError(
                f"{said} has a row of {row_says}; each needs a name and one label, a text or a whole number"
            )
        if found.setdefault(name, label) != label:
            raise RequestError(
                f"{said} calls {sanitize(name)} both {sanitize(found[name])} and {sanitize(label)}; keep one row"
            )
    return found


def _is_empty(row: Mapping[str, Any]) -> bool:
    """Whether no value of a row says anything, as in those that spreadsheets leave at the end."""
    return all(value is None or (isinstance(value, str) and not value.strip()) for value in row.values())


def _column(header: Sequence[str], known: Sequence[str], of: str, said: str) -> str:
    there: dict[str, list[str]] = {}
    for name in header:
        there.setdefault(name.strip().lower(), []).append(name)
    columns = next((there[name] for name in known if name in there), [])
    if not columns:
        has = ", ".join(sanitize(name[:30]) for name in list(there)[:8])
        raise RequestError(f"{said} has no column of {of}, but {has}; call one {known[0]} (or {', '.join(known[1:4])})")
    if len(columns) > 1:
        raise RequestError(f"{said} has {len(columns)} columns called {sanitize(columns[0].strip())}; keep one")
    return columns[0]
