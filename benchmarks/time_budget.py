"""How well a time budget is kept: `unfog train --budget` on a quiet machine, and beside busy loops.

    python benchmarks/time_budget.py [--budget 2m] [--size 32] [--batch 16] [--network tiny] [--busy 0 2] [--after 50]

Each run is a command of its own, timed from its start to its end. The busy loops begin `--after` seconds later. A row
has the time, how far it is from the budget, the steps, the plans that were made, and the share of the budget that
previews, evaluation and checkpoints took.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from unfog.config.validate import parse_duration
from unfog.reporting.records import read_events


def timed_run(words: list[str], out: Path, busy: int, after: float) -> float:
    """Train in a process of its own, beside `busy` loops that begin `after` seconds later; return its seconds."""
    began, loops = time.monotonic(), list[subprocess.Popen[bytes]]()
    command = [sys.executable, "-m", "unfog", "train", *words, "--out", str(out)]
    with (out.parent / f"{out.name}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            while process.poll() is None:
                if len(loops) < busy and time.monotonic() - began > after:
                    loops.append(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
                time.sleep(0.05)
        finally:
            for loop in loops:
                loop.kill()
                loop.wait()
    if process.returncode:
        raise SystemExit((out.parent / f"{out.name}.log").read_text()[-2000:])
    return time.monotonic() - began


def main() -> None:
    """Train once for each number of busy loops, and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="fashion")
    parser.add_argument("--budget", default="2m")
    parser.add_argument("--size", default="32")
    parser.add_argument("--batch", default="16")
    parser.add_argument("--network", default="tiny")
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--after", type=float, default=50.0)
    given = parser.parse_args()
    words = [given.source, "--budget", given.budget, "--size", given.size, "--batch", given.batch]
    budget = parse_duration(given.budget)
    print(f"{'busy loops':>10} {'seconds':>8} {'beyond':>7} {'of it':>6} {'steps':>7} {'plans':>5} {'aside':>6}")
    with tempfile.TemporaryDirectory() as folder:
        for busy in given.busy:
            out = Path(folder) / f"busy{busy}"
            seconds = timed_run([*words, "--network", given.network], out, busy, given.after)
            events = read_events(out / "events.jsonl")
            aside = sum(row["seconds"] for row in events if row["kind"] in ("preview", "evaluated", "measured"))
            plans = sum(row["kind"] == "length" for row in events)
            print(
                f"{busy:10} {seconds:8.1f} {seconds - budget:+7.1f} {seconds / budget - 1:+6.1%} "
                f"{events[-1]['step']:7,} {plans:5} {aside / budget:6.1%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
