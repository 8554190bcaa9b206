"""The magnitude-preserving U-Net: (x, noise condition, conditions) -> y (Karras et al. 2024, EDM2).

Every layer maps inputs of unit variance to outputs of unit variance. Equation numbers are those of the paper.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unfog.models import layers
from unfog.models.layers import ConditionalNetwork, Runner, pad, sinusoids, text_at
from unfog.models.settings import MPUNet
from unfog.models.text_encoder import Text, attend_to_text, text_heads
from unfog.values.conditions import ConditionsLike

_SILU_RMS = 0.596  # root mean square of silu(x) for normally distributed x (eq. 81)
_FP16_LIMIT = 256.0  # of a block's output, as in EDM2's code, far above the unit magnitude that it has
_RESIDUAL = 0.3  # weight of a branch in its mixture with the shortcut, as in EDM2's code


def _mp_silu(x: Tensor) -> Tensor:
    """SiLU that keeps unit magnitude (eq. 81)."""
    return F.silu(x) / _SILU_RMS


def _mp_sum(a: Tensor, b: Tensor, t: float = 0.5) -> Tensor:
    """Return (1 - t) a + t b at unit magnitude, for uncorrelated a and b of unit magnitude (eq. 88)."""
    norm = math.hypot(1 - t, t)
    return a * ((1 - t) / norm) + b * (t / norm)


def _mp_mix(a: Tensor, b: Tensor, share: Tensor) -> Tensor:
    """`_mp_sum` by a learned share of b, 0-d; a itself, to the bit, if it is 0."""
    norm = ((1 - share) ** 2 + share**2).rsqrt()
    return a * ((1 - share) * norm).to(a.dtype) + b * (share * norm).to(b.dtype)


def _mp_cat(a: Tensor, b: Tensor, t: float = 0.5) -> Tensor:
    """Concatenate channels of a and b, with shares 1 - t and t of the magnitude whatever their numbers (eq. 103)."""
    count_a, count_b = a.shape[1], b.shape[1]
    scale = math.sqrt((count_a + count_b) / ((1 - t) ** 2 + t**2))
    return torch.cat([a * (scale * (1 - t) / math.sqrt(count_a)), b * (scale * t / math.sqrt(count_b))], dim=1)


class _Weights(nn.Module):
    """Base of layers with weights whose rows, one for each output, are normalised to unit length in use (eq. 47)."""

    def __init__(self, *shape: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))
        self.project()

    @property
    def unit(self) -> Tensor:
        """Return the rows at unit length, float32."""
        return F.normalize(self.weight.float().flatten(1)).view_as(self.weight)

    @torch.no_grad()
    def project(self) -> None:
        """Normalise the stored rows to unit root mean square (eq. 66)."""
        # The gradient is orthogonal to the rows, so each update lengthens them, which slows down learning ever more.
        self.weight.copy_(self.unit * math.sqrt(self.weight[0].numel()))


class _MPLinear(_Weights):
    """Linear layer without bias, [B, in] -> [B, out]; `gain` scales the unit rows."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__(out_features, in_features)

    def forward(self, x: Tensor, gain: Tensor | None = None) -> Tensor:
        return F.linear(x, self.unit if gain is None else self.unit * gain)


class _MPConv(_Weights):
    """Convolution without bias, [B, in, H, W] -> [B, out, H, W], with an odd kernel; `gain` scales the unit rows."""

    wrap = ""

    def __init__(self, in_channels: int, out_channels: int, kernel: int):
        super().__init__(out_channels, in_channels, kernel, kernel)

    def forward(self, x: Tensor, gain: Tensor | None = None) -> Tensor:
        weight = self.unit if gain is None else self.unit * gain
        margin = weight.shape[-1] // 2
        if not self.wrap or not margin:
            return F.conv2d(x, weight, padding=margin)
        return F.conv2d(pad(x, (margin, margin, margin, margin), self.wrap), weight)


