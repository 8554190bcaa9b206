"""Which recipe draws the better pictures in the same time: trains variants on `fashion` and compares them.

    python benchmarks/quality_fashion.py OUT "name: flags of unfog train" …

The Frechet distance (FD) is between features of drawn pictures and of the held-out images, all classes alike. The
features are the last hidden layer (64 numbers) of a small classifier that is trained here on the training images: for
28x28 grey clothes they say more than a network that was made for photographs. `right` is the share of drawn pictures
that the classifier takes for the class that was asked for. FD of 1,000 training images against the held-out ones is
printed as the floor. All of it is seeded; FD moves by a few percent with the seed of the drawing.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import unfog
from unfog.data.dataset import PixelArray
from unfog.data.prepare import prepare
from unfog.data.settings import Data
from unfog.data.sources.registry import open_source
from unfog.pipeline.generate import sample_grid
from unfog.reporting.image_grids import save_png
from unfog.reporting.records import read_metrics

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

COUNT = 1000


class Classifier(nn.Module):
    """Two convolutions and two linear layers; about 90% of held-out images right."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * 49, 64),
            nn.ReLU(),
        )
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 1, 28, 28] -> class scores [N, 10]."""
        scores: Tensor = self.head(self.body(x))
        return scores


def as_input(pixels: PixelArray) -> Tensor:
    """uint8 [N, 1, 28, 28] to float in [-1, 1]."""
    return torch.from_numpy(np.ascontiguousarray(pixels[:])).float() / 127.5 - 1


def trained_classifier(x: Tensor, y: Tensor) -> Classifier:
    """Eight epochs of Adam."""
    torch.manual_seed(0)
    network = Classifier()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    for _ in range(8):
        for index in torch.randperm(len(x)).split(128):
            optimizer.zero_grad()
            F.cross_entropy(network(x[index]), y[index]).backward()
            optimizer.step()
    return network.eval()


def frechet(a: Tensor, b: Tensor) -> float:
    """|mean difference|^2 + tr(A + B - 2 (A B)^(1/2)) of features [N, D] (Dowson & Landau 1982)."""
    a, b = a.double(), b.double()
    cov_a, cov_b = torch.cov(a.T), torch.cov(b.T)
    values, vectors = torch.linalg.eigh(cov_a)
    root = vectors @ values.clamp(min=0).sqrt().diag() @ vectors.T
    cross = torch.linalg.eigvalsh(root @ cov_b @ root).clamp(min=0).sqrt().sum()
    return float((a.mean(0) - b.mean(0)).square().sum() + cov_a.trace() + cov_b.trace() - 2 * cross)


@torch.no_grad()
def main(out: Path, variants: list[str]) -> None:
    """Train each variant, draw from it, print a row."""
    data = prepare(open_source("fashion"), Data())
    with torch.enable_grad():
        assert data.train.labels is not None
        network = trained_classifier(as_input(data.train.pixels), torch.from_numpy(data.train.labels))
    held_out = as_input(data.held_out.pixels)
    assert data.held_out.labels is not None
    right = (network(held_out).argmax(1).numpy() == data.held_out.labels).mean()
    reference = network.body(held_out)
    floor = frechet(network.body(as_input(data.train.pixels[:: len(data.train) // COUNT][:COUNT])), reference)
    print(f"classifier: {right:.3f} of the held-out images right; FD of training images {floor:.2f}", flush=True)
    for variant in variants:
        name, _, flags = variant.partition(":")
        folder, started = out / name, time.perf_counter()
        quiet = ["--preview.every", "-1", "--evaluate.every", "-1", "--checkpoint.every", "-1"]
        command = [sys.executable, "-m", "unfog", "train", "fashion", "--out", str(folder), *quiet, *flags.split()]
        if not folder.exists():
            subprocess.run(command, check=True, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - started
        run = unfog.load(folder)
        labels = np.arange(COUNT) % 10
        row = []
        for guidance in (1.0, 1.5):
            pictures = run.sample(COUNT, guidance=guidance, batch=100)
            x = as_input(pictures.transpose(0, 3, 1, 2))
            share = (network(x).argmax(1).numpy() == labels).mean()
            row.append(f"guidance {guidance}: FD {frechet(network.body(x), reference):6.2f} right {share:.3f}")
            save_png(out / f"{name}-{guidance}.png", out, sample_grid(pictures[:100], run.classes))
        logged = read_metrics(folder / "metrics.jsonl")
        speed = np.median([row["images_per_second"] for row in logged if "images_per_second" in row])
        images = run.config.training.images
        print(f"{name:24} {images:8,} images, {speed:5.0f}/s, {seconds:4.0f} s | {' | '.join(row)}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), sys.argv[2:])
