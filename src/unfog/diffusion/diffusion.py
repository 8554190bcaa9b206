"""A diffusion: path, schedule, target and weighting joined, and what follows from them at any noise level."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from unfog.diffusion.noise import VE, VP, Cosine, Path, Schedule
from unfog.diffusion.target import Eps, Target, V, invert
from unfog.diffusion.weighting import Elbo, Plain, Uncertainty, Weighting
from unfog.errors import RequestError
from unfog.settings import setting

if TYPE_CHECKING:
    from torch import Tensor

Network = Callable[..., "Tensor"]
"""(x [B, C, H, W], c_noise [B], label int64 [B] or None) -> y [B, C, H, W], [B, 2 C, H, W] with a learned variance.

A fourth argument, what an augmentation did to the images [B, 9], is given only where there is one.
"""

LOWEST_LOGSNR = -80.0
"""Logsnr below which float32 no longer holds the signal: alpha is zero, or sigma infinite."""


@dataclass(frozen=True)
class Diffusion:
    """Any path, schedule, target and weighting; what cannot be inverted somewhere on the schedule is refused.

    Images are float tensors [B, C, H, W] in [-1, 1], noise levels are logsnr [B].

    Raises:
        RequestError: The combination cannot be trained or sampled, with the reason and a remedy.
    """

    path: Path = setting(VP(), short="path")
    """How image and noise are mixed."""
    schedule: Schedule = setting(Cosine(), short="schedule")
    """Which noise levels are trained and sampled."""
    target: Target = setting(V(), short="target")
    """What the network predicts; v is well behaved at every level."""
    weighting: Weighting = setting(Plain(), short="weighting", resume="force")
    """How much each noise level counts."""
    sigma_data: float = 0.5
    """Standard deviation of the images in [-1, 1] scale; 0.5 fits natural ones (EDM)."""
    conditioning: Literal["timestep", "logsnr"] = "timestep"
    """What the network is told: the timestep, 0 to T (1000 if continuous), or EDM's ln(sigma) / 4."""
    scale_input: bool = False
    """Show the network x_t at unit variance (EDM's c_in) rather than as it is; what VE needs."""
    learned_variance: bool = setting(False, added_later=True)
    """The network also learns how random each step of the ddpm sampler is (Nichol and Dhariwal 2021)."""
    adaptive: float = setting(0.0, resume="force", added_later=True)
    """Share of the noise levels drawn more often where the loss is large, and counted less for it; 0.5, say."""

    def __post_init__(self) -> None:
        if not 1e-3 <= self.sigma_data <= 1e3:
            raise RequestError(f"sigma_data = {self.sigma_data} must be from 0.001 to 1000; 0.5 fits natural images")
        if self.conditioning not in ("timestep", "logsnr"):
            raise RequestError(f"conditioning = {self.conditioning!r}: choose timestep or logsnr")
        if not 0 <= self.adaptive <= 0.99:
            raise RequestError(f"adaptive = {self.adaptive}: a share from 0 to 0.99; every level keeps a chance")
        if self.learned_variance and not self.schedule.steps:
            raise RequestError(
                f"learned_variance is of the step from one of T noise levels to the next, and the {self.schedule.kind} "
                "schedule has none; use linear or cosine with steps, for example --schedule cosine:steps=1000"
            )
        if self.schedule.limits()[0] > LOWEST_LOGSNR:
            return
        ends = f"the {self.schedule.kind} schedule ends in pure noise (alpha = 0)"
        if isinstance(self.path, VE):
            raise RequestError(f"{ends}, where the ve path's sigma is infinite; use the vp or flow path")
        if isinstance(self.target, Eps):
            raise RequestError(f"{ends}, where the noise says nothing of the image; use the v target")
        if self.conditioning == "logsnr":
            raise RequestError(f"{ends}, where logsnr is infinite; use timestep conditioning")

    @property
    def follows_losses(self) -> bool:
        """Whether training reads the loss by noise level as measured so far: see `Objective.levels`."""
        return self.adaptive > 0 or isinstance(self.weighting, Uncertainty)

    def add_noise(self, x0: Tensor, eps: Tensor, logsnr: Tensor) -> Tensor:
        """x_t = alpha x0 + sigma eps."""
        alpha, sigma = self.path(_per_image(logsnr))
        return alpha * x0 + sigma * eps

    def network_input(self, x_t: Tensor, logsnr: Tensor) -> tuple[Tensor, Tensor]:
        """What the network is shown: (x_t, scaled if so set, and c_noise [B])."""
        if self.scale_input:
            alpha, sigma = self.path(_per_image(logsnr))
            x_t = x_t / (sigma.square() + (self.sigma_data * alpha).square()).sqrt()
        if self.conditioning == "logsnr":
            return x_t, -logsnr / 8  # ln(sigma / alpha) / 4 (EDM, Table 1)
        return x_t, (self.schedule.steps or 1000) * self.schedule.quantile(logsnr)

    def network_target(self, x0: Tensor, eps: Tensor, logsnr: Tensor) -> Tensor:
        """What the network should answer: y = a x0 + b eps."""
        a, b = self.target(*self.path(_per_image(logsnr)), self.sigma_data)
        return a * x0 + b * eps

    def target_power(self, logsnr: Tensor) -> Tensor:
        """Mean square [B] of that answer, a^2 + b^2, for an image of mean square 1, the highest that [-1, 1] allows; of
        latents, which have no such bound, that of their deviation, where it is higher."""
        a, b = self.target(*self.path(logsnr), self.sigma_data)
        return a.square() * max(1.0, self.sigma_data) ** 2 + b.square()

    def recover(self, y: Tensor, x_t: Tensor, logsnr: Tensor) -> tuple[Tensor, Tensor]:
        """The (x0, eps) that the network's answer y means for x_t; what it says of the variance is left aside."""
        alpha, sigma = self.path(_per_image(logsnr))
        return invert(y[:, : x_t.shape[1]], x_t, *self.target(alpha, sigma, self.sigma_data), alpha, sigma)

    def weight(self, logsnr: Tensor) -> Tensor:
        """Weight [B] on the squared error of the network's output.

        At fixed x_t an error dy moves x0 by -(sigma / det) dy, so that a weight on x0 counts (sigma / det)^2
        times as much on y. Dividing by `own` keeps this finite at both ends.
        """
        alpha, sigma = self.path(logsnr)
        a, b = self.target(alpha, sigma, self.sigma_data)
        own = ((alpha * b - sigma * a) / sigma).square()
        if isinstance(self.weighting, Elbo):
            return self.weighting.of(self.schedule, logsnr) / own
        return self.weighting(logsnr, own, self.sigma_data) / own


def _per_image(logsnr: Tensor) -> Tensor:
    """[B] -> [B, 1, 1, 1]."""
    return logsnr[:, None, None, None]
