"""Charts of numbers as lines of text for a terminal, in dots of Braille, or in ASCII."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from unfog.reporting.charts import Floats
from unfog.reporting.progress import format_number

# Bit of each dot of a Braille character, by row and column.
_BRAILLE = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])
_MARGIN = 9  # columns of the numbers on the left


class ChartSpace(NamedTuple):
    """Columns and lines for a chart, and whether the terminal has Unicode."""

    width: int
    height: int
    unicode: bool = True


def text_chart(steps: Floats, values: Floats, space: ChartSpace, from_zero: bool = False) -> list[str]:
    """Return the lines that fill a space: the values over steps, with their extremes on the axes.

    Of values that share a column the mean is drawn. Without values, the first line says so.
    """
    width, height, unicode = space
    if not len(values):
        return ["  no values yet", *[""] * (height - 1)]
    columns, rows = max(4, width - _MARGIN - 2), max(2, height - 1)
    dots = (2, 4) if unicode else (1, 1)
    canvas = np.zeros((rows * dots[1], columns * dots[0]), bool)
    x = _scaled(steps, float(steps.min()), float(steps.max()), canvas.shape[1])
    if len(x) > canvas.shape[1]:
        x, values = _column_means(x, values)
    # Speed and rate begin at zero, or a change of a percent would look like a collapse.
    low, high = min(float(values.min()), 0.0 if from_zero else np.inf), float(values.max())
    y = canvas.shape[0] - 1 - _scaled(values, low, high, canvas.shape[0])
    _draw_line(canvas, x, y)
    marks = [""] * rows
    marks[0], marks[-1] = _number(high), _number(low) if high > low else ""
    edge = "┤" if unicode else "|"
    lines = [f"{mark:>{_MARGIN}} {edge}{line}" for mark, line in zip(marks, _characters(canvas, dots))]
    first, last = f"{steps.min():,.0f}", f"{steps.max():,.0f}"
    axis = f"{first}{last:>{max(1, columns - len(first))}}" if last != first else f"step {last}"
    return [line.rstrip() for line in (*lines, " " * (_MARGIN + 2) + axis)]


def _scaled(values: Floats, low: float, high: float, count: int) -> npt.NDArray[np.int64]:
    """Return positions 0 … count - 1; those of equal values are in the middle."""
    if high <= low:
        return np.full(len(values), count // 2)
    # Divided first: the range of two numbers may overflow, a share of it does not.
    share = values / (high - low) - low / (high - low)
    return np.asarray(np.rint(share.clip(0, 1) * (count - 1)), np.int64)


def _column_means(x: npt.NDArray[np.int64], values: Floats) -> tuple[npt.NDArray[np.int64], Floats]:
    columns, column = np.unique(x, return_inverse=True)
    counts = np.bincount(column)
    # Divided before the sum, which could overflow.
    return columns, np.asarray(np.bincount(column, values / counts[column]), np.float64)


def _draw_line(canvas: npt.NDArray[np.bool_], x: npt.NDArray[np.int64], y: npt.NDArray[np.int64]) -> None:
    """Set the dots on the lines from point to point."""
    canvas[y, x] = True
    for i in range(len(x) - 1):
        count = max(abs(int(x[i + 1] - x[i])), abs(int(y[i + 1] - y[i]))) + 1
        along = [np.rint(np.linspace(p[i], p[i + 1], count)).astype(np.int64) for p in (y, x)]
        canvas[along[0], along[1]] = True


def _characters(canvas: npt.NDArray[np.bool_], dots: tuple[int, int]) -> Sequence[str]:
    if dots == (1, 1):
        return ["".join(" *"[int(dot)] for dot in row) for row in canvas]
    cells = canvas.reshape(len(canvas) // 4, 4, -1, 2).transpose(0, 2, 1, 3)
    codes = (cells * _BRAILLE).sum(axis=(2, 3))
    return ["".join(chr(0x2800 + int(code)) if code else " " for code in row) for row in codes]


def _number(value: float) -> str:
    """Return a number in at most nine characters."""
    text = format_number(value) if abs(value) < 1e6 else f"{value:.3g}"
    return text if len(text) <= _MARGIN else f"{value:.2g}"
