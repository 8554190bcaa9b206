"""Parts of the dry run: the shortened configuration, a heartbeat that times each part, and the findings."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unfog.config.schema import Config
from unfog.errors import RequestError
from unfog.export.diffusers_unet import Network, to_unet2d
from unfog.inference.run import Run
from unfog.pipeline.build import input_shape
from unfog.planning.disk import disk_space_needed
from unfog.process.heartbeat import Heartbeat
from unfog.process.memory import peak_bytes, resident_bytes
from unfog.process.signals import StopSignals
from unfog.reporting.findings import Finding
from unfog.reporting.progress import format_bytes
from unfog.reporting.settings import Log
from unfog.runs.metrics_hook import MIN_SAMPLES, TRIAL_SAMPLES
from unfog.runs.session import Session
from unfog.training.checkpoints.writer import free_bytes
from unfog.training.settings import Evaluate

PART_OF_ACTIVITY = {"preview": "preview", "drawing": "preview", "evaluation": "evaluation", "saving": "checkpoint"}
"""Activity of the heartbeat -> part of the dry run."""


class TimedHeartbeat(Heartbeat):
    """A heartbeat that records the duration of each activity, and during which one an error was raised."""

    def __init__(self, folder: Path, stop: StopSignals):
        super().__init__(folder, stop)
        self.spent: dict[str, list[float]] = {}
        self.failed = ""

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            with super().during(what):
                yield
        except Exception:
            self.failed = self.failed or what
            raise
        finally:
            self.spent.setdefault(what, []).append(time.perf_counter() - started)


class PartError(Exception):
    """A failed part of the dry run ("" for the current one), and the error."""

    def __init__(self, part: str, reason: Exception):
        super().__init__(str(reason))
        self.part, self.reason = part or "training", reason


def shortened(config: Config, steps: int) -> Config:
    """Return the same run in so many steps, with every hook due in it, and without trackers."""
    training = config.training
    at_once = training.microbatch or training.batch
    return replace(
        config,
        training=replace(training, images=steps * training.batch, steps=0, budget=""),
        log=Log(every=1),
        preview=replace(config.preview, every=-1, images=min(config.preview.images, at_once)),
        evaluate=shortened_evaluation(config.evaluate, steps),
        checkpoint=replace(config.checkpoint, every=1, milestones=0),
        ema_snapshots=replace(config.ema_snapshots, every=min(config.ema_snapshots.every, 1)),
    )


def shortened_evaluation(evaluate: Evaluate, steps: int) -> Evaluate:
    """Return settings with one evaluation, at the end, of as few samples as can be measured. The best checkpoint is
    chosen by the held-out loss, as some metrics reject so few."""
    if evaluate.every <= 0:
        return replace(evaluate, every=-1)
    evaluate = replace(evaluate, every=steps)
    if not evaluate.metrics or evaluate.metrics_every < 0:
        return evaluate
    best = "held_out_loss"
    return replace(
        evaluate, samples=TRIAL_SAMPLES, reference=min(evaluate.reference, MIN_SAMPLES), metrics_every=steps, best=best
    )


def passed(part: str, said: str, **facts: Any) -> Finding:
    return Finding(f"rehearsal.{part}", "fine", said, facts=facts)


CONSEQUENCE = {
    **dict.fromkeys(("training", "preview", "evaluation", "checkpoint"), "the run would fail of it as well"),
    "report": "the run would be trained and saved, but end with this error",
    **dict.fromkeys(("reload", "resume"), "the run itself may end well, but an interrupted one could not go on"),
    "repeat": "the run itself may end well, but `unfog resume RUN --verify` would fail",
    "sample": "the run itself may end well, but `unfog sample RUN` would fail",
    "export": "the run itself may end well, but it could not be exported to diffusers",
}
"""Part -> consequence of its failure for the run."""


def no_room(said: str) -> Finding:
    """Return the finding for a dry run without enough disk space, which is no fault of the run."""
    remedy = "make room there, or let TMPDIR name a folder that has it"
    return Finding("rehearsal.room", "hint", f"the rehearsal was not finished: {said}", remedy)


def failed(part: str, error: Exception, told: str) -> Finding:
    """Return the finding for an error, with its message and the remedy where that is known."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return no_room(str(error))
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    kind = "" if isinstance(error, RequestError) else f"{type(error).__name__}: "
    short = isinstance(error, MemoryError | torch.OutOfMemoryError) or "out of memory" in first.lower()
    remedy = "a smaller --microbatch, --network or --size" if short else CONSEQUENCE[part]
    facts = {"error": type(error).__name__, "said": told[-2000:]}
    return Finding(f"rehearsal.{part}", "fatal", f"{part} failed: {kind}{first}", remedy, facts)


