"""Make foreign_networks.safetensors: outputs of networks of other programs, as they themselves compute them.

    python tests/references/make_foreign_networks.py --edm EDM --edm2 EDM2 --packages PACKAGES

EDM and EDM2 are checkouts of NVlabs/edm and NVlabs/edm2, PACKAGES a folder with denoising_diffusion_pytorch 2.3.4,
ema_pytorch and einops. Nothing of them is in this repository: weights and inputs are sines, which tests make again
from names and shapes, and the file has the shapes and the outputs.
"""

import argparse
import base64
import json
import math
import sys
import zlib
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

import torch
from safetensors import safe_open
from safetensors.torch import save_file

FILE = Path(__file__).with_name("foreign_networks.safetensors")


def sines(name: str, shape: tuple[int, ...], scale: float = 1.0) -> torch.Tensor:
    """A tensor of numbers about [-scale, scale] that depend on the name alone."""
    phase = zlib.crc32(name.encode()) % 1000 / 1000
    numbers = torch.arange(math.prod(shape), dtype=torch.float64)
    return (scale * torch.sin(numbers * (1.3 + phase) + 6 * phase)).float().reshape(shape)


def weights(shapes: dict[str, list[int]]) -> dict[str, torch.Tensor]:
    """Weights of ordinary size by name and shape; of gains and norms about 1."""
    made = {}
    for name, shape in shapes.items():
        fan_in = max(1, math.prod(shape[1:]))
        tensor = sines(name, tuple(shape), 1.0 if len(shape) < 2 else (2 / fan_in) ** 0.5)
        gain = name.endswith((".g", "gain")) or ("norm" in name and name.endswith("weight") and len(shape) == 1)
        made[name] = 1 + 0.1 * tensor if gain else tensor * (3.0 if name.endswith("freqs") else 1.0)
        if name.endswith("resample_filter"):
            line = torch.tensor([1.0, 1.0] if shape[-1] == 2 else [1.0, 3.0, 3.0, 1.0])
            made[name] = (torch.outer(line, line) / line.sum() ** 2).reshape(shape)
    return made


def inputs(channels: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two images, and the noise levels sigma of EDM or the timesteps of others divided by 100."""
    return sines("x", (2, channels, side, side), 1.5), torch.tensor([0.31, 4.7])


CASES: dict[str, tuple[str, str, dict]] = {
    "ddpm": ("ddpm", "Unet", {"dim": 8, "dim_mults": (1, 2), "attn_heads": 2, "attn_dim_head": 4}),
    "ddpm, init_dim": (
        "ddpm",
        "Unet",
        {"dim": 8, "init_dim": 12, "dim_mults": (1, 3), "channels": 1, "full_attn": (True, False)},
    ),
    "ddpmpp": ("edm", "SongUNet", {"model_channels": 8, "channel_mult": [1, 2], "attn_resolutions": [8]}),
    "ddpmpp, classes": ("edm", "SongUNet", {"model_channels": 8, "channel_mult": [2, 2], "label_dim": 3}),
    "ncsnpp": (
        "edm",
        "SongUNet",
        {
            "model_channels": 8,
            "channel_mult": [1, 2],
            "attn_resolutions": [4],
            "embedding_type": "fourier",
            "encoder_type": "residual",
            "channel_mult_noise": 2,
            "resample_filter": [1, 3, 3, 1],
            "augment_dim": 9,
        },
    ),
    "adm": ("edm", "DhariwalUNet", {"model_channels": 64, "channel_mult": [1, 2], "attn_resolutions": [4]}),
    "adm, classes": ("edm", "DhariwalUNet", {"model_channels": 64, "channel_mult": [1], "label_dim": 3}),
    "edm2": ("edm2", "", {"model_channels": 64, "channel_mult": [1, 2], "attn_resolutions": [8], "label_dim": 0}),
    "edm2, classes": ("edm2", "", {"model_channels": 64, "channel_mult": [1], "attn_resolutions": [], "label_dim": 3}),
}
SIDE = 8


def stored_shapes() -> dict[str, dict[str, list[int]]]:
    """Names and shapes of the weights of each case."""
    with safe_open(FILE, "pt") as file:
        return json.loads(zlib.decompress(base64.b85decode(file.metadata()["shapes"])))


def _load(folder: str, module: str) -> ModuleType:
    for name in [name for name in sys.modules if name.split(".")[0] in ("training", "torch_utils", "dnnlib")]:
        del sys.modules[name]
    sys.path.insert(0, folder)
    try:
        return __import__(module, fromlist=["_"])
    finally:
        sys.path.remove(folder)


def _set(network: torch.nn.Module) -> dict[str, list[int]]:
    """Give a network the weights of these tests, and return their shapes."""
    shapes = {name: list(tensor.shape) for name, tensor in network.state_dict().items()}
    network.load_state_dict(weights(shapes))
    return shapes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("edm", "edm2", "packages"):
        parser.add_argument(f"--{name}", required=True)
    folders = parser.parse_args()
    # What only its trainer uses.
    for name in ("torchvision", "accelerate", "scipy", "scipy.optimize", "tqdm", "tqdm.auto", "ema_pytorch"):
        sys.modules.setdefault(name, MagicMock())
    outputs, described = {}, {}
    for case, (program, kind, settings) in CASES.items():
        with torch.no_grad():
            if program == "ddpm":
                module = _load(folders.packages, "denoising_diffusion_pytorch.denoising_diffusion_pytorch")
                network = getattr(module, kind)(**settings).eval()
                x, level = inputs(settings.get("channels", 3), SIDE)
                shapes, found = _set(network), {"": network(x, level * 100)}
            else:
                classes = settings.get("label_dim", 0)
                if program == "edm":
                    module = _load(folders.edm, "training.networks")
                    network = module.EDMPrecond(SIDE, 3, model_type=kind, num_blocks=1, **{"label_dim": 0} | settings)
                else:
                    module = _load(folders.edm2, "training.networks_edm2")
                    network = module.Precond(SIDE, 3, num_blocks=1, **settings)
                shapes = _set(network.eval())
                x, sigma = inputs(3, SIDE)
                x = x * sigma[:, None, None, None]
                found = {"": network(x, sigma)}
                if classes:
                    found[" class"] = network(x, sigma, torch.eye(classes)[torch.tensor([2, 0])])
        described[case] = shapes
        outputs |= {f"{case}{name}": output.contiguous() for name, output in found.items()}
    packed = base64.b85encode(zlib.compress(json.dumps(described).encode(), 9)).decode()
    save_file(outputs, FILE, {"shapes": packed})
    print(FILE, f"{FILE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
