"""Old names of commands, settings and Python arguments. They keep working; everything else uses the new names.

A renamed setting is read under both names from config.toml, flags and Python. Digests of settings
(`resume_rules.settings_digests`) are computed over the old name, so that a checkpoint of an earlier version compares
equal.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

T = TypeVar("T")

COMMANDS = {"train-codec": "train-autoencoder"}

# Dotted names in the tree of settings, old to new.
SETTINGS = {
    "averages": "ema_snapshots",
    "codec": "autoencoder_folder",
    "data.lost_shards": "data.failed_shards",
}


def with_old_defaults(command: str, request: T) -> T:
    """Return a request with the defaults of an old name: scripts look for what train-codec made in a -codec folder."""
    return replace(request, suffix="-codec") if command == "train-codec" else request  # type: ignore[type-var]


def current_name(setting: str) -> str:
    """Return the present dotted name of a setting: "averages.every" becomes "ema_snapshots.every"."""
    return _renamed(setting, SETTINGS)


def stored_name(setting: str) -> str:
    """Return the dotted name that digests of settings are computed over: the oldest one."""
    return _renamed(setting, {new: old for old, new in SETTINGS.items()})


def _renamed(setting: str, names: dict[str, str]) -> str:
    for one, other in names.items():
        if setting == one or setting.startswith(f"{one}."):
            return other + setting[len(one) :]
    return setting
