"""Decode many images with a pool of threads, as Pillow lets go of the interpreter, and count what was done."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from unfog.data.decode import Facts, decode
from unfog.data.files import Unusable
from unfog.data.sources import Source

Progress = Callable[[int, int], None]

_MAX_THREADS = 32
_MAX_CHUNK = 64  # images a task: enough to make the pool's own cost small, few enough to report progress


class ColourFoundError(Exception):
    """An image in colour where only grey ones were expected."""


@dataclass
class Tally:
    """What became of each row of `decode_all`'s output."""

    used: NDArray[np.bool_]
    """[N], False where a row holds nothing."""

    sides: NDArray[np.int32]
    """[N, 2], shortest and longest side of the original."""

    treatment: NDArray[np.int32]
    """[N], which of `treatments` each row that is used had."""

    reasons: dict[int, str] = field(default_factory=dict)
    """Why each row that is not used is not."""

    treatments: dict[tuple[str, ...], int] = field(default_factory=dict)
    """Lists of actions, in the order in which they turned up."""

    modes: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, n: int) -> Tally:
        """Nothing is known yet of n rows."""
        return cls(np.zeros(n, np.bool_), np.zeros((n, 2), np.int32), np.zeros(n, np.int32))

    def add(self, row: int, outcome: Facts | str) -> None:
        """Count one image: what was done to it, or the reason why it could not be used."""
        if isinstance(outcome, str):
            self.reasons[row] = outcome
            return
        self.used[row] = True
        self.sides[row] = sorted((outcome.width, outcome.height))
        self.modes[outcome.mode] += 1
        done = tuple(outcome.actions)
        self.treatment[row] = self.treatments.setdefault(done, len(self.treatments))


def decode_all(
    source: Source,
    order: NDArray[np.int64],
    out: NDArray[np.uint8],
    background: tuple[int, int, int],
    only_grey: bool = False,
    progress: Progress | None = None,
) -> Tally:
    """Image order[k] of the source into out[k]; `out` [N, C, size, size] says size and channels.

    Raises:
        ColourFoundError: `only_grey`, and an image is not.
    """
    n = len(order)
    tally = Tally.of(n)

    def chunk(start: int, stop: int) -> list[Facts | str]:
        return [one(row) for row in range(start, stop)]

    def one(row: int) -> Facts | str:
        try:
            opener = partial(source.open, int(order[row]))
            out[row], facts = decode(opener, out.shape[-1], out.shape[1], background)
        except Unusable as unusable:
            return str(unusable)
        if only_grey and not facts.grey:
            raise ColourFoundError
        return facts

    for start, outcomes in _in_threads(chunk, n):
        for row, outcome in enumerate(outcomes, start):
            tally.add(row, outcome)
        if progress:
            progress(start + len(outcomes), n)
    return tally


def _in_threads(task: Callable[[int, int], list[Facts | str]], n: int) -> Iterator[tuple[int, list[Facts | str]]]:
    """task(start, stop) over consecutive pieces of 0..n-1, in order; whatever stops this stops the threads."""
    threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 8)
    step = max(1, min(_MAX_CHUNK, n // (8 * threads)))
    starts = range(0, n, step)
    pool = ThreadPoolExecutor(threads)
    try:
        stops = (min(start + step, n) for start in starts)
        yield from zip(starts, pool.map(task, starts, stops))
    finally:
        pool.shutdown(cancel_futures=True)


def compact(rows: NDArray[np.uint8], keep: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """The rows to keep, moved to the front of the same memory: [N, ...] -> [keep.sum(), ...]."""
    kept = np.flatnonzero(keep)
    if len(kept) < len(rows):
        for start in range(0, len(kept), 4096):
            part = kept[start : start + 4096]
            rows[start : start + len(part)] = rows[part]
    return rows[: len(kept)]
