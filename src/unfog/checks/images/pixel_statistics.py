"""One pass over the pixels of a dataset: a few statistics of each image, and the histogram of all values."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unfog.checks.images.near_duplicates import Floats, Hashes, Indices, luma, perceptual_hash, thumbnails
from unfog.data.data_report import SkippedFile
from unfog.data.dataset import Dataset, ImageSet
from unfog.data.lazy import LazyPixels

Progress = Callable[[int, int], None]

MOST_NAMES = 2000
"""Largest number of names in the facts of a finding."""

_SMALL_SIDE = 8  # of the thumbnail that is kept of each image
_PIECE_BYTES = 4 * 2**20  # of pixels that a thread reads at a time
_MAX_THREADS = 16


class PixelStatistics(NamedTuple):
    """Statistics of each image; all are [N]."""

    digest: Hashes
    """Equal for equal pixels."""

    hash: Hashes
    """See `near_duplicates.perceptual_hash`."""

    small: NDArray[np.uint8]
    """Brightness, [N, 8, 8]."""

    spread: Floats
    """Standard deviation over the pixels of a channel, the largest of all channels; 0 to 127.5."""

    lowest: NDArray[np.uint8]
    highest: NDArray[np.uint8]
    """Over all values."""

    darkest: Floats
    brightest: Floats
    """Over all channels of a 16 x 16 thumbnail, so that a single pixel does not count."""

    tint: Floats
    """Largest difference of two channels in a thumbnail; 0 for grey."""


@dataclass(frozen=True, eq=False)
class ImageScan:
    """Statistics of the images of a dataset, or of a sample of them.

    A row is the index of an image: first the training images, then, counted on, the held-out ones.
    """

    prepared: Dataset
    rows: Indices
    """[N] rows that were scanned."""

    statistics: PixelStatistics
    histogram: NDArray[np.int64]
    """[C, 256] how many pixels of the training images have each value."""

    complete: bool
    """True where every image was scanned."""

    most_sides: int | None = None
    """Limit of originals whose sides are checked; None checks all."""

    @property
    def in_train(self) -> NDArray[np.bool_]:
        return self.rows < len(self.prepared.train)

    def name(self, row: int) -> str:
        train = self.prepared.train
        return train.names[row] if row < len(train) else self.prepared.held_out.names[row - len(train)]

    def names(self, rows: Indices) -> list[str]:
        """Return the names of the first MOST_NAMES of these rows."""
        return [self.name(row) for row in rows[:MOST_NAMES].tolist()]

    def pixels(self, rows: Indices) -> NDArray[np.uint8]:
        """Read uint8 [n, C, H, W]."""
        return _read(self.prepared, np.asarray(rows, np.int64))


def scan_images(
    prepared: Dataset, most: int | None = None, progress: Progress | None = None, most_sides: int | None = None
) -> ImageScan:
    """Compute statistics of every image, or of `most` evenly spread ones, of which about a tenth are held out.

    Several threads read a few MB of pixels at a time; the statistics take 130 bytes an image.
    """
    rows = evenly_spread_rows(len(prepared.train), len(prepared.held_out), most)
    piece = max(1, _PIECE_BYTES // int(np.prod(prepared.train.pixels.shape[1:])))
    histogram = np.zeros((prepared.settings.channels, 256), np.int64)
    parts: list[PixelStatistics] = []

    def scan(start: int) -> tuple[PixelStatistics, NDArray[np.int64]]:
        here = rows[start : start + piece]
        pixels = _read(prepared, here)
        return _statistics(pixels), _histogram(pixels[here < len(prepared.train)])

    for done, (statistics, counts) in enumerate(_in_threads(scan, range(0, len(rows), piece)), 1):
        parts.append(statistics)
        histogram += counts
        if progress:
            progress(min(done * piece, len(rows)), len(rows))
    # Which files are unusable is known only now that lazily decoded images were read.
    usable = _usable(prepared, rows)
    statistics = PixelStatistics(*(np.concatenate(columns)[usable] for columns in zip(*parts)))
    complete = len(rows) == len(prepared.train) + len(prepared.held_out)
    return ImageScan(prepared, rows[usable], statistics, histogram, complete, most_sides)


def unusable_files(prepared: Dataset) -> list[SkippedFile]:
    """Return all files that cannot be used, including those found damaged while images were read."""
    found = [one for pixels in _lazy_pixels(prepared).values() for one in pixels.skipped]
    return sorted({*prepared.report.skipped, *found})


def _lazy_pixels(prepared: Dataset) -> dict[int, LazyPixels]:
    """Return {first row: pixels} of the sets whose images are decoded as they are read."""
    sets = {0: prepared.train.pixels, len(prepared.train): prepared.held_out.pixels}
    return {start: pixels for start, pixels in sets.items() if isinstance(pixels, LazyPixels)}


def _usable(prepared: Dataset, rows: Indices) -> NDArray[np.bool_]:
    # In place of a damaged image its set returns another one, which must not count twice.
    usable = np.ones(len(rows), np.bool_)
    for start, pixels in _lazy_pixels(prepared).items():
        inside = (rows >= start) & (rows < start + len(pixels))
        usable[inside] = pixels.is_decodable(rows[inside] - start)
    return usable


def evenly_spread_rows(train: int, held_out: int, most: int | None = None) -> Indices:
    """Return all rows, or `most` of them, of which about a tenth are held out; sorted."""
    if most is None or train + held_out <= most:
        return np.arange(train + held_out)
    aside = min(held_out, max(1, most // 10))
    return np.concatenate([_stratified(train, min(train, most - aside)), train + _stratified(held_out, aside)])


def _stratified(total: int, count: int) -> Indices:
    # One at random of each of `count` equal parts: at equal distances, a folder that alternates would show one side.
    edges = np.arange(count + 1) * total // max(1, count)
    inside = np.random.default_rng(0).random(count) * np.diff(edges)
    return edges[:-1] + inside.astype(np.int64)


_Result = tuple[PixelStatistics, NDArray[np.int64]]


def _in_threads(task: Callable[[int], _Result], starts: range) -> Iterator[_Result]:
    # Threads suffice: NumPy and image decoders release the interpreter lock.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    pool = ThreadPoolExecutor(min(_MAX_THREADS, cores, max(1, len(starts))))
    try:
        yield from pool.map(task, starts)
    finally:
        pool.shutdown(cancel_futures=True)


def _read(prepared: Dataset, rows: Indices) -> NDArray[np.uint8]:
    train = len(prepared.train)
    inside = rows < train
    if inside.all():
        return _read_set(prepared.train, rows)
    if not inside.any():
        return _read_set(prepared.held_out, rows - train)
    first, second = _read_set(prepared.train, rows[inside]), _read_set(prepared.held_out, rows[~inside] - train)
    pixels = np.empty((len(rows), *first.shape[1:]), np.uint8)
    pixels[inside], pixels[~inside] = first, second
    return pixels


def _read_set(images: ImageSet, rows: Indices) -> NDArray[np.uint8]:
    if len(rows) and rows[-1] - rows[0] == len(rows) - 1 and (np.diff(rows) == 1).all():
        return np.asarray(images.pixels[int(rows[0]) : int(rows[-1]) + 1])  # a slice of a mapped file is not copied
    return np.asarray(images.pixels.take(rows, axis=0))


def _statistics(pixels: NDArray[np.uint8]) -> PixelStatistics:
    flat = pixels.reshape(len(pixels), -1)
    thumbs = thumbnails(pixels)
    bright = luma(thumbs)
    digests = b"".join(blake2b(image, digest_size=8).digest() for image in np.ascontiguousarray(flat))
    return PixelStatistics(
        digest=np.frombuffer(digests, np.uint64),
        hash=perceptual_hash(thumbs),
        small=np.rint(thumbnails(bright[:, None], _SMALL_SIDE)[:, 0]).astype(np.uint8),
        spread=pixels.reshape(*pixels.shape[:2], -1).std(2, dtype=np.float32).max(1),
        lowest=flat.min(1),
        highest=flat.max(1),
        darkest=thumbs.min((1, 2, 3)),
        brightest=thumbs.max((1, 2, 3)),
        tint=(thumbs.max(1) - thumbs.min(1)).max((1, 2)),
    )


def _histogram(pixels: NDArray[np.uint8]) -> NDArray[np.int64]:
    return np.stack([np.bincount(pixels[:, c].ravel(), minlength=256) for c in range(pixels.shape[1])])
