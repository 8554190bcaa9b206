"""Arithmetic of forward and backward: fp32, bf16 by autocast, or fp16 by autocast with a loss scaler."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from unfog.training.settings import PrecisionName

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """One precision on one device. The scaler is inert except in fp16, and is part of the training state."""

    def __init__(self, name: PrecisionName, device: torch.device):
        self.name = name
        self.device = device
        self.scaler = torch.amp.GradScaler(device.type, enabled=name == "fp16")

    def autocast(self) -> AbstractContextManager[Any]:
        """Context for the forward pass."""
        if self.name == "fp32":
            return nullcontext()
        # The cache would keep casts of weights alive across the optimiser step of a captured graph; it gains nothing
        # here, because each weight is used once in a forward pass.
        return torch.autocast(self.device.type, DTYPES[self.name], cache_enabled=False)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of `loss` (scalar), scaled in fp16, to the parameters' .grad."""
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def step(self, optimizer: torch.optim.Optimizer, clip: float) -> tuple[Tensor, bool]:
        """Take one optimiser step, or refuse it when the gradient is not finite.

        Returns the gradient's norm before clipping (0-d tensor, on the device) and whether the step was taken. Reading
        that one bool is the loop's only wait for the device between logs.
        """
        self.scaler.unscale_(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        accepted = bool(norm.isfinite())
        if accepted:
            if clip > 0:
                torch.nn.utils.clip_grads_with_norm_(parameters, clip, norm)
            self.scaler.step(optimizer)
        self.scaler.update()
        return norm, accepted


def native_precision(device: torch.device) -> PrecisionName:
    """What an accelerator is made for: bf16 where the hardware has it, fp16 on older CUDA cards, else fp32."""
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    return "fp32"
