"""Thinning of long columns: minimum, maximum and last value of blocks of rows, by a pyramid that grows with the column.

A chart of more rows than pixels then shows every extreme. Blocks begin at fixed rows, so that a curve does not flicker
as it grows or moves. Where few rows are in view, they are given exactly.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from unfog.serve.metric_columns import Floats, Growing, MetricColumns

_BASE = 16  # rows of a block of the lowest level; each level above has blocks of twice as many


class Thinned(NamedTuple):
    """Columns of a part of a record."""

    columns: dict[str, Floats]
    """With blocks: x under its name, and NAME.min, NAME.max and NAME.last of each; else as they are."""
    block: int
    """Rows of a block; 1: exact."""


class _Pyramid:
    """Minimum, maximum and last finite value of whole blocks of one column, for block sizes 16, 32, 64, …"""

    def __init__(self) -> None:
        self._levels: list[tuple[Growing, Growing, Growing]] = []

    def update(self, values: Floats) -> None:
        """Add the blocks that were completed since the last call."""
        level, source = 0, (values, values, values)
        while True:
            if level == len(self._levels):
                self._levels.append((Growing(), Growing(), Growing()))
            width, done = (2 if level else _BASE), self._levels[level][0].rows
            whole = len(source[0]) // width
            if whole > done:
                for kind, (grown, part) in enumerate(zip(self._levels[level], source)):
                    grown.append(_reduce(part[done * width : whole * width].reshape(-1, width), kind))
            if whole < 2:
                return
            low, high, last = self._levels[level]
            level, source = level + 1, (low.values, high.values, last.values)

    def blocks(self, values: Floats, level: int, first: int, end: int) -> tuple[Floats, Floats, Floats]:
        """Return minimum, maximum and last value of blocks first … end - 1; the last may be incomplete."""
        width = _BASE << level
        whole = self._levels[level][0].rows if level < len(self._levels) else 0
        rest = values[max(whole, first) * width : end * width]
        parts = []
        for kind in range(3):
            stored = self._levels[level][kind].values[first : min(end, whole)] if whole else np.empty(0)
            # At most one block, or all rows where there is no whole block yet.
            tail = [_reduce(rest[None], kind)] if len(rest) else []
            parts.append(np.concatenate([stored, *tail]))
        return parts[0], parts[1], parts[2]


def _reduce(blocks: Floats, kind: int) -> Floats:
    """Return minimum (0), maximum (1) or last finite value (2) of each row of [n, width]; nan where all are nan."""
    if kind < 2:
        return np.asarray((np.fmin, np.fmax)[kind].reduce(blocks, axis=1), np.float64)
    last = blocks.shape[1] - 1 - np.isfinite(blocks)[:, ::-1].argmax(axis=1)
    return np.asarray(blocks[np.arange(len(blocks)), last], np.float64)


class Thinner:
    """Thins the columns of one record. Pyramids are made for columns that are asked for, and grow with them."""

    def __init__(self, columns: MetricColumns) -> None:
        self._columns, self._generation = columns, -1
        self._pyramids: dict[str, _Pyramid] = {}

    def thin(self, x: str, names: list[str], low: float, high: float, points: int) -> Thinned:
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
            return Thinned({name: self._columns.column(name)[first:end].copy() for name in wanted}, 1)
        width, found = _BASE << level, dict[str, Floats]()
        for name in wanted:
            values = self._columns.column(name)[:rows]
            pyramid = self._pyramids.setdefault(name, _Pyramid())
            pyramid.update(values)
            least, most, last = pyramid.blocks(values, level, first // width, -(-end // width))
            found |= {x: last} if name == x else {f"{name}.min": least, f"{name}.max": most, f"{name}.last": last}
        return Thinned(found, width)


def _range_of(along: Floats, low: float, high: float) -> tuple[int, int]:
    """Return the rows with low <= x <= high and one more on each side, so that a line reaches the edges."""
    if not len(along) or not (np.diff(along) >= 0).all():
        return 0, len(along)
    first, end = np.searchsorted(along, low, side="left"), np.searchsorted(along, high, side="right")
    return max(0, int(first) - 1), min(len(along), int(end) + 1)
