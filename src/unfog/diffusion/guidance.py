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
    """Away from where a weaker network errs: D_w + scale (D - D_w), both told the label (Karras et al. 2024, eq. 3).

    What the weaker one, a younger checkpoint or a smaller network, does not know yet is what the other knows badly.
    """

    denoiser: Labelled
    weaker: Labelled
    scale: float
    """1 is the plain denoiser; above 1 what both disagree on is exaggerated."""

    def __call__(self, x_t: Tensor, logsnr: Tensor, label: Tensor | None) -> Tensor:
        """Guided E[x0 | x_t, label], [B, C, H, W]; two calls, as these are two networks.

        A learned variance, which is behind it in channels, is the denoiser's own.
        """
        weaker, answer = self.weaker(x_t, logsnr, label), self.denoiser(x_t, logsnr, label)
        channels = x_t.shape[1]
        led = weaker + self.scale * (answer[:, :channels] - weaker)
        return torch.cat([led, answer[:, channels:]], 1) if answer.shape[1] > channels else led


@dataclass(frozen=True)
class Within:
    """Guidance where the share of noise, sigma / (alpha + sigma), is within an interval, and none elsewhere.

    At the noisiest levels it costs variety, at the cleanest it does nothing (Kynkaanniemi et al. 2024). Outside of the
    interval the plain denoiser is asked alone, which is half the work.
    """

    guided: Labelled
    plain: Labelled
    interval: tuple[float, float]
    """(lowest, highest) share of noise, both included: 0 is the image, 1 is noise alone, t of the flow path."""

    def __call__(self, x_t: Tensor, logsnr: Tensor, label: Tensor | None) -> Tensor:
        """E[x0 | x_t, label], [B, C, H, W], guided for those pictures [B] whose level is within the interval."""
        noise = (-logsnr / 2).sigmoid()
        inside = (self.interval[0] <= noise) & (noise <= self.interval[1])
        count = inside.sum().item()  # waits for the device, which costs less than the call that is saved by it
        if count == 0:
            return self.plain(x_t, logsnr, label)
        guided = self.guided(x_t, logsnr, label)
        if count == len(inside):
            return guided
        return torch.where(inside[:, None, None, None], guided, self.plain(x_t, logsnr, label))
