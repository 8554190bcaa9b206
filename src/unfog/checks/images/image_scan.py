"""One pass over the pixels of a dataset: statistics and a perceptual hash of each image; figures of example images.

The bits of a perceptual hash change little where an image is saved again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unfog.data.data_report import SkippedFile
from unfog.data.dataset import ComputedPixels, Dataset, ImageSet, skipped_images
from unfog.device.cores import thread_pool, usable_cores
from unfog.reporting.findings import Figure
from unfog.reporting.image_grids import Pixels, grid
from unfog.text import sanitize
from unfog.values.image_format import are_pictures, luma_weights

Indices = NDArray[np.int64]
Progress = Callable[[int, int], None]

# Largest number of names in the facts of a finding.
MOST_NAMES = 2000

# Standard deviation, of 255, below which an image is blank and cannot be compared.
BLANK_DEVIATION = 2.0

_SMALL_SIDE = 8  # of the thumbnail that is kept of each image

_PIECE_BYTES = 4 * 2**20  # of pixels that a thread reads at a time
_MAX_THREADS = 16
_LARGEST = 96  # pixels that a larger image is shrunk to in a figure
_LETTERS = 24
Floats = NDArray[np.float32]
Hashes = NDArray[np.uint64]

_SIDE = 16  # of a thumbnail, in pixels, at most
_FREQUENCIES = 8
_DEAD_ZONE = 0.02  # share of the norm of the spectrum: what is about 0 counts as 0 however it is rounded


class _PixelStatistics(NamedTuple):
    """Statistics of each image; all are [N]."""

    digest: Hashes
    """Equal for equal pixels."""

    hash: Hashes
    """See `perceptual_hash`."""

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

    statistics: _PixelStatistics
    histogram: NDArray[np.int64]
    """[C, 256] how many pixels of the training images have each value."""

    complete: bool
    """True if every image was scanned."""

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
        """Read the images as bytes, see `StoredValues.to_bytes`: uint8 [n, C, H, W]."""
        return _read(self.prepared, rows)

    def images_figure(self, rows: Indices, title: str) -> Figure:
        """Show the first 24 images of `rows`."""
        return Figure(title, grid(self._small_images(rows[:24]), columns=12))

    def groups_figure(self, groups: Sequence[Indices], title: str, caption: str = "") -> Figure:
        """Show up to six images of each of the first eight groups, a row each, labelled by the first image's name."""
        first = [group[:6] for group in groups[:8]]
        names = [_name_end(sanitize(self.name(group[0]))) for group in first for _ in group]
        return Figure(
            title, grid(self._small_images(np.concatenate(first)), columns=6, row_names=names), caption=caption
        )

    def _small_images(self, rows: Indices) -> Pixels:
        """Return the images as uint8 [n, H, W, C]."""
        order = np.argsort(rows)  # reads a file from front to back
        pixels = np.empty_like(found := self.pixels(rows[order]))
        pixels[order] = found
        if (longest := max(pixels.shape[2:])) > _LARGEST:
            small = [max(1, side * _LARGEST // longest) for side in pixels.shape[2:]]
            pixels = np.rint(thumbnails(pixels, *small)).astype(np.uint8)
        shown: Pixels = pixels.transpose(0, 2, 3, 1)
        return shown if are_pictures(shown) else shown[..., :1]

    @classmethod
    def create(
        cls, prepared: Dataset, most: int | None = None, progress: Progress | None = None, most_sides: int | None = None
    ) -> ImageScan:
        """Compute statistics of every image, or of `most` evenly spread ones, of which about a tenth are held out.

        Several threads read a few MB of pixels at a time; the statistics take 130 bytes an image.
        """
        rows = evenly_spread_rows(len(prepared.train), len(prepared.held_out), most)
        piece = max(1, _PIECE_BYTES // prepared.train.image_bytes)
        histogram = np.zeros((prepared.settings.channels, 256), np.int64)
        parts: list[_PixelStatistics] = []

        def scan(start: int) -> tuple[_PixelStatistics, NDArray[np.int64]]:
            here = rows[start : start + piece]
            pixels = _read(prepared, here)
            trained = pixels[here < len(prepared.train)].swapaxes(0, 1)
            return _statistics(pixels), np.stack([np.bincount(channel.ravel(), minlength=256) for channel in trained])

        starts = range(0, len(rows), piece)
        # Threads suffice: NumPy and image decoders release the interpreter lock.
        pool = thread_pool(min(_MAX_THREADS, usable_cores(), max(1, len(starts))))
        try:
            for done, (statistics, counts) in enumerate(pool.map(scan, starts), 1):
                parts.append(statistics)
                histogram += counts
                if progress:
                    progress(min(done * piece, len(rows)), len(rows))
        finally:
            pool.shutdown(cancel_futures=True)  # `progress` raises where somebody wants to leave
        # Which files are unusable is known only now that lazily decoded images were read.
        usable = _usable(prepared, rows)
        statistics = _PixelStatistics(*(np.concatenate(columns)[usable] for columns in zip(*parts)))
        complete = len(rows) == len(prepared.train) + len(prepared.held_out)
        return cls(prepared, rows[usable], statistics, histogram, complete, most_sides)


def _name_end(name: str) -> str:
    return name if len(name) <= _LETTERS else f"…{name[1 - _LETTERS :]}"  # names of a set differ at their end


def unusable_files(prepared: Dataset) -> list[SkippedFile]:
    """Return all files that cannot be used, including those found damaged while images were read."""
    found = [one for images in (prepared.train, prepared.held_out) for one in skipped_images(images.pixels)]
    return sorted({*prepared.report.skipped, *found})


def _usable(prepared: Dataset, rows: Indices) -> NDArray[np.bool_]:
    # In place of a damaged image its set returns another one, which must not count twice.
    usable = np.ones(len(rows), np.bool_)
    train = len(prepared.train)
    for inside, start, images in ((rows < train, 0, prepared.train), (rows >= train, train, prepared.held_out)):
        if isinstance(images.pixels, ComputedPixels):
            usable[inside] = images.pixels.is_decodable(rows[inside] - start)
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


def _read(prepared: Dataset, rows: Indices) -> NDArray[np.uint8]:
    train = len(prepared.train)
    inside = rows < train
    if inside.all():
        return _read_set(prepared, prepared.train, rows)
    if not inside.any():
        return _read_set(prepared, prepared.held_out, rows - train)
    pixels = np.empty((len(rows), *prepared.train.pixels.shape[1:]), np.uint8)
    pixels[inside] = _read_set(prepared, prepared.train, rows[inside])
    pixels[~inside] = _read_set(prepared, prepared.held_out, rows[~inside] - train)
    return pixels


def _read_set(prepared: Dataset, images: ImageSet, rows: Indices) -> NDArray[np.uint8]:
    to_bytes = prepared.settings.image_format.values.to_bytes
    if len(rows) and rows[-1] - rows[0] == len(rows) - 1 and (np.diff(rows) == 1).all():
        # A slice of a mapped file is not copied.
        return to_bytes(np.asarray(images.pixels[int(rows[0]) : int(rows[-1]) + 1]))
    return to_bytes(np.asarray(images.pixels.take(rows, axis=0)))


def _statistics(pixels: NDArray[np.uint8]) -> _PixelStatistics:
    flat = pixels.reshape(len(pixels), -1)
    thumbs = thumbnails(pixels)
    bright = luma(thumbs)
    # Eight bytes: among a million images two different ones share a digest once in forty million sets.
    digests = b"".join(blake2b(image, digest_size=8).digest() for image in np.ascontiguousarray(flat))
    return _PixelStatistics(
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


def thumbnails(pixels: NDArray[np.uint8] | Floats, height: int = _SIDE, width: int = 0) -> Floats:
    """Average over a grid of at most height x width cells: [N, C, H, W] -> float32 [N, C, h, w], in the same scale.

    The width is by default the height.
    """
    result: NDArray[Any] = pixels
    for axis, most in ((3, width or height), (2, height)):
        size = result.shape[axis]
        cells = min(most, size)
        if size % cells:
            edges = np.arange(cells) * size // cells
            widths = np.diff(np.append(edges, size)).astype(np.float32)
            sums = np.add.reduceat(result, edges, axis, dtype=np.float32)
            result = sums / (widths[:, None] if axis == 2 else widths)
            continue
        step = size // cells  # adding every step-th pixel is several times faster than a mean over so short an axis
        parts = [result[:, :, :, k::step] if axis == 3 else result[:, :, k::step] for k in range(step)]
        total = parts[0].astype(np.float32)
        for part in parts[1:]:
            total += part
        result = total / np.float32(step)
    return np.asarray(result, np.float32)


def luma(x: Floats) -> Floats:
    """Return the brightness of images: [N, C, h, w] -> [N, h, w]."""
    return np.tensordot(x, np.array(luma_weights(x.shape[1]), np.float32), (1, 0))


def perceptual_hash(thumbs: Floats) -> Hashes:
    """Hash thumbnails [N, C, h, w] to uint64 [N]: the signs of the low frequencies of the brightness."""
    bright = luma(thumbs)
    waves = [_cosines(side) for side in bright.shape[1:]]
    spectrum = np.einsum("ky,nyx,lx->nkl", waves[0], bright, waves[1], optimize=True).reshape(len(bright), -1)
    spectrum = spectrum[:, _by_frequency()]
    spectrum /= np.maximum(np.linalg.norm(spectrum, axis=1, keepdims=True), 1e-6)
    bits = np.ascontiguousarray(spectrum > _DEAD_ZONE)
    return np.packbits(bits, axis=1).view(">u8")[:, 0].astype(np.uint64)


def _cosines(side: int) -> Floats:
    """Return the first rows of the DCT-II matrix, [k, side]."""
    k = np.arange(_FREQUENCIES + 1)[:, None]
    return np.cos(np.pi * k * (2 * np.arange(side) + 1) / (2 * side)).astype(np.float32)


def _by_frequency() -> NDArray[np.int64]:
    """Return the 64 lowest of 9 x 9 frequencies without the mean, lowest first."""
    y, x = np.divmod(np.arange((_FREQUENCIES + 1) ** 2), _FREQUENCIES + 1)
    return np.argsort(y * y + x * x, kind="stable")[1:65]
