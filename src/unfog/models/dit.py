"""The diffusion transformer: (x, noise condition, conditions) -> y (Peebles & Xie 2023)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unfog.models import layers
from unfog.models.layers import ConditionalNetwork, sinusoids, zero_
from unfog.models.settings import DiT
from unfog.models.text_encoder import CrossAttention, Text
from unfog.values.conditions import ConditionsLike

# Rotary frequencies fall from 1 to nearly 1 / 100: images are tens of patches wide, not thousands as texts are long.
_BASE = 100.0


class _RMSNorm(nn.Module):
    """Divide [..., width] by its root mean square and multiply by a learned weight (Zhang & Sennrich 2019)."""

    def __init__(self, width: int, learned: bool = True):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width)) if learned else None

    def forward(self, x: Tensor) -> Tensor:
        # 1.4 times as fast on a CPU as `F.rms_norm`; the mean in float32, as bfloat16 cannot sum so many squares.
        normal = x * (x.float().square().mean(-1, keepdim=True) + 1e-6).rsqrt().to(x.dtype)
        return normal if self.weight is None else normal * self.weight.to(x.dtype)


class _SwiGLU(nn.Module):
    """W_out (silu(W_gate x) * W_in x), [..., width] -> the same (Shazeer 2020, eq. 6)."""

    def __init__(self, width: int):
        super().__init__()
        hidden = max(8, round(width / 3) * 8)  # 8/3 of the width: as many weights as a plain MLP of 4 times the width
        self.enter = nn.Linear(width, 2 * hidden, bias=False)
        self.out = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.enter(x).chunk(2, dim=-1)
        output: Tensor = self.out(F.silu(gate) * value)
        return output


def _rotations(
    rows: int,
    columns: int,
    head_channels: int,
    device: torch.device,
    wrap: str = "",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the angles of rotary position embedding (Su et al. 2021), [rows * columns, head_channels / 2].

    The first half of them depends on the row, the other on the column. Positions are periodic along the axes `wrap`.
    """
    count = head_channels // 4
    share = torch.arange(count, dtype=dtype, device=device) / count
    row = _angles(rows, share, "y" in wrap)[:, None]
    column = _angles(columns, share, "x" in wrap)[None]
    return torch.cat([row.expand(rows, columns, count), column.expand(rows, columns, count)], dim=2).flatten(0, 1)


def _angles(side: int, share: Tensor, periodic: bool) -> Tensor:
    """Return the angles of each position along a side, [side, N], for N frequencies.

    `share` [N] is the place of each among them, from 0 for the highest. If `periodic`, a side has whole periods: from
    side / 4 of them down to one.
    """
    position = torch.arange(side, device=share.device)[:, None]
    if not periodic:
        return position.to(share.dtype) * _BASE**-share
    # Halves are rounded up on every device, whose powers differ in the last bit.
    periods = (max(1.0, side / 4) ** (1 - share) + 1e-3).round().long()
    # Reduced as whole numbers, so that a position and those a side further have the same angles to the bit.
    return (position * periods % side).to(share.dtype) * (2 * math.pi / side)


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate pairs of channels (i, i + D/2) of x [..., N, D] by angles [N, D / 2].

    Products of a rotated query and key depend on their distance only.
    """
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class _Attention(nn.Module):
    """Self-attention of tokens [B, N, width], with normalised queries and keys and rotary `angles` [N, D / 2]."""

    def __init__(self, settings: DiT):
        super().__init__()
        width = settings.width
        self.heads = width // settings.head_channels
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.norm_q = _RMSNorm(settings.head_channels)
        self.norm_k = _RMSNorm(settings.head_channels)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each [B, heads, N, D]
        q, k = _rotate(self.norm_q(q), angles), _rotate(self.norm_k(k), angles)
        output: Tensor = self.out(layers.attention(q, k, v).transpose(1, 2).flatten(2))
        return output


class _Offset(nn.Module):
    """Add a block's own offset to the modulation [B, W] that all blocks share (adaLN-single, PixArt-alpha)."""

    def __init__(self, width: int):
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(width))

    def forward(self, shared: Tensor) -> Tensor:
        return shared + self.offset


