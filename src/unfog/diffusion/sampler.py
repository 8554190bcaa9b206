"""Samplers: from noise to image in pure steps on E[x0 | x_t].

Every step reads the state as x = alpha x0 + sigma eps, with the present guesses of x0 and eps, and goes to
the next level (alpha', sigma'). In z = x / alpha and s = sigma / alpha they are the textbook's formulas; in this
form they also hold at alpha = 0, where a schedule with zero terminal SNR starts and z is infinite. The last
level is clean, so every sampler ends with x = x0. Coefficients are Python floats, in double precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from unfog.diffusion.noise import EDM_LIMITS, Path, Schedule, karras
from unfog.errors import RequestError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Kind = Literal["ddpm", "ddim", "heun", "dpmpp"]
Grid = Literal["schedule", "karras", "logsnr"]
Denoise = Callable[["Tensor", "Tensor"], "Tensor"]
"""(x_t [N, C, H, W], logsnr [N]) -> E[x0 | x_t]."""
Observe = Callable[[int, float, "Tensor", "Tensor"], None]
"""(step, logsnr, x_t before the step, x0 guessed from it)."""
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


@dataclass(frozen=True)
class Sampler:
    """Which sampler, and in how many steps; called, it samples."""

    kind: Kind = "dpmpp"
    """ddpm (random, wants hundreds of steps), ddim, heun (two network calls a step), or dpmpp (the 2M)."""
    steps: int = 20
    """Noise levels visited."""
    grid: Grid = "schedule"
    """Which levels: as the training schedule has it, EDM's (karras), or evenly spaced in logsnr."""
    clip: bool = True
    """Keep each guess of the clean image within [-1, 1]."""

    def __post_init__(self) -> None:
        for value, known in ((self.kind, get_args(Kind)), (self.grid, get_args(Grid))):
            if value not in known:
                raise RequestError(f"{value!r} is unknown to the sampler; choose from {', '.join(known)}")
        if not 1 <= self.steps <= 100_000:
            raise RequestError(
                f"steps = {self.steps} of the sampler: at least one is needed, and 100000 at most; 20 is usual"
            )

    def __call__(
        self,
        denoise: Denoise,
        path: Path,
        schedule: Schedule,
        draw: Callable[[], Tensor],
        observe: Observe | None = None,
    ) -> Tensor:
        """Draw pictures.

        Args:
            denoise: E[x0 | x_t] for (x_t [N, C, H, W], logsnr [N]).
            path: What alpha and sigma are at a noise level.
            schedule: What the noise levels are.
            draw: Fresh standard normal noise [N, C, H, W]; called at the start, and at each step of ddpm.
            observe: Called before each step.

        Returns:
            float32 [N, C, H, W] in [-1, 1] (beyond it here and there, without clip).
        """
        import torch

        def predict(x: Tensor, level: Level) -> Tensor:
            x0 = denoise(x, x.new_full((len(x),), level.logsnr))
            return x0.clamp(-1, 1) if self.clip else x0

        logsnr = noise_levels(schedule, self.steps, self.grid)
        levels = [Level(*level) for level in torch.stack([logsnr, *path(logsnr)], 1).tolist()]
        before: tuple[Tensor, Level] | None = None

        with torch.no_grad():
            x = levels[0].sigma * draw()
            for i, (now, then) in enumerate(pairwise(levels)):
                x0 = predict(x, now)
                if observe:
                    observe(i, now.logsnr, x, x0)
                match self.kind:
                    case "ddpm":
                        x = ddpm(x, x0, now, then, draw)
                    case "ddim":
                        x = ddim(x, x0, now, then)
                    case "heun":
                        x = heun(x, x0, now, then, predict)
                    case "dpmpp":
                        x = dpmpp(x, x0, now, then, before)
                before = x0, now
        return x


def ddim(x: Tensor, x0: Tensor, now: Level, then: Level) -> Tensor:
    """x' = alpha' x0 + sigma' eps: the same image and noise, mixed anew (Song et al. 2021, eq. 12)."""
    return then.alpha * x0 + then.sigma / now.sigma * (x - now.alpha * x0)


def ddpm(x: Tensor, x0: Tensor, now: Level, then: Level, draw: Callable[[], Tensor]) -> Tensor:
    """A draw from the posterior q(x' | x, x0), for any two levels (DDPM, eq. 7; the "fixed small" variance).

    In z the mean is x0 + (s' / s)^2 (z - x0) and the variance s'^2 (1 - (s' / s)^2): DDIM, with s' / s of the
    noise kept and the rest drawn afresh.
    """
    if then.sigma == 0:
        return x0
    kept = then.s / now.s
    eps = (x - now.alpha * x0) / now.sigma
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


def dpmpp(x: Tensor, x0: Tensor, now: Level, then: Level, before: tuple[Tensor, Level] | None) -> Tensor:
    """DPM-Solver++(2M) (Lu et al. 2022, Algorithm 2): DDIM, with x0 extrapolated to mid-step in logsnr.

    First order where there is nothing to extrapolate from or to: at the start, after pure noise, at the end.
    """
    if before is None or then.sigma == 0:
        return ddim(x, x0, now, then)
    x0_before, last = before
    ahead = (then.logsnr - now.logsnr) / (now.logsnr - last.logsnr) / 2
    return ddim(x, x0 + ahead * (x0 - x0_before), now, then)


def noise_levels(schedule: Schedule, steps: int, grid: Grid) -> Tensor:
    """Logsnr to sample at, float64 [steps + 1], noisiest first; the last is clean (+inf).

    "karras" and "logsnr" stay within EDM's range of sigma / alpha, 80 to 0.002, and within the schedule's.

    Raises:
        RequestError: More steps than a quantised schedule has levels.
    """
    import torch

    noisiest, cleanest = schedule.limits()
    noisiest, cleanest = max(noisiest, EDM_LIMITS[0]), min(cleanest, EDM_LIMITS[1])
    match grid:
        case "schedule":
            levels = schedule.levels(steps)
        case "karras":
            levels = karras(steps, noisiest, cleanest)
        case "logsnr":
            levels = torch.linspace(noisiest, cleanest, steps, dtype=torch.float64)
    return torch.cat([levels, levels.new_tensor([math.inf])])


class NoiseSource:
    """Standard normal noise, a stream for each image: picture i is the same whatever the count and the batch.

    Args:
        seed: Names the set of pictures.
        indices: The number of each picture in the set.
        shape: (C, H, W).
        device: Where the noise is wanted; it is drawn on the CPU, whose numbers are the same everywhere.
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
        self.device = device

    def draw(self) -> Tensor:
        """The next noise of each image, float32 [N, C, H, W]."""
        import torch

        noise = [torch.randn(self.shape, generator=generator) for generator in self.generators]
        return torch.stack(noise).to(self.device)
