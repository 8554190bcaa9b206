"""`unfog train`: from a configuration to a run that has ended, on rank 0 and on the worker ranks."""

from __future__ import annotations

import math
import shlex
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from unfog.checks.images.image_checks import quick_check_images
from unfog.config.schema import Config
from unfog.config.toml import from_toml
from unfog.config.validate import check_request
from unfog.custom import PREFIX, consent, resolve_path, resolve_step
from unfog.data.buckets.stream import BucketStream
from unfog.data.dataset import Dataset
from unfog.data.stream import ImageStream
from unfog.device.compilation import compile_errors_explained
from unfog.diffusion.losses.pixel_loss import CustomLoss
from unfog.diffusion.weighting import CustomWeighting
from unfog.errors import Interrupted, LostProcess, NothingSaved, RunError
from unfog.evaluation.features import open_features
from unfog.files.safe_files import write_atomic
from unfog.models.given_network import SOURCE_FILE, GivenNetwork
from unfog.models.network_settings import CustomNetwork
from unfog.pipeline.build import (
    build_augmentation,
    build_intervals,
    build_loss,
    build_state,
    learn_captions,
    open_stream,
    open_task_stream,
)
from unfog.pipeline.latents import copy_autoencoder_into_run
from unfog.pipeline.load_data import load_images
from unfog.pipeline.skipped_images import FailureReporter
from unfog.planning.auto_settings import AutoSettings
from unfog.planning.disk import check_disk_room
from unfog.planning.intervals import Choice
from unfog.process import command_clock
from unfog.process.run_folder import RunFolder, next_folder
from unfog.process.signals import StopSignals
from unfog.process.torch_flags import caller_flags_kept
from unfog.reporting.findings import Finding
from unfog.reporting.log_settings import check_installed
from unfog.reporting.progress import say
from unfog.runs.evaluation_hook import resolve_metrics
from unfog.runs.previews import Previews
from unfog.runs.ranks import RunContext, StoppableHooks, broadcast_config, device_for, watch_outages
from unfog.runs.session import Session
from unfog.runs.weights.init_weights import adopt_latent_statistics, load_initial_weights
from unfog.text import sanitize
from unfog.training.checkpoints import snapshot
from unfog.training.checkpoints.format import CheckpointInfo
from unfog.training.checkpoints.mirror import check_mirror
from unfog.training.checkpoints.writer import CheckpointWriter, ShardStatusStore
from unfog.training.distributed.coordination import CoordinatedHooks
from unfog.training.distributed.world import World, init_world
from unfog.training.hooks import Task, TrainingHooks
from unfog.training.loop import LoopSettings, train
from unfog.training.optimizers import check_resumable
from unfog.training.settings import Custom
from unfog.training.state import TrainState


@caller_flags_kept()
def train_run(config: Config, out: Path | None = None, callbacks: Sequence[object] = ()) -> tuple[RunFolder, bool]:
    """Train a new run. Returns its folder, and False if a signal stopped training before its end.

    `callbacks` are objects with methods of `unfog.callbacks.Callback`.
    RequestError if the settings, the source or the folder cannot be used; RunError if training failed.
    """
    began = command_clock.began()
    check_request(config)
    check_custom_parts(config)
    folder = RunFolder(out or next_folder(config.source))
    config = with_mirror(config, folder, new=True)
    _check_metric_features(config)
    with _say_how_to_go_on(folder), RunContext.open(folder, config, new=True, callbacks=callbacks) as run:
        # Latents are normalised as the initial weights expect them, so their statistics come before the images.
        config = adopt_latent_statistics(config)
        dataset, facts = load_images(config, run.stop)
        config = config.adopt(facts)
        initial = load_initial_weights(config) if config.init.folder else None
        one_size, settings = dataset.of_one_size, initial.config if initial else config
        auto = AutoSettings(settings, one_size.as_network_input.train, run.device, run.stop, run.world.size)
        auto.began = began
        auto.resolve()
        resolve_metrics(auto, one_size.train, run.device)
        run.stop.leave_if_requested()  # nothing is written yet, so there is nothing to save
        config = copy_autoencoder_into_run(folder, auto.config)
        # Before the folder becomes a run: what does not fit together raises here, and leaves no folder behind.
        session = open_session(run, config, dataset, initial.state if initial else None)
        session.keep_budget(auto)
        _create_run(session)
        session.write_data_files()
        choices = [*(initial.choices if initial else ()), *auto.choices]
        findings = [*quick_check_images(dataset, config), *session.settings_findings()]
        done = train_session(session, choices, findings)
        Previews.of(config).export(folder, config)
        return folder, done


