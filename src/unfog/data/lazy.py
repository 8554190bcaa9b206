"""Images that are decoded when they are asked for: nothing is decoded twice an epoch, and nothing is stored."""

from __future__ import annotations

import hashlib
import threading
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from unfog.data.dataset import Dataset, ImageSet
from unfog.data.decode_pool import decode_with_retries, threads
from unfog.data.permutation import epoch_keys, permute
from unfog.data.report import DataReport, SkippedFile
from unfog.data.scan import COLOURS_SAMPLED, MAX_HELD_OUT, Scan, split_held_out
from unfog.data.sources.base import FailedShardError, ImageError, ShardFailures, Source
from unfog.errors import RunError
from unfog.text import sanitize

UNREAD = "unread:"
"""What the fingerprint of images begins with that nobody has looked at: it is one of their source's state."""

EVEN_SPLIT_FROM = 200_000
"""Of more images, those held out are evenly spaced: to hash every name would take minutes."""

_IN_A_ROW = 100
"""So many images in a row that cannot be decoded are no accident: the disk or the network has gone."""

_STAND_IN = 0x57A4D  # seed of the shuffles by which images of a shard that is given up are replaced
_TASK = 8  # images a thread decodes before it looks for other work


class RowIndex:
    """Which image of the source each row of a set is, in O(1) memory a held-out image: row -> index.

    Args:
        held: sorted indices of the images held out.
        count: of images in the source.
        inside: these are the rows of those held out, rather than of all others.
    """

    def __init__(self, held: NDArray[np.int64], count: int, inside: bool) -> None:
        self.held, self.inside = held, inside
        self.count = len(held) if inside else count - len(held)
        self._gaps = held - np.arange(len(held))  # rows before each image held out

    def __len__(self) -> int:
        return self.count

    def index(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Indices in the source, int64 [B] -> int64 [B]."""
        return self.held[rows] if self.inside else rows + np.searchsorted(self._gaps, rows, side="right")


class _LazyNames(Sequence[str]):
    """Names of the images of a set, looked up in its source as they are asked for."""

    def __init__(self, names: Sequence[str], rows: RowIndex, within: range) -> None:
        self._names, self._rows, self._within = names, rows, within

    def __len__(self) -> int:
        return len(self._within)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> _LazyNames: ...
    def __getitem__(self, index: int | slice) -> str | _LazyNames:
        if isinstance(index, slice):
            return _LazyNames(self._names, self._rows, self._within[index])
        return self._names[int(self._rows.index(np.array([self._within[index]]))[0])]


class LazyPixels:
    """uint8 [N, C, size, size] that decodes what is taken from it, in threads.

    An image that cannot be decoded is replaced by the next one that can be, always the same. One that cannot be read
    just now is not, as a run that goes on would see another: it is tried again, and then an error. Those in a shard
    far away that is given up are replaced by images from all over the set, always the same, as the next one would be
    that of very many.
    """

    dtype = np.dtype(np.uint8)

    def __init__(
        self, source: Source, rows: RowIndex, channels: int, size: int, background: tuple[int, int, int]
    ) -> None:
        self.source, self.rows, self.background = source, rows, background
        self.shape = (len(rows), channels, size, size)
        self.remote_shards: ShardFailures | None = source.remote_shards
        self.skipped: list[SkippedFile] = []
        """Images that could not be decoded, in the order in which that turned out."""
        self._bad: set[int] = set()  # rows of those
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._closed = threading.Event()

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> NDArray[np.uint8]:
        """Decode a row, a slice of rows, or those that an array of integers or booleans names."""
        if isinstance(key, slice):
            return self.take(np.arange(*key.indices(len(self))))
        return self.take(np.arange(len(self))[key])

    def __iter__(self) -> Iterator[NDArray[np.uint8]]:
        return (self.take(np.int64(row)) for row in range(len(self)))

    def take(self, indices: Any, axis: int = 0) -> NDArray[np.uint8]:
        """Decode the images at these rows: integers of any shape [...] -> uint8 [..., C, size, size].

        Raises:
            RunError: a hundred in a row cannot be decoded, or one cannot be read just now.
        """
        if axis != 0:
            raise ValueError("images are taken along axis 0")
        rows = np.asarray(indices, np.int64)
        return self.taken(rows.ravel())[0].reshape(*rows.shape, *self.shape[1:])

    def taken(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """(the images at these rows [B], uint8 [B, C, size, size]; the rows that they really are [B]).

        Raises:
            RunError: as `take`.
        """
        return self.start(rows).result()

    def start(self, rows: NDArray[np.int64]) -> PendingDecode:
        """Begin to decode these rows [B] in threads, and return at once."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(threads(self.source), thread_name_prefix="decoding")
            self._closed = threading.Event()
            # What Pillow finds odd in a file concerns nobody. For good, as threads share what is filtered.
            warnings.filterwarnings("ignore", module=r"PIL\.")
        out, used = np.empty((len(rows), *self.shape[1:]), np.uint8), rows.copy()
        parts = [slice(i, i + _TASK) for i in range(0, len(rows), _TASK)]
        return PendingDecode(out, used, [self._pool.submit(self._decode, used[part], out[part]) for part in parts])

    def is_decodable(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """False for those of these rows [B] that turned out, so far, to be images that cannot be decoded."""
        return ~np.isin(rows, list(self._bad))

    def close(self) -> None:
        """Let the threads end, without waiting for what they are at."""
        self._closed.set()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

    def _decode(self, rows: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
        """Decode these rows [B], and put those instead of them that were used."""
        for place, row in enumerate(rows.tolist()):
            out[place], rows[place] = self._one(row)

    def _one(self, row: int) -> tuple[NDArray[np.uint8], int]:
        """(the image at this row, or at the one that stands in for it; which that is)."""
        reason, jumps = "", 0
        tries = min(_IN_A_ROW, len(self)) if self.remote_shards is None else _IN_A_ROW
        for _ in range(tries):
            if row not in self._bad:
                index = int(self.rows.index(np.array([row]))[0])
                try:
                    return self._decoded(index), row
                except FailedShardError as lost:
                    reason = str(lost)
                    row = int(permute(np.array([row]), len(self), epoch_keys(_STAND_IN, np.array([jumps])))[0])
                    jumps += 1
                    continue
                except ImageError as unusable:
                    reason = str(unusable)
                    self._note(row, SkippedFile(self.source.names[index], reason))
            row = (row + 1) % len(self)
        raise RunError(
            f"{tries} images in a row of {sanitize(self.source.name)} cannot be decoded"
            f"{f' (the last: {reason})' if reason else ''}; is it still there? `unfog resume` goes on once it is"
        )

    def _decoded(self, index: int) -> NDArray[np.uint8]:
        """Image number `index` of the source; one far away that cannot be decoded is fetched once more."""
        (_, channels, size, _), shards = self.shape, self.remote_shards
        look = partial(decode_with_retries, self.source, index, size, channels, self.background, self._closed)
        if shards is None:
            return look()[0]
        own = self.source.shard_image(index)
        look = partial(look, partial(shards.fail_shard_of, own))
        try:
            return look()[0]
        except FailedShardError:
            raise
        except ImageError:
            shards.recheck(own)
        return look()[0]

    def _note(self, row: int, one: SkippedFile) -> None:
        with self._lock:
            if row not in self._bad:
                self._bad = self._bad | {row}  # a new one, as other threads look at the old one
                self.skipped.append(one)


class PendingDecode:
    """Images that are being decoded."""

    def __init__(self, out: NDArray[np.uint8], used: NDArray[np.int64], tasks: list[Future[None]]) -> None:
        self._out, self._used, self._tasks = out, used, tasks

    def result(self) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Wait for them: (the images [B, C, size, size], the rows that they are [B]); raises what decoding raised."""
        for task in self._tasks:
            task.result()
        return self._out, self._used

    def cancel(self) -> None:
        """Do not decode those that are not begun."""
        for task in self._tasks:
            task.cancel()


def remote_shards_of(images: ImageSet) -> ShardFailures | None:
    """The shards far away that these images are read from as they come; None where that is not how they are read."""
    return images.pixels.remote_shards if isinstance(images.pixels, LazyPixels) else None


def lazy_dataset(scan: Scan) -> Dataset:
    """The images of a source as sets that decode what is taken from them.

    Held out are the same as always; of over EVEN_SPLIT_FROM images, evenly spaced ones. Grey are only those that were
    asked for as such or all looked at, as an image in colour among the others could not be told of in time.
    """
    if not scan.channels_certain and len(scan.source.names) > COLOURS_SAMPLED:
        scan = scan.as_rgb()
    source, settled, n = scan.source, scan.resolved_settings, len(scan.source.names)
    held = _held_out(source, settled.held_out)
    kind = repr((scan.stamp, settled.size, settled.channels, settled.background, scan.classes))

    def part(inside: bool) -> ImageSet:
        rows = RowIndex(held, n, inside)
        labels = scan.labels
        if labels is not None:
            labels = labels[held] if inside else np.delete(labels, held)
        pixels = LazyPixels(source, rows, settled.channels, settled.size, scan.background)
        state = hashlib.sha256(f"{kind} {inside} {held.tobytes().hex()}".encode())
        state.update(b"" if labels is None else np.ascontiguousarray(labels).data)
        names = _LazyNames(source.names, rows, range(len(rows)))
        return ImageSet(pixels, labels, names, scan.classes, UNREAD + state.hexdigest())

    counts = np.bincount([] if scan.labels is None else scan.labels, minlength=len(scan.classes))
    report = DataReport(
        source=source.name,
        found=n,
        used=n,
        held_out=len(held),
        size=settled.size,
        channels=settled.channels,
        background=settled.background,
        class_counts={name: int(count) for name, count in zip(scan.classes, counts)},
        sides={},
        modes={},
        treatments=(),
        treatment=np.zeros(0, np.int32),
        skipped=tuple(source.unreadable),
        ignored=dict(source.ignored),
        read=False,
    )
    return Dataset(settled, part(inside=False), part(inside=True), report)


def _held_out(source: Source, fraction: float) -> NDArray[np.int64]:
    """Sorted indices of the images held out."""
    n = len(source.names)
    if source.held_out is None and n > EVEN_SPLIT_FROM:
        count = min(MAX_HELD_OUT, int(n * fraction))
        return np.arange(count) * n // max(1, count)
    order, in_train = split_held_out(source, fraction)
    return np.sort(order[in_train:])
