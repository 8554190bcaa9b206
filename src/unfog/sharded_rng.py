"""Random numbers of a batch of which a process holds only some rows: its rows are those that the whole would hold.

Torch's generators cannot be entered in the middle, so the whole is drawn and the rest left. Whoever draws for a batch
does so through `taken`; whoever cuts a batch says so with `part_of`. Where nothing is cut, nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor


class _Rows(NamedTuple):
    """Rows of a batch."""

    start: int
    of: int
    """Rows of the whole."""


_part: _Rows | None = None


@contextmanager
def rows_of(start: int, of: int) -> Iterator[None]:
    """Let what is drawn inside be the rows from `start` on, of a batch of `of` rows. Not for several threads."""
    global _part
    before, _part = _part, _Rows(start, of)
    try:
        yield
    finally:
        _part = before


def draw_rows(count: int, draw: Callable[[int], Tensor], dim: int = 0) -> Tensor:
    """`draw(count)`; inside `part_of`, the `count` rows of that part along `dim` of what is drawn for the whole."""
    if _part is None:
        return draw(count)
    # A copy, as a view would keep the whole through the backward pass.
    return draw(_part.of).narrow(dim, _part.start, count).clone()
