"""Which optimiser moves the weights: settings only, nothing heavy is imported. `optim` builds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from unfog.errors import RequestError


@dataclass(frozen=True)
class AdamW:
    """AdamW (Loshchilov and Hutter 2019) for every weight, with the betas, eps and decay of the section."""

    kind: ClassVar[str] = "adamw"

    @property
    def identity(self) -> str:
        """What its moments can be gone on with by."""
        return self.kind


@dataclass(frozen=True)
class Muon:
    """Muon (Jordan et al. 2024) for matrices and convolutions, AdamW for embeddings, norms, biases and both ends.

    Every matrix moves by its momentum with all singular values made about one, times 0.2 sqrt(its longer side), which
    is as far as AdamW would move it (Liu et al. 2025, "Muon is Scalable"), so that one learning rate serves both.
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
        """What its moments can be gone on with by."""
        return self.kind


@dataclass(frozen=True)
class Custom:
    """Any torch optimiser by its dotted path. Naming one runs its code: it is imported when the run begins.

    It is called with the parameters, `lr`, and the arguments; its moments are saved and restored like AdamW's.
    """

    kind: ClassVar[str] = "custom"
    path: str = ""
    """Such as torch.optim.RMSprop: a module that can be imported, a dot, and a class in it."""
    arguments: tuple[str, ...] = ()
    """Its keyword arguments, such as alpha=0.9/momentum=0.9; values as Python writes them."""

    @property
    def identity(self) -> str:
        """What its moments can be gone on with by: what it remembers may depend on any of its arguments."""
        return f"{self.kind}:{self.path}({', '.join(sorted(self.arguments))})"


OptimizerKind = AdamW | Muon | Custom
OPTIMIZERS = (AdamW, Muon, Custom)
