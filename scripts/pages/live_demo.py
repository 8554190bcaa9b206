"""Draw the finished run of the site from the checkpoints of a real one:

    unfog train fashion --preset demo --budget 12m --seed 0 --checkpoint.every 40 --checkpoint.keep 100
    python scripts/pages/live_demo.py runs/fashion

writes docs/finished-run.webp, .json and .html. The picture has a row for each of some checkpoints and a column for each
sampling step; every cell shows the same samples, which begin at the same noise. The .json names rows and columns for
docs/site.js, and the .html is the report of the run.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

import unfog
from unfog.diffusion.steps import SamplingStep
from unfog.reporting.image_grids import grid
from unfog.reporting.report import write_report
from unfog.serve.run_files import checkpoint_steps

DOCS = Path(__file__).resolve().parents[2] / "docs"
ROWS, SAMPLES, STEPS, ACROSS, SEED, GAP = 8, 10, 8, 5, 1, 6
Pixels = NDArray[np.uint8]


def spread(steps: list[int], count: int) -> list[int]:
    """Return the first and the last of the steps, and between them those that are nearest to a geometric series."""
    kept = {0, steps[-1]} & set(steps)
    wanted = np.geomspace(min(step for step in steps if step), steps[-1], count - len(kept) + 1)
    return sorted(kept | {min(steps, key=lambda step: abs(step - want)) for want in wanted})


def columns(folder: Path, step: int) -> tuple[list[float], list[Pixels]]:
    """Return the share of noise at each sampling step of a checkpoint, from 1 to 0, and the samples there."""
    run = unfog.load(folder, step=step)
    shares, states = list[float](), list[Pixels]()

    def watch(seen: SamplingStep) -> None:
        alpha, sigma = (float(part) for part in run.config.diffusion.path(torch.tensor(seen.logsnr).double()))
        shares.append(sigma / (alpha + sigma))
        # With the variance of an image at every level.
        states.append(grid(run.show(seen.x_t / (alpha**2 + sigma**2) ** 0.5), ACROSS, scale=1))

    samples = run.sample(SAMPLES, seed=SEED, steps=STEPS, observe=watch)
    return [*shares, 0.0], [*states, grid(run.config.view(np.asarray(samples)), ACROSS, scale=1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path)
    folder = parser.parse_args().run
    rows = spread(sorted(checkpoint_steps(folder)), ROWS)
    cells = [columns(folder, step) for step in rows]
    every = np.concatenate([states for _, states in cells])
    Image.fromarray(grid(every, STEPS + 1, scale=1, gap=GAP)).save(DOCS / "finished-run.webp", quality=40, method=6)
    noise = [round(share, 3) for share in cells[-1][0]]
    about = {"steps": rows, "noise": noise, "size": [every.shape[2], every.shape[1]], "gap": GAP}
    (DOCS / "finished-run.json").write_text(json.dumps(about) + "\n", encoding="utf-8")
    shutil.copyfile(write_report(folder), DOCS / "finished-run.html")
    for name in ("webp", "html"):
        print(name, (DOCS / f"finished-run.{name}").stat().st_size)


if __name__ == "__main__":
    main()
