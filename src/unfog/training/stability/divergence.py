"""Tells a run that diverges from the ordinary jumps of a training loss, and how often it has had to go back."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

HISTORY = 64
"""Ordinary steps that make up what is usual."""
ENOUGH = 4
"""Fewer than this say nothing yet."""
HOPELESS = 2.0
"""Relative loss that is above the bound in any case. Answering nothing has an expected one of 1 at most."""


@dataclass
class Guard:
    """Watches the relative loss of each step: its loss over the loss of answering 0 at the same noise levels.

    The ratio means the same for every objective, and stays near 1 or below unless the network is worse than none. A
    step is out of bounds beyond half as much again as the median of the recent ones and beyond ten of their deviations
    (by the median absolute deviation, which outliers do not move). One such step is chance; many in a row are a
    divergence.
    """

    recent: list[float] = field(default_factory=list)
    """Relative losses of the last ordinary steps, newest last."""
    strange: int = 0
    """Steps in a row, up to now, that were refused or out of bounds."""
    refused: int = 0
    """Steps in a row, up to now, that were refused."""
    ordinary: int = 0
    """Ordinary steps since the last roll-back, or since the start."""
    anchor: int = 0
    """Images that the state of the last roll-back had seen."""
    roll_backs: int = 0
    """How often this run has gone back to its last good weights."""

    @property
    def lr_scale(self) -> float:
        """What the learning rate is multiplied by: halved by each roll-back."""
        return float(0.5**self.roll_backs)

    def bound(self) -> float:
        """Relative loss up to which a step is ordinary."""
        if len(self.recent) < ENOUGH:
            return HOPELESS
        middle = median(self.recent)
        deviation = 1.4826 * median(abs(value - middle) for value in self.recent)
        return min(HOPELESS, max(1.5 * middle, middle + 10 * deviation))

    def judge(self, relative: float) -> bool:
        """Count a step by its relative loss, NaN if it was refused. True if it was an ordinary one."""
        self.refused = self.refused + 1 if math.isnan(relative) else 0
        if not relative <= self.bound():
            self.strange += 1
            return False
        self.strange = 0
        self.ordinary += 1
        self.recent = [*self.recent[1 - HISTORY :], relative]
        return True

    def went_back(self, saved: dict[str, Any], images: int) -> None:
        """Note a roll-back to a state that was saved when all was well, after so many images."""
        self.recent, self.strange, self.refused, self.ordinary = list(saved["recent"]), 0, 0, 0
        self.anchor = images
        self.roll_backs += 1

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON, which keeps every bit of a float."""
        return asdict(self)

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Guard:
        """What `to_dict` gave. ValueError or TypeError for anything else."""
        guard = cls(**saved)
        if not all(math.isfinite(value) for value in guard.recent):
            raise ValueError("a relative loss is not finite")
        return guard