def open_session(
    run: RunContext, config: Config, dataset: Dataset, weights: dict[str, torch.Tensor] | None = None
) -> Session:
    """Build the training state from a configuration with no setting left open, and a session that trains it.

    The network begins with `weights`, or with fresh ones. RequestError if settings do not fit together.
    """
    config.sampler.visits(config.diffusion.schedule)  # raises unless the sampler fits the noise schedule
    check_installed(config.log.sinks)
    state = build_state(config, run.device, weights, run.world.init_device(config.training.shard, run.device))
    learn_captions(config, dataset)
    return Session(run, config, dataset, state)


def train_session(
    session: Session,
    choices: Sequence[Choice],
    findings: Sequence[Finding] = (),
    saved: CheckpointInfo | None = None,
    changes: Sequence[str] = (),
) -> bool:
    """Train from the checkpoint `saved`, or from the beginning, until the end of the run (True) or a stop (False).

    Automatic `choices`, `changes` of settings and bad `findings` of the checks are printed and recorded first.
    """
    device = session.context.device
    # The loop seeds torch's global generators for every micro-batch; those of the caller are left as they were.
    own_generators = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with session.recording(choices, findings, saved, changes), own_generators:
        world, saved_shards = session.context.world, session.sharded_from
        run_training_loop(session.config, session.state, session.stream, session, world, saved_shards)
    return session.done


def run_training_loop(
    config: Config,
    state: TrainState,
    stream: ImageStream | BucketStream,
    hooks: TrainingHooks,
    world: World,
    saved: Path | None = None,
) -> None:
    """Train from the state of rank 0, to the end or until one rank is asked to stop.

    The state of rank 0 is broadcast; a sharded one is read from its checkpoint `saved`. LostProcess if another rank
    ended or does not answer.
    """
    # A signal must not interrupt one rank alone while the others wait for it: they agree to stop.
    with hooks.defer_interrupts() if world.size > 1 else nullcontext(), _lost_process_explained(world):
        world.init_process_group(state.precision.device, config.training.timeout)
        if config.training.is_sharded(world.size):
            world.shard_state(state, saved)
        world.broadcast_state(state)
        if world.size > 1 and (own := world.batch_range(0, config.training.batch)):
            # Otherwise each rank would prefetch the images of all of them.
            stream.prefetch_share(own.start, len(own), config.training.batch, state.seen)
        settings = LoopSettings(config.training, config.optimizer, build_intervals(config, state))
        task = Task(
            open_task_stream(stream, state.precision.device),
            build_augmentation(config),
            build_loss(config, state),
        )
        # With several ranks, the others must not be left waiting.
        with (
            suppress(Interrupted) if world.size == 1 else nullcontext(),
            compile_errors_explained("resume the run", hooks.stop_requested),
        ):
            train(settings, state, task, hooks, world)
        CoordinatedHooks(hooks, world).finish(state)


@contextmanager
def _lost_process_explained(world: World) -> Iterator[None]:
    """Raise LostProcess in place of torch's error if another rank ended or does not answer."""
    try:
        yield
    except RuntimeError as error:
        if world.size == 1 or not _is_lost_process(error):
            raise
        raise LostProcess(
            f"rank {world.rank} has lost another rank, which ended or does not answer; unfog resume continues "
            "from the newest checkpoint, as torchrun does by itself with --max-restarts (--debug shows torch's error)"
        ) from error


def _is_lost_process(error: BaseException) -> bool:
    """Return whether this is how torch reports that another process is gone, or does not answer."""
    named = any(name in str(error).lower() for name in ("gloo", "nccl"))
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and named)


@contextmanager
def _say_how_to_go_on(folder: RunFolder) -> Iterator[None]:
    """Name the command that continues a run whose start was stopped. NothingSaved if there is no run yet."""
    try:
        yield
    except KeyboardInterrupt as stopped:
        if folder.config_file.is_file():
            say(f"  next      unfog resume {shlex.quote(str(folder.path))}")
        elif isinstance(stopped, Interrupted):
            raise NothingSaved(*stopped.args) from stopped
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
    run.heartbeat.begin()
    if isinstance(config.network, GivenNetwork):
        write_atomic(folder.path / SOURCE_FILE, config.network.source_text().encode(), folder.path)
    folder.checkpoints.mkdir()
    broadcast_config(run.world, folder.checkpoints, config)  # last, as worker ranks look for the folders at once
    run.stop.saves = True


