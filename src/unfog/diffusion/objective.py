"""The training objective: one noisy look at each image, and the weighted squared error of the answer."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from unfog.diffusion.diffusion import Diffusion, Network
from unfog.diffusion.levels import Levels
from unfog.diffusion.variance import variational_bound
from unfog.diffusion.weighting import Snr, Uncertainty
from unfog.errors import RequestError
from unfog.sharded_rng import draw_rows

VLB_SHARE = 0.001
"""Weight of the variational bound in bits per number beside the squared error (Nichol & Dhariwal 2021, eq. 16)."""


class Loss(NamedTuple):
    """Loss of each image, and the noise quantile at which it was measured."""

    per_image: Tensor
    """float32 [B], weighted; its mean is what training lowers. The caller reduces."""
    u: Tensor
    """float32 [B] in (0, 1), clean to noisy."""
    null_loss: Tensor
    """float32 [B]: the error of answering 0 to an image of mean square 1, so no image's expected one is higher."""
    error: Tensor | None = None
    """float32 [B]: what `weight` alone makes of the squared error, where `per_image` is more than that; else None."""
    importance: Tensor | None = None
    """float32 [B]: 1 / density of u, where it is not drawn evenly; else None."""

    @property
    def measured(self) -> Tensor:
        """The weighted squared error [B], which compares with `reference` and with that of other times."""
        return self.per_image if self.error is None else self.error

    def detached(self) -> Loss:
        """The same, with no graph behind it."""
        return Loss(*(None if part is None else part.detach() for part in self))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Objective:
    """Mean squared error on the network's output, weighted by noise level.

    All randomness comes from torch's global generator of x0's device, in the order u, noise, label dropout.
    """

    diffusion: Diffusion
    num_classes: int = 0
    """Number of classes; the null class, "no label", has this index."""
    label_dropout: float = 0.0
    """Chance of hiding an image's label, for classifier-free guidance; 0.1 is usual (Ho & Salimans 2022)."""
    interleaved: bool = False
    """Whether also a part of a batch has levels from all over, rather than the batch from clean to noisy."""

    levels: Levels | None = field(default=None, compare=False)
    """The loss by noise level as measured so far: what `uncertainty` and `adaptive` follow. Who trains keeps it, where
    `diffusion.follows_losses`."""

    def __post_init__(self) -> None:
        if not 0 <= self.label_dropout <= 1:
            raise RequestError(f"label_dropout = {self.label_dropout}: a chance is between 0 and 1; 0.1 is usual")

    def following(self, levels: Levels | None) -> Objective:
        """The same, where these are the losses measured so far; None where it does not read them."""
        return replace(self, levels=levels)

    def __call__(
        self,
        network: Network,
        x0: Tensor,
        label: Tensor | None = None,
        condition: Tensor | None = None,
        u: Tensor | None = None,
        noise: Tensor | None = None,
    ) -> Loss:
        """Loss of images x0; draws u and noise if None.

        Args:
            network: what is trained.
            x0: float32 [B, C, H, W] in [-1, 1].
            label: int64 [B].
            condition: [B, 9], what an augmentation did to the images, which the network is told.
            u: float32 [B] in (0, 1), clean to noisy.
            noise: like x0.
        """
        importance = None
        if u is None:
            u = draw_rows(len(x0), lambda n: stratified(n, x0.device, self.interleaved))
            if self.levels is not None and self.diffusion.adaptive:
                divided = isinstance(self.diffusion.weighting, Uncertainty)
                u, importance = self.levels.draw(u, self.diffusion.adaptive, divided)
        noise = draw_rows(len(x0), lambda n: normal_like(x0, n)) if noise is None else noise
        if label is not None and self.label_dropout > 0:
            hide = draw_rows(len(x0), lambda n: torch.rand(n, device=x0.device)) < self.label_dropout
            label = label.masked_fill(hide, self.num_classes)
        logsnr = self.diffusion.schedule(u)
        weight = self.diffusion.weight(logsnr)
        reference = weight * self.diffusion.target_power(logsnr)
        x_t = self.diffusion.add_noise(x0, noise, logsnr)
        y = self._answer(network, x_t, label, condition, logsnr)
        error = weight * self._error(y, x0, noise, logsnr)
        loss = error
        if self.levels is not None and isinstance(self.diffusion.weighting, Uncertainty):
            loss = loss * (-self.levels.log_mean(u)).exp()
        if self.diffusion.learned_variance:
            share = VLB_SHARE * self.diffusion.schedule.steps / math.log(2)  # a mean over u for a sum over timesteps
            loss = loss + share * variational_bound(self.diffusion, y, x0, x_t, logsnr)
        if importance is not None:
            loss = loss * importance
        return Loss(loss, u, reference, None if loss is error else error.detach(), importance)

    def at(
        self, network: Network, x0: Tensor, label: Tensor | None, logsnr: Tensor, noise: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Loss at given noise levels [B] and noise, for held-out images: draws nothing, hides no label.

        Returns:
            The weighted loss, and the mean squared error of the noise that the answer implies; float32 [B].
        """
        y = self._answer(network, self.diffusion.add_noise(x0, noise, logsnr), label, None, logsnr)
        error = self._error(y, x0, noise, logsnr)
        on_noise = replace(self.diffusion, weighting=Snr())  # SNR on the image's error is 1 on the noise's
        return self.diffusion.weight(logsnr) * error, on_noise.weight(logsnr) * error

    def _answer(
        self, network: Network, x_t: Tensor, label: Tensor | None, condition: Tensor | None, logsnr: Tensor
    ) -> Tensor:
        """The network's output for noisy images."""
        told = () if condition is None else (condition,)
        return network(*self.diffusion.network_input(x_t, logsnr), label, *told)

    def _error(self, y: Tensor, x0: Tensor, noise: Tensor, logsnr: Tensor) -> Tensor:
        """Mean squared error [B] of that output; float32 whatever the autocast, as the truth is."""
        truth = self.diffusion.network_target(x0, noise, logsnr)
        return (y[:, : x0.shape[1]] - truth).square().mean((1, 2, 3))


def normal_like(x: Tensor, count: int) -> Tensor:
    """Standard normal noise for `count` images such as these, laid out as they are; of as many, `torch.randn_like`."""
    if count == len(x):
        return torch.randn_like(x)
    return x.new_empty_strided((count, *x.shape[1:]), x.stride()).normal_()


def stratified(count: int, device: torch.device, interleaved: bool = False) -> Tensor:
    """One u in each of `count` equal parts of (0, 1), float32 [count]; increasing, or `interleaved`, so that any few in
    a row are spread over the whole.

    Covering the levels evenly lowers the variance of the loss. No need to shuffle u, as the images are.
    """
    part = torch.arange(count, device=device)
    if interleaved:
        part = part * golden(count) % count
    u = (part + torch.rand(count, device=device)) / count
    return u.clamp(1e-6, 1 - 1e-6)  # at 0 and 1 continuous schedules are infinite, and rounding does reach them


@functools.cache
def golden(count: int) -> int:
    """The step that visits all of 0 … count - 1 such that any few in a row lie far apart.

    Near the golden section of `count`, with a continued fraction of small terms: its multiples fill a circle evenly.
    """
    ideal = round((5**0.5 - 1) / 2 * count)
    near = range(max(1, ideal - 32), min(count, ideal + 32) + 1)
    return min((step for step in near if math.gcd(step, count) == 1), key=lambda step: max(_terms(step, count)))


def _terms(a: int, b: int) -> list[int]:
    """The continued fraction of a / b."""
    return [a // b, *_terms(b, a % b)] if b else []