class _MPEmbedding(_Weights):
    """A vector of unit magnitude for each class: int64 [B] -> [B, width]."""

    def __init__(self, classes: int, width: int):
        super().__init__(classes, width)

    def forward(self, index: Tensor) -> Tensor:
        return F.embedding(index, self.unit * math.sqrt(self.weight.shape[1]))


class _MPAttention(nn.Module):
    """Residual self-attention over pixels with cosine similarity, [B, C, H, W] -> the same."""

    def __init__(self, channels: int, head_channels: int):
        super().__init__()
        self.heads = channels // (head_channels or channels)
        self.qkv = _MPConv(channels, 3 * channels, 1)
        self.out = _MPConv(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).flatten(2).unflatten(1, (3, self.heads, -1))  # [B, 3, heads, D, N]
        q, k, v = _unit_rms(qkv, 3).permute(1, 0, 2, 4, 3)  # each [B, heads, N, D]
        gathered = layers.attention(q, k, v).transpose(2, 3).reshape(x.shape)
        return _mp_sum(x, self.out(gathered), _RESIDUAL)


class _MPTextAttention(nn.Module):
    """Attention of pixels to a text with cosine similarity, [B, C, H, W] -> the same; mixed in by a learned share."""

    def __init__(self, channels: int, head_channels: int, text_width: int):
        super().__init__()
        self.heads = text_heads(channels, head_channels)
        self.q = _MPConv(channels, channels, 1)
        self.kv = _MPLinear(text_width, 2 * channels)
        self.out = _MPConv(channels, channels, 1)
        # 0 for a fresh layer: the text has no influence yet. A row of the weights could not begin at 0.
        self.share = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, text: Text) -> Tensor:
        q = _unit_rms(self.q(x).flatten(2).unflatten(1, (self.heads, -1)), 2).transpose(2, 3)  # [B, heads, N, D]
        kv = _unit_rms(self.kv(text.tokens).unflatten(2, (2, self.heads, -1)), 4)
        k, v = kv.permute(2, 0, 3, 1, 4)
        gathered = attend_to_text(q, k, v, text.mask).transpose(2, 3).reshape(x.shape)
        return _mp_mix(x, self.out(gathered), self.share)


