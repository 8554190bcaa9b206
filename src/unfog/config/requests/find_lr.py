"""Request of `unfog find-lr`: images and settings to find a learning rate for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from unfog.config.requests.train import TrainingRequest
from unfog.settings import setting


@dataclass(frozen=True)
class FindLrRequest(TrainingRequest):
    """Find a learning rate for SOURCE, network and batch by a short test on a throwaway copy. No run is changed.

      unfog find-lr photos/ --size 64

    Give the rate that it finds to `unfog train` as --lr.
    """

    out: Path | None = setting(None, metavar="PATH")
    """New folder for the plot and lr-range.json. Default: find-lr/ and the name of SOURCE."""
    seconds: float = 90.0
    """Total time of the command in seconds, without the first reading of the images. A large network needs more."""
