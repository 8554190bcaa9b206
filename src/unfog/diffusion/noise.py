"""Noise and its levels: a path mixes image and noise, a schedule says how often each level is visited.

A *path* maps logsnr to the pair (alpha, sigma) of x_t = alpha x0 + sigma eps. A *schedule* maps a quantile u,
from 0 (clean) to 1 (noisy), to logsnr; `quantile` maps it back. Training draws u; sampling walks `levels`.
Both are elementwise, on tensors of any shape and floating type.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from unfog.device.copies import to_device
from unfog.diffusion.ddpm_schedules import LAST, Cosine, Linear, Sigmoid, trailing
from unfog.errors import RequestError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = [
    "EDM_LIMITS",
    "PATHS",
    "SCHEDULES",
    "VE",
    "VP",
    "Cosine",
    "Flow",
    "FlowUniform",
    "Grid",
    "Linear",
    "LogNormal",
    "LogitNormal",
    "NoiseSource",
    "Path",
    "Schedule",
    "Sigmoid",
    "cleanest_level",
    "karras",
    "noise_levels",
]


@dataclass(frozen=True)
class VP:
    """Variance preserving: alpha^2 + sigma^2 = 1 (Ho et al. 2020, eq. 4; Song et al. 2021, eq. 11).

    alpha = sqrt(sigmoid(logsnr)), sigma = sqrt(sigmoid(-logsnr)). DDPM's alpha_bar is alpha^2.
    """

    kind: ClassVar[str] = "vp"

    def __call__(self, logsnr: Tensor) -> tuple[Tensor, Tensor]:
        """Map logsnr to (alpha, sigma), both in [0, 1]."""
        # Not sqrt(1 - alpha^2), which loses all digits of sigma where alpha is nearly 1.
        return logsnr.sigmoid().sqrt(), (-logsnr).sigmoid().sqrt()


@dataclass(frozen=True)
class VE:
    """Variance exploding: alpha = 1, sigma = exp(-logsnr / 2) (Song et al. 2021, eq. 9; EDM)."""

    kind: ClassVar[str] = "ve"

    def __call__(self, logsnr: Tensor) -> tuple[Tensor, Tensor]:
        """Map logsnr to (alpha, sigma) = (1, sigma)."""
        return logsnr.new_ones(logsnr.shape), (-logsnr / 2).exp()


@dataclass(frozen=True)
class Flow:
    """Straight line from image to noise: alpha = 1 - t, sigma = t, t = sigmoid(-logsnr / 2).

    Rectified flow (Liu et al. 2023, eq. 1) and flow matching (Lipman et al. 2023, eq. 20 with sigma_min = 0), which
    write x1 for the image and run time from noise to image.
    """

    kind: ClassVar[str] = "flow"

    def __call__(self, logsnr: Tensor) -> tuple[Tensor, Tensor]:
        """Map logsnr to (1 - t, t), both in [0, 1]."""
        return (logsnr / 2).sigmoid(), (-logsnr / 2).sigmoid()


class _Normal:
    """Base of `LogNormal` and `LogitNormal`: ln(sigma / alpha) is normally distributed.

    logsnr = -2 (mean + std Phi^-1(u)), where Phi is the standard normal distribution function.
    """

    steps: ClassVar[int] = 0
    mean: float
    std: float

    def __call__(self, u: Tensor) -> Tensor:
        """Map quantile u in (0, 1) to logsnr = -2 ln(sigma / alpha)."""
        normal = math.sqrt(2) * (2 * u - 1).erfinv()
        return -2 * (self.mean + self.std * normal)

    def quantile(self, logsnr: Tensor) -> Tensor:
        """Map logsnr to u, the inverse of a call."""
        normal = (-logsnr / 2 - self.mean) / self.std
        return ((normal / math.sqrt(2)).erf() + 1) / 2

    def snr_slope(self, logsnr: Tensor) -> Tensor:
        """Return -dSNR/du = SNR 2 std / density of the normal."""
        normal = (-logsnr / 2 - self.mean) / self.std
        return 2 * self.std * math.sqrt(2 * math.pi) * (logsnr + normal.square() / 2).exp()

    def __post_init__(self) -> None:
        # Beyond these, float32 holds neither the image nor the noise.
        if not 0 < self.std <= 10:
            raise RequestError(f"std = {self.std}: must be above 0 and at most 10, for example 1")
        if not -20 <= self.mean <= 20:
            raise RequestError(f"mean = {self.mean}: must be from -20 to 20; EDM has -1.2")


@dataclass(frozen=True)
class LogNormal(_Normal):
    """ln(sigma / alpha) ~ N(mean, std^2) (EDM, Table 1: P_mean and P_std)."""

    kind: ClassVar[str] = "lognormal"
    mean: float = -1.2
    """Mean of ln(sigma / alpha); EDM's, for 32 to 64 pixels."""
    std: float = 1.2
    """Standard deviation of ln(sigma / alpha)."""

    def limits(self) -> tuple[float, float]:
        """Return (noisiest, cleanest) logsnr: sigma = 80 and 0.002 (EDM, Table 1)."""
        return EDM_LIMITS

    def levels(self, steps: int) -> Tensor:
        """Return EDM's own time steps (eq. 5), float64 [steps], noisiest first."""
        return karras(steps, *self.limits())


