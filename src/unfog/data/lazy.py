"""Images that are decoded as they are read, and stored nowhere."""

from __future__ import annotations

import hashlib
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np
from numpy.typing import NDArray

from unfog.data.data_report import SkippedFile
from unfog.data.dataset import ComputedPixels, Dataset, ImageSet
from unfog.data.decode_pool import PixelFormat, decode_with_retries, thread_count
from unfog.data.file_rows import FileRows
from unfog.data.outages import Outage
from unfog.data.permutation import epoch_keys, permute
from unfog.data.scan import COLOURS_SAMPLED, Scan
from unfog.data.settings import UNREAD
from unfog.data.sources.base import (
    FailedShardError,
    ImageError,
    LazyNames,
    MissingImageError,
    ShardFailures,
    Source,
)
from unfog.device.cores import thread_pool
from unfog.errors import RunError
from unfog.text import sanitize
from unfog.values.columns import rows_of, update_digest

_IN_A_ROW = 100  # images in a row that cannot be decoded before the run ends: the disk or the network has failed
_REPLACEMENT_SEED = 0x57A4D  # of the shuffles that choose replacements for the images of failed shards
_TASK = 8  # images that a thread decodes before it looks for other work


# Maps rows of a set [B] to indices in its source [B].
_RowIndex = Callable[[NDArray[np.int64]], NDArray[np.int64]]


