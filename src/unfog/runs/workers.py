"""The processes of a run besides the first one: they train with it, and leave all else to it."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from unfog.config.schema import Config
from unfog.config.toml import from_toml, to_toml
from unfog.data.dataset import Dataset
from unfog.data.stream import ImageStream
from unfog.errors import LostProcess, RunError
from unfog.pipeline.build import build_augmentation, build_intervals, build_loss, build_state
from unfog.pipeline.failed_shards import failures_on_this_rank
from unfog.pipeline.load_data import load_images
from unfog.process.device import choose_device
from unfog.process.signals import StopSignals
from unfog.text import sanitize
from unfog.training.checkpoints import snapshot
from unfog.training.checkpoints.sharded import ShardStatusStore
from unfog.training.checkpoints.writer import CheckpointWriter
from unfog.training.distributed.coordination import CoordinatedHooks
from unfog.training.distributed.rendezvous import init_world, local_device
from unfog.training.distributed.world import World, is_lost_process
from unfog.training.hooks import Rank, TrainingHooks
from unfog.training.loop import train
from unfog.training.state import TrainState


class WorkerHooks(TrainingHooks):
    """A run that another process records. A signal that comes here counts there."""

    def __init__(self, stop: StopSignals, prepared: Dataset, world: World, config: Config):
        self.stop, self.prepared, self.world, self.config = stop, prepared, world, config
        self.told: set[tuple[str, ...]] = set()
        self.writer: CheckpointWriter | None = None

    def log(self, step: int, images: int, record: dict[str, Any]) -> None:
        """Tell the first process which images of this one's share could not be decoded, and which shards not read."""
        found = failures_on_this_rank(self.prepared.train)
        self.world.send_report([list(one) for one in sorted(found - self.told)])
        self.told |= found

    def save_shards(self, state: TrainState, for_best: bool, place: str, post: ShardStatusStore) -> None:
        """Copy the rows that are here, and have them written."""
        self.finish(math.inf)  # which the first process has seen the end of
        if not state.non_finite():
            self.writer = CheckpointWriter(Path(place), self.config.checkpoint)
            self.writer.submit(snapshot.take_snapshot(state, state.seen // self.config.training.batch), post)

    def finish(self, seconds: float) -> None:
        """Wait for so long for what is on its way to the disk."""
        deadline = time.monotonic() + seconds
        while self.writer is not None and self.writer.busy and time.monotonic() < deadline:
            time.sleep(0.01)

    def stop_requested(self) -> bool:
        """Whether this process was asked to stop."""
        return self.stop()

    def defer_interrupts(self) -> AbstractContextManager[None]:
        """A stretch that a stop waits for."""
        return self.stop.defer_interrupts()


def run_worker() -> None:
    """Be one of the processes besides the first, to the end of the run or of this session.

    Raises:
        RunError: the first process failed, or the images here are other ones.
    """
    with init_world() as world:
        nothing: dict[str, Any] = {}
        told = world.broadcast_object(nothing)
        if not told:
            return
        config = from_toml(told["config"], Config())
        with StopSignals(quiet=True) as stop:
            if config.training.shard:
                checkpoints = Path(told["checkpoints"])
                check_visible(checkpoints, "where each process of a divided run writes its part of a checkpoint", world)
            if config.uses_latents:
                check_visible(Path(config.autoencoder_folder), "the run's codec", world)
            prepared, found = load_images(config, stop, lost=told["lost"])
            if found.fingerprint != config.fingerprint:
                raise RunError(
                    f"rank {world.rank} finds other images in {sanitize(config.source)} than rank 0 does; each machine "
                    "needs the same ones there"
                )
            _train_worker(config, prepared, stop, world)


def check_visible(folder: Path, what: str, world: World) -> None:
    """RunError if this process does not see a part of the run folder that it needs."""
    if not folder.is_dir():
        raise RunError(
            f"rank {world.rank} ({socket.gethostname()}) does not see {folder}, {what}; give an --out on a disk that "
            "all machines share"
        )


def _train_worker(config: Config, prepared: Dataset, stop: StopSignals, world: World) -> None:
    """Train what the first process trains, whose state comes from there."""
    device = choose_device(local_device(config.training.device))
    settled = replace(config, training=replace(config.training, device=str(device)))
    state = build_state(settled, device, home=world.init_device(config.training.shard, device))
    stream = ImageStream(prepared.as_network_input.train, config.training.seed)
    follower = WorkerHooks(stop, prepared, world, config)
    try:
        run_training_loop(config, state, stream, follower, world)
    finally:
        follower.finish(0.8 * config.training.grace)  # a checkpoint is one when all have written their parts
        stream.close()


def broadcast_config(
    world: World, checkpoints: Path, config: Config | None, given_up: Mapping[str, str] | None = None
) -> None:
    """Tell the other processes what is trained.

    Args:
        checkpoints: the folder of checkpoints, which is there.
        config: settled settings; None, if there is nothing to do.
        given_up: as of `shards.lost_shards`, the shards that the run had gone on without.
    """
    told = None if given_up is None else dict(given_up)
    place = str(checkpoints.absolute())
    world.broadcast_object({} if config is None else {"config": to_toml(config), "lost": told, "checkpoints": place})


def run_training_loop(
    config: Config, state: TrainState, stream: ImageStream, run: Rank, world: World, saved: Path | None = None
) -> None:
    """Train from where the first process is, to the end or until one of them is asked to stop.

    Args:
        saved: for the first process, the checkpoint that a state to be divided is read from; None if it has it.

    Raises:
        RunError: as the loop, or another process is gone.
    """
    # A signal must not cut through one process alone, so that the others wait for it: they agree to stop.
    with run.defer_interrupts() if world.size > 1 else nullcontext():
        try:
            world.init_process_group(state.precision.device, config.training.timeout)
            if config.training.is_sharded(world.size):
                world.shard_state(state, saved)
            world.broadcast_state(state)
            if world.size > 1 and (own := world.batch_range(0, config.training.batch)):
                stream.prefetch_share(
                    own.start, len(own), config.training.batch, state.seen
                )  # read ahead no other's images
            train(
                config.training,
                config.optimizer,
                build_intervals(config, state),
                state,
                stream,
                build_augmentation(config),
                build_loss(config, state.levels),
                run,
                world,
            )
            CoordinatedHooks(run, world).finish(state)
        except RuntimeError as error:
            if world.size == 1 or not is_lost_process(error):
                raise
            raise LostProcess(
                f"rank {world.rank} has lost another process, which ended or does not answer; unfog resume goes on "
                f"from the newest checkpoint, as torchrun does by itself with --max-restarts ({str(error)[:160]})"
            ) from error
