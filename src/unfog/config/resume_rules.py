"""Rules for settings that change between the start of a run and its resume."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from unfog.config.aliases import stored_name
from unfog.config.schema import Config, check_given_length
from unfog.config.toml import update
from unfog.config.validate import override_sampler
from unfog.data.settings import UNREAD
from unfog.errors import RequestError
from unfog.settings import Affects, Rules, is_auto, rules_of
from unfog.text import plural

# The digests that a setting enters, by what it affects.
_DIGESTS: dict[Affects, tuple[str, ...]] = {
    "loss": ("training", "repeat"),
    "steps": ("repeat",),
    "objective": ("training", "repeat", "measure", "objective"),
    "held_out_loss": ("measure",),
    "samples": ("best",),
    "nothing": (),
}
_PURPOSES = ("training", "repeat", "measure", "objective", "best")

# Event in which `unfog tune` records the sampler that it stored in the run.
TUNED_EVENT = "tuned"

# The settings of samples and previews.
SAMPLING = tuple(f.name for f in fields(Config) if rules_of(f).affects == "samples")

# Images that are decoded on the fly are identified by names, sizes and times of their files, not by their pixels.
_COPIED = "; after cp -a or rsync -a they count as the same, and --force accepts any other copy"


def settings_digests(config: Config) -> dict[str, str]:
    """Return digests of the settings, by purpose, to see whether what was measured under others still holds.

    "training": settings that the loss depends on, and so the usual loss and the learning rates that were too high.
    "repeat": also those of the length and the like; steps repeat to the bit only under the same.
    "measure": settings that the held-out loss depends on. Only losses under the same compare.
    "objective": settings that the loss by noise level depends on.
    "best": the metric that the best checkpoint is chosen by, and the settings of its samples.
    """
    in_use = {
        "latents": config.autoencoder_folder,
        "autoencoder": config.autoencoder.factor,
        "ema_snapshots": config.ema_snapshots.second_schedule(config.ema),
    }
    # A setting that was added later enters only where it is not the usual one, or every older run would differ.
    # Also where its part is of another kind than the usual one, as a network always is: there its own default is usual.
    usual = {*_flatten(Config()), *_added_later(config)}
    pairs: dict[str, list[tuple[str, Any]]] = {purpose: [] for purpose in _PURPOSES}
    for name, value, rules in walk_settings(config):
        if in_use.get(name.partition(".")[0], True) and not (rules.added_later and (name, value) in usual):
            for purpose in _DIGESTS[rules.affects or "loss"]:
                pairs[purpose].append((stored_name(name), value))
    digests = {name: hashlib.sha256(repr(listed).encode()).hexdigest()[:16] for name, listed in pairs.items()}
    # Samples do not enter the held-out loss, so that a best checkpoint by it outlives another sampler.
    best = config.evaluate.best
    return digests | {"best": best if best == "held_out_loss" else f"{best}:{digests['best']}"}


def walk_settings(settings: Any, where: str = "", rules: Rules = Rules()) -> Iterator[tuple[str, Any, Rules]]:  # noqa: B008
    """Yield (dotted name, value, rules) of each setting in a tree, and the kind of each part."""
    if not is_dataclass(settings):
        yield where, settings, rules
        return
    if where:
        # Two kinds may have the same settings with the same values.
        yield f"{where}.kind", getattr(type(settings), "kind", ""), rules
    for f in fields(settings):
        name = f"{where}.{f.name}" if where else f.name
        yield from walk_settings(getattr(settings, f.name), name, rules_of(f).inside(rules))


def _flatten(settings: Any) -> list[tuple[str, Any]]:
    """Return (dotted name, value) of each setting in a tree, and the kind of each part."""
    return [(name, value) for name, value, _ in walk_settings(settings)]


def _added_later(settings: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, default) of each setting in a tree that is itself marked as added later."""
    for f in fields(settings):
        name, value = f"{where}.{f.name}" if where else f.name, getattr(settings, f.name)
        if is_dataclass(value):
            yield from _added_later(value, name)
        elif rules_of(f).added_later:
            yield name, f.default


def _differences(
    old: Any,
    new: Any,
    where: str = "",
    rules: Rules = Rules(),  # noqa: B008
) -> Iterator[tuple[str, Any, Any, Rules]]:
    """Yield (dotted name, old, new, rules) of each setting that differs between two trees."""
    # Parts of two kinds have no settings to compare one by one, so the part is one difference.
    if type(old) is not type(new) or not is_dataclass(old):
        if old != new:
            yield where, old, new, rules
        return
    for f in fields(old):
        name = f"{where}.{f.name}" if where else f.name
        yield from _differences(getattr(old, f.name), getattr(new, f.name), name, rules_of(f).inside(rules))


def apply_changes(stored: Config, table: Mapping[str, Any]) -> Config:
    """Return a run's settings with the changes of a nested table that a resume gives.

    Levels that were tuned for another sampler or number of steps are dropped, unless their grid is given too.
    """
    # A length replaces the stored one, of whatever kind: --images 5000 on resume ends a run that was begun by --steps.
    check_given_length(table)
    config = update(stored.without_length(), table, "").with_length_of(stored)
    given, now = table.get("sampler", {}), config.sampler
    usual = override_sampler(stored.sampler, now.kind, now.steps).grid
    if usual == stored.sampler.grid or not isinstance(given, Mapping) or {"grid", "tuned"} & set(given):
        return config
    return replace(config, sampler=replace(now, grid=usual))


def check_changes(old: Config, new: Config, force: bool = False, images: Callable[[], str] = str) -> list[str]:
    """Return a line for each setting that a resume changes. Raise RequestError if a rule forbids a change.

    `images` returns how the images differ from those of the run, for the message; "" if that is unknown.
    """
    # What a line shows is printed and recorded, and so must not hold a password.
    lines, (old, new) = [], (old.without_secrets(), new.without_secrets())
    for name, before, now, rules in _differences(old, new):
        if name == "fingerprint":
            if not force:
                raise _other_images(new.source, images(), str(before))
            lines.append("images: others from here on (forced)")
        elif name == "columns":
            # Also with --force, as the layer that embeds them is another one.
            had, has = (", ".join(map(str, columns)) or "no columns" for columns in (before, now))
            raise RequestError(
                f"this run was trained with {had}, and the images in {new.source} have {has}; restore the columns, or "
                "start a new run, which --init RUN gives the weights of this one"
            )
        elif name == "autoencoder_folder" and before and now:
            continue  # only the place; copying it into the run checks that it is the same autoencoder
        elif rules.resume == "free":
            # A length is kept in images, but asked for in steps.
            batch = (old if is_auto(new.training, "batch") else new).training.batch
            steps = f" ({plural(now // batch, 'step')} of {batch})" if name == "training.images" else ""
            lines.append(f"{name}: {before!r} -> {now!r}{steps}")
        elif rules.resume != "force":
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


def _other_images(source: str, difference: str, fingerprint: str) -> RequestError:
    """Return the error for images that are not those of the run, whose fingerprint is given."""
    what = f" ({difference})" if difference else ""
    return RequestError(
        f"the images in {source} are not those that this run was trained on{what}; restore them, start a new run, or "
        f"continue with these by --force{_COPIED if fingerprint.startswith(UNREAD) else ''}"
    )