class _MPBlock(nn.Module):
    """Two 3x3 convolutions around a condition, then attention if `attends`, and to a text with a `text_width`.

    On the way down (`down`) the shortcut comes first, on the way up last. `resample` "down" halves height and width
    before all else, "up" doubles them.
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
        text_width: int = 0,
        resample: Literal["", "down", "up"] = "",
    ):
        super().__init__()
        self.down, self.resample, self.dropout = down, resample, settings.dropout
        self.conv1 = _MPConv(out_channels if down else in_channels, out_channels, 3)
        self.condition = _MPLinear(width, out_channels)
        # A scalar for each block, the only weight whose length is free: it says how much the condition may do.
        self.gain = nn.Parameter(torch.zeros(()))
        self.conv2 = _MPConv(out_channels, out_channels, 3)
        same = in_channels == out_channels
        self.shortcut = nn.Identity() if same else _MPConv(in_channels, out_channels, 1)
        self.attention = _MPAttention(out_channels, settings.head_channels) if attends else nn.Identity()
        self.text = _MPTextAttention(out_channels, settings.head_channels, text_width) if text_width else None

    def forward(self, x: Tensor, embedding: Tensor, skip: Tensor | None = None, text: Text | None = None) -> Tensor:
        x = x if skip is None else _mp_cat(x, skip)
        if self.resample == "down":
            x = F.avg_pool2d(x, 2)
        elif self.resample == "up":
            x = layers.repeat_pixels(x)
        if self.down:
            # Normalised pixel by pixel, so that deviations from unit magnitude do not add up.
            x = _unit_rms(self.shortcut(x), 1)
        # 1 for a fresh block, whose gain is 0: the condition has no influence yet.
        scale: Tensor = self.condition(embedding, self.gain) + 1
        h = _mp_silu(self.conv1(_mp_silu(x)) * scale[:, :, None, None])
        h = self.conv2(F.dropout(h, self.dropout, self.training))
        x = _mp_sum(x if self.down else self.shortcut(x), h, _RESIDUAL)
        output: Tensor = self.attention(x)
        if self.text is not None and text is not None:
            output = self.text(output, text)
        # fp16 ends at 65,504, which a sum of such values reaches; other types need no limit, and no memory for it.
        return output.clamp(-_FP16_LIMIT, _FP16_LIMIT) if output.dtype == torch.float16 else output


class MPUNetModel(ConditionalNetwork):
    """EDM2's U-Net. A fresh one outputs exactly zero, as its gain begins at zero.

    Call `project` after each update of the weights. The forward pass changes no weight (unlike EDM2's own), so that it
    can be repeated, recomputed and compiled.
    """

    block = _MPBlock
    takes_images = True

    settings: MPUNet

    def _build(self, settings: MPUNet, out_channels: int) -> int:
        # As wide as the widest level, as in EDM2.
        first, width = settings.channels[0], max(settings.channels)
        self.conv_in = _MPConv(self._channels_in + 1, first, 3)
        self.time_embedding = _MPLinear(first, width)
        self.class_embedding = _MPEmbedding(self.num_classes + 1, width) if self.num_classes else None
        self.down, skips = _down(settings, width, self.text_width)
        self.up = _up(settings, width, skips, self.text_width)
        self.conv_out = _MPConv(first, out_channels, 3)
        self.gain_out = nn.Parameter(torch.zeros(()))
        return width

    conditions_have_power_1 = True

    def _condition_layer(self, inputs: int, width: int) -> nn.Module:
        return _MPLinear(inputs, width)

    def _text_parts(self) -> tuple[type[nn.Module], ...]:
        return _MPLinear, _MPEmbedding

    def _build_text_embedding(self, width: int) -> nn.Module:
        self.text_share = nn.Parameter(torch.zeros(()))
        return _MPLinear(self.text_width, width)

    def _add_text(self, hidden: Tensor, text: Text) -> Tensor:
        assert self.text_embedding is not None
        pooled = _unit_rms(text.pooled.to(hidden.dtype), 1)
        return _mp_mix(hidden, self.text_embedding(pooled), self.text_share)

    def forward(self, x: Tensor, c_noise: Tensor, conditions: ConditionsLike = None) -> Tensor:
        """Compute the network's output for images of about unit variance; see `UNetModel.forward`."""
        text = self._read_text(conditions, x)
        embedding = self.embed(c_noise, conditions, x.dtype, text)
        # A channel of ones replaces the biases, which would break unit magnitude.
        shown = self._with_images(x, conditions)
        h = self._laid_out(self.conv_in(torch.cat([shown, torch.ones_like(x[:, :1])], dim=1)))
        skips = [h]
        for block in self.down:
            h = self._run(block, h, embedding, None, text)
            skips.append(h)
        for level in self.up:
            h = level(h, skips, embedding, text, self._run)
        output: Tensor = self.conv_out(h, self.gain_out)
        return output.contiguous()

    def embed(
        self, c_noise: Tensor, conditions: ConditionsLike, dtype: torch.dtype, text: Text | None = None
    ) -> Tensor:
        """Embed noise condition [B] and the other conditions: activated, [B, max(channels)]."""
        # EDM2 draws random frequencies and phases for the noise level (eq. 75), which have unit magnitude on average.
        # Pairs of sine and cosine have it exactly, and take timesteps as well as log-SNRs.
        waves = sinusoids(c_noise.float() * self.settings.time_scale, self.settings.channels[0])
        embedding: Tensor = self.time_embedding((waves * math.sqrt(2)).to(dtype))
        embedding = self._add_conditions(embedding, conditions, text)
        class_embedding = self._class_embedding(conditions, c_noise)
        if class_embedding is not None:
            embedding = _mp_sum(embedding, class_embedding.to(embedding.dtype))
        return _mp_silu(embedding)

    def project(self, skip: Tensor | None = None) -> None:
        """Force all weights back to unit magnitude (eq. 66), unless `skip`, 0-d on their device, is 1."""
        layers = [module for module in self.modules() if isinstance(module, _Weights)]
        # Launches cost more than copies on a GPU; on a CPU the copies take five times as long as they save.
        weights = [layer.weight for layer in layers]
        on_gpu = all(weight.device.type == "cuda" and not hasattr(weight, "to_local") for weight in weights)
        if on_gpu or skip is not None:  # never with sharded weights
            _project_by_row_length(weights, skip)
        else:
            for layer in layers:
                layer.project()


class _UpLevel(nn.Module):
    """The blocks of one resolution on the way up: `enter` without a skip connection, then `blocks` with one each."""

    def __init__(self, enter: list[_MPBlock], blocks: list[_MPBlock]):
        super().__init__()
        self.enter = nn.ModuleList(enter)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, skips: list[Tensor], embedding: Tensor, text: Text | None, run: Runner) -> Tensor:
        """Pop a skip connection for each block off `skips`, the newest first. Return the next level's input."""
        for block in self.enter:
            x = run(block, x, embedding, None, text)
        for block in self.blocks:
            x = run(block, x, embedding, skips.pop(), text)
        return x


