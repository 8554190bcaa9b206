"""Read a table, a CSV, JSONL or parquet file with a column of file names and others, and match it to images."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from unfog.data.settings import TEXT_NAMES
from unfog.data.sources.base import SCAN_SUFFIXES, ImageError, LabelTable, Source
from unfog.data.sources.folder import normalize_path
from unfog.data.sources.image_files import SUFFIXES, os_error_reason
from unfog.errors import RequestError, install_command
from unfog.text import not_utf8, sanitize, suggest

FILE_COLUMNS = (
    *("file_name", "filename", "file", "filepath", "file_path", "path"),
    *("image", "image_name", "image_path", "img", "name", "id"),
)
# Names of the two columns, in lower case; the first one that a table has counts.
LABEL_COLUMNS = ("label", "class", "category", "cls", "class_name", "label_name", "target", "class_id", "label_id")
_BATCH, _MOST_UNPACKED = 256, 2**30  # rows of a parquet file that are read at once, and bytes of those columns
_COMPARED, _LONGEST_HINT = 1000, 300  # columns that a name is compared with, and characters of what they are called
_SHARD = re.compile(r"\.tar/", re.IGNORECASE)
_WHOLE_NUMBER = re.compile(r"-?[0-9]{1,18}")


class MissingColumnError(RequestError):
    """A table lacks a column that was asked for, or there is no table."""


def strip_shard(name: str) -> str:
    """Return an image's name without the shard it is in: "s-000.tar/cats/1.jpg" -> "cats/1.jpg"."""
    return _SHARD.split(name, 1)[-1]


