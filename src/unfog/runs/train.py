"""`unfog train`: from a configuration to a run that has ended."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from unfog.checks.images.image_checks import quick_check_images
from unfog.checks.settings.settings_checks import check_settings
from unfog.config.schema import Config
from unfog.config.validate import check_request
from unfog.custom import PREFIX, resolve_path, resolve_step
from unfog.data.augmentation import Augment
from unfog.data.dataset import Dataset
from unfog.diffusion.weighting import CustomWeighting
from unfog.evaluation.features import open_features
from unfog.models.given_network import SOURCE_FILE, GivenNetwork
from unfog.models.network_settings import CustomNetwork
from unfog.pipeline.contact_sheet import contact_sheet
from unfog.pipeline.latents import copy_autoencoder_into_run
from unfog.pipeline.load_data import load_images
from unfog.pipeline.skipped_images import DATA_FILE, data_json
from unfog.planning.auto_settings import AutoSettings
from unfog.planning.disk import check_disk_room
from unfog.process import command_clock
from unfog.process.run_folder import RunFolder, next_folder
from unfog.reporting.findings import Finding
from unfog.reporting.image_grids import encode_png
from unfog.reporting.progress import say, warn
from unfog.runs.evaluation_hook import resolve_metrics
from unfog.runs.previews import export_autoencoder
from unfog.runs.ranks import broadcast_config, device_for, open_run
from unfog.runs.session import Session
from unfog.runs.weights.init_weights import adopt_latent_statistics, load_initial_weights
from unfog.safe_files import write_atomic
from unfog.training.optimizer_settings import Custom
from unfog.training.optimizers import check_resumable


def train(config: Config, out: Path | None = None, callbacks: Sequence[object] = ()) -> tuple[RunFolder, bool]:
    """Train a new run. Returns its folder, and False if a signal stopped training before its end.

    `callbacks` are objects with methods of `unfog.callbacks.Callback`.
    RequestError if the settings, the source or the folder cannot be used; RunError if training failed.
    """
    began = command_clock.began()
    check_request(config)
    check_custom_parts(config)
    folder = RunFolder(out or next_folder(config.source))
    _check_metric_features(config)
    with _say_how_to_go_on(folder), open_run(folder, config, new=True, callbacks=callbacks) as run:
        # Latents are normalised as the initial weights expect them, so their statistics come before the images.
        dataset, config = load_images(adopt_latent_statistics(config), run.stop)
        initial = load_initial_weights(config) if config.init.folder else None
        images, settings = dataset.as_network_input.train, initial.config if initial else config
        auto = AutoSettings(settings, images, run.device, run.stop, run.world.size)
        auto.began = began
        auto.resolve()
        resolve_metrics(auto, dataset.train, run.device)
        run.stop.leave_if_requested()  # nothing is written yet, so there is nothing to save
        config = copy_autoencoder_into_run(folder, auto.config)
        # Before the folder becomes a run: what does not fit together raises here, and leaves no folder behind.
        session = Session(run, config, dataset, initial.state if initial else None)
        session.keep_budget(auto)
        _create_run(session)
        write_data_files(session)
        choices = [*(initial.choices if initial else ()), *auto.choices]
        findings = [*quick_check_images(dataset, config), *settings_findings(session)]
        done = session.run(choices, findings)
        export_autoencoder(folder, config)
        return folder, done


@contextmanager
def _say_how_to_go_on(folder: RunFolder) -> Iterator[None]:
    """Name the command that continues a run whose start was stopped; nothing if there is no run yet."""
    try:
        yield
    except KeyboardInterrupt:
        if folder.config_file.is_file():
            say(f"  next      unfog resume {shlex.quote(str(folder.path))}")
        raise


def _check_metric_features(config: Config) -> None:
    """RequestError if the feature network of the metrics is not on this machine: before reading images, not after."""
    if config.evaluate.metrics:
        open_features(config.evaluate.features, device_for(config), only_known=True)


def _create_run(session: Session) -> None:
    """Turn the reserved folder into a run, and let the other ranks begin."""
    run = session.context
    config, folder = session.config, run.folder
    room = check_disk_room(folder.checkpoints, session.state, config.checkpoint, session.steps, config.ema_snapshots)
    say(f"  {room}")
    # config.toml makes the folder a run, which a restart by torchrun must then recognise as its own.
    folder.write_launch_file()
    folder.write_config(config)
    if isinstance(config.network, GivenNetwork):
        write_atomic(folder.path / SOURCE_FILE, config.network.source_text().encode())
    folder.checkpoints.mkdir()
    broadcast_config(run.world, folder.checkpoints, config)  # last, as worker ranks look for the folders at once
    run.heartbeat.silent = False


def check_custom_parts(config: Config) -> None:
    """Import the custom parts before any image is read, and announce them: the settings may be somebody else's.

    RequestError if one cannot be imported, or if training with the optimizer could not be resumed.
    """
    if isinstance(config.network, CustomNetwork):
        config.network.load()
    if isinstance(config.diffusion.weighting, CustomWeighting):
        config.diffusion.weighting.try_out()
    if config.sampler.kind.startswith(PREFIX):
        resolve_step(config.sampler.kind)
    for tracker in config.log.sinks:
        if tracker.startswith(PREFIX):
            resolve_path(tracker, "a tracker")
    if isinstance(config.optimizer.method, Custom):
        check_resumable(config.optimizer.method)


def settings_findings(session: Session) -> list[Finding]:
    """Return what the doctor finds in the settings. Its rules are about diffusion, so an autoencoder gets none."""
    if session.config.trains_autoencoder:
        return []
    run = session.context
    return check_settings(session.config, session.dataset, run.device, folder=run.folder.path)


def write_data_files(session: Session) -> None:
    """Write data.json and the contact sheet; if that fails, warn and train without."""
    config = session.config
    augment = Augment.from_settings(config.data)
    try:
        _write_data_report(session.context.folder, session.dataset, augment, config.training.seed)
    except OSError as error:
        warn(f"data.json and contact-sheet.png could not be written: {error.strerror or error}")


def _write_data_report(folder: RunFolder, dataset: Dataset, augment: Augment, seed: int) -> None:
    """Write contact-sheet.png and data.json into a run folder, each atomically. OSError if that is impossible.

    `seed` is that of the stream and of the augmentation; the random state of torch is left as it is.
    """
    write_atomic(folder.path / DATA_FILE, data_json(dataset))
    write_atomic(folder.path / "contact-sheet.png", encode_png(contact_sheet(dataset, augment, seed)))
