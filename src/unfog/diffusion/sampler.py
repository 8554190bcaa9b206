"""Samplers: from noise to image in steps on E[x0 | x_t], over a grid of noise levels.

`steps` has the steps, `adaptive_sampler` the one sampler that chooses its own levels. Any sampler works with any
network, on any path, and from pure noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, get_args

from unfog.custom import is_own_choice, open_literal, resolve_step
from unfog.diffusion.adaptive_sampler import adaptive
from unfog.diffusion.noise import Grid, Path, Schedule, cleanest_level, noise_levels
from unfog.diffusion.steps import (
    PURE_NOISE,
    Level,
    Observe,
    SamplingStep,
    StepContext,
    Visit,
    churn,
    ddim,
    ddpm,
    dpmpp3,
    heun,
    mid_step,
    unipc_correct,
    unipc_predict,
)
from unfog.errors import RequestError
from unfog.settings import setting

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Denoise", "Kind", "Level", "Observe", "Sampler", "ddpm"]

Kind = Literal["ddpm", "ddim", "heun", "edm", "dpmpp", "dpmpp-sde", "unipc", "adaptive"]
_KINDS = (
    ("ddpm", "Ancestral sampling of Ho et al. 2020: one call and new noise at each step; needs hundreds of steps."),
    ("ddim", "First order, deterministic, one call a step: Song et al. 2021."),
    ("heun", "EDM's deterministic sampler: second order, two calls a step: Karras et al. 2022, Algorithm 1."),
    (
        "edm",
        "EDM's stochastic sampler: heun with noise added before each step, as much as churn says; 20 steps or more.",
    ),
    ("dpmpp", "DPM-Solver++(2M): second order from the guesses of past steps, one call a step: Lu et al. 2022."),
    ("dpmpp-sde", "SDE-DPM-Solver++(2M): dpmpp with new noise at each step, one call a step; needs 20 steps or more."),
    (
        "unipc",
        "UniPC: corrects each step with the guess that the next one needs anyway, one call a step: Zhao et al. 2023.",
    ),
    ("adaptive", "dpmpp with steps as long as tolerance allows, chosen for each image; the number of calls varies."),
)
open_literal(Kind, "sampler")
TWO_CALLS = ("heun", "edm")
"""Samplers that call the network twice a step."""
RANDOM = ("ddpm", "edm", "dpmpp-sde")
"""Samplers that draw noise at each step."""
Denoise = Callable[["Tensor", "Tensor"], "Tensor"]
"""(x_t [N, C, H, W], logsnr [N]) -> E[x0 | x_t], for ddpm with the learned variance behind it, [N, 2 C, H, W].

