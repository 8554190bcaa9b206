"""Denoisers: E[x0 | x_t] from a network and a diffusion, the only function that a sampler calls."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unfog.diffusion.diffusion import Diffusion, Network
from unfog.diffusion.variance import fraction_of


@dataclass(frozen=True)
class Denoiser:
    """Map a noisy image to the network's estimate of the clean one, for any prediction target."""

    network: Network
    diffusion: Diffusion
    variance: bool = False
    """Append the learned variance, which the ddpm sampler uses, as C more channels: [B, 2 C, H, W].

    In channels, so that guidance extrapolates both in the same way.
    """
    dtype: torch.dtype | None = None
    """Type of the autocast around the network; None disables autocast, even inside an outer one."""

    def __call__(self, x_t: Tensor, logsnr: Tensor, label: Tensor | None = None) -> Tensor:
        """Return E[x0 | x_t]: [B, C, H, W] at noise level [B] -> [B, C, H, W] in data scale."""
        inputs = self.diffusion.network_input(x_t, logsnr)
        with torch.autocast(x_t.device.type, self.dtype, enabled=self.dtype is not None):
            y = self.network(*inputs, label)
        with torch.autocast(x_t.device.type, enabled=False):  # float32, as samplers take small differences
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
        """Return guided E[x0 | x_t, label]: [B, C, H, W] at noise level [B], label int64 [B]."""
        labels = torch.cat([label, torch.full_like(label, self.null_label)])
        both = self.denoiser(torch.cat([x_t, x_t]), torch.cat([logsnr, logsnr]), labels)
        conditional, unconditional = both.chunk(2)
        return unconditional + self.scale * (conditional - unconditional)
