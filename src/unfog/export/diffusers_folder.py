"""Read folders that diffusers wrote: a UNet2DModel, a pipeline with one in it, or an autoencoder.

Only JSON and safetensors are read; nothing is downloaded or unpickled.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unfog.errors import RequestError

_CONFIG, _WEIGHTS = "config.json", "diffusion_pytorch_model.safetensors"
_LARGEST_JSON = 2**20


class UNetFolder(NamedTuple):
    """A `UNet2DModel` on disk, and its scheduler."""

    config: dict[str, Any]
    """Its config.json."""
    weights: Path
    """The file of its weights."""
    scheduler: dict[str, Any] | None
    """Settings of the scheduler beside it; None if there are none."""

    @classmethod
    def open(cls, folder: Path) -> UNetFolder:
        """Read the settings of a `UNet2DModel` that `save_pretrained` wrote, alone or within a pipeline.

        Raises:
            RequestError: it is none, or its weights are in a pickle or in several files.
        """
        model = folder / "unet" if (folder / "unet" / _CONFIG).is_file() else folder
        if not (model / _CONFIG).is_file():
            raise RequestError(
                f"{folder} is no run and no folder of diffusers, as it has neither config.toml nor {_CONFIG} nor "
                f"unet/{_CONFIG}; give one of those"
            )
        config = _read_json(model / _CONFIG)
        kind = config.get("_class_name", "UNet2DModel")
        if kind != "UNet2DModel":
            raise RequestError(f"{model} holds a {kind!r}; only a UNet2DModel can be started from")
        weights = model / _WEIGHTS
        if not weights.is_file():
            suffixes = (".bin", ".pt", ".pth", ".ckpt", ".json")
            there = sorted(path.name for path in model.iterdir() if path.suffix in suffixes)
            raise RequestError(
                f"{model} has no {_WEIGHTS} ({', '.join(there)}); load it with diffusers in an environment of its own, "
                "and write it by save_pretrained(FOLDER, safe_serialization=True, max_shard_size='100GB'): pickles can "
                "run code"
            )
        # A pipeline's scheduler is in a folder beside the U-Net's; some models were saved with it in their own.
        places = (folder / "scheduler", folder.parent / "scheduler", folder)
        settings = next((path for place in places if (path := place / "scheduler_config.json").is_file()), None)
        return cls(config, weights, _read_json(settings) if settings else None)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST_JSON + 1)
        if len(data) > _LARGEST_JSON:
            raise ValueError(f"over {_LARGEST_JSON:,} bytes")
        value = json.loads(data)
        if not isinstance(value, dict):
            raise ValueError("not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise RequestError(f"{path} cannot be read: {error}; write it anew with diffusers") from None
    return value


class DiffusersAutoencoder(nn.Module):
    """diffusers' AutoencoderKL or AutoencoderTiny with the interface of `AutoencoderModel`; latents are unscaled."""

    def __init__(self, network: Any):
        super().__init__()
        self.network = network

    @classmethod
    def load(cls, folder: Path, kind: str) -> DiffusersAutoencoder:
        """Load an autoencoder from a folder; `kind` is "AutoencoderKL" or "AutoencoderTiny".

        Raises:
            RequestError: diffusers is not installed, or refuses the folder.
        """
        try:
            import diffusers
        except ImportError:
            raise RequestError(
                f"autoencoder_folder = {folder} is a {kind}, which needs diffusers: pip install 'unfog[export]'"
            ) from None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # diffusers announces its own deprecations
                network, info = getattr(diffusers, kind).from_pretrained(
                    str(folder),
                    local_files_only=True,
                    use_safetensors=True,
                    torch_dtype=torch.float32,
                    low_cpu_mem_usage=False,
                    output_loading_info=True,
                )
        # diffusers does not validate config.json: norm_num_groups = 0, say, is divided by.
        except (OSError, ValueError, RuntimeError, TypeError, LookupError, ArithmeticError, AttributeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise RequestError(f"autoencoder_folder = {folder} cannot be read as {kind}: {reason}") from None
        if wrong := [*info["missing_keys"], *info["unexpected_keys"]]:
            raise RequestError(
                f"autoencoder_folder = {folder}: {len(wrong)} weights do not fit its config.json, such as {wrong[0]}"
            )
        return cls(network)

    def encode(self, x: Tensor) -> Tensor:
        """Encode images [B, C, H, W] in [-1, 1] to latents [B, c, H/f, W/f]; to the mean of a Gaussian."""
        encoded = self.network.encode(x)
        latent: Tensor = encoded.latent_dist.mode() if hasattr(encoded, "latent_dist") else encoded.latents
        return latent

    def decode(self, latent: Tensor) -> Tensor:
        """Decode latents to images [B, C, H, W] about [-1, 1]."""
        image: Tensor = self.network.decode(latent).sample
        return image
