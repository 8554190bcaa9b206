"""Weight of a noise level in the loss: a weight on the squared error of x0, whatever the network predicts.

Stated on x0, a weighting means the same for every target; `Diffusion.weight` converts it, once, to a weight
on the network's own output: loss = weight (x0 error)^2 = weight / own (output error)^2. `own` = (det / sigma)^2 is the
weight on x0 that makes the loss plain MSE on that output: SNR for eps, 1 for x0, and on the VP path SNR + 1 for v.
SNR = alpha^2 / sigma^2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from unfog.custom import CustomPart
from unfog.errors import RequestError

if TYPE_CHECKING:
    from torch import Tensor

    from unfog.diffusion.noise import Schedule


@dataclass(frozen=True)
class Plain:
    """Plain mean squared error on the output of the network.

    Weight `own` on x0, which is 1 on the output. For eps it is DDPM's L_simple (Ho et al. 2020, eq. 14).
    """

    kind: ClassVar[str] = "plain"

    def __call__(self, logsnr: Tensor, own: Tensor, sigma_data: float) -> Tensor:
        return own


@dataclass(frozen=True)
class Snr:
    """Weight SNR on x0: plain MSE on the noise, DDPM's L_simple, for any target (Ho et al. 2020, eq. 14)."""

    kind: ClassVar[str] = "snr"

    def __call__(self, logsnr: Tensor, own: Tensor, sigma_data: float) -> Tensor:
        return logsnr.exp()


@dataclass(frozen=True)
class InverseSnr:
    """Weight 1 on x0, which is 1 / SNR on the noise: plain MSE on the image (Salimans & Ho 2022, section 4).

    On VP, 1 / SNR = (1 - alpha_bar) / alpha_bar. The 1 / (1 - alpha_bar) seen under this name is 1 + SNR.
    """

    kind: ClassVar[str] = "inverse-snr"

    def __call__(self, logsnr: Tensor, own: Tensor, sigma_data: float) -> Tensor:
        return logsnr.new_ones(logsnr.shape)


@dataclass(frozen=True)
class MinSnr:
    """Weight min(SNR, gamma) on x0 (Hang et al. 2023, section 3.4).

    The same is min(SNR, gamma) / SNR on eps and, on VP, min(SNR, gamma) / (SNR + 1) on v.
    """

    kind: ClassVar[str] = "min-snr"
    gamma: float = 5.0
    """SNR above which cleaner levels gain no more weight; the paper's 5 is good for all targets."""

    def __post_init__(self) -> None:
        if not 0 < self.gamma <= 1e9:
            raise RequestError(f"gamma = {self.gamma}: must be above 0, and at most 1e9; the paper has 5")

    def __call__(self, logsnr: Tensor, own: Tensor, sigma_data: float) -> Tensor:
        # `own` plays no part: a weight on x0's error holds for every target, and is converted later.
        return logsnr.exp().clamp(max=self.gamma)


@dataclass(frozen=True)
class SoftMinSnr:
    """Weight SNR gamma / (SNR + gamma) on x0, min-SNR without its corner (Crowson et al. 2024, soft-min-SNR).

    With gamma = 1 / sigma_data^2 that is 1 / (sigma_data^2 + s^2), s = sigma / alpha.
    """

    kind: ClassVar[str] = "soft-min-snr"
    gamma: float = 4.0
    """SNR about which the weight of cleaner levels levels off; 4 is 1 / sigma_data^2 for sigma_data = 0.5."""

    def __post_init__(self) -> None:
        if not 0 < self.gamma <= 1e9:
            raise RequestError(f"gamma = {self.gamma}: must be above 0, and at most 1e9; 4 is usual")

    def __call__(self, logsnr: Tensor, own: Tensor, sigma_data: float) -> Tensor:
        """Return the weight on the squared x0 error: gamma times the logistic function of log(SNR / gamma)."""
        return self.gamma * (logsnr - math.log(self.gamma)).sigmoid()


@dataclass(frozen=True)
class P2:
    """Weight SNR / (k + SNR)^gamma on x0, which is 1 / (k + SNR)^gamma on the noise: less for nearly clean levels.

    Choi et al. 2022, section 3 (P2 weighting).
    """

    kind: ClassVar[str] = "p2"
    k: float = 1.0
    """SNR up to which all levels have about equal weight; the paper has 1."""
    gamma: float = 1.0
    """Exponent by which the weight falls above that; the paper has 0.5 and 1, and 0 is DDPM's loss."""

    def __post_init__(self) -> None:
        if not (1e-3 <= self.k <= 1e3 and 0 <= self.gamma <= 2):
            raise RequestError(
                f"k = {self.k}, gamma = {self.gamma}: need 0.001 <= k <= 1000 and 0 <= gamma <= 2; the paper has k = 1 "
                "and gamma = 0.5 or 1"
            )

    def __call__(self, logsnr: Tensor, own: Tensor, sigma_data: float) -> Tensor:
        snr = logsnr.exp()
        # The paper's weight is on the noise's error; times SNR it is the same weight on the image's.
        return snr / (self.k + snr) ** self.gamma


