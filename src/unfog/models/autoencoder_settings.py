"""Settings of autoencoders, and the folders that hold one. Imports no torch, so that `--help` is quick.

unfog:      config.json {"_class_name": "UnfogAutoencoder", …}, codec.safetensors
diffusers:  config.json {"_class_name": "AutoencoderKL" or "AutoencoderTiny", …},
            diffusion_pytorch_model.safetensors
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from unfog.errors import RequestError
from unfog.files.safe_files import open_file, read_file
from unfog.settings import check_bounds, setting
from unfog.values.image_format import CHANNELS, Size, check_sides, sides_of

FACTORS = (2, 4, 8, 16)

# Channels at 1/2, 1/4, 1/8 and 1/16 of the size, by the name of a preset.
WIDTHS: dict[str, tuple[int, ...]] = {
    # 0.33M parameters at factor 4, 0.94M at factor 8: minutes on a laptop.
    "tiny": (32, 64, 96, 128),
    # 1.3M at factor 4, 3.0M at factor 8: an hour on two CPU cores, or minutes on a GPU.
    "small": (64, 128, 160, 192),
    # 5.1M at factor 4, 12M at factor 8.
    "base": (128, 256, 320, 384),
}

CONFIG = "config.json"
OURS = "UnfogAutoencoder"
# Weights are read from safetensors alone: a .bin or .pt file is a pickle, which can run any code.
WEIGHTS = {
    OURS: "codec.safetensors",
    "AutoencoderKL": "diffusion_pytorch_model.safetensors",
    "AutoencoderTiny": "diffusion_pytorch_model.safetensors",
}
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_IN_RUN = "codec"
_PLACES = ("", _IN_RUN, "vae")  # the folder itself, inside an Unfog run, inside a diffusers pipeline
_LARGEST_CONFIG = 2**20  # bytes; a config.json has a few thousand, and a folder may come from a stranger


@dataclass(frozen=True)
class Autoencoder:
    """A convolutional autoencoder with Gaussian latents (Kingma & Welling 2014), and the weights of its loss."""

    factor: int = 0
    """Pixels of an image across one of its latents: 2, 4, 8 or 16. 0: this run trains no autoencoder."""
    latent_channels: int = setting(4, at_least=1, at_most=256, usual="4")
    """Channels of a latent; more keep more detail, and are more for the diffusion network to learn."""
    channels: tuple[int, ...] = setting((), at_least=4, at_most=4096)
    """Channels at 1/2, 1/4, … of the size, down to 1/factor."""
    blocks: int = setting(1, at_least=1, at_most=100, usual="1")
    """Residual blocks of each of these on the way down; the way up has one more."""
    norm_groups: int = setting(8, at_least=1, at_most=4096)
    """Groups of the group normalisation; must divide all `channels`."""
    kl: float = setting(1e-3, at_least=0, at_most=10)
    """Weight of the divergence of the latents from a standard normal, per number, beside a mean error in [-1, 1]."""
    pyramid: float = setting(1.0, at_least=0, at_most=100)
    """Weight of the mean error in each band of a Laplacian pyramid: edges and textures, which plain error blurs."""

    def __post_init__(self) -> None:
        if self.factor not in (0, *FACTORS):
            raise RequestError(f"factor = {self.factor} is not one of {', '.join(map(str, FACTORS))}; 4 or 8 is usual")
        check_bounds(self)
        levels = max(0, self.factor.bit_length() - 1)
        if len(self.channels) != levels:
            raise RequestError(
                f"channels = {list(self.channels)[:16]} do not fit factor {self.factor}; give {levels} levels"
            )
        if any(c % self.norm_groups for c in self.channels):
            raise RequestError(f"norm_groups = {self.norm_groups} must divide all channels = {list(self.channels)}")

    def check(self, size: Size) -> None:
        """Raise RequestError unless images of this size can be encoded."""
        check_multiple(size, self.factor)


@dataclass(frozen=True)
class Latents:
    """The autoencoder of a run and the statistics of its latents, as found when the run began."""

    sha256: str = ""
    """Digest of the autoencoder's files; "" if the network sees pixels."""
    factor: int = setting(0, at_least=0, at_most=64)
    """Pixels across one latent."""
    channels: int = setting(0, at_least=0, at_most=1024)
    """Channels of a latent."""
    mean: tuple[float, ...] = ()
    """Mean of each channel over the training images; () before it is measured."""
    deviation: tuple[float, ...] = setting((), above=0)
    """Standard deviation of each channel."""

    def __post_init__(self) -> None:
        check_bounds(self)
        for name, values in (("mean", self.mean), ("deviation", self.deviation)):
            if len(values) not in (0, self.channels):
                raise RequestError(f"{name} = {list(values)[:8]} must have a value for each of {self.channels}")


