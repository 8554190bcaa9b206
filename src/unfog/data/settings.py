"""What is done to the images before training. Free of torch, so that `--help` is quick."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from unfog.errors import RequestError


@dataclass(frozen=True)
class Data:
    """How images are decoded, labelled, augmented and split. A 0 or "auto" is chosen to suit them."""

    size: int = 0
    """Side in pixels of what the network sees; 0 = own size if all equal and small, else 32 or 64. Short: --size."""

    channels: int = 0
    """1 = grey, 3 = RGB; 0 = grey if every image is grey, else RGB."""

    background: str = "white"
    """Colour put behind transparent pixels: a name such as "white", or "#rrggbb"."""

    labels: Literal["auto", "folders", "none"] = "auto"
    """Classes: "folders" = the top sub-folders, "none" = one kind of image, "auto" = whichever the layout shows."""

    flip: bool = False
    """Mirror half of the images left to right; off, as text and digits do not survive it. Short: --flip."""

    jitter: float = 0.0
    """Random brightness, contrast and saturation, as a fraction: 0.1 is up to 10% each way."""

    held_out: float = 0.05
    """Fraction kept from training to measure it; at most 1,000 images, none of fewer than 100; 0 = none."""

    cache: Literal["auto", "memory", "disk"] = "auto"
    """Where decoded images live: "disk" = a file that later runs reuse; "auto" = disk for large sets."""

    def __post_init__(self) -> None:
        """Refuse values outside their range, with RequestError."""
        if self.size != 0 and not 4 <= self.size <= 4096:
            raise RequestError(f"size = {self.size} is out of range; give 4 to 4096 pixels, or 0 to choose it")
        if self.channels not in (0, 1, 3):
            raise RequestError(f"channels = {self.channels} is not 1 (grey), 3 (RGB) or 0 (choose)")
        if not 0 <= self.jitter <= 1:
            raise RequestError(f"jitter = {self.jitter} is not from 0 to 1; 0.05 to 0.2 is usual")
        if not 0 <= self.held_out <= 0.5:
            raise RequestError(f"held_out = {self.held_out} is not a fraction from 0 to 0.5; 0.05 is usual")
