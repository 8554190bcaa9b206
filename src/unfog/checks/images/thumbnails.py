"""Thumbnails of images, and perceptual hashes: bits that change little where an image is saved again."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Hashes = NDArray[np.uint64]

_SIDE = 16  # of a thumbnail, in pixels, at most
_FREQUENCIES = 8
_DEAD_ZONE = 0.02  # share of the norm of the spectrum: what is about 0 counts as 0 however it is rounded
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


def _by_frequency() -> NDArray[np.int64]:
    """Return the 64 lowest of 9 x 9 frequencies without the mean, lowest first."""
    y, x = np.divmod(np.arange((_FREQUENCIES + 1) ** 2), _FREQUENCIES + 1)
    return np.argsort(y * y + x * x, kind="stable")[1:65]
