"""Columns of a metrics.jsonl, read as the file grows: each reading costs as much as there are new lines.

A position in the file is a byte offset after a whole line, so that a page can ask for what it lacks. The file may also
become shorter, as a resume drops the lines after its checkpoint: then it is read anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from itertools import repeat
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import orjson

from unfog.files.safe_files import open_file
from unfog.reporting.records import LARGEST, finite_number

Floats = npt.NDArray[np.float64]

_BLOCK = 2**21  # bytes that are parsed at once; longer lines are skipped
_TAIL = 256  # bytes before an offset that identify the file
_LARGEST_RECORD = 2**30  # bytes that are read of a file
_MOST_COLUMNS, _MOST_CELLS = 256, 2**26  # per run; a file that a stranger wrote could ask for any memory
_MOST_ITEMS = 64  # of a list that becomes columns
_LONGEST_NAME = 100


class Growing:
    """A 1-d float64 array to which values are appended. Its memory doubles, so that appending is cheap."""

    def __init__(self, rows: int = 0) -> None:
        self._data = np.full(max(64, rows), np.nan)
        self.rows = rows

    @property
    def memory(self) -> int:
        """Bytes of its array, the free room at the end included."""
        return self._data.nbytes

    @property
    def values(self) -> Floats:
        """The values so far, float64 [rows]. A view; later appends do not change it."""
        return self._data[: self.rows]

    def append(self, values: Floats) -> None:
        """Append values, float64 [n], to the column."""
        rows = self.rows + len(values)
        if rows > len(self._data):
            data = np.full(max(rows, 2 * len(self._data)), np.nan)
            data[: self.rows] = self.values
            self._data = data
        self._data[self.rows : rows] = values
        self.rows = rows


class MetricColumns:
    """Numbers of one metrics.jsonl by column. A list of numbers `a` becomes the columns `a.0`, `a.1`, …

    Attributes:
        offset: bytes that are read, up to the end of a whole line.
        generation: how often the file was read anew, since what had been read is no longer in it.
    """

    def __init__(self, path: Path) -> None:
        self._path, self.generation = path, 0
        self._lock = threading.Lock()
        self._clear(b"")

    def _clear(self, file: bytes) -> None:
        self._file, self.offset, self._tail = file, 0, b""
        self._columns: dict[str, Growing] = {}
        self._names: set[str] = set()
        self._ends = Growing()  # offset after the line of each row; exact in float64 up to 2**53

    @property
    def rows(self) -> int:
        return self._ends.rows

    @property
    def names(self) -> list[str]:
        return list(self._columns)

    @property
    def memory(self) -> int:
        """Bytes of memory that the columns take."""
        return sum(one.memory for one in (self._ends, *self._columns.values()))

    def update(self) -> None:
        """Read the lines that were appended. A missing file has no rows."""
        with self._lock:
            try:
                with open_file(self._path, "rb", self._path.parent) as file:
                    self._read_new(file)
            except OSError:
                if self.offset:
                    self.generation += 1
                self._clear(b"")

    def column(self, name: str) -> Floats:
        """Return float64 [rows] of a column, nan if it was not recorded; all nan for an unknown name."""
        found = self._columns.get(name)
        return found.values if found is not None else np.full(self.rows, np.nan)

    def row_after(self, offset: int) -> int:
        """Return the number of rows before a byte offset."""
        return int(np.searchsorted(self._ends.values, offset, side="right"))

    def identity(self, offset: int) -> str:
        """Return a digest of the file and of what is before `offset`; "" if the file is shorter."""
        with suppress(OSError), open_file(self._path, "rb", self._path.parent) as file:
            tail = os.pread(file.fileno(), min(offset, _TAIL), max(0, offset - _TAIL))
            if len(tail) == min(offset, _TAIL):
                return hashlib.sha256(_file_id(file) + tail).hexdigest()[:24]
        return ""

    def _read_new(self, file: BinaryIO) -> None:
        size, name = min(os.fstat(file.fileno()).st_size, _LARGEST_RECORD), _file_id(file)
        tail = os.pread(file.fileno(), len(self._tail), max(0, self.offset - len(self._tail)))
        # A resume rewrites the file without the undone lines, and it may have grown past the old size since.
        if size < self.offset or name != self._file or tail != self._tail:
            self.generation += bool(self.offset)
            self._clear(name)
        before = self.offset
        while self.offset < size and self.rows * (1 + len(self._columns)) < _MOST_CELLS:
            block = os.pread(file.fileno(), min(_BLOCK, size - self.offset), self.offset)
            whole = block.rfind(b"\n") + 1
            if not whole:
                if len(block) < _BLOCK:
                    break  # a line that is being written
                whole = len(block)
            self.append_lines(block[:whole].split(b"\n"))
            self.offset += whole
        if self.offset != before:
            self._tail = os.pread(file.fileno(), min(_TAIL, self.offset), max(0, self.offset - _TAIL))

    def append_lines(self, lines: list[bytes]) -> None:
        """Append the rows of these lines; those that are not JSON objects are left out."""
        ends = self.offset + np.cumsum([len(line) + 1 for line in lines], dtype=np.float64)
        rows, kept = parse_lines(lines)
        # Nearly all rows have the same names, so that each set of them is looked at once.
        names = dict.fromkeys(name for some in dict.fromkeys(map(tuple, rows)) for name in some)
        first = self.rows
        for name in names:
            # Each name costs a look at all rows, and a stranger's file could have a new one in each.
            if name in self._names or len(self._names) < _MOST_COLUMNS:
                self._names.add(name)
                self._append_values(name, list(map(dict.get, rows, repeat(name))), first)
        self._ends.append(ends[kept])
        for column in self._columns.values():
            if missing := self.rows - column.rows:
                column.append(np.full(missing, np.nan))

    def _append_values(self, name: str, values: list[Any], first: int) -> None:
        if len(name) > _LONGEST_NAME:
            return
        kinds = set(map(type, values))
        if kinds & {int, float} or kinds == {type(None)}:
            self._append_numbers(name, values, first)
        if list in kinds and not self._append_equal_lists(name, values, first):
            lists = [value if isinstance(value, list) else [] for value in values]
            for i in range(min(_MOST_ITEMS, max(map(len, lists)))):
                self._append_numbers(f"{name}.{i}", [one[i] if i < len(one) else None for one in lists], first)

    def _append_equal_lists(self, name: str, values: list[Any], first: int) -> bool:
        """Append lists that are all there, of one length and of numbers: the usual ones. Return False for others."""
        with suppress(ValueError, TypeError, OverflowError):
            table = np.array(values, np.float64)
            if table.ndim == 2:
                table[~(np.abs(table) < LARGEST)] = np.nan
                for i in range(min(_MOST_ITEMS, table.shape[1])):
                    self._append_column(f"{name}.{i}", table[:, i], first)
                return True
        return False

    def _append_numbers(self, name: str, values: list[Any], first: int) -> None:
        self._append_column(name, _floats(values), first)

    def _append_column(self, name: str, values: Floats, first: int) -> None:
        if name not in self._columns:
            if len(self._columns) >= _MOST_COLUMNS:
                return
            self._columns[name] = Growing(first)
        self._columns[name].append(values)


def _floats(values: list[Any]) -> Floats:
    """Return float64 [n], nan for what is not a finite number."""
    if set(map(type, values)) <= {int, float, type(None)}:
        with suppress(OverflowError):  # an integer of over 300 digits
            numbers = np.array(values, np.float64)
            numbers[~(np.abs(numbers) < LARGEST)] = np.nan
            return numbers
    return np.array([finite_number(value) for value in values], np.float64)


def parse_lines(lines: Sequence[bytes]) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the rows of the lines that are JSON objects, and the places of those lines."""
    places = [i for i, line in enumerate(lines) if line.strip()]
    with suppress(ValueError):
        # All lines at once, by a parser of five times the speed; the usual one may read what it refuses, such as NaN.
        rows = orjson.loads(b"[" + b",".join(lines[i] for i in places) + b"]")
        if len(rows) == len(places) and all(type(row) is dict for row in rows):
            return rows, places
    rows, kept = [], []
    for i in places:
        with suppress(ValueError, RecursionError):
            row = json.loads(lines[i])
            if isinstance(row, dict):
                rows.append(row)
                kept.append(i)
    return rows, kept


def _file_id(file: BinaryIO) -> bytes:
    found = os.fstat(file.fileno())
    return f"{found.st_dev}:{found.st_ino};".encode()
