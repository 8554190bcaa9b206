"""Learning rate that a range test suggests: where its ramp ends, which rates to try next, and which one is best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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


def ramp_stop_reason(start: float, rates: Sequence[float], losses: Sequence[float]) -> str:
    """Return why the ramp stops at the last loss: "not finite", "diverged", or "" if it goes on.

    Diverged means that the smoothed loss is half as high again as at the start, or has lost three quarters of its gain.
    """
    if not math.isfinite(losses[-1]):
        return "not finite"
    smooth = _smoothed(losses, Ramp(start, tuple(rates), tuple(losses), "").memory)
    gain = start - min(smooth)
    # Only of a gain that is no noise can three quarters be lost.
    lost = gain > 0.1 * start and smooth[-1] > start - gain / 4
    return "diverged" if lost or smooth[-1] > 1.5 * start else ""


def next_rates(trials: Sequence[Trial]) -> list[float]:
    """Return the rate of the next trial, if the best of the trials, highest rate first, is at either end."""
    best = min(trials, key=lambda trial: trial.loss)
    if not math.isfinite(best.loss) or best is trials[-1]:
        return [rounded(trials[-1].lr / 3)]
    return [rounded(trials[0].lr * 3)] if best is trials[0] else []


def suggest(ramp: Ramp, trials: Sequence[Trial]) -> tuple[float | None, str]:
    """Return the rate and its reason, from the trials, or from the ramp alone if there are none."""
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
    """Return a rate to two digits, as it is printed and typed."""
    return float(f"{rate:.2g}")
