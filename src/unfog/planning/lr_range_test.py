"""Learning-rate range test (Smith 2017) for diffusion with AdamW: a ramp, trials, and the rate that they suggest.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from unfog.device.compilation import compile_errors_explained
from unfog.diffusion.objective import Objective
from unfog.errors import Interrupted
from unfog.evaluation.held_out import fixed_losses
from unfog.pipeline.build import fitted, fixed_loss
from unfog.reporting.progress import Progress
from unfog.training.hooks import Augmentation, Stream, Task, TrainingHooks
from unfog.training.loop import LoopSettings, train
from unfog.training.settings import Optimizer, Training
from unfog.training.stability.out_of_memory import microbatch_size
from unfog.training.state import TrainState
from unfog.values.conditions import Conditions

# Rates of the ramp: AdamW moves each weight by about the rate, and weights are about 0.1.
_LOWEST, _HIGHEST = 1e-5, 1.0
_RAMP = (60, 120)  # usual steps of the ramp, fewest and most
_SHORTEST_RAMP = 12  # steps, where the usual ones take too long
_RAMP_SHARE = 0.3  # share of the time for the ramp
_RAMP_LIMIT = 0.9  # share of the time after which the ramp has to end
_TRIAL = (40, 200)  # fewest and most steps of a trial
_TRIED = (1.0, 0.3, 0.1)  # rates of the first trials, over the rate of the ramp's lowest loss; highest first
_MOST_TRIALS = 6  # with the trials that are added, three times as high or as low
_FLAT = 0.02  # share of its loss at the start that a network must lose to have learned something
_AS_GOOD = 1.03  # factor on the best loss within which trials are as good; the lowest rate of those is suggested
# Losses are clipped to this times the loss at the start before smoothing. With weights of fixed norm the loss explodes
# from one step to the next, and its average would hide all that was learned before.
_WORST = 2.0
_RAMP_ALONE = 0.3  # factor on the rate of the ramp's lowest loss, if there is no time for trials


@dataclass(frozen=True)
class Trial:
    """Result of a short run at one rate."""

    lr: float
    steps: int
    loss: float
    """Relative loss of the EMA weights at the end; infinite if it diverged."""


@dataclass(frozen=True)
class Ramp:
    """Losses over growing rates. A relative loss is the loss over that of predicting 0 at the same noise levels."""

    start: float
    """Relative loss of the fresh network."""
    rates: tuple[float, ...]
    losses: tuple[float, ...]
    """Relative loss after the step at each rate; the last one may be nan or infinite."""
    ended: str
    """Why it stopped: "diverged", "not finite", or "" for the end of the ramp."""

    @property
    def smooth(self) -> list[float]:
        """Finite losses, averaged over a quarter of a decade in both directions, so that a dip stays at its rate."""
        known = [min(loss, _WORST * self.start) for loss in self.losses if math.isfinite(loss)]
        forward, backward = _smoothed(known, self.memory), _smoothed(known[::-1], self.memory)[::-1]
        return [(before + after) / 2 for before, after in zip(forward, backward)]

    @property
    def memory(self) -> float:
        """Steps in a quarter of a decade."""
        growth = math.log10(self.rates[1] / self.rates[0]) if len(self.rates) > 1 else 1.0
        return max(1.0, 0.25 / growth)

    @property
    def lowest(self) -> tuple[float, float]:
        """Rate and smoothed loss where that is lowest."""
        smooth = self.smooth or [math.inf]
        best = min(range(len(smooth)), key=smooth.__getitem__)
        return self.rates[best], smooth[best]

    @property
    def learns(self) -> bool:
        """True if the loss fell noticeably at any rate."""
        return self.lowest[1] < (1 - _FLAT) * self.start


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

    def run(self, seconds: float = 90.0) -> LrRangeResult:
        """Run ramp and trials in at most about `seconds`; the ramp has at least 12 steps however long they take.

        The global random generators are restored. Interrupted if a stop was requested.
        """
        started, device = time.perf_counter(), self.probe.x0.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []), compile_errors_explained():
            ramp, pace = _run_ramp(self, seconds * _RAMP_SHARE, seconds * _RAMP_LIMIT)
            left = seconds - (time.perf_counter() - started)
            trials = _run_trials(self, ramp, left, pace) if ramp.learns else ()
        suggestion, reason = suggest(ramp, trials)
        if not trials and (ramp.learns or pace * _RAMP[0] > seconds):
            reason += f"; --seconds {math.ceil(_enough(pace) / 10) * 10} leaves time for trials"
        return LrRangeResult(ramp, trials, suggestion, reason, time.perf_counter() - started)


@dataclass(frozen=True, eq=False)
class LossProbe:
    """Fixed images, noise and noise levels, on which networks are compared."""

    x0: Tensor
    """float [N, C, H, W] in [-1, 1]."""
    conditions: Conditions
    noise: Tensor
    u: Tensor
    """[N] in (0, 1)."""

    @classmethod
    def create(cls, x0: Tensor, conditions: Conditions) -> LossProbe:
        """Give each image one noise level, with distant levels for neighbouring images."""
        noise = torch.randn(x0.shape, generator=torch.Generator().manual_seed(0))
        # In float64: in float32 the multiples of thousands of images would lose digits.
        places = torch.arange(len(x0), dtype=torch.float64)
        golden = (math.sqrt(5) - 1) / 2  # its multiples modulo 1 are evenly spread for any number of images
        return cls(x0, conditions, noise.to(x0.device), ((places + 0.5) * golden % 1).float().to(x0.device))

    def first(self, count: int) -> LossProbe:
        return LossProbe(self.x0[:count], self.conditions.rows(slice(count)), self.noise[:count], self.u[:count])

    def relative_loss(self, state: TrainState, objective: Objective, batch: int) -> float:
        """Return the loss over that of predicting 0, without dropout and in float32, `batch` images at once."""
        state.model.eval()
        loss_at = fixed_loss(state.model, objective)
        losses = fixed_losses(loss_at, self.x0, self.conditions, self.u[None], lambda level: self.noise, batch)
        state.model.train()
        diffusion = objective.diffusion
        logsnr = diffusion.schedule(self.u)
        total = sum(float(part.sum()) for part in torch.split(losses[0, 0].float(), batch))
        return total / float((diffusion.weight(logsnr) * diffusion.target_power(logsnr)).sum())


class _OutOfTimeError(Exception):
    """The time of the test is over."""


class _ProgressHooks(TrainingHooks):
    def __init__(self, subject: LrTestSetup, progress: Progress, before: int = 0, end: float = math.inf):
        self._stop_requested, self._end = subject.stop_requested, end
        self.progress, self.before = progress, before

    def stop_requested(self) -> bool:
        if time.perf_counter() > self._end:
            raise _OutOfTimeError
        return self._stop_requested()

    def on_step_end(self, step: int) -> None:
        self.progress.update(self.before + step)


def _run_ramp(subject: LrTestSetup, seconds: float, limit: float = math.inf) -> tuple[Ramp, float]:
    """Return the ramp, and seconds per step of training and loss. It aims at `seconds`, and ends before `limit`."""
    state = subject.fresh()
    probe = subject.probe.first(max(16, min(64, subject.training.batch)))
    start = _relative_loss(subject, probe, state)
    rates, losses, marks, steps = [_LOWEST], list[float](), [time.perf_counter()], _RAMP[1]
    with Progress("learning-rate ramp", _RAMP[1]) as progress:
        while True:
            # No schedule of its own: the ramp is the schedule.
            optimizer = replace(subject.optimizer, lr=rates[-1], warmup=1, schedule="constant")
            _train(subject, state, optimizer, state.seen + subject.training.batch, _ProgressHooks(subject, progress))
            losses.append(_relative_loss(subject, probe, state))
            marks.append(time.perf_counter())
            pace = statistics.median(b - a for a, b in pairwise(marks[-6:]))
            if len(losses) == 4:  # the first steps also allocate, and at so low a rate they change nothing yet
                steps = _ramp_steps(seconds, pace)
            if len(losses) >= 4:
                left = limit - (marks[-1] - marks[0])
                progress.total = steps = _shortened(steps, len(losses), left / pace)
            ended = ramp_stop_reason(start, rates, losses)
            if ended or len(losses) >= steps:
                return Ramp(start, tuple(rates), tuple(losses), ended), pace
            # Equal factors over the steps that are left, whose number may have just changed.
            rates.append(rates[-1] * (_HIGHEST / rates[-1]) ** (1 / (steps - len(losses))))


def _relative_loss(subject: LrTestSetup, probe: LossProbe, state: TrainState) -> float:
    return probe.relative_loss(state, subject.objective, microbatch_size(subject.training, state))


def _ramp_steps(seconds: float, pace: float) -> int:
    return round(min(max(seconds / pace, _RAMP[0]), _RAMP[1]))


def _shortened(steps: int, done: int, fitting: float) -> int:
    """Return the steps of the ramp, of which `done` are done, where the time is enough for `fitting` more."""
    return int(min(steps, max(_SHORTEST_RAMP, done + fitting)))


def _train(subject: LrTestSetup, state: TrainState, optimizer: Optimizer, images: int, run: TrainingHooks) -> None:
    """Train by the real loop until so many images are seen. Raises `Interrupted` after a stop request."""
    settings = LoopSettings(replace(subject.training, images=images), optimizer)
    train(settings, state, Task(subject.stream, subject.augment, fitted(subject.objective, state)), run)
    if state.seen < images:
        raise Interrupted


def _run_trials(subject: LrTestSetup, ramp: Ramp, seconds: float, pace: float) -> tuple[Trial, ...]:
    """Return short runs around the ramp's lowest point, highest rate first; none if there is too little time."""
    steps, end = _trial_steps(seconds, pace), time.perf_counter() + seconds
    if steps < _TRIAL[0]:
        return ()
    rates = [rounded(ramp.lowest[0] * part) for part in _TRIED]
    trials: list[Trial] = []
    with Progress(f"trials of {steps} steps", steps * len(_TRIED)) as progress:
        while rates:
            progress.total = steps * (len(trials) + len(rates))
            run = _ProgressHooks(subject, progress, steps * len(trials), end)
            try:
                trials.append(_run_trial(subject, rates.pop(0), steps, run))
            except _OutOfTimeError:
                break
            trials.sort(key=lambda trial: -trial.lr)
            if not rates and len(trials) < _MOST_TRIALS:
                rates = next_rates(trials)
    return tuple(trials) if len(trials) > 1 else ()


