"""Request of `unfog plan`: images, settings and device to predict a run for."""

from __future__ import annotations

from dataclasses import dataclass

from unfog.config.requests.train import TrainingRequest
from unfog.settings import setting


@dataclass(frozen=True)
class PlanRequest(TrainingRequest):
    """Predict memory, time and disk space of training on SOURCE, on this machine or another.

      unfog plan photos/ --size 128 --batch 64 --steps 100000
      unfog plan photos/ --size 128 --batch 64 --steps 100000 --for h200
      unfog plan photos/ --network base --steps 9000 --training.shard --processes 8

    The exit status is 2 if it does not fit.
    """

    device: str = setting("", flag="for", metavar="DEVICE")
    """Plan for this device instead of the one at hand: h200, h100, a100, 4090, 3090, v100, t4, ..."""
    processes: int = 1
    """Number of processes, as torchrun starts them, each with its own device. The figures are those of one process."""
    json: bool = False
    """Print JSON."""
