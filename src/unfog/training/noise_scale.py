"""Gradient noise scale: the batch size beyond which larger batches hardly help, measured on one device.

McCandlish et al. 2018, "An Empirical Model of Large-Batch Training": a gradient of B images is G, the true one, plus
noise of covariance Sigma / B. The simple noise scale tr(Sigma) / |G|^2 (eq. 2.9) is the number of images at which the
noise is as long as the gradient. Far below it, twice the batch halves the number of steps; far above it, twice the
batch only costs twice the images.

Squared norms of gradients of two batch sizes give both parts (appendix A.1), and gradient accumulation has two sizes
at hand: the first micro-batch and the whole batch. A micro-batch spreads its noise levels evenly, so its gradient is
less noisy than one of so many independent images, and Sigma here is that of images which come in such groups: what a
run with these micro-batches meets. Larger micro-batches spread more evenly, and have a slightly smaller noise scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from unfog.training.precision import gradients
from unfog.training.sharded_tensors import total_norm


class NoiseScale:
    """Sums since the last log, kept on the device, because reading them there would make the host wait.

    Signal and noise are averaged before their ratio is taken: each alone is unbiased, a ratio of single steps is not.
    """

    def __init__(self, device: torch.device):
        self.sums = torch.zeros(2, device=device)  # of the estimates of |G|^2 and of tr(Sigma)
        self.count = 0

    def add(self, part_square: Tensor, part: int, whole_square: Tensor, whole: int) -> None:
        """Add one accepted step of `whole` images.

        Args:
            part_square: squared norm of `.grad` after the first pass, of `part` images whose losses were summed and
                divided by `whole`, as the loop does; 0-d, on the device, without a loss scale.
            part: images of the first pass, fewer than `whole`.
            whole_square: squared norm of the gradient of the whole batch, before it is clipped.
            whole: images of the batch.
        """
        square = part_square * (whole / part) ** 2  # of the mean gradient of the first pass
        signal = (whole * whole_square - part * square) / (whole - part)
        noise = (square - whole_square) / (1 / part - 1 / whole)
        self.sums += torch.stack([signal, noise])
        self.count += 1

    def close(self) -> dict[str, Any]:
        """Return noise scale in images, squared gradient norm and trace of its covariance; then start at zero.

        The noise scale is None if noise exceeds the gradient, whose squared norm was then estimated at zero or less.
        Returns {} if no step had several micro-batches.
        """
        if not self.count:
            return {}
        signal, noise = (value / self.count for value in self.sums.tolist())
        self.sums.zero_()
        self.count = 0
        record = {"gradient_signal": signal, "gradient_noise": noise}
        return {"noise_scale": noise_scale([record]), **record}

    def state_dict(self) -> dict[str, Any]:
        """Return plain values; JSON keeps every bit of a float."""
        return {"sums": self.sums.tolist(), "count": self.count}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.sums.copy_(torch.tensor(saved["sums"]))
        self.count = saved["count"]


def noise_scale(records: Iterable[Mapping[str, Any]]) -> float | None:
    """Return the noise scale in images over several windows of a log, by the ratio of their means.

    None if no window has it, or if noise exceeds the gradient even so.
    """
    known = [row for row in records if row.get("gradient_signal") is not None and row.get("gradient_noise") is not None]
    signal = sum(row["gradient_signal"] for row in known)
    noise = sum(row["gradient_noise"] for row in known)
    scale = noise / signal if signal > 0 else math.nan
    return max(scale, 0.0) if math.isfinite(scale) else None


def squared_gradient_norm(optimizer: torch.optim.Optimizer) -> Tensor:
    """Return the squared norm of the gradients, 0-d, on the device. A collective if they are sharded."""
    return total_norm(gradients(optimizer)).square()


def batch_advice(scale: float, batch: int) -> str:
    """Describe what this batch size costs at this noise scale, and what another would; a sentence without stop.

    To get equally far, batches of B need 1 + scale / B times the fewest possible steps, and 1 + B / scale times the
    fewest possible images (McCandlish et al. 2018, eq. 2.7 and 2.11). That was derived for gradient descent, and held
    for Adam in their experiments within a small factor, so nothing here is said to more than two digits.
    """
    scale = max(scale, 1e-3)

    def steps(size: float) -> float:
        return 1 + scale / size

    def images(size: float) -> float:
        return 1 + size / scale

    head = (
        f"at a gradient noise scale of about {_two_digits(scale)} images, an image in a batch of {batch:,} teaches "
        f"{1 / images(batch):.0%} of what it could in a tiny one"
    )
    if batch <= scale:
        fewer, more = 1 - steps(2 * batch) / steps(batch), images(2 * batch) / images(batch) - 1
        return f"{head}; batch {2 * batch:,} would need {fewer:.0%} fewer steps, and {more:.0%} more images"
    if batch == 1:
        return head
    half = batch // 2
    more, fewer = steps(half) / steps(batch) - 1, 1 - images(half) / images(batch)
    return f"{head}; batch {half:,} would need {fewer:.0%} fewer images, and {more:.0%} more steps"


def _two_digits(value: float) -> str:
    """Format a number to two digits, written out: 0.31, 1,300."""
    rounded = float(f"{value:.2g}")
    return f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:g}"
