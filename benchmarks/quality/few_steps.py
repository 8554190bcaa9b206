"""What few sampling steps cost in quality: a run's pictures by sampler, steps and grid, against many steps.

    python benchmarks/quality/few_steps.py RUN OUT [-n 1000] [--features inception|FILE.pt|clothes] [--reference 2500]
        [--no-away] [CELL …]

A CELL is a sampler with its settings, as `dpmpp:steps=10,grid=karras`, and may end in `@1.5` for guidance, or in
`@1.5[0.2-0.8]` for guidance at these shares of noise, or in `@2<200` for guidance by the checkpoint of step 200; and in
`/bf16` to be drawn in that.
Without one, a list of them is measured. Pictures have the labels of the training set in its proportions, and the same
noise in every cell. FD and KID are against the training images, with the standard error over the choice of pictures;
`clothes` are the features of quality_fashion.py, for runs on fashion. `calls` is how often a network is asked for a
picture, those of guidance and of a guide included, and `away` the root mean square distance of twenty pictures
from where 128 steps of unipc lead from the same noise, for samplers that are not random; `--no-away` leaves it out.
`bands` are the variances of luma by frequency, coarse to fine, over those of the training images, and the standard
error of the finest. Pictures are kept in OUT, a hundred at a time, so that an interrupted measurement goes on; a grid
of each cell is there.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import unfog
from unfog.config.spec_strings import parse_value
from unfog.config.toml import update
from unfog.data.prepare import prepare
from unfog.data.sources.registry import open_source
from unfog.diffusion.denoiser import Denoiser
from unfog.diffusion.sampler import RANDOM, Sampler
from unfog.evaluation.features import open_features
from unfog.evaluation.metrics import compare_features
from unfog.evaluation.pixel_metrics import compare_detail
from unfog.inference.guide import resolve_guidance
from unfog.inference.run import Run
from unfog.pipeline.generate import GenerationSettings, generate_images, proportional_labels, sample_grid
from unfog.reporting.image_grids import Pixels, save_png
from unfog.reporting.progress import say
from unfog.training.settings import SamplingPrecision
from unfog.values.columns import CLASS
from unfog.values.condition_format import Given

import numpy as np
import torch
from torch import Tensor

AT_ONCE, AWAY = 100, 20
CELLS = [
    *(f"{kind}:steps={n}" for n in (10, 20, 5) for kind in ("ddim", "dpmpp", "unipc", "dpmpp-sde", "ddpm")),
    *(f"{kind}:steps={n},order=3" for n in (10, 20) for kind in ("dpmpp", "unipc")),
    *(
        f"{kind}:steps={n},grid={grid}"
        for n in (10, 20)
        for kind in ("dpmpp", "unipc")
        for grid in ("karras", "logsnr")
    ),
    *(f"{kind}:steps={n}" for n in (5, 10) for kind in ("heun", "edm")),
    *(f"adaptive:tolerance={t}" for t in (0.1, 0.05, 0.025)),
    "ddpm:steps=1000",
]


@dataclass(frozen=True)
class Cell:
    """How pictures are drawn."""

    name: str
    sampler: Sampler
    guidance: float = 1.0
    interval: tuple[float, float] = (0.0, 1.0)
    guide: int | None = None
    precision: SamplingPrecision = "fp32"


def cell_of(text: str, base: Sampler) -> Cell:
    """The cell that a text stands for."""
    match = re.fullmatch(r"([\w-]+)(?::([^@/]*))?(?:@([\d.]+)(?:\[([\d.]+)-([\d.]+)\])?(?:<(\d+))?)?(/bf16)?", text)
    if match is None:
        sys.exit(f"{text!r} is no cell; write it as dpmpp:steps=10 or dpmpp:steps=10@1.5[0.2-0.8]")
    kind, settings, guidance, low, high, step, half = match.groups()
    changes: dict[str, object] = {"kind": kind, "grid": "schedule"}
    for assignment in filter(None, (settings or "").split(",")):
        key, value = assignment.split("=")
        changes[key] = parse_value(type(getattr(base, key)) if key != "grid" else str, [value])
    interval = (float(low), float(high)) if low else (0.0, 1.0)
    sampler, guide = update(base, changes, "sampler"), int(step) if step else None
    return Cell(text, sampler, float(guidance or 1), interval, guide, "bf16" if half else "fp32")


def pictures_of(run: Run, cell: Cell, labels: tuple[int, ...], n: int, out: Path) -> tuple[Pixels, int]:
    """The cell's pictures, uint8 [n, H, W, C], and the network's calls for each."""
    guide = guide_of(run, cell)
    kept = out / "pictures" / re.sub(r"[^\w.=@-]+", "_", cell.name)
    kept.mkdir(parents=True, exist_ok=True)
    parts, calls = [], 0
    for first in range(0, n, AT_ONCE):
        file = kept / f"{first:06d}.npz"
        if not file.exists():
            seen: list[int] = []
            # Each part has a seed of its own, as the noise of a picture goes by its number in the drawing.
            drawing = GenerationSettings(
                AT_ONCE,
                cell.sampler,
                given_of(labels[first : first + AT_ONCE]),
                seed=first,
                guidance=cell.guidance,
                interval=cell.interval,
                batch=AT_ONCE,
                precision=cell.precision,
            )
            pixels = generate_images(run.network, run.config, drawing, guide=guide, calls=seen.append)
            np.savez(file, pixels=pixels, calls=max(seen))
        with np.load(file) as stored:
            parts.append(stored["pixels"])
            calls = max(calls, int(stored["calls"]))
    return np.concatenate(parts)[:n], calls


def given_of(labels: tuple[int, ...]) -> Given:
    """Conditions of samples that cycle through these labels."""
    return ((CLASS, labels),) if labels else ()


def guide_of(run: Run, cell: Cell) -> Denoiser | None:
    """The earlier checkpoint that guides the cell's pictures."""
    return None if cell.guide is None else resolve_guidance(run, cell.guide, cell.guidance, cell.precision).guide


