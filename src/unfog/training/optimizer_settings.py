"""Settings of the optimiser, the learning rate over a run, and the default one. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from unfog.custom import CustomPart
from unfog.errors import RequestError
from unfog.settings import check_bounds, setting


@dataclass(frozen=True)
class AdamW:
    """AdamW (Loshchilov and Hutter 2019) for every weight, with the betas, eps and decay of the section."""

    kind: ClassVar[str] = "adamw"


@dataclass(frozen=True)
class Muon:
    """Muon (Jordan et al. 2024) for matrices and convolutions; AdamW for embeddings, norms, biases and both ends.

    The update of a matrix is its orthogonalised momentum times 0.2 sqrt(longer side). That is as long as an update of
    AdamW (Liu et al. 2025, "Muon is Scalable"), so that one learning rate serves both.
    """

    kind: ClassVar[str] = "muon"
    momentum: float = 0.95
    """Decay of the running mean of the gradient; Nesterov's."""
    rounds: int = setting(5, at_least=1, at_most=20, usual="5")
    """Newton-Schulz iterations; each costs time, and 5 bring singular values to about 0.7 to 1.2."""

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise RequestError(f"momentum = {self.momentum} must be from 0 up to, not including, 1; 0.95 is usual")
        check_bounds(self)


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


@dataclass(frozen=True)
class Optimizer:
    """Optimiser, and its learning rate over the run."""

    lr: float = setting(
        0.0,
        short="lr",
        at_least=0,
        usual="1e-4 to 3e-3, or 0 to choose it,",
        common=True,
        why="0.003 suits a million parameters at batch 64; it follows the square roots of batch and 1 / parameters",
        measured="Fréchet distance on Fashion-MNIST, AdamW: 29.0 with 0.001, 16.5 with 0.003, 17.8 with 0.006",
        see="docs/decisions/0007-default-recipe.md",
    )
    """Peak learning rate. 0: by size: 0.006 with Muon, 0.003 with AdamW for a U-Net of 1M, batch 64."""
    warmup: int = setting(0, at_least=0)
    """Steps of linear rise to the peak; the first step is not zero. 0: 5% of the run, at most 5000 steps."""
    schedule: Literal["constant", "cosine", "inverse-sqrt", "cooldown"] = "constant"
    """After warm-up: cosine to zero; constant, with no end yet; cooldown, which ends a constant one; or 1/sqrt."""
    cooldown: float = setting(0.2, above=0, at_most=1, usual="0.2", added_later=True)
    """Share of the run, at its end, in which the schedule `cooldown` falls to zero."""
    method: OptimizerKind = setting(
        AdamW(),
        short="optimizer",
        added_later=True,
        why="Muon reaches AdamW's last loss after 40 to 50% of its images",
        measured="CIFAR-10, six minutes of one core: KID 0.0625 with Muon, 0.0901 with AdamW",
        paper="Jordan et al. 2024 (Muon); Liu et al. 2025 (its scale); Loshchilov and Hutter 2019 (AdamW)",
        see="docs/decisions/0007-default-recipe.md",
    )
    """adamw, muon, or custom:path=torch.optim.RMSprop, which runs the code that is named."""
    betas: tuple[float, float] = setting((0.9, 0.999), at_least=0, below=1, usual="0.9 0.999")
    """Decay of AdamW's running mean and running square of the gradient."""
    eps: float = setting(1e-8, above=0, usual="1e-8")
    """AdamW's guard against division by zero."""
    weight_decay: float = setting(0.01, at_least=0)
    """Decoupled weight decay, of AdamW and Muon."""

    def __post_init__(self) -> None:
        check_bounds(self)

    def learning_rate(self, step: float, steps: int, warmed: float | None = None) -> float:
        """Return the learning rate of step `step` (0, 1, …) of `steps`: a function of position alone.

        A run whose length was planned anew gives its position in the schedule instead of the step, and how far its
        warm-up has come as `warmed`; see `training.length.Length`.
        """
        warmup = max(self.warmup, 1)
        warmed = step if warmed is None else warmed
        if warmed >= warmup:
            return self._after_warmup(warmup, step, steps)
        lr = self.lr * min(warmed + 1, warmup) / warmup  # a first step at 0 would be wasted
        # A run that was shortened may have to cool down before it is warm.
        return lr if step < warmup else min(lr, self._after_warmup(warmup, step, steps))

    def _after_warmup(self, warmup: int, step: float, steps: int) -> float:
        if self.schedule == "cosine":
            return self.lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(steps - warmup, 1)))
        if self.schedule == "inverse-sqrt":
            return self.lr * math.sqrt(warmup / (step + 1))
        if self.schedule == "cooldown":
            # 1 - sqrt ends better than a line does, and a fifth of the run as well as a cosine (Haegele et al. 2024).
            length = max(1, min(round(self.cooldown * steps), steps - warmup))
            return self.lr * (1 - math.sqrt(max(0, step - (steps - length)) / length))
        return self.lr


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
