"""The U-Net (DDPM, appendix B): (x, noise condition, conditions) -> y.

Images are [B, C, H, W]; `embedding` is the activated condition, [B, E].
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from unfog.models import layers
from unfog.models.group_norm import GroupNorm, fuse_norms
from unfog.models.layers import ConditionalNetwork, Conv2d, Runner, pad, sinusoids, text_at, zero_
from unfog.models.settings import UNet
from unfog.models.text_encoder import CrossAttention, Text
from unfog.values.conditions import ConditionsLike


class _ResidualBlock(nn.Module):
    """Two 3x3 convolutions around a condition: [B, in, H, W], [B, E] -> [B, out, H, W]."""

    def __init__(self, settings: UNet, in_channels: int, out_channels: int, width: int):
        super().__init__()
        self.scale_shift = settings.scale_shift
        self.norm1 = GroupNorm(settings.norm_groups, in_channels, settings.norm_eps)
        self.conv1 = Conv2d(in_channels, out_channels, 3, padding=1)
        self.condition = nn.Linear(width, 2 * out_channels if settings.scale_shift else out_channels)
        self.norm2 = GroupNorm(settings.norm_groups, out_channels, settings.norm_eps)
        self.dropout = nn.Dropout(settings.dropout)
        self.conv2 = Conv2d(out_channels, out_channels, 3, padding=1)
        same = in_channels == out_channels
        self.shortcut = nn.Identity() if same else nn.Conv2d(in_channels, out_channels, 1)
        zero_(self.conv2)  # so that a fresh block is its shortcut alone

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        condition: Tensor = self.condition(embedding)[:, :, None, None]
        h: Tensor = self.conv1(self.norm1.silu(x))
        h = self.norm2.silu(h, *condition.chunk(2, dim=1)) if self.scale_shift else self.norm2.silu(h + condition)
        output: Tensor = self.shortcut(x) + self.conv2(self.dropout(h))
        return output


class _SelfAttention(nn.Module):
    """Residual self-attention over the pixels of [B, C, H, W]."""

    def __init__(self, settings: UNet, channels: int):
        super().__init__()
        self.heads = channels // (settings.head_channels or channels)
        self.norm = GroupNorm(settings.norm_groups, channels, settings.norm_eps)
        self.qkv = nn.Linear(channels, 3 * channels)
        self.out = nn.Linear(channels, channels)
        zero_(self.out)  # so that a fresh layer is the identity

    def forward(self, x: Tensor) -> Tensor:
        pixels = self.norm(x).flatten(2).transpose(1, 2)  # [B, N, C]
        qkv: Tensor = self.qkv(pixels).unflatten(2, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [B, heads, N, D]
        mixed: Tensor = self.out(layers.attention(q, k, v).transpose(1, 2).flatten(2))
        return x + mixed.transpose(1, 2).reshape(x.shape)


class _TextAttention(nn.Module):
    """Residual attention of the pixels of [B, C, H, W] to a text."""

    def __init__(self, settings: UNet, channels: int, text_width: int):
        super().__init__()
        self.norm = GroupNorm(settings.norm_groups, channels, settings.norm_eps)
        self.cross = CrossAttention(channels, settings.head_channels, text_width)

    def forward(self, x: Tensor, text: Text) -> Tensor:
        mixed: Tensor = self.cross(self.norm(x).flatten(2).transpose(1, 2), text)
        return x + mixed.transpose(1, 2).reshape(x.shape)


class _Block(nn.Module):
    """A residual block, then self-attention if `attends`: [B, in, H, W], [B, E] -> [B, out, H, W].

    `in` includes the channels of a skip connection [B, S, H, W]. With a `text_width`, attention to a text comes last.
    """

    def __init__(
        self, settings: UNet, in_channels: int, out_channels: int, width: int, attends: bool, text_width: int = 0
    ):
        super().__init__()
        self.residual = _ResidualBlock(settings, in_channels, out_channels, width)
        self.attention = _SelfAttention(settings, out_channels) if attends else nn.Identity()
        self.text = _TextAttention(settings, out_channels, text_width) if text_width else None

    def forward(self, x: Tensor, embedding: Tensor, skip: Tensor | None = None, text: Text | None = None) -> Tensor:
        # Concatenated here, so that with gradient checkpointing the concatenation is not kept.
        x = x if skip is None else torch.cat([x, skip], dim=1)
        output: Tensor = self.attention(self.residual(x, embedding))
        return output if self.text is None or text is None else self.text(output, text)


class _Downsample(nn.Module):
    """Strided 3x3 convolution, [B, C, H, W] -> [B, C, H/2, W/2]; both sides must be even."""

    wrap = ""

    def __init__(self, settings: UNet, channels: int):
        super().__init__()
        # DDPM's TensorFlow code pads "SAME": for even sides and stride 2 that is right and below alone.
        self.right_below = settings.downsample_padding == 0
        self.conv = Conv2d(channels, channels, 3, stride=2, padding=settings.downsample_padding)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.conv(pad(x, (0, 1, 0, 1), self.wrap) if self.right_below else x)
        return output


class _Upsample(nn.Module):
    """Repeated pixels, then a 3x3 convolution, [B, C, H, W] -> [B, C, 2H, 2W]."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv = Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.conv(layers.repeat_pixels(x))
        return output


