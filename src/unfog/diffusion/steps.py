"""Steps from one noise level to the next, on E[x0 | x_t]; `sampler` walks them.

Every step reads the state as x = alpha x0 + sigma eps, with the present guesses of x0 and eps, and goes to
the next level (alpha', sigma'). In z = x / alpha and s = sigma / alpha they are the textbook's formulas; in this
form they also hold at alpha = 0, where a schedule with zero terminal SNR starts and z is infinite. The last
level is clean, so every step into it ends with x = x0. Coefficients are Python floats, in double precision.

Where papers write lambda = log(alpha / sigma), half of logsnr, and h for the step in it: exp(-h) = s' / s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

PURE_NOISE = 100.0
"""sigma / alpha beyond which the signal is negligible; EDM starts at 80."""


class Level(NamedTuple):
    """A noise level on a path."""

    logsnr: float
    alpha: float
    sigma: float

    @property
    def s(self) -> float:
        """Noise relative to signal, sigma / alpha; infinite in pure noise."""
        return self.sigma / self.alpha if self.alpha > 0 else math.inf


class Visit(NamedTuple):
    """A visited level, with the state x there and the guess x0 from it."""

    level: Level
    x: Tensor
    x0: Tensor


class SamplingStep(NamedTuple):
    """A step of a batch that is being sampled, as observers see it: after the guess, before the step is made."""

    number: int
    """From 0, counted on where an edit walks the levels several times."""
    logsnr: float
    """Noise level of x_t; with `adaptive`, where each image has its own, that of the first one."""
    x_t: Tensor
    """State before the step, [N, C, H, W]."""
    x0: Tensor
    """Clean images guessed from it, [N, C, H, W]."""
    first: int = 0
    """Number of the first image of the batch; it identifies the batch."""


Observe = Callable[[SamplingStep], object]
"""Called at each step. Where it returns True, sampling ends there."""


class Watch:
    """Observer of one batch, which may take several walks: counts its steps on, and remembers that it was stopped.

    Args:
        observe: called at each step.
        first: number of the first image of the batch.
    """

    stopped = False

    def __init__(self, observe: Observe, first: int = 0) -> None:
        self._observe, self._first, self._count = observe, first, 0

    def __call__(self, step: SamplingStep) -> bool:
        self.stopped = self._observe(step._replace(number=self._count, first=self._first)) is True
        self._count += 1
        return self.stopped


class StepContext(NamedTuple):
    """All that a step may use besides the state."""

    predict: Callable[[Tensor, Level], Tensor]
    """E[x0 | x] at another level: one more call of the network."""
    before: Sequence[Visit]
    """Up to three visits, the newest last."""
    draw: Callable[[], Tensor]
    """Fresh standard normal noise [N, C, H, W]."""


Step = Callable[["Tensor", "Tensor", Level, Level, StepContext], "Tensor"]
"""(x, x0, now, then, context) -> x at the next level: what `unfog.custom` registers and imports as a sampler."""


def ddim(x: Tensor, x0: Tensor, now: Level, then: Level) -> Tensor:
    """DDIM: x' = alpha' x0 + sigma' eps, eps = (x - alpha x0) / sigma: the same image and noise, mixed anew.

    Song et al. 2021, eq. 12 with sigma_t = 0.
    """
    return then.alpha * x0 + then.sigma / now.sigma * (x - now.alpha * x0)


def ddpm(
    x: Tensor, x0: Tensor, now: Level, then: Level, draw: Callable[[], Tensor], std: Tensor | None = None
) -> Tensor:
    """DDPM: draw from the posterior q(x' | x, x0), for any two levels (Ho et al. 2020, eq. 7; "fixed small" variance).

    x' = alpha' x0 + sigma' (r eps + sqrt(1 - r^2) eps_new) with r = s' / s: DDIM, with r of the noise kept and the rest
    drawn afresh. In z the mean is x0 + r^2 (z - x0) and the variance s'^2 (1 - r^2). `std`, a learned deviation, takes
    the place of sigma' sqrt(1 - r^2).
    """
    if then.sigma == 0:
        return x0
    kept = then.s / now.s
    eps = (x - now.alpha * x0) / now.sigma
    if std is not None:
        return then.alpha * x0 + then.sigma * kept * eps + std * draw()
    return then.alpha * x0 + then.sigma * (kept * eps + math.sqrt(1 - kept**2) * draw())


def heun(x: Tensor, x0: Tensor, now: Level, then: Level, predict: Callable[[Tensor, Level], Tensor]) -> Tensor:
    """Second-order step of dz / ds = (z - x0) / s (EDM, Algorithm 1, no churn); Euler's into the last level.

    Euler's step is DDIM's. With x0' guessed from where it lands, the mean of both slopes moves z' by
    (s' - s) / 2 ((z' - x0') / s' - (z' - x0) / s').
    """
    euler = ddim(x, x0, now, then)
    # In pure noise the slope is constant: Euler is exact there, and the error of the mean grows with s / s'.
    if then.sigma == 0 or now.s > PURE_NOISE:
        return euler
    return euler + then.alpha * (now.s / then.s - 1) / 2 * (predict(euler, then) - x0)


def churn(x: Tensor, now: Level, then: Level, noise: float, draw: Callable[[], Tensor]) -> Tensor:
    """Add noise up to a noisier level: z' = z + noise sqrt(s'^2 - s^2) eps_new (EDM, Algorithm 2, line 6)."""
    return then.alpha * (x / now.alpha + noise * math.sqrt(then.s**2 - now.s**2) * draw())


def mid_step(x0: Tensor, now: Level, then: Level, before: Sequence[Visit]) -> Tensor:
    """Extrapolate x0 to the middle of the step: x0 + h / (2 h_last) (x0 - x0_last), h the step in lambda.

    With it DDIM's step is DPM-Solver++(2M) (Lu et al. 2022, Algorithm 2), and DDPM's is that paper's
    SDE-DPM-Solver++(2M). At the start, after pure noise and at the end x0 stays as it is.
    """
    if not before or then.sigma == 0:
        return x0
    last = before[-1]
    ahead = (then.logsnr - now.logsnr) / (now.logsnr - last.level.logsnr) / 2
    return x0 + ahead * (x0 - last.x0)


def dpmpp3(x: Tensor, x0: Tensor, now: Level, then: Level, before: Sequence[Visit]) -> Tensor:
    """DPM-Solver++(3M): x0 as the parabola in lambda through the last three guesses, integrated exactly.

    x' = sigma' / sigma x + alpha' integral_0^h exp(l - h) x0(l) dl, where x0(l) = x0 + slope l + bend l^2 is the guess
    a distance l in lambda ahead (Lu et al. 2022, the exact solution for x0 prediction, carried to third order).
    """
    before = _with_signal(before)
    if len(before) < 2 or then.sigma == 0:
        return ddim(x, mid_step(x0, now, then, before), now, then)
    older_one, newer_one = before[-2:]
    path = [older_one.level.logsnr, newer_one.level.logsnr, now.logsnr, then.logsnr]
    h1, h0, h = ((b - a) / 2 for a, b in pairwise(path))
    newer, older = (x0 - newer_one.x0) / h0, (newer_one.x0 - older_one.x0) / h1
    # The authors' code, and ports of it, have half of the last term, which leaves them of second order.
    bend = (newer - older) / (h0 + h1)  # half of the second derivative
    slope = newer + h0 * bend
    phi = math.expm1(-h) + h  # h^2 / 2 - h^3 / 6 + ...
    return ddim(x, x0, now, then) + then.alpha * (phi * slope - (2 * phi - h**2) * bend)


def unipc_predict(x: Tensor, x0: Tensor, now: Level, then: Level, before: Sequence[Visit], order: int) -> Tensor:
    """UniP-p with B(h) = exp(-h) - 1 (Zhao et al. 2023, Algorithm 2, "B2"), p up to `order` or what `before` allows.

    x' = DDIM + alpha' (1 - exp(-h)) sum_k (w_k / r_k) (x0_k - x0), for earlier guesses x0_k at a distance r_k h.
    """
    if then.sigma == 0:
        return x0
    before = _with_signal(before)[-(order - 1) :] if order > 1 else []
    h, ratios = _ratios(now, then, before)
    # For p = 2 the authors take 1/2, which is as exact to that order, and more stable.
    weights = [0.5] if len(before) == 1 else _solve(ratios, h)
    return _unipc(x, x0, now, then, [(w / r, visit.x0) for w, r, visit in zip(weights, ratios, before)])


def unipc_correct(x0: Tensor, then: Level, before: Sequence[Visit], order: int) -> Tensor:
    """UniC-p: repeat the step that led to level `then`, now that x0 is known there; its order is p + 1.

    The formula of `unipc_predict`, with the new guess as one more x0_k at r_k = 1 (Zhao et al. 2023, Algorithm 1).

    Args:
        x0: the guess from the result of UniP-p; the network is not called again.
        then: the level of that result.
        before: the visited levels; the step began at the last.
        order: p of the step to correct.
    """
    start, earlier = before[-1], _with_signal(before[:-1])[-(order - 1) :] if order > 1 else []
    h, ratios = _ratios(start.level, then, earlier)
    weights = [0.5] if not earlier else _solve([*ratios, 1.0], h)
    guesses = [*((w / r, visit.x0) for w, r, visit in zip(weights, ratios, earlier)), (weights[-1], x0)]
    return _unipc(start.x, start.x0, start.level, then, guesses)


def _unipc(x: Tensor, x0: Tensor, now: Level, then: Level, guesses: Sequence[tuple[float, Tensor]]) -> Tensor:
    """Add alpha' (1 - exp(-h)) times the weighted differences of other guesses from x0 to DDIM's step."""
    out = ddim(x, x0, now, then)
    scale = then.alpha * (1 - then.s / now.s)
    for weight, guess in guesses:
        out = out + scale * weight * (guess - x0)
    return out


def _ratios(now: Level, then: Level, others: Sequence[Visit]) -> tuple[float, list[float]]:
    """Return the step h in lambda, and the distances of other visits from `now` in units of h."""
    h = (then.logsnr - now.logsnr) / 2
    return h, [(visit.level.logsnr - now.logsnr) / 2 / h for visit in others]


def _solve(ratios: Sequence[float], h: float) -> list[float]:
    """Return weights of the differences that integrate polynomials exactly (Zhao et al. 2023, Theorem 3.1).

    sum_k weight_k ratio_k^(i - 1) = i! phi_(i + 1)(-h) (-h) / B(h), i = 1, 2, ...
    """
    import torch

    if not ratios:
        return []
    at = torch.tensor(ratios, dtype=torch.float64)
    rows = torch.stack([at**i for i in range(len(ratios))])
    moments, phi, factorial = [], math.expm1(-h) / -h - 1, 1
    for i in range(1, len(ratios) + 1):
        moments.append(phi * factorial / math.expm1(-h))
        factorial *= i + 1
        phi = phi / -h - 1 / factorial
    weights: list[float] = torch.linalg.solve(rows, at.new_tensor(moments)).tolist()
    return weights


def _with_signal(visits: Sequence[Visit]) -> list[Visit]:
    """Return the visits at a finite logsnr: from pure noise all distances are infinite."""
    return [visit for visit in visits if visit.level.alpha > 0]