def normalize_label(value: Any) -> str:
    """Return a label as text, "" for what is not a label. Spellings of a whole number agree: 3, "3", 3.0 and "03"."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int | str):
        return ""
    text = str(value).strip() if isinstance(value, str) or abs(value) < 2**63 else ""
    return str(int(text)) if _WHOLE_NUMBER.fullmatch(text) else unicodedata.normalize("NFC", text)


def sort_labels(labels: set[str]) -> list[str]:
    """Return labels sorted as numbers if all are whole numbers ("2" before "10"), else as text."""
    return sorted(labels, key=int if all(map(_WHOLE_NUMBER.fullmatch, labels)) else None)


def read_table(table: LabelTable, second_names: Mapping[str, str] | None = None) -> tuple[dict[str, str], str, str]:
    """Return (file name -> label, "" if it is empty; a digest of the file; the name of the column of labels).

    A file in a folder of `second_names` is named as `Source.names` has it. Raises RequestError if the table is unfit.
    """
    chosen = list[str]()

    def choose(header: Sequence[str]) -> tuple[str, str]:
        chosen[:] = columns = _find_columns(header, table)
        return columns

    found, content = _read(table, choose, lambda rows: _collect_labels(rows, table, choose, second_names or {}))
    # Without columns, as the digest was before they could be named.
    digest = hashlib.sha256(content + "\n".join(table.columns).encode() * any(table.columns)).hexdigest()
    return found, digest, chosen[-1]


def read_cells(
    table: LabelTable, wanted: Sequence[str], second_names: Mapping[str, str] | None = None
) -> dict[str, tuple[Any, ...]]:
    """Return file name -> its cells in the columns `wanted`, as they are in the file; None for a missing one.

    Names are as in `read_table`. RequestError if the table is unfit, lacks a column, or contradicts itself.
    """
    return _read(
        table,
        lambda header: _find_named(header, wanted, table),
        lambda rows: _collect_cells(rows, wanted, table, _spelled(second_names or {})),
    )[0]


def read_rows(table: LabelTable) -> list[Mapping[str, Any]]:
    """Return the rows of a table of any columns; blank lines are left out. RequestError if it is unfit."""

    def choose(header: Sequence[str]) -> Sequence[str]:
        name, count = Counter(header).most_common(1)[0]
        if count > 1:
            raise RequestError(f"{sanitize(table.name)} has {count} columns called {sanitize(name)}; keep one")
        return header

    return _read(table, choose, list)[0]


_Found = TypeVar("_Found", bound=Collection[Any])


_Choose = Callable[[Sequence[str]], Sequence[str]]


def _read(
    table: LabelTable, choose: _Choose, collect: Callable[[Iterable[Mapping[str, Any]]], _Found]
) -> tuple[_Found, bytes]:
    """Return (what `collect` makes of the rows, the content).

    `choose` is called with the header, except of JSON lines, and returns the columns that the rows need to have.
    """
    said, suffix = sanitize(table.name), os.path.splitext(table.base_name)[1].lower()
    try:
        content = table.read()
        if suffix == ".parquet":
            found = collect(_parquet_rows(content, choose))
        elif suffix in (".jsonl", ".ndjson"):
            found = collect(_json_rows(content.decode("utf-8-sig")))
        else:
            found = collect(_csv_rows(content.decode("utf-8-sig"), table, choose))
    except OSError as error:
        raise RequestError(f"{said} is a table {os_error_reason(error)}; check it") from None
    except ImageError as error:
        raise RequestError(
            f"{said} cannot be read ({error}); put it next to the archive, or make the archive again"
        ) from None
    except UnicodeDecodeError as error:
        raise RequestError(f"{said} {not_utf8(error)}") from None
    except (csv.Error, ValueError, RecursionError) as error:
        if "field larger than field limit" in str(error):  # a long text, or a quote that nothing closes
            raise RequestError(
                f"{said} has a cell of more than {csv.field_size_limit():,} characters; shorten it, or close the "
                "quote before it"
            ) from None
        raise RequestError(f"{said} is damaged: {str(error)[:100]}; write it again") from None
    if not found:
        raise RequestError(f"{said} has no rows; write a line for each image")
    return found, content


def _csv_rows(text: str, table: LabelTable, choose: _Choose) -> Iterator[Mapping[str, Any]]:
    # Separators inside quotes are text, not separators.
    head = re.sub(r'"[^"]*"', "", text.partition("\n")[0])
    separator = "\t" if table.base_name.lower().endswith(".tsv") else max(",;\t", key=head.count)
    # StringIO with newline="" rather than splitlines, which also ends lines at U+2028 and others inside a text.
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True, skipinitialspace=True)
    header, said = next((line for line in lines if line), []), sanitize(table.name)
    if not header:
        return
    places = {name: header.index(name) for name in choose(header)}
    for values in lines:
        if any(value.strip() for value in values[len(header) :]):
            raise RequestError(
                f"{said} has {len(values)} fields in line {lines.line_num:,} and {len(header)} in its header; put "
                f"quotes around what has a {separator!r} in it"
            )
        if any(value.strip() for value in values):
            yield {name: values[k] for name, k in places.items() if k < len(values)}


def _json_rows(text: str) -> Iterator[Mapping[str, Any]]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{error.msg} in line {number:,}, character {error.pos + 1:,}") from None
            if not isinstance(row, dict):
                raise ValueError(f"line {number:,} is not an object in braces")
            if any(not (value is None or (isinstance(value, str) and not value.strip())) for value in row.values()):
                yield row


def _parquet_rows(content: bytes, choose: _Choose) -> Iterator[Mapping[str, Any]]:
    """Return the rows of a parquet file, of which the chosen columns alone are read."""
    try:
        import pyarrow as pa  # type: ignore[import-untyped, import-not-found, unused-ignore]
        import pyarrow.parquet as pq  # type: ignore[import-untyped, import-not-found, unused-ignore]
    except ImportError:
        raise RequestError(f"a parquet table needs pyarrow, which is not installed: {install_command('hf')}") from None
    try:
        with pq.ParquetFile(io.BytesIO(content)) as file:
            chosen, unpacked = list(choose(file.schema_arrow.names)), 0
            for batch in file.iter_batches(_BATCH, columns=chosen):
                # A dictionary lets a file of kilobytes repeat a text a million times.
                if (unpacked := unpacked + batch.nbytes) > _MOST_UNPACKED:
                    raise ValueError(f"it unpacks to over {_MOST_UNPACKED / 1e9:.1f} GB")
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise ValueError(str(error)) from None


def _collect_labels(
    rows: Iterable[Mapping[str, Any]], table: LabelTable, choose: _Choose, second_names: Mapping[str, str]
) -> dict[str, str]:
    said = sanitize(table.name)
    spelled = _spelled(second_names)
    found: dict[str, str] = {}
    columns: Sequence[str] = ()
    for row in rows:
        columns = columns or choose(list(row))
        file, value = (row.get(column) for column in columns)
        name = _file_name(file, spelled)
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


def _spelled(second_names: Mapping[str, str]) -> dict[str, str]:
    return {unicodedata.normalize("NFC", second): first for second, first in second_names.items()}


def _file_name(cell: Any, spelled: Mapping[str, str]) -> str:
    """Return the name of a cell's file as `match_rows` compares it; "" if it is not a name."""
    written = unicodedata.normalize("NFC", str(cell).strip())
    name = normalize_path(written.replace("\\", "/")) if isinstance(cell, str | int) else ""
    for second, first in spelled.items():
        if name.startswith(second):
            name = unicodedata.normalize("NFC", first + name[len(second) :])
    return name


