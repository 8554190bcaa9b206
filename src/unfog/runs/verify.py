"""`unfog resume RUN --verify`: train a part of the run once more, and see that it comes out the same."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from unfog.data.augment import Augment
from unfog.data.stream import ImageStream
from unfog.diffusion.objective import Objective
from unfog.errors import Interrupted, RequestError, RunError
from unfog.reporting.progress import Progress
from unfog.reporting.records import read_events
from unfog.reporting.report_charts import number
from unfog.runs.build import build_state
from unfog.runs.choices import choose_device
from unfog.runs.folder import RunFolder
from unfog.runs.signals import StopSignals
from unfog.runs.train import load_images
from unfog.training import checkpoint
from unfog.training.culprit import Culprit
from unfog.training.loop import Every, train
from unfog.training.state import TrainState


class Replay:
    """A run that keeps nothing, and ends at a given image."""

    def __init__(self, folder: RunFolder, until: int, stop: StopSignals, progress: Progress):
        self.folder, self.until, self.stop, self.progress = folder, until, stop, progress
        self.state: TrainState

    def stop_requested(self) -> bool:
        """At the end, or when a person wants to stop."""
        return self.stop() or self.state.seen >= self.until

    def roll_back(self, state: TrainState, reason: str) -> None:
        """As the run itself did, if its last good checkpoint is still there."""
        good = checkpoint.anchor(self.folder.checkpoints, state.seen)
        if good is None:
            raise RunError(
                f"the run went back at image {state.seen:,}, to a checkpoint that is gone; nothing to compare"
            )
        checkpoint.roll_back(good.folder, state)

    def advance(self, step: int) -> None:
        """Show progress."""
        self.progress.update(step)

    def undivided(self) -> AbstractContextManager[None]:
        """A stretch that a stop waits for."""
        return self.stop.undivided()

    def save_requested(self) -> bool:
        """Never."""
        return False

    def log(self, step: int, images: int, record: dict[str, Any]) -> None:
        """Nothing is recorded."""

    def refused(self, state: TrainState, norm: float, culprit: Culprit | None) -> None:
        """Nothing is recorded."""

    def preview(self, state: TrainState) -> None:
        """Nothing is drawn."""

    def evaluate(self, state: TrainState) -> dict[str, Any]:
        """Nothing is measured."""
        return {}

    def save(self, state: TrainState, for_best: bool = False) -> None:
        """Nothing is saved."""


def verify(folder: RunFolder) -> str:
    """Replay from the checkpoint before the newest one, and compare with the newest one to the bit. Changes nothing.

    Returns:
        A line on what was compared.

    Raises:
        RequestError: there is nothing to replay, or settings changed on the way.
        RunError: it came out differently.
        Interrupted: a signal came.
    """
    config = folder.read_config()
    device = choose_device(config.training.device)
    with StopSignals() as stop:
        first, last = two_newest(folder)
        prepared, now = load_images(config, stop)
        if now.fingerprint != config.fingerprint:
            raise RequestError(f"the images in {config.source} are not those of this run, so it cannot be repeated")
        state = build_state(config, device)
        checkpoint.load(first.folder, state)
        state.due = []
        with Progress("replaying, step", last.step, start=first.step) as progress:
            replay = Replay(folder, last.images, stop, progress)
            replay.state = state
            train(
                config.training,
                config.optimizer,
                Every(log=0, preview=0, evaluate=0, checkpoint=0),
                state,
                ImageStream(prepared.train, config.training.seed),
                Augment(config.data.flip, config.data.jitter),
                Objective(config.diffusion, len(config.classes), config.label_dropout),
                replay,
            )
        if stop():
            raise Interrupted
        replayed = {file: {n: t.cpu() for n, t in tensors.items()} for file, tensors in state.tensors().items()}
        different = compare(replayed, last)
    what = f"steps {first.step:,} to {last.step:,} of {folder.path}"
    if different:
        raise RunError(
            f"{what}, trained once more, came out differently: {different[0]} and {len(different) - 1} other tensors. "
            f"They were made by {last.made_on}; another machine may round otherwise, the same one should not"
        )
    return f"{what}, trained once more, came out equal to the bit: weights, average and optimiser"


def two_newest(folder: RunFolder) -> tuple[checkpoint.Saved, checkpoint.Saved]:
    """The newest whole checkpoint and the one before. RequestError if what lies between cannot be repeated."""
    found, _ = checkpoint.described(folder.checkpoints)
    whole = [saved for saved in found if checkpoint.damage(saved) is None]
    if len(whole) < 2:
        raise RequestError(f"{folder.checkpoints} holds {len(whole)} whole checkpoint(s); two are needed to compare")
    first, last = whole[-2:]
    events = read_events(folder.path / "events.jsonl")
    between = [e for e in events if e.get("kind") == "changed" and first.step <= number(e.get("step")) < last.step]
    if between:
        raise RequestError(
            f"{between[0].get('setting')} was changed at step {between[0]['step']:,}, so steps {first.step:,} to "
            f"{last.step:,} cannot be repeated; go on training until there are two newer checkpoints"
        )
    return first, last


def compare(tensors: dict[str, dict[str, Tensor]], saved: checkpoint.Saved) -> list[str]:
    """Names of the tensors that are not those of a checkpoint, bit for bit."""
    different = []
    for file, mine in tensors.items():
        theirs = checkpoint.read_tensors(saved.folder / f"{file}.safetensors")
        for name in sorted(mine.keys() | theirs.keys()):
            if name not in mine or name not in theirs or not torch.equal(mine[name], theirs[name]):
                different.append(f"{file}: {name}")
    return different
