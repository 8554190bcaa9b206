"""Automatic warm-up and intervals, which follow from the length of a run."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from unfog.config.schema import Config
from unfog.pipeline.build import build_network
from unfog.planning.disk import snapshot_bytes
from unfog.reporting.progress import format_bytes
from unfog.training.checkpoints.writer import free_bytes

_SNAPSHOTS = 24  # of a run: an EMA 0.3 to 2 times as wide is rebuilt from so many to within 0.1%
_FEWEST_STEPS_FOR_SNAPSHOTS = 200
_MOST_STEPS_LOST = 1000  # to a crash, at the automatic interval of checkpoints


class Choice(NamedTuple):
    """A setting that was open, its value, and why."""

    name: str
    value: object
    reason: str

    def __str__(self) -> str:
        return f"{self.name} = {self.value}: {self.reason}"


def choose_intervals(config: Config) -> tuple[Config, list[Choice]]:
    """Return the configuration with warm-up and intervals chosen, and the choices."""
    choices: list[Choice] = []
    steps = config.training.images // config.training.batch
    if config.optimizer.warmup == 0:
        warmup = max(1, min(5000, steps // 20))
        config = replace(config, optimizer=replace(config.optimizer, warmup=warmup))
        choices.append(Choice("optimizer.warmup", warmup, "5% of the run, at most 5000 steps"))
    if config.log.every == 0:
        config = replace(config, log=replace(config.log, every=min(50, round_down_to_125(steps / 20))))
        choices.append(Choice("log.every", config.log.every, "twenty times or more, at most 50 steps apart"))
    if config.ema_snapshots.every >= 0:
        every, reason = _snapshot_interval(config, steps)
        config = replace(config, ema_snapshots=replace(config.ema_snapshots, every=every))
        if reason:
            choices.append(Choice("ema_snapshots.every", every, reason))
    config, names = with_intervals(config)
    if names:
        values = ", ".join(f"{name} {getattr(config, name).every}" for name in names)
        reason = "ten to twenty times in the run, and no more than 1000 steps to lose"
        choices.append(Choice("every", values, reason))
    return config, choices


def _snapshot_interval(config: Config, steps: int) -> tuple[int, str]:
    """Return the interval of EMA snapshots, -1 for none, and why; no reason where there was nothing to choose."""
    asked = config.ema_snapshots.every
    if config.ema_snapshots.second_schedule(config.ema) is None:
        return -1, "averages of a fixed decay cannot be rebuilt into others" if asked else ""
    if asked:
        return asked, ""
    if steps < _FEWEST_STEPS_FOR_SNAPSHOTS:
        return -1, ""
    every = max(1, round(steps / _SNAPSHOTS))
    needed = snapshot_bytes(sum(p.numel() for p in build_network(config).parameters()), every, steps)
    if needed > free_bytes(Path.cwd()) / 4:
        return -1, f"{format_bytes(needed)} would be over a quarter of the disk that is free"
    return every, f"{format_bytes(needed)} of snapshots, from which unfog ema-sweep rebuilds an EMA of any width"


def with_intervals(config: Config) -> tuple[Config, list[str]]:
    """Return the configuration with the open intervals chosen by its length, and the names of those."""
    every = round_down_to_125(config.training.images // config.training.batch / 10)
    names = [name for name in ("preview", "evaluate", "checkpoint") if getattr(config, name).every == 0]
    for name in names:
        interval = min(every, _MOST_STEPS_LOST) if name == "checkpoint" else every
        config = replace(config, **{name: replace(getattr(config, name), every=interval)})
    return config, names


def round_down_to_125(x: float) -> int:
    """Return the largest of 1, 2, 5, 10, 20, 50, … that is at most x; at least 1."""
    power = int(10 ** math.floor(math.log10(max(x, 1))))
    return max(m * power for m in (1, 2, 5) if m == 1 or m * power <= x)
