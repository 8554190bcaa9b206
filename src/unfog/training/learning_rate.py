"""Default learning rate, from the network, its number of parameters, the batch and the optimiser. Imports no torch."""

from __future__ import annotations

import math
from typing import ClassVar, Protocol

from unfog.training.settings import Muon, OptimizerKind

# Batch size at which the networks' `reference_lr` was measured.
REFERENCE_BATCH = 64
# Factor on the default learning rate when training starts from trained weights: more would undo what they know.
FINE_TUNING_FACTOR = 0.3


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