class _Block(nn.Module):
    """Attention, then SwiGLU, each scaled and shifted before and gated after by the condition (adaLN-zero).

    With a `text_width`, attention to a text comes between them. Its output begins at zero, and needs no gate. A text
    in one sequence with the image would need masks in self-attention, whose fused kernels have none.
    """

    def __init__(self, settings: DiT, text_width: int = 0):
        super().__init__()
        width = settings.width
        self.norm = _RMSNorm(width, learned=False)
        self.attention = _Attention(settings)
        self.mlp = _SwiGLU(width)
        self.text = None
        if text_width:
            norms = (_RMSNorm(settings.head_channels) for _ in range(2))
            self.text = CrossAttention(width, settings.head_channels, text_width, *norms)
        self.dropout = nn.Dropout(settings.dropout)
        # Zero at first, so that the gates close both branches and a fresh block is the identity.
        self.modulation: nn.Module = _Offset(6 * width)
        if settings.modulation == "block":
            self.modulation = nn.Linear(width, 6 * width)
            zero_(self.modulation)

    def forward(self, x: Tensor, condition: Tensor, angles: Tensor, text: Text | None = None) -> Tensor:
        """Update tokens [B, N, width] by the shared modulation [B, 6 width] or the embedding [B, width]."""
        modulation: Tensor = self.modulation(condition)[:, None]
        shift1, scale1, gate1, shift2, scale2, gate2 = modulation.chunk(6, dim=2)
        x = x + gate1 * self.dropout(self.attention(self.norm(x) * (1 + scale1) + shift1, angles))
        if self.text is not None and text is not None:
            x = x + self.dropout(self.text(self.norm(x), text))
        output: Tensor = x + gate2 * self.dropout(self.mlp(self.norm(x) * (1 + scale2) + shift2))
        return output


class DiTModel(ConditionalNetwork):
    """A diffusion transformer. A fresh one outputs exactly zero, as its last layer begins at zero."""

    ends = ("patch_in", "patch_out", *ConditionalNetwork.embeddings, "text_embedding")
    block = _Block
    takes_images = True
    calls_layers_once = True

    settings: DiT

    def _build(self, settings: DiT, out_channels: int) -> int:
        width, area = settings.width, settings.patch**2
        self.patch_in = nn.Linear(area * self._channels_in, width)
        self.time_embedding = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.class_embedding = self._class_table(width)
        self.blocks = nn.ModuleList([_Block(settings, self.text_width) for _ in range(settings.depth)])
        self.modulation = nn.Linear(width, 6 * width) if settings.modulation == "shared" else None
        self.norm_out = _RMSNorm(width, learned=False)
        self.modulation_out = nn.Linear(width, 2 * width)
        self.patch_out = nn.Linear(width, area * out_channels)
        self._initialise()
        return width

    def _initialise(self) -> None:
        # As in DiT: Xavier for matrices, a small embedding of the noise level, and zero for all modulations and for the
        # last layer. Its class table is small too; ours begins with deviation 1, see `_class_table`.
        # Three passes over the weights, the order of which decides: Xavier for all, then the smaller, then the zeros.
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for layer in self.time_embedding:
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=0.02)
        modulations = [block.modulation for block in self.blocks if isinstance(block, _Block)]
        texts = [block.text.out for block in self.blocks if isinstance(block, _Block) and block.text is not None]
        for part in (self.modulation, self.modulation_out, self.patch_out, *modulations, *texts):
            if isinstance(part, nn.Linear):
                zero_(part)

    def forward(self, x: Tensor, c_noise: Tensor, conditions: ConditionsLike = None) -> Tensor:
        """Compute the network's output; see `UNetModel.forward`."""
        patch, text = self.settings.patch, self._read_text(conditions, x)
        embedding = self.embed(c_noise, conditions, x.dtype, text)
        condition = embedding if self.modulation is None else self.modulation(embedding)
        # With the linear layer this is the strided convolution of other code; `patch_out` has the same order of pixels.
        squares = F.pixel_unshuffle(self._with_images(x, conditions), patch)  # [B, C patch^2, rows, columns]
        rows, columns = squares.shape[2:]
        wide = torch.promote_types(x.dtype, torch.float32)
        angles = _rotations(rows, columns, self.settings.head_channels, x.device, self.wrap, wide)
        tokens: Tensor = self.patch_in(squares.flatten(2).transpose(1, 2))
        for block in self.blocks:
            tokens = self._run(block, tokens, condition, angles, text)
        scale, shift = self.modulation_out(embedding)[:, None].chunk(2, dim=2)
        pixels: Tensor = self.patch_out(self.norm_out(tokens) * (1 + scale) + shift)
        return F.pixel_shuffle(pixels.transpose(1, 2).reshape(x.shape[0], -1, rows, columns), patch)

    def embed(
        self, c_noise: Tensor, conditions: ConditionsLike, dtype: torch.dtype, text: Text | None = None
    ) -> Tensor:
        """Embed noise condition [B] and the other conditions: activated, [B, width]."""
        waves = sinusoids(c_noise.float() * self.settings.time_scale, self.settings.width)
        return self._embed(self.time_embedding, waves.to(dtype), c_noise, conditions, text)
