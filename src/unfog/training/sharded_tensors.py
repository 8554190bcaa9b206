"""Operations on tensors that may be sharded by rows over the ranks (torch's DTensor)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Return whether other ranks hold other rows of the tensor."""
    return hasattr(tensor, "to_local")  # not isinstance: importing DTensor takes a second


def to_local(tensor: Tensor) -> Tensor:
    """Return the rows that this rank holds, sharing memory and without gradient; an unsharded tensor as it is."""
    return cast(Any, tensor.detach()).to_local() if is_sharded(tensor) else tensor


def first_local_row(tensor: Tensor) -> int:
    """Return the index of the first row that this rank holds; 0 for an unsharded tensor."""
    if not is_sharded(tensor):
        return 0
    mesh = cast(Any, tensor).device_mesh
    share = -(-len(tensor) // mesh.size())  # FSDP2 rounds up, so the last ranks may hold fewer rows, or none
    return int(min(mesh.get_local_rank() * share, len(tensor)))


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather all rows of a tensor on every rank. A collective if the tensor is sharded."""
    return cast(Any, tensor.detach()).full_tensor() if is_sharded(tensor) else tensor


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the norm of all tensors together, 0-d. A collective if one of them is sharded."""
    rows = [to_local(tensor) for tensor in tensors if is_sharded(tensor)]
    if not rows:
        return torch.nn.utils.get_total_norm(tensors)
    square = torch.nn.utils.get_total_norm(rows).square()
    dist.all_reduce(square)
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


def map_full_matrices(shards: Tensor, rows: int, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a function of full matrices [1, rows, C] to matrices that are sharded by rows. A collective.

    `shards` and the results are [N, R, C], this rank's rows of each matrix.
    """
    # Each matrix is gathered on one rank only, so that the ranks share the work.
    size, (count, mine, columns) = dist.get_world_size(), shards.shape
    results, share = torch.empty_like(shards), -(-rows // size)
    for first in range(0, count, size):
        some = shards[first : first + size]
        sent = shards.new_zeros(size, share, columns)
        sent[: len(some), :mine] = some
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        if dist.get_rank() < len(some):
            matrix = received.view(-1, columns)[:rows]
            matrix.copy_(function(matrix[None])[0])
        dist.all_to_all_single(sent, received)
        results[first : first + size] = sent[: len(some), :mine]
    return results
