"""A seeded shuffle of 0 … n - 1 of which any entry can be computed in constant time and memory.

It is a Feistel network on a mixed radix (Black and Rogaway 2002, "Ciphers with arbitrary finite domains"). An index is
written as left * columns + right, and each round adds a hash of one half to the other. Each round is invertible, so
the whole is a permutation of rows * columns >= n. An entry beyond n is permuted again (cycle walking).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 10  # four do for a large domain (Luby and Rackoff, 1988); orders of five images want more
_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)  # constants of splitmix64's finaliser
_HALF = np.uint64(32)
_ROUND_KEYS = [np.uint64(i * 0xD1342543DE82EF95 & _WORD) for i in range(_ROUNDS)]


def epoch_keys(seed: int, epoch: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return the 64-bit key of each (seed, epoch): int64 [B] -> uint64 [B]. Any integer may be a seed."""
    keys = _hash(epoch.astype(np.uint64), np.array([seed & _WORD], np.uint64))
    return _hash(keys, np.array([(seed >> 64) & _WORD], np.uint64))


def permute(index: NDArray[np.int64], n: int, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Permute each index by the shuffle of 0 … n - 1 that its key selects: int64 [B] in [0, n), keys [B] or [1]."""
    # An even number of rows, as shifting an odd cycle is an even permutation: half of all orders would be lost.
    rows = 2 * (math.isqrt(max(n - 1, 0)) // 2 + 1)
    columns = -(-n // rows)
    out = _rounds(index.astype(np.uint64), rows, columns, keys)
    outside = np.flatnonzero(out >= n)
    while outside.size:
        out[outside] = _rounds(out[outside], rows, columns, keys if keys.size == 1 else keys[outside])
        outside = outside[out[outside] >= n]
    return out.astype(np.int64)


def _rounds(index: NDArray[np.uint64], rows: int, columns: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Permute indices in [0, rows * columns)."""
    left, right = np.divmod(index, np.uint64(columns))
    for i in range(0, _ROUNDS, 2):
        left = _shift(left, right, rows, keys + _ROUND_KEYS[i])
        right = _shift(right, left, columns, keys + _ROUND_KEYS[i + 1])
    return left * np.uint64(columns) + right


def _shift(
    moved: NDArray[np.uint64], by: NDArray[np.uint64], size: int, keys: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """Return (moved + hash(by)) mod size."""
    # The hash is scaled to [0, size) by its upper 32 bits.
    moved = moved + ((_hash(by, keys) >> _HALF) * np.uint64(size) >> _HALF)
    # Unsigned, so a negative difference wraps round to something huge, and the minimum is the sum mod size.
    folded: NDArray[np.uint64] = np.minimum(moved, moved - np.uint64(size))
    return folded


def _hash(x: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash (x, key) to 64 bits, of which the upper ones are mixed better."""
    # The arithmetic wraps round at 2^64, on purpose.
    x = x * np.uint64(_GOLDEN) ^ keys
    x = (x ^ x >> _HALF) * _MIX[0]
    return (x ^ x >> np.uint64(29)) * _MIX[1]
