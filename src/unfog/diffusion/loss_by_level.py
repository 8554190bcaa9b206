"""Running mean of the loss by noise level, for the `uncertainty` weighting and for adaptive noise levels.

EDM2 weighs each level by the inverse of its expected loss, which it learns as exp(u(sigma)) with a small network head
(Karras et al. 2024, eq. 14): lambda / e^u |D - x0|^2 + u. The minimum over u is at e^u = E[lambda |D - x0|^2], a mean,
which needs no head: it is measured here, by quantile of the training schedule, with a horizon that grows with the run.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

_NODES = 33  # quantiles 0, 1/32, …, 1 at which means are kept; linear in between
_HORIZON = 0.1  # share of the images so far that the means remember: steady, yet they follow a falling loss
LEAST_IMAGES = 2048  # images that they remember at least: sixty for each node, and no more than a short run has
_MOST_LOSS = 1e15  # upper limit of losses, so that their squares stay finite in float32
_LEAST_LOSS = 1e-6  # lower limit of means, so that a level with nothing left to learn gets no infinite weight


class LossByLevel:
    """Running means of the loss and of its square, by noise quantile; kept on the device, and never read from there.

    An image at u counts for the two nodes around it, with linear weights.
    """

    def __init__(self, device: torch.device):
        self.sums = torch.zeros(3, _NODES, device=device)  # of shares of images, of their losses, of the squares
        self.seen = 0

    def add(self, u: Tensor, loss: Tensor) -> None:
        """Count the losses [B] of one step at noise quantiles u [B] in (0, 1)."""
        self.seen += len(u)
        self.sums *= math.exp(-len(u) / max(LEAST_IMAGES, _HORIZON * self.seen))
        loss = loss.clamp(max=_MOST_LOSS)
        moments = torch.stack([torch.ones_like(loss), loss, loss.square()])
        # A sum over products, not a matrix product, which autocast would round.
        self.sums += (moments[:, :, None] * _node_weights(u)).sum(1)

    def log_mean(self, u: Tensor) -> Tensor:
        """Return the log of the expected loss at quantiles u [B], the u(sigma) of EDM2; 0 before the first loss."""
        return (_node_weights(u) * self._means()[0].clamp_min(_LEAST_LOSS).log()).sum(1)

    def draw(self, v: Tensor, share: float, divided: bool = False) -> tuple[Tensor, Tensor]:
        """Map evenly distributed v [B] in (0, 1) to (noise quantiles u [B], their importance 1 / p(u) [B]).

        The density p is a mixture: uniform with weight 1 - share, else proportional to the root of the mean square
        loss, which minimises the variance of an importance-weighted mean (Nichol & Dhariwal 2021, section 3.3). It is
        constant between nodes, so that u increases with v, and stratified v stay stratified. `divided`: the trained
        loss is divided by its mean, as `uncertainty` does, and then so is the root.
        """
        mean, square = self._means()
        root = square.sqrt().clamp_min(_LEAST_LOSS)
        if divided:
            root = root / mean.clamp_min(_LEAST_LOSS)
        cells = (root[1:] + root[:-1]) / 2
        density = (1 - share) + share * cells / cells.mean()
        # A cumulative sum in a form that is deterministic on every device; CUDA's cumsum is not.
        below = (density[:, None] * torch.ones(_NODES - 1, _NODES, device=v.device).triu(1)).sum(0) / (_NODES - 1)
        cell = (torch.searchsorted(below, v, right=True) - 1).clamp(0, _NODES - 2)
        u = (cell + (v - below[cell]) * (_NODES - 1) / density[cell]) / (_NODES - 1)
        # At 0 and 1 continuous schedules are infinite.
        return u.clamp(1e-6, 1 - 1e-6), 1 / density[cell]

    def _means(self) -> Tensor:
        """Return mean loss and mean squared loss at the nodes, [2, _NODES]; 1 where nothing was measured."""
        count = self.sums[0]
        return torch.where(count > 0, self.sums[1:] / count.clamp_min(1e-30), torch.ones_like(count))

    def state_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, which keeps every bit of a float."""
        return {"seen": self.seen, "sums": self.sums.tolist()}

    def load_state_dict(self, saved: dict[str, Any] | None) -> None:
        """Load a `state_dict`; None, of checkpoints without one, resets to the beginning."""
        self.seen = saved["seen"] if saved else 0
        self.sums.copy_(torch.tensor(saved["sums"]) if saved else torch.zeros(3, _NODES))


def _node_weights(u: Tensor) -> Tensor:
    """Return the linear weights [B, _NODES] of u [B]: 1 at a node, falling to 0 at its neighbours."""
    nodes = torch.linspace(0, 1, _NODES, device=u.device)
    return (1 - (u[:, None] - nodes).abs() * (_NODES - 1)).clamp_min(0)
