"""Draw the pictures of the how-to pages from a real run:

    python scripts/pages/draw_pictures.py RUN [--only steps ema …]

writes docs/pictures/steps.png (few sampling steps against many), ema.png (with the EMA and without), guidance.png and
samplers.png, each with its labels in the picture. All rows of a picture begin at the same noise.

    python scripts/pages/draw_pictures.py --contest emoji-20m-default+tiny+muon-0 --images EMOJI --out emoji-20m.png

puts real images above the stored samples of a run of benchmarks/quality. Omit --images if those of the set have no
licence, as those of CIFAR-10:

    python scripts/pages/draw_pictures.py --contest "cifar10-20m-default+tiny+muon-0" --out cifar10-20m.png

    python scripts/pages/draw_pictures.py --contest-of-all

writes ../contest.png: the first two rows of several such runs, each below its name.

    unfog sample runs/textures.npy -n 8 --steps 16 --out FOLDER && python scripts/pages/draw_pictures.py --tiles FOLDER

writes ../gallery-textures.png, the first six samples, each three times three times beside itself.

    python scripts/pages/draw_pictures.py --conditions DEGRADE.png GREY.png MASK.png

puts three pictures of benchmarks/quality/image_conditions.py side by side into ../image-conditions.png, with labels.

    git show 424e60d2:docs/guided.png > rows.png && python scripts/pages/draw_pictures.py --guided rows.png

writes the names of its rows into ../guided.png. The samples themselves were not kept.

    python examples/random_fields.py FOLDER && python scripts/pages/draw_pictures.py --channels FOLDER

draws channels.png, the channels of true and generated fields, and

    python scripts/pages/tutorial_images.py densities densities.npy
    unfog train densities.npy --wrap xy --data.map log --network unet:channels=16/32,attention=0/0 --budget 20m
    python scripts/pages/draw_pictures.py runs/densities --density densities.npy

densities.png, which has true and generated densities, and generated ones beside themselves.

    python scripts/pages/draw_pictures.py zoo/fashion --posterior

draws posterior.png: held-out clothes from means of 4x4 pixels with noise.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

import unfog
from unfog.pipeline.load_data import load_images
from unfog.process.run_folder import RunFolder
from unfog.process.signals import StopSignals
from unfog.values.colour_map import colour_table

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs" / "pictures"
GRIDS = ROOT / "benchmarks" / "quality" / "results" / "grids"
COLUMNS, CELL, GAP, LEFT, TOP = 10, 64, 4, 150, 30
INK, PAPER = (34, 34, 34), (255, 255, 255)
CLOTHES = {"tshirt_top": "T-shirt", "ankle_boot": "ankle boot"}  # as the other pictures have it
CONTEST = {
    "denoising-diffusion-pytorch, untuned": "cifar10-20m-denoising-diffusion-pytorch-0",
    "diffusers' training script, untuned": "cifar10-20m-diffusers-0",
    "the textbook's recipe, tuned, trained by Unfog": "cifar10-20m-ddpm+lr+ema+decay-0",
    "Unfog, default": "cifar10-20m-default+tiny+muon-0",
}
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


def contest() -> Image.Image:
    """Return the first two rows of several stored grids, each below its name."""
    parts = []
    for name, grid in CONTEST.items():
        drawn = Image.open(GRIDS / f"{grid}.png").convert("RGB")
        parts.append((name, drawn.crop((0, 0, drawn.width, 2 * CELL + 2))))
    page = Image.new("RGB", (parts[0][1].width, sum(TOP + part.height for _, part in parts)), PAPER)
    draw, font, y = ImageDraw.Draw(page), ImageFont.load_default(25), 0
    for name, part in parts:
        draw.text((0, y + TOP / 2), name, INK, font, anchor="lm")
        page.paste(part, (0, y + TOP))
        y += TOP + part.height
    return page


def conditions(sheets: Sequence[Path], columns: int = 6, side: int = 48) -> Image.Image:
    """Return the first columns of several sheets of image_conditions.py beside each other, with the names of rows."""
    rows = ("given", "one draw", "another", "a third", "mean of four", "truth")
    width = columns * side + 3 * GAP
    page = Image.new("RGB", (LEFT + len(sheets) * width, TOP + len(rows) * side), PAPER)
    draw, font = ImageDraw.Draw(page), ImageFont.load_default(22)
    for row, name in enumerate(rows):
        draw.text((LEFT - 12, TOP + (row + 0.5) * side), name, INK, font, anchor="rm")
    for i, (sheet, name) in enumerate(
        zip(sheets, ("from 6x6 pixels", "from the brightness", "from a mask"), strict=True)
    ):
        x = LEFT + i * width
        draw.text((x + columns * side / 2, TOP / 2), name, INK, font, anchor="mm")
        page.paste(Image.open(sheet).convert("RGB").crop((0, 0, columns * side, len(rows) * side)), (x, TOP))
    return page


def guided(rows: Path, columns: int = 11) -> Image.Image:
    """Return the first columns of two pairs of rows of samples, with the names of data and rows."""
    given, left, side = Image.open(rows).convert("RGB"), 140, CELL + 2
    page = Image.new("RGB", (left + columns * side, 2 * TOP + given.height), PAPER)
    draw, font = ImageDraw.Draw(page), ImageFont.load_default(19)
    for pair, name in enumerate(("CIFAR-10", "emoji")):
        y, above = pair * (TOP + 2 * side + 6), pair * (2 * side + 6)
        draw.text((left, y + TOP / 2), f"{name}, twenty minutes, the same noise", INK, font, anchor="lm")
        page.paste(given.crop((0, above, columns * side - 2, above + 2 * side - 2)), (left, y + TOP))
        for row, what in enumerate(("no guide", "--guide auto")):
            draw.text((left - 12, y + TOP + (row + 0.5) * side), what, INK, font, anchor="rm")
    return page


def tiles(folder: Path, count: int = 6, large: int = 3) -> Image.Image:
    """Return the first samples of a folder, each three times three times beside itself, its pixels as squares."""
    parts = [np.tile(np.asarray(Image.open(folder / f"{i:06}.png").convert("RGB")), (3, 3, 1)) for i in range(count)]
    side = parts[0].shape[0] * large
    page = Image.new("RGB", (count * (side + GAP) - GAP, side), PAPER)
    for i, part in enumerate(parts):
        page.paste(Image.fromarray(part).resize((side, side), Image.Resampling.NEAREST), (i * (side + GAP), 0))
    return page


def means_of_pixels(x: torch.Tensor) -> torch.Tensor:
    """Return the means of 4x4 pixels: the measurement of posterior.png."""
    return torch.nn.functional.avg_pool2d(x, 4)


def posterior(run: unfog.Run, path: Path, noise: float = 5.0, draws: int = 8, shown: int = 3) -> Image.Image:
    """Return held-out images, each with what was measured of it, draws from the posterior, their mean and deviation."""
    held_out = load_images(RunFolder(path).read_config(), StopSignals())[0].held_out
    labels, random, rows = held_out.labels, np.random.default_rng(0), []
    assert labels is not None
    for name in ("tshirt_top", "bag", "ankle_boot"):
        truth = held_out.pixels[np.flatnonzero(labels == run.classes.index(name))[1]]
        clean = means_of_pixels(torch.from_numpy(truth.astype(np.float32))[None])[0].numpy()
        observed = (clean + random.normal(0, noise, clean.shape)).astype(np.float32)
        given = {"measure": means_of_pixels, "observed": observed, "noise": noise, "label": [name], "steps": 16}
        drawn = np.asarray(run.sample(draws, **given), np.float64)[..., 0]
        measured = observed[0].repeat(4, 0).repeat(4, 1)
        spread = drawn.std(0, ddof=1) / 64 * 255  # white from 64 of 255 levels on
        cells = np.stack([measured, *drawn[:shown], drawn.mean(0), spread, truth[0]])
        rows.append((CLOTHES.get(name, name), cells.round().clip(0, 255).astype(np.uint8)))
    page = table(rows, columns := ["measured", *[f"draw {i + 1}" for i in range(shown)], "mean", "deviation", "truth"])
    return page.crop((LEFT - 80, 0, LEFT + len(columns) * (CELL + GAP), page.height))  # wide letters on a phone


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?")
    parser.add_argument("--only", nargs="*", default=list(DRAWN), choices=DRAWN)
    parser.add_argument("--contest", help="name of a stored grid")
    parser.add_argument("--contest-of-all", action="store_true", help="several stored grids")
    parser.add_argument("--conditions", type=Path, nargs=3, metavar="PICTURE", help="of image_conditions.py")
    parser.add_argument("--guided", type=Path, metavar="PICTURE", help="rows of samples without names")
    parser.add_argument("--tiles", type=Path, metavar="FOLDER", help="seamless samples")
    parser.add_argument("--images", type=Path, help="the images of the contest")
    parser.add_argument("--out", help="name of its picture")
    parser.add_argument("--channels", type=Path, metavar="FOLDER", help="of examples/random_fields.py")
    parser.add_argument("--density", type=Path, metavar="FILE", help="the densities that the run was trained on")
    parser.add_argument("--posterior", action="store_true", help="held-out clothes from means of pixels")
    given = parser.parse_args()
    PICTURES.mkdir(exist_ok=True)
    if given.channels:
        channels(given.channels).save(PICTURES / "channels.png", optimize=True)
        return
    if given.contest:
        page = contest_samples(GRIDS / f"{given.contest}.png", given.images)
        page.quantize(256, dither=Image.Dither.NONE).save(PICTURES / given.out, optimize=True)
        return
    if given.contest_of_all:
        contest().quantize(256, dither=Image.Dither.NONE).save(PICTURES.parent / "contest.png", optimize=True)
        return
    if given.conditions:
        conditions(given.conditions).save(PICTURES.parent / "image-conditions.png", optimize=True)
        return
    if given.guided:
        guided(given.guided).quantize(256, dither=Image.Dither.NONE).save(PICTURES.parent / "guided.png", optimize=True)
        return
    if given.tiles:
        tiles(given.tiles).save(PICTURES.parent / "gallery-textures.png", optimize=True)
        return
    run = unfog.load(given.run)
    if given.density:
        densities(run, given.density).save(PICTURES / "densities.png", optimize=True)
        return
    if given.posterior:
        posterior(run, given.run).quantize(64).save(PICTURES / "posterior.png", optimize=True)
        return
    for name in given.only:
        path = PICTURES / f"{name}.png"
        classes = [CLOTHES.get(one, one) for one in run.classes[:COLUMNS]]
        table(DRAWN[name](run, given.run), classes).quantize(64).save(path, optimize=True)
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
