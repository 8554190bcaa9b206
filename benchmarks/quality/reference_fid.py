"""Checks the FID network, its resize and the arithmetic against published figures: CIFAR-10 train against test.

    python benchmarks/quality/reference_fid.py TRAIN TEST N…      # folders of images; N of each, or 0 for all

With all 50,000 and 10,000 the literature has 3.15. Features are kept in the cache, so it goes on where it was stopped
and larger N cost only what is new. Images are taken in a seeded random order, so that N of them are N of any class.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from unfog.evaluation.features import compute_features, open_features
from unfog.evaluation.metrics import compare_features
from unfog.reporting.progress import Progress, say

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image


class Files:
    """Images of a folder in a random order, read as they are asked for."""

    def __init__(self, folder: str, count: int) -> None:
        paths = sorted(Path(folder).rglob("*.png"))
        order = np.random.default_rng(0).permutation(len(paths))
        self.paths = [paths[i] for i in order[: count or None]]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, key: slice) -> NDArray[np.uint8]:
        pictures = [np.asarray(Image.open(path).convert("RGB")) for path in self.paths[key]]
        return np.stack(pictures).transpose(0, 3, 1, 2)


def main(train: str, test: str, counts: list[int]) -> None:
    features = open_features("inception", "cuda" if torch.cuda.is_available() else "cpu")
    for count in counts:
        found: list[torch.Tensor] = []
        for folder in (train, test):
            # A key a chunk, as N of them begin with the same chunks whatever N is.
            files, chunks = Files(folder, count), []
            with Progress(f"{count} of {Path(folder).name}", len(files)) as progress:
                for first in range(0, len(files), 500):
                    part = files[first : first + 500]
                    chunks.append(compute_features(part, features, f"{Path(folder).resolve()} seed 0 from {first}"))
                    progress.update(first + len(part))
            found.append(torch.cat(chunks).to(features.device))
        started = time.perf_counter()
        real, other = found
        metrics = ["fid", "fd_infinity", "kid", "precision", "recall", "density", "coverage"]
        for one in compare_features(metrics, real, other, features):
            print(one, flush=True)
        (itself,) = compare_features(["fid"], real, real, features)
        print("train against itself:", itself, flush=True)
        say(f"measured in {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2], [int(n) for n in sys.argv[3:]])