@dataclass(frozen=True)
class LogitNormal(_Normal):
    """logit t ~ N(mean, std^2) (Esser et al. 2024, section 3.1): also log-normal, as logit t = ln(sigma / alpha)."""

    kind: ClassVar[str] = "logitnormal"
    mean: float = 0.0
    """Mean of logit t; above 0 favours noisy levels: ln S is a shift by S."""
    std: float = 1.0
    """Standard deviation of logit t."""

    def limits(self) -> tuple[float, float]:
        """Return (noisiest, cleanest) logsnr: t = 0.999 and 0.001."""
        return FlowUniform().limits()

    def levels(self, steps: int) -> Tensor:
        """Return logsnr of evenly spaced t, float64 [steps], noisiest first: only training favours the middle."""
        return FlowUniform().levels(steps)


@dataclass(frozen=True)
class FlowUniform:
    """t = shift u / (1 + (shift - 1) u): uniform t, moved towards noise by `shift` (Esser et al. 2024, eq. 23).

    The same is t / (1 - t) = shift u / (1 - u), and logsnr = -2 (logit u + ln shift).
    """

    kind: ClassVar[str] = "flow"
    steps: ClassVar[int] = 0
    shift: float = 1.0
    """1 is uniform; large images want more: up to the side, of pixels or latents, divided by 32."""

    def __post_init__(self) -> None:
        if not 1e-3 <= self.shift <= 1e3:
            raise RequestError(f"shift = {self.shift}: must be from 0.001 to 1000; 1 leaves t uniform")

    def __call__(self, u: Tensor) -> Tensor:
        """Map quantile u in (0, 1) to logsnr = 2 ln((1 - t) / t)."""
        # The shift multiplies t / (1 - t), so it is a sum here, and no quotient loses digits near 0 and 1.
        return -2 * (u.logit() + math.log(self.shift))

    def quantile(self, logsnr: Tensor) -> Tensor:
        """Map logsnr to u, the inverse of a call."""
        return (-logsnr / 2 - math.log(self.shift)).sigmoid()

    def snr_slope(self, logsnr: Tensor) -> Tensor:
        """Return -dSNR/du = SNR 2 / (u (1 - u))."""
        # 1 / (u (1 - u)) in terms of the odds: in float32 u itself rounds to 0 or 1 long before its odds overflow.
        odds = -logsnr / 2 - math.log(self.shift)
        return 2 * logsnr.exp() * (2 + odds.exp() + odds.neg().exp())

    def limits(self) -> tuple[float, float]:
        """Return (noisiest, cleanest) logsnr: u = 0.999 and 0.001."""
        reach, middle = 2 * math.log(LAST / (1 - LAST)), -2 * math.log(self.shift)
        return middle - reach, middle + reach

    def levels(self, steps: int) -> Tensor:
        """Return logsnr of evenly spaced u, float64 [steps], noisiest first."""
        return trailing(self, steps)


EDM_LIMITS = (-2 * math.log(80), -2 * math.log(0.002))
"""(noisiest, cleanest) logsnr of EDM's sampling: beyond it sampling changes nothing that is visible."""


