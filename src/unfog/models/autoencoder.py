"""A small autoencoder: images to Gaussian latents of a fraction of their size, and back."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unfog.models.autoencoder_settings import Autoencoder
from unfog.models.layers import zero_

LOGVAR = (-30.0, 20.0)
"""Range of a latent's log variance; beyond it exp has nothing to say in float32 (as latent diffusion has it)."""


class AutoencoderModel(nn.Module):
    """Convolutional encoder and decoder (the layout of Rombach et al. 2022, made small).

    Nothing is computed at full resolution: pixels go in and come out four at a time, which is most of the time saved.

    Args:
        settings: the architecture.
        image_channels: 1 or 3.
    """

    checkpointing = False
    """There is no second way to compute its gradient; here as for every network."""

    def __init__(self, settings: Autoencoder, image_channels: int):
        super().__init__()
        self.settings, self.image_channels = settings, image_channels
        channels, groups = settings.channels, settings.norm_groups
        self.encoder = nn.Sequential(
            nn.PixelUnshuffle(2),
            nn.Conv2d(4 * image_channels, channels[0], 3, padding=1),
            *_way_down(settings),
            nn.GroupNorm(groups, channels[-1]),
            nn.SiLU(),
            nn.Conv2d(channels[-1], 2 * settings.latent_channels, 3, padding=1),
        )
        self.decoder = nn.Sequential(
            nn.Conv2d(settings.latent_channels, channels[-1], 3, padding=1),
            *_way_up(settings),
            nn.GroupNorm(groups, channels[0]),
            nn.SiLU(),
            nn.Conv2d(channels[0], 4 * image_channels, 3, padding=1),
            nn.PixelShuffle(2),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Images [B, C, H, W] in [-1, 1] -> (images, mean, log variance) by way of one latent drawn for each.

        Draws from torch's global generator of x's device. H and W must be multiples of the factor.
        """
        mean, logvar = self.posterior(x)
        latent = mean + (0.5 * logvar).exp() * torch.randn_like(mean)
        return self.decode(latent), mean, logvar

    def posterior(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log variance of the latents of images, float32 [B, latent_channels, H/f, W/f] each."""
        mean, logvar = self.encoder(x).float().chunk(2, dim=1)
        return mean, logvar.clamp(*LOGVAR)

    def encode(self, x: Tensor) -> Tensor:
        """The mean of the latents of images."""
        return self.posterior(x)[0]

    def decode(self, latent: Tensor) -> Tensor:
        """Images [B, C, H, W], about [-1, 1] and not cut off there, of latents [B, latent_channels, H/f, W/f]."""
        image: Tensor = self.decoder(latent)
        return image


class _Residual(nn.Module):
    """Two 3x3 convolutions beside a shortcut, [B, in, H, W] -> [B, out, H, W]. Begins as its shortcut alone."""

    def __init__(self, before: int, after: int, groups: int):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(groups, before), nn.GroupNorm(groups, after)
        self.conv1 = nn.Conv2d(before, after, 3, padding=1)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1)
        self.shortcut = nn.Identity() if before == after else nn.Conv2d(before, after, 1)
        zero_(self.conv2)

    def forward(self, x: Tensor) -> Tensor:
        """The shortcut plus the branch."""
        h: Tensor = self.conv2(F.silu(self.norm2(self.conv1(F.silu(self.norm1(x))))))
        output: Tensor = self.shortcut(x) + h
        return output


def _way_down(settings: Autoencoder) -> list[nn.Module]:
    """From 1/2 of the size to 1/factor."""
    layers: list[nn.Module] = []
    last, groups = settings.channels[0], settings.norm_groups
    for level, channels in enumerate(settings.channels):
        if level:
            layers.append(nn.Conv2d(last, channels, 3, stride=2, padding=1))
        layers += [_Residual(channels, channels, groups) for _ in range(settings.blocks)]
        last = channels
    return layers


def _way_up(settings: Autoencoder) -> list[nn.Module]:
    """From 1/factor of the size to 1/2."""
    layers: list[nn.Module] = []
    last, groups = settings.channels[-1], settings.norm_groups
    for level, channels in enumerate(reversed(settings.channels)):
        if level:  # repeated pixels rather than a transposed convolution, which leaves a chequered pattern
            layers += [nn.Upsample(scale_factor=2.0, mode="nearest"), nn.Conv2d(last, channels, 3, padding=1)]
        layers += [_Residual(channels, channels, groups) for _ in range(settings.blocks + 1)]
        last = channels
    return layers
