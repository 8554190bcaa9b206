"""Networks of other programs, recognised by the names of their weights, and why no network here is equal to them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from unfog.safe_files import regular_file


class _Other(NamedTuple):
    """A network of another program, and how its weights are recognised."""

    marks: tuple[str, ...]
    """Ends of the names of weights that it alone has."""
    reason: str


_OTHERS = (
    _Other(
        ("emb_fourier.freqs", "emb_noise.weight"),
        "weights of EDM2: it embeds the noise level by random Fourier features, and a class without unit length, where "
        "our mpunet has sinusoids and unit vectors",
    ),
    _Other(
        ("map_layer0.weight", "map_layer1.weight"),
        "weights of EDM's SongUNet or DhariwalUNet: these change the resolution inside residual blocks, where our unet "
        "does it between them",
    ),
    _Other(
        ("init_conv.weight", "time_mlp.1.weight", "final_conv.weight"),
        "weights of denoising-diffusion-pytorch: it has linear attention in each level and RMS norms after the "
        "convolutions, where our unet has neither",
    ),
)
_PICKLES = (".pt", ".pth", ".pkl", ".ckpt", ".bin")


# Why networks of diffusers that a person may well try have no equivalent here.
OTHER_IN_DIFFUSERS = {
    "DiTTransformer2DModel": ": our dit has RMS norms, rotary positions and SwiGLU where that has layer norms, added "
    "positions and GELU, so no weights could be equal",
    "UNet2DConditionModel": ": that one is conditioned on text",
}


def reason_of_file(path: Path) -> str:
    """Return why a file of weights cannot be started from, to end a message; "" for what is no such file."""
    if path.suffix in _PICKLES:
        return ". A pickle is not read, as it can run code; of diffusers, save a folder with safetensors"
    if path.suffix != ".safetensors":
        return ""
    try:
        with safe_open(regular_file(path), "pt") as file:
            names = set(file.keys())
    except (OSError, SafetensorError):
        return ""
    for other in _OTHERS:
        if all(any(name.endswith(mark) for name in names) for mark in other.marks):
            return f". These are {other.reason}, so no weights could be equal"
    return ""
