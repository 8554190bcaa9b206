"""Autoencoders, images to latents of a fraction of their size and back: a small convolutional one, and diffusers'."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unfog.errors import RequestError, install_command
from unfog.models.autoencoder_settings import Autoencoder
from unfog.models.group_norm import GroupNorm
from unfog.models.layers import zero_

# Range of a latent's log variance, as in latent diffusion: beyond it exp overflows or vanishes in float32.
_LOGVAR = (-30.0, 20.0)


class AutoencoderModel(nn.Module):
    """Convolutional encoder and decoder (the layout of Rombach et al. 2022, made small).

    `image_channels` is 1 or 3.
    """

    checkpointing = False  # training reads it of every network; this one never recomputes

    def __init__(self, settings: Autoencoder, image_channels: int):
        super().__init__()
        self.settings, self.image_channels = settings, image_channels
        channels, groups = settings.channels, settings.norm_groups
        self.encoder = nn.Sequential(
            nn.PixelUnshuffle(2),  # no layer works at full resolution, where most of the time would go
            nn.Conv2d(4 * image_channels, channels[0], 3, padding=1),
            *_levels(settings, down=True),
            GroupNorm(groups, channels[-1]),
            nn.SiLU(),
            nn.Conv2d(channels[-1], 2 * settings.latent_channels, 3, padding=1),
        )
        self.decoder = nn.Sequential(
            nn.Conv2d(settings.latent_channels, channels[-1], 3, padding=1),
            *_levels(settings, down=False),
            GroupNorm(groups, channels[0]),
            nn.SiLU(),
            nn.Conv2d(channels[0], 4 * image_channels, 3, padding=1),
            nn.PixelShuffle(2),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Encode images [B, C, H, W] in [-1, 1], draw a latent of each, and return (its decoding, mean, log variance).

        Draws from torch's global generator of x's device. H and W must be multiples of the factor.
        """
        mean, logvar = self.posterior(x)
        # exp(logvar / 2) is the deviation; a square root of the variance would have an infinite gradient at 0.
        latent = mean + (0.5 * logvar).exp() * torch.randn_like(mean)
        return self.decode(latent), mean, logvar

    def posterior(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log variance of the latents of images, float32 [B, latent_channels, H/f, W/f] each."""
        # float32 from here on: exp of a 16-bit log variance would be off by percents.
        mean, logvar = self.encoder(x).float().chunk(2, dim=1)
        return mean, logvar.clamp(*_LOGVAR)

    def encode(self, x: Tensor) -> Tensor:
        """Return the mean of the latents of images."""
        return self.posterior(x)[0]

    def decode(self, latent: Tensor) -> Tensor:
        """Decode latents [B, latent_channels, H/f, W/f] to images [B, C, H, W] about [-1, 1], not clipped to it."""
        image: Tensor = self.decoder(latent)
        return image


class _Residual(nn.Module):
    """Two 3x3 convolutions beside a shortcut, [B, channels, H, W] -> the same."""

    def __init__(self, channels: int, groups: int):
        super().__init__()
        self.norm1, self.norm2 = GroupNorm(groups, channels), GroupNorm(groups, channels)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        zero_(self.conv2)  # so that a fresh block is the identity

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.conv2(F.silu(self.norm2(self.conv1(F.silu(self.norm1(x))))))
        return x + h


def _levels(settings: Autoencoder, down: bool) -> list[nn.Module]:
    """Return the layers from 1/2 of the size to 1/factor, or the way back, which has one block more at each level."""
    layers: list[nn.Module] = []
    widths, groups = settings.channels if down else settings.channels[::-1], settings.norm_groups
    for level, channels in enumerate(widths):
        if level and down:
            layers.append(nn.Conv2d(widths[level - 1], channels, 3, stride=2, padding=1))
        elif level:  # not a transposed convolution, which leaves checkerboard artefacts
            layers.append(nn.Upsample(scale_factor=2.0, mode="nearest"))
            layers.append(nn.Conv2d(widths[level - 1], channels, 3, padding=1))
        layers += [_Residual(channels, groups) for _ in range(settings.blocks + (not down))]
    return layers


class DiffusersAutoencoder(nn.Module):
    """diffusers' AutoencoderKL or AutoencoderTiny with the interface of `AutoencoderModel`; latents are unscaled."""

    def __init__(self, network: Any):
        super().__init__()
        self.network = network

    @classmethod
    def load(cls, folder: Path, kind: str) -> DiffusersAutoencoder:
        """Load an autoencoder from a folder; `kind` is "AutoencoderKL" or "AutoencoderTiny".

        Raises:
            RequestError: diffusers is not installed, or refuses the folder.
        """
        try:
            import diffusers
        except ImportError:
            raise RequestError(
                f"autoencoder_folder = {folder} is a {kind}, which needs diffusers: {install_command('export')}"
            ) from None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # diffusers announces its own deprecations
                network, info = getattr(diffusers, kind).from_pretrained(
                    str(folder),
                    local_files_only=True,
                    use_safetensors=True,
                    torch_dtype=torch.float32,
                    low_cpu_mem_usage=False,
                    output_loading_info=True,
                )
        # diffusers does not validate config.json: norm_num_groups = 0, say, is divided by.
        except (OSError, ValueError, RuntimeError, TypeError, LookupError, ArithmeticError, AttributeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise RequestError(f"autoencoder_folder = {folder} cannot be read as {kind}: {reason}") from None
        if wrong := [*info["missing_keys"], *info["unexpected_keys"]]:
            raise RequestError(
                f"autoencoder_folder = {folder}: {len(wrong)} weights do not fit its config.json, such as {wrong[0]}"
            )
        return cls(network)

    def encode(self, x: Tensor) -> Tensor:
        """Encode images [B, C, H, W] in [-1, 1] to latents [B, c, H/f, W/f]; to the mean of a Gaussian."""
        encoded = self.network.encode(x)
        latent: Tensor = encoded.latent_dist.mode() if hasattr(encoded, "latent_dist") else encoded.latents
        return latent

    def decode(self, latent: Tensor) -> Tensor:
        """Decode latents to images [B, C, H, W] about [-1, 1]."""
        image: Tensor = self.network.decode(latent).sample
        return image
