"""Draw pictures from a run of ours, for score.py: `draw.py RUN N SEED FOLDER` writes pictures.npy and drawn.json."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import unfog
from unfog.reporting.progress import Progress

import numpy as np


def main(path: Path, n: int, seed: int, folder: Path) -> None:
    """As `unfog sample RUN -n N` does, counting what the network is shown."""
    run, shown = unfog.load(path), 0

    def count(module: object, inputs: tuple[np.ndarray, ...]) -> None:
        nonlocal shown
        shown += len(inputs[0])

    run.network.register_forward_pre_hook(count)
    started = time.perf_counter()
    with Progress("drawing", n) as progress:
        pictures = run.sample(n, seed=seed, guide="none", batch=100, progress=progress.update)  # in the calls of peers
    seconds = time.perf_counter() - started
    np.save(folder / "pictures.npy", pictures)
    said = f"{run.config.sampler.kind}, {run.config.sampler.steps} steps"
    facts = {"n": n, "seed": seed, "seconds": seconds, "calls": shown / n, "sampler": said}
    facts["parameters"] = sum(p.numel() for p in run.network.parameters())
    (folder / "drawn.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
