"""The interface of trackers, which get a copy of the record of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unfog.reporting.image_grids import Pixels


class Tracker:
    """Base class of trackers. A subclass overrides those methods that its tracker has something for.

    It is made when a run begins or resumes, in the process of rank 0, and closed when that process ends. The step
    never decreases while it lives. Any method may raise any Exception.
    """

    name = "tracker"
    """The tracker in messages."""
    again = ""
    """What the tracker does with steps that a resume takes again, such as "has both records of each"; "" if nothing is
    to be said of them, as it replaces them."""

    def __init__(self, run_dir: Path, start: int, config: Mapping[str, object]) -> None:
        """Open the tracker for a run that goes on after `start` steps. `config`: its settings, without secrets."""

    def log_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Log numbers by name; loss_by_level/0 is the first of a list. A value that was not measured is NaN."""

    def log_histogram(self, step: int, name: str, values: Sequence[float]) -> None:
        """Log bars: a value for each of equal parts of the noise levels, clean to noisy; 0 if none was measured."""

    def log_image(self, step: int, name: str, pixels: Pixels) -> None:
        """Log an image, uint8 [H, W, 3], such as the grid of a preview."""

    def close(self) -> None:
        """Write pending values. Not called when the process is killed."""
