"""Request of `unfog doctor`: images and settings, a run, or the GPU to check."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from unfog.config.requests.train import OF_THE_TRAINING, TrainingRequest
from unfog.config.schema import Config
from unfog.settings import argument, setting


@dataclass(frozen=True)
class DoctorRequest(TrainingRequest):
    """Check SOURCE and settings before training, RUN for what went wrong, or the GPU.

    Reads every image once, tries every part of a run, and reports findings with a remedy.

      unfog doctor photos/ --size 64 --budget 2h    before a run
      unfog doctor runs/photos                      during or after it
      unfog doctor --gpu                            a minute, without images

    The exit status is 2 if training makes no sense. A run has its own settings.
    """

    meanings = OF_THE_TRAINING
    source: str = field(default="", metadata=argument("SOURCE|RUN"))
    """Images, as for train; or the folder of a run."""
    settings: Config = Config()
    out: Path | None = setting(None, metavar="PATH")
    """New folder for report.html and findings.json. Default: doctor/ and the name of SOURCE or RUN."""
    quick: bool = False
    """Skip the slow checks: the dry run, the overfit test, and samples of a run."""
    gpu: bool = False
    """Check the GPU instead of images: arithmetic, copies, training steps."""
