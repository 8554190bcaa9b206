"""The ranks of a run: what surrounds each, what rank 0 tells the others, and the training loop on all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from unfog.callbacks import Callbacks
from unfog.compile_cache import compile_errors_explained
from unfog.config.schema import Config
from unfog.config.toml import to_toml
from unfog.data.stream import ImageStream
from unfog.errors import LostProcess
from unfog.pipeline.build import build_augmentation, build_intervals, build_loss, open_task_stream
from unfog.process.device import choose_device
from unfog.process.heartbeat import Heartbeat
from unfog.process.run_folder import RunFolder
from unfog.process.signals import StopSignals
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
    callbacks: Callbacks = Callbacks()


def device_for(config: Config) -> torch.device:
    """Return the device on which this rank computes. RequestError if the machine does not have it."""
    return choose_device(local_device(config.training.device))


@contextmanager
def open_run(
    folder: RunFolder, config: Config, new: bool = False, callbacks: Sequence[object] = ()
) -> Iterator[RunContext]:
    """Join the other ranks, lock the run folder, and turn signals into requests to stop.

    A `new` folder is created; its heartbeat writes nothing until `silent` is cleared, as it is not a run yet.
    RequestError if there is no such device, or the folder cannot be used.
    """
    device = device_for(config)
    with (
        init_world(config.training.timeout) as world,
        StopSignals() as stop,
        folder.create_locked(config.source) if new else folder.locked(),
        # After the lock: it writes into the folder, which another process may still be training in.
        Heartbeat(folder.path, stop, silent=new) as heartbeat,
    ):
        yield RunContext(folder, device, stop, heartbeat, world, Callbacks(callbacks, stop.request, stop))


class StoppableHooks(TrainingHooks):
    """Hooks that end training when a signal or a STOP file requests it."""

    def __init__(self, stop: StopSignals):
        self.stop = stop

    def stop_requested(self) -> bool:
        return self.stop()

    def defer_interrupts(self) -> AbstractContextManager[None]:
        return self.stop.defer_interrupts()


def broadcast_config(
    world: World, checkpoints: Path, config: Config | None, failed_shards: Mapping[str, str] | None = None
) -> None:
    """Send the worker ranks the configuration of the run, with none of its settings left open; None if all is done.

    `checkpoints` is their folder, which exists. `failed_shards` are those that a resumed run went on without, by name.
    """
    lost = None if failed_shards is None else dict(failed_shards)
    place = str(checkpoints.absolute())  # as other ranks may run in another folder
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
            task = Task(
                open_task_stream(stream, state.precision.device),
                build_augmentation(config),
                build_loss(config, state.levels),
            )
            with compile_errors_explained("resume the run"):
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