@dataclass(frozen=True)
class Edm:
    """Weight (s^2 + sigma_data^2) / (s sigma_data)^2 on x0, which is plain MSE on F (EDM, Table 1: lambda)."""

    kind: ClassVar[str] = "edm"

    def __call__(self, logsnr: Tensor, own: Tensor, sigma_data: float) -> Tensor:
        """Return the weight on the squared x0 error: SNR + 1 / sigma_data^2, the same number."""
        # As a sum it holds in pure noise too, where s is infinite and the quotient is not a number.
        return logsnr.exp() + sigma_data**-2


@dataclass(frozen=True)
class Uncertainty(Plain):
    """EDM2's learned weighting: every level is divided by its expected loss (Karras et al. 2024, eq. 14).

    Weight own / E[own (x0 error)^2] on x0. The loss is measured and reported as plain MSE, which for EDM's F is EDM's
    loss; `Objective` divides that by its running mean at the level (`diffusion.loss_by_level`).
    """

    kind: ClassVar[str] = "uncertainty"


@dataclass(frozen=True)
class Elbo:
    """Weight -dSNR/du / 2 on x0, the evidence lower bound: the loss is in nats per number (Kingma et al. 2021).

    With T timesteps these are DDPM's own weights of the variational bound, T (SNR before - SNR) / 2, and for timestep
    0 those of a decoder with that level's noise. It trains for likelihood rather than for image quality; its loss
    varies much between levels, so `diffusion.adaptive` helps.
    """

    kind: ClassVar[str] = "elbo"

    def of(self, schedule: Schedule, logsnr: Tensor) -> Tensor:
        """Return the weight on the squared x0 error; it depends on the density of levels in the schedule."""
        # The slope undoes how often the schedule visits a level, so that the bound is the same for every schedule.
        return schedule.snr_slope(logsnr) / 2


@dataclass(frozen=True)
class SigmoidElbo(Elbo):
    """Weight -dSNR/du / 2 sigmoid(bias - logsnr) on x0: the bound of images with noise (Kingma & Gao 2023, eq. 3).

    The weight falls with log SNR, so that the objective is a bound on data augmented with noise. It does not depend on
    the schedule, which says only how often each level is drawn.
    """

    kind: ClassVar[str] = "sigmoid"
    bias: float = 2.0
    """Log SNR above which levels lose weight; a higher one adds detail. Kingma and Gao have 2."""

    def __post_init__(self) -> None:
        if not -20 <= self.bias <= 20:
            raise RequestError(f"bias = {self.bias}: must be from -20 to 20; 2 is usual")

    def of(self, schedule: Schedule, logsnr: Tensor) -> Tensor:
        """Return the weight on the squared x0 error: that of the bound times the sigmoid."""
        return super().of(schedule, logsnr) * (self.bias - logsnr).sigmoid()


@dataclass(frozen=True)
class CustomWeighting(CustomPart):
    """A function of your own module: `weight(logsnr [B], own [B], sigma_data, **arguments)` -> weight [B] on x0."""

    noun: ClassVar[str] = "a weighting"

    def __call__(self, logsnr: Tensor, own: Tensor, sigma_data: float) -> Tensor:
        """Weight on the squared x0 error."""
        weight: Tensor = self.load()(logsnr, own, sigma_data, **self.keywords())
        return weight

    def try_out(self) -> None:
        """Raise RequestError unless the function can be imported and weights a batch of two."""
        import torch

        load, keywords = self.load(), self.keywords()
        try:
            # Of two, as a function that gives one weight for all would look right in a batch of one.
            shape = load(torch.zeros(2), torch.ones(2), 0.5, **keywords).shape
        except Exception as error:  # anything may go wrong in other people's code
            raise RequestError(f"{self.path} cannot be used as a weighting: {error}") from error
        if shape != (2,):
            raise RequestError(f"{self.path} gives weights of shape {tuple(shape)} for a batch of 2; give one for each")


Weighting = (
    Plain | Snr | InverseSnr | MinSnr | SoftMinSnr | P2 | Edm | Uncertainty | Elbo | SigmoidElbo | CustomWeighting
)
"""(logsnr, own, sigma_data) -> weight on the squared x0 error."""
WEIGHTINGS = (Plain, Snr, InverseSnr, MinSnr, SoftMinSnr, P2, Edm, Uncertainty, Elbo, SigmoidElbo)
