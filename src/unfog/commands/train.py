"""`unfog train`: the settings of a new run, and its training."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from unfog.config.paths import check_out
from unfog.config.requests import TrainRequest
from unfog.config.schema import Config
from unfog.config.toml import read_toml, update
from unfog.models.autoencoder_settings import Autoencoder, Latents
from unfog.process.run_folder import RunFolder, next_folder

# Modules that import torch are imported inside functions, so that a wrong request is refused at once.


def train(request: TrainRequest) -> tuple[RunFolder, bool]:
    """Train a new run. Return its folder, and False if a signal stopped it; then it is saved.

    Raises:
        RequestError: the request cannot be met; found before training.
        RunError: training could not continue.
    """
    check_new_run(request)
    # Imported only now, as torch takes seconds.
    from unfog.process.run_folder import find_earlier_attempt
    from unfog.runs.resume import resume
    from unfog.runs.train import train as start

    # torchrun starts all processes again after a failure: then the run exists already.
    earlier = find_earlier_attempt(request.settings.source, request.out)
    return start(request.settings, request.out) if earlier is None else resume(earlier)


def base_settings(recipe: Config, file: Path | None, changes: Mapping[str, Any]) -> Config:
    """Return the recipe, changed by the weights to start from (--init) and then by the TOML file (--config)."""
    init = read_toml(file, recipe.without_length()).init if file else recipe.init
    base, given = recipe, changes.get("init", {})
    if init.folder or (given.get("folder") if isinstance(given, Mapping) else given):
        from unfog.runs.init_weights import recipe_from_weights

        base = recipe_from_weights(replace(recipe, init=init), changes)
    return read_toml(file, base.without_length()).with_length_of(base) if file else base


def apply_changes(base: Config, changes: Mapping[str, Any], source: str) -> Config:
    """Return the settings of a new run: `base` with the changes of a nested table.

    Raises:
        RequestError: a setting is unknown, or has a value that it cannot have.
    """
    config = replace(
        update(base.without_length(), changes, "").with_length_of(base),
        source=source,
        # Facts about another run, if --config names the config.toml of one.
        fingerprint="",
        classes=(),
        latents=Latents(),
        autoencoder=Autoencoder(),
    )
    return replace(config, init=replace(config.init, sha256=""))


def check_new_run(request: TrainRequest) -> None:
    """Raise RequestError unless the run folder can be made."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":  # else it may be there, and be its own
        source = request.settings.source
        check_out(request.out or next_folder(source), source)


def main(request: TrainRequest) -> int:
    """Train, print the run folder, and return the exit status."""
    return report_end(*train(request))


def report_end(folder: RunFolder, done: bool) -> int:
    """Print the run folder on stdout, and what to do next on stderr. Return the exit status."""
    from unfog.reporting.progress import print_result, say

    say(f"  previews  {folder.newest_preview}\n  report    {folder.path / 'report.html'}")
    command = "sample" if done else "resume"
    if done and folder.read_config().trains_autoencoder:
        command = "train SOURCE --autoencoder"
    say(f"  next      unfog {command} {shlex.quote(str(folder.path))}")
    print_result(str(folder.path))
    # torchrun takes anything but 0 for a failure, and would start again what was to stop.
    return 0 if done or "TORCHELASTIC_RUN_ID" in os.environ else 3
