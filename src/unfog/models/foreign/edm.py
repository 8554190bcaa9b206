"""The U-Nets of EDM: DDPM++, NCSN++ and ADM, by the names of their weights: (x, noise condition, conditions) -> y.

One kind of block serves all three. Levels are numbered here; in EDM's names each has its resolution instead.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unfog.models import layers
from unfog.models.group_norm import GroupNorm
from unfog.models.layers import ConditionalNetwork, sinusoids, zero_
from unfog.models.settings import Edm
from unfog.values.conditions import ConditionsLike

_SMOOTH = (1.0, 3.0, 3.0, 1.0)  # filter of NCSN++ before and after a change of resolution (Song et al. 2021)


class _Style(NamedTuple):
    """Differences between the architectures of EDM, as its code has them."""

    eps: float
    """Of the group normalisations."""
    scale: float
    """Factor on the sum of a branch and its shortcut."""
    modulates: bool
    """The condition scales and shifts after the second norm, rather than being added before it."""
    always_projects: bool
    """A shortcut that changes the resolution has a convolution, even where the channels stay."""


_SONG = _Style(1e-6, math.sqrt(0.5), False, True)
_ADM = _Style(1e-5, 1.0, True, False)


def _norm(channels: int, eps: float) -> GroupNorm:
    return GroupNorm(min(32, max(1, channels // 4)), channels, eps)


def _resampled(x: Tensor, mode: str, smooth: bool) -> Tensor:
    """Halve or double height and width, by a box filter or a smooth one."""
    if not mode:
        return x
    if not smooth:
        return F.avg_pool2d(x, 2) if mode == "down" else layers.repeat_pixels(x)
    # Doubling puts three zeros beside each pixel, so the filter must add up to 4 to keep the brightness.
    kernel = _kernel(x, 4.0 if mode == "up" else 1.0)
    change = F.conv2d if mode == "down" else F.conv_transpose2d
    return change(x, kernel, stride=2, padding=1, groups=x.shape[1])


def _kernel(like: Tensor, gain: float) -> Tensor:
    """Return the smooth filter for each channel, [C, 1, 4, 4], which sums to the gain."""
    line = torch.tensor(_SMOOTH, dtype=like.dtype, device=like.device)
    kernel = torch.outer(line, line)
    return (kernel * (gain / kernel.sum())).expand(like.shape[1], 1, -1, -1)


class _Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut, with the condition between them, then attention if `heads`."""

    def __init__(
        self, settings: Edm, in_channels: int, out_channels: int, condition: int, mode: str = "", heads: int = 0
    ):
        super().__init__()
        self.style = _ADM if settings.architecture == "adm" else _SONG
        self.mode, self.heads, self.dropout = mode, heads, settings.dropout
        self.smooth = settings.architecture == "ncsnpp"
        self.norm0 = _norm(in_channels, self.style.eps)
        self.conv0 = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.affine = nn.Linear(condition, out_channels * (1 + self.style.modulates))
        self.norm1 = _norm(out_channels, self.style.eps)
        self.conv1 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        zero_(self.conv1)
        projects = in_channels != out_channels or (bool(mode) and self.style.always_projects)
        self.skip = nn.Conv2d(in_channels, out_channels, 1) if projects else nn.Identity()
        if heads:
            self.norm2 = _norm(out_channels, self.style.eps)
            self.qkv = nn.Conv2d(out_channels, 3 * out_channels, 1)
            self.proj = nn.Conv2d(out_channels, out_channels, 1)
            zero_(self.proj)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        h = self.conv0(_resampled(F.silu(self.norm0(x)), self.mode, self.smooth))
        modulation = self.affine(condition)[:, :, None, None]
        if self.style.modulates:
            scale, shift = modulation.chunk(2, dim=1)
            h = self.norm1(h) * (scale + 1) + shift
        else:
            h = self.norm1(h + modulation)
        h = self.conv1(F.dropout(F.silu(h), self.dropout, self.training))
        x = (self.skip(_resampled(x, self.mode, self.smooth)) + h) * self.style.scale
        return self._attend(x) if self.heads else x

    def _attend(self, x: Tensor) -> Tensor:
        # Queries, keys and values alternate: [B, heads, D, 3, N].
        qkv = self.qkv(self.norm2(x)).flatten(2).unflatten(1, (self.heads, -1, 3))
        q, k, v = qkv.permute(3, 0, 1, 4, 2)
        mixed: Tensor = self.proj(layers.attention(q, k, v).transpose(2, 3).reshape(x.shape))
        return (x + mixed) * self.style.scale


