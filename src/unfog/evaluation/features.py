"""Feature extractors of metrics: networks, or simple arithmetic.

`inception` is the network of the literature's FID, read from a file that is known by its SHA-256. `texture` and
`pixels` need no file. Any other TorchScript file is named by its path, with options: `net.pt:size=224,range=imagenet`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from unfog.errors import RequestError
from unfog.evaluation.feature_networks import (
    INCEPTION,
    TorchScriptNetwork,
    load_inception,
    load_torchscript,
    parse_network_file,
)
from unfog.evaluation.texture import texture

SIDE = 8


@dataclass(frozen=True)
class Features:
    """An extractor: uint8 pixels [N, C, H, W], one channel or three, to float32 [N, D] on `device`."""

    name: str
    """Printed name; for a file that is not Inception, with the first eight digits of its SHA-256."""

    resize: str
    """What is done to the size of the pixels."""

    digest: str
    """Equal exactly where the features of the same pixels are equal, up to rounding: part of what caches go by."""

    device: torch.device
    embed: Callable[[Tensor], Tensor]
    """float32 [N, 3, H, W] in 0 to 255 -> [N, D]."""

    @torch.inference_mode()
    def __call__(self, pixels: Tensor) -> Tensor:
        """Extract features; grey is made RGB. Always in full float32, whatever autocast or TF32 settings are active.

        Raises:
            RequestError: these are no such pixels, or the network does not answer with [N, D].
        """
        if pixels.dtype != torch.uint8 or pixels.ndim != 4 or pixels.shape[1] not in (1, 3):
            raise RequestError(f"pixels are {pixels.dtype} {list(pixels.shape)}; give uint8 [N, 1 or 3, H, W]")
        x = pixels.to(self.device).float().expand(-1, 3, -1, -1)
        exact = torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False)
        with torch.autocast(self.device.type, enabled=False), exact:
            y = self.embed(x)
        if y.ndim != 2 or len(y) != len(x):
            raise RequestError(
                f"features = {self.name} answers {list(y.shape)} for {len(x)} pictures; it must be [N, D]"
            )
        return y.float()


def open_features(name_or_path: str, device: torch.device | str = "cpu", only_known: bool = False) -> Features:
    """Return an extractor: `inception`, `texture`, `pixels`, or the path of a TorchScript file with options.

    A TorchScript file is a program, and PyTorch has no safe way to load one. Naming a file is taken for consent to
    run it. Where the name comes out of something that a stranger may have written, such as the settings of a run that
    was sent, `only_known` refuses every file but Inception's, whose SHA-256 is checked before it is loaded.

    Raises:
        RequestError: no such name or file; not TorchScript; options that are none; a file that may not be run.
    """
    device = torch.device(device)
    # MPS pools to sizes that divide the picture's alone.
    pooling = torch.device("cpu") if device.type == "mps" else device
    if name_or_path == "pixels":
        return Features("pixels", f"area {SIDE}", f"pixels-{SIDE}-1", pooling, _small_pixels)
    if name_or_path == "texture":
        return Features("texture", "none", "texture-1", pooling, texture)
    if name_or_path == "inception":
        return _of(load_inception(device), device)
    if ".pt" not in name_or_path:
        raise RequestError(
            f"features = {name_or_path!r} is not inception, texture, pixels or the path of a TorchScript file"
        )
    return _of(load_torchscript(parse_network_file(name_or_path), device, only_known), device)


def is_inception(features: Features | None) -> bool:
    """Return True where a Frechet distance of these features is FID as in the literature."""
    return features is not None and features.digest == INCEPTION.digest


def _of(network: TorchScriptNetwork, device: torch.device) -> Features:
    return Features(network.name, network.resize, network.digest, device, network)


def _small_pixels(x: Tensor) -> Tensor:
    """Means over 8 x 8 parts, in 0 to 1: [N, 192]. What is where in a picture, and nothing finer."""
    return F.adaptive_avg_pool2d(x / 255, SIDE).flatten(1)
