"""The surroundings of a run: its folder, device, ranks, stop signals and heartbeat, opened and closed together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch

from unfog.config.schema import Config
from unfog.process.device import choose_device
from unfog.process.heartbeat import Heartbeat
from unfog.process.run_folder import RunFolder
from unfog.process.signals import StopSignals
from unfog.training.distributed.rendezvous import init_world, local_device
from unfog.training.distributed.world import SINGLE_PROCESS, World
from unfog.training.hooks import TrainingHooks


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
