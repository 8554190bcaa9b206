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


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Callable[[], Tensor]:
    """Return a function that draws standard normal noise, the same sequence for each seed."""
    return partial(torch.randn, shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
