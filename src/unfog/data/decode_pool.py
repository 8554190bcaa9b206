"""Decode many images with a pool of threads, as Pillow lets go of the interpreter, and count what was done."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from unfog.data.decode import ImageInfo, decode
from unfog.data.sources.base import ImageError, ShardReadError, Source, TransientImageError
from unfog.errors import RunError
from unfog.text import sanitize

Progress = Callable[[int, int], None]

INFO_DTYPE = np.dtype([("used", "?"), ("grey", "?"), ("treatment", "<i4"), ("sides", "<i4", (2,))])
"""What is kept of each image; so little that a pack in the making keeps it in a file."""

TRIES = 5
FIRST_PAUSE = 1.0
"""How often an image is tried in all that cannot be read just now, and seconds before the second time; then twice that,
and up to half more, so that not all who wait come back at once."""

PATIENCE = 60.0
"""Seconds after which it is not tried again: each time may take long, where nothing answers."""

_REMOTE_THREADS = 16
_MAX_THREADS = 32
_MAX_TASK = 64  # images a task: enough to make the pool's own cost small, few enough to report progress
_CHUNK = 1024  # images handed over at once, fewer where that would be more than
_CHUNK_BYTES = 64 * 2**20


class ColourFoundError(Exception):
    """An image in colour where only grey ones were expected."""


@dataclass
class DecodeStatistics:
    """What became of each row of `decode_all`'s output."""

    facts: NDArray[np.void]
    """[N] of INFO_DTYPE: whether the row holds an image; whether its channels were equal; which of `treatments` it had;
    width and height of the upright original."""

    reasons: dict[int, str] = field(default_factory=dict)
    """Why each row that is not used is not."""

    treatments: dict[tuple[str, ...], int] = field(default_factory=dict)
    """Lists of actions, in the order in which they turned up."""

    modes: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, n: int) -> DecodeStatistics:
        """Nothing is known yet of n rows."""
        return cls(np.zeros(n, INFO_DTYPE))

    @property
    def used(self) -> NDArray[np.bool_]:
        """[N], False where a row holds nothing."""
        used: NDArray[np.bool_] = self.facts["used"]
        return used

    def add(self, row: int, outcome: ImageInfo | str) -> None:
        """Count one image: what was done to it, or the reason why it could not be used."""
        if isinstance(outcome, str):
            self.reasons[row] = outcome
            return
        self.modes[outcome.mode] += 1
        which = self.treatments.setdefault(tuple(outcome.actions), len(self.treatments))
        self.facts[row] = (True, outcome.grey, which, (outcome.width, outcome.height))


def chunk_size(channels: int, size: int) -> int:
    """Images that `decode_all` hands over at once."""
    return max(16, min(_CHUNK, _CHUNK_BYTES // (channels * size * size)))


def threads(source: Source) -> int:
    """How many decode at once: one a core that this process may use, and more where they wait for a network."""
    if source.remote:
        return _REMOTE_THREADS
    return min(_MAX_THREADS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 8)


def decode_all(
    source: Source,
    order: NDArray[np.int64],
    channels: int,
    size: int,
    background: tuple[int, int, int],
    tally: DecodeStatistics,
    only_grey: bool = False,
    progress: Progress | None = None,
    start: int = 0,
) -> Generator[tuple[int, NDArray[np.uint8]], None, None]:
    """Decode image order[k] of the source for k from `start`, chunk by chunk, in order.

    Gives (k behind the chunk, its images that can be used uint8 [K, channels, size, size]), and has by then filled
    `tally` up to there. The next chunk is being decoded meanwhile. Close it to stop the threads.

    Raises:
        ColourFoundError: `only_grey`, and an image is not.
        RunError: an image cannot be read just now, as `decode_with_retries`.
    """
    n, step, leaving = len(order), chunk_size(channels, size), threading.Event()

    def task(begin: int, out: NDArray[np.uint8]) -> list[ImageInfo | str]:
        indices = order[begin : begin + len(out)].tolist()
        return [_decode_one(source, i, one, background, only_grey, leaving) for i, one in zip(indices, out)]

    def submit(begin: int) -> tuple[int, NDArray[np.uint8], list[Future[list[ImageInfo | str]]]]:
        out = np.empty((min(step, n - begin), channels, size, size), np.uint8)
        few = max(1, min(_MAX_TASK, len(out) // (4 * threads(source))))
        return begin, out, [pool.submit(task, begin + i, out[i : i + few]) for i in range(0, len(out), few)]

    pool = ThreadPoolExecutor(threads(source))
    try:
        starts = iter(range(start, n, step))
        pending = deque(submit(begin) for begin in islice(starts, 2))
        while pending:
            begin, out, futures = pending.popleft()
            row = begin
            for future in futures:
                for outcome in future.result():
                    tally.add(row, outcome)
                    row += 1
                if progress:
                    progress(row, n)
            pending.extend(submit(following) for following in islice(starts, 1))
            used = tally.used[begin:row]
            yield row, out if used.all() else out[used]
    finally:
        leaving.set()
        pool.shutdown(cancel_futures=True)


def decode_with_retries(
    source: Source,
    i: int,
    size: int,
    channels: int,
    background: tuple[int, int, int],
    leaving: threading.Event,
    give_up: Callable[[str], None] | None = None,
) -> tuple[NDArray[np.uint8], ImageInfo]:
    """`decode` image i of a source; one that cannot be read just now is tried again, until somebody is `leaving`.

    To pass over it, as over a damaged one, would make of an hour without network a set without those images. One in a
    shard far away may be `give_up`'s to decide about, which is called with the reason once there is no patience left.

    Raises:
        ImageError: it cannot be decoded; FailedShardError, if its shard has been given up.
        RunError: it still cannot be read.
    """
    began = time.monotonic()
    for attempt in range(1, TRIES + 1):
        try:
            return decode(partial(source.open, i), size, channels, background)
        except TransientImageError as trouble:
            pause = FIRST_PAUSE * 2 ** (attempt - 1) * random.SystemRandom().uniform(1, 1.5)
            if attempt < TRIES and time.monotonic() - began < PATIENCE and not leaving.wait(pause):
                continue
            if isinstance(trouble, ShardReadError) and give_up is not None and not leaving.is_set():
                give_up(str(trouble))
            raise RunError(
                f"{sanitize(source.names[i])} of {sanitize(source.name)}: {trouble}, also in {attempt} tries; `unfog "
                "resume`, or the same command again, goes on once it can be read"
            ) from trouble
    raise AssertionError


def _decode_one(
    source: Source,
    i: int,
    out: NDArray[np.uint8],
    background: tuple[int, int, int],
    only_grey: bool,
    leaving: threading.Event,
) -> ImageInfo | str:
    """Image i of the source into `out` [channels, size, size]; what was done to it, or why it cannot be used."""
    try:
        out[:], facts = decode_with_retries(source, i, out.shape[-1], out.shape[0], background, leaving)
    except ImageError as unusable:
        return str(unusable)
    if only_grey and not facts.grey:
        raise ColourFoundError
    return facts
