"""Draw the moving picture of the README: real images beside samples of a run, which appear out of noise.

    python benchmarks/moving_picture.py RUN IMAGES docs/hero.webp --caption "20 minutes of one core"

IMAGES is the folder that RUN was trained on, with a sub-folder for each class. Each row has one class, with its name.
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

import unfog
from unfog.diffusion.steps import SamplingStep

Pixels = NDArray[np.uint8]

LARGEST = 1_000_000  # bytes
COLUMNS, SCALE, GAP, LEFT, TOP = 5, 2, 4, 120, 30
INK, PAPER = (34, 34, 34), (255, 255, 255)


def real_images(folder: Path, size: int) -> list[Image.Image]:
    """Return images that are spread evenly over a folder."""
    files = sorted(folder.glob("*.png"))
    chosen = [files[(2 * i + 1) * len(files) // (2 * COLUMNS)] for i in range(COLUMNS)]
    return [Image.open(file).convert("RGB").resize((size, size), Image.Resampling.LANCZOS) for file in chosen]


def frame(rows: list[tuple[str, list[Image.Image], list[Image.Image]]], left: str, right: str) -> Image.Image:
    """Return one frame: for each row its name, real images, and generated ones."""
    cell = rows[0][1][0].width * SCALE + GAP
    middle = LEFT + COLUMNS * cell + 4 * GAP
    width, height = middle + COLUMNS * cell, TOP + len(rows) * cell
    page = Image.new("RGB", (width, height), PAPER)
    draw, bold, plain = ImageDraw.Draw(page), ImageFont.load_default(16), ImageFont.load_default(13)
    draw.text((LEFT, TOP / 2), left, INK, bold, anchor="lm")
    draw.text((middle, TOP / 2), right, INK, bold, anchor="lm")
    for row, (name, real, made) in enumerate(rows):
        top = TOP + row * cell
        draw.text((LEFT - 8, top + cell / 2), name, INK, plain, anchor="rm")
        for start, images in ((LEFT, real), (middle, made)):
            for column, image in enumerate(images):
                large = image.resize((image.width * SCALE,) * 2, Image.Resampling.NEAREST)
                page.paste(large, (start + column * cell, top))
    draw.line((middle - 2 * GAP, TOP, middle - 2 * GAP, height), (200, 200, 200), 2)
    return page


def denoise(run: unfog.Run, labels: list[str], steps: int, seed: int, guidance: float) -> list[Pixels]:
    """Return the samples at each step, from noise to the end: arrays uint8 [N, H, W, 3]."""
    path, seen = run.config.diffusion.path, []

    def keep(step: SamplingStep) -> None:
        alpha, sigma = path(torch.tensor(step.logsnr, dtype=torch.float64))
        seen.append(run.show(step.x_t / float((alpha**2 + sigma**2).sqrt())))

    samples = run.sample(len(labels), label=labels, steps=steps, seed=seed, guidance=guidance, observe=keep)
    return [*seen, np.asarray(samples)]


def write(path: Path, frames: list[Image.Image], seconds: float) -> None:
    """Write an animation that shows its last frame for four seconds, in the best quality that fits into LARGEST bytes."""
    times = [round(1000 * seconds / len(frames))] * (len(frames) - 1) + [4000]
    for quality in (90, 80, 70, 60, 45, 30):
        stream = io.BytesIO()
        frames[0].save(
            stream, "WEBP", save_all=True, append_images=frames[1:], duration=times, loop=0, quality=quality, method=6
        )
        if len(stream.getvalue()) < LARGEST:
            break
    path.write_bytes(stream.getvalue())
    print(f"{path}: {len(frames)} frames, {len(stream.getvalue()):,} bytes at quality {quality}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("images", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--classes", nargs="*", default=[], help="default: all of them")
    parser.add_argument("--caption", default="", help="what is above the samples, behind 'generated'")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--guidance", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    run = unfog.load(given.run)
    classes = given.classes or list(run.classes)
    labels = [name for name in classes for _ in range(COLUMNS)]
    frames = []
    drawn = denoise(run, labels, given.steps, given.seed, given.guidance)
    real = [real_images(given.images / name, drawn[0].shape[1]) for name in classes]
    for number, samples in enumerate(drawn):
        made = [Image.fromarray(one) for one in samples]
        state = f"generated{given.caption and ', '}{given.caption}"
        state += f": step {number} of {given.steps}" if number < len(drawn) - 1 else ""
        rows = [
            (name.replace("_", " "), real[i], made[i * COLUMNS : (i + 1) * COLUMNS]) for i, name in enumerate(classes)
        ]
        frames.append(frame(rows, "real", state))
    write(given.out, frames, 3.0)


if __name__ == "__main__":
    main()
