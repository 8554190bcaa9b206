"""Prediction targets of the network: two numbers a and b, y = a x0 + b eps.

With x_t = alpha x0 + sigma eps this makes two linear equations in (x0, eps), which `invert` solves wherever
their determinant det = alpha b - sigma a is not zero. `sigma_data`, the deviation of the data, is for EDM's target.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Eps:
    """y = eps, the noise: a = 0, b = 1 (Ho et al. 2020, eq. 14)."""

    kind: ClassVar[str] = "eps"

    def __call__(self, alpha: Tensor, sigma: Tensor, sigma_data: float) -> tuple[Tensor, Tensor]:
        # det = alpha, which is 0 in pure noise: `Diffusion` refuses schedules that go there.
        return alpha.new_zeros(alpha.shape), alpha.new_ones(alpha.shape)


@dataclass(frozen=True)
class X0:
    """y = x0, the clean image itself: a = 1, b = 0 (Salimans & Ho 2022, section 4)."""

    kind: ClassVar[str] = "x0"

    def __call__(self, alpha: Tensor, sigma: Tensor, sigma_data: float) -> tuple[Tensor, Tensor]:
        # det = -sigma, which is 0 only for a clean image, and none is trained on.
        return alpha.new_ones(alpha.shape), alpha.new_zeros(alpha.shape)


@dataclass(frozen=True)
class V:
    """y = v = alpha eps - sigma x0: a = -sigma, b = alpha (Salimans & Ho 2022, section 4); safe in pure noise."""

    kind: ClassVar[str] = "v"

    def __call__(self, alpha: Tensor, sigma: Tensor, sigma_data: float) -> tuple[Tensor, Tensor]:
        # det = alpha^2 + sigma^2, which is never 0: why this target is safe at both ends of every schedule.
        return -sigma, alpha


@dataclass(frozen=True)
class FlowVelocity:
    """y = eps - x0, the velocity dx_t / dt of the flow path: a = -1, b = 1 (Liu et al. 2023, eq. 1, time reversed)."""

    kind: ClassVar[str] = "flow"

    def __call__(self, alpha: Tensor, sigma: Tensor, sigma_data: float) -> tuple[Tensor, Tensor]:
        # det = alpha + sigma: never 0, and 1 on the flow path.
        return -alpha.new_ones(alpha.shape), alpha.new_ones(alpha.shape)


@dataclass(frozen=True)
class EdmF:
    """EDM's F, of unit variance at every level (Karras et al. 2022, eq. 8); -v on the VP path with sigma_data 1.

    y = (x0 - c_skip z) / c_out for z = x0 + s eps, c_skip = sigma_data^2 / (s^2 + sigma_data^2) and
    c_out = s sigma_data / sqrt(s^2 + sigma_data^2) (Table 1).
    """

    kind: ClassVar[str] = "edm"

    def __call__(self, alpha: Tensor, sigma: Tensor, sigma_data: float) -> tuple[Tensor, Tensor]:
        """Return (a, b) = (sigma / sigma_data, -sigma_data alpha) / sqrt(sigma^2 + sigma_data^2 alpha^2)."""
        # det = -norm / sigma_data, never 0. The sign is EDM's, so that F at sigma_data = 1 is -v.
        norm = (sigma.square() + (sigma_data * alpha).square()).sqrt()
        return sigma / (sigma_data * norm), -sigma_data * alpha / norm


def invert(y: Tensor, x_t: Tensor, a: Tensor, b: Tensor, alpha: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
    """Solve y = a x0 + b eps and x_t = alpha x0 + sigma eps for (x0, eps). All arguments broadcast.

    x0 = (b x_t - sigma y) / det and eps = (alpha y - a x_t) / det. For EDM's F, x0 is D of Karras et al. 2022, eq. 7.
    """
    det = alpha * b - sigma * a
    return (b * x_t - sigma * y) / det, (alpha * y - a * x_t) / det


Target = Eps | X0 | V | FlowVelocity | EdmF
"""(alpha, sigma, sigma_data) -> (a, b)."""
TARGETS = (Eps, X0, V, FlowVelocity, EdmF)
