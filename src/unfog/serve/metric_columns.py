"""Columns of a metrics.jsonl for the charts: read as the file grows, sampled if it is long, and thinned for the screen.

Each reading costs as much as there are new lines. A position in the file is a byte offset after a whole line, so that a
page can ask for what it lacks. The file may also become shorter, as a resume drops the lines after its checkpoint: then
it is read anew.

Thinning keeps the least, most, mean and last value of blocks of rows, so a chart with more rows than pixels shows every
extreme. Blocks begin at fixed rows, so a curve does not flicker as it grows or moves. If few rows are in view, they are
exact.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import repeat
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

from unfog.files.positions import pread
from unfog.files.safe_files import open_file
from unfog.reporting.records import LARGEST, finite_number

Floats = npt.NDArray[np.float64]

_BLOCK = 2**21  # bytes that are parsed at once; longer lines are skipped
_TAIL = 256  # bytes before an offset that identify the file
_LARGEST_RECORD = 2**30  # bytes that are read of a file
_MOST_COLUMNS, _MOST_CELLS = 256, 2**26  # per run; a file that a stranger wrote could ask for any memory
_MOST_ITEMS = 64  # of a list that becomes columns
_LONGEST_NAME = 100
LONG = 2**24  # bytes; records below are read whole in half a second
_PLACES, _PIECE = 400, 6144  # pieces of the file that are read, and bytes of each
_BASE = 16  # rows of a block of the lowest level; each level above has blocks of twice as many


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
            tail = pread(file.fileno(), min(offset, _TAIL), max(0, offset - _TAIL))
            if len(tail) == min(offset, _TAIL):
                return hashlib.sha256(_file_id(file) + tail).hexdigest()[:24]
        return ""

    def _read_new(self, file: BinaryIO) -> None:
        size, name = min(os.fstat(file.fileno()).st_size, _LARGEST_RECORD), _file_id(file)
        tail = pread(file.fileno(), len(self._tail), max(0, self.offset - len(self._tail)))
        # A resume rewrites the file without the undone lines, and it may have grown past the old size since.
        if size < self.offset or name != self._file or tail != self._tail:
            self.generation += bool(self.offset)
            self._clear(name)
        before = self.offset
        while self.offset < size and self.rows * (1 + len(self._columns)) < _MOST_CELLS:
            block = pread(file.fileno(), min(_BLOCK, size - self.offset), self.offset)
            whole = block.rfind(b"\n") + 1
            if not whole:
                if len(block) < _BLOCK:
                    break  # a line that is being written
                whole = len(block)
            self.append_lines(block[:whole].split(b"\n"))
            self.offset += whole
        if self.offset != before:
            self._tail = pread(file.fileno(), min(_TAIL, self.offset), max(0, self.offset - _TAIL))

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


class Sample(NamedTuple):
    """Lines at even distances of a record."""

    columns: MetricColumns
    rows: int
    """About as many as the whole record has."""


def read_sample(path: Path) -> Sample:
    """Read lines at even distances, the first and the last included. OSError if the file cannot be read."""
    lines = list[bytes]()
    with open_file(path, "rb", path.parent) as file:
        size = os.fstat(file.fileno()).st_size
        for i in range(_PLACES):
            start = max(0, size - _PIECE) * i // (_PLACES - 1)
            piece = pread(file.fileno(), _PIECE, start)
            # What is cut off at either end is not a line; a file that is shorter than thought would repeat some.
            lines += piece.split(b"\n")[bool(start) : -1]
    columns = MetricColumns(path)
    columns.append_lines(lines)
    length = sum(map(len, lines)) + len(lines)
    return Sample(columns, size * len(lines) // length if length else 0)


class _Thinned(NamedTuple):
    """Columns of a part of a record."""

    columns: dict[str, Floats]
    """With blocks: x under its name, and NAME.min, .max, .mean and .last of each; else as they are."""
    block: int
    """Rows of a block; 1: exact."""


class _Pyramid:
    """Least, most and last finite value, sum and count of whole blocks of one column, for 16, 32, 64, … rows."""

    def __init__(self) -> None:
        self.levels: list[list[Growing]] = []

    def update(self, values: Floats) -> None:
        """Add the blocks that were completed since the last call."""
        level, source = 0, _as_blocks(values)
        while True:
            if level == len(self.levels):
                self.levels.append([Growing() for _ in REDUCTIONS])
            width, done = (2 if level else _BASE), self.levels[level][0].rows
            whole = len(source[0]) // width
            if whole > done:
                for reduce, grown, part in zip(REDUCTIONS, self.levels[level], source):
                    grown.append(reduce(part[done * width : whole * width].reshape(-1, width)))
            if whole < 2:
                return
            level, source = level + 1, [grown.values for grown in self.levels[level]]

    def blocks(self, values: Floats, level: int, first: int, end: int) -> list[Floats]:
        """Return least, most, last, sum and count of blocks first … end - 1; the last may be incomplete."""
        width = _BASE << level
        whole = self.levels[level][0].rows if level < len(self.levels) else 0
        rest = values[max(whole, first) * width : end * width]
        parts = []
        for kind, (reduce, part) in enumerate(zip(REDUCTIONS, _as_blocks(rest))):
            stored = self.levels[level][kind].values[first : min(end, whole)] if whole else np.empty(0)
            # At most one block, or all rows if there is no whole block yet.
            parts.append(np.concatenate([stored, reduce(part[None])] if len(part) else [stored]))
        return parts


def _as_blocks(values: Floats) -> list[Floats]:
    """Return least, most, last, sum and count of blocks of one row each."""
    finite = np.isfinite(values)
    return [values, values, values, np.where(finite, values, 0.0), finite.astype(np.float64)]


def _last_finite(blocks: Floats) -> Floats:
    """Return the last finite value of each row of [n, width]; nan without one."""
    last = blocks.shape[1] - 1 - np.isfinite(blocks)[:, ::-1].argmax(axis=1)
    return np.asarray(blocks[np.arange(len(blocks)), last], np.float64)


def _sum(blocks: Floats) -> Floats:
    return np.asarray(blocks.sum(axis=1), np.float64)


REDUCTIONS: tuple[Callable[[Floats], Floats], ...] = (
    lambda blocks: np.asarray(np.fmin.reduce(blocks, axis=1), np.float64),
    lambda blocks: np.asarray(np.fmax.reduce(blocks, axis=1), np.float64),
    _last_finite,
    _sum,
    _sum,
)


class Thinner:
    """Thins the columns of one record. Pyramids are made for columns that are asked for, and grow with them."""

    def __init__(self, columns: MetricColumns) -> None:
        self._columns, self._generation = columns, -1
        self._pyramids: dict[str, _Pyramid] = {}

    @property
    def memory(self) -> int:
        """Bytes that the pyramids of all columns take."""
        levels = [level for pyramid in self._pyramids.values() for level in pyramid.levels]
        return sum(grown.memory for level in levels for grown in level)

    def thin(self, x: str, names: list[str], low: float, high: float, points: int) -> _Thinned:
        """Return at most about `points` blocks of the rows with x in [low, high], and a block beside on each side.

        All rows count where x does not rise from row to row.
        """
        if self._generation != self._columns.generation:
            self._pyramids, self._generation = {}, self._columns.generation
        rows, along = self._columns.rows, self._columns.column(x)
        first, end = _range_of(along[:rows], low, high)
        level = 0
        while (end - first) > points * (_BASE << level):
            level += 1
        wanted = [x, *(name for name in names if name != x)]
        if end - first <= 2 * points:
            return _Thinned({name: self._columns.column(name)[first:end].copy() for name in wanted}, 1)
        width, found = _BASE << level, dict[str, Floats]()
        for name in wanted:
            values = self._columns.column(name)[:rows]
            pyramid = self._pyramids.setdefault(name, _Pyramid())
            pyramid.update(values)
            least, most, last, total, count = pyramid.blocks(values, level, first // width, -(-end // width))
            if name == x:
                found[x] = last
                continue
            mean = np.divide(total, count, out=np.full(len(count), np.nan), where=count > 0)
            found |= {f"{name}.min": least, f"{name}.max": most, f"{name}.mean": mean, f"{name}.last": last}
        return _Thinned(found, width)


def _range_of(along: Floats, low: float, high: float) -> tuple[int, int]:
    """Return the rows with low <= x <= high and one more on each side, so that a line reaches the edges."""
    if not len(along) or not (np.diff(along) >= 0).all():
        return 0, len(along)
    first, end = np.searchsorted(along, low, side="left"), np.searchsorted(along, high, side="right")
    return max(0, int(first) - 1), min(len(along), int(end) + 1)
