"""Draw held-out pictures of a run from `degrade`, `grey` or a mask alone, and measure them against the truth.

    python benchmarks/quality/image_conditions.py RUN OUT.png [--condition grey] [--images 64] [--draws 8] [--steps 16]

Prints the mean PSNR over held-out images, with its standard error, of: what is given (for `degrade` by bicubic
interpolation), one draw, and the mean of the draws. For masks of `openmoji.py` it prints the share of pixels whose
colour is that of the mask, of draws, of the truth, and of draws with the masks of other pictures. OUT.png has a row for
each: given, three draws, mean, truth. Other conditions of the run are not told.
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
from openmoji import COLOURS, nearest_colour
from PIL import Image

SHOWN = 10
GREY = 2.0  # of 255, mean distance of channels from their mean, up to which an image is left out


def psnr(pictures: NDArray[np.float64], truth: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Return the peak signal-to-noise ratio of each picture [N, H, W, C] of 0 to 255, in decibels."""
    error: NDArray[np.float64] = ((pictures - truth) ** 2).mean((1, 2, 3))
    return 10 * np.log10(255**2 / np.maximum(error, 1e-9))


def agreement(pictures: NDArray[np.float64], labels: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the share of pixels of each picture [N, H, W, 3] whose nearest colour is that of its mask [N, H, W].

    The background is white.
    """
    white = [*COLOURS].index("white") + 1
    shares: NDArray[np.float64] = (nearest_colour(pictures) == np.where(labels == 0, white, labels)).mean((1, 2))
    return shares


def held_out_of(run: unfog.Run, name: str, count: int) -> tuple[NDArray[np.uint8], NDArray[Any], NDArray[np.float64]]:
    """Return held-out images [N, H, W, C], what a run is given of them, and that as pictures [N, H, W, C]."""
    images: Any = add_made(prepare(open_source(run.config.source), run.config.data)).held_out
    spread = np.abs(images.pixels.astype(np.int64) - images.pixels.mean(1, keepdims=True)).mean((1, 2, 3))
    rows = np.flatnonzero(spread > GREY)  # grey images have nothing to colour
    rows = rows[np.linspace(0, len(rows) - 1, min(count, len(rows))).astype(np.int64)]
    truth = images.pixels[rows].transpose(0, 2, 3, 1)
    column = images.columns[name]
    values = column.values[rows].transpose(0, 2, 3, 1)
    if column.kind == "mask":
        labels = np.array([int(one) for one in column.categories])[values[..., 0]]
        return truth, labels.astype(np.uint8), np.array([(255, 240, 245), *COLOURS.values()], np.float64)[labels]
    return truth, truth, ((values + 1) * 127.5).clip(0, 255).repeat(truth.shape[-1] // values.shape[-1], -1)


def main() -> None:
    """Draw, print and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--condition", default="")
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--draws", type=int, default=8)
    parser.add_argument("--steps", type=int, default=16)
    asked = parser.parse_args()
    run = unfog.load(asked.run)
    name = asked.condition or run.config.columns[0].name
    truth, told, given = held_out_of(run, name, asked.images)
    draws = [
        np.asarray(run.sample(len(truth), given={name: told}, steps=asked.steps, guidance=1, seed=seed), np.float64)
        for seed in range(asked.draws)
    ]
    mean = np.mean(draws, 0)
    if told is truth:
        for title, pictures in {"given": given, "one draw": draws[0], f"mean of {len(draws)} draws": mean}.items():
            show(title, "PSNR", psnr(pictures, truth))
        show("one draw - given", "PSNR", psnr(draws[0], truth) - psnr(given, truth))
        show("mean - given", "PSNR", psnr(mean, truth) - psnr(given, truth))
    else:
        labels = told.astype(np.int64)
        show("one draw", "agreement", agreement(draws[0], labels))
        show("truth", "agreement", agreement(truth.astype(np.float64), labels))
        show("masks of others", "agreement", agreement(draws[0], np.roll(labels, 1, 0)))
    lines = [np.concatenate(list(each[:SHOWN]), 1) for each in (given, *draws[:3], mean, truth)]
    sheet = np.concatenate(lines).round().clip(0, 255).astype(np.uint8)
    Image.fromarray(sheet).resize((2 * sheet.shape[1], 2 * sheet.shape[0]), Image.Resampling.NEAREST).save(asked.out)


def show(title: str, measure: str, values: NDArray[np.float64]) -> None:
    """Print the mean of a measure with its standard error."""
    print(f"{title:18} {measure} {values.mean():.3f}, standard error {values.std() / len(values) ** 0.5:.3f}")


if __name__ == "__main__":
    main()
