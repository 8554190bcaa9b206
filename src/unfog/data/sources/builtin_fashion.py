"""The built-in Fashion-MNIST images, so that a first run needs no data."""

from __future__ import annotations

from importlib.resources import files

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from unfog.data.sources.base import OpenOptions, Source, SourceLocation

# In the order of Fashion-MNIST's labels.
_CLASSES = (
    *("tshirt_top", "trouser", "pullover", "dress", "coat"),
    *("sandal", "shirt", "sneaker", "bag", "ankle_boot"),
)


class FashionSource(Source):
    """10,000 images of Fashion-MNIST, 28 x 28, grey; of 1,000 in each class the last 100 are held out.

    MIT licence, in builtin/LICENSE-fashion-mnist.
    """

    name = resolved = "fashion"
    classes = _CLASSES
    names = tuple(f"{name}/{i:04}" for name in _CLASSES for i in range(1000))
    held_out = frozenset(f"{name}/{i:04}" for name in _CLASSES for i in range(900, 1000))

    def __init__(self) -> None:
        with (
            (files("unfog.data") / "builtin" / "fashion.png").open("rb") as file,
            Image.open(file, formats=["PNG"]) as sheet,
        ):
            tiles = np.asarray(sheet).reshape(100, 28, 100, 28).swapaxes(1, 2)
        self.tiles: NDArray[np.uint8] = tiles.reshape(10000, 28, 28)  # in the order of `names`

    @classmethod
    def match(cls, location: SourceLocation) -> SourceLocation | None:
        return location if location.form == "name" and location.name == cls.name else None

    @classmethod
    def load(cls, location: SourceLocation, options: OpenOptions) -> FashionSource:
        return cls()

    def read(self, i: int) -> NDArray[np.uint8]:
        return self.tiles[i, :, :, None]

    def stamp(self) -> tuple[str, int]:
        return "fashion-mnist, 10,000", self.tiles.size
