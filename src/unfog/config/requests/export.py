"""Request of `unfog export`: the run, the new folder and its format."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from unfog.config.requests.sample import check_one_checkpoint
from unfog.config.spec_strings import quote
from unfog.diffusion.sampler import Kind
from unfog.errors import RequestError
from unfog.settings import argument

_ExportFormat = Literal["diffusers", "safetensors", "onnx", "pt2", "denoiser", "run"]


@dataclass(frozen=True)
class ExportSettings:
    """Settings of `unfog export` and of `Run.export`."""

    format: _ExportFormat = "safetensors"
    """diffusers: a pipeline folder; safetensors: weights, JSON and the network in plain torch; onnx, pt2: its graph;
    denoiser: D(x, sigma) in plain torch, for solvers of inverse problems; run: weights and settings for Unfog."""
    sampler: Kind | None = None
    """Sampler whose noise levels are stored. Default: the run's."""
    steps: int | None = None
    """Sampling steps. Default: the run's."""
    license: str = ""
    """Licence in the model card, by the Hub's identifier, such as cc-by-4.0. Default: left open."""
    push_to_hub: str = ""
    """Also upload OUT to this repository of the Hugging Face Hub, NAME or OWNER/NAME, which is private."""
    public: bool = False
    """With --push-to-hub: the repository may be public; a new one becomes public."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9][a-z0-9.-]{0,62}|", self.license):
            raise RequestError(
                f"license = {quote(self.license)} is not an identifier of the Hub, such as mit, cc-by-4.0 or other"
            )
        if self.public and not self.push_to_hub:
            raise RequestError("public needs a repository: give --push-to-hub NAME, or omit it")


@dataclass(frozen=True)
class ExportRequest(ExportSettings):
    """Write the network of RUN into a new folder OUT, for other programs or to hand on.

      unfog export runs/photos photos-diffusers --format diffusers
      unfog export runs/photos photos-onnx --format onnx --steps 10
      unfog export runs/photos photos-hub --format diffusers --push-to-hub me/photos
      unfog export runs/photos photos-small --format run    then: unfog sample photos-small

    The folder is loaded again and compared with the run. Its README.md shows how to load it.
    """

    run: Path = field(kw_only=True, metadata=argument("RUN"))
    """Folder of the run."""
    out: Path = field(kw_only=True, metadata=argument("OUT"))
    """New folder, written as a whole or not at all."""
    weights: Literal["ema", "raw"] = "ema"
    """EMA weights, or the raw weights of the last step."""
    ema: float | None = None
    """Width of an EMA to rebuild from snapshots, such as 0.07, at any --checkpoint. Default: the run's EMA."""
    checkpoint: int | None = None
    """Step of the checkpoint. Default: the newest whole one."""
    best: bool = False
    """Use the best checkpoint that was kept, by held-out loss or the run's evaluate.best."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_checkpoint(self.best, self.checkpoint)
