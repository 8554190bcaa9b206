"""What an objective is worth for the same number of images: trains variants on `fashion` at 16x16 and compares them.

    python benchmarks/objectives_fashion.py OUT "name: flags of unfog train" …

Every variant is trained on 16,000 images with the network `tiny`, once for each of two seeds, so that a busy machine
changes nothing but the time it takes. Scored as `quality_fashion.py` does, by its classifier, which sees pictures and
held-out images alike enlarged to 28x28: the Frechet distance (FD) of 1,000 drawn pictures, and the share of them that
are taken for the class that was asked for. What is there already is not trained again.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import unfog
from unfog.data.dataset import PixelArray
from unfog.data.prepare import prepare
from unfog.data.settings import Data
from unfog.data.sources.registry import open_source
from unfog.pipeline.generate import sample_grid
from unfog.reporting.image_grids import save_png

import numpy as np
import torch
from quality_fashion import COUNT, as_input, frechet, trained_classifier
from torch import Tensor
from torch.nn import functional as F

COMMON = (
    "--network tiny --size 16 --images 16000 --log.every 25 --preview.every -1 --evaluate.every -1 "
    "--checkpoint.every -1"
)
SEEDS = (0, 1)


def enlarged(pixels: PixelArray) -> Tensor:
    """uint8 [N, 1, 16, 16] to float [N, 1, 28, 28] in [-1, 1]."""
    return F.interpolate(as_input(pixels), size=28, mode="bilinear", align_corners=False)


def main(out: Path, variants: list[str]) -> None:
    """Train each variant with each seed, draw from it, print a row."""
    data = prepare(open_source("fashion"), Data(size=16))
    assert data.train.labels is not None
    network = trained_classifier(enlarged(data.train.pixels), torch.from_numpy(data.train.labels))
    with torch.no_grad():
        reference = network.body(enlarged(data.held_out.pixels))
        floor = frechet(network.body(enlarged(data.train.pixels[:: len(data.train) // COUNT][:COUNT])), reference)
        right = (network(enlarged(data.held_out.pixels)).argmax(1).numpy() == data.held_out.labels).mean()
    print(f"classifier: {right:.3f} of the held-out images right; FD of training images {floor:.2f}", flush=True)
    for variant in variants:
        name, _, flags = variant.partition(":")
        for seed in SEEDS:
            folder = out / f"{name}-{seed}"
            command = [sys.executable, "-m", "unfog", "train", "fashion", "--out", str(folder)]
            if not folder.exists():
                subprocess.run(
                    [*command, *COMMON.split(), "--seed", str(seed), *flags.split()],
                    check=True,
                    stderr=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                )
            run = unfog.load(folder)
            pictures = run.sample(COUNT, guidance=1.0, batch=100)
            save_png(out / f"{name}-{seed}.png", out, sample_grid(pictures[:100], run.classes))
            with torch.no_grad():
                x = enlarged(pictures.transpose(0, 3, 1, 2))
                share = (network(x).argmax(1).numpy() == np.arange(COUNT) % 10).mean()
                distance = frechet(network.body(x), reference)
            print(f"{name:24} seed {seed} | FD {distance:6.2f} | right {share:.3f}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), sys.argv[2:])
