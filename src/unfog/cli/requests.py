"""What the commands about training take, as dataclasses: their fields are the flags, their docstrings the help text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional

from unfog.commands.slurm import Job
from unfog.config.autoencoder_recipe import AutoencoderRunSettings
from unfog.config.schema import Config
from unfog.data.settings import Data


@dataclass(frozen=True)
class Training:
    """What says how to train on something."""

    folder: Annotated[Positional[str], tyro.conf.arg(metavar="SOURCE")]
    """Folder, zip, tar shards, pack, NumPy file or Hugging Face dataset of images, or a built-in set."""
    settings: Annotated[Config, tyro.conf.arg(name="")]
    preset: str = "default"
    """Recipe to start from: default, ddpm, edm or demo."""
    config: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """TOML file of settings, such as the config.toml of another run."""


@dataclass(frozen=True)
class Train(Training):
    """Train on SOURCE: a folder of images (any nesting; sub-folders become classes), or the built-in set `fashion`.

    An hour, with everything chosen for you: unfog train photos/

    Ten minutes at 64x64: unfog train photos/ --size 64 --budget 10m

    The textbook recipe: unfog train photos/ --preset ddpm --steps 20000

    Settings are taken from the preset, then from --config, then from the flags below.
    """

    out: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """Folder of the run; must be new. Left open: runs/ and the name of SOURCE."""


@dataclass(frozen=True)
class TrainCodec:
    """Train a codec on SOURCE: an autoencoder that makes images small, so that large ones can be learned quickly.

    unfog train-autoencoder photos/ --size 256 --factor 8 --budget 30m

    then: unfog train photos/ --autoencoder runs/photos-autoencoder

    It is a run like any other: `unfog resume` goes on with it, `unfog report` shows it.
    """

    folder: Annotated[Positional[str], tyro.conf.arg(metavar="SOURCE")]
    """Images, as for train."""
    settings: Annotated[AutoencoderRunSettings, tyro.conf.arg(name="")]
    config: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """TOML file of settings, such as the config.toml of another codec."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """Folder of the codec; must be new. Left open: runs/ and the name of SOURCE, and -autoencoder."""
    factor: int = 4
    """Pixels across one of the latents: 2, 4, 8 or 16. 4 suits 64 and 128 pixels, 8 suits 256."""
    channels: int = 4
    """Numbers at each place of a latent; 8 keep more, and take longer to learn to draw."""
    width: str = "small"
    """Size of the codec: tiny, small or base."""
    kl: float = 1e-3
    """Weight of the latents' divergence from a standard normal."""
    pyramid: float = 1.0
    """Weight of the error in edges and textures, beside that of pixels."""


@dataclass(frozen=True)
class Resume:
    """Go on with RUN from its newest whole checkpoint; it ends as if it had never stopped.

    Settings may be given to change them from here on (--steps to go on for longer, --lr, intervals); what a run cannot
    change, such as its network, is refused, and what would make it another run, such as its images, needs --force.
    """

    run: Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of the run."""
    settings: Annotated[Config, tyro.conf.arg(name="")]
    source: Annotated[str | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Where the images are now, if they were moved."""
    force: bool = False
    """Also change what makes it another run from here on: images, seed, weighting, EMA, background, held-out share."""
    verify: bool = False
    """Do not go on: train from the checkpoint before the newest one once more, and compare with that to the bit."""


@dataclass(frozen=True)
class Doctor(Training):
    """Examine SOURCE and settings before training on it; or RUN, to see what went well or wrong.

    Reads every image once, tries out all that a run will do, and says what it found, what that means and what to do.

    Before a run: unfog doctor photos/ --size 64 --budget 2h

    During or after it: unfog doctor runs/photos

    Exit status 2 where training makes no sense. Settings are for SOURCE; a run has its own.
    """

    folder: Annotated[Positional[str], tyro.conf.arg(metavar="SOURCE|RUN")]
    """Images, as for train; or the folder of a run."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """Folder for report.html and findings.json; must be new. Left open: doctor/ and the name of SOURCE or RUN."""
    quick: bool = False
    """Leave out what takes longest: the dry run, the overfit test, and for a run drawing pictures of it."""


@dataclass(frozen=True)
class Plan(Training):
    """Predict what training on SOURCE will take, before it is begun: memory by part, time, disk, on this machine.

    unfog plan photos/ --size 128 --batch 64 --steps 100000

    unfog plan photos/ --size 128 --batch 64 --steps 100000 --for h200

    unfog plan photos/ --network dit-base --batch 256 --steps 100000 --training.shard --processes 8 --for h100

    Exit status 2 where it does not fit.
    """

    other: Annotated[str, tyro.conf.arg(name="for", metavar="DEVICE")] = ""
    """Another machine than this one, by its device: h200, h100, a100, 4090, 3090, v100, t4, ..."""
    processes: int = 1
    """Train on so many, as torchrun would start them, each with a device of its own; what one of them takes is told."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class FindLr(Training):
    """Find a learning rate for SOURCE, model and batch, by a test on a throwaway copy; no run is touched by it.

    unfog find-lr photos/ --size 64
    """

    out: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """Folder for the plot and lr-range.json; must be new. Left open: find-lr/ and the name of SOURCE."""
    seconds: float = 90.0
    """About how long it may train; a large network needs more for an answer."""


@dataclass(frozen=True)
class Pack:
    """Decode and resize SOURCE once into OUT, from where training reads it at the speed of memory.

    Started again after an interruption, it goes on where it was.

    unfog pack photos/ photos.pack --size 64        then: unfog train photos.pack
    """

    folder: Annotated[Positional[str], tyro.conf.arg(metavar="SOURCE")]
    """Images, as for train."""
    target: Annotated[Positional[Path], tyro.conf.arg(metavar="OUT")]
    """Folder of the pack; must be new, or an unfinished pack of the same."""
    data: Data = Data()


@dataclass(frozen=True)
class Slurm(Job):
    """Write a batch file that trains on a Slurm cluster; what follows -- is the command, checked as if it were given.

    unfog slurm --nodes 2 --gpus-per-node 8 --time 12:00:00 -- train /data/photos --out /shared/photos --batch 1024

    The job saves before its time is up and goes back into the queue, until the run is finished. Other options of sbatch
    may be given to sbatch, or be written into the file.
    """

    file: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """The batch file; must be new. Left open: the name of the run, and .sbatch."""