class _Residual(nn.Module):
    """Way of the image itself down the levels of NCSN++: convolved, smoothed and halved."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3, bias=True)

    def forward(self, image: Tensor) -> Tensor:
        # The padding of both filters comes first, as one follows the other without a border between them.
        h = F.conv2d(image, self.conv.weight, padding=2)
        h = F.conv2d(h, _kernel(h, 1.0), stride=2, groups=h.shape[1])
        assert self.conv.bias is not None
        return h + self.conv.bias[:, None, None]


class _Fourier(nn.Module):
    """Fourier features with random frequencies, which are stored: [B] -> [B, width]."""

    def __init__(self, width: int):
        super().__init__()
        self.freqs: Tensor
        # A buffer and not a parameter: drawn once, never trained; the weights depend on it.
        self.register_buffer("freqs", torch.randn(width // 2) * 16)

    def forward(self, position: Tensor) -> Tensor:
        angle = position.float()[:, None] * (2 * math.pi * self.freqs.float())
        return torch.cat([angle.sin(), angle.cos()], dim=1)


class EdmModel(ConditionalNetwork):
    """EDM's F_theta. Classes are an embedding whose last row, no class, is what EDM's zero vector becomes.

    The noise condition is ln(sigma) / 4.
    """

    block = _Block
    ends: ClassVar[tuple[str, ...]] = ("enc.0_conv", "out_conv", *ConditionalNetwork.embeddings)

    conditions_begin_at_zero = True
    settings: Edm

    def _build(self, settings: Edm, out_channels: int) -> int:
        song = settings.architecture != "adm"
        condition = 4 * settings.width
        waves = settings.width * (2 if settings.architecture == "ncsnpp" else 1)
        self.map_noise = _Fourier(waves) if settings.architecture == "ncsnpp" else None
        self.map_layer0, self.map_layer1 = nn.Linear(waves, condition), nn.Linear(condition, condition)
        self.enc, skips = _encoder(settings, self.image_channels, condition)
        self.dec, last = _decoder(settings, skips, condition)
        self.out_norm = _norm(last, 1e-6 if song else 1e-5)
        self.out_conv = nn.Conv2d(last, out_channels, 3, padding=1)
        zero_(self.out_conv)
        self.class_embedding = self._class_table(waves if song else condition)
        return waves

    def forward(self, x: Tensor, c_noise: Tensor, conditions: ConditionsLike = None) -> Tensor:
        """Compute the network's output for images of about unit variance."""
        condition = self._condition(c_noise, conditions, x.dtype)
        image, h = x, x
        skips: list[Tensor] = []
        for part in self.enc.values():
            if isinstance(part, _Residual):
                # The shrunk image joins after the block that halved, and replaces that block's skip connection.
                h = image = (h + self._run(part, image)) * math.sqrt(0.5)
                skips[-1] = h
                continue
            h = self._run(part, h, condition) if isinstance(part, _Block) else self._laid_out(part(h))
            skips.append(h)
        for name, part in self.dec.items():
            h = torch.cat([h, skips.pop()], dim=1) if "block" in name else h
            h = self._run(part, h, condition)
        output: Tensor = self.out_conv(F.silu(self.out_norm(h)))
        return output.contiguous()

    def _condition(self, c_noise: Tensor, conditions: ConditionsLike, dtype: torch.dtype) -> Tensor:
        song, width = self.settings.architecture != "adm", self.settings.width
        if self.map_noise is not None:
            waves = self.map_noise(c_noise)
        else:
            waves = sinusoids(c_noise, width, int(song), flip_sin_to_cos=not song)
        embedding = self._class_embedding(conditions, c_noise)
        # Song's networks add the class to the waves, Dhariwal's to what they have become.
        hidden = waves.to(dtype) if embedding is None or not song else waves.to(dtype) + embedding
        hidden = self.map_layer1(F.silu(self.map_layer0(self._add_conditions(hidden, conditions))))
        return F.silu(hidden if embedding is None or song else hidden + embedding)


def _encoder(settings: Edm, channels: int, condition: int) -> tuple[nn.ModuleDict, list[int]]:
    """Return the parts of the way down, and the channels of its skip connections, oldest first."""
    song = settings.architecture != "adm"
    last = settings.width * (1 if song else settings.mults[0])
    parts: dict[str, nn.Module] = {"0_conv": nn.Conv2d(channels, last, 3, padding=1)}
    skips, image = [last], channels
    for level, mult in enumerate(settings.mults):
        if level:
            parts[f"{level}_down"] = _Block(settings, last, last, condition, "down")
            skips.append(last)
        if level and settings.architecture == "ncsnpp":
            parts[f"{level}_aux_residual"] = _Residual(image, last)
            image = last
        for i in range(settings.blocks):
            out = settings.width * mult
            heads = _heads(settings, out) if settings.attention[level] else 0
            parts[f"{level}_block{i}"] = _Block(settings, last, out, condition, heads=heads)
            skips.append(out)
            last = out
    return nn.ModuleDict(parts), skips


def _decoder(settings: Edm, skips: list[int], condition: int) -> tuple[nn.ModuleDict, int]:
    """Return the parts of the way up, and the channels of the last."""
    parts: dict[str, Any] = {}
    left, last, song = list(skips), skips[-1], settings.architecture != "adm"
    for level in reversed(range(len(settings.mults))):
        if level == len(settings.mults) - 1:
            parts[f"{level}_in0"] = _Block(settings, last, last, condition, heads=_heads(settings, last))
            parts[f"{level}_in1"] = _Block(settings, last, last, condition)
        else:
            parts[f"{level}_up"] = _Block(settings, last, last, condition, "up")
        for i in range(settings.blocks + 1):
            out = settings.width * settings.mults[level]
            # On the way up, Song's networks attend only at the end of a level.
            attends = settings.attention[level] and (not song or i == settings.blocks)
            heads = _heads(settings, out) if attends else 0
            parts[f"{level}_block{i}"] = _Block(settings, last + left.pop(), out, condition, heads=heads)
            last = out
    return nn.ModuleDict(parts), last


def _heads(settings: Edm, channels: int) -> int:
    # Song's networks have a single head, whose width is that of the level.
    return max(1, channels // settings.head_channels) if settings.architecture == "adm" else 1
