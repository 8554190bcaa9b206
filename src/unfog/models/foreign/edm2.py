"""The U-Net of EDM2, by the names of its weights: (x, noise condition, conditions) -> y (Karras et al. 2024).

Equation numbers are those of the paper. `edm2_unet` is our own form of it, with sinusoids and classes of unit length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unfog.models import layers
from unfog.models.layers import ConditionalNetwork
from unfog.models.settings import Edm2
from unfog.values.conditions import ConditionsLike

_SILU_RMS = 0.596  # eq. 81
_BALANCE = 0.3  # weight of a branch against its shortcut
_LIMIT = 256.0  # of the activations after a block
_EPS = 1e-4


def _unit(x: Tensor, dims: Sequence[int]) -> Tensor:
    """Divide by the root mean square along `dims`, plus 1e-4."""
    rms = x.float().square().mean(tuple(dims), keepdim=True).sqrt()
    return x / (rms + _EPS).to(x.dtype)


def _silu(x: Tensor) -> Tensor:
    return F.silu(x) / _SILU_RMS


def _sum(a: Tensor, b: Tensor, t: float = 0.5) -> Tensor:
    """Mix two activations at unit magnitude (eq. 88)."""
    return torch.lerp(a, b, t) / math.hypot(1 - t, t)


def _cat(a: Tensor, b: Tensor) -> Tensor:
    """Concatenate channels, both with half of the magnitude (eq. 103)."""
    scale = math.sqrt((a.shape[1] + b.shape[1]) / 2)
    return torch.cat([a * (scale / math.sqrt(a.shape[1])), b * (scale / math.sqrt(b.shape[1]))], dim=1)


class _Weights(nn.Module):
    """Convolution or linear layer whose rows have unit length in use (eq. 47)."""

    def __init__(self, *shape: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))

    @torch.no_grad()
    def project(self) -> None:
        """Force the stored rows to unit root mean square (eq. 66)."""
        self.weight.copy_(_unit(self.weight, range(1, self.weight.ndim)))

    def forward(self, x: Tensor, gain: Tensor | float = 1.0) -> Tensor:
        rows = _unit(self.weight.float(), range(1, self.weight.ndim)) * (gain / math.sqrt(self.weight[0].numel()))
        # Only now to 16 bits: the length is a sum of thousands of squares, which they cannot hold.
        rows = rows.to(x.dtype)
        return F.linear(x, rows) if rows.ndim == 2 else F.conv2d(x, rows, padding=rows.shape[-1] // 2)


class _Fourier(nn.Module):
    """Random Fourier features of unit magnitude, which are stored (eq. 75): [B] -> [B, width]."""

    def __init__(self, width: int):
        super().__init__()
        self.freqs: Tensor
        self.phases: Tensor
        # Buffers, as weights from elsewhere mean nothing without the frequencies that they were trained with.
        self.register_buffer("freqs", 2 * math.pi * torch.randn(width))
        self.register_buffer("phases", 2 * math.pi * torch.rand(width))

    def forward(self, position: Tensor) -> Tensor:
        angle = position.float()[:, None] * self.freqs.float() + self.phases.float()
        return angle.cos() * math.sqrt(2)


class _Block(nn.Module):
    """Encoder block, whose input is normalised pixel by pixel, or decoder block (fig. 21)."""

    def __init__(
        self, settings: Edm2, sizes: tuple[int, int, int], encodes: bool, mode: str = "", attends: bool = False
    ):
        super().__init__()
        in_channels, out, condition = sizes
        self.encodes, self.mode, self.dropout = encodes, mode, settings.dropout
        self.heads = max(1, out // settings.head_channels) if attends else 0
        self.emb_gain = nn.Parameter(torch.zeros(()))
        self.conv_res0 = _Weights(out, out if encodes else in_channels, 3, 3)
        self.emb_linear = _Weights(out, condition)
        self.conv_res1 = _Weights(out, out, 3, 3)
        self.conv_skip = _Weights(out, in_channels, 1, 1) if in_channels != out else nn.Identity()
        if attends:
            self.attn_qkv, self.attn_proj = _Weights(3 * out, out, 1, 1), _Weights(out, out, 1, 1)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        if self.mode:
            x = F.avg_pool2d(x, 2) if self.mode == "down" else layers.repeat_pixels(x)
        if self.encodes:
            x = _unit(self.conv_skip(x), [1])
        scale = self.emb_linear(condition, self.emb_gain) + 1
        h = _silu(self.conv_res0(_silu(x)) * scale[:, :, None, None].to(x.dtype))
        h = self.conv_res1(F.dropout(h, self.dropout, self.training))
        x = _sum(x if self.encodes else self.conv_skip(x), h, _BALANCE)
        if self.heads:
            x = self._attend(x)
        # Always, unlike `edm2_unet`: weights from elsewhere were trained with it.
        return x.clamp(-_LIMIT, _LIMIT)

    def _attend(self, x: Tensor) -> Tensor:
        # Queries, keys and values alternate: [B, heads, D, 3, N]; the similarity is that of their directions.
        qkv = _unit(self.attn_qkv(x).flatten(2).unflatten(1, (self.heads, -1, 3)), [2])
        q, k, v = qkv.permute(3, 0, 1, 4, 2)
        mixed = layers.attention(q, k, v).transpose(2, 3).reshape(x.shape)
        return _sum(x, self.attn_proj(mixed), _BALANCE)


class Edm2Model(ConditionalNetwork):
    """EDM2's F_theta. Classes are an embedding whose last row, no class, is zero, as EDM2's vector for it is.

    The noise condition is ln(sigma) / 4. Call `project` after each update.
    """

    block = _Block
    ends: ClassVar[tuple[str, ...]] = ("enc.0_conv", "out_conv", *ConditionalNetwork.embeddings)

    conditions_begin_at_zero = True
    settings: Edm2

    def _build(self, settings: Edm2, out_channels: int) -> int:
        widths = [settings.width * mult for mult in settings.mults]
        condition = max(widths)
        self.emb_fourier = _Fourier(widths[0])
        self.emb_noise = _Weights(condition, widths[0])
        self.enc, skips = _encoder(settings, widths, self.image_channels)
        self.dec = _decoder(settings, widths, skips)
        self.out_conv = _Weights(out_channels, widths[0], 3, 3)
        self.out_gain = nn.Parameter(torch.zeros(()))
        self.class_embedding = self._class_table(condition)
        return condition

    def forward(self, x: Tensor, c_noise: Tensor, conditions: ConditionsLike = None) -> Tensor:
        """Compute the network's output for images of about unit variance."""
        condition = self._add_conditions(self.emb_noise(self.emb_fourier(c_noise).to(x.dtype)), conditions)
        embedding = self._class_embedding(conditions, c_noise)
        condition = _silu(condition if embedding is None else _sum(condition, embedding.to(condition.dtype)))
        # A channel of ones replaces the biases.
        h = torch.cat([x, torch.ones_like(x[:, :1])], dim=1)
        skips = []
        for part in self.enc.values():
            h = self._run(part, h, condition) if isinstance(part, _Block) else self._laid_out(part(h))
            skips.append(h)
        for name, part in self.dec.items():
            h = self._run(part, _cat(h, skips.pop()) if "block" in name else h, condition)
        output: Tensor = self.out_conv(h, self.out_gain)
        return output.contiguous()

    def project(self) -> None:
        """Force all weights back to unit magnitude (eq. 66)."""
        for module in self.modules():
            if isinstance(module, _Weights):
                module.project()


