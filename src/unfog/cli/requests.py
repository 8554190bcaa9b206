"""What each command takes, as a dataclass: its fields are the flags, its docstrings the help text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional

from unfog.config.tree import Config
from unfog.data.settings import Data
from unfog.errors import RequestError


@dataclass(frozen=True)
class Training:
    """What says how to train on something."""

    folder: Annotated[Positional[str], tyro.conf.arg(metavar="SOURCE")]
    """Folder, zip, tar shards, pack, NumPy file or Hugging Face dataset of images, or a built-in set."""
    settings: Annotated[Config, tyro.conf.arg(name="")]
    preset: str = "default"
    """Recipe to start from: default, ddpm or demo."""
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
class Sample:
    """Draw pictures from RUN: numbered PNGs and grid.png. Needs no flag: the run knows its model, sampler and classes.

    Picture number i of a seed is the same picture whatever -n is.
    """

    run: Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of the run."""
    n: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 16
    """How many pictures."""
    out: Path | None = None
    """Folder for them. Left open: a new one in the run folder."""
    seed: int = 0
    """Another seed gives other pictures."""
    steps: int | None = None
    """Steps of the sampler; more is slower and closer to the model. Left open: as the run is set."""
    sampler: Literal["ddpm", "ddim", "heun", "dpmpp"] | None = None
    """Left open: as the run is set."""
    label: tuple[str, ...] = ()
    """Classes by name or number; pictures cycle through them. Left open: all classes."""
    guidance: float | None = None
    """Classifier-free guidance: above 1, pictures keep closer to their class. Left open: as the run is set."""
    weights: Literal["ema", "raw"] = "ema"
    """The average of the weights, or the last ones as they are."""
    checkpoint: int | None = None
    """Step of the checkpoint. Left open: the newest whole one."""
    best: bool = False
    """The checkpoint with the lowest held-out loss instead, of those that were kept."""
    batch: int = 64
    """Pictures drawn at once; lower it when memory is short."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1 or mps."""
    strip: bool = False
    """Also strip.png: x_t and the predicted x0 of the first picture, from noise to picture."""

    def __post_init__(self) -> None:
        if self.best and self.checkpoint is not None:
            raise RequestError(f"--best and --checkpoint {self.checkpoint} both name a checkpoint; give one of them")
        for name, value, least in (("n", self.n, 1), ("batch", self.batch, 1), ("checkpoint", self.checkpoint or 0, 0)):
            if value < least:
                raise RequestError(f"{name} = {value} must be at least {least}")


@dataclass(frozen=True)
class Report:
    """Write report.html of RUN: one file with settings, curves and pictures that opens anywhere."""

    run: Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of the run."""


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

    Exit status 2 where it does not fit.
    """

    other: Annotated[str, tyro.conf.arg(name="for", metavar="DEVICE")] = ""
    """Another machine than this one, by its device: h200, h100, a100, 4090, 3090, v100, t4, ..."""
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