def distance(run: Run, cell: Cell, labels: tuple[int, ...], drawn: Pixels) -> float:
    """How far the first pictures are from what many steps give, in [-1, 1] scale."""
    many = replace(cell.sampler, kind="unipc", steps=128, grid="schedule", order=2)
    drawing = GenerationSettings(
        AWAY, many, given_of(labels[:AWAY]), guidance=cell.guidance, interval=cell.interval, batch=AWAY
    )
    guide = guide_of(run, cell)
    exact = generate_images(run.network, run.config, drawing, guide=guide)
    difference = (drawn[:AWAY].astype(float) - exact) / 127.5
    return float(np.sqrt((difference**2).mean((1, 2, 3))).mean())


def clothes(train: Pixels, labels: np.ndarray | None) -> torch.nn.Module:
    """The classifier of quality_fashion.py."""
    if labels is None:
        sys.exit("the features `clothes` are for runs with classes, on fashion")
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from quality_fashion import as_input, trained_classifier

    network = trained_classifier(as_input(train), torch.from_numpy(labels))
    return torch.nn.Sequential(_Scaled(), network.body)


class _Scaled(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.float() / 127.5 - 1


@torch.no_grad()
def main() -> None:
    """Measure each cell, and print its row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("out", type=Path)
    parser.add_argument("-n", type=int, default=1000)
    parser.add_argument("--features", default="clothes")
    parser.add_argument("--reference", type=int, default=0, help="training images, evenly spread; 0: all")
    parser.add_argument("--no-away", action="store_true", help="leave the distance to many steps out")
    parser.add_argument("cells", nargs="*")
    given = parser.parse_intermixed_args()
    run = unfog.load(given.run)
    data = prepare(open_source(run.config.source), run.config.data).train
    taken = data.take(np.arange(len(data)))
    pixels, data_labels = taken.pixels, taken.labels
    with torch.enable_grad():
        embed = clothes(pixels, data_labels) if given.features == "clothes" else open_features(given.features)
    labels = proportional_labels(data_labels, given.n) if run.classes else ()

    def features(images: Pixels) -> Tensor:
        return torch.cat([embed(part) for part in torch.from_numpy(np.ascontiguousarray(images)).split(AT_ONCE)])

    def spread(count: int) -> Pixels:
        return pixels[np.linspace(0, len(pixels) - 1, count).astype(int)]

    real = features(spread(given.reference or len(pixels)))
    few = features(spread(given.n))
    print("| cell | calls | FD | KID x 1000 | bands | away | seconds |\n|---|---|---|---|---|---|---|")

    def bands(images: Pixels) -> str:
        pairs = (torch.from_numpy(np.ascontiguousarray(x)) for x in (spread(given.reference or len(pixels)), images))
        found = [one for one in compare_detail(*pairs)[1:] if one.value is not None]
        return " ".join(f"{one.value:.2f}" for one in found) + f" ± {found[-1].error or 0:.2f}"

    row("training images", 0, real, few, bands(spread(given.n)), None, 0.0)
    for text in given.cells or CELLS:
        cell, started = cell_of(text, run.config.sampler), time.perf_counter()
        drawn, calls = pictures_of(run, cell, labels, given.n, given.out)
        away = None if cell.sampler.kind in RANDOM or given.no_away else distance(run, cell, labels, drawn)
        save_png(given.out / f"{re.sub(r'[^a-z0-9.=@-]+', '_', text)}.png", given.out, sample_grid(drawn[:AT_ONCE], ()))
        drawn = drawn.transpose(0, 3, 1, 2)
        row(text, calls, real, features(drawn), bands(drawn), away, time.perf_counter() - started)


def row(name: str, calls: int, real: Tensor, drawn: Tensor, bands: str, away: float | None, seconds: float) -> None:
    """Print what a cell comes to."""
    # The kernel is a cubic: features of another scale than Inception's are brought to that of 1.
    scale = 1 if real.shape[1] == 2048 else real.square().mean().sqrt()
    (fd,), (kid,) = compare_features(["fd"], real, drawn), compare_features(["kid"], real / scale, drawn / scale)
    # FD is refused where there are no more pictures than features.
    values = [(m.value, (m.error or 0) * k, k) for m, k in ((fd, 1), (kid, 1000))]
    told = ["refused" if value is None else f"{value * k:.2f} ± {error:.2f}" for value, error, k in values]
    told += [bands, "" if away is None else f"{away:.4f}", f"{seconds:.0f}"]
    print(f"| {name} | {calls} | {' | '.join(told)} |", flush=True)
    say(f"  {name}: {fd}")


if __name__ == "__main__":
    main()
