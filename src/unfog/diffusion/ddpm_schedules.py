"""DDPM's schedules, linear, cosine and sigmoid: tables of T noise levels, or their limits as T grows (steps = 0)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from operator import mul
from typing import TYPE_CHECKING, ClassVar

from unfog.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor

_MOST_STEPS = 100_000
LAST = 0.999
"""The quantile at which continuous schedules are first sampled; u = 1 may be infinitely noisy."""


class TimestepSchedule:
    """Base of `Linear`, `Cosine` and `Sigmoid`: a table of T levels, or its continuous limit when steps = 0.

    alpha_bar of timestep k is the product of 1 - beta_i for i = 0, 1, ..., k, and
    logsnr = log(alpha_bar / (1 - alpha_bar)) (Ho et al. 2020, eq. 4).
    """

    kind: ClassVar[str]
    steps: int
    zero_terminal: bool

    def betas(self) -> list[float]:
        """Return the noise variance added at each of the T steps."""
        raise NotImplementedError

    def continuous(self, u: Tensor) -> Tensor:
        """Map a quantile to logsnr, in the limit of infinitely many steps."""
        raise NotImplementedError

    def continuous_quantile(self, logsnr: Tensor) -> Tensor:
        """Map logsnr to a quantile, the inverse of `continuous`."""
        raise NotImplementedError

    def continuous_snr_slope(self, logsnr: Tensor) -> Tensor:
        """Return -dSNR/du at this logsnr of `continuous`."""
        raise NotImplementedError

    def table(self) -> Tensor:
        """Return logsnr of timesteps 0 ... T-1, float64 [T], decreasing; -inf at the end with zero_terminal."""
        import torch

        return torch.tensor(_logsnr_table(self), dtype=torch.float64)

    def __call__(self, u: Tensor) -> Tensor:
        """Map quantile u in (0, 1) to logsnr. Quantised: table[floor(u T)]."""
        if not self.steps:
            return self.continuous(u)
        # Clamped, as u T is T itself for u = 1, and may round up to it for u just below.
        k = (u * self.steps).long().clamp(0, self.steps - 1)
        return _table_like(self, u.dtype, u.device)[k]

    def quantile(self, logsnr: Tensor) -> Tensor:
        """Map logsnr to u. Quantised: table[k] -> k / T, linear in between, clamped to the table's ends."""
        if not self.steps:
            return self.continuous_quantile(logsnr)
        import torch

        noisiness = -_table_like(self, logsnr.dtype, logsnr.device)  # searchsorted wants increasing values
        k = (torch.searchsorted(noisiness, -logsnr) - 1).clamp(0, self.steps - 2)
        between = (-logsnr - noisiness[k]) / (noisiness[k + 1] - noisiness[k])
        # inf / inf happens only at the last level of zero_terminal, which is level k + 1 itself.
        return (k + between.clamp(0, 1).nan_to_num(nan=1.0)) / self.steps

    def before(self, logsnr: Tensor) -> Tensor:
        """Return logsnr of the timestep before that of a logsnr in the table, +inf for timestep 0. Quantised only."""
        import torch

        k = (self.quantile(logsnr) * self.steps).round().long()
        table = _table_like(self, logsnr.dtype, logsnr.device)
        return torch.where(k > 0, table[(k - 1).clamp_min(0)], math.inf)

    def cleanest(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return logsnr of timesteps 0 and 1, 0-d, of the type and on the device of `like`. Quantised only."""
        table = _table_like(self, like.dtype, like.device)
        return table[0], table[1]

    def snr_slope(self, logsnr: Tensor) -> Tensor:
        """Return -dSNR/du. Quantised: T (SNR of the timestep before - SNR), at timestep 0 T SNR."""
        if not self.steps:
            return self.continuous_snr_slope(logsnr)
        import torch

        before = self.before(logsnr)
        return self.steps * torch.where(before.isinf(), logsnr.exp(), before.exp() - logsnr.exp())

    def limits(self) -> tuple[float, float]:
        """Return (noisiest, cleanest) logsnr: the table's ends, or those of 1000 levels if continuous."""
        if self.steps:
            # From the cached table of floats: this is asked when settings are read, before torch is imported.
            table = _logsnr_table(self)
            return table[-1], table[0]
        noisiest, *_, cleanest = self.levels(1000).tolist()
        return noisiest, cleanest

    def levels(self, steps: int) -> Tensor:
        """Return logsnr to sample at, float64 [steps], noisiest first.

        Quantised: "trailing" timesteps, round(T i / steps) - 1. They start at T - 1, where training saw pure
        noise or nearly; "leading" ones start short of it, where the network expects a trace of signal
        (Lin et al. 2023, Table 2).

        Raises:
            RequestError: More steps than the schedule has levels.
        """
        if not self.steps:
            return trailing(self, steps)
        if steps > self.steps:
            raise RequestError(
                f"{steps} sampling steps are more than the schedule's {self.steps} levels; "
                f"use at most {self.steps}, or another grid"
            )
        return self.table()[[round(self.steps * (steps - i) / steps) - 1 for i in range(steps)]]

    def check_steps(self) -> None:
        if self.steps != 0 and not 2 <= self.steps <= _MOST_STEPS:
            raise RequestError(f"steps = {self.steps}: a schedule has 2 to {_MOST_STEPS} steps, or 0 for continuous")
        if self.zero_terminal and not self.steps:
            raise RequestError("zero_terminal rescales a table of levels: set steps, for example 1000")

    def check_table(self) -> None:
        """Raise RequestError unless every step adds noise and keeps some signal, except the last of zero_terminal."""
        alpha_bar = _alpha_bar(self) if self.steps else ()
        if any(not 1 > before > after > 0 for before, after in pairwise(alpha_bar)):
            raise RequestError(
                f"the {self.kind} schedule of {self.steps} steps has steps that add no noise, or that leave no "
                "signal before the end; keep closer to its defaults"
            )


@dataclass(frozen=True)
class Linear(TimestepSchedule):
    """beta_k = (beta_start + (beta_end - beta_start) k / (T - 1)) 1000 / T (Ho et al. 2020, section 4, at T = 1000).

    Betas are stated for T = 1000 and scaled by 1000 / T, so that any T ends in noise (Nichol & Dhariwal's code);
    left as they are, T = 250 would end with SNR 0.09. The limit is the VP-SDE of Song et al. 2021, eq. 33:
    log alpha_bar = -1000 (beta_start u + (beta_end - beta_start) u^2 / 2).
    """

    kind: ClassVar[str] = "linear"
    steps: int = 1000
    """Number of timesteps T; 0 is continuous."""
    beta_start: float = 1e-4
    """Variance added by the first of 1000 steps."""
    beta_end: float = 0.02
    """Variance added by the last of 1000 steps."""
    zero_terminal: bool = False
    """Rescale so that the last level is pure noise (Lin et al. 2023, Algorithm 1)."""

    def __post_init__(self) -> None:
        self.check_steps()
        largest = min(1.0, self.steps / 1000) if self.steps else 1.0
        if not 1e-9 <= self.beta_start <= self.beta_end < largest:
            raise RequestError(
                f"beta_start = {self.beta_start}, beta_end = {self.beta_end}: need 1e-9 <= start <= end < {largest} "
                f"(1, or steps / 1000); DDPM has 0.0001 and 0.02"
            )
        self.check_table()

    def betas(self) -> list[float]:
        """Return values evenly spaced from beta_start to beta_end, scaled by 1000 / T."""
        rise = (self.beta_end - self.beta_start) / (self.steps - 1)
        return [(self.beta_start + rise * k) * 1000 / self.steps for k in range(self.steps)]

    def continuous(self, u: Tensor) -> Tensor:
        # log alpha_bar = -integral of beta; SNR = 1 / (1 / alpha_bar - 1)
        integral = 1000 * u * (self.beta_start + (self.beta_end - self.beta_start) * u / 2)
        return -integral.expm1().log()

    def continuous_quantile(self, logsnr: Tensor) -> Tensor:
        # The positive root of the quadratic integral, in the form that does not cancel.
        integral = logsnr.neg().exp().log1p() / 1000
        root = (self.beta_start**2 + 2 * (self.beta_end - self.beta_start) * integral).sqrt()
        # With almost no signal the integral overflows: levels noisier than the last are at u = 1.
        return (2 * integral / (self.beta_start + root)).nan_to_num(nan=1.0).clamp(max=1)

    def continuous_snr_slope(self, logsnr: Tensor) -> Tensor:
        # SNR = 1 / (e^I - 1), so -dSNR/du = SNR (SNR + 1) I' with I' = 1000 beta.
        u, snr = self.continuous_quantile(logsnr), logsnr.exp()
        return snr * (snr + 1) * 1000 * (self.beta_start + (self.beta_end - self.beta_start) * u)


@dataclass(frozen=True)
class Cosine(TimestepSchedule):
    """alpha_bar = f(u) / f(0), f(u) = cos^2(pi/2 (u + offset) / (1 + offset)) (Nichol & Dhariwal 2021, eq. 17)."""

    kind: ClassVar[str] = "cosine"
    steps: int = 1000
    """Number of timesteps T; 0 is continuous."""
    offset: float = 0.008
    """Keeps the first steps from adding almost no noise."""
    max_beta: float = 0.999
    """Cap on the variance that one step adds, so that the last keeps some signal; unused when continuous."""
    zero_terminal: bool = False
    """Rescale so that the last level is pure noise (Lin et al. 2023, Algorithm 1)."""

    def __post_init__(self) -> None:
        self.check_steps()
        if not (0 <= self.offset <= 1 and 0 < self.max_beta < 1):
            raise RequestError(
                f"offset = {self.offset}, max_beta = {self.max_beta}: need offset from 0 to 1 and 0 < max_beta < 1; "
                "the usual ones are 0.008 and 0.999"
            )
        self.check_table()

    @property
    def _angle(self) -> float:
        return math.pi / 2 / (1 + self.offset)

    def betas(self) -> list[float]:
        """Return 1 - alpha_bar((k + 1) / T) / alpha_bar(k / T), capped at max_beta."""
        f = [math.cos((k / self.steps + self.offset) * self._angle) ** 2 for k in range(self.steps + 1)]
        return [min(1 - f[k + 1] / f[k], self.max_beta) for k in range(self.steps)]

    def continuous(self, u: Tensor) -> Tensor:
        # SNR = f(u) / (f(0) - f(u)), as products of sines, which keep their precision at both ends.
        angle = self._angle
        signal = ((1 - u) * angle).sin().square()
        noise = (u * angle).sin() * ((u + 2 * self.offset) * angle).sin()
        return (signal / noise).log()

    def continuous_quantile(self, logsnr: Tensor) -> Tensor:
        # The angle whose squared cosine is alpha_bar f(0); atan2 keeps its precision at both ends.
        f0 = math.cos(self.offset * self._angle) ** 2
        cosine = (logsnr.sigmoid() * f0).sqrt()
        sine = ((1 - f0) + logsnr.neg().sigmoid() * f0).sqrt()
        return sine.atan2(cosine) / self._angle - self.offset

    def continuous_snr_slope(self, logsnr: Tensor) -> Tensor:
        # SNR times the derivatives of the logs of the three sines of `continuous`: cotangents.
        angle, u = self._angle, self.continuous_quantile(logsnr)
        cotangents = [1 / (place * angle).tan() for place in (1 - u, u, u + 2 * self.offset)]
        return logsnr.exp() * angle * (2 * cotangents[0] + cotangents[1] + cotangents[2])


def _alpha_bar(schedule: TimestepSchedule) -> list[float]:
    """Return the share of signal in the variance after each timestep, before zero_terminal."""
    return list(accumulate((1 - beta for beta in schedule.betas()), mul))


@cache
def _logsnr_table(schedule: TimestepSchedule) -> tuple[float, ...]:
    """Return logsnr of each timestep in double precision; without torch, so that settings load without it."""
    alpha_bar = _alpha_bar(schedule)
    if schedule.zero_terminal:
        # Shift and scale sqrt(alpha_bar) so that it ends at 0 and its first value stays (Lin et al. 2023, Algorithm 1).
        first, last = math.sqrt(alpha_bar[0]), math.sqrt(alpha_bar[-1])
        alpha_bar = [((math.sqrt(a) - last) * first / (first - last)) ** 2 for a in alpha_bar]
    return tuple(math.log(a) - math.log1p(-a) if a > 0 else -math.inf for a in alpha_bar)


@cache
def _table_like(schedule: TimestepSchedule, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the table on a device; cached, as copying it at every step would wait for the device."""
    return schedule.table().to(dtype).to(device)  # in this order: some devices have no float64


def trailing(schedule: Callable[[Tensor], Tensor], steps: int) -> Tensor:
    """Return logsnr at LAST times the quantiles 1, 1 - 1 / steps, ..., 1 / steps; float64 [steps]."""
    import torch

    return schedule(torch.linspace(LAST, LAST / steps, steps, dtype=torch.float64))


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
