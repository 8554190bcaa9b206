"""Measure numbers of images: area, mean and slant of each, as metadata.csv beside them.

    python benchmarks/quality/measure_images.py fashion/
    unfog train fashion/ --condition area,mean,slant
    unfog evaluate runs/fashion --metrics obeys,worth
    unfog evaluate runs/fashion --metrics obeys --guidance 2

Area is the share of pixels over 25 of 255, mean the mean brightness, and slant how far the bright pixels lean to the
right: the covariance of column and row over the variance of the row, which is 0 for what stands upright.
"""

import csv
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image


def measure(pixels: NDArray[np.uint8]) -> dict[str, float]:
    """Return area, mean and slant of a grey image [H, W]."""
    weight = pixels / max(1.0, float(pixels.sum()))
    y, x = np.mgrid[: pixels.shape[0], : pixels.shape[1]].astype(float)
    y, x = y - (weight * y).sum(), x - (weight * x).sum()
    slant = -(weight * x * y).sum() / max(1e-9, float((weight * y * y).sum()))
    return {"area": float((pixels > 25).mean()), "mean": float(pixels.mean()), "slant": float(slant)}


def main(folder: Path) -> None:
    """Write folder/metadata.csv, with a row for each PNG below the folder."""
    rows = []
    for path in sorted(folder.rglob("*.png")):
        with Image.open(path, formats=["PNG"]) as image:
            numbers = measure(np.asarray(image.convert("L")))
        rows.append({"file_name": path.relative_to(folder).as_posix(), **{k: f"{v:.5g}" for k, v in numbers.items()}})
    with (folder / "metadata.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, ["file_name", "area", "mean", "slant"])
        table.writeheader()
        table.writerows(rows)
    print(f"{folder / 'metadata.csv'}: {len(rows):,} images")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
