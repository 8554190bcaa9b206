"""The training objective: one noisy look at each image, and the weighted squared error of the answer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from unfog.diffusion.diffusion import Diffusion, Network
from unfog.diffusion.weighting import Snr
from unfog.errors import RequestError


class Loss(NamedTuple):
    """Loss of each image, and the noise quantile at which it was measured."""

    per_image: Tensor
    """float32 [B], weighted; the caller reduces."""
    u: Tensor
    """float32 [B] in (0, 1), clean to noisy."""
    reference: Tensor
    """float32 [B]: the loss of answering 0 to an image of mean square 1, so no image's expected one is higher."""


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

    def __post_init__(self) -> None:
        if not 0 <= self.label_dropout <= 1:
            raise RequestError(f"label_dropout = {self.label_dropout}: a chance is between 0 and 1; 0.1 is usual")

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
        u = stratified(len(x0), x0.device) if u is None else u
        noise = torch.randn_like(x0) if noise is None else noise
        if label is not None and self.label_dropout > 0:
            hide = torch.rand(len(x0), device=x0.device) < self.label_dropout
            label = label.masked_fill(hide, self.num_classes)
        logsnr = self.diffusion.schedule(u)
        weight = self.diffusion.weight(logsnr)
        reference = weight * self.diffusion.target_power(logsnr)
        return Loss(weight * self._error(network, x0, label, condition, logsnr, noise), u, reference)

    def at(
        self, network: Network, x0: Tensor, label: Tensor | None, logsnr: Tensor, noise: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Loss at given noise levels [B] and noise, for held-out images: draws nothing, hides no label.

        Returns:
            The weighted loss, and the mean squared error of the noise that the answer implies; float32 [B].
        """
        error = self._error(network, x0, label, None, logsnr, noise)
        on_noise = replace(self.diffusion, weighting=Snr())  # SNR on the image's error is 1 on the noise's
        return self.diffusion.weight(logsnr) * error, on_noise.weight(logsnr) * error

    def _error(
        self,
        network: Network,
        x0: Tensor,
        label: Tensor | None,
        condition: Tensor | None,
        logsnr: Tensor,
        noise: Tensor,
    ) -> Tensor:
        """Mean squared error [B] of the network's output; float32 whatever the autocast, as the truth is."""
        x_t = self.diffusion.add_noise(x0, noise, logsnr)
        told = () if condition is None else (condition,)
        y = network(*self.diffusion.network_input(x_t, logsnr), label, *told)
        return (y - self.diffusion.network_target(x0, noise, logsnr)).square().mean((1, 2, 3))


def stratified(count: int, device: torch.device) -> Tensor:
    """One u in each of `count` equal parts of (0, 1), float32 [count], increasing.

    Covering the levels evenly lowers the variance of the loss. No need to shuffle u, as the images are.
    """
    u = (torch.arange(count, device=device) + torch.rand(count, device=device)) / count
    return u.clamp(1e-6, 1 - 1e-6)  # at 0 and 1 continuous schedules are infinite, and rounding does reach them
