"""The sigmoid schedule: a table of T noise levels, or its limit as T grows (steps = 0)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

from unfog.diffusion.ddpm import TimestepSchedule
from unfog.errors import RequestError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Sigmoid(TimestepSchedule):
    """alpha_bar = (s(1) - s(u)) / (s(1) - s(0)), s(u) = sigmoid((start + (end - start) u) / tau) (Jabri et al. 2022).

    Also in Chen 2023. With end = -start it has as many levels above SNR 1 as below, like the cosine, and fewer extreme
    ones. A higher start has more noise, which suits large images.
    """

    kind: ClassVar[str] = "sigmoid"
    steps: int = 1000
    """Number of timesteps T; 0 is continuous."""
    start: float = -3.0
    """Argument of the sigmoid at the cleanest level."""
    end: float = 3.0
    """Argument of the sigmoid at the noisiest level."""
    tau: float = 1.0
    """Temperature by which both are divided; Jabri et al. have 0.9 for 64 to 128 pixels."""
    max_beta: float = 0.999
    """Cap on the variance that one step adds, so that the last keeps some signal; unused when continuous."""
    zero_terminal: bool = False
    """Rescale so that the last level is pure noise (Lin et al. 2023, Algorithm 1)."""

    def __post_init__(self) -> None:
        self.check_steps()
        within = -20 <= self.start < self.end <= 20 and 0.01 <= self.tau <= 100
        if not (within and 0.1 <= self._span <= 40 and max(-self.start, self.end) / self.tau <= 40):
            raise RequestError(
                f"start = {self.start}, end = {self.end}, tau = {self.tau}: need -20 <= start < end <= 20, both within "
                "40 tau of 0, and (end - start) / tau from 0.1 to 40; the usual ones are -3, 3 and 1"
            )
        if not 0 < self.max_beta < 1:
            raise RequestError(f"max_beta = {self.max_beta} must be between 0 and 1; 0.999 is usual")
        self.check_table()

    @property
    def _span(self) -> float:
        return (self.end - self.start) / self.tau

    @property
    def _skew(self) -> float:
        """Ratio cosh(start / 2 tau) / cosh(end / 2 tau), the SNR where both sines below are equal."""
        return math.cosh(self.start / self.tau / 2) / math.cosh(self.end / self.tau / 2)

    def betas(self) -> list[float]:
        """Return 1 - alpha_bar((k + 1) / T) / alpha_bar(k / T), capped at max_beta."""
        half = self._span / 2
        places = [k / self.steps for k in range(self.steps + 1)]
        noise = [math.sinh(u * half) / (self._skew * math.sinh((1 - u) * half)) for u in places[:-1]]  # 1 / SNR
        alpha_bar = [*(1 / (1 + n) for n in noise), 0.0]
        return [min(1 - after / before, self.max_beta) for before, after in pairwise(alpha_bar)]

    def continuous(self, u: Tensor) -> Tensor:
        # A difference of sigmoids is a hyperbolic sine over cosines, which keeps its precision at both ends.
        half = self._span / 2
        return (self._skew * ((1 - u) * half).sinh() / (u * half).sinh()).log()

    def continuous_quantile(self, logsnr: Tensor) -> Tensor:
        # sinh(half - y) = SNR / skew sinh(y), solved for y = u half; as 1 - u where little signal is left.
        half, snr = self._span / 2, logsnr.exp() / self._skew
        noisy = (math.sinh(half) / (snr.reciprocal() + math.cosh(half))).atanh()
        clean = (math.sinh(half) / (snr + math.cosh(half))).atanh()
        return (clean / half).where(snr > 1, 1 - noisy / half)

    def continuous_snr_slope(self, logsnr: Tensor) -> Tensor:
        # SNR times the derivatives of the logs of both sines of `continuous`.
        half, u = self._span / 2, self.continuous_quantile(logsnr)
        return logsnr.exp() * half * (1 / ((1 - u) * half).tanh() + 1 / (u * half).tanh())