def check_custom_parts(config: Config) -> None:
    """Import the custom parts before any image is read, and announce them: the settings may be somebody else's.

    RequestError if one cannot be imported, or if training with the optimizer could not be resumed.
    """
    if isinstance(config.network, CustomNetwork):
        config.network.load()
    if isinstance(config.diffusion.weighting, CustomWeighting):
        config.diffusion.weighting.try_out()
    if isinstance(config.diffusion.loss, CustomLoss):
        config.diffusion.loss.try_out(config.representation.probable_shape(), config.data.has_unknown)
    if config.sampler.kind.startswith(PREFIX):
        resolve_step(config.sampler.kind)
    for tracker in config.log.sinks:
        if tracker.startswith(PREFIX):
            resolve_path(tracker, "a tracker")
    if isinstance(config.optimizer.method, Custom):
        check_resumable(config.optimizer.method)


def with_mirror(config: Config, folder: RunFolder, new: bool = False) -> Config:
    """Return the settings with the absolute path of the mirror, if there is one. RequestError if it cannot be used."""
    place = check_mirror(folder.path, config.checkpoint.mirror, new)
    if place is None:
        return config
    return replace(config, checkpoint=replace(config.checkpoint, mirror=str(place.absolute())))


class _WorkerHooks(StoppableHooks):
    """Hooks of a worker rank: it writes its part of sharded checkpoints, and reports unusable images to rank 0."""

    def __init__(self, stop: StopSignals, dataset: Dataset, world: World, config: Config):
        super().__init__(stop)
        self._dataset, self._world, self._config = dataset, world, config
        self._reported: set[tuple[str, ...]] = set()
        self._writer: CheckpointWriter | None = None

    def log(self, step: int, images: int, record: dict[str, Any]) -> None:
        """Send rank 0 the images and shards that could not be read here since the last log."""
        # Each rank reads other images, and rank 0 alone writes the record.
        found = FailureReporter.on_this_rank(self._dataset.train)
        self._world.send_report([list(one) for one in sorted(found - self._reported)])
        self._reported |= found

    def save_shards(self, state: TrainState, for_best: bool, place: str, post: ShardStatusStore) -> None:
        self.finish(math.inf)  # rank 0 has seen the last checkpoint complete
        if not state.non_finite():
            self._writer = CheckpointWriter(Path(place), self._config.checkpoint)
            self._writer.submit(snapshot.take_snapshot(state, state.seen // self._config.training.batch), post)

    def finish(self, seconds: float) -> None:
        """Wait at most so long for the checkpoint that is being written."""
        deadline = time.monotonic() + seconds
        while self._writer is not None and self._writer.busy and time.monotonic() < deadline:
            time.sleep(0.01)


def run_worker() -> None:
    """Train as a worker rank, to the end of the run or until rank 0 ends. RunError if this rank sees other images."""
    with init_world() as world:
        received: dict[str, Any] = world.broadcast_object({})
        if not received:  # the run is at its end already
            return
        config = from_toml(received["config"], Config())
        for path in received["trusted"]:  # by the person who has started rank 0
            consent.give(path)
        with StopSignals(quiet=True) as stop:
            if config.training.shard:
                checkpoints = Path(received["checkpoints"])
                check_visible(checkpoints, "where each rank of a sharded run writes its part of a checkpoint", world)
            for folder in config.representation.folders:
                check_visible(folder, "the run's autoencoder", world)
            dataset, found = load_images(config, stop, lost=received["lost"])
            if found.fingerprint != config.fingerprint:
                raise RunError(
                    f"rank {world.rank} finds other images in {sanitize(config.source)} than rank 0 does; each machine "
                    "needs the same ones there"
                )
            _train_worker(config, dataset, stop, world)


def check_visible(folder: Path, what: str, world: World) -> None:
    """RunError if this rank does not see a part of the run folder that it needs."""
    if not folder.is_dir():
        raise RunError(
            f"rank {world.rank} ({socket.gethostname()}) does not see {folder}, {what}; give an --out on a disk that "
            "all machines share"
        )


def _train_worker(config: Config, dataset: Dataset, stop: StopSignals, world: World) -> None:
    device = device_for(config)
    # Ranks on one machine compute on devices of their own; the configuration names that of rank 0.
    own_config = replace(config, training=replace(config.training, device=str(device)))
    state = build_state(own_config, device, home=world.init_device(config.training.shard, device))
    learn_captions(own_config, dataset)
    stream = open_stream(dataset, config)
    hooks = _WorkerHooks(stop, dataset, world, config)
    watch_outages(dataset, config, world, stop)

    @cache
    def previews() -> Previews:
        return Previews.build(own_config, dataset, state, stop, world)

    if not config.training.shard:  # else this rank never has the whole network
        world.part = lambda job, rank, ranks: previews().part(job, rank, ranks)
    try:
        run_training_loop(config, state, stream, hooks, world)
    finally:
        hooks.finish(0.8 * config.training.grace)  # a checkpoint counts when all ranks have written their parts
        stream.close()
