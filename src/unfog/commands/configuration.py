"""Build the settings of a new run from a preset, a TOML file and changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from unfog.config.schema import Config, clear_length, inherit_length
from unfog.config.toml import read_toml, update
from unfog.models.autoencoder_settings import Autoencoder, Latents


def base_settings(recipe: Config, file: Path | None, changes: Mapping[str, Any]) -> Config:
    """Return the recipe, changed by the weights to start from (--init) and then by the TOML file (--config)."""
    init = read_toml(file, clear_length(recipe)).init if file else recipe.init
    base, given = recipe, changes.get("init", {})
    if init.folder or (given.get("folder") if isinstance(given, Mapping) else given):
        # Imported here, as it imports torch.
        from unfog.runs.init_weights import recipe_from_weights

        base = recipe_from_weights(replace(recipe, init=init), changes)
    return inherit_length(base, read_toml(file, clear_length(base))) if file else base


def apply_changes(base: Config, changes: Mapping[str, Any], source: str) -> Config:
    """Return the settings of a new run: `base` with the changes of a nested table.

    Raises:
        RequestError: a setting is unknown, or has a value that it cannot have.
    """
    config = replace(
        inherit_length(base, update(clear_length(base), changes, "")),
        source=source,
        # Facts about another run, if --config names the config.toml of one.
        fingerprint="",
        classes=(),
        latents=Latents(),
        autoencoder=Autoencoder(),
    )
    return replace(config, init=replace(config.init, sha256=""))