def _encoder(settings: Edm2, widths: list[int], channels: int) -> tuple[nn.ModuleDict, list[int]]:
    """Return the parts of the way down, and the channels of its skip connections, oldest first."""
    last, condition = widths[0], max(widths)
    parts: dict[str, Any] = {"0_conv": _Weights(last, channels + 1, 3, 3)}
    skips = [last]
    for level, own in enumerate(widths):
        if level:
            parts[f"{level}_down"] = _Block(settings, (last, last, condition), True, "down")
            skips.append(last)
        for i in range(settings.blocks):
            attends = settings.attention[level]
            parts[f"{level}_block{i}"] = _Block(settings, (last, own, condition), True, attends=attends)
            skips.append(own)
            last = own
    return nn.ModuleDict(parts), skips


def _decoder(settings: Edm2, widths: list[int], skips: list[int]) -> nn.ModuleDict:
    """Return the parts of the way up; each block takes the newest remaining skip connection."""
    parts: dict[str, Any] = {}
    last, condition, left = widths[-1], max(widths), list(skips)
    for level in reversed(range(len(widths))):
        if level == len(widths) - 1:
            parts[f"{level}_in0"] = _Block(settings, (last, last, condition), False, attends=True)
            parts[f"{level}_in1"] = _Block(settings, (last, last, condition), False)
        else:
            parts[f"{level}_up"] = _Block(settings, (last, last, condition), False, "up")
        for i in range(settings.blocks + 1):
            sizes, attends = (last + left.pop(), widths[level], condition), settings.attention[level]
            parts[f"{level}_block{i}"] = _Block(settings, sizes, False, attends=attends)
            last = widths[level]
    return nn.ModuleDict(parts)
