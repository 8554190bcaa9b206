"""Draw pictures from every trained cell by its own sampler, and measure them against the images it was trained on.

    python benchmarks/quality/score.py OUT --peers PEERS [--n 2500] [--only NAMES]

Writes score.json into each cell, with KID, FID and what n, features and sampler they are of, and OUT/grids/*.png. What
is drawn or measured is not drawn or measured again. FID is biased at small n: compare it at equal n alone.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from unfog.evaluation.features import Features, open_features
from unfog.evaluation.metrics import compare_features
from unfog.reporting.image_grids import grid, save_png
from unfog.reporting.progress import Progress

import numpy as np
import torch
from contest import Cell, ladder, run, write
from PIL import Image
from torch import Tensor

METRICS = ("kid", "fid", "precision", "recall")
SHOWN = 64


def main() -> None:
    """Every cell there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--peers", type=Path, default=Path("peers"), help="environment that make_peers.sh made")
    parser.add_argument("--features", default="inception", help="inception, pixels, or a TorchScript file")
    parser.add_argument("--n", type=int, default=2500, help="pictures; the FID of 2,048 or fewer is refused")
    parser.add_argument("--reference", type=int, default=0, help="images of the set, evenly spread; 0: all")
    parser.add_argument("--peer-steps", type=int, default=1000, help="of the peers' samplers; 1000 is their default")
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--threads", type=int, default=0, help="0: as many as torch takes")
    asked = parser.parse_args()
    features: Features | None = None
    wanted = [name for name in asked.only.split(",") if name]
    for cell in cells(asked.out):
        if wanted and cell.contestant.name not in wanted:
            continue
        drawn = cell.folder / "drawn.json"
        if not drawn.exists() or json.loads(drawn.read_text())["n"] != asked.n:
            run(cell.draw(asked.n, asked.peers, asked.peer_steps), cell.folder / "log.txt", asked.threads)
            cell.score.unlink(missing_ok=True)
        if not cell.score.exists():
            features = features or open_features(asked.features)
            score(cell, features, asked.reference)


def cells(out: Path) -> list[Cell]:
    """Those that are trained, in the order of the ladder."""
    found = []
    for contestant in ladder():
        for trained in sorted(out.glob(f"cells/*/*/{contestant.name}-*/trained.json")):
            name, _, seed = trained.parent.name.rpartition("-")
            if name == contestant.name:
                minutes = float(trained.parent.parent.name.removesuffix("m"))
                found.append(Cell(out, trained.parent.parent.parent.name, contestant, minutes, int(seed)))
    return found


def score(cell: Cell, features: Features, images: int) -> None:
    """Measure one cell, and show its first pictures."""
    pictures = np.load(cell.folder / "pictures.npy")
    fake = embedded(features, torch.from_numpy(pictures).permute(0, 3, 1, 2))
    measured = compare_features(METRICS, reference(cell, features, images), fake, features=features)
    trained, drawn = (json.loads((cell.folder / f"{name}.json").read_text()) for name in ("trained", "drawn"))
    write(cell.score, {"trained": trained, "drawn": drawn, "measured": [asdict(one) for one in measured]})
    folder = cell.out / "grids"
    folder.mkdir(exist_ok=True)
    name = f"{cell.set}-{cell.minutes:g}m-{cell.contestant.name}-{cell.seed}.png"
    save_png(folder / name, folder, grid(pictures[:SHOWN], columns=16, scale=2))
    print(f"{cell.set} {cell.contestant.name}: " + "; ".join(map(str, measured[:2])), flush=True)


def reference(cell: Cell, features: Features, images: int) -> Tensor:
    """Features of so many images of the set, evenly spread (0: all of them), kept in a file beside it."""
    files = sorted(cell.images.glob("*.png"))
    if 0 < images < len(files):
        files = [files[i * len(files) // images] for i in range(images)]
    path = cell.out / "sets" / f"{cell.set}-{len(files)}-{features.digest[:16]}.npy"
    if not path.exists():
        pixels = np.stack([np.asarray(Image.open(file)) for file in files])
        np.save(path, embedded(features, torch.from_numpy(pixels).permute(0, 3, 1, 2)).numpy())
    return torch.from_numpy(np.load(path))


def embedded(features: Features, pixels: Tensor) -> Tensor:
    """Features of uint8 [N, C, H, W], with progress."""
    parts = []
    with Progress("features", len(pixels)) as progress:
        for part in pixels.split(25):
            parts.append(features(part.contiguous()).cpu())
            progress.update(sum(map(len, parts)))
    return torch.cat(parts)


if __name__ == "__main__":
    main()
