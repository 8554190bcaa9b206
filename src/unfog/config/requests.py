"""One dataclass for each command that trains or prepares training: for the command line, Python and the command.

Field names are the flags. The strings under them are the text of --help, and indented lines its examples.
`run_requests` has those about a run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from unfog.config.presets import AutoencoderRunSettings
from unfog.config.schema import Config
from unfog.config.values import quote
from unfog.data.settings import Data
from unfog.errors import RequestError
from unfog.settings import argument, setting
from unfog.values.image_format import Size


@dataclass(frozen=True)
class _TrainingRequest:
    """Images, and the settings to train on them with."""

    source: str = field(metadata=argument("SOURCE"))
    """Folder, zip, tar shards, pack, NumPy file or Hugging Face dataset of images, or a built-in set."""
    settings: Config
    preset: str = "default"
    """Recipe to start from: default, ddpm, edm or demo."""
    config: Path | None = setting(None, metavar="PATH")
    """TOML file of settings, such as the config.toml of another run."""


@dataclass(frozen=True)
class TrainRequest(_TrainingRequest):
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
    """Allow changes that make it another run: images, seed, weighting, EMA, background, held-out share."""
    verify: bool = False
    """Do not continue. Train again from the second newest checkpoint, and compare with the newest one bit by bit."""


@dataclass(frozen=True)
class DoctorRequest(_TrainingRequest):
    """Check SOURCE and settings before training, RUN for what went wrong, or the GPU.

    Reads every image once, tries every part of a run, and reports findings with a remedy.

      unfog doctor photos/ --size 64 --budget 2h    before a run
      unfog doctor runs/photos                      during or after it
      unfog doctor --gpu                            a minute, without images

    The exit status is 2 where training makes no sense. A run has its own settings.
    """

    source: str = field(default="", metadata=argument("SOURCE|RUN"))
    """Images, as for train; or the folder of a run."""
    settings: Config = Config()
    out: Path | None = setting(None, metavar="PATH")
    """New folder for report.html and findings.json. Default: doctor/ and the name of SOURCE or RUN."""
    quick: bool = False
    """Skip the slow checks: the dry run, the overfit test, and samples of a run."""
    gpu: bool = False
    """Check the GPU instead of images: arithmetic, copies, training steps."""


@dataclass(frozen=True)
class PlanRequest(_TrainingRequest):
    """Predict memory, time and disk space of training on SOURCE, on this machine or another.

      unfog plan photos/ --size 128 --batch 64 --steps 100000
      unfog plan photos/ --size 128 --batch 64 --steps 100000 --for h200
      unfog plan photos/ --network base --steps 9000 --training.shard --processes 8

    The exit status is 2 where it does not fit.
    """

    device: str = setting("", flag="for", metavar="DEVICE")
    """Plan for this device instead of the one at hand: h200, h100, a100, 4090, 3090, v100, t4, ..."""
    processes: int = 1
    """Number of processes, as torchrun starts them, each with its own device. The figures are those of one process."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class FindLrRequest(_TrainingRequest):
    """Find a learning rate for SOURCE, network and batch by a short test on a throwaway copy. No run is changed.

      unfog find-lr photos/ --size 64

    Give the rate that it finds to `unfog train` as --lr.
    """

    out: Path | None = setting(None, metavar="PATH")
    """New folder for the plot and lr-range.json. Default: find-lr/ and the name of SOURCE."""
    seconds: float = 90.0
    """Wall time of the command in seconds, reading images for the first time aside. A large network needs more."""


@dataclass(frozen=True)
class PackRequest:
    """Decode and resize SOURCE once into OUT. Training reads it at the speed of memory.

    After an interruption, the same command continues.

      unfog pack photos/ photos.pack --size 64
      unfog train photos.pack                     afterwards
    """

    source: str = field(metadata=argument("SOURCE"))
    """Images, as for train."""
    out: Path = field(metadata=argument("OUT"))
    """New folder for the pack, or an unfinished pack of the same images."""
    data: Data = Data()


@dataclass(frozen=True)
class ExplainRequest:
    """Explain a setting: what it does, its default and why, its bounds, whether a resume can change it, and more.

      unfog explain               all sections and settings
      unfog explain optimizer     the settings of a section
      unfog explain lr            a setting
      unfog explain min-snr       a kind that a setting can have

    Measured effects and publications are named where there are any.
    """

    setting: str = field(default="", metadata=argument("SETTING"))
    """Name of a setting, a section or a kind. Default: list all."""


SHELLS = ("bash", "zsh", "fish")


@dataclass(frozen=True)
class CompletionRequest:
    """Print a script by which SHELL completes commands, flags, names of networks and the like, and paths.

      unfog completion bash > ~/.local/share/bash-completion/completions/unfog
      unfog completion zsh > ~/.zfunc/_unfog      where ~/.zfunc is in $fpath
      unfog completion fish > ~/.config/fish/completions/unfog.fish

    It works in shells that are started afterwards.
    """

    shell: str = field(metadata=argument("SHELL"))
    """bash, zsh or fish."""

    def __post_init__(self) -> None:
        if self.shell not in SHELLS:
            raise RequestError(f"shell = {quote(self.shell)} is not supported; give {', '.join(SHELLS)}")


@dataclass(frozen=True)
class InitRequest:
    """Ask five questions, and write FILE: settings with comments, for `unfog train --config`.

      unfog init
      unfog init photos.toml --yes --source photos/ --budget 2h     without questions

    A flag answers its question.
    """

    file: Path | None = field(default=None, metadata=argument("FILE"))
    """New TOML file. Default: the name of the images with .toml."""
    yes: bool = False
    """Ask nothing: take the default of every question that no flag answers."""
    source: str | None = None
    """Images, as for train. Default: a folder of images here, or fashion."""
    size: Size | None = None
    """Pixels: 64, or width x height: 96x64. Default: 0, which is chosen to suit the images."""
    budget: str | None = None
    """Time for training. Default: 1h."""
    classes: str | None = None
    """auto, folders, none, or a .csv or .jsonl file. Default: auto."""
    device: str | None = None
    """auto, cpu, cuda, cuda:1 or mps. Default: auto."""
