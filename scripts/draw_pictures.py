"""Draw the pictures of the how-to pages from a real run:

    python scripts/draw_pictures.py RUN [--only steps ema …]

writes docs/pictures/steps.png (few sampling steps against many), ema.png (with the EMA and without), guidance.png and
samplers.png, each with its labels in the picture. All rows of a picture begin at the same noise.

    python scripts/draw_pictures.py --contest emoji-20m-default+tiny+muon-0 --images EMOJI --out emoji-20m.png

puts real images above the stored samples of a run of benchmarks/quality. Omit --images if those of the set have no
licence, as those of CIFAR-10:

    python scripts/draw_pictures.py --contest "cifar10-20m-default+tiny+muon-0" --out cifar10-20m.png

    python scripts/draw_pictures.py --rows cifar10-20m-denoising-diffusion-pytorch-0 cifar10-20m-diffusers-0 \\
        "cifar10-20m-default+tiny+muon-0" --out ../contest.png

puts the first two rows of several such runs below each other.

    python examples/random_fields.py FOLDER && python scripts/draw_pictures.py --channels FOLDER

draws channels.png, the channels of true and generated fields, and

    python scripts/tutorial_images.py densities densities.npy
    unfog train densities.npy --wrap xy --data.map log --network unet:channels=16/32,attention=0/0 --budget 20m
    python scripts/draw_pictures.py runs/densities --density densities.npy

densities.png, which has true and generated densities, and generated ones beside themselves.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

import unfog
from unfog.values.colour_map import colour_table

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "pictures"
GRIDS = ROOT / "benchmarks" / "quality" / "results" / "grids"
COLUMNS, CELL, GAP, LEFT, TOP = 10, 64, 4, 150, 30
INK, PAPER = (34, 34, 34), (255, 255, 255)
Pixels = NDArray[np.uint8]


def table(rows: Sequence[tuple[str, Pixels]], columns: Sequence[str] = ()) -> Image.Image:
    """Return a picture with a row for each name, and a name above each column."""
    top = TOP if columns else GAP
    page = Image.new("RGB", (LEFT + COLUMNS * (CELL + GAP), top + len(rows) * (CELL + GAP)), PAPER)
    draw, font = ImageDraw.Draw(page), ImageFont.load_default(13)
    for column, name in enumerate(columns):
        draw.text((LEFT + column * (CELL + GAP) + CELL / 2, top / 2), name, INK, font, anchor="mm")
    for row, (name, samples) in enumerate(rows):
        y = top + row * (CELL + GAP)
        draw.text((LEFT - 8, y + CELL / 2), name, INK, font, anchor="rm")
        for column, sample in enumerate(samples[:COLUMNS]):
            image = Image.fromarray(sample.squeeze()).convert("RGB")
            page.paste(image.resize((CELL, CELL), Image.Resampling.NEAREST), (LEFT + column * (CELL + GAP), y))
    return page


def draw_steps(run: unfog.Run, path: Path) -> list[tuple[str, Pixels]]:
    return [(f"{steps} steps", run.sample(COLUMNS, steps=steps)) for steps in (2, 4, 8, 16, 64)]


def draw_ema(run: unfog.Run, path: Path) -> list[tuple[str, Pixels]]:
    raw = unfog.load(path, weights="raw")
    return [("with the EMA", run.sample(COLUMNS)), ("last weights, raw", raw.sample(COLUMNS))]


def draw_guidance(run: unfog.Run, path: Path) -> list[tuple[str, Pixels]]:
    return [(f"--guidance {strength:g}", run.sample(COLUMNS, guidance=strength)) for strength in (1.0, 1.5, 3.0, 6.0)]


def draw_samplers(run: unfog.Run, path: Path) -> list[tuple[str, Pixels]]:
    kinds = ("ddim", "dpmpp", "unipc", "heun", "ddpm")
    return [(f"{kind}, 10 steps", run.sample(COLUMNS, sampler=kind, steps=10)) for kind in kinds]


DRAWN: dict[str, Callable[[unfog.Run, Path], list[tuple[str, Pixels]]]] = {
    "steps": draw_steps,
    "ema": draw_ema,
    "guidance": draw_guidance,
    "samplers": draw_samplers,
}


def contest_samples(grid: Path, images: Path | None) -> Image.Image:
    """Return the samples of a stored grid; with a folder of images, below as many real ones as it has columns."""
    made = Image.open(grid).convert("RGB")
    side, gap = 64, 2
    above = TOP + side if images else 0
    page = Image.new("RGB", (made.width, above + TOP + made.height), PAPER)
    draw, font = ImageDraw.Draw(page), ImageFont.load_default(15)
    draw.text((0, above + TOP / 2), "generated: the first samples, not chosen", INK, font, anchor="lm")
    page.paste(made, (0, above + TOP))
    if images is None:
        return page
    columns = (made.width + gap) // (side + gap)
    files = sorted(images.rglob("*.png"))
    draw.text((0, TOP / 2), f"real: {columns} of {len(files):,} images", INK, font, anchor="lm")
    for column in range(columns):
        real = Image.open(files[(2 * column + 1) * len(files) // (2 * columns)]).convert("RGB")
        real = real.resize((side // 2,) * 2, Image.Resampling.LANCZOS).resize((side,) * 2, Image.Resampling.NEAREST)
        page.paste(real, (column * (side + gap), TOP))
    return page


def coloured(fields: NDArray[np.floating], low: float, high: float) -> Pixels:
    """Return fields [N, H, W] in the colours of viridis, uint8 [N, H, W, 3]; `low` and `high` are the ends."""
    levels = (255 * (fields.astype(np.float64) - low) / (high - low)).round().clip(0, 255).astype(np.uint8)
    return colour_table("viridis")[levels]


def channels(folder: Path) -> Image.Image:
    """Return the four channels of true fields, and of the samples that examples/random_fields.py stored."""
    both = np.concatenate([np.load(folder / f"{name}.npy")[: COLUMNS // 2] for name in ("fields", "samples")])
    rows = []
    for channel, (mean, deviation) in enumerate(((0, 1), (5, 10), (100, 100), (-3000, 1000))):
        low, high = mean - 2.5 * deviation, mean + 2.5 * deviation
        rows.append((f"{channel}: {low:,g} to {high:,g}", coloured(both[..., channel], low, high)))
    return table(rows, [name for name in ("true", "generated") for _ in range(COLUMNS // 2)])


def densities(run: unfog.Run, real: Path) -> Image.Image:
    """Return true densities, samples, and samples repeated along both axes, on a scale of logarithms."""
    true, made = np.load(real)[:COLUMNS], np.asarray(run.sample(COLUMNS)).squeeze()
    low, high = np.log(0.1), np.log(10)
    rows = {"true": true, "generated": made, "generated, 2 x 2": np.tile(made, (1, 2, 2))}
    return table([(name, coloured(np.log(fields), low, high)) for name, fields in rows.items()])


def first_rows(grids: Sequence[Path], rows: int = 2, apart: int = 12) -> Image.Image:
    """Return the first rows of several stored grids, of images of 64 pixels, below each other."""
    parts = [Image.open(grid).convert("RGB") for grid in grids]
    height = rows * 66 - 2
    page = Image.new("RGB", (parts[0].width, len(parts) * (height + apart) - apart), PAPER)
    for i, part in enumerate(parts):
        page.paste(part.crop((0, 0, part.width, height)), (0, i * (height + apart)))
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?")
    parser.add_argument("--only", nargs="*", default=list(DRAWN), choices=DRAWN)
    parser.add_argument("--contest", help="name of a stored grid")
    parser.add_argument("--rows", nargs="+", help="names of stored grids")
    parser.add_argument("--images", type=Path, help="the images of the contest")
    parser.add_argument("--out", help="name of its picture")
    parser.add_argument("--channels", type=Path, metavar="FOLDER", help="of examples/random_fields.py")
    parser.add_argument("--density", type=Path, metavar="FILE", help="the densities that the run was trained on")
    given = parser.parse_args()
    PICTURES.mkdir(exist_ok=True)
    if given.channels:
        channels(given.channels).save(PICTURES / "channels.png", optimize=True)
        return
    if given.contest or given.rows:
        grids = [GRIDS / f"{name}.png" for name in given.rows or [given.contest]]
        page = first_rows(grids) if given.rows else contest_samples(grids[0], given.images)
        page.quantize(256, dither=Image.Dither.NONE).save(PICTURES / given.out, optimize=True)
        return
    run = unfog.load(given.run)
    if given.density:
        densities(run, given.density).save(PICTURES / "densities.png", optimize=True)
        return
    for name in given.only:
        path = PICTURES / f"{name}.png"
        table(DRAWN[name](run, given.run), run.classes[:COLUMNS]).quantize(64).save(path, optimize=True)
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
