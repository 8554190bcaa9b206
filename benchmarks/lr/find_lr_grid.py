"""Does `unfog find-lr` suggest a workable rate? Its suggestion against a grid of rates that are really trained.

    python benchmarks/lr/find_lr_grid.py OUT [--data FOLDER] [--cases 1,2,…] [--steps 200] [--seconds 90]

Each case is a network, a recipe and a set of images, at 16x16 so that a whole run takes a minute on one core. For each,
`find_lr` suggests a rate; then real runs of `--steps` steps are trained at that rate and at 3e-4, 1e-3, …, 0.03, each
with the recipe's own schedule and warm-up, and their held-out loss (of the averaged weights) at the end is compared.
A suggestion is called workable if its run ends within 10% of the best of the grid; a rate three times too small or too
large is usually worse than that. Runs that are in OUT already are not repeated. `--data` is a folder with the image
folders `emoji` and `cifar10/train`; without it, the cases that need them are left out.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from unfog.config.presets import preset
from unfog.config.requests.plan import FindLrRequest
from unfog.config.schema import Config, Network
from unfog.config.spec_strings import parse_spec, registry_of
from unfog.errors import RunError
from unfog.models.settings import SIZES
from unfog.reporting.records import read_metrics
from unfog.runs.find_lr import find_lr
from unfog.runs.train import train_run

import torch

GRID = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
WORKABLE = 1.10
NARROW = "unet:channels=16/32,attention=0/0,mid_attention=0,norm_groups=8"
ATTENDING = "unet:channels=16/32,attention=0/1,head_channels=8,norm_groups=8"


class Case(NamedTuple):
    """What is trained."""

    source: str
    network: str
    recipe: str
    batch: int


CASES = (
    Case("fashion", "tiny", "default", 32),
    Case("fashion", "small", "default", 16),
    Case("fashion", NARROW, "ddpm", 32),
    Case("emoji", ATTENDING, "default", 32),
    Case("emoji", "tiny", "ddpm", 32),
    Case("cifar10/train", "tiny", "default", 32),
)


def configured(case: Case, data: Path | None, steps: int) -> Config:
    """The configuration of a case: on one thread of the CPU, measured at its end alone."""
    config = preset(case.recipe)
    source = case.source if data is None or case.source == "fashion" else str(data / case.source)
    return replace(
        config,
        source=source,
        data=replace(config.data, size=16),
        network=parse_spec(registry_of(Network) or {}, case.network),
        training=replace(config.training, batch=case.batch, steps=steps, precision="fp32", device="cpu"),
        evaluate=replace(config.evaluate, images=64, every=steps),
        preview=replace(config.preview, every=-1, images=1),
        sampler=replace(config.sampler, steps=2),
        checkpoint=replace(config.checkpoint, every=-1),
    )


def trained(config: Config, lr: float, folder: Path) -> float:
    """Held-out loss at the end of a run at this rate, infinite if it diverged; a run that is there is only read."""
    if not (folder / "report.html").exists():
        try:
            train_run(replace(config, optimizer=replace(config.optimizer, lr=lr)), folder)
        except RunError as error:
            print(f"  {lr:g}: {error}", flush=True)
            return math.inf
    measured = [row["held_out_loss"] for row in read_metrics(folder / "metrics.jsonl") if "held_out_loss" in row]
    return float(measured[-1])


def compared(number: int, case: Case, config: Config, out: Path, seconds: float) -> str:
    """A row of the table: the suggestion, what each rate of the grid came to, and whether the suggestion will do."""
    found = find_lr(FindLrRequest(config.source, config, out=out / f"{number}-find-lr", seconds=seconds))
    name = case.network if case.network in SIZES else {NARROW: "narrow", ATTENDING: "attending"}[case.network]
    head = f"| {case.source} | {name} | {case.recipe} | {case.batch} |"
    losses = {lr: trained(config, lr, out / f"{number}-{lr:g}") for lr in GRID}
    best = min(losses.values())
    grid = " | ".join(f"{loss:.4f}" for loss in losses.values())
    if found.suggestion is None:
        return f"{head} {grid} | none | | {found.reason} |"
    loss = trained(config, found.suggestion, out / f"{number}-{found.suggestion:g}")
    verdict = "workable" if loss <= WORKABLE * best else "**not workable**"
    return f"{head} {grid} | {found.suggestion:g} | {loss:.4f} | {loss / best - 1:+.1%}, {verdict} |"


def main() -> None:
    """Print the table, a row as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--cases", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=90.0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rates = " | ".join(f"{lr:g}" for lr in GRID)
    print(f"| set | network | recipe | batch | {rates} | suggested | its loss | against the best |", flush=True)
    print(f"|{'---|' * (len(GRID) + 7)}", flush=True)
    for number, case in enumerate(CASES, 1):
        if (given.cases and number not in given.cases) or (given.data is None and case.source != "fashion"):
            continue
        print(compared(number, case, configured(case, given.data, given.steps), given.out, given.seconds), flush=True)


if __name__ == "__main__":
    main()