def _trial_steps(seconds: float, pace: float) -> int:
    """Return the steps of each trial, so that the time suffices for one trial after the first ones."""
    return min(int(seconds / pace / (len(_TRIED) + 1)), _TRIAL[1])


def _enough(pace: float) -> float:
    """Return the seconds that the ramp and the shortest trials take."""
    # 1.05 because steps differ in time.
    return 1.05 * _TRIAL[0] * (len(_TRIED) + 1) / (1 - _RAMP_SHARE) * pace


def _run_trial(subject: LrTestSetup, lr: float, steps: int, run: TrainingHooks) -> Trial:
    """Train a fresh network at this rate with the schedule of a real run. Raises `Interrupted` after a stop request."""
    state = subject.fresh()
    optimizer = replace(subject.optimizer, lr=lr, warmup=max(1, steps // 20))
    _train(subject, state, optimizer, steps * subject.training.batch, run)
    with state.ema.swapped_into(state.model):
        loss = _relative_loss(subject, subject.probe, state)
    return Trial(lr, steps, loss if math.isfinite(loss) else math.inf)


def ramp_stop_reason(start: float, rates: Sequence[float], losses: Sequence[float]) -> str:
    """Return why the ramp stops at the last loss: "not finite", "diverged", or "" if it goes on.

    Diverged means that the smoothed loss is half as high again as at the start, or has lost three quarters of its gain.
    """
    if not math.isfinite(losses[-1]):
        return "not finite"
    smooth = _smoothed(losses, Ramp(start, tuple(rates), tuple(losses), "").memory)
    gain = start - min(smooth)
    # Only of a gain that is not noise can three quarters be lost.
    lost = gain > 0.1 * start and smooth[-1] > start - gain / 4
    return "diverged" if lost or smooth[-1] > 1.5 * start else ""


def next_rates(trials: Sequence[Trial]) -> list[float]:
    """Return the rate of the next trial, if the best of the trials, highest rate first, is at either end."""
    best = min(trials, key=lambda trial: trial.loss)
    if not math.isfinite(best.loss) or best is trials[-1]:
        return [rounded(trials[-1].lr / 3)]
    return [rounded(trials[0].lr * 3)] if best is trials[0] else []


def suggest(ramp: Ramp, trials: Sequence[Trial]) -> tuple[float | None, str]:
    """Return the rate and its reason, from the trials, or without trials from the ramp alone."""
    edge, lowest = ramp.lowest
    if not ramp.learns:
        ended = {"diverged": ", where training diverged", "not finite": ", where the loss was not finite", "": ""}
        return None, (
            f"the loss never fell by more than {max(0.0, 1 - lowest / ramp.start):.1%} in {len(ramp.losses)} steps, at "
            f"rates up to {ramp.rates[-1]:.2g}{ended[ramp.ended]}; check the data and the other settings first"
        )
    if not trials:
        return rounded(edge * _RAMP_ALONE), (
            f"{_RAMP_ALONE:g} times {edge:.2g}, at which the loss was lowest; a rough guess, as there was no time for "
            "trials"
        )
    best = min(trials, key=lambda trial: trial.loss)
    if not best.loss < (1 - _FLAT) * ramp.start:
        rates = f"{trials[-1].lr:g} to {trials[0].lr:g}"
        return None, f"no trial of {best.steps} steps learned anything at rates from {rates}"
    chosen = min((trial for trial in trials if trial.loss <= _AS_GOOD * best.loss), key=lambda trial: trial.lr)
    losses = ", ".join(f"{trial.loss:.3f} at {trial.lr:g}" for trial in sorted(trials, key=lambda trial: trial.lr))
    how = "best" if chosen is best else f"lowest rate within {_AS_GOOD - 1:.0%} of the best"
    return chosen.lr, f"{how} of {len(trials)} trials of {best.steps} steps; loss {losses} (1: nothing learned)"


def _smoothed(values: Sequence[float], memory: float) -> list[float]:
    """Return the exponential average over about `memory` values, with Adam's bias correction (Kingma and Ba 2015)."""
    keep = 1 - 1 / max(memory, 1.0)
    total = weight = 0.0
    result = []
    for value in values:
        total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
        result.append(total / weight)
    return result


def rounded(rate: float) -> float:
    """Return a rate rounded to the two digits that are printed."""
    return float(f"{rate:.2g}")