def check_multiple(size: Size, factor: int) -> None:
    """Raise RequestError unless an autoencoder of this factor takes images of this size."""
    rule = f"a multiple of {factor} for this autoencoder"
    check_sides(*sides_of(size), lambda side: max(1, round(side / factor)) * factor, rule)


class AutoencoderFolder(NamedTuple):
    """An autoencoder on disk, of Unfog or diffusers."""

    folder: Path
    kind: str
    """One of WEIGHTS."""
    config: dict[str, Any]
    """Content of config.json."""
    factor: int
    """Pixels across one latent."""
    channels: int
    """Channels of a latent."""
    image_channels: int
    """1 or 3."""

    @property
    def weights(self) -> Path:
        """Path of the file with the weights."""
        return self.folder / WEIGHTS[self.kind]

    @property
    def follows_links(self) -> bool:
        """True if its files may be links, as those of a hub's cache are; False in a run, which may be a stranger's."""
        return self.folder.name != _IN_RUN

    def sha256(self) -> str:
        """Return a digest of both files."""
        digest = hashlib.sha256()
        for path in (self.folder / CONFIG, self.weights):
            with open_file(path, "rb", self.folder, follow=self.follows_links) as file:
                digest.update(hashlib.file_digest(cast(Any, file), "sha256").digest())
        return digest.hexdigest()

    @classmethod
    def open(cls, path: str) -> AutoencoderFolder:
        """Find the autoencoder in a folder of its own, of an Unfog run, or of a diffusers pipeline.

        Raises:
            RequestError: there is none, or none that can be read safely.
        """
        whole = Path(os.path.expanduser(path))
        places = [whole / place for place in _PLACES if place != _IN_RUN or not (whole / place).is_symlink()]
        folder = next((place for place in places if (place / CONFIG).is_file()), None)
        if folder is None and (whole / "config.toml").is_file():
            raise RequestError(
                f"autoencoder_folder = {path} has no finished autoencoder; if its training was interrupted, "
                f"continue it: unfog resume {path}"
            )
        if folder is None:
            raise RequestError(
                f"autoencoder_folder = {path} holds no {CONFIG}; give a run of `unfog train-autoencoder`, or "
                "the folder of an AutoencoderKL or AutoencoderTiny"
            )
        try:
            config = _read_json(folder / CONFIG)
            kind = config.get("_class_name")
            if kind not in WEIGHTS:
                raise RequestError(f"autoencoder_folder = {folder} is a {kind!r:.60}, not one of {', '.join(WEIGHTS)}")
            factor, channels, image_channels = _sizes(kind, config)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
            raise RequestError(
                f"autoencoder_folder = {folder}: {CONFIG} cannot be used: {type(error).__name__} {error}"
            ) from None
        if image_channels not in CHANNELS or not 1 <= factor <= 64 or not 1 <= channels <= 1024:
            sizes = f"image channels {image_channels}, factor {factor}, latent channels {channels}"
            raise RequestError(f"autoencoder_folder = {folder} has {sizes}; images have 1 or 3 channels")
        opened = cls(folder, kind, config, factor, channels, image_channels)
        if not opened.weights.is_file():
            pickles = [file.name for file in folder.iterdir() if file.suffix in _PICKLES]
            why = f" and {pickles[0]} is a pickle, which is never read; save it with safetensors" if pickles else ""
            raise RequestError(f"autoencoder_folder = {folder} has no {opened.weights.name}{why}")
        return opened


def _read_json(path: Path) -> dict[str, Any]:
    config = json.loads(read_file(path, path.parent, _LARGEST_CONFIG, follow=path.parent.name != _IN_RUN))
    if not isinstance(config, dict):
        raise ValueError("it is not a small JSON object")
    return config


def _sizes(kind: str, config: dict[str, Any]) -> tuple[int, int, int]:
    """Return (factor, channels of a latent, channels of an image), with diffusers' defaults for missing keys."""
    if kind == OURS:
        return int(config["factor"]), int(config["latent_channels"]), int(config["image_channels"])
    in_channels, out_channels = int(config.get("in_channels", 3)), int(config.get("out_channels", 3))
    if in_channels != out_channels:
        raise ValueError(f"in_channels = {in_channels} and out_channels = {out_channels} differ")
    name, usual = ("block_out_channels", 1) if kind == "AutoencoderKL" else ("encoder_block_out_channels", 4)
    # Diffusers halves between its blocks; the cap keeps a hostile list from making a huge number.
    factor = 2 ** min(len(config.get(name, [0] * usual)) - 1, 64)
    return factor, int(config.get("latent_channels", 4)), in_channels
