"""The U-Net: (x, noise condition, label, augmentation) -> y. It knows neither what these mean nor what y is."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unfog.models.layers import Block, ConditionalNetwork, DownLevel, Downsample, UpLevel, Upsample, sinusoids, zero_
from unfog.models.settings import UNet


class UNetModel(ConditionalNetwork):
    """A fresh network outputs exactly zero, whatever its input, because its last convolution begins at zero.

    Args:
        settings: the architecture.
        image_channels: channels of the input, 1 or 3 for pictures.
        num_classes: labels are 0 to num_classes - 1, and the label `num_classes` is "none" (the null class of
            classifier-free guidance); 0 builds a network without labels.
        augment_inputs: numbers that say how an image was augmented, all 0 for one that was not; 0 builds a network
            that is not told.
        out_channels: channels of the output where they are not those of the input: twice as many with a
            learned variance.
    """

    block = Block

    def __init__(
        self,
        settings: UNet,
        image_channels: int,
        num_classes: int = 0,
        augment_inputs: int = 0,
        out_channels: int | None = None,
    ):
        super().__init__(image_channels, num_classes)
        self.settings = settings
        first, width = settings.channels[0], 4 * settings.channels[0]
        self.conv_in = nn.Conv2d(image_channels, first, 3, padding=1)
        self.time_embedding = nn.Sequential(nn.Linear(first, width), nn.SiLU(), nn.Linear(width, width))
        self.class_embedding = nn.Embedding(num_classes + 1, width) if num_classes else None
        if self.class_embedding is not None:
            nn.init.normal_(self.class_embedding.weight, std=0.02)  # as DiT: no label drowns the noise level
        self.down, skips = _down(settings, width)
        self.mid = _mid(settings, width)
        self.up = _up(settings, width, skips)
        self.norm_out = nn.GroupNorm(settings.norm_groups, first, settings.norm_eps)
        self.conv_out = nn.Conv2d(first, out_channels or image_channels, 3, padding=1)
        zero_(self.conv_out)
        # Last, so that all else begins as it would without; no bias, so that 0 says nothing.
        self.augment_embedding = nn.Linear(augment_inputs, width, bias=False) if augment_inputs else None

    def forward(self, x: Tensor, c_noise: Tensor, label: Tensor | None = None, augment: Tensor | None = None) -> Tensor:
        """Network output for images at their noise levels.

        Args:
            x: [B, image_channels, H, W]; `settings.check` says which H and W fit.
            c_noise: float [B], the noise condition: a timestep, or a function of the log-SNR.
            label: int64 [B] in 0 to num_classes; None is the null class for all.
            augment: float [B, augment_inputs]; None is 0, an image as it is.

        Returns:
            [B, out_channels, H, W], in the type of the autocast where there is one.

        Raises:
            RequestError: a label was given to a network without classes, or an augmentation to one that is not told.
        """
        embedding = self.embed(c_noise, label, augment, x.dtype)
        skips = [self._laid_out(self.conv_in(x))]
        for level in self.down:
            skips += level(skips[-1], embedding, self._run)
        h: Tensor = skips[-1]
        for block in self.mid:
            h = self._run(block, h, embedding)
        for level in self.up:
            left = len(skips) - self.settings.blocks - 1
            h = level(h, skips[left:], embedding, self._run)
            del skips[left:]
        output: Tensor = self.conv_out(F.silu(self.norm_out(h)))
        return output.contiguous()

    def embed(self, c_noise: Tensor, label: Tensor | None, augment: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Noise condition and label, [B] each, and augmentation -> activated embedding [B, 4 * channels[0]]."""
        settings = self.settings
        position = c_noise.float() * settings.time_scale
        waves = sinusoids(position, settings.channels[0], settings.freq_shift, settings.flip_sin_to_cos)
        first, activation, second = self.time_embedding
        hidden: Tensor = first(waves.to(dtype))
        embedding: Tensor = second(activation(self._add_augmentation(hidden, augment)))
        of_class = self._of_class(label, c_noise)
        return F.silu(embedding if of_class is None else embedding + of_class)


def _down(settings: UNet, width: int) -> tuple[nn.ModuleList, list[int]]:
    """Return the way down, and the channels of its skip connections, oldest first."""
    levels, skips, last = [], [settings.channels[0]], settings.channels[0]
    for i, (channels, attends) in enumerate(zip(settings.channels, settings.attention)):
        blocks = []
        for _ in range(settings.blocks):
            blocks.append(Block(settings, last, channels, width, attends))
            last = channels
        lowest = i == len(settings.channels) - 1
        levels.append(DownLevel(blocks, None if lowest else Downsample(settings, channels)))
        skips += [channels] * (settings.blocks + (not lowest))
    return nn.ModuleList(levels), skips


def _mid(settings: UNet, width: int) -> nn.ModuleList:
    """Return the two blocks at the lowest resolution."""
    last = settings.channels[-1]
    return nn.ModuleList([Block(settings, last, last, width, a) for a in (settings.mid_attention, False)])


def _up(settings: UNet, width: int, skips: list[int]) -> nn.ModuleList:
    """Return the way up, lowest resolution first; each block takes the newest of `skips` that is left."""
    levels, last, left = [], settings.channels[-1], list(skips)
    for i in reversed(range(len(settings.channels))):
        channels, blocks = settings.channels[i], []
        for _ in range(settings.blocks + 1):
            blocks.append(Block(settings, last + left.pop(), channels, width, settings.attention[i]))
            last = channels
        levels.append(UpLevel(blocks, None if i == 0 else Upsample(channels)))
    return nn.ModuleList(levels)
