"""Encoder of the texts of images, and the attention of image tokens to a text.

Every encoder, this one or a pretrained one, maps token numbers to `Text`, of which alone the networks know.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unfog.values.condition_format import TEXT_HEAD


class Text(NamedTuple):
    """Encoded texts of B images. A tuple of tensors, as `Conditions` is."""

    tokens: Tensor
    """[B, N, D] with a root mean square of 1."""
    mask: Tensor
    """bool [B, N], False for padding. The first token of each text is the start, which is never masked."""

    @property
    def pooled(self) -> Tensor:
        """Mean of the tokens of each text, [B, D]."""
        told = self.mask[..., None].to(self.tokens.dtype)
        return (self.tokens * told).sum(1) / told.sum(1)


def attend_to_text(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D)) v over the tokens that `mask`, bool [B, N], has.

    q is [B, heads, M, D], k and v are [B, heads, N, D].
    """
    # Masked scores are exactly 0 after the softmax. Not torch's fused kernel: texts are short, so the scores are
    # few, and its kernels for masks are other ones on each device.
    q = q * q.shape[-1] ** -0.5
    scores = q @ k.transpose(-1, -2)
    shares = scores.masked_fill(~mask[:, None, None], float("-inf")).softmax(-1, dtype=torch.float32)
    mixed: Tensor = shares.to(v.dtype) @ v
    return mixed


def normal(x: Tensor) -> Tensor:
    """Divide [..., D] by its root mean square."""
    return x * (x.float().square().mean(-1, keepdim=True) + 1e-6).rsqrt().to(x.dtype)


class Layer(nn.Module):
    """Self-attention of tokens [B, N, D], then an MLP; each is added to its input."""

    def __init__(self, width: int, linear: Callable[[int, int], nn.Module]):
        super().__init__()
        self.heads = max(1, width // TEXT_HEAD)
        self.qkv, self.out = linear(width, 3 * width), linear(width, width)
        self.enter, self.leave = linear(width, 4 * width), linear(4 * width, width)
        for last in (self.out, self.leave):
            if isinstance(last, nn.Linear):
                nn.init.zeros_(last.weight)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(normal(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # [B, heads, N, D]
        x = x + self.out(attend_to_text(q, k, v, mask).transpose(1, 2).flatten(2))
        output: Tensor = x + self.leave(F.gelu(self.enter(normal(x))))
        return output


class TextEncoder(nn.Module):
    """A transformer over the tokens of a text, trained with the network: int64 [B, L], -1 after the end -> `Text`.

    Each text begins with a start token of the encoder's own, all that is left of a text that is hidden or not known.
    What is masked changes nothing, so a text may be padded to any length.

    Args:
        vocabulary: number of different tokens.
        length: positions with an embedding of their own; tokens behind them share the last.
        width: D of the output, and of all layers.
        layers: of self-attention and an MLP.
        linear: makes a linear layer without bias of (inputs, outputs).
        table: makes an embedding of (rows, width).
    """

    def __init__(
        self,
        vocabulary: int,
        length: int,
        width: int,
        layers: int,
        linear: Callable[[int, int], nn.Module] = partial(nn.Linear, bias=False),  # noqa: B008
        table: Callable[[int, int], nn.Module] = nn.Embedding,
    ):
        super().__init__()
        self.vocabulary, self.length = vocabulary, length
        self.words = table(vocabulary + 1, width)  # the last row is the start
        self.places = table(length + 1, width)
        self.layers = nn.ModuleList([Layer(width, linear) for _ in range(layers)])

    def forward(self, tokens: Tensor) -> Text:
        """Encode token numbers [B, L]; the text has N = L + 1 tokens."""
        x, mask = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, mask)
        return Text(normal(x), mask)

    def embed(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of the first layer [B, L + 1, D], and bool [B, L + 1], False for padding."""
        start = tokens.new_full((tokens.shape[0], 1), self.vocabulary)  # not len, which a trace fixes
        whole = torch.cat([start, tokens], dim=1)
        mask = whole >= 0
        place = torch.arange(whole.shape[1], device=tokens.device).clamp_max(self.length)
        x: Tensor = self.words(whole.clamp_min(0)) + self.places(place)
        return x, mask


def text_heads(channels: int, head_channels: int) -> int:
    """Return a number of heads that divides the channels: of about head_channels each, or one if that is 0."""
    return math.gcd(channels, channels // min(channels, head_channels or channels))


class CrossAttention(nn.Module):
    """Attention of the tokens of an image [B, M, C] to those of a text, with an output of 0 at first.

    Heads are of `head_channels`, of a size near to it that divides the channels, or one if it is 0. `norm_q` and
    `norm_k` are applied to queries and keys [..., C / heads].
    """

    def __init__(
        self,
        channels: int,
        head_channels: int,
        text_width: int,
        norm_q: nn.Module | None = None,
        norm_k: nn.Module | None = None,
    ):
        super().__init__()
        self.heads = text_heads(channels, head_channels)
        self.q = nn.Linear(channels, channels, bias=False)
        self.kv = nn.Linear(text_width, 2 * channels, bias=False)
        self.norm_q, self.norm_k = norm_q or nn.Identity(), norm_k or nn.Identity()
        self.out = nn.Linear(channels, channels, bias=False)
        nn.init.zeros_(self.out.weight)

    def forward(self, x: Tensor, text: Text) -> Tensor:
        q = self.q(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
        k, v = self.kv(text.tokens).unflatten(2, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = attend_to_text(self.norm_q(q), self.norm_k(k), v, text.mask)
        output: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return output
