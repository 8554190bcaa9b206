"""`unfog resume RUN --verify`: train a part of the run once more, and see that it comes out the same."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor

from unfog.config.resume_rules import settings_digests
from unfog.config.schema import Config
from unfog.data.dataset import Dataset
from unfog.data.stream import ImageStream
from unfog.errors import Interrupted, RequestError, RunError
from unfog.pipeline.build import build_augmentation, build_loss, build_state
from unfog.pipeline.load_data import load_images
from unfog.process.device import choose_device
from unfog.process.run_folder import RunFolder
from unfog.process.signals import StopSignals
from unfog.reporting.progress import Progress
from unfog.text import sanitize
from unfog.training.checkpoints import format as checkpoint
from unfog.training.hooks import TrainingHooks
from unfog.training.loop import Intervals, train
from unfog.training.state import TrainState


class Replay(TrainingHooks):
    """A run that keeps nothing, goes back where the run did, and ends at a given image."""

    def __init__(self, folder: RunFolder, state: TrainState, until: int, patience: int, stop: StopSignals):
        self.folder, self.state, self.until, self.patience, self.stop = folder, state, until, patience, stop
        self.progress: Progress

    def stop_requested(self) -> bool:
        """At the end, or when a person wants to stop."""
        return self.stop() or self.state.seen >= self.until

    def roll_back(self, state: TrainState, reason: str) -> str:
        """As the run itself did, if its last good checkpoint is still there."""
        good = checkpoint.find_rollback_checkpoint(self.folder.checkpoints, state, self.patience)
        if good is None:
            raise RequestError(f"the run went back at image {state.seen:,} to a checkpoint that is gone: no comparison")
        checkpoint.roll_back(good.folder, state)
        return str(good.folder)

    def on_step_end(self, step: int) -> None:
        """Show progress."""
        self.progress.update(step)

    def defer_interrupts(self) -> AbstractContextManager[None]:
        """A stretch that a stop waits for."""
        return self.stop.defer_interrupts()


def verify(folder: RunFolder) -> str:
    """Replay from the checkpoint before the newest one, and compare with the newest one to the bit. Changes nothing.

    Returns:
        A line on what was compared.

    Raises:
        RequestError: there is nothing to replay, settings changed on the way, or another process is training.
        RunError: it came out differently.
        Interrupted: a signal came.
    """
    config = folder.read_config()
    with StopSignals(saves=False) as stop, folder.locked():
        first, last = two_newest(folder, config)
        prepared, now = load_images(config, stop)
        if now.fingerprint != config.fingerprint:
            raise RequestError(
                f"the images in {sanitize(config.source)} are not those of this run, so it cannot be repeated"
            )
        state = replay(folder, config, prepared, first, last, stop)
        different = compare({f: {n: t.cpu() for n, t in part.items()} for f, part in state.tensors().items()}, last)
    what = f"steps {first.step:,} to {last.step:,} of {folder.path}"
    if different:
        raise RunError(
            f"{what}, trained once more, came out differently: {different[0]} and {len(different) - 1} other tensors. "
            f"They were made by {last.made_on}; another machine may round otherwise, the same one should not"
        )
    return f"{what}, trained once more, came out equal to the bit: weights, average and optimiser"


def replay(
    folder: RunFolder,
    config: Config,
    prepared: Dataset,
    first: checkpoint.CheckpointInfo,
    last: checkpoint.CheckpointInfo,
    stop: StopSignals,
) -> TrainState:
    """Train from one checkpoint to the position of a later one. Interrupted if a signal came."""
    state = build_state(config, choose_device(config.training.device))
    checkpoint.load(first.folder, state)
    state.due = []
    run = Replay(folder, state, last.images, config.training.patience, stop)
    with Progress("replaying, step", last.step, start=first.step) as progress:
        run.progress = progress
        train(
            replace(config.training, rollbacks=10**9),  # whether there were too many is not asked here
            config.optimizer,
            Intervals(log=0, preview=0, evaluate=0, checkpoint=0),
            state,
            ImageStream(prepared.as_network_input.train, config.training.seed),
            build_augmentation(config),
            build_loss(config, state.levels),
            run,
        )
    if stop():
        raise Interrupted
    if checkpoint.read_state(last.folder)["guard"]["roll_backs"] > state.guard.roll_backs:
        run.roll_back(state, "")  # the last thing that was done before it was saved
    return state


def two_newest(folder: RunFolder, config: Config) -> tuple[checkpoint.CheckpointInfo, checkpoint.CheckpointInfo]:
    """The newest whole checkpoint and the one before. RequestError if what lies between cannot be repeated."""
    found, _ = checkpoint.list_checkpoints(folder.checkpoints)
    whole: list[checkpoint.CheckpointInfo] = []
    for saved in reversed(found):
        if len(whole) < 2 and checkpoint.find_damage(saved) is None:
            whole.insert(0, saved)
    if len(whole) < 2:
        raise RequestError(f"{folder.checkpoints} holds {len(whole)} whole checkpoint(s); two are needed to compare")
    first, last = whole
    cut = {checkpoint.read_state(saved.folder).get("microbatch", 0) for saved in whole}
    if len(cut) > 1:
        raise RequestError(
            f"memory ran out between steps {first.step:,} and {last.step:,}, nobody knows where, so these cannot be "
            "repeated; go on training until there are two newer checkpoints"
        )
    keys = {checkpoint.read_state(saved.folder)["keys"].get("repeat") for saved in whole}
    if keys != {settings_digests(config)["repeat"]}:
        raise RequestError(
            f"settings were changed between steps {first.step:,} and {last.step:,}, so these cannot be repeated; go on "
            "training until there are two newer checkpoints"
        )
    return first, last


def compare(tensors: dict[str, dict[str, Tensor]], saved: checkpoint.CheckpointInfo) -> list[str]:
    """Names of the tensors that are not those of a checkpoint, bit for bit; an earlier version saved one average."""
    different = []
    for file, mine in tensors.items():
        if not saved.holds(f"{file}.safetensors"):
            continue
        theirs = checkpoint.read_tensors(saved.folder / f"{file}.safetensors")
        for name in sorted(mine.keys() | theirs.keys()):
            if name not in mine or name not in theirs or not torch.equal(mine[name], theirs[name]):
                different.append(f"{file}: {name}")
    return different
