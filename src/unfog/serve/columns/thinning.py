"""Thinning of long columns: least, most, mean and last value of blocks of rows, by a pyramid that grows with them.

A chart with more rows than pixels then shows every extreme. Blocks begin at fixed rows, so a curve does not flicker
as it grows or moves. If few rows are in view, they are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from unfog.serve.columns.metric_columns import Floats, Growing, MetricColumns

_BASE = 16  # rows of a block of the lowest level; each level above has blocks of twice as many


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
    """Return the last finite value of each row of [n, width]; nan if there is none."""
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
