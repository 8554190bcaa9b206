"""One look at the pixels of every image, or of some: a few numbers about each, and the tones of all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unfog.data.dataset import Dataset, ImageSet
from unfog.data.lazy import LazyPixels
from unfog.data.report import SkippedFile
from unfog.doctor.images.near_duplicates import Floats, Hashes, Indices, luma, perceptual_hash, thumbnails

Progress = Callable[[int, int], None]

_SMALL_SIDE = 8
"""Side of the thumbnail that is kept of each image."""

_PIECE_BYTES = 4 * 2**20  # of pixels that a thread looks at together
_MAX_THREADS = 16


class PixelStatistics(NamedTuple):
    """What is kept of each image, [N] of each."""

    digest: Hashes
    """Equal for equal pixels."""

    hash: Hashes
    """`likeness.perceptual_hash`."""

    small: NDArray[np.uint8]
    """Brightness, [N, 8, 8]."""

    spread: Floats
    """Standard deviation over the pixels of a channel, the largest of its channels; 0 to 127.5."""

    lowest: NDArray[np.uint8]
    highest: NDArray[np.uint8]
    """Of all its values."""

    darkest: Floats
    brightest: Floats
    """Of all channels of a 16 x 16 thumbnail: a lone pixel does not count."""

    tint: Floats
    """Largest difference of two channels in a thumbnail; 0 for grey."""


@dataclass(frozen=True, eq=False)
class ImageScan:
    """What was seen of a training set and what is held out of it."""

    prepared: Dataset
    rows: Indices
    """[N] which were looked at: positions in the training set, then, counted on, in what is held out."""

    statistics: PixelStatistics
    histogram: NDArray[np.int64]
    """[C, 256] how many pixels of the training images have each value."""

    complete: bool
    """Whether every image was looked at."""

    @property
    def in_train(self) -> NDArray[np.bool_]:
        """[N], which of those looked at are trained on."""
        return self.rows < len(self.prepared.train)

    def name(self, row: int) -> str:
        """Name of one of `rows`."""
        train = self.prepared.train
        return train.names[row] if row < len(train) else self.prepared.held_out.names[row - len(train)]

    def pixels(self, rows: Indices) -> NDArray[np.uint8]:
        """uint8 [n, C, H, W] of some of `rows`."""
        return _read(self.prepared, np.asarray(rows, np.int64))


def scan_images(prepared: Dataset, most: int | None = None, progress: Progress | None = None) -> ImageScan:
    """Look at every image, or at `most` evenly spread ones, of which about a tenth are held out.

    Pixels are read a few MB at a time by several threads; what is kept is 130 bytes an image.
    """
    rows = evenly_spread_rows(len(prepared.train), len(prepared.held_out), most)
    piece = max(1, _PIECE_BYTES // int(np.prod(prepared.train.pixels.shape[1:])))
    tones = np.zeros((prepared.settings.channels, 256), np.int64)
    found: list[PixelStatistics] = []

    def look(start: int) -> tuple[PixelStatistics, NDArray[np.int64]]:
        here = rows[start : start + piece]
        pixels = _read(prepared, here)
        return _seen(pixels), _tones(pixels[here < len(prepared.train)])

    for done, (seen, counted) in enumerate(_in_threads(look, range(0, len(rows), piece)), 1):
        found.append(seen)
        tones += counted
        if progress:
            progress(min(done * piece, len(rows)), len(rows))
    usable = _usable(prepared, rows)
    seen = PixelStatistics(*(np.concatenate(parts)[usable] for parts in zip(*found)))
    return ImageScan(prepared, rows[usable], seen, tones, len(rows) == len(prepared.train) + len(prepared.held_out))


def unusable_files(prepared: Dataset) -> list[SkippedFile]:
    """Files that cannot be used, those among them that turned out when images were read."""
    lists = [pixels.skipped for pixels in _lazy(prepared).values()]
    return sorted({*prepared.report.skipped, *(one for some in lists for one in some)})


def _lazy(prepared: Dataset) -> dict[int, LazyPixels]:
    """Pixels that are decoded when they are read, by the first of their rows."""
    sets = {0: prepared.train.pixels, len(prepared.train): prepared.held_out.pixels}
    return {start: pixels for start, pixels in sets.items() if isinstance(pixels, LazyPixels)}


def _usable(prepared: Dataset, rows: Indices) -> NDArray[np.bool_]:
    """Which rows are images of their own: for one that cannot be decoded another one is read, now known."""
    usable = np.ones(len(rows), np.bool_)
    for start, pixels in _lazy(prepared).items():
        inside = (rows >= start) & (rows < start + len(pixels))
        usable[inside] = pixels.is_decodable(rows[inside] - start)
    return usable


def evenly_spread_rows(train: int, held_out: int, most: int | None = None) -> Indices:
    """All rows, or `most` evenly spread ones, of which about a tenth are held out; sorted."""
    if most is None or train + held_out <= most:
        return np.arange(train + held_out)
    aside = min(held_out, max(1, most // 10))
    return np.concatenate([_stratified(train, min(train, most - aside)), train + _stratified(held_out, aside)])


def _stratified(total: int, count: int) -> Indices:
    """One of each of `count` equal parts of 0..total-1, at random, as folders may have a rhythm; always the same."""
    edges = np.arange(count + 1) * total // max(1, count)
    inside = np.random.default_rng(0).random(count) * np.diff(edges)
    return edges[:-1] + inside.astype(np.int64)


def _in_threads(
    task: Callable[[int], tuple[PixelStatistics, NDArray[np.int64]]], starts: range
) -> Iterator[tuple[PixelStatistics, Indices]]:
    """The task at each start, in order; NumPy lets go of the interpreter, as does whatever decodes images."""
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
        return _taken(prepared.train, rows)
    if not inside.any():
        return _taken(prepared.held_out, rows - train)
    first, second = _taken(prepared.train, rows[inside]), _taken(prepared.held_out, rows[~inside] - train)
    pixels = np.empty((len(rows), *first.shape[1:]), np.uint8)
    pixels[inside], pixels[~inside] = first, second
    return pixels


def _taken(images: ImageSet, rows: Indices) -> NDArray[np.uint8]:
    if len(rows) and rows[-1] - rows[0] == len(rows) - 1 and (np.diff(rows) == 1).all():
        return np.asarray(images.pixels[int(rows[0]) : int(rows[-1]) + 1])  # a slice of a mapped file is not copied
    return np.asarray(images.pixels.take(rows, axis=0))


def _seen(pixels: NDArray[np.uint8]) -> PixelStatistics:
    count = len(pixels)
    flat = pixels.reshape(count, -1)
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


def _tones(pixels: NDArray[np.uint8]) -> NDArray[np.int64]:
    """[C, 256] counts of each value."""
    return np.stack([np.bincount(pixels[:, c].ravel(), minlength=256) for c in range(pixels.shape[1])])
