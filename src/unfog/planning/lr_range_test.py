"""Learning-rate range test (Smith 2017) for diffusion with AdamW: a ramp, then trials.

The ramp trains a throwaway network at rates that grow by the same factor each step. After each step it computes the
loss of the same images with the same noise, so that the curve has no sampling error. It shows where learning begins
and ends, but not which rate between is best: each step profits from those before, Adam with clipping does not diverge
at once, and three tenths of the rate at the lowest loss was right for some networks and three times too low for others.
So rates around that point are then tried from a fresh network each, with the schedule of a real run, until the best of
them has a worse one on either side.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from unfog.diffusion.objective import Objective
from unfog.errors import Interrupted
from unfog.planning.lr_suggestion import Ramp, Trial, next_rates, ramp_stop_reason, rounded, suggest
from unfog.reporting.progress import Progress, format_duration
from unfog.training.hooks import Augmentation, Stream, Task, TrainingHooks
from unfog.training.loop import LoopSettings, train
from unfog.training.settings import Optimizer, Training
from unfog.training.stability.out_of_memory import microbatch_size
from unfog.training.state import TrainState

LOWEST, HIGHEST = 1e-5, 1.0
"""Rates of the ramp: AdamW moves each weight by about the rate, and weights are about 0.1."""
RAMP = (60, 120)
"""Fewest and most steps of the ramp."""
RAMP_SHARE = 0.3
"""Share of the time for the ramp."""
TRIAL = (40, 200)
"""Fewest and most steps of a trial."""
TRIED = (1.0, 0.3, 0.1)
"""Rates of the first trials, over the rate of the ramp's lowest loss; highest first."""
MOST_TRIALS = 6
"""With the trials that are added, three times as high or as low."""


@dataclass(frozen=True)
class LrRangeResult:
    """Result of a learning-rate range test: its curves, and the rate that they suggest."""

    ramp: Ramp
    trials: tuple[Trial, ...]
    suggestion: float | None
    """The rate; None if none can be recommended."""
    reason: str
    """Why, without a full stop."""
    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True, eq=False)
class LrTestSetup:
    """Everything that training needs except the learning rate."""

    training: Training
    optimizer: Optimizer
    fresh: Callable[[], TrainState]
    """Builds a new network and optimiser, the same each time."""
    stream: Stream
    augment: Augmentation
    objective: Objective
    probe: LossProbe
    stop_requested: Callable[[], bool]


@dataclass(frozen=True, eq=False)
class LossProbe:
    """Fixed images, noise and noise levels, on which networks are compared."""

    x0: Tensor
    """float [N, C, H, W] in [-1, 1]."""
    label: Tensor | None
    noise: Tensor
    u: Tensor
    """[N] in (0, 1)."""

    @classmethod
    def create(cls, x0: Tensor, label: Tensor | None) -> LossProbe:
        """Give each image one noise level, with distant levels for neighbouring images."""
        noise = torch.randn(x0.shape, generator=torch.Generator().manual_seed(0))
        places = torch.arange(len(x0), dtype=torch.float64)
        golden = (math.sqrt(5) - 1) / 2  # its multiples modulo 1 are evenly spread for any number of images
        return cls(x0, label, noise.to(x0.device), ((places + 0.5) * golden % 1).float().to(x0.device))

    def first(self, count: int) -> LossProbe:
        return LossProbe(
            self.x0[:count], None if self.label is None else self.label[:count], self.noise[:count], self.u[:count]
        )

    @torch.no_grad()
    def relative_loss(self, state: TrainState, objective: Objective, batch: int) -> float:
        """Return the loss over that of predicting 0, without dropout and in float32, `batch` images at once."""
        diffusion = objective.diffusion
        logsnr = diffusion.schedule(self.u)
        state.model.eval()
        total = 0.0
        for part in range(0, len(self.x0), batch):
            some = slice(part, part + batch)
            label = None if self.label is None else self.label[some]
            total += float(objective.at(state.model, self.x0[some], label, logsnr[some], self.noise[some])[0].sum())
        state.model.train()
        return total / float((diffusion.weight(logsnr) * diffusion.target_power(logsnr)).sum())


class _ProgressHooks(TrainingHooks):
    """Training hooks that show progress and stop on request."""

    def __init__(self, subject: LrTestSetup, progress: Progress, before: int = 0):
        self.stop_requested = subject.stop_requested  # type: ignore[method-assign]
        self.progress, self.before = progress, before

    def on_step_end(self, step: int) -> None:
        self.progress.update(self.before + step)


