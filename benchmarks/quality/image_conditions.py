"""Draw held-out pictures of a run from `degrade` or `grey`, and measure them against the truth.

    python benchmarks/quality/image_conditions.py RUN OUT.png [--images 64] [--draws 8] [--steps 16]

Prints the mean PSNR over held-out images, with its standard error, of: what is given (for `degrade` by bicubic
interpolation), one draw, and the mean of the draws. OUT.png has a row for each: given, three draws, mean, truth.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import unfog
from unfog.data.columns.made import add_made
from unfog.data.prepare import prepare
from unfog.data.sources.registry import open_source

import numpy as np
from numpy.typing import NDArray
from PIL import Image

SHOWN = 10
GREY = 2.0  # of 255, mean distance of channels from their mean, up to which an image is left out


def psnr(pictures: NDArray[np.float64], truth: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Return the peak signal-to-noise ratio of each picture [N, H, W, C] of 0 to 255, in decibels."""
    error: NDArray[np.float64] = ((pictures - truth) ** 2).mean((1, 2, 3))
    return 10 * np.log10(255**2 / np.maximum(error, 1e-9))


def main() -> None:
    """Draw, print and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--draws", type=int, default=8)
    parser.add_argument("--steps", type=int, default=16)
    asked = parser.parse_args()
    run = unfog.load(asked.run)
    kind = run.config.columns[0].kind
    images: Any = add_made(prepare(open_source(run.config.source), run.config.data)).held_out
    spread = np.abs(images.pixels.astype(np.int64) - images.pixels.mean(1, keepdims=True)).mean((1, 2, 3))
    rows = np.flatnonzero(spread > GREY)  # grey images have nothing to colour
    rows = rows[np.linspace(0, len(rows) - 1, min(asked.images, len(rows))).astype(np.int64)]
    truth = images.pixels[rows].transpose(0, 2, 3, 1)
    made = images.columns[kind].values[rows].transpose(0, 2, 3, 1)
    given = ((made + 1) * 127.5).clip(0, 255).repeat(truth.shape[-1] // made.shape[-1], -1)
    draws = [
        np.asarray(run.sample(len(truth), given={kind: truth}, steps=asked.steps, guidance=1, seed=seed), np.float64)
        for seed in range(asked.draws)
    ]
    mean = np.mean(draws, 0)
    for name, pictures in {"given": given, "one draw": draws[0], f"mean of {len(draws)} draws": mean}.items():
        values = psnr(pictures, truth)
        print(f"{name:18} PSNR {values.mean():.2f} dB, standard error {values.std() / len(values) ** 0.5:.2f}")
    gain = psnr(draws[0], truth) - psnr(given, truth)
    print(f"one draw - given: {gain.mean():+.2f} dB, standard error {gain.std() / len(gain) ** 0.5:.2f}, n {len(gain)}")
    lines = [np.concatenate(list(each[:SHOWN]), 1) for each in (given, *draws[:3], mean, truth)]
    sheet = np.concatenate(lines).round().clip(0, 255).astype(np.uint8)
    Image.fromarray(sheet).resize((2 * sheet.shape[1], 2 * sheet.shape[0]), Image.Resampling.NEAREST).save(asked.out)


if __name__ == "__main__":
    main()
