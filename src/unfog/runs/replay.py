"""`unfog resume --verify`: train the steps between the last two checkpoints again, and compare them bit by bit."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import torch

from unfog.config.resume_rules import settings_digests
from unfog.config.schema import Config
from unfog.data.dataset import Dataset
from unfog.errors import Interrupted, RequestError, RunError
from unfog.inference.loaded_run import load_run_images
from unfog.pipeline.build import build_augmentation, build_loss, build_state, building_for, open_stream
from unfog.process.device import choose_device
from unfog.process.run_folder import RunFolder
from unfog.process.signals import StopSignals
from unfog.process.torch_flags import caller_flags_kept
from unfog.reporting.progress import Progress
from unfog.runs.ranks import StoppableHooks
from unfog.training.checkpoints import format as checkpoint
from unfog.training.checkpoints.format import CheckpointInfo, run_of
from unfog.training.checkpoints.load import (
    find_rollback_checkpoint,
    load_checkpoint,
    read_state,
    read_tensors,
    roll_back,
)
from unfog.training.hooks import Task
from unfog.training.loop import LoopSettings, train
from unfog.training.state import TrainState


class _ReplayHooks(StoppableHooks):
    """Hooks that record nothing, roll back where the run did, and end training at a given image."""

    def __init__(self, folder: RunFolder, state: TrainState, until: int, patience: int, stop: StopSignals):
        super().__init__(stop)
        self.folder, self.state, self.until, self.patience = folder, state, until, patience
        self.progress: Progress

    def stop_requested(self) -> bool:
        return self.stop() or self.state.seen >= self.until

    def roll_back(self, state: TrainState, reason: str) -> str:
        good, _ = find_rollback_checkpoint(self.folder.checkpoints, state, self.patience)
        if good is None:
            raise RequestError(
                f"the run rolled back at image {state.seen:,} to a checkpoint that was deleted since, so it "
                "cannot be repeated"
            )
        roll_back(good.folder, state)
        return str(good.folder)

    def on_step_end(self, step: int) -> None:
        self.progress.update(step)


@caller_flags_kept()
def replay_newest(folder: RunFolder, config: Config, dataset: Dataset, stop: StopSignals) -> tuple[list[str], str]:
    """Train once more from the checkpoint before the newest to the newest, without changing the run.

    Returns the names of the tensors that came out differently, and the machine that they were now computed by.
    RequestError as `find_replayable`, or if the run rolled back to a checkpoint that is gone.
    """
    first, last = find_replayable(folder, config)
    with building_for(first.folder / "model.safetensors", folder.path):
        state = build_state(config, choose_device(config.training.device))
    load_checkpoint(first.folder, state)
    if planned := read_state(last.folder).get("length"):  # a time budget's decisions, up to the last step
        state.length.load_state_dict(planned)
    state.due = []  # these hooks have written their files already
    hooks = _ReplayHooks(folder, state, last.images, config.training.patience, stop)
    with Progress("replaying, step", last.step, start=first.step) as progress:
        hooks.progress = progress
        # Without a limit of roll-backs, which would end the replay where a resume reset the count.
        settings = LoopSettings(replace(config.training, rollbacks=10**9), config.optimizer)
        stream = open_stream(dataset, config)
        task = Task(stream, build_augmentation(config), build_loss(config, state))
        train(settings, state, task, hooks)
    if stop():
        raise Interrupted
    if read_state(last.folder)["guard"]["roll_backs"] > state.guard.roll_backs:
        hooks.roll_back(state, "")  # the run rolled back after its last step, before it was saved
    return differing_tensors(state, last), state.precision.describe_machine()


def find_replayable(folder: RunFolder, config: Config) -> tuple[CheckpointInfo, CheckpointInfo]:
    """Return the two newest whole checkpoints, older first. RequestError if the steps between cannot be repeated."""
    found, _ = checkpoint.list_checkpoints(folder.checkpoints)
    # Lazily, as looking for damage reads the whole checkpoint.
    whole = list(islice((saved for saved in reversed(found) if saved.find_damage() is None), 2))[::-1]
    if len(whole) < 2:
        raise RequestError(f"{folder.checkpoints} holds {len(whole)} whole checkpoint(s); --verify needs two")
    first, last = whole
    states = [read_state(saved.folder) for saved in whole]
    between = f"between steps {first.step:,} and {last.step:,}"
    remedy = "train until there are two newer checkpoints"
    # A smaller micro-batch sums the gradient in another order, and the step of the change is not recorded.
    if len({state.get("microbatch", 0) for state in states}) > 1:
        raise RequestError(
            f"memory ran out {between}, at a step that is not recorded, so these cannot be repeated; {remedy}"
        )
    if {state["keys"].get("repeat") for state in states} != {settings_digests(config)["repeat"]}:
        raise RequestError(f"settings were changed {between}, so these cannot be repeated; {remedy}")
    return first, last


def differing_tensors(state: TrainState, saved: CheckpointInfo) -> list[str]:
    """Return the names of the tensors of a state that are not those of a checkpoint, bit for bit."""
    different = []
    for file, tensors in state.tensors().items():
        if not saved.holds(f"{file}.safetensors"):  # a second EMA that the run began to keep later
            continue
        mine = {name: tensor.cpu() for name, tensor in tensors.items()}
        theirs = read_tensors(saved.folder / f"{file}.safetensors", run_of(saved.folder))
        for name in sorted(mine.keys() | theirs.keys()):
            if name not in mine or name not in theirs or not torch.equal(mine[name], theirs[name]):
                different.append(f"{file}: {name}")
    return different


def verify(folder: RunFolder) -> str:
    """Train again from the checkpoint before the newest, and compare with the newest bit by bit. Changes nothing.

    Returns:
        A line about what was compared.

    Raises:
        RequestError: there is nothing to replay, settings were changed on the way, or another process is training.
        RunError: it came out differently.
        Interrupted: a signal came.
    """
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
    """Describe how far this machine repeats steps bit by bit."""
    if config.training.deterministic == "off" and config.training.device.startswith("cuda"):
        return "need not give the same, as training.deterministic is off"
    return "should give the same"
