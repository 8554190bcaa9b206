"""Which settings may change between the start of a run and its resume."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from unfog.config.aliases import stored_name
from unfog.config.schema import Config, clear_length, inherit_length, redact_urls
from unfog.config.toml import update
from unfog.config.validate import override_sampler
from unfog.data.settings import UNREAD
from unfog.errors import RequestError

# What pictures are drawn by.
SAMPLING = ("sampler", "guidance", "guidance_interval")
# What these govern can change without making the weights so far meaningless or the order of images another.
FREE = (
    "training.steps",
    "training.images",
    "training.budget",
    "training.microbatch",
    "training.noise",
    "training.compress",
    "training.clip",
    "training.precision",
    "training.memory_format",
    "training.device",
    "training.patience",
    "training.rollbacks",
    "training.grace",
    "training.timeout",
    "training.shard",
    "training.checkpointing",
    "training.compile",
    "optimizer.",
    *SAMPLING,
    "log.",
    "preview.",
    "evaluate.",
    "checkpoint.",
    "ema_snapshots.",
    "data.cache",
    "data.cache_limit",
    "data.failed_shards",
    "data.labels",  # where they are written; that they are the same is part of the fingerprint
    "data.flip",
    "data.jitter",
    "data.crop",
    "network.dropout",
    "source",  # where the images are; that they are the same is checked
    "label_dropout",
)
# These make it another run from here on, although the weights go on to mean what they did.
WITH_FORCE = (
    "training.seed",
    "diffusion.weighting",
    "diffusion.adaptive",
    "ema",
    "data.background",
    "data.held_out",
    "fingerprint",
)

# What neither the weights nor the losses depend on.
INDIFFERENT = (
    "init.",  # of what it started from, a run is told once
    "source",
    "autoencoder_folder",
    "data.cache",
    "data.cache_limit",
    "data.failed_shards",
    "data.labels",
    "training.device",
    "training.grace",
    "training.timeout",
    "training.shard",
    "training.checkpointing",
    "training.compile",
    *SAMPLING,
    "log.",
    "preview.",
    "checkpoint.",
)
# What the steps depend on, and what is usual does not.
EXACTLY = (
    "ema_snapshots.",  # whether there is a second one
    "training.steps",
    "training.images",
    "training.budget",
    "training.microbatch",
    "training.noise",
    "training.memory_format",
    "training.compress",
    "training.patience",
    "training.rollbacks",
)
OBJECTIVE = ("diffusion.", "latents.", "autoencoder.", "fingerprint", "data.background", "data.held_out")
MEASURE = (*OBJECTIVE, "evaluate.images", "evaluate.levels")

# What the metrics of drawn pictures depend on besides.
DRAWN = ("evaluate.features", "evaluate.samples", "evaluate.reference", *SAMPLING)

# What came after the first checkpoints of this format, which tell by digests without it what they were trained with.
LATER = (
    "diffusion.learned_variance",
    "diffusion.adaptive",
    "training.noise",
    "training.memory_format",
    "training.compress",
    "optimizer.cooldown",
    "optimizer.method.",
    "ema_snapshots.",
    "latents.",
    "autoencoder.",
)

_COPIED = (
    ". As they are decoded when their turn comes, they are told by their files alone, to the time of change: a copy is "
    "the same if it was made with cp -a or rsync -a; of any other, --force says that it is"
)


def settings_digests(config: Config) -> dict[str, str]:
    """Digests of the settings that something is true under, by purpose.

    "training": what the loss depends on, so that what is usual, and learning rates that were too high, are of these.
    "repeat": also the length, say, which the learning rate follows; only under the same do steps come out the same.
    "measure": what the held-out loss is a measure of; only equals compare.
    "objective": what the loss by noise level is a measure of.
    "best": the name of what the best is chosen by, and for a metric of drawn pictures what it is a measure of.
    """
    # What an earlier version did not know, and is as it was then or not used, changes no digest.
    second = config.ema_snapshots.second_schedule(config.ema)
    idle = (
        ("latents", config.autoencoder_folder),
        ("autoencoder", config.autoencoder.factor),
        ("ema_snapshots", second),
    )
    unused = tuple(name for name, used in idle if not used)
    usual = set(flatten(Config()))
    settings = [s for s in flatten(config) if not among(unused, s[0]) and not (among(LATER, s[0]) and s in usual)]
    repeat = [pair for pair in settings if not among((*INDIFFERENT, "evaluate."), pair[0])]
    training = [pair for pair in repeat if not among(EXACTLY, pair[0])]
    measure = [pair for pair in settings if among(MEASURE, pair[0])]
    objective = [pair for pair in settings if among(OBJECTIVE, pair[0])]
    drawn = [pair for pair in settings if among(DRAWN, pair[0])]
    purposes = {"training": training, "repeat": repeat, "measure": measure, "objective": objective, "best": drawn}
    keys = {
        name: hashlib.sha256(repr([(stored_name(n), v) for n, v in pairs]).encode()).hexdigest()[:16]
        for name, pairs in purposes.items()
    }
    best = config.evaluate.best
    return keys | {"best": best if best == "held_out_loss" else f"{best}:{keys['best']}"}


def flatten(settings: Any, where: str = "") -> list[tuple[str, Any]]:
    """(dotted name, value) of each setting in a tree, and the kind of each part."""
    if not is_dataclass(settings):
        return [(where, settings)]
    found: list[tuple[str, Any]] = [(f"{where}.kind", getattr(type(settings), "kind", ""))] if where else []
    for f in fields(settings):
        found += flatten(getattr(settings, f.name), f"{where}.{f.name}" if where else f.name)
    return found


def diff_settings(old: Any, new: Any, where: str = "") -> list[tuple[str, Any, Any]]:
    """(dotted name, old, new) of each setting that differs between two trees."""
    if type(old) is not type(new) or not is_dataclass(old):
        return [] if old == new else [(where, old, new)]
    found = []
    for f in fields(old):
        name = f"{where}.{f.name}" if where else f.name
        found += diff_settings(getattr(old, f.name), getattr(new, f.name), name)
    return found


def apply_changes(stored: Config, table: Mapping[str, Any]) -> Config:
    """A run's settings with those of a nested table, which a resume is given.

    Levels that were tuned for another sampler or number of steps are left, unless their grid is itself given.

    Raises:
        RequestError: there is no such setting, or it cannot have this value.
    """
    config = inherit_length(stored, update(clear_length(stored), table, ""))
    given, now = table.get("sampler", {}), config.sampler
    usual = override_sampler(stored.sampler, now.kind, now.steps).grid
    if usual == stored.sampler.grid or not isinstance(given, Mapping) or {"grid", "tuned"} & set(given):
        return config
    return replace(config, sampler=replace(now, grid=usual))


def check_changes(old: Config, new: Config, force: bool = False) -> list[str]:
    """A line on each setting that a resume changes.

    Raises:
        RequestError: a run cannot change this, or only with `force`.
    """
    lines, (old, new) = [], (redact_urls(old), redact_urls(new))
    for name, before, now in diff_settings(old, new):
        if name == "fingerprint":
            if not force:
                raise RequestError(
                    f"the images in {new.source} are not those that this run was trained on; bring them back, start a "
                    f"new run, or go on with these by --force{_COPIED if str(before).startswith(UNREAD) else ''}"
                )
            lines.append("images: other ones from here on (forced)")
        elif name == "autoencoder_folder" and before and now:
            continue  # where it is; that it is the same is checked
        elif among(FREE, name):
            lines.append(f"{name}: {before!r} -> {now!r}")
        elif not among(WITH_FORCE, name):
            raise RequestError(
                f"{name} is {before!r} in this run and cannot become {now!r} on resume; start a new run for that"
            )
        elif not force:
            raise RequestError(
                f"{name} is {before!r} in this run, and {now!r} would make it another one from here on; "
                "give --force if that is meant"
            )
        else:
            lines.append(f"{name}: {before!r} -> {now!r} (forced)")
    return lines


def among(names: tuple[str, ...], name: str) -> bool:
    """Whether a setting is one of these, or in a section of them, which ends with a dot."""
    return any(name == one or name.startswith(one if one.endswith(".") else f"{one}.") for one in names)
