"""Images per second of each contestant, measured in turn, several rounds over, on a quiet machine.

    python benchmarks/quality/rates.py OUT --peers PEERS [--set cifar10] [--only NAMES] [--rounds 3] [--images 4096]

Writes OUT/rates.json; the rate is the median of the rounds. Whatever else runs meanwhile spoils it, so the load
average goes into the file; so does the precision, which cells.py trains in.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path
from statistics import median

from contest import Cell, chosen, pace, rates, run, write


def main() -> None:
    """Train each contestant a little, in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--peers", type=Path, default=Path("peers"), help="environment that make_peers.sh made")
    parser.add_argument("--set", default="cifar10")
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--images", type=int, default=4096)
    parser.add_argument("--precision", default="bf16", help="of ours, where a contestant does not say it")
    parser.add_argument("--threads", type=int, default=0, help="0: as many as torch takes")
    asked = parser.parse_args()
    measured: dict[str, list[float]] = {}
    for number in range(asked.rounds):
        for contestant in chosen(asked.only):
            cell = Cell(asked.out / "rates", asked.set, contestant, 0, number)
            shutil.rmtree(cell.folder, ignore_errors=True)
            images = Cell(asked.out, asked.set, contestant, 0).images
            command = [
                str(images) if word == str(cell.images) else word
                for word in cell.train(asked.images, asked.peers, asked.precision)
            ]
            command += [] if contestant.peer else ["--log.every", "2"]
            run(command, cell.folder / "log.txt", asked.threads)
            measured.setdefault(contestant.name, []).append(pace(cell.metrics))
            print(f"round {number}  {contestant.name:30} {measured[contestant.name][-1]:7.1f} images/s", flush=True)
    known = rates(asked.out)
    for name, values in measured.items():
        load = round(os.getloadavg()[0], 1)
        known[name] = {
            "images_per_second": median(values),
            "rounds": values,
            "precision": asked.precision,
            "threads": asked.threads,
            "load": load,
        }
    write(asked.out / "rates.json", known)


if __name__ == "__main__":
    main()
