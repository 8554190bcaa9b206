"""diffusers' AutoencoderKL and AutoencoderTiny, from a folder on disk; weights are safetensors, or refused."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unfog.errors import RequestError


class DiffusersCodec(nn.Module):
    """One of them, as `AutoencoderModel` is used: images in [-1, 1] to latents, unscaled, and back."""

    def __init__(self, network: Any):
        super().__init__()
        self.network = network

    def encode(self, x: Tensor) -> Tensor:
        """The latents [B, c, H/f, W/f] of images [B, C, H, W]; of Gaussian ones the mean."""
        encoded = self.network.encode(x)
        latent: Tensor = encoded.latent_dist.mode() if hasattr(encoded, "latent_dist") else encoded.latents
        return latent

    def decode(self, latent: Tensor) -> Tensor:
        """Images [B, C, H, W] about [-1, 1] of latents."""
        image: Tensor = self.network.decode(latent).sample
        return image


def read_autoencoder(folder: Path, kind: str) -> DiffusersCodec:
    """The codec in a folder; `kind` is "AutoencoderKL" or "AutoencoderTiny". Nothing is downloaded or unpickled.

    Raises:
        RequestError: diffusers is not installed, or refuses the folder.
    """
    try:
        import diffusers
    except ImportError:
        said = f"codec = {folder} is a {kind}, which needs diffusers: pip install 'unfog[export]'"
        raise RequestError(said) from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its own future
            network, told = getattr(diffusers, kind).from_pretrained(
                str(folder),
                local_files_only=True,
                use_safetensors=True,
                torch_dtype=torch.float32,
                low_cpu_mem_usage=False,
                output_loading_info=True,
            )
    except (OSError, ValueError, RuntimeError, TypeError, LookupError, ArithmeticError, AttributeError) as error:
        # It takes a config.json at its word: norm_num_groups = 0, say, is divided by.
        raise RequestError(f"codec = {folder} cannot be read as {kind}: {' '.join(str(error).split())[:200]}") from None
    if told["missing_keys"] or told["unexpected_keys"]:
        amiss = [*told["missing_keys"], *told["unexpected_keys"]]
        raise RequestError(f"codec = {folder}: {len(amiss)} weights do not fit its config.json, such as {amiss[0]}")
    return DiffusersCodec(network)
