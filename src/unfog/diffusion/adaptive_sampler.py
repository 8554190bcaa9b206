"""DPM-Solver++(2M) with adaptive step sizes: each image has its own, chosen by a tolerance."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from unfog.diffusion.noise import Path
from unfog.diffusion.steps import PURE_NOISE, Level, Observe, SamplingStep

if TYPE_CHECKING:
    from torch import Tensor

# The tolerance is relative to |x|, but at least to this: 0.05 of it is one of 256 grey levels.
_FLOOR = 0.15
_MOST_STEPS = 500  # no step is shorter than this part of the way
# A step is at most so many times as long as the one before, as its error is estimated from the last two guesses.
_GROWTH = 1.5
# A millionth of the interval, far finer than the estimate of the error that it solves for.
_BISECTIONS = 20


def adaptive(
    predict: Callable[[Tensor, Tensor], Tensor],
    path: Path,
    levels: Sequence[Level],
    x: Tensor,
    cleanest: float,
    steps: int,
    tolerance: float,
    observe: Observe | None = None,
) -> Tensor:
    """Sample images, each in steps as long as `tolerance` allows; the batch goes on until its last image is done.

    Two results of a step differ by what the second order adds to the first (an embedded pair, as of Jolicoeur-Martineau
    et al. 2021 and the DPM-Solver-12 of Lu et al. 2022), which is

        alpha' (1 - exp(-h)) h / (2 h_last) (x0 - x0_last)

    for a step h in lambda after one of h_last. In a multistep method both guesses of x0 are known before the step, so
    the longest step that keeps this within the tolerance is found without the network: one call a step, and none is
    rejected. The steps of an image depend on its own x alone, so that its batch does not matter.

    Args:
        predict: E[x0 | x_t] for (x_t [N, C, H, W], logsnr float64 [N]).
        path: maps logsnr to alpha and sigma.
        levels: only the first and the last are used.
        x: x_t at the first, [N, C, H, W].
        cleanest: logsnr from which x0 is guessed, where the last level is clean.
        steps: the first step is 1 / steps of the way.
        tolerance: root mean square of that difference over an image, relative to |x|, at unit variance of x.
        observe: called at each step, with the logsnr of the first image; sampling ends where it returns True.

    Returns:
        [N, C, H, W]: the guess of x0 at the cleanest level, or x_t at the last level if that is not clean.
    """
    import torch

    first, last = levels[0].logsnr, levels[-1].logsnr
    start, end = max(first, -2 * math.log(PURE_NOISE)), min(last, cleanest)
    logsnr, called = torch.full((len(x),), first, dtype=torch.float64), 0
    if first < start:  # while x is pure noise x0 does not change, and logsnr may be infinite
        x0 = predict(x, logsnr)
        if observe and observe(SamplingStep(0, first, x, x0)) is True:
            return x0
        x, logsnr, called = _ddim(path, x, x0, logsnr, then := torch.full_like(logsnr, start)), then, 1

    shortest = max(0.0, end - start) / _MOST_STEPS
    step = torch.full_like(logsnr, (end - start) / steps)
    before: Tensor | None = None
    result, done = x, torch.zeros(len(x), dtype=torch.bool)
    while True:
        if last < cleanest and (logsnr >= end).all():
            return x
        x0 = predict(x, logsnr)
        if observe and observe(SamplingStep(called, float(logsnr[0]), x, x0)) is True:
            return x0
        called += 1
        # The first guess at its end is an image's result: it stays in the batch, and later calls must not change it.
        result = torch.where(_like((logsnr >= end) & ~done, x).bool(), x0, result)
        done = logsnr >= end
        if done.all():
            return result
        left = end - logsnr
        if before is None:
            longest, guess = torch.minimum(step, left), x0
        else:
            change = _relative_change(path, logsnr, x, x0 - before, tolerance)
            longest = _longest(path, logsnr, step, change, torch.minimum(_GROWTH * step, left), shortest)
            guess = x0 + _like(longest / (2 * step), x) * (x0 - before)
        # Land on the end exactly, without a tiny last step before it; finished images stay there.
        then = torch.where(left - longest < shortest, end, logsnr + longest)
        step = torch.where(done, step, then - logsnr)
        before, x, logsnr = x0, _ddim(path, x, guess, logsnr, then), then


def _like(scalars: Tensor, x: Tensor) -> Tensor:
    """Reshape float64 [N] to broadcast with x [N, C, H, W], in its type and on its device."""
    return scalars.to(x.dtype).to(x.device)[:, None, None, None]  # in this order: some devices have no float64


def _ddim(path: Path, x: Tensor, x0: Tensor, now: Tensor, then: Tensor) -> Tensor:
    """Return DDIM's step from levels `now` to `then`, logsnr [N] each."""
    (alpha, sigma), (alpha_then, sigma_then) = path(now), path(then)
    kept = sigma_then / sigma
    return _like(alpha_then - kept * alpha, x) * x0 + _like(kept, x) * x


def _relative_change(path: Path, logsnr: Tensor, x: Tensor, change: Tensor, tolerance: float) -> Tensor:
    """Return the root mean square [N] of a change of x0 over the change that is allowed, at unit variance; float64."""
    alpha, sigma = path(logsnr)
    x = x / _like((alpha**2 + sigma**2).sqrt(), x)
    relative = change / (tolerance * x.abs().clamp(min=_FLOOR))
    return relative.flatten(1).cpu().double().square().mean(1).sqrt()  # MPS has no float64


def _longest(path: Path, logsnr: Tensor, last: Tensor, change: Tensor, longest: Tensor, shortest: float) -> Tensor:
    """Return the longest step in logsnr [N], `shortest` to `longest`, whose results differ by at most the tolerance."""

    def excess(step: Tensor) -> Tensor:
        alpha, sigma = path(logsnr + step)
        reach = alpha / (alpha**2 + sigma**2).sqrt() * -(-step / 2).expm1()
        return reach * step / (2 * last) * change

    low, high = longest.clamp(max=shortest), longest
    fits = excess(high) <= 1
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        good = excess(middle) <= 1
        low, high = middle.where(good, low), high.where(good, middle)
    return longest.where(fits, low)
