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
"""sigma / alpha beyond which no signal is left to speak of; EDM starts at 80."""


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
    """A level that was visited: where x was, and what was guessed from it."""

    level: Level
    x: Tensor
    x0: Tensor


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
    """x' = alpha' x0 + sigma' eps: the same image and noise, mixed anew (Song et al. 2021, eq. 12)."""
    return then.alpha * x0 + then.sigma / now.sigma * (x - now.alpha * x0)


def ddpm(
    x: Tensor, x0: Tensor, now: Level, then: Level, draw: Callable[[], Tensor], std: Tensor | None = None
) -> Tensor:
    """A draw from the posterior q(x' | x, x0), for any two levels (DDPM, eq. 7; the "fixed small" variance).

    In z the mean is x0 + (s' / s)^2 (z - x0) and the variance s'^2 (1 - (s' / s)^2): DDIM, with s' / s of the
    noise kept and the rest drawn afresh; or with another deviation `std`, which was learned.
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
    (s' - s) / 2 ((z' - x0') / s' - (z' - x0) / s'). Out of pure noise the slope is constant, which makes
    Euler's step exact, and this mean, whose error grows with s / s', far off where s' is much smaller.
    """
    euler = ddim(x, x0, now, then)
    if then.sigma == 0 or now.s > PURE_NOISE:
        return euler
    return euler + then.alpha * (now.s / then.s - 1) / 2 * (predict(euler, then) - x0)


def churn(x: Tensor, now: Level, then: Level, noise: float, draw: Callable[[], Tensor]) -> Tensor:
    """Back to a noisier level: z' = z + noise sqrt(s'^2 - s^2) eps (EDM, Algorithm 2, line 6)."""
    return then.alpha * (x / now.alpha + noise * math.sqrt(then.s**2 - now.s**2) * draw())


def mid_step(x0: Tensor, now: Level, then: Level, before: Sequence[Visit]) -> Tensor:
    """x0 extrapolated to the middle of the step in logsnr, from the last two guesses.

    With it DDIM's step is DPM-Solver++(2M) (Lu et al. 2022, Algorithm 2), and DDPM's is that paper's
    SDE-DPM-Solver++(2M). It is x0 as it is where there is nothing to extrapolate from or to: at the start, after pure
    noise, at the end.
    """
    if not before or then.sigma == 0:
        return x0
    last = before[-1]
    ahead = (then.logsnr - now.logsnr) / (now.logsnr - last.level.logsnr) / 2
    return x0 + ahead * (x0 - last.x0)


def dpmpp3(x: Tensor, x0: Tensor, now: Level, then: Level, before: Sequence[Visit]) -> Tensor:
    """DPM-Solver++(3M): x0 as the parabola in lambda through the last three guesses, integrated exactly.

    Lu et al. 2022, carried to third order: with x0(l) = x0 + slope l + bend l^2 a distance l in lambda ahead, the step
    is alpha' times the integral of exp(l - h) x0(l). The authors' code, and what was made of it, has half of the last
    term, which leaves it of second order.
    """
    before = _with_signal(before)
    if len(before) < 2 or then.sigma == 0:
        return ddim(x, mid_step(x0, now, then, before), now, then)
    older_one, newer_one = before[-2:]
    path = [older_one.level.logsnr, newer_one.level.logsnr, now.logsnr, then.logsnr]
    h1, h0, h = ((b - a) / 2 for a, b in pairwise(path))
    newer, older = (x0 - newer_one.x0) / h0, (newer_one.x0 - older_one.x0) / h1
    bend = (newer - older) / (h0 + h1)  # half of the second derivative
    slope = newer + h0 * bend
    phi = math.expm1(-h) + h  # h^2 / 2 - h^3 / 6 + ...
    return ddim(x, x0, now, then) + then.alpha * (phi * slope - (2 * phi - h**2) * bend)


def unipc_predict(x: Tensor, x0: Tensor, now: Level, then: Level, before: Sequence[Visit], order: int) -> Tensor:
    """UniP-p with B(h) = exp(-h) - 1 (Zhao et al. 2023, Algorithm 2, "B2"), p up to `order` or what `before` allows."""
    if then.sigma == 0:
        return x0
    before = _with_signal(before)[-(order - 1) :] if order > 1 else []
    h, ratios = _ratios(now, then, before)
    # For p = 2 the authors take 1/2, which is as good to that order, and steadier.
    weights = [0.5] if len(before) == 1 else _solve(ratios, h)
    return _unipc(x, x0, now, then, [(w / r, visit.x0) for w, r, visit in zip(weights, ratios, before)])


def unipc_correct(x0: Tensor, then: Level, before: Sequence[Visit], order: int) -> Tensor:
    """UniC-p: the step that led to level `then`, taken once more, now that x0 is known there; its order is p + 1.

    Args:
        x0: guessed from where UniP-p led; the network is not asked again.
        then: the level that it led to.
        before: what was visited; the step began at the last.
        order: p, as for the step that is corrected.
    """
    start, earlier = before[-1], _with_signal(before[:-1])[-(order - 1) :] if order > 1 else []
    h, ratios = _ratios(start.level, then, earlier)
    weights = [0.5] if not earlier else _solve([*ratios, 1.0], h)
    guesses = [*((w / r, visit.x0) for w, r, visit in zip(weights, ratios, earlier)), (weights[-1], x0)]
    return _unipc(start.x, start.x0, start.level, then, guesses)


def _unipc(x: Tensor, x0: Tensor, now: Level, then: Level, guesses: Sequence[tuple[float, Tensor]]) -> Tensor:
    """DDIM's step, and alpha' (1 - exp(-h)) of the weighted differences of other guesses from x0."""
    out = ddim(x, x0, now, then)
    scale = then.alpha * (1 - then.s / now.s)
    for weight, guess in guesses:
        out = out + scale * weight * (guess - x0)
    return out


def _ratios(now: Level, then: Level, others: Sequence[Visit]) -> tuple[float, list[float]]:
    """The step h in lambda, and where other visits are, seen from `now` and in units of h."""
    h = (then.logsnr - now.logsnr) / 2
    return h, [(visit.level.logsnr - now.logsnr) / 2 / h for visit in others]


def _solve(ratios: Sequence[float], h: float) -> list[float]:
    """Weights of the differences at these places that integrate polynomials exactly (Zhao et al. 2023, Theorem 3.1).

    sum_k weight_k ratio_k^(i - 1) = i! phi_(i + 1)(-h) (-h) / B(h), i = 1, 2, ...
    """
    import torch

    if not ratios:
        return []
    at = torch.tensor(ratios, dtype=torch.float64)
    rows = torch.stack([at**i for i in range(len(ratios))])
    wanted, phi, factorial = [], math.expm1(-h) / -h - 1, 1
    for i in range(1, len(ratios) + 1):
        wanted.append(phi * factorial / math.expm1(-h))
        factorial *= i + 1
        phi = phi / -h - 1 / factorial
    weights: list[float] = torch.linalg.solve(rows, at.new_tensor(wanted)).tolist()
    return weights


def _with_signal(visits: Sequence[Visit]) -> list[Visit]:
    """Those at a finite logsnr: from pure noise there is no distance to measure."""
    return [visit for visit in visits if visit.level.alpha > 0]
