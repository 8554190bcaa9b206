"""Guidance by a weaker network, and guidance at some noise levels only. `denoiser.Guided` is guidance by the label."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Labelled = Callable[..., Tensor]
"""(x_t [B, C, H, W], logsnr [B], label int64 [B] or None) -> E[x0 | x_t, label]."""


@dataclass(frozen=True)
class Autoguided:
    """Autoguidance, D_w + scale (D - D_w), both conditioned on the label (Karras et al. 2024, eq. 3).

    The weaker network is an earlier checkpoint or a smaller network, which makes the same errors, only larger.
    """

    denoiser: Labelled
    weaker: Labelled
    scale: float
    """1 is the plain denoiser; above 1 the difference of the two is exaggerated."""

    def __call__(self, x_t: Tensor, logsnr: Tensor, label: Tensor | None) -> Tensor:
        """Return guided E[x0 | x_t, label], [B, C, H, W]; the learned variance, if any, is the denoiser's."""
        weaker, answer = self.weaker(x_t, logsnr, label), self.denoiser(x_t, logsnr, label)
        channels = x_t.shape[1]
        led = weaker + self.scale * (answer[:, :channels] - weaker)
        return torch.cat([led, answer[:, channels:]], 1) if answer.shape[1] > channels else led


@dataclass(frozen=True)
class Within:
    """Guidance limited to an interval of the share of noise, sigma / (alpha + sigma) (Kynkaanniemi et al. 2024).

    At the noisiest levels guidance costs variety, at the cleanest it has no effect. Outside of the interval only the
    plain denoiser is called, which is half the work.
    """

    guided: Labelled
    plain: Labelled
    interval: tuple[float, float]
    """(lowest, highest) share of noise, both included: 0 is the image, 1 is noise alone, t of the flow path."""

    def __call__(self, x_t: Tensor, logsnr: Tensor, label: Tensor | None) -> Tensor:
        """Return E[x0 | x_t, label], [B, C, H, W], guided for the images [B] whose level is within the interval."""
        noise = (-logsnr / 2).sigmoid()
        inside = (self.interval[0] <= noise) & (noise <= self.interval[1])
        count = inside.sum().item()  # waits for the device, which costs less than the saved call
        if count == 0:
            return self.plain(x_t, logsnr, label)
        guided = self.guided(x_t, logsnr, label)
        if count == len(inside):
            return guided
        return torch.where(inside[:, None, None, None], guided, self.plain(x_t, logsnr, label))
