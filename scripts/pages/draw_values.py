"""Draw real images above generated ones, for data whose values are not those of pictures:

    python scripts/pages/tutorial_images.py retina retina.tif
    unfog train retina.tif --network unet:channels=16/32,attention=0/0,norm_groups=16 --budget 10m
    unfog resume runs/retina --steps 1000
    python scripts/pages/draw_values.py retina runs/retina retina.tif

writes docs/pictures/retina.png, and

    python scripts/pages/tutorial_images.py scenes scenes
    unfog train scenes/ --data.unknown 0 --flip --network unet:channels=16/32,attention=0/0,norm_groups=16 --budget 14m
    python scripts/pages/draw_values.py scenes runs/scenes scenes

docs/pictures/scenes.png, with two views of four bands. Values are printed in the units of the files.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import tifffile
from draw_pictures import CELL, COLUMNS, GAP, LEFT, PICTURES, Pixels, table
from numpy.typing import NDArray
from PIL import Image

import unfog

RETINA = (300, 2800)  # values that are black and white
# View of a scene -> its bands, and the reflectance x 10,000 that is the brightest of each.
VIEWS = {"colours": ((2, 1, 0), (3500, 2500, 2500)), "infrared": ((3, 2, 1), (5000, 2500, 2500))}
UNKNOWN = (214, 214, 214)


def grey(values: NDArray[np.floating], low: float, high: float) -> Pixels:
    """Return values in grey, uint8; `low` becomes black and `high` white."""
    return (255 * (values - low) / (high - low)).round().clip(0, 255).astype(np.uint8)


def retina(run: unfog.Run, path: Path) -> Image.Image:
    """Return parts of the photograph, and samples."""
    real = tifffile.imread(path).astype(np.float64)
    made = np.asarray(run.sample(100), np.float64).squeeze()
    for name, values in (("real", real), ("generated", made)):
        print(f"{name}: {values.min():g} to {values.max():g}, mean {values.mean():.0f}, deviation {values.std():.0f}")
    spread = np.linspace(0, len(real) - 1, COLUMNS).astype(int)
    return table([("real", grey(real[spread], *RETINA)), ("generated", grey(made, *RETINA))])


def scenes(run: unfog.Run, folder: Path) -> Image.Image:
    """Return two views of scenes, whose unknown pixels are light grey, and of samples."""
    real = np.stack([tifffile.imread(file) for file in sorted(folder.glob("*.tif"))[:COLUMNS]]).astype(np.float64)
    made = np.asarray(run.sample(COLUMNS), np.float64)
    rows = []
    for name, values in (("given", real), ("generated", made)):
        print(f"{name}: mean of each band {values[values.min(-1) > 0].mean(0).round()}")
        for view, (bands, brightest) in VIEWS.items():
            pixels = grey(values[..., bands], 0, np.asarray(brightest))
            if values is real:
                pixels[(values == 0).all(-1)] = UNKNOWN
            rows.append((f"{name}, {view}", pixels))
    return table(rows)


def main(kind: str, run: Path, real: Path) -> None:
    page = {"retina": retina, "scenes": scenes}[kind](unfog.load(run), real)
    widest = 64 if kind == "retina" else 6  # less room on the left of short names
    page = page.crop((widest, 0, LEFT + COLUMNS * (CELL + GAP), page.height))
    page.quantize(256, dither=Image.Dither.NONE).save(PICTURES / f"{kind}.png", optimize=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
