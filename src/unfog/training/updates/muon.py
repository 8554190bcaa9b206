"""Muon: momenta of matrices, orthogonalised by Newton-Schulz iteration, with AdamW for all other parameters."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unfog.training.sharded_tensors import is_sharded, to_local
from unfog.training.updates.masked import lerp_unless

# Of the quintic whose iteration brings singular values near to one the fastest (Jordan et al. 2024).
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


class MuonAdamW(torch.optim.Optimizer):
    """Muon for parameters of two dimensions or more, and AdamW for the others, as one optimiser.

    One optimiser, so that the loss scaler, skipped steps and roll-backs treat both the same. A kernel [out, in, k, k]
    is the matrix [out, in k k]. Matrices of one shape are stacked. As in torch's fused optimisers, a step changes
    nothing if the attribute `found_inf`, 0-d on the device, is 1.
    """

    found_inf: Tensor | None = None

    def __init__(
        self,
        matrices: list[nn.Parameter],
        adamw: torch.optim.AdamW,
        momentum: float,
        rounds: int,
        fast: torch.dtype = torch.float32,
    ):
        self.fast, self._adamw = fast, adamw
        usual = {name: adamw.param_groups[0][name] for name in ("lr", "weight_decay")}
        super().__init__([{"params": matrices}, *adamw.param_groups], {**usual, "momentum": momentum, "rounds": rounds})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state. The moment of a layer that the other optimiser trained before is left out, and begins anew."""
        matrices = len(self.param_groups[0]["params"])
        moments = state_dict["state"].items()
        fitting = {i: held for i, held in moments if ("momentum_buffer" in held) == (i < matrices)}
        super().load_state_dict(state_dict | {"state": fitting})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take one step with both optimisers. `closure` is not supported."""
        assert closure is None
        group, skip = self.param_groups[0], self.found_inf
        by_shape: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
        for p in group["params"]:
            if p.grad is not None:
                by_shape[len(p), p.numel() // len(p)].append(p)
        for (rows, columns), parameters in by_shape.items():
            updates = self._directions(parameters, rows, columns, group["momentum"], group["rounds"])
            moved, shrink = list(map(to_local, parameters)), 1 - group["lr"] * group["weight_decay"]
            far = -group["lr"] * 0.2 * math.sqrt(max(rows, columns))  # AdamW's steps have a root mean square of 0.2 lr
            if skip is not None:
                # Times 1, and plus -0: neither changes a bit.
                shrink, updates = torch.where(skip > 0, 1.0, shrink), updates.masked_fill_(skip > 0, 0.0)
            if isinstance(far, Tensor):  # which foreach takes no `alpha` from
                updates, far = updates * far, 1.0
            torch._foreach_mul_(moved, shrink)
            torch._foreach_add_(moved, [_from_matrix(u, p) for u, p in zip(updates, moved)], alpha=far)
        # Loading a state dict replaces groups and state, so AdamW gets them anew each time.
        self._adamw.param_groups, self._adamw.state = self.param_groups[1:], self.state
        cast(Any, self._adamw).found_inf = skip
        self._adamw.step()

    def _directions(self, parameters: list[Tensor], rows: int, columns: int, momentum: float, rounds: int) -> Tensor:
        """Return the orthogonalised Nesterov momenta [N, rows, columns], or this rank's rows of them."""
        gradients = [to_local(p.grad) for p in parameters if p.grad is not None]
        for p in parameters:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        means = [to_local(self.state[p]["momentum_buffer"]) for p in parameters]
        if self.found_inf is None:
            torch._foreach_lerp_(means, gradients, 1 - momentum)
        else:
            lerp_unless(self.found_inf, means, gradients, 1 - momentum)
        ahead = torch._foreach_lerp(gradients, means, momentum)
        stacked = torch.stack([_as_matrix(a) for a in ahead])
        work, fast = partial(_orthogonalize, rounds=rounds), stacked.to(self.fast)
        made = _map_full_matrices(fast, rows, work) if is_sharded(parameters[0]) else work(fast)
        return made.to(stacked.dtype)


def _as_matrix(tensor: Tensor) -> Tensor:
    """View a tensor [out, ...] as the matrix [out, all other], with the columns in the order in which they lie."""
    return (tensor.permute(0, 2, 3, 1) if _is_channels_last(tensor) else tensor).flatten(1)


def _from_matrix(matrix: Tensor, like: Tensor) -> Tensor:
    """View a matrix as the tensor that `_as_matrix` made it of."""
    if not _is_channels_last(like):
        return matrix.view_as(like)
    out, channels, *kernel = like.shape
    return matrix.view(out, *kernel, channels).permute(0, 3, 1, 2)


def _is_channels_last(tensor: Tensor) -> bool:
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


def _orthogonalize(x: Tensor, rounds: int = 5) -> Tensor:
    """Set the singular values of matrices [N, R, C] to about one, by Newton-Schulz iteration.

    X <- a X + (b X X' + c (X X')^2) X, begun at X / |X|, where no singular value is above one (Jordan et al. 2024).
    """
    a, b, c = _NEWTON_SCHULZ
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(rounds):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _map_full_matrices(shards: Tensor, rows: int, function: Callable[[Tensor], Tensor]) -> Tensor:
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
