"""Random numbers that depend on the seed of a run and the position of an image alone, however a batch is split.

Torch's generators cannot start in the middle of a sequence, so the full batch is drawn and the other rows dropped.
Code that draws random numbers per image uses `draw_rows`; code that splits a batch wraps it in `rows_of`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

_OWN_SEED = 0x5EED  # distinguishes the seed of a split micro-batch from that of the batch that its noise is drawn for


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


def seed_generators(seed: int, position: int) -> None:
    """Seed every generator from a position in the stream, so that randomness needs no saved state."""
    # SplitMix64's finaliser keeps neighbouring positions from giving related seeds (Steele et al. 2014).
    z = (seed * 0xD1342543DE82EF95 + (position + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    z = (z ^ (z >> 31)) % 2**63
    if _has_accelerator():
        torch.manual_seed(z)
    else:  # torch.manual_seed would keep the seed, and a stack trace with it, for accelerators that may turn up later
        torch.default_generator.manual_seed(z)


@cache
def _has_accelerator() -> bool:
    return torch.accelerator.is_available()


def with_own_seed(network: nn.Module, seed: int, first: int) -> nn.Module:
    """Wrap a network so that its dropout gets a seed of this micro-batch's own."""

    # Dropout cannot be drawn for more images than go through the network, and with a common seed all parts of a split
    # batch would drop the same.
    def call(*inputs: Tensor | None) -> Any:
        seed_generators(seed ^ _OWN_SEED, first)
        return network(*inputs)

    return cast(nn.Module, call)
