"""The built-in set, so that a first run needs nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from unfog.data.report import SkippedFile

FASHION_CLASSES = (
    *("tshirt_top", "trouser", "pullover", "dress", "coat"),
    *("sandal", "shirt", "sneaker", "bag", "ankle_boot"),
)
"""The classes of the built-in set, in the order of the labels."""


class FashionSource:
    """The built-in set: 10,000 images of Fashion-MNIST, 1,000 a class, the last 100 of which are held out.

    28 x 28, grey; MIT licence, in builtin/LICENSE-fashion-mnist.
    """

    name = resolved = "fashion"
    classes: tuple[str, ...] = FASHION_CLASSES
    labels: NDArray[np.int64] | None = None
    names: Sequence[str] = [f"{name}/{i:04}" for name in FASHION_CLASSES for i in range(1000)]
    remote = False
    held_out: frozenset[str] | None = frozenset(f"{name}/{i:04}" for name in FASHION_CLASSES for i in range(900, 1000))
    ignored: Mapping[str, int] = {}
    unreadable: Sequence[SkippedFile] = ()

    def __init__(self) -> None:
        with (files("unfog.data") / "builtin" / "fashion.png").open("rb") as file, Image.open(file) as sheet:
            tiles = np.asarray(sheet).reshape(100, 28, 100, 28).swapaxes(1, 2)
        self.tiles: NDArray[np.uint8] = tiles.reshape(10000, 28, 28)  # in the order of `names`

    def open(self, i: int) -> Image.Image:
        """Image i, decoded."""
        return Image.fromarray(self.tiles[i])

    def stamp(self) -> tuple[str, int]:
        """It never changes."""
        return "fashion-mnist, 10,000", self.tiles.size
