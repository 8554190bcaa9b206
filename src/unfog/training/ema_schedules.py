"""EMA schedules: how much of the old average each update keeps. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from unfog.errors import RequestError


@dataclass(frozen=True)
class PowerEma:
    """EMA with a power-function profile: its horizon is a share of the run so far, so a run of any length has one.

    decay = (1 - 1/n)^(gamma + 1) at update n (EDM2, eq. 127 with unit steps). `width` is the profile's standard
    deviation relative to the run's length; gamma solves width^2 = (gamma + 1) / ((gamma + 2)^2 (gamma + 3)) (eq. 126).
    The first update copies the weights, so the initial random ones never count.
    """

    kind: ClassVar[str] = "power"
    width: float = 0.1
    """Standard deviation of the averaging window as a share of the run so far; 0.01 to 0.28."""

    def __post_init__(self) -> None:
        if not 0.01 <= self.width <= 0.28:
            raise RequestError(f"width = {self.width} must be from 0.01 to 0.28; 0.05 to 0.15 is usual")

    @cached_property
    def gamma(self) -> float:
        """Exponent of the profile, by bisection: the right-hand side falls as gamma grows."""
        low, high = 0.0, 200.0
        for _ in range(60):
            middle = (low + high) / 2
            if (middle + 1) / ((middle + 2) ** 2 * (middle + 3)) > self.width**2:
                low = middle
            else:
                high = middle
        return low

    def decay(self, update: int) -> float:
        """Return the weight of the old average at update 1, 2, 3, …"""
        return float((1 - 1 / update) ** (self.gamma + 1))


@dataclass(frozen=True)
class FixedEma:
    """EMA with a fixed decay, and a warm-up so that a short run is not mostly its initial weights.

    At update n the decay is at most (1 + n) / (10 + n). With 0.9999, 1 - 1/e = 63% of the average comes from the last
    10,000 updates (the last 5,000 make 39%).
    """

    kind: ClassVar[str] = "fixed"
    decay_max: float = 0.9999
    """Decay that the warm-up rises to."""

    def __post_init__(self) -> None:
        if not 0 <= self.decay_max < 1:
            raise RequestError(f"decay_max = {self.decay_max} must be from 0 up to, not including, 1; 0.9999 is usual")

    def decay(self, update: int) -> float:
        """Return the weight of the old average at update 1, 2, 3, …"""
        return min(self.decay_max, (1 + update) / (10 + update))


EmaSchedule = PowerEma | FixedEma
EMA_SCHEDULES = (PowerEma, FixedEma)
