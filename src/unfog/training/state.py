"""Everything that a run changes as it goes: what a checkpoint holds and a resume restores."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from unfog.training.ema import Ema
from unfog.training.precision import Precision
from unfog.training.settings import EmaProfile, Optimizer

BINS = 10  # of the noise quantile, in which the training loss is logged


class Window:
    """Sums since the last log, kept on the device: reading them there would make the host wait."""

    def __init__(self, device: torch.device):
        self.loss = torch.zeros(BINS, device=device)
        self.count = torch.zeros(BINS, device=device)
        self.refused = 0

    def add(self, per_image: Tensor, u: Tensor) -> None:
        """Add losses [B] at noise quantiles u [B] in (0, 1). A product with a one-hot matrix adds in a fixed order."""
        bins = (u * BINS).long().clamp_(0, BINS - 1)
        one_hot = torch.nn.functional.one_hot(bins, BINS).float()
        self.loss += per_image.detach() @ one_hot
        self.count += one_hot.sum(0)

    def close(self) -> dict[str, Any]:
        """Mean loss, loss by noise level (clean to noisy) and refused steps of this window; a new one begins."""
        loss, count = self.loss.tolist(), self.count.tolist()
        record = {
            "loss": sum(loss) / max(sum(count), 1.0),
            "loss_by_level": [value / n if n else None for value, n in zip(loss, count)],
            "refused": self.refused,
        }
        self.loss.zero_()
        self.count.zero_()
        self.refused = 0
        return record


class TrainState:
    """Network, optimiser, EMA, loss scaler and where the run is.

    `seen` counts training images and alone determines what comes next: the order of images, noise, dropout, learning
    rate. `updates` counts the optimiser steps that were taken; a refused step advances `seen` and not `updates`.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, ema: EmaProfile, precision: Precision):
        self.model = model
        self.precision = precision
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=optimizer.lr,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            fused=True,
        )
        self.ema = Ema(model, ema)
        self.window = Window(precision.device)
        self.seen = 0
        self.updates = 0
        self.refused_in_a_row = 0

    def advance(self, images: int, accepted: bool, losses: list[tuple[Tensor, Tensor]]) -> None:
        """Count one step of `images` images, with its losses [B] and noise quantiles [B] by micro-batch.

        A refused step moves the position on, so that it is not tried for ever; weights, average and updates stay.
        """
        self.seen += images
        if not accepted:
            self.refused_in_a_row += 1
            self.window.refused += 1
            return
        self.refused_in_a_row = 0
        self.updates += 1
        self.ema.update(self.model, self.updates)
        for per_image, u in losses:
            self.window.add(per_image, u)

    def progress(self) -> dict[str, Any]:
        """All but the weights, in what `torch.load(weights_only=True)` reads."""
        return {
            "seen": self.seen,
            "updates": self.updates,
            "refused_in_a_row": self.refused_in_a_row,
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.precision.scaler.state_dict(),
            "window": {"loss": self.window.loss, "count": self.window.count, "refused": self.window.refused},
        }

    def load_progress(self, saved: dict[str, Any]) -> None:
        """Restore what `progress` gave."""
        self.seen = saved["seen"]
        self.updates = saved["updates"]
        self.refused_in_a_row = saved["refused_in_a_row"]
        settings = {name: self.optimizer.param_groups[0][name] for name in ("betas", "eps", "weight_decay")}
        self.optimizer.load_state_dict(saved["optimizer"])
        for group in self.optimizer.param_groups:  # the settings of today, not those that were saved
            group.update(settings)
        if saved["scaler"]:  # empty where there was none: precision may have been fp32 then
            self.precision.scaler.load_state_dict(saved["scaler"])
        self.window.loss.copy_(saved["window"]["loss"])
        self.window.count.copy_(saved["window"]["count"])
        self.window.refused = saved["window"]["refused"]
