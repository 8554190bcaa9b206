"""The DiT of diffusers (`DiTTransformer2DModel`): (x, noise condition, conditions) -> y (Peebles and Xie 2023)."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unfog.models import layers
from unfog.models.layers import ConditionalNetwork, sinusoids, zero_
from unfog.models.settings import DiffusersDiT
from unfog.values.conditions import ConditionsLike

_WAVES = 256  # sinusoids of the noise level


class _Block(nn.Module):
    """Attention and an MLP, each scaled, shifted and gated by the condition [B, width] (adaLN-zero)."""

    def __init__(self, settings: DiffusersDiT):
        super().__init__()
        width = settings.width
        self.heads, self.dropout, self.eps = width // settings.head_channels, settings.dropout, settings.norm_eps
        self.modulation = nn.Linear(width, 6 * width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp_in, self.mlp_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        zero_(self.modulation)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        modulation = self.modulation(F.silu(condition))[:, None].chunk(6, dim=2)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = modulation
        # 1e-6 whatever `norm_eps` is: in diffusers only the second norm of a block reads that setting.
        h = F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift
        q, k, v = self.qkv(h).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        h = self.out(layers.attention(q, k, v).transpose(1, 2).flatten(2))
        x = x + gate * F.dropout(h, self.dropout, self.training)
        h = F.layer_norm(x, x.shape[-1:], eps=self.eps) * (1 + mlp_scale) + mlp_shift
        h = F.dropout(F.gelu(self.mlp_in(h), approximate="tanh"), self.dropout, self.training)
        output: Tensor = x + mlp_gate * self.mlp_out(h)
        return output


class DiffusersDiTModel(ConditionalNetwork):
    """The transformer. Noise level and class are embedded once for all blocks, or for each; the output uses the first.

    The noise condition is the timestep.
    """

    block = _Block
    ends: ClassVar[tuple[str, ...]] = ("patch_in", "patch_out", *ConditionalNetwork.embeddings)

    conditions_begin_at_zero = True
    settings: DiffusersDiT

    def _build(self, settings: DiffusersDiT, out_channels: int) -> int:
        width, patch = settings.width, settings.patch
        copies = settings.depth if settings.embeddings == "block" else 1
        self.patch_in = nn.Conv2d(self.image_channels, width, patch, stride=patch)
        self.time_in = nn.Linear(_WAVES, width * copies)
        self.time_out = nn.ModuleList(nn.Linear(width, width) for _ in range(copies))
        self.blocks = nn.ModuleList(_Block(settings) for _ in range(settings.depth))
        self.modulation_out = nn.Linear(width, 2 * width)
        self.patch_out = nn.Linear(width, patch**2 * out_channels)
        zero_(self.modulation_out)
        zero_(self.patch_out)
        self.class_embedding = self._class_table(width * copies)
        return width * copies

    def forward(self, x: Tensor, c_noise: Tensor, conditions: ConditionsLike = None) -> Tensor:
        """Return the output for noisy images x [B, C, H, W], at noise conditions [B]."""
        embeddings = self._embeddings(c_noise, conditions, x.dtype)
        h = self.patch_in(x)
        rows, columns = h.shape[2:]
        h = h.flatten(2).transpose(1, 2)
        h = h + _positions(rows, columns, h.shape[2], h.device).to(h.dtype)
        for i, block in enumerate(self.blocks):
            h = self._run(block, h, embeddings[min(i, len(embeddings) - 1)])
        shift, scale = self.modulation_out(F.silu(embeddings[0]))[:, None].chunk(2, dim=2)
        h = self.patch_out(F.layer_norm(h, h.shape[-1:], eps=1e-6) * (1 + scale) + shift)
        patch = self.settings.patch
        h = h.reshape(x.shape[0], rows, columns, patch, patch, -1).permute(0, 5, 1, 3, 2, 4)
        output: Tensor = h.reshape(x.shape[0], -1, rows * patch, columns * patch)
        return output

    def _embeddings(self, c_noise: Tensor, conditions: ConditionsLike, dtype: torch.dtype) -> list[Tensor]:
        """Return the embedded conditions [B, width]: one tensor, or one for each block."""
        waves = self.time_in(sinusoids(c_noise, _WAVES, 1).to(dtype))
        hidden = F.silu(self._add_conditions(waves, conditions)).chunk(len(self.time_out), dim=1)
        levels = [layer(part) for layer, part in zip(self.time_out, hidden)]
        embedding = self._class_embedding(conditions, c_noise)
        if embedding is None:
            return levels
        return [level + part for level, part in zip(levels, embedding.chunk(len(levels), dim=1))]


def _positions(rows: int, columns: int, width: int, device: torch.device) -> Tensor:
    """Return sines and cosines of column and row, [rows * columns, width], a half of the channels each."""
    # In float64, as the original computes them with numpy, and rounds once at the end.
    rates = torch.arange(width // 4, dtype=torch.float64, device=device) / (width / 4)
    rates = torch.exp(-math.log(10_000) * rates)
    angles = [torch.arange(n, dtype=torch.float64, device=device)[:, None] * rates for n in (columns, rows)]
    column, row = (torch.cat([angle.sin(), angle.cos()], dim=1) for angle in angles)
    both = [column[None].expand(rows, -1, -1), row[:, None].expand(-1, columns, -1)]
    return torch.cat(both, dim=2).flatten(0, 1).float()
