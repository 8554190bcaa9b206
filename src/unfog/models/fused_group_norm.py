"""Group normalisation and SiLU together, in channels_last on CUDA: four kernels of Triton in place of eleven passes."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_TILE = 4096  # numbers that a program reads
_LARGEST = 1024  # channels that a program reads


@triton.jit
def _tile(rows, channels, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Offsets of a program's part of [B, N, C], those of its channels in [B, C], and which channels exist."""
    image, part, column = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    c = column * WIDTH + tl.arange(0, WIDTH)
    n = part * ROWS + tl.arange(0, ROWS)
    return (image * rows + n[:, None]) * channels + c[None, :], image * channels + c, c < channels


@triton.jit
def _moments(x, means, squares, rows, channels, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Mean of each channel in a part, and the sum of squares around it."""
    at, _, exists = _tile(rows, channels, ROWS, WIDTH)
    v = tl.load(x + at, exists[None, :], 0.0).to(tl.float32)
    mean = tl.sum(v, 0) / ROWS
    out = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * channels
    out += tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    tl.store(means + out, mean, exists)
    tl.store(squares + out, tl.sum((v - mean[None, :]) * (v - mean[None, :]), 0), exists)


@triton.jit
def _apply(x, scale, shift, y, rows, channels, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    at, of, exists = _tile(rows, channels, ROWS, WIDTH)
    v = tl.load(x + at, exists[None, :], 0.0).to(tl.float32)
    z = v * tl.load(scale + of, exists, 0.0)[None, :] + tl.load(shift + of, exists, 0.0)[None, :]
    tl.store(y + at, (z * tl.sigmoid(z)).to(y.dtype.element_ty), exists[None, :])


@triton.jit
def _of_z(x, g, scale, shift, at, of, exists):
    """Input, and gradient by what SiLU is applied to."""
    v = tl.load(x + at, exists[None, :], 0.0).to(tl.float32)
    z = v * tl.load(scale + of, exists, 0.0)[None, :] + tl.load(shift + of, exists, 0.0)[None, :]
    s = tl.sigmoid(z)
    return v, tl.load(g + at, exists[None, :], 0.0).to(tl.float32) * s * (1 + z * (1 - s))


@triton.jit
def _sums(x, g, scale, shift, mean, plain, centred, rows, channels, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Sums of a part's gradient by channel: plain, and times the input less its mean."""
    at, of, exists = _tile(rows, channels, ROWS, WIDTH)
    v, d = _of_z(x, g, scale, shift, at, of, exists)
    out = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * channels
    out += tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    tl.store(plain + out, tl.sum(d, 0), exists)
    tl.store(centred + out, tl.sum(d * (v - tl.load(mean + of, exists, 0.0)[None, :]), 0), exists)


@triton.jit
def _of_x(x, g, scale, shift, slope, offset, dx, rows, channels, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    at, of, exists = _tile(rows, channels, ROWS, WIDTH)
    v, d = _of_z(x, g, scale, shift, at, of, exists)
    out = d * tl.load(scale + of, exists, 0.0)[None, :] + v * tl.load(slope + of, exists, 0.0)[None, :]
    out += tl.load(offset + of, exists, 0.0)[None, :]
    tl.store(dx + at, out.to(dx.dtype.element_ty), exists[None, :])


class _Parts:
    """Division of [B, C, H, W] among programs; sums are added in one order, whatever the GPU."""

    def __init__(self, x: Tensor):
        (self.batch, self.channels), self.rows = x.shape[:2], x[0, 0].numel()
        self.width = min(_LARGEST, triton.next_power_of_2(self.channels))
        most = max(1, _TILE // self.width)
        self.size = next(n for n in (2**i for i in range(most.bit_length() - 1, -1, -1)) if self.rows % n == 0)
        self.count = self.rows // self.size

    def run(self, kernel: Any, *tensors: Tensor) -> None:
        grid = self.batch, self.count, triton.cdiv(self.channels, self.width)
        kernel[grid](*tensors, self.rows, self.channels, ROWS=self.size, WIDTH=self.width)

    def new(self, like: Tensor) -> Tensor:
        """Return room for a float32 of each channel of each part."""
        return torch.empty(self.batch, self.count, self.channels, device=like.device)


class _GroupNormSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Tensor:
        parts = _Parts(x)
        means, squares = parts.new(x), parts.new(x)
        parts.run(_moments, x, means, squares)
        by_group = parts.batch, parts.count, groups, parts.channels // groups
        mean = means.view(by_group).mean((1, 3), keepdim=True)
        square = squares.view(by_group).sum((1, 3)) + parts.size * (means.view(by_group) - mean).square().sum((1, 3))
        rate = (square / (parts.rows * by_group[3]) + eps).rsqrt()
        mean, rate = (t.view(-1, groups).repeat_interleave(by_group[3], 1) for t in (mean, rate))
        scale = rate * weight.float()
        shift = bias.float() - mean * scale
        y = torch.empty_like(x)
        parts.run(_apply, x, scale, shift, y)
        ctx.save_for_backward(x, weight, mean, rate, scale, shift)
        ctx.groups = groups
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rate, scale, shift = ctx.saved_tensors
        parts, gradient = _Parts(x), gradient.to(x.dtype).contiguous(memory_format=torch.channels_last)
        plain, centred = parts.new(x), parts.new(x)
        parts.run(_sums, x, gradient, scale, shift, mean, plain, centred)
        of_bias, of_weight = plain.sum(1), centred.sum(1) * rate
        both = torch.stack([of_bias, of_weight]) * weight.float()
        both = both.view(2, parts.batch, ctx.groups, -1).sum(3) / (parts.rows * parts.channels // ctx.groups)
        m1, m2 = both.repeat_interleave(parts.channels // ctx.groups, 2)
        slope = -rate.square() * m2
        of_x = torch.empty_like(x)
        parts.run(_of_x, x, gradient, scale, shift, slope, -rate * m1 - slope * mean, of_x)
        return of_x, of_weight.to(weight.dtype), of_bias.to(weight.dtype), None, None


def group_norm_silu(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return SiLU of the normalised [B, C, H, W] in channels_last times `weight` plus `bias`, [B, C], in its type."""
    y: Tensor = _GroupNormSilu.apply(x, weight, bias, groups, eps)
    return y
