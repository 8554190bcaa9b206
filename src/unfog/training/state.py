"""Everything that a run changes as it goes: what a checkpoint holds and a resume restores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from unfog.diffusion.levels import Levels
from unfog.diffusion.objective import Loss
from unfog.training import optimizers as optim
from unfog.training.distributed.sharded_tensors import all_finite
from unfog.training.ema import Ema
from unfog.training.ema_schedules import EmaSchedule, PowerEma
from unfog.training.noise_scale import NoiseScale
from unfog.training.precision import Precision
from unfog.training.settings import Evaluate, Optimizer
from unfog.training.stability.divergence import DivergenceGuard

HELD_OUT_LOSS = "held_out_loss"
BINS = 10  # of the noise quantile, in which the training loss is logged


def best_metric(keys: Mapping[str, str]) -> str:
    """The name of what the best is chosen by."""
    return keys.get("best", HELD_OUT_LOSS).partition(":")[0]


def is_better(name: str, value: float, than: float) -> bool:
    """Whether a value of what the best is chosen by is better than another."""
    return value > than if name in Evaluate.HIGHER else value < than


class LogWindow:
    """Sums since the last log, kept on the device: reading them there would make the host wait."""

    def __init__(self, device: torch.device):
        self.loss = torch.zeros(BINS, device=device)
        self.count = torch.zeros(BINS, device=device)
        self.one_hot = torch.eye(BINS, device=device)
        self.refused = self.overflows = 0
        self.noise = NoiseScale(device)

    def add(self, per_image: Tensor, u: Tensor, importance: Tensor | None = None) -> None:
        """Add losses [B], with no graph behind them, at noise quantiles u [B] in (0, 1).

        A product with a one-hot matrix adds in a fixed order; its rows come from a table, as this runs every step, and
        to make them takes seven operations. Where u is not drawn evenly, its importance [B] makes the mean that of
        even ones.
        """
        one_hot = self.one_hot[(u * BINS).long().clamp_(0, BINS - 1)]
        if importance is not None:
            one_hot = one_hot * importance[:, None]
        self.loss += per_image @ one_hot
        self.count += one_hot.sum(0)

    def close(self) -> dict[str, Any]:
        """Mean loss, loss by noise level (clean to noisy), steps refused and overflowed in this window; a new begins.

        Losses are NaN where all steps of the window were refused.
        """
        loss, count = self.loss.tolist(), self.count.tolist()
        record = {
            "loss": sum(loss) / sum(count) if any(count) else float("nan"),
            "loss_by_level": [value / n if n else None for value, n in zip(loss, count)],
            "refused": self.refused,
            "overflows": self.overflows,
            **self.noise.close(),
        }
        self.loss.zero_()
        self.count.zero_()
        self.refused = self.overflows = 0
        return record

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON, which keeps every bit of a float."""
        return {
            "loss": self.loss.tolist(),
            "count": self.count.tolist(),
            "refused": self.refused,
            "overflows": self.overflows,
            "noise": self.noise.to_dict(),
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Take over what `to_dict` gave."""
        self.loss.copy_(torch.tensor(saved["loss"]))
        self.count.copy_(torch.tensor(saved["count"]))
        self.refused, self.overflows = saved["refused"], saved["overflows"]
        if "noise" in saved:  # which the first checkpoints did not hold
            self.noise.restore(saved["noise"])


@runtime_checkable
class _Projectable(Protocol):
    """A network whose weights are to stay within a set of values, such as rows of unit length."""

    def project(self) -> None:
        """Bring the weights back to it, in place."""


class TrainState:
    """Network, optimiser, EMA, loss scaler and where the run is.

    `seen` counts training images and alone determines what comes next: the order of images, noise, dropout, learning
    rate. `updates` counts the optimiser steps that were taken; a refused step advances `seen` and not `updates`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        ema: EmaSchedule,
        precision: Precision,
        second_ema: PowerEma | None = None,
        levels: Levels | None = None,
    ):
        self.model = model
        self.precision = precision
        fast = torch.bfloat16 if precision.name == "bf16" or precision.device.type == "cuda" else torch.float32
        self.build_optimizer = partial(optim.build_optimizer, settings=optimizer, fast=fast)
        self.optimizer = self.build_optimizer(model)
        self.method = optimizer.method.identity
        self.ema = Ema(model, ema)
        self.second = Ema(model, second_ema) if second_ema else None
        """Another average, whose snapshots together with those of the first give averages of any length."""
        self.in_host_memory = False
        """Whether the tensors are a copy in host memory already, which a snapshot may keep."""
        self.ema_history_known = True
        """Whether both averages had their profiles since the beginning, so that these are known."""
        self.guard = DivergenceGuard()
        self.window = LogWindow(precision.device)
        self.levels = levels
        """The loss by noise level, kept up where the objective follows it; None where nobody reads it."""
        self.seen = 0
        self.updates = 0
        self.microbatch = 0
        """Images at once, where memory did not suffice for as many as the settings say; else 0."""
        self.due: list[str] = []
        """What the last step has still to be followed by: evaluate, log, preview, save, keep the best."""
        self.last: dict[str, float] = {}
        """Numbers of the last step: gradient_norm, lr, and what the best is chosen by if it was measured."""
        self.best: float | None = None
        """Best value so far of what it is chosen by, since that is measured as it is now."""
        self.settings_digests: dict[str, str] = {}
        """Digests of the settings that make it what it is, by purpose: see `runs.changes.keys_of`. "best" begins
        with the name of what the best is chosen by; the first checkpoints have none, and it is the held-out loss."""
        self.lost_shards: dict[str, str] = {}
        """Name -> reason of the shards that the run goes on without, so that it does after a resume as well."""

    def advance(self, images: int, accepted: bool, losses: list[Loss]) -> None:
        """Count one step of `images` images, with its losses by micro-batch.

        A refused step moves the position on, so that it is not tried for ever; weights, average and updates stay.
        """
        self.seen += images
        if accepted:
            self.updates += 1
            self.project()
            self.ema.update(self.updates)
            if self.second is not None:
                self.second.update(self.updates)
            for loss in losses:
                self.window.add(loss.measured, loss.u, loss.importance)
            if losses and self.levels is not None:
                self.levels.add(torch.cat([loss.u for loss in losses]), torch.cat([loss.measured for loss in losses]))

    def project(self) -> None:
        """What a network asks for after an update; here, so that the forward pass changes no weight, and what is
        averaged and saved is what the next step begins with."""
        if isinstance(self.model, _Projectable):
            self.model.project()

    def update_best(self, record: dict[str, Any]) -> bool:
        """Note what was measured after the last step; whether it is the best so far by what that is chosen by."""
        chosen = best_metric(self.settings_digests)
        self.last |= {name: float(record[name]) for name in (HELD_OUT_LOSS, chosen) if name in record}
        value = self.last[chosen] if chosen in record else math.nan
        if math.isnan(value) or not (self.best is None or is_better(chosen, value, self.best)):
            return False
        self.best = value
        return True

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """The tensors by file: model and ema under the network's names, optimizer under "moment/parameter"."""
        moments = optim.optimizer_tensors(self.optimizer, self.model)
        files = {"model": self.model.state_dict(), "ema": self.ema.state_dict(self.model), "optimizer": moments}
        return files if self.second is None else files | {"ema2": self.second.state_dict(self.model)}

    @property
    def ema_widths(self) -> list[float]:
        """Of the averages that snapshots are taken of; [] if none are."""
        return [] if self.second is None or not self.ema_history_known else [self.ema.width, self.second.width]

    def non_finite(self) -> str | None:
        """The first tensor with a value that is not finite, as "file: name"; None if there is none."""
        named = [
            (f"{file}: {name}", tensor)
            for file, tensors in self.tensors().items()
            for name, tensor in tensors.items()
            if tensor.is_floating_point()
        ]
        finite = all_finite([tensor for _, tensor in named])
        return next((name for (name, _), good in zip(named, finite) if not good), None)

    def adopt_settings(self, keys: dict[str, str]) -> None:
        """Go on under these settings: what was learned about others of its kind is forgotten."""
        if keys["training"] != self.settings_digests.get("training"):
            self.guard.recent, self.guard.roll_backs = [], 0
        if keys["repeat"] != self.settings_digests.get("repeat"):
            self.microbatch = 0
        if keys["measure"] != self.settings_digests.get("measure"):
            self.best = None
        if self.levels is not None and keys.get("objective") != self.settings_digests.get("objective"):
            self.levels.restore(None)
        if keys.get("best", HELD_OUT_LOSS) != self.settings_digests.get("best", HELD_OUT_LOSS):
            self.best = None
        self.settings_digests = keys

    def progress(self) -> dict[str, Any]:
        """All but the tensors, in what JSON holds."""
        return {
            "seen": self.seen,
            "updates": self.updates,
            "microbatch": self.microbatch,
            "due": list(self.due),
            "last": {name: value if math.isfinite(value) else None for name, value in self.last.items()},
            "best": self.best,
            "keys": dict(self.settings_digests),
            "scaler": self.precision.scaler.state_dict(),
            "guard": self.guard.to_dict(),
            "window": self.window.to_dict(),
            "levels": None if self.levels is None else self.levels.to_dict(),
            "averages": self.ema_widths,
            "method": self.method,
            "lost_shards": dict(self.lost_shards),
            "optimizer": optim.optimizer_numbers(self.optimizer, self.model),
        }

    def load_progress(self, saved: dict[str, Any]) -> None:
        """Restore what `progress` gave."""
        self.seen, self.updates = saved["seen"], saved["updates"]
        self.microbatch = saved.get("microbatch", 0)  # which the first checkpoints did not hold
        self.due, self.best, self.settings_digests = list(saved["due"]), saved["best"], dict(saved["keys"])
        self.lost_shards = dict(saved.get("lost_shards", {}))  # which earlier checkpoints did not hold
        self.last = {name: math.nan if value is None else value for name, value in saved["last"].items()}
        self.guard = DivergenceGuard.from_dict(saved["guard"])
        self.window.restore(saved["window"])
        if self.levels is not None:
            self.levels.restore(saved.get("levels"))  # which not every run keeps up
        # Neither known nor the same where the first checkpoints, or other settings, had none or others.
        self.ema_history_known = True
        self.ema_history_known = saved.get("averages") == self.ema_widths
        self._load_scaler(saved)

    def load_full(self, tensors: Mapping[str, Mapping[str, Tensor]], saved: dict[str, Any]) -> None:
        """Take over the `tensors` and the `progress` of another process's state. ValueError if they do not fit."""
        self.model.load_state_dict(tensors["model"])
        for average, file in ((self.ema, "ema"), (self.second, "ema2")):
            if average is not None:
                average.load_state_dict(self.model, tensors[file])
        self.load_optimizer(dict(tensors["optimizer"]), saved)
        self.load_progress(saved)

    def roll_back_to(self, saved: dict[str, Any]) -> None:
        """After the tensors of an earlier state were loaded: take over what belongs to them.

        The position stays where it is, so that the images that led astray are not met again at once, and so do the
        sums for the log.
        """
        self.updates = saved["updates"]
        self.guard.record_roll_back(saved["guard"], saved["seen"])
        if self.levels is not None:
            same = saved["keys"].get("objective") == self.settings_digests.get("objective")
            self.levels.restore(saved.get("levels") if same else None)
        if saved["keys"].get("training") != self.settings_digests.get("training"):
            self.guard.recent = []  # what was usual before settings changed
        self._load_scaler(saved)

    def _load_scaler(self, saved: dict[str, Any]) -> None:
        if saved["scaler"]:  # empty where there was none: precision may have been fp32 then
            self.precision.scaler.load_state_dict(saved["scaler"])

    def load_optimizer(self, moments: dict[str, Tensor], saved: dict[str, Any]) -> None:
        """Restore the optimiser's part of `tensors`, and of `progress`. ValueError if it is of another network.

        Moments of another optimiser are of no use to this one, which then begins its own.
        """
        same = saved.get("method", "adamw") == self.method  # the first checkpoints were all of AdamW
        optim.load_optimizer_state(
            self.optimizer, self.model, moments if same else {}, saved.get("optimizer", {}) if same else {}
        )