class LazyPixels(ComputedPixels):
    """A `PixelArray` that decodes images as they are read, in threads.

    An image that cannot be decoded is replaced by the next one that can be, an image of a failed remote shard by one
    from anywhere in the set, always the same. An image that cannot be read now is retried instead, as a resume would
    see another one.
    """

    def __init__(self, source: Source, count: int, index: _RowIndex, format: PixelFormat) -> None:
        self.source, self._index, self._format = source, index, format
        self.shape, self.dtype = (count, *format.image.shape), format.image.dtype
        self.remote_shards: ShardFailures | None = source.remote_shards
        self._bad: dict[int, SkippedFile] = {}  # by row
        self._missing: set[int] = set()  # those of `_bad` whose files were missing
        self._outages = 0  # number of outages after which these were tried again
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._closed = threading.Event()

    @property
    def skipped(self) -> list[SkippedFile]:
        """Images that could not be decoded so far, in the order in which they were met."""
        return list(self._bad.values())

    def take_with_rows(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Decode the images at these rows [B]. Return (uint8 [B, C, H, W], the rows of the images used [B]).

        RunError if a hundred in a row cannot be decoded, or one cannot be read now.
        """
        return self.start_decoding(rows).result()

    def start_decoding(self, rows: NDArray[np.int64]) -> PendingDecode:
        """Start to decode these rows [B] in threads, and return at once."""
        if self._pool is None:
            self._pool = thread_pool(thread_count(self.source), "decoding")
            self._closed = threading.Event()  # a new one, as `close` sets it for good
            # For good, as `warnings.catch_warnings` is not safe in threads.
            warnings.filterwarnings("ignore", module=r"PIL\.")
        out, used = self._format.image.empty_stored(len(rows)), rows.copy()
        parts = [slice(i, i + _TASK) for i in range(0, len(rows), _TASK)]
        tasks = [self._pool.submit(self._decode, used[part], out[part]) for part in parts]
        return PendingDecode(out, used, tasks, self.source.outage)

    def is_decodable(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return False for those of these rows [B] that are known, so far, to be undecodable."""
        return ~np.isin(rows, list(self._bad))

    def close(self) -> None:
        """Stop the threads without waiting for the images that they are decoding."""
        self._closed.set()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

    def _decode(self, rows: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
        """Decode these rows [B] into `out`, and overwrite `rows` with those of the images used."""
        for place, row in enumerate(rows.tolist()):
            out[place], rows[place] = self._one(row)

    def _one(self, row: int) -> tuple[NDArray[np.uint8], int]:
        """Decode the image at this row or its replacement. Return it and its row."""
        reason, jumps = "", 0
        # Where shards fail, replacements are random and may meet an image twice, so a small set needs more tries.
        tries = min(_IN_A_ROW, len(self)) if self.remote_shards is None else _IN_A_ROW
        self._readmit()
        for _ in range(tries):
            if row not in self._bad:
                index = int(self._index(np.array([row]))[0])
                try:
                    return self._decode_image(index), row
                except FailedShardError as error:
                    # From anywhere in the set, as the next images are in the same shard.
                    reason = str(error)
                    keys = epoch_keys(_REPLACEMENT_SEED, np.array([jumps]))
                    row = int(permute(np.array([row]), len(self), keys)[0])
                    jumps += 1
                    continue
                except ImageError as error:
                    reason = str(error)
                    self._skip(row, index, error)
            row = (row + 1) % len(self)
        raise RunError(
            f"{tries} images in a row in {sanitize(self.source.name)} cannot be "
            f"decoded{f' (the last: {reason})' if reason else ''}; check that it still exists, then use "
            "`unfog resume`"
        )

    def _skip(self, row: int, index: int, error: ImageError) -> None:
        with self._lock:
            if row not in self._bad:
                # A new dictionary, as other threads read the old one unlocked.
                self._bad = {**self._bad, row: SkippedFile(self.source.names[index], str(error))}
                if isinstance(error, MissingImageError):
                    self._missing.add(row)

    def _readmit(self) -> None:
        """Try missing images again after an outage: they may have been counted as missing within it."""
        ended = self.source.outage.ended
        if ended == self._outages:
            return
        with self._lock:
            self._outages = ended
            self._bad = {row: file for row, file in self._bad.items() if row not in self._missing}
            self._missing.clear()

    def _decode_image(self, index: int) -> NDArray[np.uint8]:
        decode = partial(decode_with_retries, self.source, index, self._format, self._closed)
        shards = self.remote_shards
        if shards is None:
            return decode()[0]
        own = self.source.shard_image(index)
        decode = partial(decode, partial(shards.fail_shard_of, own))
        try:
            return decode()[0]
        except FailedShardError:
            raise
        except ImageError:  # the bytes in the cache may be damaged, or the shard may have changed: fetch it once more
            shards.recheck(own)
        return decode()[0]


class PendingDecode:
    """A batch of images that threads are decoding; see `LazyPixels.start_decoding`."""

    def __init__(
        self, out: NDArray[np.uint8], used: NDArray[np.int64], tasks: list[Future[None]], outage: Outage
    ) -> None:
        self._out, self._used, self._tasks, self._outage = out, used, tasks, outage

    def result(self) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Wait for the images. Return (images [B, C, H, W], their rows [B]), or raise what decoding raised."""
        for task in self._tasks:
            self._outage.result(task)
        return self._out, self._used

    def cancel(self) -> None:
        """Cancel the images that are not being decoded yet."""
        for task in self._tasks:
            task.cancel()


def outage_of(images: ImageSet) -> Outage | None:
    """Return the outage of the source that these images are read from while training, if they are."""
    if isinstance(images.pixels, FileRows):
        return images.pixels.waits
    return images.pixels.source.outage if isinstance(images.pixels, LazyPixels) else None


def remote_shards_of(images: ImageSet) -> ShardFailures | None:
    """Return the remote shards that these images are read from while training, if they are."""
    return images.pixels.remote_shards if isinstance(images.pixels, LazyPixels) else None


def lazy_dataset(scan: Scan) -> Dataset:
    """Return a dataset whose images are decoded as they are read, with a fingerprint of their source's state."""
    if not scan.channels_certain and len(scan.source.names) > COLOURS_SAMPLED:
        # RGB, unless all images were looked at: one in colour could not be handled once training has begun.
        scan = scan.as_rgb()
    source, settings, n = scan.source, scan.resolved_settings, len(scan.source.names)
    held = scan.held_out_indices()
    matters = (scan.stamp, settings.size, settings.channels, settings.background, scan.classes)
    state = repr((*matters, *settings.later_key))

    def subset(inside: bool) -> ImageSet:
        count, index = (len(held), held.__getitem__) if inside else (n - len(held), partial(training_index, held))
        columns = rows_of(scan.all_columns, held if inside else _outside(held, n)) if scan.all_columns else {}
        digest = hashlib.sha256(f"{state} {inside} {held.tobytes().hex()}".encode())
        update_digest(digest, columns)
        # By row when one is asked for, as a list of a hundred million names would take gigabytes.
        names = LazyNames(lambda row: source.names[int(index(np.array([row]))[0])], range(count))
        pixels = LazyPixels(source, count, index, scan.format)
        return ImageSet(pixels, names, columns, UNREAD + digest.hexdigest())

    counts = {"found": n, "used": n, "held_out": len(held), "skipped": tuple(source.unreadable)}
    report = scan.report(scan.columns, **counts, read=False)
    return Dataset(settings, subset(inside=False), subset(inside=True), report)


def _outside(held: NDArray[np.int64], n: int) -> NDArray[np.bool_]:
    """Return a mask [n] of the images that are not held out."""
    mask = np.ones(n, np.bool_)
    mask[held] = False
    return mask


def training_index(held: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Map training rows [B] to indices in the source [B], given the sorted indices of the images held out."""
    # Computed, as a list of all indices would take a gigabyte for a hundred million images.
    rows_before = held - np.arange(len(held))  # training rows before each image held out
    return rows + np.searchsorted(rows_before, rows, side="right")
