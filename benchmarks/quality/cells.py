"""Train the cells: each contestant on each set for as many images as it trains in so many minutes on a quiet machine.

    python benchmarks/quality/cells.py OUT --peers PEERS --minutes 20 [--sets cifar10,emoji] [--only NAMES] [--seeds 0]

A cell that is done is not repeated, and one of ours that was interrupted goes on where it was.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

from contest import Cell, chosen, rates, run, write


def main() -> None:
    """One after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--peers", type=Path, default=Path("peers"), help="environment that make_peers.sh made")
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--sets", default="cifar10,emoji")
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--threads", type=int, default=0, help="0: as many as torch takes")
    asked = parser.parse_args()
    known = rates(asked.out)
    contestants = chosen(asked.only)
    if missing := [contestant.name for contestant in contestants if contestant.name not in known]:
        sys.exit(f"no rate of {', '.join(missing)}: run rates.py first")
    for seed in map(int, asked.seeds.split(",")):
        for name in asked.sets.split(","):
            for contestant in contestants:
                cell = Cell(asked.out, name, contestant, asked.minutes, seed)
                if not cell.trained.exists():
                    train(cell, known[contestant.name], asked)


def train(cell: Cell, known: dict[str, Any], asked: argparse.Namespace) -> None:
    """One cell."""
    rate, precision = known["images_per_second"], known["precision"]
    images = round(rate * 60 * cell.minutes)
    shutil.rmtree(cell.folder / "peer", ignore_errors=True)  # which cannot go on
    seconds = run(cell.train(images, asked.peers, precision), cell.folder / "log.txt", asked.threads)
    write(cell.trained, {"images": images, "rate": rate, "minutes": cell.minutes, "seconds": seconds})
    print(
        f"{cell.set} {cell.contestant.name} seed {cell.seed}: {images:,} images in {seconds / 60:.1f} min", flush=True
    )


if __name__ == "__main__":
    main()