# rho: 3 would even out the error of the steps, but 5 to 10 look better, as errors near the image count most (EDM, 3).
def karras(steps: int, noisiest: float, cleanest: float, rho: float = 7.0) -> Tensor:
    """Return logsnr evenly spaced in (sigma / alpha)^(1 / rho), float64 [steps], noisiest first (EDM, eq. 5).

    s_i = (s_max^(1 / rho) + i / (steps - 1) (s_min^(1 / rho) - s_max^(1 / rho)))^rho, i = 0, 1, ..., steps - 1.
    """
    import torch

    first, last = (math.exp(-logsnr / 2 / rho) for logsnr in (noisiest, cleanest))
    return -2 * rho * torch.linspace(first, last, steps, dtype=torch.float64).log()


Path = VP | VE | Flow
"""logsnr -> (alpha, sigma)."""
PATHS = (VP, VE, Flow)
Schedule = Linear | Cosine | Sigmoid | LogNormal | LogitNormal | FlowUniform
"""u -> logsnr; its inverse `quantile`, -dSNR/du, `levels` to sample at, `limits`, and `steps` T, 0 if continuous."""
SCHEDULES = (Linear, Cosine, Sigmoid, LogNormal, LogitNormal, FlowUniform)
Grid = Literal["schedule", "karras", "logsnr", "tuned"]
"""How the noise levels of sampling are spread: as in training, by EDM, evenly in logsnr, or tuned for a run."""


def noise_levels(schedule: Schedule, steps: int, grid: Grid, last: float = 0.0) -> Tensor:
    """Return logsnr to sample at, float64 [steps + 1], noisiest first; the last is clean (+inf).

    "karras" and "logsnr" stay within EDM's range of sigma / alpha, 80 to 0.002, and within the schedule's.
    `last` is the share of noise of the last level but that, or the schedule's lowest if that is higher; 0 leaves it to
    the grid.

    Raises:
        RequestError: More steps than a quantised schedule has levels.
    """
    import torch

    noisiest, cleanest = max(schedule.limits()[0], EDM_LIMITS[0]), cleanest_level(schedule, last)
    match grid:
        case "schedule":
            levels = schedule.levels(steps)
            if last and steps > 1:
                last = max(last, 1 / (1 + math.exp(schedule.limits()[1] / 2)))
                # The shares of noise are moved in proportion: evenly spaced ones stay evenly spaced.
                share = (-levels / 2).sigmoid()
                share = share[0] + (share - share[0]) * (last - share[0]) / (share[-1] - share[0])
                levels = 2 * ((1 - share).log() - share.log())
        case "karras":
            levels = karras(steps, noisiest, cleanest)
        case "logsnr":
            levels = torch.linspace(noisiest, cleanest, steps, dtype=torch.float64)
    return torch.cat([levels, levels.new_tensor([math.inf])])


def cleanest_level(schedule: Schedule, last: float = 0.0) -> float:
    """Return the logsnr at which sampling ends before the clean image: EDM's end, or `last`, a share of noise.

    It is within the schedule, as the network was trained at no cleaner level.
    """
    return min(schedule.limits()[1], 2 * math.log((1 - last) / last) if last else EDM_LIMITS[1])


class NoiseSource:
    """Standard normal noise, a stream for each image: image i is the same whatever the count and the batch.

    Args:
        seed: identifies the set of images.
        indices: the number of each image in the set.
        shape: (C, H, W).
        device: receives the noise; it is drawn on the CPU, whose numbers are the same everywhere.
    """

    def __init__(
        self,
        seed: int,
        indices: Sequence[int],
        shape: tuple[int, int, int],
        device: torch.device | str = "cpu",
    ) -> None:
        import torch

        # torch's CPU generator uses 32 bits of its seed. Images of one seed never share a stream; multiples
        # of 2^32 / golden ratio put the streams of nearby seeds as far apart as can be (Fibonacci hashing).
        start = seed * 0x9E3779B1
        self.generators = [torch.Generator().manual_seed((start + i) % 2**32) for i in indices]
        self.shape = shape
        self.device = torch.device(device)

    def draw(self) -> Tensor:
        """Return the next noise of each image, float32 [N, C, H, W]."""
        import torch

        noise = [torch.randn(self.shape, generator=generator) for generator in self.generators]
        return to_device(torch.stack(noise), self.device)
