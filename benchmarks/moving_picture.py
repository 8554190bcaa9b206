"""Draw the moving picture of the README: real images that a run has not seen, beside samples of their captions.

    make demo-text
    python benchmarks/moving_picture.py RUN HELD_OUT docs/hero.webp

HELD_OUT is a folder of images with `metadata.csv` (`file_name,text`). Its rows are shown evenly spread, so that nobody
chooses them. The samples appear out of noise, as the sampler removes it.
"""

from __future__ import annotations

import argparse
import csv
import io
from pathlib import Path

import unfog
from unfog.diffusion.steps import SamplingStep

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

LARGEST = 1_000_000  # bytes
SAMPLES, BLOCKS = 3, 2  # of a caption; side by side
CELL, GAP, NAME, TOP, FONT = 112, 4, 40, 76, 25  # letters that a phone can show
INK, GREY, PAPER = (34, 34, 34), (120, 120, 120), (255, 255, 255)
Pixels = NDArray[np.uint8]


def denoise(run: unfog.Run, prompts: list[str], steps: int, seed: int, guidance: float) -> list[Pixels]:
    """Return the samples at each step, from noise to the end: arrays uint8 [N, H, W, 3]."""
    path, seen = run.config.diffusion.path, []

    def keep(step: SamplingStep) -> None:
        alpha, sigma = path(torch.tensor(step.logsnr, dtype=torch.float64))
        seen.append(run.show(step.x_t / float((alpha**2 + sigma**2).sqrt())))

    samples = run.sample(len(prompts), prompt=prompts, steps=steps, seed=seed, guidance=guidance, observe=keep)
    return [*seen, np.asarray(samples)]


def frame(captions: list[str], real: list[Image.Image], made: Pixels, state: str) -> Image.Image:
    """Return one frame: below each caption the real image, and samples beside it."""
    rows, cell = -(-len(captions) // BLOCKS), CELL + GAP
    block = (1 + SAMPLES) * cell + 4 * GAP
    page = Image.new("RGB", (BLOCKS * block, TOP + rows * (NAME + cell)), PAPER)
    draw = ImageDraw.Draw(page)
    font = ImageFont.load_default(FONT)
    draw.text((GAP, FONT), state, INK, font, anchor="lm")
    for column in range(BLOCKS):
        draw.text((column * block + GAP, TOP - FONT / 2), "real", GREY, font, anchor="lm")
        draw.text((column * block + cell + 3 * GAP, TOP - FONT / 2), "generated", GREY, font, anchor="lm")
    for number, caption in enumerate(captions):
        left, top = number // rows * block + GAP, TOP + number % rows * (NAME + cell)
        draw.text((left, top + NAME / 2), caption, INK, font, anchor="lm")
        page.paste(large(real[number]), (left, top + NAME))
        for i, sample in enumerate(made[number * SAMPLES : (number + 1) * SAMPLES]):
            page.paste(large(Image.fromarray(sample)), (left + (i + 1) * cell + 2 * GAP, top + NAME))
    return page


def large(image: Image.Image) -> Image.Image:
    """Return an image at the size of a cell, its pixels as squares."""
    return image.resize((CELL, CELL), Image.Resampling.NEAREST)


def write(path: Path, frames: list[Image.Image]) -> None:
    """Write an animation that rests at its last frame, in the best quality that fits into LARGEST bytes."""
    times = [150] * (len(frames) - 1) + [5000]
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
    parser.add_argument("--captions", type=int, default=8, help="number of them")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--guidance", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    run = unfog.load(given.run)
    with (given.images / "metadata.csv").open(encoding="utf-8", newline="") as file:
        table = list(csv.DictReader(file))
    chosen = [table[(2 * i + 1) * len(table) // (2 * given.captions)] for i in range(given.captions)]
    captions = [row["text"] for row in chosen]
    prompts = [caption for caption in captions for _ in range(SAMPLES)]
    drawn = denoise(run, prompts, given.steps, given.seed, given.guidance)
    side = drawn[0].shape[1]
    real = [Image.open(given.images / row["file_name"]).convert("RGB") for row in chosen]
    real = [image.resize((side, side), Image.Resampling.LANCZOS) for image in real]
    frames = []
    for number, samples in enumerate(drawn):
        at = f"step {number} of {given.steps}" if number < len(drawn) - 1 else f"after {given.steps} steps"
        frames.append(frame(captions, real, samples, f"Captions that no training image has: {at}"))
    write(given.out, frames)


if __name__ == "__main__":
    main()
