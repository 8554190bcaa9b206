"""Denoisers: a network and a diffusion make E[x0 | x_t], which is all that a sampler needs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unfog.diffusion.diffusion import Diffusion, Network
from unfog.diffusion.variance import fraction_of


@dataclass(frozen=True)
class Denoiser:
    """The network's best guess of the clean image, whatever it predicts."""

    network: Network
    diffusion: Diffusion
    variance: bool = False
    """Also give the learned variance, which the ddpm sampler uses: [B, 2 C, H, W], how far up it is behind E[x0 | x_t].

    In channels, so that guidance extrapolates both alike.
    """
    dtype: torch.dtype | None = None
    """Of the autocast within the network; None is none, whatever there is around this."""

    def __call__(self, x_t: Tensor, logsnr: Tensor, label: Tensor | None = None) -> Tensor:
        """E[x0 | x_t]: [B, C, H, W] at noise level [B] -> [B, C, H, W] in data scale.

        In x_t's precision, which is float32, even within autocast: samplers take small differences.
        """
        seen = self.diffusion.network_input(x_t, logsnr)
        with torch.autocast(x_t.device.type, self.dtype, enabled=self.dtype is not None):
            y = self.network(*seen, label)
        with torch.autocast(x_t.device.type, enabled=False):  # coefficients are float32, and so is what they make of y
            x0 = self.diffusion.recover(y, x_t, logsnr)[0]
            return torch.cat([x0, fraction_of(y, x_t.shape[1]).to(x0.dtype)], 1) if self.variance else x0


@dataclass(frozen=True)
class Guided:
    """Classifier-free guidance, D_u + scale (D_c - D_u), in one batched call (Ho & Salimans 2022)."""

    denoiser: Denoiser
    scale: float
    """1 is the plain conditional denoiser, 0 the unconditional one; above 1 the label counts for more."""
    null_label: int
    """The class that means "no label"."""

    def __call__(self, x_t: Tensor, logsnr: Tensor, label: Tensor) -> Tensor:
        """Guided E[x0 | x_t, label]: [B, C, H, W] at noise level [B], label int64 [B]."""
        labels = torch.cat([label, torch.full_like(label, self.null_label)])
        both = self.denoiser(torch.cat([x_t, x_t]), torch.cat([logsnr, logsnr]), labels)
        conditional, unconditional = both.chunk(2)
        return unconditional + self.scale * (conditional - unconditional)
