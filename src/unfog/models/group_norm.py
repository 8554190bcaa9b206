"""Group normalisation that keeps channels_last on CUDA, where torch's own returns NCHW; and SiLU after it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

_ATEN = torch.ops.aten
# Whether normalisation and SiLU are computed by kernels of Triton in steps that are captured. torch's kernel and its
# conversions move 72 bytes for each number in 16 bits, of which 20 are needed: on an H200 the captured step of
# `cifar10` is 1.52 times as fast with them. In plain steps their launches cost the host more than the GPU saves.
_FUSED = True
# Kernels for channels_last that torch has from 2.15 on are not used: they take weights in the type of the input alone,
# and no GPU has shown here that they are right, repeat to the bit, and are faster. `native_group_norm` gets NCHW.


class GroupNorm(nn.GroupNorm):
    """`nn.GroupNorm`, whose output on CUDA has the memory format and the type of its input."""

    fuses = False
    """Whether normalisation and SiLU are one operation while the network is trained: see `fuse_norms`."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [B, C, H, W], each group of channels by itself."""
        # The convolutions around it would each convert its output, in the forward and in the backward pass. Compiled
        # code needs no help: Inductor has no kernel for it, and fuses its parts in whatever format is there.
        if x.device.type != "cuda" or not is_channels_last(x) or torch.compiler.is_compiling():
            return super().forward(x)
        return group_norm(x, self.num_groups, self.weight, self.bias, self.eps)

    def silu(self, x: Tensor, scale: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
        """Normalise [B, C, H, W], multiply by 1 + `scale` and add `shift`, both [B, C, 1, 1] if given; apply SiLU."""
        if not self._is_fused(x):
            h = self(x)
            return F.silu(h if scale is None or shift is None else h * (1 + scale) + shift)
        from unfog.models.fused_group_norm import group_norm_silu

        weight, bias = self.weight.expand(len(x), -1), self.bias.expand(len(x), -1)
        if scale is not None and shift is not None:
            factor = 1 + scale.flatten(1).float()
            weight, bias = weight * factor, bias * factor + shift.flatten(1)
        return group_norm_silu(x, self.num_groups, weight, bias, self.eps)

    def _is_fused(self, x: Tensor) -> bool:
        return self.fuses and self.training and is_channels_last(x) and not torch.compiler.is_compiling()


def fuse_norms(network: nn.Module) -> None:
    """Let norms that SiLU follows be one operation with it while a network on CUDA is trained, if Triton is there."""
    if _FUSED and find_spec("triton") is not None:
        for part in network.modules():
            if isinstance(part, GroupNorm):
                part.fuses = True


def is_channels_last(x: Tensor) -> bool:
    """Return whether a tensor is [B, C, H, W] in channels_last, and could be in another format."""
    return x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def group_norm(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Normalise [B, C, H, W] in channels_last -> the same, computed in float32 whatever the type of `x`."""
    output: Tensor = _ChannelsLast.apply(x, weight, bias, groups, eps)  # type: ignore[no-untyped-call]
    return output


class _ChannelsLast(torch.autograd.Function):
    """torch's kernel between two conversions, which change type and format in one pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Tensor:
        batch, channels, height, width = ctx.sizes = x.shape
        ctx.groups = groups
        normal, mean, scale = _ATEN.native_group_norm(
            _planar(x), weight, bias, batch, channels, height * width, groups, eps
        )
        # The input in its own type: half the memory of the float32 that the kernel would keep.
        ctx.save_for_backward(x, weight, mean, scale)
        return normal.to(x.dtype, memory_format=torch.channels_last)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        batch, channels, height, width = ctx.sizes
        of_x, of_weight, of_bias = _ATEN.native_group_norm_backward(
            *(_planar(gradient), _planar(x), mean, scale, weight),
            *(batch, channels, height * width, ctx.groups, ctx.needs_input_grad[:3]),
        )
        of_x = None if of_x is None else of_x.to(x.dtype, memory_format=torch.channels_last)
        return of_x, of_weight, of_bias, None, None


def _planar(x: Tensor) -> Tensor:
    """Return the input of the kernel: NCHW, in the type of its weights."""
    return x.to(torch.float32, memory_format=torch.contiguous_format)
