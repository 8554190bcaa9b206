"""Tensors that may be divided by rows among processes (torch's DTensor): what of them is here, and what all have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether other processes hold other rows of it."""
    return hasattr(tensor, "to_local")  # asked of the class, as its module takes a second to import


def to_local(tensor: Tensor) -> Tensor:
    """The rows that this process holds, sharing memory with it; all of a tensor that is not divided. No gradient."""
    return cast(Any, tensor.detach()).to_local() if is_sharded(tensor) else tensor


def first_local_row(tensor: Tensor) -> int:
    """Where the rows that this process holds begin; 0 of a tensor that is not divided."""
    if not is_sharded(tensor):
        return 0
    mesh = cast(Any, tensor).device_mesh
    share = -(-len(tensor) // mesh.size())  # as FSDP2 divides: the last ones may have fewer, or none
    return int(min(mesh.get_local_rank() * share, len(tensor)))


def full_tensor(tensor: Tensor) -> Tensor:
    """All rows of it, brought together at every process; all processes call this."""
    return cast(Any, tensor.detach()).full_tensor() if is_sharded(tensor) else tensor


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Norm of all of them together, a 0-d tensor. Where some are divided all processes call this, and get the same."""
    rows = [to_local(tensor) for tensor in tensors if is_sharded(tensor)]
    if not rows:
        return torch.nn.utils.get_total_norm(tensors)
    square = torch.nn.utils.get_total_norm(rows).square()
    dist.all_reduce(square)
    if rest := [tensor for tensor in tensors if not is_sharded(tensor)]:
        square += torch.nn.utils.get_total_norm(rest).square()
    return square.sqrt()


def all_finite(tensors: Sequence[Tensor]) -> list[bool]:
    """Whether all values are finite, of each tensor; where some are divided all processes call this, and agree."""
    # One answer for all of them, because each one asked for makes the host wait for the device.
    finite = torch.stack([to_local(tensor).isfinite().all() for tensor in tensors]).int()
    if any(map(is_sharded, tensors)):
        dist.all_reduce(finite, dist.ReduceOp.MIN)
    return [bool(good) for good in finite.tolist()]


def map_full_matrices(parts: Tensor, rows: int, work: Callable[[Tensor], Tensor]) -> Tensor:
    """What `work` makes of matrices [N, rows, C] that are divided by rows; each of them comes together at one process.

    Args:
        parts: [N, R, C], the rows of each that are here; all processes call this.

    Returns:
        The same rows of what was made.
    """
    size, (count, mine, columns) = dist.get_world_size(), parts.shape
    made, share = torch.empty_like(parts), -(-rows // size)
    for first in range(0, count, size):
        some = parts[first : first + size]
        sent = parts.new_zeros(size, share, columns)
        sent[: len(some), :mine] = some
        together = torch.empty_like(sent)
        dist.all_to_all_single(together, sent)
        if dist.get_rank() < len(some):
            matrix = together.view(-1, columns)[:rows]
            matrix.copy_(work(matrix[None])[0])
        dist.all_to_all_single(sent, together)
        made[first : first + size] = sent[: len(some), :mine]
    return made
