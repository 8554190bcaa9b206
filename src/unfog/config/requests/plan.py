"""Requests of `unfog plan` and `find-lr`: images and settings of a run that has not begun."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from unfog.config.requests.train import OF_THE_TRAINING, TrainingRequest
from unfog.settings import setting


@dataclass(frozen=True)
class PlanRequest(TrainingRequest):
    """Predict memory, time and disk space of training on SOURCE, on this machine or another.

      unfog plan photos/ --size 128 --batch 64 --steps 100000
      unfog plan photos/ --size 128 --batch 64 --steps 100000 --for h200
      unfog plan photos/ --network base --steps 9000 --training.shard --processes 8

    The exit status is 2 if it does not fit.
    """

    meanings = OF_THE_TRAINING
    device: str = setting("", flag="for", metavar="DEVICE")
    """Plan for this device instead of the one at hand: h200, h100, a100, 4090, 3090, v100, t4, ..."""
    processes: int = 1
    """Number of processes, as torchrun starts them, each with its own device. The figures are those of one process."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class FindLrRequest(TrainingRequest):
    """Find a learning rate for SOURCE, network and batch by a short test on a throwaway copy. No run is changed.

      unfog find-lr photos/ --size 64

    Give the rate that it finds to `unfog train` as --lr.
    """

    meanings: ClassVar[Mapping[str, str]] = {
        "training.budget": "Time of the training that the rate is for, as 10m or 2h; --seconds is that of the test.",
        "training.steps": "Optimiser steps of the training that the rate is for; the test chooses its own.",
    }
    out: Path | None = setting(None, metavar="PATH")
    """New folder for the plot and lr-range.json. Default: find-lr/ and the name of SOURCE."""
    seconds: float = 90.0
    """Time of this test in seconds, without the first reading of the images. A large network needs more."""
