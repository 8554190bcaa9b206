"""The ranks of a run: the context of each, and the messages of rank 0 to the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unfog.callbacks import Callbacks
from unfog.config.schema import Config
from unfog.config.toml import to_toml
from unfog.custom import consent
from unfog.data.dataset import Dataset
from unfog.data.lazy import outage_of
from unfog.files.locks import FolderLock
from unfog.pipeline.load_data import OutageNotice
from unfog.process.console_log import console_log
from unfog.process.device import choose_device
from unfog.process.heartbeat import Heartbeat
from unfog.process.run_folder import RunFolder
from unfog.process.signals import StopSignals
from unfog.reporting.progress import say
from unfog.training.distributed.process_group import local_device
from unfog.training.distributed.world import SINGLE_PROCESS, World, init_world
from unfog.training.hooks import TrainingHooks


def device_for(config: Config) -> torch.device:
    """Return the device on which this rank computes. RequestError if the machine does not have it."""
    return choose_device(local_device(config.training.device))


@dataclass(frozen=True)
class RunContext:
    """Everything around the training of a run that is not a setting, an image or a weight."""

    folder: RunFolder
    device: torch.device
    stop: StopSignals
    heartbeat: Heartbeat
    world: World = SINGLE_PROCESS
    callbacks: Callbacks = Callbacks()
    lock: FolderLock | None = None
    """Of the run folder."""

    @property
    def lost(self) -> bool:
        """True if another process was found to have taken over the run folder."""
        return self.lock is not None and self.lock.lost

    @classmethod
    @contextmanager
    def open(
        cls, folder: RunFolder, config: Config, new: bool = False, callbacks: Sequence[object] = ()
    ) -> Iterator[RunContext]:
        """Join the other ranks, lock the run folder, and turn signals into requests to stop.

        A `new` folder is created, which is not a run yet. Until the caller makes it one, its heartbeat is `silent`, and
        a stop saves nothing.
        RequestError if there is no such device, or the folder cannot be used.
        """
        device = device_for(config)
        with (
            init_world(config.training.timeout) as world,
            StopSignals(saves=not new) as stop,
            folder.create_locked(config.source) if new else folder.locked() as lock,
            # After the lock: it writes into the folder, which another process may still be training in.
            Heartbeat(folder.path, stop, silent=new) as heartbeat,
            console_log(folder),
        ):
            yield cls(folder, device, stop, heartbeat, world, Callbacks(callbacks, stop.request, stop), lock)


class StoppableHooks(TrainingHooks):
    """Hooks that end training when a signal or a STOP file requests it."""

    def __init__(self, stop: StopSignals):
        self.stop = stop

    def stop_requested(self) -> bool:
        return self.stop()

    def defer_interrupts(self) -> AbstractContextManager[None]:
        return self.stop.defer_interrupts()


def watch_outages(dataset: Dataset, config: Config, world: World, stop: StopSignals, **notice: Any) -> None:
    """Report outages of the images of a run on this rank; `notice` are further arguments of `OutageNotice`."""
    one_size = dataset.of_one_size  # all buckets are read from one source
    for images in (one_size.train, one_size.as_network_input.train):
        if (outage := outage_of(images)) is None:
            continue
        if world.size > 1:  # the process group does not wait for longer
            outage.patience = min(outage.patience, config.training.timeout)
        world.announce_stop(lambda: stop.received is not None)
        outage.on_wait = OutageNotice(
            stop, outage.patience, set_phase=world.set_phase, stopped_elsewhere=world.stopped_elsewhere, **notice
        )


def broadcast_config(
    world: World, checkpoints: Path, config: Config | None, failed_shards: Mapping[str, str] | None = None
) -> None:
    """Send the worker ranks the configuration of the run, with every setting resolved; None if the run is complete.

    `checkpoints` is their folder, which exists. `failed_shards` are those that a resumed run went on without, by name.
    """
    if world.size == 1:
        return
    lost = None if failed_shards is None else dict(failed_shards)
    place = str(checkpoints.absolute())  # as other ranks may run in another folder
    if config is None:
        world.broadcast_object({})
        return
    trusted = consent.given_paths()
    world.broadcast_object({"config": to_toml(config), "trusted": trusted, "lost": lost, "checkpoints": place})


def say_what_resume_promises(config: Config, device: torch.device) -> None:
    """Print a note if the resume is not bit-exact."""
    if config.training.deterministic == "off" and device.type == "cuda":
        say("  deterministic = off: a resume continues the same state, but is not bit-identical to a run without it")
