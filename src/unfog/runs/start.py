"""Check a request to train or resume, and start the run. Torch is imported only once the request is right."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from unfog.config.requests.train import ResumeRequest, TrainAutoencoderRequest, TrainRequest
from unfog.config.resume_rules import check_changes
from unfog.config.schema import Config, check_given_length
from unfog.config.spec_strings import quote
from unfog.config.toml import read_toml, update
from unfog.config.validate import check_autoencoder, check_out
from unfog.errors import RequestError
from unfog.models.autoencoder_settings import FACTORS, WIDTHS, Autoencoder, Latents
from unfog.process.run_folder import RunFolder, next_folder
from unfog.settings import auto_value, is_auto
from unfog.text import suggest
from unfog.training.settings import USUAL_BATCH

# Modules that import torch are imported inside functions, so that a wrong request is refused at once.


def start_run(request: TrainRequest, callbacks: Sequence[object] = ()) -> tuple[RunFolder, bool]:
    """Train a new run. Return its folder, and False if a signal stopped it; then it is saved.

    `callbacks` are objects with methods of `unfog.callbacks.Callback`.

    Raises:
        RequestError: the request cannot be met; found before training.
        RunError: training could not continue.
    """
    check_new_run(request)
    # Imported only now, as torch takes seconds.
    from unfog.runs.resume import resume
    from unfog.runs.train import train_run

    # torchrun starts all processes again after a failure: then the run exists already.
    earlier = RunFolder.find_earlier_attempt(request.settings.source, request.out)
    if earlier is not None:
        return resume(earlier, callbacks=callbacks)
    return train_run(request.settings, request.out, callbacks)


def base_settings(recipe: Config, file: Path | None, changes: Mapping[str, Any]) -> Config:
    """Return the recipe, changed by the weights to start from (--init) and then by the TOML file (--config)."""
    # A learning rate that a recipe sets was tuned with its batch, which is kept then.
    if is_auto(recipe.optimizer, "lr") and recipe.training.batch == USUAL_BATCH:
        automatic = replace(recipe.training, batch=auto_value(recipe.training, "batch"))  # chosen with the device
        recipe = replace(recipe, training=automatic)
    init = read_toml(file, recipe.without_length()).init if file else recipe.init
    base, given = recipe, changes.get("init", {})
    if init.folder or (given.get("folder") if isinstance(given, Mapping) else given):
        from unfog.runs.weights.init_weights import recipe_from_weights

        base = recipe_from_weights(replace(recipe, init=init), changes)
    return read_toml(file, base.without_length()).with_length_of(base) if file else base


def new_run_settings(base: Config, changes: Mapping[str, Any], source: str) -> Config:
    """Return the settings of a new run: `base` with the changes of a nested table.

    RequestError if a setting is unknown, or has a value that it cannot have.
    """
    check_given_length(changes)
    config = replace(
        update(base.without_length(), changes, "").with_length_of(base),
        source=source,
        # Facts about another run, if --config names the config.toml of one.
        fingerprint="",
        classes=(),
        columns=(),
        buckets=(),
        latents=Latents(),
        autoencoder=Autoencoder(),
    )
    return replace(config, init=replace(config.init, sha256=""))


def check_new_run(request: TrainRequest) -> None:
    """Raise RequestError unless the run folder can be made."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":  # else it may be there, and be its own
        source = request.settings.source
        check_out(request.out or next_folder(source), source)


def start_autoencoder(request: TrainAutoencoderRequest, callbacks: Sequence[object] = ()) -> tuple[RunFolder, bool]:
    """Train an autoencoder. Returns and raises as `start_run`."""
    weights = {"kl": request.kl, "pyramid": request.pyramid}
    config = request.settings.config(request.source)
    config = add_autoencoder(config, request.factor, request.channels, request.width, **weights)
    check_autoencoder(config)
    out = request.out or next_folder(config.source.rstrip("/") + request.suffix)
    check_out(out, config.source, "the folder of an autoencoder")
    from unfog.runs.train import train_run

    return train_run(config, out, callbacks)


def resume_run(request: ResumeRequest, callbacks: Sequence[object] = ()) -> tuple[RunFolder, bool]:
    """Continue a run. Return its folder, and False if a signal stopped it; then it is saved.

    Raises:
        RequestError: a setting cannot change, or the images are not those of the run.
        RunError: no checkpoint is whole, or training could not continue.
    """
    folder = RunFolder(request.run)
    check_changes(folder.read_config(), request.settings, request.force)  # before torch is imported
    from unfog.runs.resume import resume

    return resume(folder, request.settings, request.force, callbacks)


def add_autoencoder(
    config: Config, factor: int = 4, channels: int = 4, width: str = "small", **weights: float
) -> Config:
    """Return `config`, made from `autoencoder_recipe`, with an autoencoder; `weights` are kl and pyramid."""
    if width not in WIDTHS:
        raise RequestError(f"width = {quote(width)} is unknown{suggest(width, WIDTHS)}")
    if factor not in FACTORS:
        raise RequestError(f"factor = {quote(factor)} is not one of {', '.join(map(str, FACTORS))}; 4 or 8 is usual")
    # One level for each halving of the side.
    levels = WIDTHS[width][: factor.bit_length() - 1]
    autoencoder = Autoencoder(factor=factor, latent_channels=channels, channels=levels)
    return replace(config, autoencoder=replace(autoencoder, **weights))  # type: ignore[arg-type]
