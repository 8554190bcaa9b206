"""Which settings may change between the start of a run and its resume."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from unfog.config.tree import Config
from unfog.errors import RequestError

# What these govern can change without making the weights so far meaningless or the order of images another.
FREE = (
    "training.steps",
    "training.images",
    "training.budget",
    "training.microbatch",
    "training.clip",
    "training.precision",
    "training.device",
    "training.patience",
    "optimizer.",
    "sampler.",
    "log.",
    "preview.",
    "evaluate.",
    "checkpoint.",
    "data.cache",
    "data.flip",
    "data.jitter",
    "network.dropout",
    "source",  # where the images are; that they are the same is checked
    "label_dropout",
    "guidance",
)


def changes(old: Any, new: Any, where: str = "") -> list[tuple[str, Any, Any]]:
    """(dotted name, old, new) of each setting that differs between two trees."""
    if type(old) is not type(new) or not is_dataclass(old):
        return [] if old == new else [(where, old, new)]
    found = []
    for f in fields(old):
        name = f"{where}.{f.name}" if where else f.name
        found += changes(getattr(old, f.name), getattr(new, f.name), name)
    return found


def check_changes(old: Config, new: Config) -> list[str]:
    """A line on each setting that a resume changes. RequestError for one that a run cannot change."""
    lines = []
    for name, before, now in changes(old, new):
        if not any(name == free or (free.endswith(".") and name.startswith(free)) for free in FREE):
            raise RequestError(
                f"{name} is {before!r} in this run and cannot become {now!r} on resume; start a new run for that"
            )
        lines.append(f"{name}: {before!r} -> {now!r}")
    return lines
