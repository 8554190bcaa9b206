"""Denoisers, E[x0 | x_t] from a network and a diffusion: the only function that a sampler calls. And their guidance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from unfog.device.copies import to_device
from unfog.diffusion.diffusion import Diffusion, Network
from unfog.diffusion.variance import fraction_of
from unfog.values.conditions import NO_CONDITIONS, Conditions

if TYPE_CHECKING:
    from unfog.values.condition_kinds import Span

Conditional = Callable[..., Tensor]
"""(x_t [B, C, H, W], logsnr [B], `Conditions`) -> E[x0 | x_t, conditions]."""


@dataclass(frozen=True)
class Denoiser:
    """Map a noisy image to the network's estimate of the clean one, for any prediction target.

    E[x0 | x_t] = (b x_t - sigma y) / (alpha b - sigma a) with y = network(c_in x_t, c_noise, conditions).
    """

    network: Network
    diffusion: Diffusion
    variance: bool = False
    """Append the learned variance, which the ddpm sampler uses, as C more channels: [B, 2 C, H, W].

    In channels, so that guidance can pass it on.
    """
    dtype: torch.dtype | None = None
    """Type of the autocast around the network; None disables autocast, even inside an outer one."""

    def __call__(self, x_t: Tensor, logsnr: Tensor, conditions: Conditions = NO_CONDITIONS) -> Tensor:
        """Return E[x0 | x_t]: [B, C, H, W] at noise level [B] -> [B, C, H, W] in data scale.

        The level may be on the host, the conditions are where x_t is.
        """
        logsnr = to_device(logsnr, x_t.device)
        inputs = self.diffusion.network_input(x_t, logsnr)
        with torch.autocast(x_t.device.type, self.dtype, enabled=self.dtype is not None):
            y = self.network(*inputs, conditions)
        with torch.autocast(x_t.device.type, enabled=False):  # float32, as samplers take small differences
            x0 = self.diffusion.recover(y, x_t, logsnr)[0]
            if (known := Conditions.of(conditions).known) is not None:  # the network learned nothing of other pixels
                x0 = x0.masked_fill(known == 0, 0.0)
            return torch.cat([x0, fraction_of(y, x_t.shape[1]).to(x0.dtype)], 1) if self.variance else x0


@dataclass(frozen=True)
class Guided:
    """Classifier-free guidance, D_u + scale (D_c - D_u), in one batched call (Ho & Salimans 2022, eq. 6).

    D_c is the conditional estimate of x0 and D_u the unconditional one; scale is 1 + w of the paper.
    """

    denoiser: Conditional
    scale: float
    """1 is the plain conditional denoiser, 0 the unconditional one; above 1 the conditions count for more."""
    negative: Tensor | None = None
    """Tokens of a text, int64 [L], that D_u is given; None hides the text too."""

    def __call__(self, x_t: Tensor, logsnr: Tensor, conditions: Conditions) -> Tensor:
        """Return guided E[x0 | x_t, conditions]: [B, C, H, W] at noise level [B].

        A learned variance, in further channels, is that of the conditional denoiser, as in GLIDE and DiT, or at scale 0
        that of the unconditional one.
        """
        told = conditions.cat(conditions.dropped().with_text(self.negative))
        # One call of twice the batch rather than two: a small batch leaves a GPU idle.
        both = self.denoiser(torch.cat([x_t, x_t]), torch.cat([logsnr, logsnr]), told)
        conditional, unconditional = both.chunk(2)
        led = unconditional + self.scale * (conditional - unconditional)
        channels = x_t.shape[1]
        if led.shape[1] == channels:
            return led
        # Only the guess is extrapolated: the logarithm of a variance is not a score.
        variance = (conditional if self.scale else unconditional)[:, channels:]
        return torch.cat([led[:, :channels], variance], 1)


@dataclass(frozen=True)
class GuidedInTurn:
    """Guidance with a weight for each condition: D_0 + sum of w_k (D_k - D_(k-1)), in one batched call.

    D_0 is given the conditions of weight 1, and D_k those of D_(k-1) and the k-th one. This is eq. 3 of
    InstructPix2Pix (Brooks et al. 2023) for any number of conditions. It follows from the chain rule, p(x | a, b) =
    p(x) p(a | x) p(b | x, a) / p(a, b), whose factors get the weights as exponents, so conditions may depend on each
    other. Weights of 1 are the plain denoiser, and equal weights are `Guided`. The sum of w_k (D(k alone) - D(none))
    of Composable Diffusion (Liu et al. 2022) is neither: it holds for conditions that are independent given the image,
    and counts twice what two conditions share.
    """

    denoiser: Conditional
    turns: Sequence[tuple[float, Sequence[Span]]]
    """(w_k, places of the conditions hidden from D_k) of each estimate, D_0 first, whose weight is 1."""
    negative: Tensor | None = None
    """Tokens of a text, int64 [L], that an estimate is given where the text is hidden from it; None gives none."""

    def __call__(self, x_t: Tensor, logsnr: Tensor, conditions: Conditions) -> Tensor:
        """Return guided E[x0 | x_t, conditions]: [B, C, H, W] at noise level [B].

        A learned variance, in further channels, is that of the last estimate, as in `Guided`.
        """
        count, channels = len(self.turns), x_t.shape[1]
        told = reduce(Conditions.cat, [self._without(conditions, hidden) for _, hidden in reversed(self.turns)])
        answers = self.denoiser(torch.cat([x_t] * count), torch.cat([logsnr] * count), told)
        first, *others = reversed(answers.chunk(count))
        led, less = first, first
        for (weight, _), more in zip(self.turns[1:], others, strict=True):
            led, less = led + weight * (more - less), more
        return torch.cat([led[:, :channels], less[:, channels:]], 1) if led.shape[1] > channels else led

    def _without(self, conditions: Conditions, hidden: Sequence[Span]) -> Conditions:
        negative = self.negative if any(field == "tokens" for field, *_ in hidden) else None
        return conditions.without(hidden).with_text(negative)


@dataclass(frozen=True)
class Autoguided:
    """Autoguidance, D_w + scale (D - D_w), both with the same conditions (Karras et al. 2024, eq. 3).

    The weaker network is an earlier checkpoint or a smaller network, which makes the same errors, only larger.
    """

    denoiser: Conditional
    weaker: Conditional
    scale: float
    """1 is the plain denoiser; above 1 the difference of the two is exaggerated."""
    every: int = 1
    """Call the weaker network at every so many calls, and keep the difference in between; then for one batch alone."""
    negative: Tensor | None = None
    """Tokens of a text, int64 [L], that D_w is given in place of that of the conditions; None gives it the same."""
    _kept: list[_Kept] = field(default_factory=list, init=False, repr=False, compare=False)

    def __call__(self, x_t: Tensor, logsnr: Tensor, conditions: Conditions) -> Tensor:
        """Return guided E[x0 | x_t, conditions], [B, C, H, W]; the learned variance, if any, is the denoiser's."""
        answer, channels = self.denoiser(x_t, logsnr, conditions), x_t.shape[1]
        guess = answer[:, :channels]
        weaker = self._weaker_guess(guess, x_t, logsnr, conditions)
        # Only the guess is extrapolated: the weaker network need not have a learned variance.
        led = weaker + self.scale * (guess - weaker)
        return torch.cat([led, answer[:, channels:]], 1) if answer.shape[1] > channels else led

    def _weaker_guess(self, guess: Tensor, x_t: Tensor, logsnr: Tensor, conditions: Conditions) -> Tensor:
        if self.negative is not None:
            conditions = conditions.with_text(self.negative)
        if self.every == 1:
            return self.weaker(x_t, logsnr, conditions)
        kept = self._kept.pop() if self._kept else None
        # Where an edit or a retry goes back to more noise, what is kept is of images with more detail.
        if kept is None or kept.uses == self.every or bool((logsnr < kept.logsnr).any()):
            kept = _Kept(guess - self.weaker(x_t, logsnr, conditions), logsnr, 0)
        self._kept.append(_Kept(kept.difference, logsnr, kept.uses + 1))
        return guess - kept.difference