class _DownLevel(nn.Module):
    """The blocks of one resolution on the way down, then the step to the next (None at the lowest)."""

    def __init__(self, blocks: list[_Block], resample: _Downsample | None):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.resample = resample

    def forward(self, x: Tensor, embedding: Tensor, text: Text | None, run: Runner) -> list[Tensor]:
        """Return the outputs of each block and of the step: skip connections, of which the last is the way on."""
        outputs = [x]
        for block in self.blocks:
            outputs.append(run(block, outputs[-1], embedding, None, text))
        if self.resample is not None:
            outputs.append(self.resample(outputs[-1]))
        return outputs[1:]


class _UpLevel(nn.Module):
    """The blocks of one resolution on the way up, then the step to the next (None at the highest)."""

    def __init__(self, blocks: list[_Block], resample: _Upsample | None):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.resample = resample

    def forward(self, x: Tensor, skips: list[Tensor], embedding: Tensor, text: Text | None, run: Runner) -> Tensor:
        """Give each block one of `skips`, the newest first, which is the last; return the next level's input."""
        for block, skip in zip(self.blocks, reversed(skips), strict=True):
            x = run(block, x, embedding, skip, text)
        return x if self.resample is None else run(self.resample, x)


class UNetModel(ConditionalNetwork):
    """A U-Net of residual blocks. A fresh one outputs exactly zero, as its last convolution begins at zero."""

    block = _Block
    takes_images = True
    calls_layers_once = True

    settings: UNet

    def _build(self, settings: UNet, out_channels: int) -> int:
        # The embedding has 4 times the channels of the first level, as in DDPM.
        first, width = settings.channels[0], 4 * settings.channels[0]
        self.conv_in = Conv2d(self._channels_in, first, 3, padding=1)
        self.time_embedding = nn.Sequential(nn.Linear(first, width), nn.SiLU(), nn.Linear(width, width))
        self.class_embedding = self._class_table(width)
        text, last = self.text_width, settings.channels[-1]
        self.down, skips = _down(settings, width, text)
        middle = (settings.mid_attention, text), (False, 0)
        self.mid = nn.ModuleList([_Block(settings, last, last, width, *each) for each in middle])
        self.up = _up(settings, width, skips, text)
        self.norm_out = GroupNorm(settings.norm_groups, first, settings.norm_eps)
        self.conv_out = Conv2d(first, out_channels, 3, padding=1)
        zero_(self.conv_out)
        return width

    def forward(self, x: Tensor, c_noise: Tensor, conditions: ConditionsLike = None) -> Tensor:
        """Compute the network's output for images at their noise levels.

        Args:
            x: [B, image_channels, H, W]; `settings.check` checks H and W.
            c_noise: float [B], the noise condition: a timestep, or a function of the log-SNR.
            conditions: of B images; a tensor stands for their classes, int64 [B] in 0 to num_classes. A condition that
                is absent means the null class, or an image that is not augmented.

        Returns:
            [B, out_channels, H, W], under autocast in its type.

        Raises:
            RequestError: a condition was given to a network without an input for it.
        """
        text = self._read_text(conditions, x)
        embedding = self.embed(c_noise, conditions, x.dtype, text)
        skips = [self._laid_out(self.conv_in(self._with_images(x, conditions)))]
        for level in self.down:
            skips += level(skips[-1], embedding, text, self._run)
        h: Tensor = skips[-1]
        for block in self.mid:
            h = self._run(block, h, embedding, None, text)
        for level in self.up:
            left = len(skips) - self.settings.blocks - 1
            h = level(h, skips[left:], embedding, text, self._run)
            # Without gradients, as in sampling, this frees the images of a level as soon as they are used.
            del skips[left:]
        output: Tensor = self.conv_out(self.norm_out.silu(h))
        return output.contiguous()

    def fuse_layers(self) -> None:
        """Let each norm and the SiLU after it be one operation in training on CUDA; the last bits change."""
        fuse_norms(self)

    def embed(
        self, c_noise: Tensor, conditions: ConditionsLike, dtype: torch.dtype, text: Text | None = None
    ) -> Tensor:
        """Embed noise condition [B] and the other conditions: activated, [B, 4 * channels[0]]."""
        settings = self.settings
        position = c_noise.float() * settings.time_scale
        waves = sinusoids(position, settings.channels[0], settings.freq_shift, settings.flip_sin_to_cos)
        return self._embed(self.time_embedding, waves.to(dtype), c_noise, conditions, text)


def _down(settings: UNet, width: int, text: int) -> tuple[nn.ModuleList, list[int]]:
    """Return the way down, and the channels of its skip connections, oldest first."""
    levels, skips, last = [], [settings.channels[0]], settings.channels[0]
    for i, (channels, attends) in enumerate(zip(settings.channels, settings.attention)):
        blocks = []
        for _ in range(settings.blocks):
            blocks.append(_Block(settings, last, channels, width, attends, text_at(text, settings.attention, i)))
            last = channels
        lowest = i == len(settings.channels) - 1
        levels.append(_DownLevel(blocks, None if lowest else _Downsample(settings, channels)))
        skips += [channels] * (settings.blocks + (not lowest))
    return nn.ModuleList(levels), skips


def _up(settings: UNet, width: int, skips: list[int], text: int) -> nn.ModuleList:
    """Return the way up, lowest resolution first; each block takes the newest remaining skip connection."""
    levels, last, left = [], settings.channels[-1], list(skips)
    for i in reversed(range(len(settings.channels))):
        channels, blocks = settings.channels[i], []
        attends = settings.attention[i], text_at(text, settings.attention, i)
        for _ in range(settings.blocks + 1):
            blocks.append(_Block(settings, last + left.pop(), channels, width, *attends))
            last = channels
        levels.append(_UpLevel(blocks, None if i == 0 else _Upsample(channels)))
    return nn.ModuleList(levels)
