"""Large sets a part at a time, so that memory stays bounded."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor


def blocks(x: Tensor, rows: int) -> Iterator[Tensor]:
    """x [N, …] in parts of at most `rows` rows."""
    for first in range(0, len(x), rows):
        yield x[first : first + rows]