Samplers give logsnr on the host, whatever the device of x_t.
"""


@dataclass(frozen=True)
class Sampler:
    """Settings of a sampler; called, it samples."""

    kind: Kind = setting(
        "dpmpp",
        short="sampler",
        measured="Fréchet distance on Fashion-MNIST: dpmpp 12.7, heun 13.1, ddim 17.7 in 20 steps, ddpm 17.9 in 60",
        paper="Lu et al. 2022 (dpmpp); Zhao et al. 2023 (unipc); Karras et al. 2022 (heun); Song et al. 2021 (ddim)",
        choices=_KINDS,
        see="docs/decisions/0007-default-recipe.md",
    )
    """Deterministic: ddim, dpmpp, unipc, heun, adaptive. With fresh noise at each step: ddpm, dpmpp-sde, edm."""
    steps: int = setting(
        20,
        measured="Fréchet distance of dpmpp on Fashion-MNIST: 12.7 with 20, 13.8 with 40",
        see="docs/decisions/0007-default-recipe.md",
    )
    """Noise levels visited; for adaptive, the first step is 1 / steps of the way."""
    grid: Grid = setting(
        "schedule",
        measured="Fréchet distance of dpmpp on Fashion-MNIST: 12.7 with schedule, 13.0 with karras, 14.5 with logsnr",
        see="docs/decisions/0007-default-recipe.md",
    )
    """Noise levels: of the training schedule, EDM's (karras), evenly spaced in logsnr, or tuned for this run."""
    last: float = setting(
        0.0,
        auto=0.0,
        added_later=True,
        measured="detail of deviation 0.02 that an exact denoiser keeps in 20 steps: 12% down to 0.05, 95% to 0.005",
        see="docs/decisions/0019-sampling-grid.md",
    )
    """Lowest noise level, as a share of noise, sigma / (alpha + sigma), before the clean image; 0: that of the grid.

    Not below the lowest level of the training schedule. Tuned levels have an end of their own.
    """
    clip: bool = True
    """Keep each guess of the clean image within [-1, 1]."""
    order: Literal[2, 3] = 2
    """Order of dpmpp and unipc: number of guesses that a step combines."""
    tuned: tuple[float, ...] = ()
    """Levels found by `unfog tune`, for grid = tuned: the share of noise, sigma / (alpha + sigma), at each."""
    tolerance: float = 0.025
    """Tolerance of adaptive: largest difference of the first and second order results of a step, relative to x."""
    churn: float = 40.0
    """Noise that edm adds anew, over all steps (S_churn); 0 makes it heun."""
    churn_from: float = 0.05
    """Lowest sigma / alpha at which edm adds noise (S_min)."""
    churn_to: float = 50.0
    """Highest sigma / alpha at which edm adds noise (S_max)."""
    churn_noise: float = 1.003
    """Standard deviation of the noise that edm adds (S_noise)."""

    def __post_init__(self) -> None:
        for value, known in ((self.kind, get_args(Kind)), (self.grid, get_args(Grid))):
            if value not in known and not is_own_choice(Kind if value is self.kind else Grid, value):
                raise RequestError(f"{value!r} is unknown to the sampler; choose from {', '.join(known)}")
        if not 1 <= self.steps <= 100_000:
            raise RequestError(
                f"steps = {self.steps} of the sampler: at least one is needed, and 100000 at most; 20 is usual"
            )
        if not 0 <= self.last <= 0.5:
            raise RequestError(f"last = {self.last} of the sampler must be from 0 to 0.5; 0.005 is a low one")
        if self.order not in (2, 3):
            raise RequestError(f"order = {self.order} of the sampler must be 2 or 3")
        if any(not 0 < share <= 1 for share in self.tuned) or any(a <= b for a, b in pairwise(self.tuned)):
            given = " ".join(f"{share:g}" for share in self.tuned[:8])
            raise RequestError(f"tuned levels {given} of the sampler must fall, from 1 at most to above 0: 1 0.8 0.5")
        if self.grid == "tuned" and not self.tuned:
            raise RequestError("grid = tuned of the sampler: nothing is tuned yet; `unfog tune RUN` does it for a run")
        if not 1e-6 <= self.tolerance <= 1:
            raise RequestError(f"tolerance = {self.tolerance} of the sampler must be from 1e-6 to 1; 0.025 is usual")
        if not (0 <= self.churn <= 1e6 and 0 <= self.churn_from <= self.churn_to and 0 < self.churn_noise <= 2):
            raise RequestError(
                f"churn = {self.churn}, from {self.churn_from} to {self.churn_to}, noise {self.churn_noise}: need "
                "churn >= 0, 0 <= from <= to and noise above 0, at most 2"
            )

    def visits(self, schedule: Schedule) -> Tensor:
        """Return logsnr to sample at, float64 [steps + 1], noisiest first; the last is clean (+inf).

        Tuned levels hold for one number of steps; with another, the schedule's are used.

        Raises:
            RequestError: More steps than a quantised schedule has levels.
        """
        import torch

        if self.kind == "adaptive" and self.grid == "schedule" and 0 < schedule.steps < self.steps:
            return noise_levels(schedule, self.steps, "logsnr", self.last)  # only its ends are used
        if self.grid != "tuned":
            return noise_levels(schedule, self.steps, self.grid, self.last)
        # Levels are tuned jointly for their number; a subset of them was never measured.
        if len(self.tuned) != self.steps:
            return noise_levels(schedule, self.steps, "schedule", self.last)
        share = torch.tensor([*self.tuned, 0.0], dtype=torch.float64)
        return 2 * ((1 - share).log() - share.log())

    def longest_step(self, schedule: Schedule) -> float:
        """Return the largest factor by which a step divides sigma / alpha, of those that heun does not take as Euler's.

        Raises like `visits`.
        """
        noisy = [logsnr for logsnr in self.visits(schedule).tolist() if -2 * math.log(PURE_NOISE) <= logsnr < math.inf]
        return max((math.exp((then - now) / 2) for now, then in pairwise(noisy)), default=1.0)

    def levels(self, path: Path, schedule: Schedule) -> list[Level]:
        """Return the `steps` noise levels, noisiest first, and the clean one. Raises like `visits`."""
        return _levels_on(path, self.visits(schedule))

    def __call__(
        self,
        denoise: Denoise,
        path: Path,
        schedule: Schedule,
        draw: Callable[[], Tensor],
        observe: Observe | None = None,
        start: Tensor | None = None,
        stretch: slice = slice(None),
    ) -> Tensor:
        """Sample images.

        Args:
            denoise: E[x0 | x_t] for (x_t [N, C, H, W], logsnr [N] on the host).
            path: maps logsnr to alpha and sigma.
            schedule: the schedule of the training.
            draw: returns fresh standard normal noise [N, C, H, W]; called at the start, and at each random step.
            observe: called at each step; sampling ends where it returns True.
            start: x_t at the first level; None is pure noise.
            stretch: the part of `levels` to walk: slice(5, 8) is three of them, two steps; the default is all.

        Returns:
            float32 [N, C, H, W] in [-1, 1] (about it without `clip`); x_t if `stretch` ends earlier, and the last
            guess of x0 if `observe` ended it.
        """
        import torch

        def at(x: Tensor, logsnr: Tensor) -> Tensor:
            # Left on the host, where guidance reads it without waiting for the device.
            answer = denoise(x, logsnr.to(x.dtype))
            channels = x.shape[1]
            return torch.cat([answer[:, :channels].clamp(-1, 1), answer[:, channels:]], 1) if self.clip else answer

        whole = self.levels(path, schedule)
        levels = whole[stretch]  # of a stretch too, the noisiest level and the first step are those of the whole
        with torch.no_grad():
            # Without alpha x0, as no image is known yet: the signal that is left at the noisiest level is neglected.
            x = levels[0].sigma * draw() if start is None else start
            if self.kind != "adaptive":
                return self._walk(at, path, whole[0], levels, x, draw, observe)
            cleanest = cleanest_level(schedule, self.last)
            return adaptive(at, path, levels, x, cleanest, len(whole) - 1, self.tolerance, observe)

    def _walk(
        self,
        at: Denoise,
        path: Path,
        noisiest: Level,
        levels: Sequence[Level],
        x: Tensor,
        draw: Callable[[], Tensor],
        observe: Observe | None,
    ) -> Tensor:
        """Step down the levels, from x at the first."""
        # Not at the top: it imports torch, and the settings in this module are loaded without it.
        from unfog.diffusion.variance import deviation

        def evaluate(x: Tensor, level: Level) -> tuple[Tensor, Tensor]:
            answer = at(x, _repeated(level.logsnr, x))
            return answer[:, : x.shape[1]], answer[:, x.shape[1] :]

        def predict(x: Tensor, level: Level) -> Tensor:
            return evaluate(x, level)[0]

        before: list[Visit] = []
        for i, (now, then) in enumerate(pairwise(levels)):
            # Before the network is called: it must see the level that the noise was raised to.
            if self.kind == "edm" and (noisier := self._noisier(now, path, noisiest)):
                x, now = churn(x, now, noisier, self.churn_noise, draw), noisier
            x0, fraction = evaluate(x, now)
            if observe and observe(SamplingStep(i, now.logsnr, x, x0)) is True:
                return x0
            if self.kind == "unipc" and before:
                x = unipc_correct(x0, now, before, min(self.order, len(levels) - i))
            here = Visit(now, x, x0)
            learned = self.kind == "ddpm" and fraction.shape[1] > 0 and then.sigma > 0
            std = deviation(path, now.logsnr, then.logsnr, fraction) if learned else None
            # The order falls at the end, where a low one is more stable; at the start `before` limits it.
            order = min(self.order, len(levels) - 1 - i)
            # In 15 steps or more the last ones are short enough to stay of third order, as in the authors' code.
            if self.kind == "dpmpp" and len(levels) > 15:
                order = self.order
            x = self._step(here, then, StepContext(predict, before, draw), order, std)
            # Three visits serve the highest order; each more would hold two batches of images.
            before = [*before[-2:], here]
        return x

    def _step(self, here: Visit, then: Level, context: StepContext, order: int, std: Tensor | None) -> Tensor:
        """Return x at level `then`. `std` is a learned deviation of a step of ddpm."""
        (now, x, x0), (predict, before, draw) = here, context
        match self.kind:
            case "ddpm":
                return ddpm(x, x0, now, then, draw, std)
            case "ddim":
                return ddim(x, x0, now, then)
            case "heun" | "edm":
                return heun(x, x0, now, then, predict)
            case "dpmpp" if order == 3:
                return dpmpp3(x, x0, now, then, before)
            case "dpmpp":
                return ddim(x, mid_step(x0, now, then, before), now, then)
            case "dpmpp-sde":
                return ddpm(x, mid_step(x0, now, then, before), now, then, draw)
            case "unipc":
                return unipc_predict(x, x0, now, then, before, order)
        own: Tensor = resolve_step(self.kind)(x, x0, now, then, context)
        return own

    def _noisier(self, now: Level, path: Path, noisiest: Level) -> Level | None:
        """Return the level that EDM's Algorithm 2 adds noise up to before a step; None if it adds none."""
        # EDM's cap: never more fresh noise than the image has already.
        more = min(self.churn / self.steps, math.sqrt(2) - 1)
        if more == 0 or not self.churn_from <= now.s <= min(self.churn_to, noisiest.s):
            return None
        import torch

        # No noisier than the network was trained at, which is where sampling starts.
        logsnr = max(now.logsnr - 2 * math.log1p(more), noisiest.logsnr)
        return _levels_on(path, torch.tensor([logsnr], dtype=torch.float64))[0] if logsnr < now.logsnr else None


def _repeated(logsnr: float, x: Tensor) -> Tensor:
    """Return a level for each image of x [N, C, H, W], [N] on the host, in the type of x."""
    import torch

    return torch.full((len(x),), logsnr, dtype=x.dtype)


def _levels_on(path: Path, logsnr: Tensor) -> list[Level]:
    """Return the noise levels logsnr float64 [N] on a path."""
    import torch

    return [Level(*level) for level in torch.stack([logsnr, *path(logsnr)], 1).tolist()]
