"""`unfog train` and `unfog resume`: from a request to a run that has ended."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch

from unfog.config.resume_rules import SAMPLING, check_changes
from unfog.config.schema import LENGTH, Config
from unfog.config.toml import read_toml
from unfog.config.validate import check_request, check_source
from unfog.data.augmentation.augment import Augment
from unfog.data.dataset import Dataset
from unfog.doctor.images.image_checks import quick_check_images
from unfog.doctor.settings.settings_checks import check_settings
from unfog.errors import RequestError, RunError
from unfog.evaluation.features import open_features
from unfog.inference.tuned_sampler import omit_tuned_settings, report_dropped_levels
from unfog.pipeline.autoencoder_folder import copy_autoencoder_into_run
from unfog.pipeline.data_report import DATA_FILE, write_data_report
from unfog.pipeline.failed_shards import read_failed_shards
from unfog.pipeline.load_data import load_images
from unfog.planning.auto_settings import AutoSettings
from unfog.planning.disk import check_disk_room
from unfog.process.device import choose_device
from unfog.process.heartbeat import Heartbeat
from unfog.process.launch import write_launch_file
from unfog.process.run_folder import AUTOENCODER_FOLDER, RunFolder, next_folder
from unfog.process.signals import StopSignals
from unfog.reporting.findings import Finding
from unfog.reporting.progress import say, warn
from unfog.reporting.records import Events, finite_number, read_metrics
from unfog.runs.autoencoder_previews import export_autoencoder
from unfog.runs.init_weights import adopt_latent_statistics, load_initial_weights
from unfog.runs.metrics_hook import resolve_metrics
from unfog.runs.session import Session
from unfog.runs.workers import broadcast_config
from unfog.training.checkpoints import format as checkpoint
from unfog.training.checkpoints import rotation
from unfog.training.checkpoints.ema_snapshots import remove_after
from unfog.training.distributed.rendezvous import init_world, local_device
from unfog.training.optimizer_settings import Custom
from unfog.training.optimizers import check_resumable


def train(config: Config, out: Path | None = None) -> tuple[RunFolder, bool]:
    """Train a new run. Returns its folder, and whether it ran to its end (False: stopped by a signal, and saved).

    Raises:
        RequestError: the settings, the source or the folder will not do; found before training.
        RunError: training could not go on.
    """
    check_request(config)
    announce_custom_optimizer(config)
    folder = RunFolder(out or next_folder(config.source))
    device = choose_device(local_device(config.training.device))
    if config.evaluate.metrics:  # what is not there is missed at once, rather than after reading images
        open_features(config.evaluate.features, device, only_known=True)
    with (
        init_world(config.training.timeout) as world,
        StopSignals() as stop,
        folder.create_locked(config.source),
        Heartbeat(folder.path, stop, silent=True) as pulse,
    ):
        prepared, config = load_images(adopt_latent_statistics(config), stop)
        initial = load_initial_weights(config) if config.init.folder else None
        auto = AutoSettings(
            initial.config if initial else config, prepared.as_network_input.train, device, stop, world.size
        )
        auto.resolve()
        resolve_metrics(auto, prepared.train, device)
        stop.leave_if_requested()  # nothing has begun, so there is nothing to save
        if config.uses_latents:
            auto.config = replace(auto.config, autoencoder_folder=copy_autoencoder_into_run(folder, auto.config))
        session = Session(folder, auto.config, prepared, device, stop, pulse, initial and initial.state, world)
        room = check_disk_room(
            folder.checkpoints, session.state, session.config.checkpoint, session.steps, session.config.ema_snapshots
        )
        say(f"  {room}")
        write_launch_file(folder)
        folder.write_config(auto.config)
        folder.checkpoints.mkdir()
        broadcast_config(world, folder.checkpoints, auto.config)
        pulse.silent = False
        write_data_files(session)
        findings = [*quick_check_images(prepared, session.config), *setting_findings(session, device)]
        choices = [*(initial.choices if initial else ()), *auto.choices]
        return folder, finish_run(folder, session.run(choices, findings), auto.config)


def resume(folder: RunFolder, config: Config | None = None, force: bool = False) -> tuple[RunFolder, bool]:
    """Go on with a run from its newest whole checkpoint, or from its beginning where none was saved yet.

    Args:
        folder: the run.
        config: its stored configuration with changes, applied from here on.
        force: also make those changes that turn it into another run from here on.

    Raises:
        RequestError: a change that a run cannot make, other images than it began with, or another process at work.
        RunError: no checkpoint is whole, or training could not go on.
    """
    stored = folder.read_config()
    config = config or stored
    check_request(config)
    announce_custom_optimizer(config)
    report_dropped_levels(stored.sampler, config.sampler)
    check_source_exists(config.source)
    device = choose_device(local_device(config.training.device))
    timeout = config.training.timeout
    with init_world(timeout) as world, folder.locked(), StopSignals() as stop, Heartbeat(folder.path, stop) as pulse:
        saved, broken = find_resume_point(folder)
        # What trained it so far, whatever has been written into RUN/config.toml since.
        trained = stored if saved is None else read_toml(saved.folder / checkpoint.CONFIG, Config())
        pulse.step = saved.step if saved else 0
        check_changes(trained, config, force)
        prepared, config = load_images(config, stop, lost=read_failed_shards(saved))
        if saved and not saved.holds(checkpoint.EMA2) and config.ema_snapshots.every == 0:
            # Left open, as an earlier version had none: snapshots need a second average from the beginning on.
            config = replace(config, ema_snapshots=replace(config.ema_snapshots, every=-1))
        check_changes(trained, config, force)  # again, as only now it is known what the images are
        auto = resolve_for_resume(config, prepared, device, saved, stop, world.size)
        if saved and saved.images >= auto.config.training.images and not checkpoint.read_state(saved.folder)["due"]:
            broadcast_config(world, folder.checkpoints, None)
            apply_sampling_settings(folder, stored, config, saved.step)
            say(f"  {folder.path} is at its end, step {saved.step:,}; --steps or --budget makes it longer")
            if not (folder.path / AUTOENCODER_FOLDER).is_dir():  # it was killed after its last checkpoint
                finish_run(folder, True, auto.config)
            return folder, True
        if config.uses_latents:
            auto.config = replace(auto.config, autoencoder_folder=copy_autoencoder_into_run(folder, auto.config))
        # Of a run that has saved nothing yet.
        weights = load_initial_weights(auto.config).state if config.init.folder and saved is None else None
        session = Session(folder, auto.config, prepared, device, stop, pulse, weights, world)
        changes = omit_tuned_settings(check_changes(trained, auto.config, force), folder, auto.config.sampler)
        if any(line.startswith("evaluate.") for line in changes):
            session.evaluation.try_metrics()  # what would fail at the next evaluation fails now
        folder.write_config(auto.config)
        discard_after(folder, saved, broken)
        if config.fingerprint != trained.fingerprint or not (folder.path / DATA_FILE).exists():
            write_data_files(session)
        broadcast_config(world, folder.checkpoints, auto.config, read_failed_shards(saved))
        findings = setting_findings(session, device)
        done = session.run(auto.choices, findings, saved, changes)
        return folder, finish_run(folder, done, auto.config)


def apply_sampling_settings(folder: RunFolder, stored: Config, asked: Config, step: int) -> None:
    """Store what a run that is at its end draws by from now on, and record it; say what else was asked for in vain."""
    changed = replace(stored, **{name: getattr(asked, name) for name in SAMPLING})
    if lines := check_changes(stored, changed):
        folder.write_config(changed)
        with closing(Events(folder.events)) as events:
            for line in lines:
                say(f"  changed: {line}")
                events.write("changed", step, {"setting": line})
    # A length that is passed already is said by whoever asks; of averages, nobody may have asked.
    silent = (*(f"training.{name}: " for name in LENGTH), "ema_snapshots.every: 0 -> -1")
    for line in check_changes(changed, asked, force=True):
        if not line.startswith(silent):
            say(f"  not applied: {line}, as nothing is left to train")


def check_source_exists(source: str) -> None:
    """RequestError if the images of a run are no longer where they were."""
    if not Path(source).is_absolute():
        return
    try:
        check_source(source)
    except RequestError:
        raise RequestError(
            f"the images of this run were in {source}, which is not there; bring them back, or say where they are now: "
            "--source FOLDER"
        ) from None


def resolve_for_resume(
    config: Config,
    prepared: Dataset,
    device: torch.device,
    saved: checkpoint.CheckpointInfo | None,
    stop: StopSignals,
    processes: int,
) -> AutoSettings:
    """What a change may have left open, such as the length, settled for a run that goes on from `saved`."""
    auto = AutoSettings(config, prepared.as_network_input.train, device, stop, processes)
    auto.resolve_learning_rate()
    auto.resolve_microbatch(resuming=True)
    auto.resolve_precision()
    auto.resolve_length(seen=saved.images if saved else 0)
    auto.resolve_intervals()
    resolve_metrics(auto, prepared.train, device)
    stop.leave_if_requested()
    return auto


def discard_after(
    folder: RunFolder, saved: checkpoint.CheckpointInfo | None, broken: list[checkpoint.BrokenCheckpoint]
) -> None:
    """Set aside what is broken, which is said, and remove what lies after the checkpoint that a run goes on from."""
    rotation.remove_leftovers(folder.checkpoints, broken)
    remove_after(folder.averages, saved.step if saved else -1)
    for folder_and_reason in broken:
        say(str(folder_and_reason))


def announce_custom_optimizer(config: Config) -> None:
    """Say so where the settings, which may be somebody else's, have code run that is not ours.

    RequestError if that is no optimiser that can be gone on with, before images are read.
    """
    if isinstance(config.optimizer.method, Custom):
        path = config.optimizer.method.path
        if path:
            say(f"  optimizer: imports and runs {path}, as these settings ask for")
        check_resumable(config.optimizer.method)


def find_resume_point(folder: RunFolder) -> tuple[checkpoint.CheckpointInfo | None, list[checkpoint.BrokenCheckpoint]]:
    """The newest whole checkpoint, None before the first, and the broken ones that are passed over.

    Raises:
        RunError: there were steps, and there is nothing left of them.
    """
    folder.checkpoints.mkdir(exist_ok=True)
    rotation.restore_replaced(folder.checkpoints)
    saved, broken = checkpoint.newest(folder.checkpoints)
    if saved is None and any(finite_number(row.get("step")) > 0 for row in read_metrics(folder.metrics)):
        raise RunError(
            f"{folder.metrics} tells of steps, but there is nothing in {folder.checkpoints} to go on from; "
            "bring the checkpoints back, or train anew with another --out"
        )
    return saved, broken


def setting_findings(session: Session, device: torch.device) -> list[Finding]:
    """What is to be said of the settings; of a codec nothing, as what is known is known of diffusion."""
    if session.config.trains_autoencoder:
        return []
    return check_settings(session.config, session.prepared, device, folder=session.folder.path)


def finish_run(folder: RunFolder, done: bool, config: Config) -> bool:
    """What follows a run: of a codec, the folder that others train with. Returns `done`."""
    if config.trains_autoencoder:
        say(export_autoencoder(folder, config))
    return done


def write_data_files(session: Session) -> None:
    """Write down what became of every image, and what the network sees of them; a run goes on without."""
    try:
        config = session.config
        write_data_report(session.folder, session.prepared, Augment.from_settings(config.data), config.training.seed)
    except OSError as error:
        warn(f"data.json and contact-sheet.png could not be written: {error.strerror or error}")
