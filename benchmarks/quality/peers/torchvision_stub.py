"""The few names of torchvision that denoising-diffusion-pytorch imports, for a torch that has no torchvision.

make_peers.sh copies this into the peers' environment as the package `torchvision`, and nowhere else. Each transform
does to a Pillow image what torchvision's of that name does with its defaults.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image


class Compose:
    """One after the other."""

    def __init__(self, transforms: list[Callable[[Any], Any]]):
        self.transforms = transforms

    def __call__(self, image: Any) -> Any:
        """Image through all of them."""
        for transform in self.transforms:
            image = transform(image)
        return image


class Lambda:
    """Any function."""

    def __init__(self, function: Callable[[Any], Any]):
        self.function = function

    def __call__(self, image: Any) -> Any:
        """What it makes of the image."""
        return self.function(image)


class Resize:
    """Bilinear: to (height, width), or the short side to a number."""

    def __init__(self, size: int | tuple[int, int]):
        self.size = size

    def __call__(self, image: Image.Image) -> Image.Image:
        """The image resized; as it is where it has that size."""
        if isinstance(self.size, int):
            scale = self.size / min(image.size)
            to = tuple(self.size if side == min(image.size) else int(side * scale) for side in image.size)
        else:
            to = self.size[::-1]
        return image if to == image.size else image.resize(to, Image.Resampling.BILINEAR)


class CenterCrop:
    """The middle, of (height, width) or a square."""

    def __init__(self, size: int | tuple[int, int]):
        self.height, self.width = (size, size) if isinstance(size, int) else size

    def __call__(self, image: Image.Image) -> Image.Image:
        """The middle."""
        left, top = round((image.width - self.width) / 2), round((image.height - self.height) / 2)
        return image.crop((left, top, left + self.width, top + self.height))


class RandomHorizontalFlip:
    """Mirrored with a chance of a half."""

    def __call__(self, image: Image.Image) -> Image.Image:
        """The image, or its mirror image."""
        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if torch.rand(1) < 0.5 else image


class ToTensor:
    """float32 [C, H, W] in [0, 1]."""

    def __call__(self, image: Image.Image) -> torch.Tensor:
        """The image as a tensor."""
        pixels = torch.from_numpy(np.array(image))
        pixels = pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1)
        return pixels.float().div(255).contiguous()


def save_image(images: torch.Tensor, path: str, nrow: int = 8) -> None:
    """A grid [N, C, H, W] in [0, 1] as a PNG."""
    rows = [torch.cat(list(row), 2) for row in images.split(nrow) if len(row) == nrow]
    pixels = (torch.cat(rows, 1).clamp(0, 1) * 255).round().byte().permute(1, 2, 0)
    Image.fromarray(pixels.cpu().numpy().squeeze()).save(Path(path))


transforms = types.ModuleType("torchvision.transforms")
for _part in (Compose, Lambda, Resize, CenterCrop, RandomHorizontalFlip, ToTensor):
    setattr(transforms, _part.__name__, _part)
utils = types.ModuleType("torchvision.utils")
utils.save_image = save_image  # type: ignore[attr-defined]
sys.modules |= {"torchvision.transforms": transforms, "torchvision.utils": utils}
