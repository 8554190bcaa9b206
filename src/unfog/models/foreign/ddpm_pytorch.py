"""The U-Net of denoising-diffusion-pytorch 2, by the names of its weights: (x, noise condition, conditions) -> y."""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unfog.models import layers
from unfog.models.layers import ConditionalNetwork, sinusoids, zero_
from unfog.models.settings import DdpmPytorch
from unfog.values.conditions import ConditionsLike


class _RMSNorm(nn.Module):
    """Scale the channels of each pixel to unit root mean square, times a learned factor (Zhang and Sennrich 2019)."""

    def __init__(self, channels: int):
        super().__init__()
        self.g = nn.Parameter(torch.ones(1, channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = F.normalize(x, dim=1) * (self.g * x.shape[1] ** 0.5)
        return scaled


class _Half(nn.Module):
    """Convolution, norm, scale and shift by the condition, activation."""

    def __init__(self, in_channels: int, out_channels: int, dropout: float = 0.0):
        super().__init__()
        self.proj = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.norm = _RMSNorm(out_channels)
        self.dropout = dropout

    def forward(self, x: Tensor, modulation: Tensor | None = None) -> Tensor:
        h: Tensor = self.norm(self.proj(x))
        if modulation is not None:
            scale, shift = modulation[:, :, None, None].chunk(2, dim=1)
            h = h * (scale + 1) + shift
        return F.dropout(F.silu(h), self.dropout, self.training)


class _Block(nn.Module):
    """Residual block whose first half gets the condition [B, 4 width]."""

    def __init__(self, settings: DdpmPytorch, in_channels: int, out_channels: int):
        super().__init__()
        self.mlp = nn.Sequential(nn.SiLU(), nn.Linear(4 * settings.width, 2 * out_channels))
        self.block1 = _Half(in_channels, out_channels, settings.dropout)
        self.block2 = _Half(out_channels, out_channels)
        same = in_channels == out_channels
        self.res_conv = nn.Identity() if same else nn.Conv2d(in_channels, out_channels, 1)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        h = self.block2(self.block1(x, self.mlp(condition)))
        output: Tensor = h + self.res_conv(x)
        return output


class _Attention(nn.Module):
    """Residual self-attention over the pixels and a few learned keys and values."""

    def __init__(self, settings: DdpmPytorch, channels: int):
        super().__init__()
        self.heads, hidden = settings.heads, settings.heads * settings.head_channels
        self.norm = _RMSNorm(channels)
        self.mem_kv = nn.Parameter(torch.randn(2, settings.heads, settings.memory, settings.head_channels))
        self.to_qkv = nn.Conv2d(channels, 3 * hidden, 1, bias=False)
        self.to_out = nn.Conv2d(hidden, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.to_qkv(self.norm(x)).flatten(2).unflatten(1, (3, self.heads, -1)).transpose(3, 4)
        q, k, v = qkv.unbind(1)  # each [B, heads, N, D]
        more = self.mem_kv.to(x.dtype)[:, None].expand(-1, x.shape[0], -1, -1, -1)
        k, v = torch.cat([more[0], k], dim=2), torch.cat([more[1], v], dim=2)
        mixed = layers.attention(q, k, v).transpose(2, 3).reshape(x.shape[0], -1, *x.shape[2:])
        output: Tensor = self.to_out(mixed)
        return x + output


class _LinearAttention(nn.Module):
    """Residual attention whose cost is linear in the pixels (Katharopoulos et al. 2020, Shen et al. 2021)."""

    def __init__(self, settings: DdpmPytorch, channels: int):
        super().__init__()
        self.heads, hidden = settings.heads, settings.heads * settings.head_channels
        self.norm = _RMSNorm(channels)
        self.mem_kv = nn.Parameter(torch.randn(2, settings.heads, settings.head_channels, settings.memory))
        self.to_qkv = nn.Conv2d(channels, 3 * hidden, 1, bias=False)
        self.to_out = nn.Sequential(nn.Conv2d(hidden, channels, 1), _RMSNorm(channels))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.to_qkv(self.norm(x)).flatten(2).unflatten(1, (3, self.heads, -1)).unbind(1)  # [B, heads, D, N]
        more = self.mem_kv.to(x.dtype)[:, None].expand(-1, x.shape[0], -1, -1, -1)
        k, v = torch.cat([more[0], k], dim=3).softmax(dim=3), torch.cat([more[1], v], dim=3)
        # Keys and values first, a matrix [D, D] whatever the number of pixels.
        context = v @ k.transpose(2, 3)
        mixed = context @ (q.softmax(dim=2) * q.shape[2] ** -0.5)
        output: Tensor = self.to_out(mixed.reshape(x.shape[0], -1, *x.shape[2:]))
        return x + output


class DdpmPytorchModel(ConditionalNetwork):
    """The U-Net. The original has neither classes nor augmentation; both are added to the embedded noise level."""

    block = _Block
    ends: ClassVar[tuple[str, ...]] = ("init_conv", "final_conv", *ConditionalNetwork.embeddings)
    not_matrices: ClassVar[tuple[str, ...]] = ("mem_kv",)  # learned keys and values

    conditions_begin_at_zero = True
    settings: DdpmPytorch

    def _build(self, settings: DdpmPytorch, out_channels: int) -> int:
        first, condition = settings.first or settings.width, 4 * settings.width
        widths = [first, *(settings.width * mult for mult in settings.mults)]
        self.init_conv = nn.Conv2d(self.image_channels, first, 7, padding=3)
        linear = (nn.Linear(settings.width, condition), nn.Linear(condition, condition))
        # Identity has the place of the original's sinusoids, so that the names of the weights keep their numbers.
        self.time_mlp = nn.Sequential(nn.Identity(), linear[0], nn.GELU(), linear[1])
        self.downs, self.ups = nn.ModuleList(), nn.ModuleList()
        for level, (above, own) in enumerate(pairwise(widths)):
            last = level == len(settings.mults) - 1
            attention = _Attention if settings.attention[level] else _LinearAttention
            blocks = [_Block(settings, above, above), _Block(settings, above, above), attention(settings, above)]
            self.downs.append(nn.ModuleList([*blocks, _resample(above, own, "same" if last else "down")]))
            blocks = [_Block(settings, own + above, own), _Block(settings, own + above, own), attention(settings, own)]
            self.ups.insert(0, nn.ModuleList([*blocks, _resample(own, above, "up" if level else "same")]))
        self.mid_block1 = _Block(settings, widths[-1], widths[-1])
        self.mid_attn = _Attention(settings, widths[-1])
        self.mid_block2 = _Block(settings, widths[-1], widths[-1])
        self.final_res_block = _Block(settings, 2 * first, first)
        self.final_conv = nn.Conv2d(first, out_channels, 1)
        zero_(self.final_conv)
        self.class_embedding = self._class_table(condition)
        return condition

    def forward(self, x: Tensor, c_noise: Tensor, conditions: ConditionsLike = None) -> Tensor:
        """Compute the network's output; c_noise is the timestep."""
        first = h = self._laid_out(self.init_conv(x))
        # Its own form: sines first, and frequencies that end at exactly 1/10000.
        waves = sinusoids(c_noise, self.settings.width, 1, flip_sin_to_cos=False)
        condition = self._add_conditions(self.time_mlp(waves.to(x.dtype)), conditions)
        if (embedding := self._class_embedding(conditions, c_noise)) is not None:
            condition = condition + embedding
        skips = []
        for block1, block2, attention, resample in _parts(self.downs):
            h = self._run(block1, h, condition)
            skips.append(h)
            h = self._run(attention, self._run(block2, h, condition))
            skips.append(h)
            h = resample(h)
        h = self._run(self.mid_attn, self._run(self.mid_block1, h, condition))
        h = self._run(self.mid_block2, h, condition)
        for block1, block2, attention, resample in _parts(self.ups):
            h = self._run(block1, torch.cat([h, skips.pop()], dim=1), condition)
            h = self._run(block2, torch.cat([h, skips.pop()], dim=1), condition)
            h = resample(self._run(attention, h))
        output: Tensor = self.final_conv(self._run(self.final_res_block, torch.cat([h, first], dim=1), condition))
        return output.contiguous()


def _parts(levels: nn.ModuleList) -> list[list[nn.Module]]:
    """Return the two blocks, the attention and the resampling of each level."""
    return [list(cast(nn.ModuleList, level)) for level in levels]


def _resample(in_channels: int, out_channels: int, mode: str) -> nn.Module:
    """Return the layer between two levels; the way down folds 2x2 pixels into channels."""
    if mode == "down":
        return nn.Sequential(nn.PixelUnshuffle(2), nn.Conv2d(4 * in_channels, out_channels, 1))
    conv = nn.Conv2d(in_channels, out_channels, 3, padding=1)
    return nn.Sequential(nn.Upsample(scale_factor=2, mode="nearest"), conv) if mode == "up" else conv
