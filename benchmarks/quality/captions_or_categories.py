"""Compare runs told captions with runs told the same facts as categories or classes, after equal processor time.

    python examples/emoji_captions.py prepare PICTURES
    python benchmarks/quality/captions_or_categories.py PICTURES OUT [--ways captions categories classes]
        [--held-out 0.1] [--steps 500] [--size 16] [--seeds 4]

For each seed a run of one thread reads the column `text` as captions, another the columns `thing` and `colour`, and a
third has a class for each text. The first way of the list has `--steps`, the others as many more or fewer as their
steps are shorter or longer, by the processor time of a short run of each; `--equal-steps` gives all of them the same.
Each class has one picture, so a comparison with classes needs `--held-out 0`. Prints, for each run, its processor time,
its held-out loss, the root mean square distance of samples from the pictures that were asked for, and the share that is
nearest to its own of all pictures, with guidance 2: of combinations that no training image has, and of others. "nan"
stands for values that a run cannot have, such as new pairs of classes. Then the mean difference between the first way
and each other over seeds, with its 95% interval by Student's t.
"""

from __future__ import annotations

import argparse
import csv
import math
import shutil
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import unfog
from unfog.callbacks import LogEvent

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

WAYS = {"captions": ("text",), "categories": ("thing", "colour"), "classes": ("text",)}
T = (12.71, 4.303, 3.182, 2.776, 2.571)  # Student's t for 95%, of 2 to 6 seeds
EACH = 2  # samples of each picture


class ProcessorTime:
    """Callback: processor time of the process at each line of the log."""

    def __init__(self) -> None:
        self.at: list[tuple[int, float]] = []

    def on_log(self, event: LogEvent) -> None:
        self.at.append((event.step, time.process_time()))

    def each(self) -> float:
        """Return the seconds of a step between the first and the last line."""
        (first, begun), (last, ended) = self.at[0], self.at[-1]
        return (ended - begun) / (last - first)


def train(asked: argparse.Namespace, way: str, steps: int, seed: int, out: Path) -> tuple[Any, float]:
    """Train a run, and return it with the processor time of a step."""
    shutil.rmtree(out, ignore_errors=True)
    timed, never = ProcessorTime(), {"every": -1}
    data: dict[str, Any] = {"size": asked.size, "held_out": asked.held_out, "labels": "none"}
    if way == "classes":
        data["labels"] = f"{asked.pictures / 'emoji' / 'metadata.csv'}:text"
    else:
        data["condition"] = ",".join(WAYS[way])
    run = unfog.train(
        asked.pictures / "emoji",
        out=out,
        steps=steps,
        seed=seed,
        batch=32,
        network="tiny",
        device="cpu",
        callbacks=[timed],
        data=data,
        preview=never,
        evaluate=never,
        log_every=10,
    )
    return run, timed.each()


def read(folder: Path, size: int) -> tuple[list[dict[str, str]], NDArray[np.float32]]:
    """Return the rows of the table in a folder, and its pictures [N, H, W, 3]."""
    with open(folder / "metadata.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    pictures = [
        Image.open(folder / row["file_name"]).convert("RGB").resize((size, size), Image.Resampling.LANCZOS)
        for row in rows
    ]
    return rows, np.stack([np.asarray(one, np.float32) for one in pictures])


def measure(run: Any, way: str, rows: Sequence[dict[str, str]], own: range, bank: NDArray[np.float32]) -> list[float]:
    """Return distance and share of samples of the pictures `own` of all pictures `bank`."""
    told = {name: [rows[i][name] for i in own] * EACH for name in WAYS[way]}
    if way == "classes" and not {*told["text"]} <= {*run.classes}:
        return [math.nan, math.nan]
    given: dict[str, Any] = {"label": told["text"]} if way == "classes" else {"given": told}
    samples = np.asarray(run.sample(EACH * len(own), guidance=2, **given), np.float32)
    apart = np.stack([np.square(bank - one).mean((1, 2, 3)) for one in samples])
    asked = np.array([*own] * EACH)
    distance = math.sqrt(apart[np.arange(len(asked)), asked].mean())
    return [distance, float((apart.argmin(1) == asked).mean())]


def plan_steps(asked: argparse.Namespace) -> dict[str, int]:
    """Return the steps of each way; processor times of a step are the least of two short runs."""
    if asked.equal_steps:
        return dict.fromkeys(asked.ways, asked.steps)
    probes = [{way: train(asked, way, 60, 0, asked.out / "probe")[1] for way in asked.ways} for _ in range(2)]
    each = {way: min(probe[way] for probe in probes) for way in asked.ways}
    print(f"processor time of a step: {each}", flush=True)
    return {way: round(asked.steps * each[asked.ways[0]] / each[way]) for way in asked.ways}


def main() -> None:
    """Train, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pictures", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["captions", "categories"])
    parser.add_argument("--held-out", type=float, default=0.1)
    parser.add_argument("--equal-steps", action="store_true")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--size", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=4, choices=range(2, 2 + len(T)))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    seen, seen_pictures = read(asked.pictures / "emoji", asked.size)
    unseen, unseen_pictures = read(asked.pictures / "held-out", asked.size)
    rows, bank = unseen + seen, np.concatenate([unseen_pictures, seen_pictures])
    parts = range(len(unseen)), range(len(unseen), len(rows), 4)
    steps = plan_steps(asked)
    print(f"steps: {steps}", flush=True)
    found: dict[str, list[list[float]]] = {way: [] for way in asked.ways}
    for seed in range(asked.seeds):
        for way in asked.ways:
            run, cost = train(asked, way, steps[way], seed, asked.out / f"{way}-{seed}")
            loss = run.evaluate("held_out").measured[0].value if asked.held_out else math.nan
            found[way].append([loss, *[value for own in parts for value in measure(run, way, rows, own, bank)]])
            values = " ".join(f"{value:.5g}" for value in found[way][-1])
            print(f"{way} seed {seed}: {cost * steps[way]:.0f} s; {values}", flush=True)
    names = ("held-out loss", "distance, new pairs", "share, new pairs", "distance, seen", "share, seen")
    first, *others = asked.ways
    for i, name in enumerate(names):
        for way in others:
            one, other = ([values[i] for values in found[each]] for each in (first, way))
            apart = [a - b for a, b in zip(one, other, strict=True)]
            if any(map(math.isnan, apart)):  # one of the ways does not have it
                continue
            half = T[len(apart) - 2] * statistics.stdev(apart) / math.sqrt(len(apart))
            mean = statistics.mean(apart)
            print(
                f"{name}: {first} {statistics.mean(one):.5g}, {way} {statistics.mean(other):.5g}, difference "
                f"{mean:.4g} ({mean - half:.4g} to {mean + half:.4g})"
            )


if __name__ == "__main__":
    main()
