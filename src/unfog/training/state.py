"""Everything that a run changes as it trains: what a checkpoint holds and a resume restores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from unfog.diffusion.loss_by_level import LossByLevel
from unfog.diffusion.objective import Loss
from unfog.training import optimizers as optim
from unfog.training.ema import Ema
from unfog.training.length import Length
from unfog.training.precision import Precision
from unfog.training.settings import Custom, EmaSchedule, Evaluate, Optimizer, PowerEma
from unfog.training.sharded_tensors import all_finite
from unfog.training.stability.divergence import DivergenceGuard
from unfog.training.statistics import LogWindow

HELD_OUT_LOSS = "held_out_loss"


def best_metric(settings_digests: Mapping[str, str]) -> str:
    """Return the name of the metric by which the best checkpoint is chosen."""
    return settings_digests.get("best", HELD_OUT_LOSS).partition(":")[0]


def is_better(metric: str, value: float, than: float) -> bool:
    """Return whether one value of a metric is better than another."""
    return value > than if metric in Evaluate.HIGHER else value < than


class StateEntry(Protocol):
    """An entry of a checkpoint's state.json. Holds plain values; tensors only if they are small, as lists."""

    def state_dict(self) -> dict[str, Any]:
        """Return values that JSON can hold."""

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, so that training continues as if it had not stopped."""


class TrainState:
    """Network, optimiser, EMA, loss scaler and the position of the run.

    `seen` counts training images and alone determines what comes next: the order of images, noise, dropout, learning
    rate. `updates` counts the optimiser steps that were taken; a skipped step advances `seen` and not `updates`.
    """

    in_host_memory = False
    """Whether the tensors are a copy in host memory already, which a snapshot may keep."""
    ema_history_known = True
    """Whether both EMAs had their schedules since the beginning, so that other EMAs can be rebuilt from them."""
    seen = 0
    updates = 0
    microbatch = 0
    """Images of a forward pass if memory did not suffice for as many as the settings say; else 0."""
    best: float | None = None
    """Best value so far of the metric that chooses the best checkpoint, since it is measured as it is now."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        ema: EmaSchedule,
        precision: Precision,
        second: PowerEma | None = None,
        levels: LossByLevel | None = None,
    ):
        self.model = model
        self.precision = precision
        self.build_optimizer = partial(optim.build_optimizer, settings=optimizer, fast=precision.iteration_dtype())
        self.optimizer = self.build_optimizer(model)
        method = optimizer.method
        self.method = method.identity if isinstance(method, Custom) else method.kind
        self.ema = Ema(model, ema)
        self.second_ema = Ema(model, second) if second else None
        """Its snapshots, together with those of `ema`, rebuild EMAs of any length."""
        self.due: list[str] = []
        """Hooks still to be called after the last step: evaluate, log, averages, preview, save, keep the best."""
        self.last: dict[str, float] = {}
        """Numbers of the last step: gradient_norm, lr, and the best checkpoint's metric if it was measured."""
        self.settings_digests: dict[str, str] = {}
        """Digests of settings, by purpose: see `settings_digests` in `config.resume_rules`. "best" begins with the
        name of the metric by which the best checkpoint is chosen."""
        self.lost_shards: dict[str, str] = {}
        """Name -> reason of the data shards that the run goes on without, so that a resume does too."""

        self.guard = DivergenceGuard()
        self.window = LogWindow(precision.device, model)
        self.length = Length()
        self.levels = levels
        """Running mean of the loss by noise level, for objectives that follow it; else None."""
        self.entries: dict[str, StateEntry] = {}
        self._rolled_back: set[str] = set()
        self.register("scaler", precision.scaler, rolled_back=True)
        self.register("guard", self.guard)  # counts roll-backs, so that one must not restore it
        self.register("window", self.window)
        self.register("length", self.length)
        if levels is not None:
            self.register("levels", levels, rolled_back=True)

    def register(self, name: str, entry: StateEntry, rolled_back: bool = False) -> None:
        """Add an entry to the checkpoint: its `state_dict` is stored in state.json under `name`.

        Checkpoints that were written without it load, and leave the entry as it is. One that is `rolled_back` is
        restored at a roll-back too, rather than at a resume only. ValueError if the name is taken.
        """
        if name in self.entries or name in self._own_progress():
            raise ValueError(f"{name} is a key of state.json already; register the entry under another name")
        self.entries[name] = entry
        if rolled_back:
            self._rolled_back.add(name)

    def follow_update(self, losses: list[Loss], skip: Tensor | None = None) -> None:
        """Project the weights after the optimiser's step, and let EMAs and levels follow them and the step's losses.

        With `skip`, EMAs follow as they were prepared, and nothing changes where it is 1, 0-d on the device.
        """
        self.project(skip)
        for ema in self.emas:
            if skip is None:
                ema.update(self.updates + 1)
            else:
                ema.update_unless(skip)
        if losses and self.levels is not None:
            self.levels.add(torch.cat([loss.u for loss in losses]), torch.cat([loss.measured for loss in losses]))

    def count_update(self, losses: list[Loss]) -> None:
        """Count an optimiser step that was taken, with the losses of its micro-batches."""
        self.updates += 1
        for loss in losses:
            self.window.add(loss.measured, loss.u, loss.importance)

    def project(self, skip: Tensor | None = None) -> None:
        """Bring the weights back to the set that the network keeps them in, such as rows of unit length, in place.

        They stay as they are where `skip`, 0-d on the device, is 1.
        """
        # After the update and not in the forward pass, so that the EMA and checkpoints hold projected weights.
        if project := getattr(self.model, "project", None):
            project() if skip is None else project(skip)

    def update_best(self, record: dict[str, Any]) -> bool:
        """Note the metrics measured after the last step. Returns whether the best checkpoint's metric improved."""
        metric = best_metric(self.settings_digests)
        self.last |= {name: float(record[name]) for name in (HELD_OUT_LOSS, metric) if name in record}
        value = self.last[metric] if metric in record else math.nan
        if math.isnan(value) or not (self.best is None or is_better(metric, value, self.best)):
            return False
        self.best = value
        return True

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return the tensors by file: model, ema and ema2 by parameter, optimizer by "moment/parameter"."""
        moments = optim.optimizer_tensors(self.optimizer, self.model)
        files = {"model": self.model.state_dict(), "ema": self.ema.state_dict(self.model), "optimizer": moments}
        return files if self.second_ema is None else files | {"ema2": self.second_ema.state_dict(self.model)}

    @property
    def emas(self) -> list[Ema]:
        """The EMA, and the second one if there is one."""
        return [self.ema] if self.second_ema is None else [self.ema, self.second_ema]

    @property
    def ema_widths(self) -> list[float]:
        """Widths of the EMAs that snapshots are taken of; [] if none are."""
        return [] if self.second_ema is None or not self.ema_history_known else [self.ema.width, self.second_ema.width]

    def non_finite(self) -> str | None:
        """Return the first tensor with a value that is not finite, as "file: name", or None."""
        named = [
            (f"{file}: {name}", tensor)
            for file, tensors in self.tensors().items()
            for name, tensor in tensors.items()
            if tensor.is_floating_point()
        ]
        finite = all_finite([tensor for _, tensor in named])
        return next((name for (name, _), good in zip(named, finite) if not good), None)

    def adopt_settings(self, digests: dict[str, str]) -> None:
        """Go on under these settings: forget what was learned under others of the same purpose."""
        before = self.settings_digests
        # Losses and roll-backs under another learning rate or batch say nothing about this one.
        if digests["training"] != before.get("training"):
            self.guard.recent, self.guard.roll_backs = [], 0
        # A micro-batch that memory forced was forced on another batch, network or device.
        if digests["repeat"] != before.get("repeat"):
            self.microbatch = 0
        if self.levels is not None and digests.get("objective") != before.get("objective"):
            self.levels.load_state_dict(None)
        # Digests without "best" are of the held-out loss.
        best = {of.get("best", HELD_OUT_LOSS) for of in (digests, before)}
        if digests["measure"] != before.get("measure") or len(best) > 1:
            self.best = None
        self.settings_digests = digests

    def progress(self) -> dict[str, Any]:
        """Return everything but the tensors, as stored in state.json."""
        return {
            **self._own_progress(),
            "levels": None,  # of a loss that does not follow them
            **{name: entry.state_dict() for name, entry in self.entries.items()},
        }

    def _own_progress(self) -> dict[str, Any]:
        return {
            "seen": self.seen,
            "updates": self.updates,
            "microbatch": self.microbatch,
            "due": list(self.due),
            # JSON has no NaN.
            "last": {name: value if math.isfinite(value) else None for name, value in self.last.items()},
            "best": self.best,
            "keys": dict(self.settings_digests),
            "averages": self.ema_widths,
            "method": self.method,
            "lost_shards": dict(self.lost_shards),
            "optimizer": optim.optimizer_numbers(self.optimizer, self.model),
        }

    def load_progress(self, saved: dict[str, Any]) -> None:
        self.seen, self.updates, self.microbatch = saved["seen"], saved["updates"], saved["microbatch"]
        self.due, self.best, self.settings_digests = list(saved["due"]), saved["best"], dict(saved["keys"])
        self.lost_shards = dict(saved["lost_shards"])
        self.last = {name: math.nan if value is None else value for name, value in saved["last"].items()}
        self.ema_history_known = True  # which `ema_widths` asks for
        self.ema_history_known = saved["averages"] == self.ema_widths
        self._load_entries(saved, self.entries)

    def load_full(self, tensors: Mapping[str, Mapping[str, Tensor]], saved: dict[str, Any]) -> None:
        """Restore the `tensors` and the `progress` of another rank's state. ValueError if they do not fit."""
        self.model.load_state_dict(tensors["model"])
        for ema, file in ((self.ema, "ema"), (self.second_ema, "ema2")):
            if ema is not None:
                ema.load_state_dict(self.model, tensors[file])
        self.load_optimizer(dict(tensors["optimizer"]), saved)
        self.load_progress(saved)

    def roll_back_to(self, saved: dict[str, Any]) -> None:
        """Restore what belongs to the tensors of an earlier state, once these are loaded.

        The position stays where it is, so that the images that led to the divergence are not met again at once.
        """
        self.updates = saved["updates"]
        self.guard.record_roll_back(saved["guard"], saved["seen"])
        self._load_entries(saved, self._rolled_back)
        if self.levels is not None and saved["keys"].get("objective") != self.settings_digests.get("objective"):
            self.levels.load_state_dict(None)
        if saved["keys"].get("training") != self.settings_digests.get("training"):
            self.guard.recent = []  # losses under other settings say nothing about these

    def _load_entries(self, saved: dict[str, Any], names: Mapping[str, Any] | set[str]) -> None:
        for name, entry in self.entries.items():
            # Empty is what a disabled loss scaler stores, and does not load.
            if name in names and saved.get(name):
                entry.load_state_dict(saved[name])
        if self.levels is not None and not saved.get("levels"):
            self.levels.load_state_dict(None)  # of a run that did not follow them

    def load_optimizer(self, moments: dict[str, Tensor], saved: dict[str, Any]) -> None:
        """Restore the optimiser from its `tensors` and `progress`. ValueError if they are of another network."""
        if saved["method"] != self.method:  # the state of another kind of optimiser is of no use
            moments, saved = {}, {"optimizer": {}}
        optim.load_optimizer_state(self.optimizer, self.model, moments, saved["optimizer"])
