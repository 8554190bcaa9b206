"""Gradient clipping: a gradient longer than `training.clip` is scaled to that norm, on the host or on the device.

Both ways compute what torch's `clip_grads_with_norm_` computes: the factor is min(1, clip / (norm + 1e-6)).
"""

from __future__ import annotations

import torch
from torch import Tensor

from unfog.training.sharded_tensors import to_local


def clip_gradients(optimizer: torch.optim.Optimizer, clip: float, norm: float) -> None:
    """Scale the gradients, which have the norm `norm`, to norm `clip` if they are longer. 0: never."""
    # Gradients that are short enough stay as they are, and are not multiplied by 1.
    if 0 < clip < (length := norm + 1e-6):
        torch._foreach_mul_(list(map(to_local, gradients(optimizer))), clip / length)


def clip_factor(clip: float, norm: Tensor) -> Tensor | None:
    """Return the factor that clips a gradient of norm `norm` to norm `clip`, 0-d on its device; None if `clip` is 0."""
    # In float64, as `clip_gradients` computes it.
    return (clip / (norm.double() + 1e-6)).clamp(max=1).float() if clip > 0 else None


def scale_gradients(optimizer: torch.optim.Optimizer, factor: Tensor | None) -> None:
    """Multiply the gradients by `clip_factor`, without waiting for the device. None: they are not clipped."""
    if factor is not None:
        torch._foreach_mul_(gradients(optimizer), factor)


def gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the gradients of all parameters that have one."""
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
