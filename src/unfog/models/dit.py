"""The diffusion transformer: (x, noise condition, label, augmentation) -> y (Peebles & Xie 2023)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unfog.models import layers
from unfog.models.layers import ConditionalNetwork, sinusoids, zero_
from unfog.models.settings import DiT

_BASE = 100.0
"""Of the rotary frequencies, which fall from 1 to nearly 1/_BASE: pictures are tens of patches wide, not thousands."""


class _RMSNorm(nn.Module):
    """x over its root mean square along the last dimension, times a learned weight (Zhang & Sennrich 2019)."""

    def __init__(self, width: int, learned: bool = True):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width)) if learned else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> the same, in its type; computed in float32. Twice as fast on a CPU as `F.rms_norm`."""
        normal = x * (x.float().square().mean(-1, keepdim=True) + 1e-6).rsqrt().to(x.dtype)
        return normal if self.weight is None else normal * self.weight.to(x.dtype)


class _SwiGLU(nn.Module):
    """W_out (silu(W_gate x) * W_in x), [..., width] -> the same (Shazeer 2020, eq. 6).

    The hidden width is 8/3 of the width, for as many weights as a plain layer of 4 times the width has.
    """

    def __init__(self, width: int):
        super().__init__()
        hidden = max(8, round(width / 3) * 8)
        self.enter = nn.Linear(width, 2 * hidden, bias=False)
        self.out = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Each token by itself."""
        gate, value = self.enter(x).chunk(2, dim=-1)
        output: Tensor = self.out(F.silu(gate) * value)
        return output


def _rotations(rows: int, columns: int, head_channels: int, device: torch.device) -> Tensor:
    """Angles of the tokens of a picture, by which pairs of channels are turned: [rows * columns, head_channels / 2].

    The first half of them goes by the row, the other by the column (Su et al. 2021, in two dimensions).
    """
    count = head_channels // 4
    frequencies = _BASE ** -(torch.arange(count, dtype=torch.float32, device=device) / count)
    row = torch.arange(rows, dtype=torch.float32, device=device)[:, None, None] * frequencies
    column = torch.arange(columns, dtype=torch.float32, device=device)[None, :, None] * frequencies
    return torch.cat([row.expand(rows, columns, count), column.expand(rows, columns, count)], dim=2).flatten(0, 1)


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn pairs of channels, each one of the first half with its like of the second: [..., N, D] by [N, D / 2].

    Products of a query and a key so turned depend on their distance only.
    """
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class _Attention(nn.Module):
    """Self-attention of tokens [B, N, width], their queries and keys normalised and turned by position."""

    def __init__(self, settings: DiT):
        super().__init__()
        width = settings.width
        self.heads = width // settings.head_channels
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.norm_q = _RMSNorm(settings.head_channels)
        self.norm_k = _RMSNorm(settings.head_channels)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """What the tokens gather from each other; `angles` [N, head_channels / 2]."""
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each [B, heads, N, D]
        q, k = _rotate(self.norm_q(q), angles), _rotate(self.norm_k(k), angles)
        output: Tensor = self.out(layers.attention(q, k, v).transpose(1, 2).flatten(2))
        return output


class _Offset(nn.Module):
    """What one layer made of the condition for all blocks, [B, W], and what is added to it in this one."""

    def __init__(self, width: int):
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(width))

    def forward(self, shared: Tensor) -> Tensor:
        """The sum."""
        return shared + self.offset


class _Block(nn.Module):
    """_Attention, then _SwiGLU, each scaled and shifted before and gated after by the condition. Begins as nothing."""

    def __init__(self, settings: DiT):
        super().__init__()
        width = settings.width
        self.norm = _RMSNorm(width, learned=False)
        self.attention = _Attention(settings)
        self.mlp = _SwiGLU(width)
        self.dropout = nn.Dropout(settings.dropout)
        self.modulation: nn.Module = _Offset(6 * width)
        if settings.modulation == "block":
            self.modulation = nn.Linear(width, 6 * width)
            zero_(self.modulation)

    def forward(self, x: Tensor, condition: Tensor, angles: Tensor) -> Tensor:
        """Tokens [B, N, width]; `condition` [B, 6 width] where it is shared, else the embedding [B, width]."""
        modulation: Tensor = self.modulation(condition)[:, None]
        shift1, scale1, gate1, shift2, scale2, gate2 = modulation.chunk(6, dim=2)
        x = x + gate1 * self.dropout(self.attention(self.norm(x) * (1 + scale1) + shift1, angles))
        output: Tensor = x + gate2 * self.dropout(self.mlp(self.norm(x) * (1 + scale2) + shift2))
        return output


