"""The layers of the magnitude-preserving U-Net (Karras et al. 2024, EDM2): where what comes in has unit variance, so
has what goes out. Equation numbers are those of the paper. Images are [B, C, H, W].
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unfog.models import layers
from unfog.models.layers import unit_rms
from unfog.models.settings import MPUNet

SILU_RMS = 0.596
"""Root mean square of silu(x) for x of a normal distribution (eq. 81)."""
RESIDUAL = 0.3
"""Weight of a branch against its shortcut, of which mp_sum mixes 1 - 0.3."""


def mp_silu(x: Tensor) -> Tensor:
    """silu at unit magnitude (eq. 81)."""
    return F.silu(x) / SILU_RMS


def mp_sum(a: Tensor, b: Tensor, t: float = 0.5) -> Tensor:
    """(1 - t) a + t b at unit magnitude, where a and b have it and do not correlate (eq. 88)."""
    norm = math.hypot(1 - t, t)
    return a * ((1 - t) / norm) + b * (t / norm)


def mp_cat(a: Tensor, b: Tensor, t: float = 0.5) -> Tensor:
    """Channels of a and b joined, with shares 1 - t and t of the magnitude however many each has (eq. 103)."""
    count_a, count_b = a.shape[1], b.shape[1]
    scale = math.sqrt((count_a + count_b) / ((1 - t) ** 2 + t**2))
    return torch.cat([a * (scale * (1 - t) / math.sqrt(count_a)), b * (scale * t / math.sqrt(count_b))], dim=1)


class Weights(nn.Module):
    """Weights whose rows, one for each output, are used at unit length whatever they are stored at (eq. 47).

    Their gradient is therefore orthogonal to them, so that they grow with each update and learn ever more slowly, until
    `project` forces them back to unit root mean square (eq. 66).
    """

    def __init__(self, *shape: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))
        self.project()

    @property
    def unit(self) -> Tensor:
        """The rows at unit length, float32."""
        return F.normalize(self.weight.float().flatten(1)).view_as(self.weight)

    @torch.no_grad()
    def project(self) -> None:
        """Store the rows at unit root mean square."""
        self.weight.copy_(self.unit * math.sqrt(self.weight[0].numel()))


class MPLinear(Weights):
    """[B, in] -> [B, out], without bias."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__(out_features, in_features)

    def forward(self, x: Tensor, gain: Tensor | None = None) -> Tensor:
        """The product with rows of length 1, or `gain`."""
        return F.linear(x, self.unit if gain is None else self.unit * gain)


class MPConv(Weights):
    """Convolution without bias, [B, in, H, W] -> [B, out, H, W]; the kernel is of odd side."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int):
        super().__init__(out_channels, in_channels, kernel, kernel)

    def forward(self, x: Tensor, gain: Tensor | None = None) -> Tensor:
        """Convolve with kernels of length 1, or `gain`."""
        weight = self.unit if gain is None else self.unit * gain
        return F.conv2d(x, weight, padding=weight.shape[-1] // 2)


class MPEmbedding(Weights):
    """A vector of unit magnitude for each label: int64 [B] -> [B, width]."""

    def __init__(self, labels: int, width: int):
        super().__init__(labels, width)

    def forward(self, label: Tensor) -> Tensor:
        """Look the labels up."""
        return F.embedding(label, self.unit * math.sqrt(self.weight.shape[1]))


class MPAttention(nn.Module):
    """Residual self-attention over pixels, by the cosine of queries and keys: [B, C, H, W] -> the same."""

    def __init__(self, channels: int, head_channels: int):
        super().__init__()
        self.heads = channels // (head_channels or channels)
        self.qkv = MPConv(channels, 3 * channels, 1)
        self.out = MPConv(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Mix `x` with what its pixels gather from each other."""
        qkv = self.qkv(x).flatten(2).unflatten(1, (3, self.heads, -1))  # [B, 3, heads, D, N]
        q, k, v = unit_rms(qkv, 3).permute(1, 0, 2, 4, 3)  # each [B, heads, N, D]
        gathered = layers.attention(q, k, v).transpose(2, 3).reshape(x.shape)
        return mp_sum(x, self.out(gathered), RESIDUAL)


class MPBlock(nn.Module):
    """Two 3x3 convolutions around a condition, and attention after them where asked.

    On the way down (`down`) it begins with its shortcut and brings every pixel to unit magnitude, so that errors do not
    pile up; on the way up the shortcut comes last.

    Args:
        resample: "down" halves height and width first, "up" doubles them.
    """

    def __init__(
        self,
        settings: MPUNet,
        in_channels: int,
        out_channels: int,
        width: int,
        *,
        down: bool = False,
        attends: bool = False,
        resample: Literal["", "down", "up"] = "",
    ):
        super().__init__()
        self.down, self.resample, self.dropout = down, resample, settings.dropout
        self.conv1 = MPConv(out_channels if down else in_channels, out_channels, 3)
        self.condition = MPLinear(width, out_channels)
        self.gain = nn.Parameter(torch.zeros(()))
        self.conv2 = MPConv(out_channels, out_channels, 3)
        same = in_channels == out_channels
        self.shortcut = nn.Identity() if same else MPConv(in_channels, out_channels, 1)
        self.attention = MPAttention(out_channels, settings.head_channels) if attends else nn.Identity()

    def forward(self, x: Tensor, embedding: Tensor, skip: Tensor | None = None) -> Tensor:
        """Condition `x`, joined with a skip connection where there is one."""
        x = x if skip is None else mp_cat(x, skip)
        if self.resample == "down":
            x = F.avg_pool2d(x, 2)
        elif self.resample == "up":
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
        if self.down:
            x = unit_rms(self.shortcut(x), 1)
        # From 1 on, so that a fresh block heeds no condition.
        scale: Tensor = self.condition(embedding, self.gain) + 1
        h = mp_silu(self.conv1(mp_silu(x)) * scale[:, :, None, None])
        h = self.conv2(F.dropout(h, self.dropout, self.training))
        x = mp_sum(x if self.down else self.shortcut(x), h, RESIDUAL)
        output: Tensor = self.attention(x)
        return output
