"""`unfog train`, `unfog train-autoencoder` and `unfog resume`: train a run from its settings to its end."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from unfog.config.requests import ResumeRequest, TrainAutoencoderRequest, TrainRequest
from unfog.config.resume_rules import check_changes
from unfog.config.schema import Config, check_given_length
from unfog.config.toml import read_toml, update
from unfog.config.validate import check_autoencoder, check_out
from unfog.config.values import quote, suggest
from unfog.errors import RequestError, RunError
from unfog.models.autoencoder_settings import FACTORS, WIDTHS, Autoencoder, Latents
from unfog.process.run_folder import RunFolder, next_folder
from unfog.training.settings import USUAL_BATCH

# Modules that import torch are imported inside functions, so that a wrong request is refused at once.


def train(request: TrainRequest, callbacks: Sequence[object] = ()) -> tuple[RunFolder, bool]:
    """Train a new run. Return its folder, and False if a signal stopped it; then it is saved.

    `callbacks` are objects with methods of `unfog.callbacks.Callback`.

    Raises:
        RequestError: the request cannot be met; found before training.
        RunError: training could not continue.
    """
    check_new_run(request)
    # Imported only now, as torch takes seconds.
    from unfog.runs.resume import resume
    from unfog.runs.train import train as start

    # torchrun starts all processes again after a failure: then the run exists already.
    earlier = RunFolder.find_earlier_attempt(request.settings.source, request.out)
    if earlier is not None:
        return resume(earlier, callbacks=callbacks)
    return start(request.settings, request.out, callbacks)


def base_settings(recipe: Config, file: Path | None, changes: Mapping[str, Any]) -> Config:
    """Return the recipe, changed by the weights to start from (--init) and then by the TOML file (--config)."""
    # A learning rate that a recipe sets was tuned with its batch, which is kept then.
    if not recipe.optimizer.lr and recipe.training.batch == USUAL_BATCH:
        recipe = replace(recipe, training=replace(recipe.training, batch=0))  # chosen with the device
    init = read_toml(file, recipe.without_length()).init if file else recipe.init
    base, given = recipe, changes.get("init", {})
    if init.folder or (given.get("folder") if isinstance(given, Mapping) else given):
        from unfog.runs.weights.init_weights import recipe_from_weights

        base = recipe_from_weights(replace(recipe, init=init), changes)
    return read_toml(file, base.without_length()).with_length_of(base) if file else base


def apply_changes(base: Config, changes: Mapping[str, Any], source: str) -> Config:
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


def train_autoencoder(request: TrainAutoencoderRequest, callbacks: Sequence[object] = ()) -> tuple[RunFolder, bool]:
    """Train an autoencoder. Returns and raises as `train`."""
    weights = {"kl": request.kl, "pyramid": request.pyramid}
    config = request.settings.config(request.source)
    config = _add_autoencoder(config, request.factor, request.channels, request.width, **weights)
    check_autoencoder(config)
    out = request.out or next_folder(config.source.rstrip("/") + request.suffix)
    check_out(out, config.source, "the folder of an autoencoder")
    from unfog.runs.train import train as start

    return start(config, out, callbacks)


def resume(request: ResumeRequest, callbacks: Sequence[object] = ()) -> tuple[RunFolder, bool]:
    """Continue a run. Return its folder, and False if a signal stopped it; then it is saved.

    Raises:
        RequestError: a setting cannot change, or the images are not those of the run.
        RunError: no checkpoint is whole, or training could not continue.
    """
    folder = RunFolder(request.run)
    check_changes(folder.read_config(), request.settings, request.force)  # before torch is imported
    from unfog.runs.resume import resume as continue_run

    return continue_run(folder, request.settings, request.force, callbacks)


def verify(folder: RunFolder) -> str:
    """Train again from the checkpoint before the newest, and compare with the newest bit by bit. Changes nothing.

    Returns:
        A line about what was compared.

    Raises:
        RequestError: there is nothing to replay, settings were changed on the way, or another process is training.
        RunError: it came out differently.
        Interrupted: a signal came.
    """
    from unfog.inference.loaded_run import load_run_images
    from unfog.process.signals import StopSignals
    from unfog.runs.replay import find_replayable, replay_newest

    config = folder.read_config()
    with StopSignals(saves=False) as stop, folder.locked():
        first, last = find_replayable(folder, config)  # before the images are read, which may take long
        different, machine = replay_newest(folder, config, load_run_images(config, stop), stop)
    what = f"steps {first.step:,} to {last.step:,} of {folder.path}, trained once more,"
    if different:
        raise RunError(
            f"{what} gave a different result: {different[0]} and {len(different) - 1} other tensors differ. "
            f"They were computed by {last.made_on}, and now by "
            + (
                f"the same, which {_promise(config)}"
                if machine == last.made_on
                else f"{machine}, which may round differently"
            )
        )
    return f"{what} are equal to the bit: weights, EMA and optimizer"


def _promise(config: Config) -> str:
    """Return what the same machine promises about the bits of repeated steps."""
    if config.training.deterministic == "off" and config.training.device.startswith("cuda"):
        return "need not give the same, as training.deterministic is off"
    return "should give the same"


def main(request: TrainRequest | TrainAutoencoderRequest | ResumeRequest) -> int:
    """Train, or verify; print the run folder, or what was compared. Return the exit status."""
    if isinstance(request, TrainRequest):
        return _report_end(*train(request))
    if isinstance(request, TrainAutoencoderRequest):
        return _report_end(*train_autoencoder(request))
    if not request.verify:
        return _report_end(*resume(request))
    from unfog.reporting.progress import say

    say(verify(RunFolder(request.run)))
    return 0


def _report_end(folder: RunFolder, done: bool) -> int:
    """Print the run folder on stdout, and what to do next on stderr. Return the exit status."""
    from unfog.reporting.progress import print_result, say

    say(f"  previews  {folder.newest_preview}\n  report    {folder.path / 'report.html'}")
    command = folder.read_config().task.next_command if done else "resume"
    say(f"  next      unfog {command} {shlex.quote(str(folder.path))}")
    print_result(str(folder.path))
    # torchrun takes anything but 0 for a failure, and would start again what was to stop.
    return 0 if done or "TORCHELASTIC_RUN_ID" in os.environ else 3


def _add_autoencoder(
    config: Config, factor: int = 4, channels: int = 4, width: str = "small", **weights: float
) -> Config:
    """Return `config`, made from `autoencoder_recipe`, with an autoencoder; `weights` are kl and pyramid."""
    if width not in WIDTHS:
        raise RequestError(f"width = {quote(width)} is unknown{suggest(width, WIDTHS)}")
    if factor not in FACTORS:
        raise RequestError(f"factor = {quote(factor)} is not one of {', '.join(map(str, FACTORS))}; 4 or 8 is usual")
    # One level for each halving of the side.
    levels = WIDTHS[width][: factor.bit_length() - 1]
    codec = Autoencoder(factor=factor, latent_channels=channels, channels=levels)
    return replace(config, autoencoder=replace(codec, **weights))  # type: ignore[arg-type]
