"""Loss of the autoencoder: reconstruction of images, and latents near a standard normal."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unfog.device.copies import to_device
from unfog.diffusion.objective import Loss
from unfog.values.conditions import NO_CONDITIONS, Conditions

# Bands of the pyramid, each at half the resolution of the one before. Coarser ones are left to the plain error.
_BANDS = 3


@dataclass(frozen=True)
class AutoencoderLoss:
    """Mean absolute error, that of each band of a Laplacian pyramid, and a small divergence, all means per number.

    Absolute rather than squared error, as squares blur more. The pyramid (Burt & Adelson 1983) as a loss is that of
    Bojanowski et al. 2018, whose weights 4^j on sums over band j are equal weights on means. It takes the place of a
    perceptual network, which would have to be downloaded.
    """

    kl: float
    """Weight of the KL divergence."""
    pyramid: float
    """Weight of each band."""

    def __call__(self, network: nn.Module, x0: Tensor, conditions: Conditions = NO_CONDITIONS) -> Loss:
        """Return the loss of images x0 float32 [B, C, H, W] in [-1, 1]; the network draws one latent for each.

        Conditions are ignored. `u`, the noise level of a diffusion, is 1/2 for all.
        """
        image, mean, logvar = network(x0)
        # In float32: under autocast the image may have 16 bits, whose rounding would count as an error.
        cost = self.reconstruction(image.float() - x0) + self.kl * _standard_normal_kl(mean, logvar).mean((1, 2, 3))
        # The null loss is that of an output of 0, as of a diffusion: the divergence guard has one rule for both.
        return Loss(cost, torch.full_like(cost, 0.5), self.reconstruction(x0).detach())

    def reconstruction(self, error: Tensor) -> Tensor:
        """Return the loss [B] of a reconstruction error [B, C, H, W]."""
        cost = error.abs().mean((1, 2, 3))
        if self.pyramid:
            for band in _laplacian_pyramid(error):
                cost = cost + self.pyramid * band.abs().mean((1, 2, 3))
        return cost


def _standard_normal_kl(mean: Tensor, logvar: Tensor) -> Tensor:
    """KL(N(mean, exp(logvar)) || N(0, 1)) of each number (Kingma & Welling 2014, appendix B)."""
    return 0.5 * (mean.square() + logvar.exp() - 1 - logvar)


def _laplacian_pyramid(x: Tensor) -> list[Tensor]:
    """Return the Laplacian pyramid of [B, C, H, W], finest band first, without the low-pass residue.

    Linear, so the bands of a difference are the differences of the bands. Fewer bands of images below 8 pixels.
    """
    found = []
    for _ in range(_BANDS):
        if min(x.shape[-2:]) < 4:
            break
        smooth = _blur(x)
        found.append(x - smooth)
        x = smooth[..., ::2, ::2]
    return found


def _blur(x: Tensor) -> Tensor:
    """Convolve [B, C, H, W] with the binomial kernel (1, 4, 6, 4, 1) / 16 along both axes, edges repeated."""
    weights = to_device(torch.tensor([1.0, 4.0, 6.0, 4.0, 1.0], dtype=x.dtype) / 16, x.device)
    channels = x.shape[1]
    # Zeros would put an edge around every image, which the finest band would count as an error.
    x = F.pad(x, (2, 2, 2, 2), mode="replicate")
    x = F.conv2d(x, weights.view(1, 1, 5, 1).expand(channels, 1, 5, 1), groups=channels)
    return F.conv2d(x, weights.view(1, 1, 1, 5).expand(channels, 1, 1, 5), groups=channels)


def psnr(x: Tensor, y: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio in dB of uint8 images [B, C, H, W], float64 [B].

    10 log10(255^2 / mean squared error), where an error below half a level counts as half a level.
    """
    # Half a level, as equal images would be infinitely good, and a mean over images would be too.
    error = (x.double() - y.double()).square().mean((1, 2, 3)).clamp_min(0.25)
    return 10 * torch.log10(255**2 / error)
