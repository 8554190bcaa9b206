"""Operations on tensors that may be sharded by rows over the ranks (torch's DTensor)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Return whether other ranks hold other rows of the tensor."""
    return hasattr(tensor, "to_local")  # not isinstance: importing DTensor takes a second


def to_local(tensor: Tensor) -> Tensor:
    """Return the rows that this rank holds, sharing memory and without gradient; an unsharded tensor unchanged."""
    return cast(Any, tensor.detach()).to_local() if is_sharded(tensor) else tensor


def first_local_row(tensor: Tensor) -> int:
    """Return the index of the first row that this rank holds; 0 for an unsharded tensor."""
    if not is_sharded(tensor):
        return 0
    mesh = cast(Any, tensor).device_mesh
    share = -(-len(tensor) // mesh.size())  # FSDP2 rounds up, so the last ranks may hold fewer rows, or none
    return int(min(mesh.get_local_rank() * share, len(tensor)))


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the norm of all tensors together, 0-d. A collective if one of them is sharded."""
    rows = [to_local(tensor) for tensor in tensors if is_sharded(tensor)]
    if not rows:
        return torch.nn.utils.get_total_norm(tensors)
    # Squares add up over ranks, norms do not.
    square = torch.nn.utils.get_total_norm(rows).square()
    dist.all_reduce(square)
    # After the sum over ranks: whole tensors are the same on every rank, and would count once for each.
    if rest := [tensor for tensor in tensors if not is_sharded(tensor)]:
        square += torch.nn.utils.get_total_norm(rest).square()
    return square.sqrt()


def all_finite(tensors: Sequence[Tensor]) -> list[bool]:
    """Return for each tensor whether all its values are finite. A collective if one of them is sharded."""
    # Stacked, because each value that is read makes the host wait for the device.
    finite = torch.stack([to_local(tensor).isfinite().all() for tensor in tensors]).int()
    if any(map(is_sharded, tensors)):
        dist.all_reduce(finite, dist.ReduceOp.MIN)
    return [bool(good) for good in finite.tolist()]
