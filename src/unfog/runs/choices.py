"""Automatic choices: each is made once, printed, recorded, and stored in config.toml as if a person had made it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from unfog.config.tree import LENGTH, Config
from unfog.data.images import ImageSet
from unfog.errors import RequestError
from unfog.models.settings import SIZES
from unfog.runs.probe import seconds_per_step
from unfog.training.precision import native_precision
from unfog.training.settings import PrecisionName


class Choice(NamedTuple):
    """A setting that was left open, what it became, and why."""

    name: str
    value: object
    reason: str

    def __str__(self) -> str:
        return f"{self.name} = {self.value}: {self.reason}"


def choose_device(name: str) -> torch.device:
    """The device that a name means. RequestError if it is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise RequestError(f"device = {name!r} is not one of auto, cpu, cuda, cuda:1, mps") from None
    present = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not present.get(device.type, False):
        raise RequestError(f"device = {name} is not available to torch {torch.__version__}; try --device auto")
    return device


class Settling:
    """A configuration on its way to being complete. Each method settles one thing and notes the choice, if it was open.

    Measuring runs real training steps on a throwaway network; `stop` ends it early.
    """

    def __init__(self, config: Config, images: ImageSet, device: torch.device, stop: Callable[[], bool]):
        self.config = config
        self.choices: list[Choice] = []
        self._images, self._device, self._stop = images, device, stop
        self._measured: dict[str, float] = {}  # precision -> seconds per step

    def network(self) -> None:
        """A network for the device and the image size."""
        if self.config.network is not None:
            return
        size = self.config.data.size
        if self._device.type == "cpu":
            name, reason = ("tiny" if size <= 32 else "small"), f"what a CPU trains in reasonable time at {size} pixels"
        else:
            name, reason = ("cifar10" if size <= 32 else "base"), f"the usual network at {size} pixels"
        self.config = replace(self.config, network=SIZES[name])
        self._note("network", name, reason)

    def precision(self) -> None:
        """What the hardware is made for on a GPU; on a CPU, whichever of fp32 and bf16 is faster here."""
        if self.config.training.precision != "auto":
            return
        if self._device.type == "cpu":
            fp32, bf16 = self._seconds_per_step("fp32"), self._seconds_per_step("bf16")
            name: PrecisionName = "bf16" if bf16 < 0.95 * fp32 else "fp32"
            reason = f"{fp32 * 1e3:.0f} ms a step in fp32, {bf16 * 1e3:.0f} in bf16"
        else:
            name, reason = native_precision(self._device), f"native to {self._device}"
        self.config = replace(self.config, training=replace(self.config.training, precision=name))
        self._note("precision", name, reason)

    def length(self, seen: int = 0) -> None:
        """Fix the number of images, whichever way the length was given. A budget begins after the `seen` images."""
        training = self.config.training
        images = training.images or training.steps * training.batch
        if not images:
            budget = training.budget or "1h"
            pace = self._seconds_per_step(training.precision)
            images = seen + int(0.95 * seconds(budget) / pace) * training.batch
            reason = f"{budget} at {training.batch / pace:,.0f} images/s, less 5% for previews and evaluation"
            self._note("images", max(images, training.batch), reason)
        steps = max(1, -(-images // training.batch))
        training = replace(training, images=steps * training.batch, steps=0, budget="")
        self.config = replace(self.config, training=training)

    def intervals(self) -> None:
        """Warm-up and intervals that were left open follow from the length."""
        config = self.config
        steps = config.training.images // config.training.batch
        if config.optimizer.warmup == 0:
            warmup = max(1, min(5000, steps // 20))
            config = replace(config, optimizer=replace(config.optimizer, warmup=warmup))
            self._note("optimizer.warmup", warmup, "5% of the run, at most 5000 steps")
        every = round_number(steps / 10)
        for name in ("preview", "evaluate", "checkpoint"):
            settings = getattr(config, name)
            if settings.every == 0:
                config = replace(config, **{name: replace(settings, every=every)})
                self._note(f"{name}.every", every, "ten times in the run, or a little more")
        self.config = config

    def _seconds_per_step(self, precision: PrecisionName) -> float:
        if precision not in self._measured:
            config = replace(self.config, training=replace(self.config.training, precision=precision))
            self._measured[precision] = seconds_per_step(config, self._images, self._device, self._stop)
        return self._measured[precision]

    def _note(self, name: str, value: object, reason: str) -> None:
        self.choices.append(Choice(name, value, reason))


def check_length(config: Config) -> None:
    """RequestError unless just one of steps, images and budget says how long to train, sensibly."""
    training = config.training
    given = {k: v for k in LENGTH if (v := getattr(training, k))}
    if len(given) > 1:
        raise RequestError(f"the length is given {len(given)} times ({given}); give one of --steps, --images, --budget")
    if training.budget:
        seconds(training.budget)


def seconds(text: str) -> float:
    """A time span such as 90s, 10m, 2h or 1d, in seconds. RequestError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    if not match or float(match[1]) <= 0:
        raise RequestError(f"budget = {text!r} is no time span; write 90s, 10m, 2h or 1d")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def round_number(x: float) -> int:
    """The largest of 1, 2, 5, 10, 20, 50, … that is at most x; at least 1."""
    power = int(10 ** math.floor(math.log10(max(x, 1))))
    return max(m * power for m in (1, 2, 5) if m == 1 or m * power <= x)
