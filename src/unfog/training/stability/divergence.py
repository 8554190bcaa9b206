"""Detection of divergence, as distinct from the ordinary jumps of a training loss."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

_HISTORY = 64  # ordinary steps whose losses the threshold follows
_MIN_HISTORY = 4  # fewer losses than this say nothing yet
_MAX_RELATIVE_LOSS = 2.0  # the expected relative loss of a network that answers 0 is at most 1

# Fields that state.json holds under other keys.
_KEYS = {"anomalous": "strange", "skipped": "refused", "rollback_images": "anchor"}


@dataclass
class DivergenceGuard:
    """Watches the relative loss of each step: its loss over the null loss, that of answering 0 at equal noise levels.

    The ratio means the same for every objective, and stays near 1 or below unless the network is worse than none. A
    step is anomalous beyond 1.5 times the median of the recent steps and beyond ten median absolute deviations, which
    outliers do not move. One such step is chance; many in a row are a divergence.
    """

    recent: list[float] = field(default_factory=list)
    """Relative losses of the last ordinary steps, newest last."""
    anomalous: int = 0
    """Steps in a row, up to now, that were skipped or beyond the threshold."""
    skipped: int = 0
    """Steps in a row, up to now, that were skipped."""
    ordinary: int = 0
    """Ordinary steps since the last roll-back, or since the start."""
    rollback_images: int = 0
    """Images that the checkpoint of the last roll-back had seen."""
    roll_backs: int = 0

    @property
    def lr_scale(self) -> float:
        """Factor on the learning rate: halved by each roll-back."""
        return float(0.5**self.roll_backs)

    def threshold(self) -> float:
        """Return the relative loss up to which a step is ordinary."""
        # The median and the deviation of two or three losses are chance.
        if len(self.recent) < _MIN_HISTORY:
            return _MAX_RELATIVE_LOSS
        middle = median(self.recent)
        # 1.4826 makes the median absolute deviation of a normal distribution its standard deviation.
        deviation = 1.4826 * median(abs(value - middle) for value in self.recent)
        return min(_MAX_RELATIVE_LOSS, max(1.5 * middle, middle + 10 * deviation))

    def update(self, relative: float) -> bool:
        """Count a step by its relative loss, NaN if it was skipped. Returns whether it was ordinary."""
        self.skipped = self.skipped + 1 if math.isnan(relative) else 0
        if not relative <= self.threshold():  # not `>`, which is false of NaN
            self.anomalous += 1
            return False
        self.anomalous = 0
        self.ordinary += 1
        # Only ordinary steps, or a run that diverges slowly would raise its own threshold.
        self.recent = [*self.recent[1 - _HISTORY :], relative]
        return True

    def record_roll_back(self, saved: dict[str, Any], images: int) -> None:
        """Count a roll-back to a checkpoint with the state `saved`, which had seen so many images."""
        # Losses of before the divergence, as those since would raise the threshold.
        self.recent, self.anomalous, self.skipped, self.ordinary = list(saved["recent"]), 0, 0, 0
        self.rollback_images = images
        self.roll_backs += 1

    def state_dict(self) -> dict[str, Any]:
        """Return plain values; JSON keeps every bit of a float."""
        return {_KEYS.get(name, name): value for name, value in asdict(self).items()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore the values of `state_dict`. Raises ValueError, TypeError or KeyError for anything else."""
        # Checked before anything is assigned, so that a damaged state leaves the guard as it was.
        values = {name: saved[_KEYS.get(name, name)] for name in asdict(self)}
        values["recent"] = list(values["recent"])
        if not all(math.isfinite(value) for value in values["recent"]):
            raise ValueError("a relative loss is not finite")
        vars(self).update(values)
