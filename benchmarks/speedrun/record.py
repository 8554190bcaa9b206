"""Run one record of the speedrun: train, draw and measure, as README.md beside this says.

    python benchmarks/speedrun/record.py OUT NAME --source CIFAR10/train [--seeds 0,1,2] [--records records.toml]

A record trains for rate x minutes images rather than for a time, so it comes out the same on a loaded machine.
OUT/NAME/SEED is the run; what is done is not done again. Prints a row of the table for each seed, and writes
OUT/NAME/SEED.json.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import unfog
from unfog.inference.run import Run

import torch

MOST_CALLS = 20
METRICS = "kid,sliced,detail"


def main(arguments: list[str]) -> None:
    """Run the record with each seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("name")
    parser.add_argument("--source", required=True)
    parser.add_argument("--records", type=Path, default=Path(__file__).parent / "records.toml")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("-n", type=int, default=1000)
    parser.add_argument("--features", default="inception")
    given = parser.parse_args(arguments)
    record = tomllib.loads(given.records.read_text())[given.name]
    images, folder = round(record["rate"] * 60 * given.minutes), given.out / given.name
    folder.mkdir(parents=True, exist_ok=True)
    print("| record | change | images | seed | calls | KID x 1000 | sliced | detail | detail_colour |")
    print("|---|---|---|---|---|---|---|---|---|")
    for seed in map(int, given.seeds.split(",")):
        run = trained(folder / str(seed), given.source, images, seed, shlex.split(record["flags"]))
        drawing = record.get("draw", {})
        calls = calls_per_image(run, drawing)
        if calls > MOST_CALLS:
            sys.exit(f"{calls:g} calls of the network for an image are more than the {MOST_CALLS} of the protocol")
        found = run.evaluate(METRICS, n=given.n, features=given.features, **drawing)
        values = {one.metric: asdict(one) for one in found.measured}
        whole = {"record": record, "images": images, "seed": seed, "calls": calls, "measured": values}
        (folder / f"{seed}.json").write_text(json.dumps(whole, indent=2))
        print(row(given.name, whole), flush=True)


def trained(out: Path, source: str, images: int, seed: int, flags: list[str]) -> Run:
    """Train, or go on with training, and return the run."""
    if not (out / "config.toml").exists():
        fixed = ["--images", str(images), "--seed", str(seed), "--data.held-out", "0", "--data.labels", "none"]
        quiet = ["--preview.every", "-1", "--evaluate.every", "-1"]
        command = ["train", source, "--out", str(out), *fixed, *quiet, *flags]
    else:
        command = ["resume", str(out)]  # at its end it says so
    subprocess.run([sys.executable, "-m", "unfog", *command], check=True)
    return unfog.load(out)


def calls_per_image(run: Run, drawing: dict[str, Any]) -> float:
    """Return how often a network sees an image while it is drawn; guidance's second pass and a guide's count."""
    seen = 0

    def count(network: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        nonlocal seen
        seen += len(output) if type(network) is type(run.network) else 0

    hook = torch.nn.modules.module.register_module_forward_hook(count)  # the guide is another network than the run's
    run.sample(2, **drawing)
    hook.remove()
    return seen / 2


def row(name: str, whole: dict) -> str:
    """Return a line of the table."""

    def text(metric: str, scale: float = 1) -> str:
        one = whole["measured"].get(metric)
        if one is None or one["value"] is None:
            return "-"
        error = f" ± {one['error'] * scale:.2g}" if one["error"] is not None else ""
        return f"{one['value'] * scale:.3g}{error}"

    numbers = [text("kid", 1000), text("sliced"), text("detail"), text("detail_colour")]
    cells = [
        name,
        whole["record"]["change"],
        f"{whole['images']:,}",
        str(whole["seed"]),
        f"{whole['calls']:g}",
        *numbers,
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main(sys.argv[1:])
