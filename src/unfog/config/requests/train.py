"""Requests of `unfog train`, `train-autoencoder` and `resume`, and the base of requests about training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from unfog.config.presets import AutoencoderRunSettings
from unfog.config.schema import Config
from unfog.settings import argument, setting


@dataclass(frozen=True)
class TrainingRequest:
    """Images, and the settings to train on them with."""

    meanings: ClassVar[Mapping[str, str]] = {}
    """Texts for `--help` of settings that mean something else in this command than in a training."""
    source: str = field(metadata=argument("SOURCE"))
    """Folder, zip, tar shards, pack, NumPy file or Hugging Face dataset of images, or a built-in set."""
    settings: Config
    preset: str = "default"
    """Recipe to start from: default, ddpm, edm or demo."""
    config: Path | None = setting(None, metavar="PATH")
    """TOML file of settings, such as the config.toml of another run."""


OF_THE_TRAINING = {
    "training.budget": "Time of the training that is planned: 90s, 10m or 2h.",
    "training.steps": "Optimiser steps of the training that is planned.",
}
"""`meanings` of a command that looks at a training before it begins."""


@dataclass(frozen=True)
class TrainRequest(TrainingRequest):
    """Train on SOURCE: a folder of images, or the built-in set `fashion`. Sub-folders become classes.

      unfog train photos/                              one hour, all settings chosen
      unfog train photos/ --size 64 --budget 10m       ten minutes at 64x64
      unfog train photos/ --preset ddpm --steps 20000  the textbook recipe

    The preset gives the settings. The file of --config changes them, and the flags below change both.
    """

    out: Path | None = setting(None, metavar="PATH")
    """New folder for the run. Default: runs/ and the name of SOURCE."""


@dataclass(frozen=True)
class TrainAutoencoderRequest:
    """Train an autoencoder on SOURCE. It compresses large images to small latents, on which training is faster.

      unfog train-autoencoder photos/ --size 256 --factor 8 --budget 30m
      unfog train photos/ --autoencoder runs/photos-autoencoder       afterwards

    The result is a run: `unfog resume` continues it, and `unfog report` shows it.
    """

    source: str = field(metadata=argument("SOURCE"))
    """Images, as for train."""
    settings: AutoencoderRunSettings
    config: Path | None = setting(None, metavar="PATH")
    """TOML file of settings, such as the config.toml of another autoencoder."""
    out: Path | None = setting(None, metavar="PATH")
    """New folder for the autoencoder. Default: runs/ and the name of SOURCE with -autoencoder."""
    factor: int = 4
    """Image pixels along the side of one latent: 2, 4, 8 or 16. 4 suits 64 and 128 pixels, 8 suits 256."""
    channels: int = 4
    """Latent channels. 8 keep more detail and take longer to train on."""
    width: str = "small"
    """Size of the autoencoder: tiny, small or base."""
    kl: float = 1e-3
    """Weight of the KL divergence of the latents from a standard normal."""
    pyramid: float = 1.0
    """Weight of the error in edges and textures, beside the pixel error."""
    suffix: str = setting("-autoencoder", hidden=True)
    """End of the name of the default folder."""


@dataclass(frozen=True)
class ResumeRequest:
    """Continue RUN from its newest whole checkpoint. The result equals that of a run without the interruption.

      unfog resume runs/photos                  up to the length that was asked for
      unfog resume runs/photos --steps 40000    longer

    Flags change settings from here on: --steps for a longer run, --lr, intervals. A setting that a run cannot change,
    such as its network, is refused. A change that makes it another run, such as other images, needs --force.
    """

    run: Path = field(metadata=argument("RUN"))
    """Folder of the run."""
    settings: Config
    source: str | None = setting(None, metavar="FOLDER")
    """New place of the images, if they were moved."""
    force: bool = False
    """Allow changes that make it another run: images, seed, weighting, loss, EMA, background, held-out share."""
    verify: bool = False
    """Do not continue. Train again from the second newest checkpoint, and compare with the newest one bit by bit."""
