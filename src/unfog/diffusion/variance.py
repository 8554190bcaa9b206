"""Learned variances of the ddpm sampler's steps, and the terms of the variational bound that teach them.

From x_t at one noise level to x_s at the next, the best variance lies between two (Nichol & Dhariwal 2021, section
3.1): that of q(x_s | x_t, x0), right if the image were known (beta tilde), and that of q(x_t | x_s), right if it were
white noise (beta). The network interpolates the logarithm between them for each number of the image,
variance = exp(f log upper + (1 - f) log lower) (eq. 15): the second half of its output, 2 f - 1, is -1 for the lower
and 1 for the upper bound. Stated by (alpha, sigma), this holds on every path.

Levels are tensors of logsnr that broadcast with images [B, C, H, W]; a cleaner one than all is +inf.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from unfog.diffusion.ddpm_schedules import TimestepSchedule
from unfog.diffusion.noise import Path

if TYPE_CHECKING:
    from unfog.diffusion.diffusion import Diffusion

_HALF = 1 / 255  # half the distance between two of 256 shades in [-1, 1]
_FAR = -20.0  # deviations beyond which the first terms of its series give a Gaussian's tail to 2e-5
# Width of a shade, in deviations, below which its probability is the density times the width, exact to 1e-4.
_NARROW = 0.05


class Prediction(NamedTuple):
    """Output of the network for images at one noise level."""

    x0: Tensor
    """Guess of the clean image, [B, C, H, W]."""
    fraction: Tensor | None
    """Place of the variance between its bounds, [B, C, H, W]; None is the lower one, of a network that learned none."""


def _log_variance_bounds(path: Path, logsnr: Tensor, then: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logs of the lower and the upper variance of a step from a logsnr to a cleaner one.

    Lower: sigma_s^2 (1 - SNR_t / SNR_s). Upper: sigma_t^2 - (alpha_t sigma_s / alpha_s)^2, which is sigma_t^2 times
    that same factor. For neighbouring timesteps on VP they are beta tilde and beta. To +inf the lower is 0.
    """
    gone = (-torch.expm1(logsnr - then)).log()
    return 2 * path(then)[1].log() + gone, 2 * path(logsnr)[1].log() + gone


def fraction_of(y: Tensor, channels: int) -> Tensor:
    """Return the place of the variance between its bounds, 0 to 1, [B, C, H, W], from the network's output y."""
    return (y[:, channels:].float() + 1) / 2


def step_kl(path: Path, x0: Tensor, predicted: Prediction, logsnr: Tensor, then: Tensor) -> Tensor:
    """Return KL(q(x_s | x_t, x0) | p(x_s | x_t)) of one step, nats for each number [B, C, H, W] (DDPM, eq. 5 and 7).

    Both means are alpha_s (1 - SNR_t / SNR_s) times their x0, plus the same multiple of x_t. With the lower variance it
    is (SNR_s - SNR_t) / 2 times the squared error.
    """
    guess, fraction = predicted
    lower, upper = _log_variance_bounds(path, logsnr, then)
    apart = path(then)[0] * -torch.expm1(logsnr - then) * (x0 - guess)
    if fraction is None:
        return apart.square() * (-lower).exp() / 2
    raised = fraction * (upper - lower)
    return (raised + torch.expm1(-raised) + apart.square() * (-lower - raised).exp()) / 2


def decoder_nll(path: Path, x0: Tensor, predicted: Prediction, logsnr: Tensor, second: Tensor) -> Tensor:
    """Return -log p(x0 | x_t) at the cleanest level, nats for each number [B, C, H, W].

    It is a Gaussian about the guess with that level's noise, (sigma / alpha)^2, or with a learned variance, whose lower
    bound, 0 here, is taken from the step before, which starts at level `second` (Nichol & Dhariwal 2021).
    """
    guess, fraction = predicted
    alpha, sigma = path(logsnr)
    log_variance = 2 * (sigma.log() - alpha.log())
    if fraction is not None:
        lower, upper = _log_variance_bounds(path, second, logsnr)[0], 2 * sigma.log()
        log_variance = lower + fraction * (upper - lower)
    return _discretised_nll(x0, guess, log_variance / 2)


def _discretised_nll(x0: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Return -log P(shade of x0), one of 256 in [-1, 1], under a Gaussian, nats; the outermost include the tails."""
    scale = (-log_std).exp()
    a, b = (x0 - _HALF - mean) * scale, (x0 + _HALF - mean) * scale
    # Mirrored to the side where the distribution function keeps its precision.
    a, b = torch.where(a + b > 0, -b, a), torch.where(a + b > 0, -a, b)
    # log(F(b) - F(a)) = log F(b) + log(1 - F(a) / F(b))
    tail = _log_cdf(b)
    ratio = (_log_cdf(a) - tail).clamp(max=-1e-6)
    inside = tail + torch.log1p(-ratio.exp())
    width = 2 * _HALF * scale
    density = -((a + b) / 2).square() / 2 - math.log(2 * math.pi) / 2 + width.log()
    inside = torch.where(width < _NARROW, density, inside)
    lowest = _log_cdf((x0 + _HALF - mean) * scale)
    highest = _log_cdf((mean - x0 + _HALF) * scale)
    return -torch.where(x0 < -1 + _HALF, lowest, torch.where(x0 > 1 - _HALF, highest, inside))


def _log_cdf(z: Tensor) -> Tensor:
    """Return the log of the standard normal distribution function, with finite gradients."""
    # The gradient of torch's own is not finite far out.
    far = z.clamp(max=_FAR)
    tail = -far.square() / 2 - (-far).log() - math.log(2 * math.pi) / 2 - far.square().reciprocal()
    return torch.where(z < _FAR, tail, torch.special.log_ndtr(z.clamp_min(_FAR)))


def variational_bound(diffusion: Diffusion, y: Tensor, x0: Tensor, x_t: Tensor, logsnr: Tensor) -> Tensor:
    """Return one term of the bound for each image [B], nats per dimension, with the variances in the output y.

    At logsnr [B], one of the schedule's T levels, it is the step to the level before, or at timestep 0 the decoder. Its
    gradient reaches the variance only, not the guess of the image (Nichol & Dhariwal 2021).
    """
    guess, fraction = diffusion.recover(y.detach().float(), x_t, logsnr)[0], fraction_of(y, x0.shape[1])
    level = logsnr[:, None, None, None]
    schedule = diffusion.schedule
    assert isinstance(schedule, TimestepSchedule)  # checked by `Diffusion`
    before = schedule.before(level)
    first = before.isinf()
    cleanest, second = schedule.cleanest(level)
    # The branch that is not selected must be finite too, or its gradient, times 0, is NaN.
    now, then = torch.where(first, second, level), torch.where(first, level, before)
    kl = step_kl(diffusion.path, x0, Prediction(guess, fraction), now, then)
    nearest = Prediction(torch.where(first, guess, x0), fraction)
    decoder = decoder_nll(diffusion.path, x0, nearest, cleanest, second)
    return torch.where(first, decoder, kl).mean((1, 2, 3))


def deviation(path: Path, logsnr: float, then: float, fraction: Tensor) -> Tensor:
    """Return the standard deviation of a step between two levels, [B, C, H, W]; clamps `fraction` to [0, 1]."""
    levels = torch.tensor([logsnr, then], dtype=torch.float64)
    lower, upper = (float(bound) for bound in _log_variance_bounds(path, *levels))
    return ((lower + fraction.clamp(0, 1) * (upper - lower)) / 2).exp()