class _Kept(NamedTuple):
    """The last difference of the network from the weaker one, [B, C, H, W]."""

    difference: Tensor
    logsnr: Tensor
    """Levels of the last use, [B]."""
    uses: int


@dataclass(frozen=True)
class Within:
    """Guidance limited to an interval of the share of noise, sigma / (alpha + sigma) (Kynkaanniemi et al. 2024).

    At the noisiest levels guidance costs variety, at the cleanest it has no effect. Outside of the interval only the
    plain denoiser is called, which is half the work. Levels are on the host, so that no call waits for the device.
    """

    guided: Conditional
    plain: Conditional
    interval: tuple[float, float]
    """(lowest, highest) share of noise, both included: 0 is the image, 1 is noise alone, t of the flow path."""

    def __call__(self, x_t: Tensor, logsnr: Tensor, conditions: Conditions) -> Tensor:
        """Return E[x0 | x_t, conditions], [B, C, H, W], guided for images [B] whose level is within the interval."""
        inside = inside_interval(logsnr, self.interval)
        count = sum(inside)
        if count == 0:
            return self.plain(x_t, logsnr, conditions)
        guided = self.guided(x_t, logsnr, conditions)
        if count == len(inside):
            return guided
        chosen = to_device(torch.tensor(inside), x_t.device)
        return torch.where(chosen[:, None, None, None], guided, self.plain(x_t, logsnr, conditions))


def inside_interval(logsnr: Tensor, interval: tuple[float, float]) -> list[bool]:
    """Return whether the share of noise of each level, logsnr [B], is in the interval (lowest, highest)."""
    noise = (-logsnr / 2).sigmoid()
    return ((interval[0] <= noise) & (noise <= interval[1])).tolist()