def _collect_cells(
    rows: Iterable[Mapping[str, Any]], wanted: Sequence[str], table: LabelTable, spelled: Mapping[str, str]
) -> dict[str, tuple[Any, ...]]:
    said, found, seen = sanitize(table.name), dict[str, tuple[Any, ...]](), set[str]()
    file = ""
    for row in rows:
        file = file or _find_column(list(row), FILE_COLUMNS, "file names", table, "")
        seen.update(name for name in wanted if name in row)
        if not (name := _file_name(row.get(file), spelled)):
            raise RequestError(f"{said} has a row without a file name, after {len(found):,} others; name its image")
        cells = tuple(row.get(each) for each in wanted)
        if found.setdefault(name, cells) != cells:
            raise RequestError(f"{said} has two rows of {sanitize(name)} with other values; keep one")
    if found and (missing := [name for name in wanted if name not in seen]):
        raise _missing_column(list(row), missing[0], table)
    return found


def _find_named(header: Sequence[str], wanted: Sequence[str], table: LabelTable) -> list[str]:
    """Return the column of file names and those that are wanted. RequestError unless each is there, once."""
    file = _find_column(header, FILE_COLUMNS, "file names", table, "")
    for name in wanted:
        if (count := header.count(name)) > 1:
            raise RequestError(f"{sanitize(table.name)} has {count} columns called {sanitize(name)}; keep one")
        if not count:
            raise _missing_column(header, name, table)
    return list(dict.fromkeys([file, *wanted]))


def _missing_column(header: Sequence[str], name: str, table: LabelTable) -> MissingColumnError:
    near = suggest(name, [sanitize(one[:30]) for one in header[:_COMPARED]])
    hint = near if len(near) < _LONGEST_HINT else f"; it has {', '.join(sanitize(one[:30]) for one in header[:12])}, …"
    return MissingColumnError(f"{sanitize(table.name)} has no column {sanitize(name)!r}{hint}")


def _find_columns(header: Sequence[str], table: LabelTable) -> tuple[str, str]:
    """Return the columns of file names and of labels, as the header spells them."""
    file, label = table.columns
    found = (
        _find_column(header, (file,) if file else FILE_COLUMNS, "file names", table),
        _find_column(header, (label,) if label else LABEL_COLUMNS, "labels", table),
    )
    if found[0] == found[1]:
        raise RequestError(
            f"the column {sanitize(found[0].strip())} of {sanitize(table.name)} holds the names of the files; give "
            f"another one for the labels: --data.labels {sanitize(table.base_name)}:FILE,LABEL"
        )
    return found


def column_key(name: str) -> str:
    """Return the name of a column as names are compared, in small letters."""
    return unicodedata.normalize("NFC", name.strip()).casefold()


def _find_column(
    header: Sequence[str], known: Sequence[str], of: str, table: LabelTable, remedy: str | None = None
) -> str:
    said, there = sanitize(table.name), dict[str, list[str]]()
    for name in header:
        there.setdefault(column_key(name), []).append(name)
    columns = next((there[key] for key in map(column_key, known) if key in there), [])
    # Of two that differ in case, the one that is named exactly; `known` of the usual names is in small letters.
    if known[0] in table.columns and columns.count(known[0]) == 1:
        columns = [known[0]]
    if not columns:
        has = ", ".join(sanitize(name[:30]) for name in list(there)[:12]) + ", …" * (len(there) > 12)
        named = f"called {sanitize(known[0])}" if known[0] in table.columns else f"of {of}"
        call = "" if known[0] in table.columns else f"call one {known[0]} (or {', '.join(known[1:4])})"
        if remedy is None:
            remedy = f"name those of files and labels: --data.labels {sanitize(table.base_name)}:FILE,LABEL"
        call += f"{', or ' * bool(call and remedy)}{remedy}"
        if of == "labels" and (captions := [key for key in there if key in TEXT_NAMES]):
            call = f"--condition {captions[0]} learns its captions; or {call}"
        raise RequestError(f"{said} has no column {named}, only {has}; {call}")
    if len(columns) > 1:
        raise RequestError(f"{said} has {len(columns)} columns called {sanitize(columns[0].strip())}; keep one")
    return columns[0]


