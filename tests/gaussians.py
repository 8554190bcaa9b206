"""Images whose pixels are Gaussian: their best denoiser is known, so samplers, bounds and losses have exact values."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from unfog.diffusion.noise import Path
from unfog.values.conditions import NO_CONDITIONS, Conditions


def gaussian_denoiser(
    mean: float, std: float, path: Path, x: Tensor, logsnr: Tensor, conditions: Conditions = NO_CONDITIONS
) -> Tensor:
    """E[x0 | x_t] of x0 ~ N(mean, std^2)."""
    alpha, sigma = path(logsnr[:, None, None, None])
    return mean + std**2 * alpha * (x - alpha * mean) / ((alpha * std) ** 2 + sigma**2)


def gaussian_flow(mean: float, std: float, path: Path, x: Tensor, levels: tuple[Tensor, Tensor]) -> Tensor:
    """Where the probability flow ODE of N(mean, std^2) leads x from the first log SNR to the second.

    (x - alpha mean) / sqrt(alpha^2 std^2 + sigma^2) is constant along a solution.
    """
    (alpha0, sigma0), (alpha1, sigma1) = map(path, levels)
    standard = (x - alpha0 * mean) / (alpha0**2 * std**2 + sigma0**2).sqrt()
    return alpha1 * mean + (alpha1**2 * std**2 + sigma1**2).sqrt() * standard


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Callable[[], Tensor]:
    """Return a function that draws standard normal noise, the same sequence for each seed."""
    return partial(torch.randn, shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


class LinearGaussian:
    """Images x0 = z @ patterns + std e of K numbers z ~ N(0, covariance): all conditional means are known.

    Args:
        patterns: [K, D], what each number adds to an image of D pixels.
        covariance: [K, K], of the numbers.
        std: deviation of the noise e.
    """

    def __init__(self, patterns: Tensor, covariance: Tensor, std: float) -> None:
        self.patterns, self.covariance, self.std = patterns, covariance, std

    def given(self, told: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean [D] and the covariance [D, D] of x0 given numbers told, [K], NaN where one is not."""
        known = told.isfinite()
        gain = self.covariance[:, known] @ torch.linalg.pinv(self.covariance[known][:, known])
        left = self.covariance - gain @ self.covariance[known]
        noise = self.std**2 * torch.eye(self.patterns.shape[1], dtype=torch.float64)
        return self.patterns.T @ (gain @ told[known]), self.patterns.T @ left @ self.patterns + noise

    def __call__(self, x: Tensor, logsnr: Tensor, conditions: Conditions) -> Tensor:
        """E[x0 | x0 + sigma e, conditions], [B, C, H, W]; the numbers are `conditions.numbers`."""
        assert conditions.numbers is not None
        made = []
        for one, level, told in zip(x.flatten(1), logsnr, conditions.numbers, strict=True):
            mean, covariance = self.given(told)
            noise = (-level).exp() * torch.eye(len(mean), dtype=torch.float64)
            made.append(mean + covariance @ torch.linalg.solve(covariance + noise, one - mean))
        return torch.stack(made).reshape(x.shape)
