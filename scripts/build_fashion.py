"""Build the sheet of the built-in set: the first 1,000 distinct images of each Fashion-MNIST class, 100 tiles
a row.

    python scripts/build_fashion.py FOLDER       # FOLDER/<class>/*.png, 28 x 28, grey

Ten rows of tiles a class, in the order of the labels; within a class in the order of the file names.
One PNG, because it came out within 1% of the smallest lossless form tried (WebP) and every Pillow reads it.
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image

from unfog.data.sources.builtin_fashion import FashionSource

SHEET = Path(__file__).parents[1] / "src/unfog/data/builtin/fashion.png"


def first_distinct(folder: Path, count: int) -> list[np.ndarray]:
    """The first `count` images of a folder that differ from all before them."""
    found: dict[bytes, np.ndarray] = {}
    for path in sorted(folder.glob("*.png")):
        pixels = np.asarray(Image.open(path))
        assert pixels.shape == (28, 28), f"{path} is {pixels.shape}, not 28 x 28 grey"
        found.setdefault(pixels.tobytes(), pixels)
        if len(found) == count:
            return list(found.values())
    sys.exit(f"{folder}: {len(found)} distinct images, {count} are needed")


def main(folder: Path) -> None:
    """Write the sheet where the package reads it."""
    tiles = np.concatenate([first_distinct(folder / name, 1000) for name in FashionSource.classes])
    sheet = tiles.reshape(100, 100, 28, 28).swapaxes(1, 2).reshape(2800, 2800)
    Image.fromarray(sheet).save(SHEET, optimize=True)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
