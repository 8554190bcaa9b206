"""How much a noise level counts: a weight on the squared error of x0, whatever the network predicts.

Stated on x0, a weighting means the same for every target; `Diffusion.weight` converts it, once, to a weight
on the network's own output. `own` is the weight on x0 that makes the loss plain MSE on that output: SNR for
eps, 1 for x0, and on the VP path SNR + 1 for v. SNR = alpha^2 / sigma^2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from unfog.errors import RequestError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Plain:
    """Plain mean squared error on what the network predicts."""

    kind: ClassVar[str] = "plain"

    def __call__(self, logsnr: Tensor, own: Tensor, sigma_data: float) -> Tensor:
        """Weight on the squared x0 error: `own`."""
        return own


@dataclass(frozen=True)
class Snr:
    """SNR on the image's error, which is plain MSE on the noise (DDPM's "simple" loss) for any target."""

    kind: ClassVar[str] = "snr"

    def __call__(self, logsnr: Tensor, own: Tensor, sigma_data: float) -> Tensor:
        """Weight on the squared x0 error: SNR."""
        return logsnr.exp()


@dataclass(frozen=True)
class InverseSnr:
    """1 / SNR on the noise's error, which is plain MSE on the image.

    On VP, 1 / SNR = (1 - alpha_bar) / alpha_bar. The 1 / (1 - alpha_bar) seen under this name is 1 + SNR.
    """

    kind: ClassVar[str] = "inverse-snr"

    def __call__(self, logsnr: Tensor, own: Tensor, sigma_data: float) -> Tensor:
        """Weight on the squared x0 error: 1."""
        return logsnr.new_ones(logsnr.shape)


@dataclass(frozen=True)
class MinSnr:
    """min(SNR, gamma) on x0 (Hang et al. 2023): min / SNR on eps and, on VP, min / (SNR + 1) on v."""

    kind: ClassVar[str] = "min-snr"
    gamma: float = 5.0
    """SNR above which cleaner levels count no more; the paper's 5 is good for all targets."""

    def __post_init__(self) -> None:
        if not 0 < self.gamma <= 1e9:
            raise RequestError(f"gamma = {self.gamma}: must be above 0, and at most 1e9; the paper has 5")

    def __call__(self, logsnr: Tensor, own: Tensor, sigma_data: float) -> Tensor:
        """Weight on the squared x0 error: min(SNR, gamma)."""
        return logsnr.exp().clamp(max=self.gamma)


@dataclass(frozen=True)
class Edm:
    """EDM's lambda (Table 1): (s^2 + sigma_data^2) / (s sigma_data)^2, s = sigma / alpha; plain MSE on F."""

    kind: ClassVar[str] = "edm"

    def __call__(self, logsnr: Tensor, own: Tensor, sigma_data: float) -> Tensor:
        """Weight on the squared x0 error: SNR + 1 / sigma_data^2, the same number."""
        return logsnr.exp() + sigma_data**-2


Weighting = Plain | Snr | InverseSnr | MinSnr | Edm
"""(logsnr, own, sigma_data) -> weight on the squared x0 error."""
WEIGHTINGS = (Plain, Snr, InverseSnr, MinSnr, Edm)
