"""What is known of the loss by noise level, from a running mean: for weights and for noise levels that follow it.

EDM2 weighs each level by the inverse of its expected loss, which it learns as exp(u(sigma)) with a small network head
(Karras et al. 2024, eq. 14): lambda / e^u |D - x0|^2 + u. In u that is smallest where e^u = E[lambda |D - x0|^2], which
is a mean and needs no head: it is measured here, by quantile of the training schedule, with a horizon that grows with
the run.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

NODES = 33
"""Quantiles 0, 1/32, …, 1 at which means are kept; linear in between."""
HORIZON = 0.1
"""Share of the images so far that the means remember: enough to be steady, and to follow a falling loss."""
LEAST = 2048
"""Images that they remember at least: sixty for each node, and no more than a short run has."""
MOST_LOSS = 1e15
"""Larger ones are taken for this, so that their squares stay finite in float32."""
LEAST_LOSS = 1e-6
"""Means below are taken for this, so that a level at which nothing is left to learn gets no endless weight."""


class Levels:
    """Running means of the loss and of its square, by noise quantile; kept on the device, and never read from there.

    An image at u counts for the two nodes around it, by nearness. Sums over products, and not matrix products, which an
    autocast would round.
    """

    def __init__(self, device: torch.device):
        self.sums = torch.zeros(3, NODES, device=device)  # of shares of images, of their losses, of the squares
        self.seen = 0

    def add(self, u: Tensor, loss: Tensor) -> None:
        """Count the losses [B] of one step at noise quantiles u [B] in (0, 1)."""
        self.seen += len(u)
        self.sums *= math.exp(-len(u) / max(LEAST, HORIZON * self.seen))
        loss = loss.clamp(max=MOST_LOSS)
        moments = torch.stack([torch.ones_like(loss), loss, loss.square()])
        self.sums += (moments[:, :, None] * nearness(u)).sum(1)

    def log_mean(self, u: Tensor) -> Tensor:
        """Log of the expected loss at quantiles u [B], the u(sigma) of EDM2; 0 before anything is known."""
        return (nearness(u) * self._means()[0].clamp_min(LEAST_LOSS).log()).sum(1)

    def draw(self, v: Tensor, share: float, divided: bool = False) -> tuple[Tensor, Tensor]:
        """Noise quantiles u [B] from evenly distributed v [B] in (0, 1), and 1 / p(u) [B], their importance.

        The density p is a mixture: 1 - share everywhere, the rest as the root of the mean square loss, which makes
        the variance of an importance-weighted mean least (Nichol & Dhariwal 2021, section 3.3). It is constant between
        nodes, so that u is an increasing function of v, and even v stay spread. `divided`: what is trained is the loss
        over its mean, as `uncertainty` has it, and so it is with the root.
        """
        mean, square = self._means()
        root = square.sqrt().clamp_min(LEAST_LOSS)
        if divided:
            root = root / mean.clamp_min(LEAST_LOSS)
        cells = (root[1:] + root[:-1]) / 2
        density = (1 - share) + share * cells / cells.mean()
        # A running sum, in a form that is deterministic on every device.
        below = (density[:, None] * torch.ones(NODES - 1, NODES, device=v.device).triu(1)).sum(0) / (NODES - 1)
        cell = (torch.searchsorted(below, v, right=True) - 1).clamp(0, NODES - 2)
        u = (cell + (v - below[cell]) * (NODES - 1) / density[cell]) / (NODES - 1)
        return u.clamp(1e-6, 1 - 1e-6), 1 / density[cell]

    def _means(self) -> Tensor:
        """Mean loss and mean squared loss at the nodes, [2, NODES]; 1 where nothing was measured."""
        count = self.sums[0]
        return torch.where(count > 0, self.sums[1:] / count.clamp_min(1e-30), torch.ones_like(count))

    def state_dict(self) -> dict[str, Any]:
        """Plain values, for JSON, which keeps every bit of a float."""
        return {"seen": self.seen, "sums": self.sums.tolist()}

    def load_state_dict(self, saved: dict[str, Any] | None) -> None:
        """Take over what `state_dict` gave; None, of checkpoints that do not hold it, is the beginning."""
        self.seen = saved["seen"] if saved else 0
        self.sums.copy_(torch.tensor(saved["sums"]) if saved else torch.zeros(3, NODES))


def nearness(u: Tensor) -> Tensor:
    """How near u [B] is to each node, [B, NODES]: 1 at the node, falling to 0 at its neighbours."""
    nodes = torch.linspace(0, 1, NODES, device=u.device)
    return (1 - (u[:, None] - nodes).abs() * (NODES - 1)).clamp_min(0)
