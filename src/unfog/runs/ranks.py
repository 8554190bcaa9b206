"""The ranks of a run: rank 0 with folder, signals and heartbeat, and worker ranks, which only train with it."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from unfog.config.schema import Config
from unfog.config.toml import from_toml, to_toml
from unfog.data.dataset import Dataset
from unfog.data.stream import ImageStream
from unfog.errors import LostProcess, RunError
from unfog.pipeline.build import build_augmentation, build_intervals, build_loss, build_state
from unfog.pipeline.load_data import load_images
from unfog.pipeline.skipped_images import failures_on_this_rank
from unfog.process.device import choose_device
from unfog.process.heartbeat import Heartbeat
from unfog.process.run_folder import RunFolder
from unfog.process.signals import StopSignals
from unfog.text import sanitize
from unfog.training.checkpoints import snapshot
from unfog.training.checkpoints.writer import CheckpointWriter, ShardStatusStore
from unfog.training.distributed.coordination import CoordinatedHooks
from unfog.training.distributed.process_group import local_device
from unfog.training.distributed.world import SINGLE_PROCESS, World, init_world
from unfog.training.hooks import Task, TrainingHooks
from unfog.training.loop import LoopSettings, train
from unfog.training.state import TrainState


@dataclass(frozen=True)
class RunContext:
    """Everything around the training of a run that is not a setting, an image or a weight."""

    folder: RunFolder
    device: torch.device
    stop: StopSignals
    heartbeat: Heartbeat
    world: World = SINGLE_PROCESS


def device_for(config: Config) -> torch.device:
    """Return the device on which this rank computes. RequestError if the machine does not have it."""
    return choose_device(local_device(config.training.device))


@contextmanager
def open_run(folder: RunFolder, config: Config, new: bool = False) -> Iterator[RunContext]:
    """Join the other ranks, lock the run folder, and turn signals into requests to stop.

    A `new` folder is created; its heartbeat writes nothing until `silent` is cleared, as it is not a run yet.
    RequestError if there is no such device, or the folder cannot be used.
    """
    device = device_for(config)
    with (
        init_world(config.training.timeout) as world,
        StopSignals() as stop,
        folder.create_locked(config.source) if new else folder.locked(),
        Heartbeat(folder.path, stop, silent=new) as heartbeat,
    ):
        yield RunContext(folder, device, stop, heartbeat, world)


class StoppableHooks(TrainingHooks):
    """Hooks that end training when a signal or a STOP file requests it."""

    def __init__(self, stop: StopSignals):
        self.stop = stop

    def stop_requested(self) -> bool:
        return self.stop()

    def defer_interrupts(self) -> AbstractContextManager[None]:
        return self.stop.defer_interrupts()


class _WorkerHooks(StoppableHooks):
    """Hooks of a worker rank: it writes its part of sharded checkpoints, and reports unusable images to rank 0."""

    def __init__(self, stop: StopSignals, dataset: Dataset, world: World, config: Config):
        super().__init__(stop)
        self._dataset, self._world, self._config = dataset, world, config
        self._reported: set[tuple[str, ...]] = set()
        self._writer: CheckpointWriter | None = None

    def log(self, step: int, images: int, record: dict[str, Any]) -> None:
        """Send rank 0 the images and shards that could not be read here since the last log."""
        found = failures_on_this_rank(self._dataset.train)
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
        with StopSignals(quiet=True) as stop:
            if config.training.shard:
                checkpoints = Path(received["checkpoints"])
                _check_visible(checkpoints, "where each rank of a sharded run writes its part of a checkpoint", world)
            if config.uses_latents:
                _check_visible(Path(config.autoencoder_folder), "the run's autoencoder", world)
            dataset, found = load_images(config, stop, lost=received["lost"])
            if found.fingerprint != config.fingerprint:
                raise RunError(
                    f"rank {world.rank} finds other images in {sanitize(config.source)} than rank 0 does; each machine "
                    "needs the same ones there"
                )
            _train_worker(config, dataset, stop, world)


def _check_visible(folder: Path, what: str, world: World) -> None:
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
    stream = ImageStream(dataset.as_network_input.train, config.training.seed)
    hooks = _WorkerHooks(stop, dataset, world, config)
    try:
        run_training_loop(config, state, stream, hooks, world)
    finally:
        hooks.finish(0.8 * config.training.grace)  # a checkpoint counts when all ranks have written their parts
        stream.close()


def broadcast_config(
    world: World, checkpoints: Path, config: Config | None, failed_shards: Mapping[str, str] | None = None
) -> None:
    """Send the worker ranks the configuration of the run, with none of its settings left open; None if all is done.

    `checkpoints` is their folder, which exists. `failed_shards` are those that a resumed run went on without, by name.
    """
    lost = None if failed_shards is None else dict(failed_shards)
    place = str(checkpoints.absolute())
    world.broadcast_object({} if config is None else {"config": to_toml(config), "lost": lost, "checkpoints": place})


def run_training_loop(
    config: Config,
    state: TrainState,
    stream: ImageStream,
    hooks: TrainingHooks,
    world: World,
    saved: Path | None = None,
) -> None:
    """Train from the state of rank 0, to the end or until one rank is asked to stop.

    The state of rank 0 is broadcast; a sharded one is read from its checkpoint `saved`. LostProcess if another rank
    ended or does not answer.
    """
    # A signal must not interrupt one rank alone while the others wait for it: they agree to stop.
    with hooks.defer_interrupts() if world.size > 1 else nullcontext():
        try:
            world.init_process_group(state.precision.device, config.training.timeout)
            if config.training.is_sharded(world.size):
                world.shard_state(state, saved)
            world.broadcast_state(state)
            if world.size > 1 and (own := world.batch_range(0, config.training.batch)):
                # Otherwise each rank would prefetch the images of all of them.
                stream.prefetch_share(own.start, len(own), config.training.batch, state.seen)
            settings = LoopSettings(config.training, config.optimizer, build_intervals(config, state))
            task = Task(stream, build_augmentation(config), build_loss(config, state.levels))
            train(settings, state, task, hooks, world)
            CoordinatedHooks(hooks, world).finish(state)
        except RuntimeError as error:
            if world.size == 1 or not _is_lost_process(error):
                raise
            raise LostProcess(
                f"rank {world.rank} has lost another rank, which ended or does not answer; unfog resume continues "
                f"from the newest checkpoint, as torchrun does by itself with --max-restarts ({str(error)[:160]})"
            ) from error


def _is_lost_process(error: BaseException) -> bool:
    """Return whether this is how torch reports that another process is gone, or does not answer."""
    named = any(name in str(error).lower() for name in ("gloo", "nccl"))
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and named)
