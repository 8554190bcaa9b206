"""The training objective: the weighted error of the network's output, usually squared, at one random level per image.

For an image x0, with a quantile u uniform in (0, 1) and noise eps ~ N(0, I):

    logsnr = schedule(u)
    x_t = alpha x0 + sigma eps
    y = network(c_in x_t, c_noise, conditions)
    loss = weight(logsnr) mean((y - (a x0 + b eps))^2)

`path` gives alpha and sigma, `target` gives a and b, `weighting` gives the weight. For eps prediction with plain
weighting it is DDPM's loss (Ho et al. 2020, eq. 14), and with EDM's parts it is EDM's (Karras et al. 2022, eq. 8).
`Diffusion.loss` may put another error in place of the square.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from unfog.device.sharded_rng import draw_rows
from unfog.diffusion.diffusion import Diffusion, Network
from unfog.diffusion.loss_by_level import LossByLevel
from unfog.diffusion.losses.pixel_loss import CustomLoss, PixelLoss, SquaredError
from unfog.diffusion.variance import variational_bound
from unfog.diffusion.weighting import Snr, Uncertainty
from unfog.errors import RequestError
from unfog.values.condition_kinds import Span
from unfog.values.conditions import NO_CONDITIONS, Conditions

# Weight of the variational bound, in bits per dimension, beside the squared error (Nichol & Dhariwal 2021, eq. 16).
_VLB_SHARE = 0.001
# The usual error, to which the variance of the noise and all weightings refer.
SQUARED = SquaredError()
# Largest share of an image's pixels that `hides_more` hides, and the share of the images that it hides some of.
_MOST_HIDDEN, _HIDDEN_FROM = 0.7, 0.7


class Loss(NamedTuple):
    """The loss of each image, and the noise quantile at which it was measured."""

    per_image: Tensor
    """float32 [B], weighted; training minimises its mean, and the caller reduces."""
    u: Tensor
    """float32 [B] in (0, 1), clean to noisy."""
    null_loss: Tensor
    """float32 [B]: the expected loss of an output of 0 for an image of mean square 1."""
    error: Tensor | None = None
    """float32 [B]: the error times `Diffusion.weight`, if `per_image` is more than that; else None."""
    importance: Tensor | None = None
    """float32 [B]: 1 / density of u, if it is not uniform; else None."""

    @property
    def measured(self) -> Tensor:
        """The weighted error [B], comparable with `null_loss` and between steps."""
        return self.per_image if self.error is None else self.error

    def detached(self) -> Loss:
        """Return the same values without the graph."""
        return Loss(*(None if part is None else part.detach() for part in self))  # type: ignore[arg-type]


class Noised(NamedTuple):
    """A batch at its noise levels, ready for the network."""

    logsnr: Tensor
    """[B]."""
    weight: Tensor
    """Weight of the error of the output, [B]."""
    null_loss: Tensor
    """`Loss.null_loss`."""
    x_t: Tensor
    """alpha x0 + sigma eps, [B, C, H, W]."""
    inputs: tuple[Tensor, Tensor]
    """Inputs of the network: c_in x_t and c_noise."""
    target: Tensor
    """a x0 + b eps, [B, C, H, W]."""


def noised(diffusion: Diffusion, x0: Tensor, noise: Tensor, u: Tensor) -> Noised:
    """Return images x0 [B, C, H, W] with noise like x0 at the levels of the quantiles u [B]."""
    logsnr = diffusion.schedule(u)
    weight = diffusion.weight(logsnr)
    null_loss = weight * diffusion.target_power(logsnr)
    x_t = diffusion.add_noise(x0, noise, logsnr)
    target = diffusion.network_target(x0, noise, logsnr)
    return Noised(logsnr, weight, null_loss, x_t, diffusion.network_input(x_t, logsnr), target)


def weighted_error(weight: Tensor, y: Tensor, target: Tensor, loss: PixelLoss = SQUARED) -> Tensor:
    """Return weight mean(loss(y, target)), float32 [B]; for the squared error weight mean((y - target)^2)."""
    return weight * _mean_error(loss, y, target)


def _mean_error(loss: PixelLoss, y: Tensor, target: Tensor, known: Tensor | None = None) -> Tensor:
    """Return the mean error [B] of an output; float32 even under autocast, as the target is.

    With a mask `known` [B, C, H, W] it is the mean over the known values alone, 1 in it; 0 without any.
    """
    errors = loss(y[:, : target.shape[1]], target)
    if known is None:
        return errors.mean((1, 2, 3))
    return errors.masked_fill(known == 0, 0.0).sum((1, 2, 3)) / known.sum((1, 2, 3)).clamp_min(1.0)


def _null_loss(loss: PixelLoss, mixed: Noised) -> Tensor:
    """Return `Loss.null_loss` of a loss: exact for the squared error, for others that of targets of equal size."""
    if loss == SQUARED:
        return mixed.null_loss
    power = mixed.null_loss / mixed.weight.clamp_min(1e-30)
    target = power.sqrt()[:, None, None, None].expand_as(mixed.target)
    return mixed.weight * _mean_error(loss, torch.zeros_like(mixed.target), target)


def split_unknown(x0: Tensor) -> tuple[Tensor, Tensor]:
    """Return images [B, C, H, W] with 0 where they are NaN, which is unknown, and a mask like them: 1 where known."""
    unknown = x0.isnan()
    return x0.masked_fill(unknown, 0.0), (~unknown).to(x0.dtype)


def stratified(draws: Tensor, step: int) -> Tensor:
    """Move even `draws` in (0, 1), float32 [B], to one in each of B equal parts of it: less variance of the loss.

    With `step` 1 they increase, as the images are shuffled; with `golden_step(B)` any few in a row are spread over all
    parts.
    """
    count = len(draws)
    # The same operations for every step, so that the memory of a step is affine in the batch size.
    part = torch.arange(count, device=draws.device) * step % count
    u = (part + draws) / count
    return u.clamp(1e-6, 1 - 1e-6)  # at 0 and 1 continuous schedules are infinite, and rounding does reach them


@dataclass(frozen=True)
class Objective:
    """Mean error of the network's output, weighted by noise level: squared, unless `diffusion.loss` is another.

    All randomness comes from torch's global generator of x0's device, in the order u, noise, dropout, dropout of
    each, hidden pixels.
    """

    diffusion: Diffusion
    dropout: float = 0.0
    """Chance of hiding an image's conditions, for classifier-free guidance; 0.1 is usual (Ho & Salimans 2022)."""
    dropout_each: float = 0.0
    """Chance of hiding each condition of an image by itself, so that samples need not be given all of them."""
    spans: tuple[Span, ...] = ()
    """Places of the conditions that are hidden by themselves."""
    interleaved: bool = False
    """Interleave the levels, so that each part of a batch covers all of them, instead of going from clean to noisy."""
    has_unknown: bool = False
    """Images may have NaN where they are unknown: it is left out of the loss, and the network is given a mask."""
    hides_more: bool = False
    """Hide further pixels of most images, as many as vary, so that the network learns what more or fewer known pixels
    change, and may be asked for complete images (as Daras et al. 2023, Ambient Diffusion, do)."""
    levels: LossByLevel | None = field(default=None, compare=False)
    """The measured loss by noise level, which `uncertainty` and `adaptive` use; the trainer updates it if
    `diffusion.follows_losses`."""
    stratified: Callable[[Tensor, int], Tensor] = field(default=stratified, compare=False, repr=False)
    """The function of this name, or a compiled one; so are the next two."""
    noised: Callable[[Diffusion, Tensor, Tensor, Tensor], Noised] = field(default=noised, compare=False, repr=False)
    weighted_error: Callable[[Tensor, Tensor, Tensor, PixelLoss], Tensor] = field(
        default=weighted_error, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        if not 0 <= self.dropout <= 1:
            raise RequestError(f"label_dropout = {self.dropout}: a chance is between 0 and 1; 0.1 is usual")
        if not 0 <= self.dropout_each <= 1:
            raise RequestError(f"condition_dropout = {self.dropout_each}: a chance is between 0 and 1; 0.1 is usual")

    def __call__(
        self,
        network: Network,
        x0: Tensor,
        conditions: Conditions = NO_CONDITIONS,
        u: Tensor | None = None,
        noise: Tensor | None = None,
    ) -> Loss:
        """Compute the loss of images x0; draws u and noise if None.

        Args:
            network: the network to train.
            x0: float32 [B, C, H, W] in [-1, 1]; NaN is unknown with `has_unknown`.
            conditions: of the images.
            u: float32 [B] in (0, 1), clean to noisy.
            noise: like x0.
        """
        x0, conditions = self._with_known(x0, conditions)
        u, importance = self._draw_levels(x0) if u is None else (u, None)
        noise = draw_rows(len(x0), lambda n: _normal_like(x0, n)) if noise is None else noise
        conditions = self._hide_pixels(self._hide_some(conditions, x0), x0)

        mixed = self.noised(self.diffusion, x0, noise, u)
        y = network(*mixed.inputs, conditions)
        error = self._error(mixed, y, conditions.known)

        loss = error
        if self.levels is not None and isinstance(self.diffusion.weighting, Uncertainty):
            loss = loss * (-self.levels.log_mean(u)).exp()
        if self.diffusion.learned_variance:
            # Times T, as a mean over u stands for a sum over timesteps.
            share = _VLB_SHARE * self.diffusion.schedule.steps / math.log(2)
            loss = loss + share * variational_bound(self.diffusion, y, x0, mixed.x_t, mixed.logsnr)
        if importance is not None:
            loss = loss * importance
        null_loss = _null_loss(self.diffusion.loss, mixed)
        return Loss(loss, u, null_loss, None if loss is error else error.detach(), importance)

    def _error(self, mixed: Noised, y: Tensor, known: Tensor | None) -> Tensor:
        """Return the weighted error [B] of an output; of the known values alone if there is a mask."""
        loss = self.diffusion.loss
        if known is not None:
            return mixed.weight * _mean_error(loss, y, mixed.target, known)
        # People's own code runs as it is.
        weighted = weighted_error if isinstance(loss, CustomLoss) else self.weighted_error
        return weighted(mixed.weight, y, mixed.target, loss)

    def _with_known(self, x0: Tensor, conditions: Conditions) -> tuple[Tensor, Conditions]:
        """Return the images with 0 where they are unknown, and the conditions with the mask of what is known."""
        if not self.has_unknown:
            return x0, conditions
        x0, known = split_unknown(x0)
        return x0, conditions._replace(known=known)

    def _draw_levels(self, x0: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return noise quantiles u [B] for the images x0, and their importance [B] if they are not drawn evenly."""
        step = golden_step if self.interleaved else lambda count: 1
        u = draw_rows(len(x0), lambda n: self.stratified(torch.rand(n, device=x0.device), step(n)))
        if self.levels is None or not self.diffusion.adaptive:
            return u, None
        # After u is drawn, so that the same random numbers are used with and without importance.
        return self.levels.draw(u, self.diffusion.adaptive, isinstance(self.diffusion.weighting, Uncertainty))

    def _hide_some(self, conditions: Conditions, x0: Tensor) -> Conditions:
        """Return the conditions of the images x0, some of them hidden: all of an image, or each by itself."""
        if conditions.droppable and self.dropout > 0:
            hidden = draw_rows(len(x0), lambda n: torch.rand(n, device=x0.device)) < self.dropout
            conditions = conditions.dropped(hidden)
        if self.spans and self.dropout_each > 0:
            each = draw_rows(len(x0), lambda n: torch.rand(n, len(self.spans), device=x0.device)) < self.dropout_each
            conditions = conditions.dropped_each(each, self.spans)
        return conditions

    def _hide_pixels(self, conditions: Conditions, x0: Tensor) -> Conditions:
        """Return the conditions with a mask that hides a random share of the pixels, too, from most images x0."""
        if conditions.known is None or not self.hides_more:
            return conditions
        draws = draw_rows(len(x0), lambda n: torch.rand(n, 2, 1, 1, 1, device=x0.device))
        share = _MOST_HIDDEN * draws[:, 0] * (draws[:, 1] < _HIDDEN_FROM)
        shown = draw_rows(len(x0), lambda n: torch.rand(n, 1, *x0.shape[2:], device=x0.device)) >= share
        return conditions._replace(known=conditions.known * shown)

    def at(
        self, network: Network, x0: Tensor, conditions: Conditions, logsnr: Tensor, noise: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute the loss at given noise levels [B] and noise, for held-out images: draws nothing, hides nothing.

        Returns:
            The weighted loss, by `diffusion.loss`, and the mean squared error of the noise that the output implies;
            float32 [B].
        """
        x0, conditions = self._with_known(x0, conditions)
        inputs = self.diffusion.network_input(self.diffusion.add_noise(x0, noise, logsnr), logsnr)
        y, target = network(*inputs, conditions), self.diffusion.network_target(x0, noise, logsnr)
        squared = _mean_error(SQUARED, y, target, conditions.known)
        loss = self.diffusion.loss
        error = squared if loss == SQUARED else _mean_error(loss, y, target, conditions.known)
        on_noise = replace(self.diffusion, weighting=Snr())  # SNR on the image's error is 1 on the noise's
        return self.diffusion.weight(logsnr) * error, on_noise.weight(logsnr) * squared


def _normal_like(x: Tensor, count: int) -> Tensor:
    """Draw standard normal noise for `count` images in the memory layout of x; for len(x), `torch.randn_like`."""
    if count == len(x):
        return torch.randn_like(x)
    # Numbers are filled in by their place in memory, so a part of a batch needs the layout of the whole to get its own.
    return x.new_empty_strided((count, *x.shape[1:]), x.stride()).normal_()


@functools.cache
def golden_step(count: int) -> int:
    """Return a step whose multiples modulo `count` visit all of 0 … count - 1, with any few in a row far apart."""
    # Near the golden section, and with a continued fraction of small terms: such multiples fill a circle evenly.
    ideal = round((5**0.5 - 1) / 2 * count)
    near = range(max(1, ideal - 32), min(count, ideal + 32) + 1)
    return min((step for step in near if math.gcd(step, count) == 1), key=lambda step: max(_terms(step, count)))


def _terms(a: int, b: int) -> list[int]:
    """Return the continued fraction of a / b."""
    return [a // b, *_terms(b, a % b)] if b else []
