"""The learning-rate range test (Smith 2017), made to work for diffusion with AdamW: a ramp, then trials.

The ramp trains a throwaway network at rates that grow by the same factor each step, and looks after each step at the
loss of the same images with the same noise at the same levels, so that the curve shows the network and not the dice.
It shows where learning begins and where it ends. It does not show which rate in between is best: each step profits from
those before it, Adam with clipping does not blow up at once, and three tenths of the rate at the lowest point came out
right for some networks and three times too low for others. So rates around that point are then tried from a fresh
network each, with the schedule of a real run, until the best of them has a worse one on either side.
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
from unfog.training.hooks import Augmentation, Stream, TrainingHooks
from unfog.training.loop import Intervals, train
from unfog.training.settings import Optimizer, Training
from unfog.training.stability.out_of_memory import microbatch_size
from unfog.training.state import TrainState

LOWEST, HIGHEST = 1e-5, 1.0
"""Rates that the ramp goes through: AdamW moves each weight by about the rate, and weights are about 0.1."""
RAMP = (60, 120)
"""Fewest and most steps of the ramp."""
RAMP_SHARE = 0.3
"""Of the time, for the ramp."""
TRIAL = (40, 200)
"""Fewest and most steps of a trial."""
TRIED = (1.0, 0.3, 0.1)
"""Rates that are tried first, as parts of the one at the ramp's lowest loss; highest first."""
MOST_TRIALS = 6
"""With those that are added, three times as high or as low, until the best one has a worse one on either side."""
NEVER = Intervals(log=0, preview=0, evaluate=0, checkpoint=0)


@dataclass(frozen=True)
class LrRangeResult:
    """What was found."""

    ramp: Ramp
    trials: tuple[Trial, ...]
    suggestion: float | None
    """The rate; None where none can be recommended."""
    reason: str
    """Why, in a sentence without stop."""
    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True, eq=False)
class LrTestSetup:
    """What is trained, and how: everything but the rate."""

    training: Training
    optimizer: Optimizer
    fresh: Callable[[], TrainState]
    """A new network and optimiser, the same each time."""
    stream: Stream
    augment: Augmentation
    objective: Objective
    probe: LossProbe
    stop_requested: Callable[[], bool]


@dataclass(frozen=True, eq=False)
class LossProbe:
    """Images, noise and noise levels that are the same each time."""

    x0: Tensor
    """float [N, C, H, W] in [-1, 1]."""
    label: Tensor | None
    noise: Tensor
    u: Tensor
    """[N] in (0, 1)."""

    @classmethod
    def create(cls, x0: Tensor, label: Tensor | None) -> LossProbe:
        """Each image at one level; the levels are spread evenly, and neighbouring images get distant ones."""
        noise = torch.randn(x0.shape, generator=torch.Generator().manual_seed(0))
        places = torch.arange(len(x0), dtype=torch.float64)
        golden = (math.sqrt(5) - 1) / 2  # multiples of which, modulo 1, are spread evenly however many there are
        return cls(x0, label, noise.to(x0.device), ((places + 0.5) * golden % 1).float().to(x0.device))

    def first(self, count: int) -> LossProbe:
        """A smaller one."""
        return LossProbe(
            self.x0[:count], None if self.label is None else self.label[:count], self.noise[:count], self.u[:count]
        )

    @torch.no_grad()
    def relative_loss(self, state: TrainState, objective: Objective, batch: int) -> float:
        """Loss of the network over that of answering 0, without dropout and in float32, `batch` images at once."""
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


class _Watched(TrainingHooks):
    """A run that shows progress and ends on request."""

    def __init__(self, subject: LrTestSetup, progress: Progress, before: int = 0):
        self.stop_requested = subject.stop_requested  # type: ignore[method-assign]
        self.progress, self.before = progress, before

    def on_step_end(self, step: int) -> None:
        """Show it."""
        self.progress.update(self.before + step)


