"""Decode all images of a source in a pool of threads, retry those that cannot be read now, and collect statistics."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from unfog.data.bit_depth import Ranges
from unfog.data.decode import ImageInfo, decode
from unfog.data.sources.base import ImageError, MissingImageError, ShardReadError, Source, TransientImageError
from unfog.data.sources.image_files import image_error
from unfog.device.cores import thread_pool, usable_cores
from unfog.errors import RunError
from unfog.text import sanitize
from unfog.values.image_format import ImageFormat

T = TypeVar("T")

# Called with (images done, images in all), from the calling thread; it may raise to stop.
Progress = Callable[[int, int], None]

# One record for each image, so small that an unfinished pack keeps them in a file (facts.bin).
INFO_DTYPE = np.dtype([("used", "?"), ("grey", "?"), ("treatment", "<i4"), ("sides", "<i4", (2,))])

_TRIES = 5  # attempts at an image that cannot be read now
# Seconds before the second attempt. Each later pause is twice as long, and up to half more at random, so that many
# threads or ranks do not come back at the same moment.
_FIRST_PAUSE = 1.0
_PATIENCE = 60.0  # seconds after which there is no further attempt, as each may take long where nothing answers

_PROBED = 8  # other images that are tried before a source counts as out of reach
_REMOTE_THREADS = 16
_MAX_THREADS = 32
_MAX_TASK = 64  # images a task: enough to make the pool's own cost small, few enough to report progress
_CHUNK = 1024  # images handed over at once, fewer where that would be more than
_CHUNK_BYTES = 64 * 2**20


class ColourFoundError(Exception):
    """An image in colour turned up where only grey ones were expected."""


class PixelFormat(NamedTuple):
    """The format that images are decoded to."""

    image: ImageFormat
    background: tuple[int, int, int]
    """Colour behind transparent pixels."""
    ranges: Ranges | None = None
    """Ranges of the values deeper than 8 bits; None to take each image by itself."""
    only_grey: bool = False
    """True to raise ColourFoundError at the first image in colour: that all are grey is a guess so far."""

    @property
    def chunk_size(self) -> int:
        """Number of images that `decode_all` yields at once."""
        return max(16, min(_CHUNK, _CHUNK_BYTES // self.image.nbytes))


@dataclass
class DecodeStatistics:
    """The outcome of each image that `decode_all` went through, in its order."""

    records: NDArray[np.void]
    """[N] of INFO_DTYPE: used or not; all channels equal or not; index in `treatments`; (width, height) upright."""
    done: int = 0
    """Images that were gone through; `decode_all` goes on behind them."""
    reasons: dict[int, str] = field(default_factory=dict)
    """Row -> why the image is skipped."""
    treatments: dict[tuple[str, ...], int] = field(default_factory=dict)
    """Each list of actions -> its number, in the order in which they turned up."""
    modes: Counter[str] = field(default_factory=Counter)
    unused_pages: int = 0
    """Pages or frames of the images used, without the first of each."""

    @classmethod
    def empty(cls, n: int) -> DecodeStatistics:
        """Return statistics of n images of which none is decoded yet."""
        return cls(np.zeros(n, INFO_DTYPE))

    @property
    def used(self) -> NDArray[np.bool_]:
        """[N], False if an image is skipped or not decoded yet."""
        used: NDArray[np.bool_] = self.records["used"]
        return used

    def add(self, outcome: ImageInfo | str) -> None:
        """Count the next image, given its info or the reason why it is skipped."""
        row, self.done = self.done, self.done + 1
        if isinstance(outcome, str):
            self.reasons[row] = outcome
            return
        which = self.treatments.setdefault(tuple(outcome.actions), len(self.treatments))
        self.records[row] = (True, outcome.grey, which, (outcome.width, outcome.height))
        self.modes[outcome.mode] += 1
        self.unused_pages += outcome.pages - 1


def thread_count(source: Source) -> int:
    """Return the number of images to decode at once: one a core, or more where reads wait for a network."""
    if source.remote:
        return _REMOTE_THREADS
    return min(_MAX_THREADS, usable_cores())


def decode_all(
    source: Source,
    order: NDArray[np.int64],
    format: PixelFormat,
    statistics: DecodeStatistics,
    progress: Progress | None = None,
) -> Generator[tuple[int, NDArray[np.uint8]], None, None]:
    """Decode image order[k] of the source for k from `statistics.done` on, chunk by chunk, in order.

    Yields (k behind the chunk, its usable images uint8 [K, C, H, W]) once `statistics` holds the chunk.
    Close the generator to stop the threads. Raises ColourFoundError and RunError.
    """
    n, start, step, stopping = len(order), statistics.done, format.chunk_size, threading.Event()

    def task(begin: int, out: NDArray[np.uint8]) -> list[ImageInfo | str]:
        indices = order[begin : begin + len(out)].tolist()
        return [_decode_into(one, source, i, format, stopping) for i, one in zip(indices, out)]

    def submit(begin: int) -> tuple[int, NDArray[np.uint8], list[Future[list[ImageInfo | str]]]]:
        out = format.image.empty_stored(min(step, n - begin))
        # Four tasks a thread, so that one with slow images does not keep the chunk waiting for long.
        few = max(1, min(_MAX_TASK, len(out) // (4 * thread_count(source))))
        return begin, out, [pool.submit(task, begin + i, out[i : i + few]) for i in range(0, len(out), few)]

    pool = thread_pool(thread_count(source))  # threads, as Pillow releases the interpreter's lock
    try:
        starts = iter(range(start, n, step))
        pending = deque(submit(begin) for begin in islice(starts, 2))
        while pending:
            begin, out, futures = pending.popleft()
            for future in futures:
                for outcome in source.outage.result(future):
                    statistics.add(outcome)
                if progress:
                    progress(statistics.done, n)
            pending.extend(submit(following) for following in islice(starts, 1))  # decoded while the caller goes on
            used = statistics.used[begin : statistics.done]
            yield statistics.done, out if used.all() else out[used]
    finally:
        stopping.set()  # wakes threads that wait for a retry
        pool.shutdown(cancel_futures=True)


def decode_with_retries(
    source: Source,
    i: int,
    format: PixelFormat,
    stopping: threading.Event | None = None,
    on_failure: Callable[[str], None] | None = None,
) -> tuple[NDArray[np.uint8], ImageInfo]:
    """Decode image i of a source. ImageError if it cannot be decoded; arguments and other errors as `with_retries`."""
    return with_retries(partial(decode, partial(source.read, i), *format[:3]), source, i, stopping, on_failure)


def with_retries(
    read: Callable[[], T],
    source: Source,
    i: int,
    stopping: threading.Event | None = None,
    on_failure: Callable[[str], None] | None = None,
) -> T:
    """Call `read` for image i of a source, with retries while it fails, until `stopping` is set.

    While no image of the source can be reached, it waits. An image is missing only if the source was in reach both
    before and after the attempt to read it.

    `on_failure` is called with the reason once the retries are used up on an image in a remote shard.

    Raises:
        ImageError: the image cannot be used; FailedShardError if its shard has failed.
        RunError: it, or the source, still cannot be read. It is not skipped: an hour without network would silently
            shrink the set.
    """
    began, stopping, attempts, looked = time.monotonic(), stopping or threading.Event(), 0, False
    while True:
        try:
            found = read()
        except (TransientImageError, MissingImageError) as error:
            if _wait_for_source(source, i, error, began, stopping):
                looked = False
                continue
            if isinstance(error, MissingImageError):
                if looked:  # the source was in reach before and after this attempt
                    raise
                looked = True
                continue
            attempts += 1
            if _may_retry(attempts, began, stopping):
                continue
            if isinstance(error, ShardReadError) and on_failure is not None and not stopping.is_set():
                on_failure(str(error))
            raise _gave_up(source, i, error, attempts) from error
        except ImageError:  # damaged, so it was read
            source.outage.end()
            raise
        source.outage.end()
        source.outage.last_read = i
        return found


def _wait_for_source(source: Source, i: int, error: ImageError, began: float, stopping: threading.Event) -> bool:
    """Wait if the whole source is out of reach, and return True; False if other images can be read."""
    if reason := _outage_reason(source, i, error):
        source.outage.wait(source.name, reason, began, stopping)
        return True
    source.outage.end()
    return False


def _may_retry(attempts: int, began: float, stopping: threading.Event) -> bool:
    """Pause before another attempt, and return True; False after the last."""
    pause = _FIRST_PAUSE * 2 ** (attempts - 1) * random.SystemRandom().uniform(1, 1.5)
    return attempts < _TRIES and time.monotonic() - began < _PATIENCE and not stopping.wait(pause)


def _gave_up(source: Source, i: int, error: ImageError, attempts: int) -> RunError:
    return RunError(
        f"{sanitize(source.names[i])} of {sanitize(source.name)}: {error}, also after {attempts} tries; once it can be "
        "read, use `unfog resume` or repeat the command"
    )


def _outage_reason(source: Source, i: int, error: ImageError) -> str:
    """Return why the whole source is out of reach after an image could not be read; "" if others can be read."""
    if source.remote or source.outage.last_read is None:  # never in reach, or judged by its shards
        return ""
    if reason := source.folder_problem(i):
        return reason
    n = len(source.names)
    others = [source.outage.last_read, *random.SystemRandom().sample(range(n), min(n, _PROBED))]
    for other in (other for other in others if other != i):
        if _is_reachable(source, other):
            return ""
    return f"neither {source.names[i]} ({error}) nor others can be read"


def _is_reachable(source: Source, i: int) -> bool:
    """Return True if the file of an image can be opened, whatever is in it."""
    try:
        source.read_image(i).close()
    except Exception as error:  # decoders raise almost anything on damaged files
        return not isinstance(image_error(error), TransientImageError | MissingImageError)
    return True


def _decode_into(
    out: NDArray[np.uint8], source: Source, i: int, format: PixelFormat, stopping: threading.Event
) -> ImageInfo | str:
    try:
        out[:], info = decode_with_retries(source, i, format, stopping)
    except ImageError as error:
        return str(error)
    if format.only_grey and not info.grey:
        raise ColourFoundError
    return info
