"""The learning rate: its default by network and batch, and its warm-up and schedule over a run. Imports no torch."""

from __future__ import annotations

import math
from typing import ClassVar, Protocol

from unfog.training.settings import Muon, Optimizer, OptimizerKind

REFERENCE_BATCH = 64
"""Batch size at which the networks' `reference_lr` was measured."""
FINE_TUNING_FACTOR = 0.3
"""Factor on the default learning rate when training starts from trained weights: more would undo what they know."""


class _NetworkTraits(Protocol):
    """Settings of a network that its default learning rate depends on."""

    reference_lr: ClassVar[float]
    """Learning rate of AdamW for a million parameters at `REFERENCE_BATCH`."""
    lr_exponent: ClassVar[float]
    """The learning rate falls as the number of parameters to the power of minus this."""
    muon_lr_factor: ClassVar[float]
    """Learning rate of Muon over that of AdamW."""


def default_learning_rate(
    parameters: int,
    batch: int,
    network: _NetworkTraits,
    optimizer: OptimizerKind | None = None,
    fine_tuning: bool = False,
) -> float:
    """Return the peak learning rate that is used if none is given.

    It grows as the square root of the batch and falls as a power of the number of parameters. That power is 1/2 for
    most networks. Magnitude-preserving weights have the same length in every size, so theirs is 1/4, which goes
    through what Karras et al. (2024, table 6) use from 125M to 1.5B parameters.
    """
    # Not measured below a million parameters, where the rule would give rates that diverge.
    millions = max(parameters / 1e6, 1)
    reference = network.reference_lr * (network.muon_lr_factor if isinstance(optimizer, Muon) else 1.0)
    rate = reference * math.sqrt(batch / REFERENCE_BATCH) / math.pow(millions, network.lr_exponent)
    return (FINE_TUNING_FACTOR if fine_tuning else 1.0) * rate


def learning_rate(settings: Optimizer, step: int, steps: int) -> float:
    """Return the learning rate of step `step` (0, 1, …) of `steps`: a function of position, with no state to resume."""
    warmup = max(settings.warmup, 1)
    if step < warmup:
        return settings.lr * (step + 1) / warmup  # a first step at 0 would be wasted
    if settings.schedule == "cosine":
        return settings.lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(steps - warmup, 1)))
    if settings.schedule == "inverse-sqrt":
        return settings.lr * math.sqrt(warmup / (step + 1))
    if settings.schedule == "cooldown":
        # 1 - sqrt ends better than a line does, and a fifth of the run as well as a cosine (Haegele et al. 2024).
        length = max(1, min(round(settings.cooldown * steps), steps - warmup))
        return settings.lr * (1 - math.sqrt(max(0, step - (steps - length)) / length))
    return settings.lr