def run_lr_range_test(subject: LrTestSetup, seconds: float = 90.0) -> LrRangeResult:
    """Run ramp and trials in about `seconds`; they have a fewest and a most number of steps.

    The global random generators are restored.

    Raises:
        Interrupted: a stop was requested.
    """
    started, device = time.perf_counter(), subject.probe.x0.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        ramp, pace = run_ramp(subject, seconds * RAMP_SHARE)
        left = seconds - (time.perf_counter() - started)
        trials = run_trials(subject, ramp, left, pace) if ramp.learns else ()
    suggestion, reason = suggest(ramp, trials)
    if ramp.learns and not trials:
        reason += f"; with about {format_duration(enough(pace))} there would be time for them"
    return LrRangeResult(ramp, trials, suggestion, reason, time.perf_counter() - started)


def run_ramp(subject: LrTestSetup, seconds: float) -> tuple[Ramp, float]:
    """Return the ramp, and seconds per step of training and loss."""
    state = subject.fresh()
    probe = subject.probe.first(max(16, min(64, subject.training.batch)))
    start = probe.relative_loss(state, subject.objective, microbatch_size(subject.training, state))
    rates, losses, marks, steps = [LOWEST], list[float](), [time.perf_counter()], RAMP[1]
    with Progress("learning-rate ramp", RAMP[1]) as progress:
        while True:
            one_step(subject, state, rates[-1], _ProgressHooks(subject, progress))
            losses.append(probe.relative_loss(state, subject.objective, microbatch_size(subject.training, state)))
            marks.append(time.perf_counter())
            pace = statistics.median(b - a for a, b in pairwise(marks[-6:]))
            if len(losses) == 4:  # the first steps also allocate, and at so low a rate they change nothing yet
                progress.total = steps = ramp_steps(seconds, pace)
            ended = ramp_stop_reason(start, rates, losses)
            if ended or len(losses) >= steps:
                return Ramp(start, tuple(rates), tuple(losses), ended), pace
            rates.append(rates[-1] * (HIGHEST / rates[-1]) ** (1 / (steps - len(losses))))


def ramp_steps(seconds: float, pace: float) -> int:
    return round(min(max(seconds / pace, RAMP[0]), RAMP[1]))


def one_step(subject: LrTestSetup, state: TrainState, lr: float, run: TrainingHooks) -> None:
    """Train one step of the real loop at this rate. Raises `Interrupted` after a stop request."""
    training = replace(subject.training, images=state.seen + subject.training.batch)
    optimizer = replace(subject.optimizer, lr=lr, warmup=1, schedule="constant")
    objective = subject.objective.following(state.levels)
    train(LoopSettings(training, optimizer), state, Task(subject.stream, subject.augment, objective), run)
    if state.seen < training.images:
        raise Interrupted


def run_trials(subject: LrTestSetup, ramp: Ramp, seconds: float, pace: float) -> tuple[Trial, ...]:
    """Return short runs around the ramp's lowest point, highest rate first; none if there is too little time."""
    steps = trial_steps(seconds, pace)
    if steps < TRIAL[0]:
        return ()
    rates = [rounded(ramp.lowest[0] * part) for part in TRIED]
    trials: list[Trial] = []
    with Progress(f"trials of {steps} steps", steps * len(TRIED)) as progress:
        while rates:
            progress.total = steps * (len(trials) + len(rates))
            run = _ProgressHooks(subject, progress, steps * len(trials))
            trials.append(run_trial(subject, rates.pop(0), steps, run))
            trials.sort(key=lambda trial: -trial.lr)
            if not rates and len(trials) < MOST_TRIALS:
                rates = next_rates(trials)
    return tuple(trials)


def trial_steps(seconds: float, pace: float) -> int:
    """Return the steps of each trial, such that one trial more than the first ones fits the time."""
    return min(int(seconds / pace / (len(TRIED) + 1)), TRIAL[1])


def enough(pace: float) -> float:
    """Return the seconds that the ramp and the shortest trials take."""
    # 1.05 because steps differ in time.
    return 1.05 * TRIAL[0] * (len(TRIED) + 1) / (1 - RAMP_SHARE) * pace


def run_trial(subject: LrTestSetup, lr: float, steps: int, run: TrainingHooks) -> Trial:
    """Train a fresh network at this rate with the schedule of a real run. Raises `Interrupted` after a stop request."""
    state = subject.fresh()
    training = replace(subject.training, images=steps * subject.training.batch)
    optimizer = replace(subject.optimizer, lr=lr, warmup=max(1, steps // 20))
    objective = subject.objective.following(state.levels)
    train(LoopSettings(training, optimizer), state, Task(subject.stream, subject.augment, objective), run)
    if state.seen < training.images:
        raise Interrupted
    with state.ema.swapped_into(state.model):
        loss = subject.probe.relative_loss(state, subject.objective, microbatch_size(subject.training, state))
    return Trial(lr, steps, loss if math.isfinite(loss) else math.inf)
