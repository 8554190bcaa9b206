"""Settings of the optimisers, and the default learning rate. Imports nothing heavy; `optimizers` builds them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

from unfog.custom import CustomPart
from unfog.errors import RequestError

REFERENCE_BATCH = 64
"""Batch size at which the networks' `reference_lr` was measured."""
FINE_TUNING_FACTOR = 0.3
"""Factor on the default learning rate when training starts from trained weights: more would undo what they know."""


@dataclass(frozen=True)
class AdamW:
    """AdamW (Loshchilov and Hutter 2019) for every weight, with the betas, eps and decay of the section."""

    kind: ClassVar[str] = "adamw"

    @property
    def identity(self) -> str:
        """Return the name under which a checkpoint stores the optimiser state; only an equal name can load it."""
        return self.kind


@dataclass(frozen=True)
class Muon:
    """Muon (Jordan et al. 2024) for matrices and convolutions; AdamW for embeddings, norms, biases and both ends.

    The update of a matrix is its orthogonalised momentum times 0.2 sqrt(longer side). That is as long as an update of
    AdamW (Liu et al. 2025, "Muon is Scalable"), so that one learning rate serves both.
    """

    kind: ClassVar[str] = "muon"
    momentum: float = 0.95
    """Decay of the running mean of the gradient; Nesterov's."""
    rounds: int = 5
    """Newton-Schulz iterations; each costs time, and 5 bring singular values to about 0.7 to 1.2."""

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise RequestError(f"momentum = {self.momentum} must be from 0 up to, not including, 1; 0.95 is usual")
        if not 1 <= self.rounds <= 20:
            raise RequestError(f"rounds = {self.rounds} must be from 1 to 20; 5 is usual")

    @property
    def identity(self) -> str:
        """Return the name under which a checkpoint stores the optimiser state; only an equal name can load it."""
        return self.kind


@dataclass(frozen=True)
class Custom(CustomPart):
    """Any torch optimiser by its dotted path. Naming one runs its code: it is imported when the run begins.

    It is called with the parameters, `lr`, and the arguments; its moments are saved and restored like AdamW's.
    """

    noun: ClassVar[str] = "an optimiser"

    @property
    def identity(self) -> str:
        """Return the name under which a checkpoint stores the optimiser state; only an equal name can load it."""
        # The state may depend on any of the arguments.
        return f"{self.kind}:{self.path}({', '.join(sorted(self.arguments))})"


OptimizerKind = AdamW | Muon | Custom
OPTIMIZERS = (AdamW, Muon, Custom)


class LearningRateTraits(Protocol):
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
    network: LearningRateTraits,
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
