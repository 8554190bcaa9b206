"""Request of `unfog tune`: the run and the number of steps to tune noise levels for."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from unfog.settings import argument


@dataclass(frozen=True)
class TuneRequest:
    """Find the best noise levels for sampling RUN in few steps, and make them the default of `unfog sample RUN`.

      unfog tune runs/photos --steps 10

    Moves the levels until few steps give the result of many steps from the same noise, then measures every grid on
    other noise. Takes minutes. The network does not change.
    """

    run: Path = field(metadata=argument("RUN"))
    """Folder of the run."""
    steps: int = 10
    """Sampling steps."""
    sampler: Literal["ddim", "heun", "dpmpp", "unipc"] | None = None
    """Sampler. Default: the run's, or dpmpp."""
    pictures: int = 32
    """Samples to compare."""
    tries: int = 150
    """Grids to try. More are better and take longer."""
    store: bool = True
    """Make the best grid the run's default. --no-store only reports it."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1 or mps."""
