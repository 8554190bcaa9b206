"""The magnitude-preserving U-Net: (x, noise condition, label, augmentation) -> y (Karras et al. 2024, EDM2)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from unfog.models.edm2_layers import MPBlock, MPConv, MPEmbedding, MPLinear, Weights, mp_silu, mp_sum
from unfog.models.layers import ConditionalNetwork, Runner, sinusoids
from unfog.models.settings import MPUNet


class MPUNetModel(ConditionalNetwork):
    """A fresh network outputs exactly zero, whatever its input, because its gain begins at zero.

    Call `project` after each update of the weights: see `Weights`. The forward pass changes no weight, so that it may
    be repeated, recomputed and compiled.

    Arguments as of `UNetModel`.
    """

    block = MPBlock

    def __init__(
        self,
        settings: MPUNet,
        image_channels: int,
        num_classes: int = 0,
        augment_inputs: int = 0,
        out_channels: int | None = None,
    ):
        super().__init__(image_channels, num_classes)
        self.settings = settings
        first, width = settings.channels[0], max(settings.channels)
        self.conv_in = MPConv(image_channels + 1, first, 3)
        self.time_embedding = MPLinear(first, width)
        self.class_embedding = MPEmbedding(num_classes + 1, width) if num_classes else None
        self.down, skips = _down(settings, width)
        self.up = _up(settings, width, skips)
        self.conv_out = MPConv(first, out_channels or image_channels, 3)
        self.gain_out = nn.Parameter(torch.zeros(()))
        # Last, so that all else begins as it would without.
        self.augment_embedding = MPLinear(augment_inputs, width) if augment_inputs else None

    def forward(self, x: Tensor, c_noise: Tensor, label: Tensor | None = None, augment: Tensor | None = None) -> Tensor:
        """Network output for images at their noise levels; arguments, answer and errors as of `UNetModel.forward`.

        Images of about unit variance suit it best.
        """
        embedding = self.embed(c_noise, label, augment, x.dtype)
        # A channel of ones does what a bias would, without one.
        h = self._laid_out(self.conv_in(torch.cat([x, torch.ones_like(x[:, :1])], dim=1)))
        skips = [h]
        for block in self.down:
            h = self._run(block, h, embedding)
            skips.append(h)
        for level in self.up:
            h = level(h, skips, embedding, self._run)
        output: Tensor = self.conv_out(h, self.gain_out)
        return output.contiguous()

    def embed(self, c_noise: Tensor, label: Tensor | None, augment: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Noise condition and label, [B] each, and augmentation -> activated embedding [B, max(channels)].

        EDM2 draws random frequencies and phases for the noise level (eq. 75), which have unit magnitude on average.
        Pairs of sine and cosine have it exactly, and take timesteps as well as log-SNRs.
        """
        waves = sinusoids(c_noise.float() * self.settings.time_scale, self.settings.channels[0])
        embedding: Tensor = self.time_embedding((waves * math.sqrt(2)).to(dtype))
        embedding = self._add_augmentation(embedding, augment)
        of_class = self._of_class(label, c_noise)
        return mp_silu(embedding if of_class is None else mp_sum(embedding, of_class.to(embedding.dtype)))

    def project(self) -> None:
        """Force all weights back to unit magnitude (eq. 66)."""
        for module in self.modules():
            if isinstance(module, Weights):
                module.project()


class UpLevel(nn.Module):
    """The blocks of one resolution on the way up."""

    def __init__(self, enter: list[MPBlock], blocks: list[MPBlock]):
        super().__init__()
        self.enter = nn.ModuleList(enter)
        """Those that nothing joins: the middle of the lowest resolution, the one that doubles of the others."""
        self.blocks = nn.ModuleList(blocks)
        """Those that a skip connection joins."""

    def forward(self, x: Tensor, skips: list[Tensor], embedding: Tensor, run: Runner) -> Tensor:
        """Give each block the newest of `skips`, which are taken off it; return the next level's input."""
        for block in self.enter:
            x = run(block, x, embedding)
        for block in self.blocks:
            x = run(block, x, embedding, skips.pop())
        return x


def _down(settings: MPUNet, width: int) -> tuple[nn.ModuleList, list[int]]:
    """Return the blocks of the way down, and the channels of its skip connections, oldest first."""
    blocks, last = [], settings.channels[0]
    skips = [last]
    for level, channels in enumerate(settings.channels):
        if level:
            blocks.append(MPBlock(settings, last, last, width, down=True, resample="down"))
            skips.append(last)
        for _ in range(settings.blocks):
            blocks.append(MPBlock(settings, last, channels, width, down=True, attends=settings.attention[level]))
            skips.append(channels)
            last = channels
    return nn.ModuleList(blocks), skips


def _up(settings: MPUNet, width: int, skips: list[int]) -> nn.ModuleList:
    """Return the levels of the way up, lowest resolution first; each block takes the newest of `skips` that is left."""
    levels, last, left = [], settings.channels[-1], list(skips)
    for level in reversed(range(len(settings.channels))):
        channels, attends = settings.channels[level], settings.attention[level]
        if level == len(settings.channels) - 1:
            enter = [MPBlock(settings, last, last, width, attends=a) for a in (attends, False)]
        else:
            enter = [MPBlock(settings, last, last, width, resample="up")]
        blocks = []
        for _ in range(settings.blocks + 1):
            blocks.append(MPBlock(settings, last + left.pop(), channels, width, attends=attends))
            last = channels
        levels.append(UpLevel(enter, blocks))
    return nn.ModuleList(levels)
