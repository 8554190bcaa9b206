"""`Diffusion` joins path, schedule, target and weighting, and computes noising, targets and weights from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from unfog.diffusion.losses.pixel_loss import PixelLoss, SquaredError
from unfog.diffusion.noise import VE, VP, Cosine, Path, Schedule
from unfog.diffusion.target import Eps, Target, V, invert
from unfog.diffusion.weighting import Elbo, Plain, Uncertainty, Weighting
from unfog.errors import RequestError
from unfog.settings import setting

if TYPE_CHECKING:
    from torch import Tensor

Network = Callable[..., "Tensor"]
"""(x [B, C, H, W], c_noise [B], `Conditions`) -> y [B, C, H, W], or [B, 2 C, H, W] with a learned variance."""

_LOWEST_LOGSNR = -80.0  # below it float32 no longer holds the signal: alpha is zero, or sigma infinite


@dataclass(frozen=True)
class Diffusion:
    """A combination of path, schedule, target and weighting, checked to be invertible on the whole schedule.

    Images are float tensors [B, C, H, W] in [-1, 1], noise levels are logsnr [B].

    Raises:
        RequestError: The combination cannot be trained or sampled, with the reason and a remedy.
    """

    path: Path = setting(
        VP(),
        short="path",
        measured="Fréchet distance on Fashion-MNIST: flow, logitnormal, flow 10.9; vp, cosine, v 16.5; EDM 14.7",
        paper="Lipman et al. 2023, Liu et al. 2023 (flow); Ho et al. 2020 (vp); Karras et al. 2022 (ve)",
        see="docs/decisions/0007-default-recipe.md",
    )
    """Mixture of image and noise."""
    schedule: Schedule = setting(
        Cosine(),
        short="schedule",
        paper="Esser et al. 2024 (logitnormal); Nichol and Dhariwal 2021 (cosine); Karras et al. 2022 (lognormal)",
    )
    """Noise levels to train and sample at."""
    target: Target = setting(
        V(),
        short="target",
        paper="Liu et al. 2023 (flow); Ho et al. 2020 (eps); Salimans and Ho 2022 (v); Karras et al. 2022 (edm)",
    )
    """Prediction of the network; v is well behaved at every level."""
    weighting: Weighting = setting(
        Plain(),
        short="weighting",
        resume="force",
        paper="Hang et al. 2023 (min-snr); Choi et al. 2022 (p2); Karras et al. 2022 (edm), 2024 (uncertainty)",
        see="docs/objectives.md",
    )
    """Weight of each noise level in the loss."""
    sigma_data: float = 0.5
    """Standard deviation of the images in [-1, 1] scale; 0.5 fits natural ones (EDM)."""
    conditioning: Literal["timestep", "logsnr"] = "timestep"
    """Noise condition of the network: the timestep, 0 to T (1000 if continuous), or EDM's ln(sigma) / 4."""
    scale_input: bool = False
    """Scale the network's input to unit variance (EDM's c_in); VE needs it."""
    learned_variance: bool = setting(False, added_later=True)
    """The network also learns the variance of each step of the ddpm sampler (Nichol and Dhariwal 2021)."""
    adaptive: float = setting(
        0.0,
        resume="force",
        added_later=True,
        why="off until a longer comparison",
        measured="Fréchet distance 36 and 31 with 0.5, 44 and 39 without, in short runs",
        paper="Nichol and Dhariwal 2021",
        see="docs/objectives.md",
    )
    """Share of the noise levels drawn by importance: more often where the loss is large, at less weight; try 0.5."""
    loss: PixelLoss = setting(
        SquaredError(),
        short="loss",
        resume="force",
        added_later=True,
        why="its minimum is the mean of all targets, which the samplers are derived from; that of l1 is the median",
        paper="Ho et al. 2020 (mse); Charbonnier et al. 1997, Song and Dhariwal 2023 (pseudo-huber)",
        see="docs/objectives.md",
    )
    """Error of each value of the network's output, which training averages: mse, l1, pseudo-huber, or your own."""

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
                "schedule has none; use linear, cosine or sigmoid with steps, such as --schedule cosine:steps=1000"
            )
        flaw, instead = self.flaw_in_pure_noise
        if flaw and self.schedule.limits()[0] <= _LOWEST_LOGSNR:
            raise RequestError(
                f"the {self.schedule.kind} schedule ends in pure noise (alpha = 0), where {flaw}; use {instead}"
            )

    @property
    def flaw_in_pure_noise(self) -> tuple[str, str]:
        """Flaw where alpha = 0, and what to use instead of its cause; two empty texts without a flaw."""
        if isinstance(self.path, VE):
            return "the ve path's sigma is infinite", "the vp or flow path"
        if isinstance(self.target, Eps):
            return "the noise does not determine the image", "the v target"
        if self.conditioning == "logsnr":
            return "logsnr is infinite", "timestep conditioning"
        return "", ""

    @property
    def follows_losses(self) -> bool:
        """True if training uses the measured loss by noise level: see `Objective.levels`."""
        return self.adaptive > 0 or isinstance(self.weighting, Uncertainty)

    def add_noise(self, x0: Tensor, eps: Tensor, logsnr: Tensor) -> Tensor:
        """Return x_t = alpha x0 + sigma eps."""
        alpha, sigma = self.path(_per_image(logsnr))
        return alpha * x0 + sigma * eps

    def network_input(self, x_t: Tensor, logsnr: Tensor) -> tuple[Tensor, Tensor]:
        """Return the network's inputs: (x_t, scaled with `scale_input`; c_noise [B])."""
        if self.scale_input:
            alpha, sigma = self.path(_per_image(logsnr))
            # EDM's c_in (eq. 7) for any path: the variance of alpha x0 + sigma eps becomes 1.
            x_t = x_t / (sigma.square() + (self.sigma_data * alpha).square()).sqrt()
        if self.conditioning == "logsnr":
            return x_t, -logsnr / 8  # ln(sigma / alpha) / 4 (EDM, Table 1)
        # Sinusoids are made for DDPM's timesteps: a continuous schedule is spread over the usual 1000.
        return x_t, (self.schedule.steps or 1000) * self.schedule.quantile(logsnr)

    def network_target(self, x0: Tensor, eps: Tensor, logsnr: Tensor) -> Tensor:
        """Return the target of the network's output: y = a x0 + b eps."""
        a, b = self.target(*self.path(_per_image(logsnr)), self.sigma_data)
        return a * x0 + b * eps

    def target_power(self, logsnr: Tensor) -> Tensor:
        """Return the mean square [B] of that target, a^2 + b^2, for an image of mean square 1, the most in [-1, 1]."""
        # Latents are not bounded: their own deviation counts where it is above 1.
        a, b = self.target(*self.path(logsnr), self.sigma_data)
        return a.square() * max(1.0, self.sigma_data) ** 2 + b.square()

    def recover(self, y: Tensor, x_t: Tensor, logsnr: Tensor) -> tuple[Tensor, Tensor]:
        """Return the (x0, eps) implied by the network's output y for x_t, without its channels of the variance."""
        alpha, sigma = self.path(_per_image(logsnr))
        return invert(y[:, : x_t.shape[1]], x_t, *self.target(alpha, sigma, self.sigma_data), alpha, sigma)

    def weight(self, logsnr: Tensor) -> Tensor:
        """Return the weight [B] of the squared error of the network's output.

        At fixed x_t an error dy moves x0 by -(sigma / det) dy, so that a weight on x0 counts (sigma / det)^2
        times as much on y. Dividing by `own` keeps this finite at both ends.
        """
        alpha, sigma = self.path(logsnr)
        a, b = self.target(alpha, sigma, self.sigma_data)
        own = ((alpha * b - sigma * a) / sigma).square()
        if isinstance(self.weighting, Elbo):
            # The one weighting that depends on how densely the schedule visits levels, and not on the level alone.
            return self.weighting.of(self.schedule, logsnr) / own
        return self.weighting(logsnr, own, self.sigma_data) / own


def _per_image(logsnr: Tensor) -> Tensor:
    """[B] -> [B, 1, 1, 1]."""
    return logsnr[:, None, None, None]
