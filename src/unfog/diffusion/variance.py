"""Learned variances of the ddpm sampler's steps, and the terms of the variational bound that teach them.

From x_t at one noise level to x_s at the next, the best variance lies between two (Nichol & Dhariwal 2021, section
3.1): that of q(x_s | x_t, x0), right if the image were known (beta tilde), and that of q(x_t | x_s), right if it were
white noise (beta). The network says where in between, by the logarithm and for each number of the image: the second
half of its answer is -1 for the lower and 1 for the upper one. Stated by (alpha, sigma), this holds on every path.

Levels are tensors of logsnr that broadcast with images [B, C, H, W]; a cleaner one than all is +inf.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unfog.diffusion.noise import Cosine, Linear, Path

if TYPE_CHECKING:
    from unfog.diffusion.diffusion import Diffusion

HALF = 1 / 255
"""Half the distance between two of 256 shades in [-1, 1]."""
FAR = -20.0
"""Deviations beyond which the first terms of its series give a Gaussian's tail to 2e-5."""
NARROW = 0.05
"""Shades closer than this, in deviations, are told from a Gaussian by its density, which is good to 1e-4 there."""


def log_variance_bounds(path: Path, logsnr: Tensor, then: Tensor) -> tuple[Tensor, Tensor]:
    """Logs of the lower and the upper variance of a step from a logsnr to a cleaner one.

    Lower: sigma_s^2 (1 - SNR_t / SNR_s). Upper: sigma_t^2 - (alpha_t sigma_s / alpha_s)^2, which is sigma_t^2 times
    that same factor. Of neighbouring timesteps on VP they are beta tilde and beta. To +inf the lower one is 0.
    """
    gone = (-torch.expm1(logsnr - then)).log()
    return 2 * path(then)[1].log() + gone, 2 * path(logsnr)[1].log() + gone


def fraction_of(y: Tensor, channels: int) -> Tensor:
    """How far up from the lower variance, float32 [B, C, H, W], usually in [0, 1]: the second half of the answer y."""
    return (y[:, channels:].float() + 1) / 2


def step_kl(path: Path, x0: Tensor, guess: Tensor, fraction: Tensor | None, logsnr: Tensor, then: Tensor) -> Tensor:
    """KL(q(x_s | x_t, x0) | p(x_s | x_t)) of one step, nats for each number [B, C, H, W] (DDPM, eq. 5 and 7).

    Both means are alpha_s (1 - SNR_t / SNR_s) times their x0, and the same share of x_t. With the lower variance, that
    is where `fraction` is None, it is (SNR_s - SNR_t) / 2 times the squared error.
    """
    lower, upper = log_variance_bounds(path, logsnr, then)
    apart = path(then)[0] * -torch.expm1(logsnr - then) * (x0 - guess)
    if fraction is None:
        return apart.square() * (-lower).exp() / 2
    raised = fraction * (upper - lower)
    return (raised + torch.expm1(-raised) + apart.square() * (-lower - raised).exp()) / 2


def decoder_nll(
    path: Path, x0: Tensor, guess: Tensor, fraction: Tensor | None, logsnr: Tensor, second: Tensor
) -> Tensor:
    """-log p(x0 | x_t) at the cleanest level, nats for each number [B, C, H, W].

    A Gaussian about the guess with that level's noise, (sigma / alpha)^2, or with a learned variance. The lower one
    would be 0 here, and is taken from the step before, which comes from the level `second` (Nichol & Dhariwal 2021).
    """
    alpha, sigma = path(logsnr)
    log_variance = 2 * (sigma.log() - alpha.log())
    if fraction is not None:
        lower, upper = log_variance_bounds(path, second, logsnr)[0], 2 * sigma.log()
        log_variance = lower + fraction * (upper - lower)
    return discretised_nll(x0, guess, log_variance / 2)


def discretised_nll(x0: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """-log of what a Gaussian gives to the shade of x0, one of 256 in [-1, 1], nats; the outermost take the tails."""
    scale = (-log_std).exp()
    a, b = (x0 - HALF - mean) * scale, (x0 + HALF - mean) * scale
    # By symmetry on the side where the distribution function keeps its digits.
    a, b = torch.where(a + b > 0, -b, a), torch.where(a + b > 0, -a, b)
    # log(F(b) - F(a)) = log F(b) + log(1 - F(a) / F(b))
    tail = log_cdf(b)
    ratio = (log_cdf(a) - tail).clamp(max=-1e-6)
    inside = tail + torch.log1p(-ratio.exp())
    width = 2 * HALF * scale
    density = -((a + b) / 2).square() / 2 - math.log(2 * math.pi) / 2 + width.log()
    inside = torch.where(width < NARROW, density, inside)
    lowest = log_cdf((x0 + HALF - mean) * scale)
    highest = log_cdf((mean - x0 + HALF) * scale)
    return -torch.where(x0 < -1 + HALF, lowest, torch.where(x0 > 1 - HALF, highest, inside))


def log_cdf(z: Tensor) -> Tensor:
    """Log of the standard normal distribution function. Torch's own has no finite gradient far out."""
    far = z.clamp(max=FAR)
    tail = -far.square() / 2 - (-far).log() - math.log(2 * math.pi) / 2 - far.square().reciprocal()
    return torch.where(z < FAR, tail, torch.special.log_ndtr(z.clamp_min(FAR)))


def variational_bound(diffusion: Diffusion, y: Tensor, x0: Tensor, x_t: Tensor, logsnr: Tensor) -> Tensor:
    """One term of the bound for each image [B], nats per number, with the variances that the network's answer y holds.

    At logsnr [B], one of the schedule's T levels: the step to the level before, or at timestep 0 the decoder. It moves
    the variance only, and takes the guess of the image as it is (Nichol & Dhariwal 2021).
    """
    guess, fraction = diffusion.recover(y.detach().float(), x_t, logsnr)[0], fraction_of(y, x0.shape[1])
    level = logsnr[:, None, None, None]
    schedule = diffusion.schedule
    assert isinstance(schedule, Linear | Cosine)  # which `Diffusion` has seen to
    before = schedule.before(level)
    first = before.isinf()
    cleanest, second = schedule.cleanest(level)
    # What is not wanted must be finite too, or its gradient, times 0, is not a number.
    now, then = torch.where(first, second, level), torch.where(first, level, before)
    kl = step_kl(diffusion.path, x0, guess, fraction, now, then)
    decoder = decoder_nll(diffusion.path, x0, torch.where(first, guess, x0), fraction, cleanest, second)
    return torch.where(first, decoder, kl).mean((1, 2, 3))


def deviation(path: Path, logsnr: float, then: float, fraction: Tensor) -> Tensor:
    """Standard deviation of a step between two levels, [B, C, H, W]. Guidance may take `fraction` beyond [0, 1]."""
    levels = torch.tensor([logsnr, then], dtype=torch.float64)
    lower, upper = (float(bound) for bound in log_variance_bounds(path, *levels))
    return ((lower + fraction.clamp(0, 1) * (upper - lower)) / 2).exp()
