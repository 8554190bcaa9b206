"""Folders that hold a codec, by what their config.json says. Imports no torch, so that what is wrong is said at once.

    unfog:      config.json {"_class_name": "UnfogAutoencoder", …}, codec.safetensors
    diffusers:  config.json {"_class_name": "AutoencoderKL" or "AutoencoderTiny", …},
                diffusion_pytorch_model.safetensors

Weights are read from safetensors alone: a .bin or .pt file is a pickle, which may run what its author likes.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from unfog.errors import RequestError

CONFIG = "config.json"
OURS = "UnfogAutoencoder"
WEIGHTS = {
    OURS: "codec.safetensors",
    "AutoencoderKL": "diffusion_pytorch_model.safetensors",
    "AutoencoderTiny": "diffusion_pytorch_model.safetensors",
}
PLACES = ("", "codec", "vae")
"""Where in a folder it may lie: in itself, in that of an Unfog run, in that of a diffusers pipeline."""
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_LARGEST_CONFIG = 2**20


class Described(NamedTuple):
    """A codec on disk."""

    folder: Path
    kind: str
    """One of WEIGHTS."""
    config: dict[str, Any]
    """What config.json holds."""
    factor: int
    """Pixels across one latent."""
    channels: int
    """Of a latent."""
    image_channels: int
    """Of the images that it takes and gives: 1 or 3."""

    @property
    def weights(self) -> Path:
        """The file of its weights."""
        return self.folder / WEIGHTS[self.kind]

    def sha256(self) -> str:
        """Digest of both files."""
        digest = hashlib.sha256()
        for path in (self.folder / CONFIG, self.weights):
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()


def describe(path: str) -> Described:
    """The codec in a folder: of itself, of an Unfog run or codec in training, or of a diffusers pipeline.

    Raises:
        RequestError: there is none, or none that can be read safely.
    """
    whole = Path(path).expanduser()
    folder = next((whole / place for place in PLACES if (whole / place / CONFIG).is_file()), None)
    if folder is None and (whole / "config.toml").is_file():
        raise RequestError(
            f"autoencoder_folder = {path} has no codec yet: `unfog resume {path}` if it is one in training"
        )
    if folder is None:
        raise RequestError(
            f"autoencoder_folder = {path} holds no {CONFIG}; give the folder of an AutoencoderKL or AutoencoderTiny, "
            "or of what `unfog train-autoencoder` made"
        )
    try:
        config = _read(folder / CONFIG)
        kind = config.get("_class_name")
        if kind not in WEIGHTS:
            raise RequestError(f"autoencoder_folder = {folder} is a {kind!r:.60}, not one of {', '.join(WEIGHTS)}")
        factor, channels, image_channels = _sizes(kind, config)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
        raise RequestError(
            f"autoencoder_folder = {folder}: {CONFIG} cannot be used: {type(error).__name__} {error}"
        ) from None
    if image_channels not in (1, 3) or not 1 <= factor <= 64 or not 1 <= channels <= 1024:
        sizes = f"image channels {image_channels}, factor {factor}, latent channels {channels}"
        raise RequestError(f"autoencoder_folder = {folder} has {sizes}; images have 1 or 3 channels")
    found = Described(folder, kind, config, factor, channels, image_channels)
    if not found.weights.is_file():
        pickles = [one.name for one in folder.iterdir() if one.suffix in _PICKLES]
        why = f" and {pickles[0]} is a pickle, which is never read; save it with safetensors" if pickles else ""
        raise RequestError(f"autoencoder_folder = {folder} has no {found.weights.name}{why}")
    return found


def _read(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        text = file.read(_LARGEST_CONFIG + 1)
    config = json.loads(text) if len(text) <= _LARGEST_CONFIG else None
    if not isinstance(config, dict):
        raise ValueError("it is no small JSON object")
    return config


def _sizes(kind: str, config: dict[str, Any]) -> tuple[int, int, int]:
    """(factor, channels of a latent, channels of an image), with diffusers' defaults where config.json is silent."""
    if kind == OURS:
        return int(config["factor"]), int(config["latent_channels"]), int(config["image_channels"])
    inside, outside = int(config.get("in_channels", 3)), int(config.get("out_channels", 3))
    if inside != outside:
        raise ValueError(f"in_channels = {inside} and out_channels = {outside} differ")
    name, usual = ("block_out_channels", 1) if kind == "AutoencoderKL" else ("encoder_block_out_channels", 4)
    return 2 ** min(len(config.get(name, [0] * usual)) - 1, 64), int(config.get("latent_channels", 4)), inside