class NoRoomError(Exception):
    """Not enough disk space for the dry run."""


def check_room(folder: Path, session: Session) -> None:
    """NoRoomError unless there is disk space for all checkpoints that a dry run keeps at a time."""
    parameters = sum(p.numel() for p in session.state.model.parameters())
    room, free = (
        disk_space_needed(parameters, session.config.checkpoint, 0, session.config.ema_snapshots),
        free_bytes(folder),
    )
    if free < room.maximum:
        said = (
            f"{folder.parent} has {format_bytes(free)} free, and {room.checkpoints} checkpoints of this network take "
        )
        raise NoRoomError(said + format_bytes(room.checkpoints * room.checkpoint))


def distance(a: list[Any], b: list[Tensor]) -> float:
    """Return the Euclidean distance between two lists of tensors."""
    return float(torch.stack([(x.detach() - y).norm() for x, y in zip(a, b)]).norm())


@torch.inference_mode()
def export_difference(run: Run) -> float:
    """Return the largest output difference between a run's network and its export to diffusers, relative to ours.

    Both get random weights: many branches of a network start at zero and are nearly zero after two steps, so that an
    exchanged weight would go unnoticed.

    Raises:
        RequestError: diffusers has no equivalent network.
    """
    from diffusers import UNet2DModel

    config, network = run.config, randomized(run.network.cpu())
    assert config.network is not None  # a run's is settled
    channels, side, _ = input_shape(config)
    out = channels * (2 if config.diffusion.learned_variance else 1)
    ours = Network(config.network, channels, len(config.classes), network.state_dict(), out)
    settings, state = to_unet2d(ours, side)
    theirs = UNet2DModel(**settings).eval()
    theirs.load_state_dict(state)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, channels, side, side, generator=generator)
    level = torch.tensor([10.0, 500.0])
    label = torch.tensor([0, len(config.classes)]) if config.classes else None
    expected = network(x, level, label)
    given = theirs(x, level, class_labels=label).sample
    return float((given - expected).abs().max() / expected.abs().max().clamp_min(1e-12))


def randomized(network: nn.Module) -> nn.Module:
    """Return a copy of a network with random weights of ordinary size, so that all of them affect the output."""
    copy, generator = deepcopy(network), torch.Generator().manual_seed(0)
    for parameter in copy.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            parameter.copy_(noise * (parameter.numel() / parameter.shape[0]) ** -0.5)
        else:  # biases about 0, the scales of normalisations about 1
            parameter.copy_(parameter.round().clamp(0, 1) + 0.1 * noise)
    return copy


def memory(before: int, device: torch.device) -> Finding:
    """Return a finding with the memory of the process before and after, and its peak."""
    after, peak = resident_bytes(), peak_bytes()
    facts = {"before": before, "after": after, "peak": peak}
    said = (
        f"the process held {format_bytes(before)} before the rehearsal, {format_bytes(after)} after it and "
        f"{format_bytes(peak)} at most"
    )
    if device.type == "cuda":
        facts["device_peak"] = torch.cuda.max_memory_allocated(device)
        said += f"; {format_bytes(facts['device_peak'])} of {device} at most"
    return passed("memory", said, **facts)
