"""In-place updates masked by a device tensor, without host synchronisation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def lerp_unless(skip: Tensor, tensors: Sequence[Tensor], ends: Sequence[Tensor], weight: float | Tensor) -> None:
    """Move `tensors` towards `ends` by a share `weight` of the way, in place; change no bit if `skip` is 1.

    As `torch._foreach_lerp_`, up to rounding. `skip` is float32, 0 or 1, and so is a `weight` on the device, both 0-d.
    """
    # Gradient ascent whose gradient is `ends` less `tensors`, by weight decay. It is torch's only fused kernel for
    # this that takes both its weight and its mask from the device; a product with 0 would let NaN through.
    torch._fused_sgd_(
        list(tensors),
        list(ends),
        [],
        weight_decay=1.0,
        momentum=0.0,
        lr=weight,
        dampening=0.0,
        nesterov=False,
        maximize=True,
        is_first_step=False,
        found_inf=skip,
    )