class DiTModel(ConditionalNetwork):
    """A fresh network outputs exactly zero, whatever its input, because its last layer begins at zero.

    Arguments as of `UNetModel`.
    """

    ends = ("patch_in", "patch_out", "class_embedding", "augment_embedding")
    block = _Block

    def __init__(
        self,
        settings: DiT,
        image_channels: int,
        num_classes: int = 0,
        augment_inputs: int = 0,
        out_channels: int | None = None,
    ):
        super().__init__(image_channels, num_classes)
        self.settings = settings
        width, area = settings.width, settings.patch**2
        self.patch_in = nn.Linear(area * image_channels, width)
        self.time_embedding = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.class_embedding = nn.Embedding(num_classes + 1, width) if num_classes else None
        self.blocks = nn.ModuleList([_Block(settings) for _ in range(settings.depth)])
        self.modulation = nn.Linear(width, 6 * width) if settings.modulation == "shared" else None
        self.norm_out = _RMSNorm(width, learned=False)
        self.modulation_out = nn.Linear(width, 2 * width)
        self.patch_out = nn.Linear(width, area * (out_channels or image_channels))
        self._initialise()
        # Last, so that all else begins as it would without; no bias, so that 0 says nothing.
        self.augment_embedding = nn.Linear(augment_inputs, width, bias=False) if augment_inputs else None

    def _initialise(self) -> None:
        """As DiT does: Xavier for matrices, small embeddings, and zero for what modulates and for the last layer."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for part in (self.class_embedding, *self.time_embedding):
            if isinstance(part, nn.Linear | nn.Embedding):
                nn.init.normal_(part.weight, std=0.02)
        modulations = [block.modulation for block in self.blocks if isinstance(block, _Block)]
        for part in (self.modulation, self.modulation_out, self.patch_out, *modulations):
            if isinstance(part, nn.Linear):
                zero_(part)

    def forward(self, x: Tensor, c_noise: Tensor, label: Tensor | None = None, augment: Tensor | None = None) -> Tensor:
        """Network output for images at their noise levels; arguments, answer and errors as of `UNetModel.forward`."""
        patch, embedding = self.settings.patch, self.embed(c_noise, label, augment, x.dtype)
        condition = embedding if self.modulation is None else self.modulation(embedding)
        squares = F.pixel_unshuffle(x, patch)  # [B, C patch^2, rows, columns]
        rows, columns = squares.shape[2:]
        angles = _rotations(rows, columns, self.settings.head_channels, x.device)
        tokens: Tensor = self.patch_in(squares.flatten(2).transpose(1, 2))
        for block in self.blocks:
            tokens = self._run(block, tokens, condition, angles)
        scale, shift = self.modulation_out(embedding)[:, None].chunk(2, dim=2)
        pixels: Tensor = self.patch_out(self.norm_out(tokens) * (1 + scale) + shift)
        return F.pixel_shuffle(pixels.transpose(1, 2).reshape(len(x), -1, rows, columns), patch)

    def embed(self, c_noise: Tensor, label: Tensor | None, augment: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Noise condition and label, [B] each, and augmentation -> activated embedding [B, width]."""
        first, activation, second = self.time_embedding
        waves = sinusoids(c_noise.float() * self.settings.time_scale, self.settings.width)
        hidden: Tensor = first(waves.to(dtype))
        embedding: Tensor = second(activation(self._add_augmentation(hidden, augment)))
        of_class = self._of_class(label, c_noise)
        return F.silu(embedding if of_class is None else embedding + of_class)