def run_lr_range_test(subject: LrTestSetup, seconds: float = 90.0) -> LrRangeResult:
    """Ramp and trials, in about `seconds`: less where that allows the most steps of both, more for the fewest.

    The caller's random generators are left as they were.

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
        reason += f"; about {format_duration(enough(pace))} would allow them, and tell more"
    return LrRangeResult(ramp, trials, suggestion, reason, time.perf_counter() - started)


def run_ramp(subject: LrTestSetup, seconds: float) -> tuple[Ramp, float]:
    """Returns the ramp, and seconds per step of training and looking."""
    state = subject.fresh()
    probe = subject.probe.first(max(16, min(64, subject.training.batch)))
    start = probe.relative_loss(state, subject.objective, microbatch_size(subject.training, state))
    rates, losses, marks, steps = [LOWEST], list[float](), [time.perf_counter()], RAMP[1]
    with Progress("learning-rate ramp", RAMP[1]) as progress:
        while True:
            one_step(subject, state, rates[-1], _Watched(subject, progress))
            losses.append(probe.relative_loss(state, subject.objective, microbatch_size(subject.training, state)))
            marks.append(time.perf_counter())
            pace = statistics.median(b - a for a, b in pairwise(marks[-6:]))
            if len(losses) == 4:  # the first ones also allocate; and so low, they change nothing yet
                progress.total = steps = ramp_steps(seconds, pace)
            ended = ramp_stop_reason(start, rates, losses)
            if ended or len(losses) >= steps:
                return Ramp(start, tuple(rates), tuple(losses), ended), pace
            rates.append(rates[-1] * (HIGHEST / rates[-1]) ** (1 / (steps - len(losses))))


def ramp_steps(seconds: float, pace: float) -> int:
    """Steps of the ramp."""
    return round(min(max(seconds / pace, RAMP[0]), RAMP[1]))


def one_step(subject: LrTestSetup, state: TrainState, lr: float, run: TrainingHooks) -> None:
    """A step of the real loop at this rate. Interrupted if a stop was requested instead."""
    training = replace(subject.training, images=state.seen + subject.training.batch)
    optimizer = replace(subject.optimizer, lr=lr, warmup=1, schedule="constant")
    objective = subject.objective.following(state.levels)
    train(training, optimizer, NEVER, state, subject.stream, subject.augment, objective, run)
    if state.seen < training.images:
        raise Interrupted


def run_trials(subject: LrTestSetup, ramp: Ramp, seconds: float, pace: float) -> tuple[Trial, ...]:
    """Short runs around the ramp's lowest point, highest rate first; none if time is too short to tell anything."""
    steps = trial_steps(seconds, pace)
    if steps < TRIAL[0]:
        return ()
    rates = [rounded(ramp.lowest[0] * part) for part in TRIED]
    trials: list[Trial] = []
    with Progress(f"trials of {steps} steps", steps * len(TRIED)) as progress:
        while rates:
            progress.total = steps * (len(trials) + len(rates))
            run = _Watched(subject, progress, steps * len(trials))
            trials.append(run_trial(subject, rates.pop(0), steps, run))
            trials.sort(key=lambda trial: -trial.lr)
            if not rates and len(trials) < MOST_TRIALS:
                rates = next_rates(trials)
    return tuple(trials)


def trial_steps(seconds: float, pace: float) -> int:
    """Steps of each trial, with time for one more than those that come first."""
    return min(int(seconds / pace / (len(TRIED) + 1)), TRIAL[1])


def enough(pace: float) -> float:
    """Seconds that leave time for the shortest trials: of more time the ramp takes its share, too. A little is added,
    as no two steps take the same."""
    return 1.05 * TRIAL[0] * (len(TRIED) + 1) / (1 - RAMP_SHARE) * pace


def run_trial(subject: LrTestSetup, lr: float, steps: int, run: TrainingHooks) -> Trial:
    """A fresh network at this rate, with the schedule of a real run. Interrupted if a stop was requested instead."""
    state = subject.fresh()
    training = replace(subject.training, images=steps * subject.training.batch)
    optimizer = replace(subject.optimizer, lr=lr, warmup=max(1, steps // 20))
    objective = subject.objective.following(state.levels)
    train(training, optimizer, NEVER, state, subject.stream, subject.augment, objective, run)
    if state.seen < training.images:
        raise Interrupted
    with state.ema.swapped_into(state.model):
        loss = subject.probe.relative_loss(state, subject.objective, microbatch_size(subject.training, state))
    return Trial(lr, steps, loss if math.isfinite(loss) else math.inf)
