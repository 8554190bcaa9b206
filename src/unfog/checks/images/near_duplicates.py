"""Near-duplicate search: a perceptual hash finds candidate pairs among millions, and thumbnails confirm them.

The hash of an image are the signs of its 64 lowest cosine frequencies, which compression, resizing or brightening
hardly change. To find close hashes in O(N log N), they are sorted by many random orders of their bits: two hashes that
differ in few bits are neighbours in some of these orders (Charikar 2002; Manku et al. 2007). Each candidate pair is
then compared by thumbnails, because simple images share a hash without being similar.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Indices = NDArray[np.int64]
Hashes = NDArray[np.uint64]

_SIDE = 16  # of a thumbnail, in pixels, at most

BLANK_DEVIATION = 2.0
"""Standard deviation, of 255, below which an image is blank and cannot be compared."""

_FREQUENCIES = 8
_DEAD_ZONE = 0.02  # share of the norm of the spectrum: what is about 0 counts as 0 however it is rounded
_ORDERS = 20
_NEIGHBOURS = 12
_MOST_BITS = 9  # of 64: hashes of an image and of its JPEG, or of it resized by a quarter, differ in up to seven

# Of CIFAR-10 and emoji saved as JPEG at quality 50 or more, or resized by a quarter, 95% stay within _COPY. All pairs
# of CIFAR-10 within _ALIKE show one image twice; in sets of similar subjects, such as trousers, some do not.
_COPY = {"shape": 0.97, "detail": 0.95, "gain": 1.2, "shift": 20.0, "patch": 8.0, "spot": 32.0}
_ALIKE = {"shape": 0.96, "detail": 0.85, "gain": 1.5, "shift": 40.0, "spot": 50.0}
_LUMA = np.array([0.299, 0.587, 0.114], np.float32)  # ITU-R BT.601


def thumbnails(pixels: NDArray[np.uint8] | Floats, side: int = _SIDE) -> Floats:
    """Average over a grid of at most `side` x `side` cells: [N, C, H, W] -> float32 [N, C, h, w], in the same scale."""
    result: NDArray[Any] = pixels
    for axis in (3, 2):
        size = result.shape[axis]
        cells = min(side, size)
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
    """Return the brightness of RGB or grey: [N, C, h, w] -> [N, h, w]."""
    return x[:, 0] if x.shape[1] == 1 else np.tensordot(x, _LUMA, (1, 0))


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


def _by_frequency() -> Indices:
    """Return the 64 lowest of 9 x 9 frequencies without the mean, lowest first."""
    y, x = np.divmod(np.arange((_FREQUENCIES + 1) ** 2), _FREQUENCIES + 1)
    return np.argsort(y * y + x * x, kind="stable")[1:65]


def candidate_pairs(hashes: Hashes) -> Iterator[Indices]:
    """Yield pairs [M, 2] of positions with close hashes, a batch for each order of the bits; a pair may come twice.

    Compares 12 neighbours in each of 20 orders. Of many equal hashes some pairs are missed, but each one is paired.
    """
    generator = np.random.default_rng(0)
    for _ in range(_ORDERS):
        # Low frequencies change least, so they tend to come first.
        order = np.argsort(np.arange(64) + 24 * generator.standard_normal(64))
        places = np.argsort(_permuted(hashes, order), kind="stable")
        ordered = hashes[places]
        found = []
        for ahead in range(1, min(_NEIGHBOURS, len(hashes) - 1) + 1):
            near = np.flatnonzero(_differing_bits(ordered[ahead:] ^ ordered[:-ahead]) <= _MOST_BITS)
            found.append(np.stack([places[near], places[near + ahead]], 1))
        if found:
            yield np.sort(np.concatenate(found), axis=1)


def _permuted(hashes: Hashes, order: Indices) -> Hashes:
    result = np.zeros_like(hashes)
    for to, bit in enumerate(order.tolist()):
        result |= ((hashes >> np.uint64(bit)) & np.uint64(1)) << np.uint64(to)
    return result


_ONES = np.array([bin(i).count("1") for i in range(1 << 16)], np.uint8)


def _differing_bits(different: Hashes) -> NDArray[np.uint8]:
    ones = _ONES[np.ascontiguousarray(different).view(np.uint16)]
    counts: NDArray[np.uint8] = ones.reshape(-1, 4).sum(1, dtype=np.uint8)
    return counts


class ThumbnailMatch(NamedTuple):
    """Result of comparing pairs of thumbnails; bool [M]."""

    duplicate: NDArray[np.bool_]
    """One image saved again: smaller, compressed or slightly brighter."""

    similar: NDArray[np.bool_]
    """Nearly the same image: cropped a little, recoloured, or the next of a series. Includes all duplicates."""


def compare_thumbnails(a: Floats, b: Floats) -> ThumbnailMatch:
    """Compare pairs of thumbnails [M, C, h, w], 0 to 255, after fitting brightness and contrast.

    Measured are: `shape`, the correlation of all values; `detail`, the correlation of the brightness less its
    surroundings; `gain` and `shift`, what was fitted; `patch`, the largest difference of 4 x 4 means; and `spot`, the
    largest difference of the brightness of one pixel. Compression changes the last two little, another subject a lot.
    """
    mean_a, mean_b = (x.mean((1, 2, 3), keepdims=True) for x in (a, b))
    spread_a, spread_b = (np.maximum(x.std((1, 2, 3), keepdims=True), 1.0) for x in (a, b))
    unit_a, unit_b = (a - mean_a) / spread_a, (b - mean_b) / spread_b
    smaller, apart = np.minimum(spread_a, spread_b), unit_a - unit_b
    measured = {
        "shape": (unit_a * unit_b).mean((1, 2, 3)),
        "detail": _correlation(_detail(luma(a)), _detail(luma(b))),
        "gain": np.maximum(spread_a / spread_b, spread_b / spread_a)[:, 0, 0, 0],
        "shift": np.abs(mean_a - mean_b)[:, 0, 0, 0],
        "patch": np.abs(thumbnails(apart * smaller, 4)).max((1, 2, 3)),
        "spot": np.abs(luma(apart) * smaller[:, 0]).max((1, 2)),
    }
    return ThumbnailMatch(*(_within(measured, limits) for limits in (_COPY, _ALIKE)))


def _within(measured: dict[str, Floats], limits: dict[str, float]) -> NDArray[np.bool_]:
    fits = [measured[k] >= v if k in ("shape", "detail") else measured[k] <= v for k, v in limits.items()]
    all_fit: NDArray[np.bool_] = np.logical_and.reduce(fits)
    return all_fit


def _detail(bright: Floats) -> Floats:
    """Return brightness [M, h, w] less its mean over 3 x 3 pixels."""
    height, width = bright.shape[1:]
    padded = np.pad(bright, ((0, 0), (1, 1), (1, 1)), mode="edge")
    around = sum(padded[:, y : y + height, x : x + width] for y in range(3) for x in range(3))
    return bright - around / np.float32(9)


def _correlation(a: Floats, b: Floats) -> Floats:
    norms = np.linalg.norm(a, axis=(1, 2)) * np.linalg.norm(b, axis=(1, 2))
    correlation: Floats = (a * b).sum((1, 2)) / np.maximum(norms, 1e-6)
    return correlation


def connected_groups(pairs: Indices) -> list[Indices]:
    """Return the connected components of pairs [M, 2], the largest first, each in ascending order."""
    if not len(pairs):
        return []
    members, ends = np.unique(pairs, return_inverse=True)
    ends = ends.reshape(-1, 2)
    lowest = np.arange(len(members))
    while True:  # each node takes the lowest label of its neighbours, then that label's own (pointer jumping)
        before = lowest.copy()
        np.minimum.at(lowest, ends[:, 0], before[ends[:, 1]])
        np.minimum.at(lowest, ends[:, 1], before[ends[:, 0]])
        lowest = lowest[lowest]
        if (lowest == before).all():
            break
    order = np.argsort(lowest, kind="stable")
    starts = np.flatnonzero(np.diff(lowest[order], prepend=-1))
    return sorted(np.split(members[order], starts[1:]), key=len, reverse=True)
