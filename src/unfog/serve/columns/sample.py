"""A sample of a long record: lines at even distances, read in milliseconds, to be shown until all have been read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from unfog.files.safe_files import open_file
from unfog.serve.columns.metric_columns import MetricColumns

LONG = 2**24  # bytes; records below are read whole in half a second
_PLACES, _PIECE = 400, 6144  # pieces of the file that are read, and bytes of each


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
            piece = os.pread(file.fileno(), _PIECE, start)
            # What is cut off at either end is not a line; a file that is shorter than thought would repeat some.
            lines += piece.split(b"\n")[bool(start) : -1]
    columns = MetricColumns(path)
    columns.append_lines(lines)
    length = sum(map(len, lines)) + len(lines)
    return Sample(columns, size * len(lines) // length if length else 0)