_Spelling = Callable[[str], str]


def match_images(source: Source, rows: Collection[str]) -> tuple[dict[int, str], set[str]]:
    """Return (index of an image -> its row; rows without an image), as `match_rows`.

    A row of a file is that of all its images, such as the slices of a volume, if they have no row of their own.
    """
    row_of, unmatched = match_rows(source.names, rows)
    if source.groups is None or not unmatched:
        return row_of, unmatched
    files, group = source.groups
    row_of_file, _ = match_rows(files, rows)
    of_files = {i: row_of_file[file] for i, file in enumerate(group.tolist()) if file in row_of_file}
    return dict(sorted((of_files | row_of).items())), unmatched - set(row_of_file.values())


def match_rows(names: Sequence[str], rows: Collection[str]) -> tuple[dict[int, str], set[str]]:
    """Return (index of an image -> its row; rows without an image). The rows must be in Unicode NFC.

    Whole paths are compared if any is in both; else one spelling of them, the one that matches most rows.
    """
    # Only one spelling, as a mix would take the row of an image elsewhere, of the same base name, for one here. For the
    # same reason a row that names another folder, val/0.png for train/0.png, is not that image's. NFC, as macOS writes
    # file names in another form than people type.
    names = [unicodedata.normalize("NFC", name) for name in names]
    found = _match_by(names, rows, str, str) or _match_by(names, rows, strip_shard, strip_shard)
    if not found:
        pairs = [_below_shared(names, rows), (_base, _base), (_stem, _stem)]  # max() takes the first of equals
        found = max((_match_by(names, rows, *pair) for pair in pairs), key=len)
    return dict(sorted(found.items())), set(rows) - set(found.values())


def _match_by(
    names: Sequence[str], rows: Collection[str], spell_name: _Spelling, spell_row: _Spelling
) -> dict[int, str]:
    """Return image -> row where the spellings of both are equal, and no other image's or row's."""
    of_images, of_rows = _unique(names, spell_name), _unique(rows, spell_row)
    return {
        i: row
        for key, (i, name) in of_images.items()
        if (row := of_rows.get(key, (0, ""))[1]) and _same_folder(strip_shard(name), row)
    }


def _below_shared(names: Sequence[str], rows: Collection[str]) -> tuple[_Spelling, _Spelling]:
    """Return spellings without the leading folders that all rows, or all images, share: as many as match the most."""
    members = {strip_shard(name) for name in names}
    fits = [(sum(row[cut:] in members for row in rows), 0, cut) for cut in _shared(rows)]
    fits += [(sum(name[cut:] in rows for name in members), cut, 0) for cut in _shared(members)]
    _, of_name, of_row = max(fits, key=lambda fit: fit[0], default=(0, 0, 0))
    return lambda name: strip_shard(name)[of_name:], lambda row: row[of_row:]


def _shared(paths: Collection[str]) -> list[int]:
    """Return the lengths of the first, the first two, … leading folders that all paths share."""
    first, last = min(paths), max(paths)
    return [i for i, character in enumerate(first, 1) if character == "/" and last.startswith(first[:i])]


def _unique(names: Iterable[str], spelling: _Spelling) -> dict[str, tuple[int, str]]:
    """Return spelling -> (index, name) of the names whose spelling no other name has."""
    keys = list(map(spelling, names))
    counts = Counter(keys)
    return {key: (i, name) for i, (key, name) in enumerate(zip(keys, names)) if counts[key] == 1}


def _same_folder(name: str, row: str) -> bool:
    """Return True if two paths may be of one file: the folders of one are the last of the other's."""
    one, other = sorted((name.split("/")[:-1], row.split("/")[:-1]), key=len)
    return one == other[len(other) - len(one) :]


def _base(name: str) -> str:
    return name.rpartition("/")[2]


def _stem(name: str) -> str:
    base = _base(name)
    stem, suffix = os.path.splitext(base)
    scan = next((one for one in SCAN_SUFFIXES if base.lower().endswith(one)), "")
    return base[: -len(scan)] if scan else stem if suffix.lower() in SUFFIXES else base
