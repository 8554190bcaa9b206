"""Random numbers for some rows of a batch, equal to those rows of the numbers drawn for the full batch.

Torch's generators cannot start in the middle of a sequence, so the full batch is drawn and the other rows dropped.
Code that draws random numbers per image uses `draw_rows`; code that splits a batch wraps it in `rows_of`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from torch import Tensor


class _Rows(NamedTuple):
    start: int
    total: int


# A context rather than an argument: it would have to pass through the signatures of every augmentation, loss function
# and noise source, and of all that users write, though only the training loop ever splits a batch.
_rows: ContextVar[_Rows | None] = ContextVar("rows", default=None)


@contextmanager
def rows_of(start: int, total: int) -> Iterator[None]:
    """Let `draw_rows` inside the context return the rows from `start` on of a batch of `total` rows."""
    token = _rows.set(_Rows(start, total))
    try:
        yield
    finally:
        _rows.reset(token)


def draw_rows(count: int, draw: Callable[[int], Tensor], dim: int = 0) -> Tensor:
    """Return `draw(count)`, or inside `rows_of` the `count` rows of `draw(total)` along `dim`."""
    rows = _rows.get()
    if rows is None:
        return draw(count)
    # A copy, because a view would keep the full tensor alive through the backward pass.
    return draw(rows.total).narrow(dim, rows.start, count).clone()