@torch.no_grad()
def _project_by_row_length(weights: list[nn.Parameter], skip: Tensor | None = None) -> None:
    """Normalise the rows of weights to unit root mean square, all rows of one length together; none if `skip` is 1.

    To the bit as one by one. Six operations for each length, and five for each weight if one by one: 90 in place of
    615 for `mp-base`.
    """
    by_length: dict[int, list[Tensor]] = defaultdict(list)
    for weight in weights:
        by_length[weight[0].numel()].append(weight.flatten(1))
    for length, rows in by_length.items():
        joined = torch.cat(rows)
        unit = F.normalize(joined.float()) * math.sqrt(length)
        # Not idempotent: rows that are normalised already would move by a bit.
        unit = unit if skip is None else torch.where(skip > 0, joined, unit)
        torch._foreach_copy_(rows, torch.split(unit, [len(part) for part in rows]))


def _down(settings: MPUNet, width: int, text: int) -> tuple[nn.ModuleList, list[int]]:
    """Return the blocks of the way down, and the channels of its skip connections, oldest first."""
    blocks, last = [], settings.channels[0]
    skips = [last]
    for level, channels in enumerate(settings.channels):
        if level:
            blocks.append(_MPBlock(settings, last, last, width, down=True, resample="down"))
            skips.append(last)
        for _ in range(settings.blocks):
            attends, reads = settings.attention[level], text_at(text, settings.attention, level)
            blocks.append(_MPBlock(settings, last, channels, width, down=True, attends=attends, text_width=reads))
            skips.append(channels)
            last = channels
    return nn.ModuleList(blocks), skips


def _up(settings: MPUNet, width: int, skips: list[int], text: int) -> nn.ModuleList:
    """Return the way up, lowest resolution first; each block takes the newest remaining skip connection."""
    levels, last, left = [], settings.channels[-1], list(skips)
    for level in reversed(range(len(settings.channels))):
        channels, attends = settings.channels[level], settings.attention[level]
        reads = text_at(text, settings.attention, level)
        if level == len(settings.channels) - 1:  # the two middle blocks
            middle = (attends, reads), (False, 0)
            enter = [_MPBlock(settings, last, last, width, attends=a, text_width=t) for a, t in middle]
        else:
            enter = [_MPBlock(settings, last, last, width, resample="up")]
        blocks = []
        for _ in range(settings.blocks + 1):
            blocks.append(_MPBlock(settings, last + left.pop(), channels, width, attends=attends, text_width=reads))
            last = channels
        levels.append(_UpLevel(enter, blocks))
    return nn.ModuleList(levels)


def _unit_rms(x: Tensor, dim: int | tuple[int, ...], eps: float = 1e-4) -> Tensor:
    """Divide `x` by its root mean square along `dim`, at least `eps`; computed in float32, in the type of `x`."""
    square = x.float().square().mean(dim, keepdim=True)
    # Clamped instead of adding eps, so that the gradient stays orthogonal to x.
    return x * square.clamp_min(eps**2).rsqrt().to(x.dtype)
