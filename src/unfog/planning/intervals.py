"""Automatic warm-up and intervals, which follow from the length of a run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

from unfog.config.schema import Config
from unfog.pipeline.build import build_network
from unfog.planning.disk import snapshot_bytes
from unfog.settings import is_auto
from unfog.text import format_bytes, plural
from unfog.training.checkpoints.writer import free_bytes

_SNAPSHOTS = 24  # of a run: an EMA 0.3 to 2 times as wide is rebuilt from so many to within 0.1%
_FEWEST_STEPS_FOR_SNAPSHOTS = 200
_SHARE = 0.05  # of the arithmetic of a run, for previews and for held-out loss each; four are made in any case
_MOST_STEPS_LOST = 1000  # to a crash, at the automatic interval of checkpoints


# Section of the configuration -> setting -> value.
Changes = dict[str, dict[str, Any]]


class Choice(NamedTuple):
    """A setting that was open, its value, and why."""

    name: str
    value: object
    reason: str

    def __str__(self) -> str:
        return f"{self.name} = {self.value}: {self.reason}"


def choose_intervals(config: Config) -> tuple[Changes, list[Choice]]:
    """Return values for the open warm-up and intervals, and why."""
    changes: Changes = {}
    choices: list[Choice] = []

    def choose(section: str, name: str, value: int, reason: str) -> None:
        changes[section] = {name: value}
        if reason:
            choices.append(Choice(f"{section}.{name}", value, reason))

    steps = config.training.images // config.training.batch
    if is_auto(config.optimizer, "warmup"):
        choose("optimizer", "warmup", max(1, min(5000, steps // 20)), "5% of the run, at most 5000 steps")
    if is_auto(config.log, "every"):
        every = min(50, round_down_to_125(steps / 20))
        choose("log", "every", every, "at least 20 times in the run, and at least every 50 steps")
    if config.ema_snapshots.every >= 0:
        choose("ema_snapshots", "every", *_snapshot_interval(config, steps))
    if intervals := open_intervals(config):
        changes |= {section: {"every": every} for section, every in intervals.items()}
        values = ", ".join(f"{section} {every}" for section, every in intervals.items())
        lost = plural(intervals.get("checkpoint", config.checkpoint.every), "step")
        reason = f"ten or more of each, if that takes under a tenth of the run; a crash loses at most {lost}"
        choices.append(Choice("intervals", values, reason))
    return changes, choices


def _snapshot_interval(config: Config, steps: int) -> tuple[int, str]:
    """Return the interval of EMA snapshots, -1 to take no snapshots, and why; "" if there was nothing to choose."""
    asked, is_open = config.ema_snapshots.every, is_auto(config.ema_snapshots, "every")
    if config.ema_snapshots.second_schedule(config.ema) is None:
        return -1, "" if is_open else "an EMA of fixed decay cannot be rebuilt at other widths"
    if not is_open:
        return asked, ""
    if steps < _FEWEST_STEPS_FOR_SNAPSHOTS:
        return -1, ""
    every = max(1, round(steps / _SNAPSHOTS))
    needed = snapshot_bytes(sum(p.numel() for p in build_network(config).parameters()), every, steps)
    if needed > free_bytes(Path.cwd()) / 4:  # where the folder runs/ is
        return -1, f"{format_bytes(needed)} of snapshots would take over a quarter of the free disk space"
    return every, f"{format_bytes(needed)} of snapshots, from which `unfog ema-sweep` rebuilds an EMA of any width"


def open_intervals(config: Config) -> dict[str, int]:
    """Return steps by section for previews, evaluation and checkpoints, where they are open; by the length."""
    steps = config.training.images // config.training.batch
    every = round_down_to_125(steps / 10)
    previewed = config.preview.images * config.sampler.steps
    evaluated = config.evaluate.images * config.evaluate.levels
    usual = {
        "preview": max(every, _least_interval(config, previewed, steps)),
        "evaluate": max(every, _least_interval(config, evaluated, steps)),
        "checkpoint": min(every, _MOST_STEPS_LOST),
    }
    return {section: steps for section, steps in usual.items() if is_auto(getattr(config, section), "every")}


def _least_interval(config: Config, calls: int, steps: int) -> int:
    """Return the steps between calls of the network for `calls` images each that take no more than _SHARE of a run."""
    # A backward pass takes twice as long as the forward pass. Counted, and not timed: the same command is the same run.
    every = calls / (3 * config.training.batch * _SHARE)
    return round_down_to_125(min(2.5 * every, steps / 4))  # of which 1, 2 or 5 x 10^n is at least `every`


def round_down_to_125(x: float) -> int:
    """Return the largest of 1, 2, 5, 10, 20, 50, … that is at most x; at least 1."""
    power = int(10 ** math.floor(math.log10(max(x, 1))))
    return max(m * power for m in (1, 2, 5) if m == 1 or m * power <= x)
