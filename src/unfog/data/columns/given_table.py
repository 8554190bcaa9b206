"""A table of conditions to draw: a row for each sample, with the columns of a run; and the table of what was drawn."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from unfog.data.columns.kinds import cell_value
from unfog.data.sources.base import LabelTable
from unfog.data.sources.label_tables import FILE_COLUMNS, LABEL_COLUMNS, column_key, normalize_label, read_rows
from unfog.errors import RequestError
from unfog.files.safe_files import write_atomic
from unfog.text import sanitize
from unfog.values.columns import CLASS
from unfog.values.condition_format import TEXT, ConditionFormat, Given
from unfog.values.condition_kinds import ColumnFacts, kind_of
from unfog.values.kinds.image_kinds import IMAGE_KINDS

MOST_ROWS = 1_000_000
"""Most rows of a table of conditions."""
GIVEN_TABLE = "given.csv"
"""Name of the table of the conditions of samples, in their folder."""
_COMPARED, _SHOWN = 1000, 12  # columns whose names are compared with those of conditions, and shown in a message


class GivenTable(NamedTuple):
    """Conditions of samples, row by row."""

    given: dict[str, list[object]]
    """Words of each condition, as `ConditionFormat.parse` takes them; None for an empty cell."""
    files: list[str]
    """The name of each row's file, without folders and suffix; [] without a column of file names."""
    unused: list[str]
    """The first columns without a condition of this name."""

    @property
    def rows(self) -> int:
        """Number of rows, one for each image to sample."""
        return len(next(iter(self.given.values())))


def read_given_table(path: Path, format: ConditionFormat) -> GivenTable:
    """Read a .csv, .tsv or .jsonl file. Labels and names of files may be in columns of their usual names.

    RequestError if it cannot be read, has no column of a condition, or an invalid value, with its row.
    """
    if not path.is_file():
        raise RequestError(f"given_table = {sanitize(str(path))} is not a file; give a .csv, .tsv or .jsonl file")
    table, said = LabelTable.from_path(path), sanitize(path.name)
    rows = read_rows(table)
    if len(rows) > MOST_ROWS:
        raise RequestError(f"{said} has {len(rows):,} rows, and the most are {MOST_ROWS:,}; split it")
    header = list(dict.fromkeys(name for row in rows for name in row))
    facts = {one.name: one for one in format.facts}
    columns = {name: name for name in facts if name in header}
    if CLASS in facts and CLASS not in columns and (usual := _usual(header, LABEL_COLUMNS, facts)):
        columns[CLASS] = usual
    file, others = _usual(header, FILE_COLUMNS, facts), [name for name in header if name not in columns.values()]
    _check_names(said, others, facts, columns)
    given = dict[str, list[object]]()
    for name, column in columns.items():
        read = partial(_path, path.parent) if facts[name].kind in IMAGE_KINDS else _word
        given[name] = [read(said, i, facts[name], row.get(column)) for i, row in enumerate(rows)]
    files = [_stem(row.get(file)) for row in rows] if file else []
    return GivenTable(given, files, [sanitize(name[:60]) for name in others if name != file][:_SHOWN])


def save_given_table(folder: Path, format: ConditionFormat, given: Given, files: Sequence[str]) -> None:
    """Write the conditions of samples as a table that `read_given_table` reads. Nothing without conditions.

    Each of `files` has a row. Conditions that are images, and those of which no sample has a value, have no column.
    """
    columns = dict[str, list[str]]()
    for facts in format.facts:
        cells = [kind_of(facts.kind).cell(facts, value) for value in dict(given).get(facts.name, ())]
        if any(cells) and facts.kind not in IMAGE_KINDS:
            columns[facts.name] = cells
    if not columns:
        return
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow([FILE_COLUMNS[0], *columns])
    writer.writerows([file, *(column[i % len(column)] for column in columns.values())] for i, file in enumerate(files))
    write_atomic(folder / GIVEN_TABLE, table.getvalue().encode(), folder)


def _usual(header: Sequence[str], known: Sequence[str], facts: Mapping[str, ColumnFacts]) -> str:
    """Return the column with the first of these names, other than conditions; "" without one."""
    there = {column_key(name): name for name in reversed(header) if name not in facts}
    return next((there[name] for name in known if name in there), "")


def _check_names(
    said: str, others: Sequence[str], facts: Mapping[str, ColumnFacts], columns: Mapping[str, str]
) -> None:
    missing = [name for name in facts if name not in columns]
    for name in others[:_COMPARED]:
        if near := get_close_matches(name.strip(), missing, 1, 0.7):
            raise RequestError(f"{said} has a column {sanitize(name[:60])!r}; did you mean {near[0]!r}?")
    if not facts:
        raise RequestError(f"{said}: this run has no conditions, so omit given_table")
    if not columns:
        raise RequestError(
            f"{said} has no column of a condition, only {', '.join(map(sanitize, others[:_SHOWN]))}; the conditions of "
            f"this run are {', '.join(facts)}"
        )


def _word(said: str, row: int, facts: ColumnFacts, cell: Any) -> object:
    """Return a cell as `ConditionFormat.parse` takes it. RequestError, with the number of the row, if it is invalid."""
    value: object = cell_value(cell)
    if facts.categories and facts.kind != TEXT:
        value = (
            [normalize_label(one) or one for one in value]
            if isinstance(value, tuple)
            else normalize_label(value) or value
        )
    if value is None:
        return None
    try:
        kind_of(facts.kind).parse(facts, value)
    except RequestError as error:
        raise RequestError(f"{said}, row {row + 1:,}: {error}") from None
    return value


def _path(folder: Path, said: str, row: int, facts: ColumnFacts, cell: Any) -> object:
    """Return a cell as the path of an image, from the folder of the table. RequestError if there is no such file."""
    if (value := cell_value(cell)) is None:
        return None
    path = folder / str(value)
    if not path.is_file():
        raise RequestError(
            f"{said}, row {row + 1:,}: {facts.name} = {sanitize(str(value))[:60]} is not a file beside the table"
        )
    return str(path)


def _stem(cell: Any) -> str:
    name = sanitize(str(cell)).strip().replace("\\", "/").rpartition("/")[2] if isinstance(cell, str | int) else ""
    return name.rpartition(".")[0] or name
