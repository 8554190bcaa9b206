"""Columns of metrics.jsonl as arrays, their smoothing, and their thinning for files of bounded size."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from unfog.reporting.records import Row, finite_number

Floats = npt.NDArray[np.float64]

SMOOTHED_FROM = 20  # with fewer points a smoothed line says nothing
_MOST_COLUMNS = 200  # people add columns of their own; a damaged file could have any number
_LONGEST_LIST = 64


def finite_column(metrics: Sequence[Row], name: str) -> tuple[Floats, Floats]:
    """(steps, values) of the lines that hold a finite number of this name."""
    rows = [(finite_number(row.get("step", 0)), finite_number(row.get(name))) for row in metrics]
    points = np.array(rows, np.float64).reshape(-1, 2)
    points = points[np.isfinite(points).all(axis=1)]
    return points[:, 0], points[:, 1]


def smoothed(values: Floats) -> Floats:
    """Exponential average over a fortieth of the values, but at first over an eighth of those so far."""
    smoothed = np.empty_like(values)
    average = 0.0
    for i, value in enumerate(values):
        # A wider window from the first value on would drag the high losses of the beginning along the whole line.
        average += (value - average) / max(1.0, min(len(values) / 40, (i + 1) / 8))
        smoothed[i] = average
    return smoothed


def number_columns(metrics: Sequence[Row]) -> dict[str, Floats]:
    """Return name -> float64 [rows], nan where a line has no number; a list is NAME.0, NAME.1, …"""
    columns: dict[str, Floats] = {}
    for i, row in enumerate(metrics):
        for name, value in row.items():
            cells = value[:_LONGEST_LIST] if isinstance(value, list) else [value]
            for j, cell in enumerate(cells):
                key = f"{name}.{j}" if isinstance(value, list) else name
                if not np.isfinite(number := finite_number(cell)):
                    continue
                if key not in columns:
                    if len(columns) >= _MOST_COLUMNS:
                        continue
                    columns[key] = np.full(len(metrics), np.nan)
                columns[key][i] = number
    return columns


def thinned(columns: Mapping[str, Floats], bins: int) -> dict[str, Floats]:
    """Return NAME.mean, NAME.min, NAME.max and NAME.last of so many parts of the rows, each of finite values alone.

    Of lists only the mean: a map shows no spikes. Columns of up to four values a bin are returned as they are.
    """
    rows = max((len(column) for column in columns.values()), default=0)
    if rows <= 4 * bins:
        return dict(columns)
    edges = np.linspace(0, rows, bins + 1).astype(int)[:-1]
    found: dict[str, Floats] = {}
    for name, column in columns.items():
        present = np.isfinite(column)
        counts = np.add.reduceat(present.astype(np.float64), edges)
        none = counts == 0
        mean = np.add.reduceat(np.where(present, column, 0.0), edges) / np.where(none, np.nan, counts)
        found[f"{name}.mean"] = mean
        if name.rpartition(".")[2].isdecimal():
            continue
        found[f"{name}.min"] = np.where(none, np.nan, np.minimum.reduceat(np.where(present, column, np.inf), edges))
        found[f"{name}.max"] = np.where(none, np.nan, np.maximum.reduceat(np.where(present, column, -np.inf), edges))
        # The last finite value, not the last row: a metric that is measured seldom has none in most rows.
        indices = np.maximum.reduceat(np.where(present, np.arange(rows), -1), edges)
        found[f"{name}.last"] = np.where(none, np.nan, column[indices])
    return found


def pack_columns(columns: Mapping[str, Floats]) -> bytes:
    """Return columns of one length as bytes that the page decodes: a header, and float32 values little-endian."""
    rows = len(next(iter(columns.values()))) if columns else 0
    header = {"columns": list(columns), "rows": rows, "from": 0, "offset": 0, "identity": "", "reset": True, "bits": 32}
    text = json.dumps(header, ensure_ascii=True).encode()
    # The values begin at a multiple of 8, where the browser can read them in place.
    text += b" " * (-(4 + len(text)) % 8)
    # What float32 cannot hold becomes infinite, which the page leaves out.
    with np.errstate(over="ignore"):
        values = [np.asarray(column, "<f4").tobytes() for column in columns.values()]
    return b"".join([struct.pack("<I", len(text)), text, *values])
