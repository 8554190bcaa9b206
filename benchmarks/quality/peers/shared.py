"""What both peers' scripts need beside the peers: a log of their pace, and pictures as score.py reads them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

BATCH = 100


class Log:
    """metrics.jsonl: images seen and seconds since the first step, at every tenth step."""

    def __init__(self, folder: Path, batch: int):
        self.file, self.batch, self.steps = (folder / "metrics.jsonl").open("w"), batch, 0
        self.started = time.perf_counter()

    def step(self) -> None:
        """After an optimiser step."""
        self.steps += 1
        if self.steps % 10 == 0:
            row = {"images": self.steps * self.batch, "seconds": time.perf_counter() - self.started}
            self.file.write(json.dumps(row) + "\n")
            self.file.flush()


@torch.inference_mode()
def draw_all(
    folder: Path, network: torch.nn.Module, draw: Callable[[int], torch.Tensor], n: int, seed: int, sampler: str
) -> None:
    """Draw n pictures [N, 3, H, W] in [0, 1], counting what the network is shown: pictures.npy and drawn.json."""
    shown, parts, started = 0, [], time.perf_counter()

    def count(module: object, inputs: tuple[torch.Tensor, ...]) -> None:
        nonlocal shown
        shown += len(inputs[0])

    network.register_forward_pre_hook(count)
    for first in range(0, n, BATCH):
        parts.append((draw(min(BATCH, n - first)).clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).numpy())
    facts = {"n": n, "seed": seed, "seconds": time.perf_counter() - started, "calls": shown / n, "sampler": sampler}
    facts["parameters"] = sum(p.numel() for p in network.parameters())
    np.save(folder / "pictures.npy", np.concatenate(parts))
    (folder / "drawn.json").write_text(json.dumps(facts))
