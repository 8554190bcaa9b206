"""Tells a run that diverges from the ordinary jumps of a training loss, and how often it has had to go back."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

_HISTORY = 64
"""Ordinary steps that make up what is usual."""
_MIN_HISTORY = 4
"""Fewer than this say nothing yet."""
_MAX_RELATIVE_LOSS = 2.0
"""Relative loss that is above the bound in any case. Answering nothing has an expected one of 1 at most."""

# Fields that state.json holds under other keys, as written by version 1.
_KEYS = {"anomalous": "strange", "skipped": "refused", "rollback_images": "anchor"}


@dataclass
class DivergenceGuard:
    """Watches the relative loss of each step: its loss over the loss of answering 0 at the same noise levels.

    The ratio means the same for every objective, and stays near 1 or below unless the network is worse than none. A
    step is out of bounds beyond half as much again as the median of the recent ones and beyond ten of their deviations
    (by the median absolute deviation, which outliers do not move). One such step is chance; many in a row are a
    divergence.
    """

    recent: list[float] = field(default_factory=list)
    """Relative losses of the last ordinary steps, newest last."""
    anomalous: int = 0
    """Steps in a row, up to now, that were refused or out of bounds."""
    skipped: int = 0
    """Steps in a row, up to now, that were refused."""
    ordinary: int = 0
    """Ordinary steps since the last roll-back, or since the start."""
    rollback_images: int = 0
    """Images that the state of the last roll-back had seen."""
    roll_backs: int = 0
    """How often this run has gone back to its last good weights."""

    @property
    def lr_scale(self) -> float:
        """What the learning rate is multiplied by: halved by each roll-back."""
        return float(0.5**self.roll_backs)

    def threshold(self) -> float:
        """Relative loss up to which a step is ordinary."""
        if len(self.recent) < _MIN_HISTORY:
            return _MAX_RELATIVE_LOSS
        middle = median(self.recent)
        deviation = 1.4826 * median(abs(value - middle) for value in self.recent)
        return min(_MAX_RELATIVE_LOSS, max(1.5 * middle, middle + 10 * deviation))

    def update(self, relative: float) -> bool:
        """Count a step by its relative loss, NaN if it was refused. True if it was an ordinary one."""
        self.skipped = self.skipped + 1 if math.isnan(relative) else 0
        if not relative <= self.threshold():
            self.anomalous += 1
            return False
        self.anomalous = 0
        self.ordinary += 1
        self.recent = [*self.recent[1 - _HISTORY :], relative]
        return True

    def record_roll_back(self, saved: dict[str, Any], images: int) -> None:
        """Note a roll-back to a state that was saved when all was well, after so many images."""
        self.recent, self.anomalous, self.skipped, self.ordinary = list(saved["recent"]), 0, 0, 0
        self.rollback_images = images
        self.roll_backs += 1

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON, which keeps every bit of a float."""
        return {_KEYS.get(name, name): value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> DivergenceGuard:
        """What `to_dict` gave. ValueError or TypeError for anything else."""
        names = {key: name for name, key in _KEYS.items()}
        guard = cls(**{names.get(key, key): value for key, value in saved.items()})
        if not all(math.isfinite(value) for value in guard.recent):
            raise ValueError("a relative loss is not finite")
        return guard
