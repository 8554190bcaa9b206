"""The speed of `unfog train` alone, beside one and two others like it, and beside a load like a browser's.

    python benchmarks/speed/neighbours.py [--seconds 20] [--network tiny] [-- FLAGS OF unfog train]

Each training is a process of its own with all cores, as a person would start it: 32x32, batch 16. Reported: images/s of
each by its own record, and how many times slower it is than alone. Ideal is 2 beside one other and 3 beside two.
Variables that are set hold for all of them: GOMP_SPINCOUNT=300000 measures OpenMP as it is without Unfog's setting.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

SIZE, BATCH = 32, 16
# One process that computes for 5 ms of each 16, as a moving page does, and one for 0.3 s of each 2, as a loading one.
BROWSER = """
import time
while True:
    begun = time.perf_counter()
    while time.perf_counter() - begun < {busy}:
        sum(range(100))
    time.sleep({idle})
"""
BROWSER_LOADS = ((0.005, 0.011), (0.3, 1.7))
STARTING = 90.0  # seconds that a start may take


def training(folder: Path, flags: list[str]) -> subprocess.Popen[bytes]:
    """Start a run that only trains, and records each second step."""
    words = ["train", "fashion", "--out", str(folder), "--size", str(SIZE), "--batch", str(BATCH), "--steps", "1000000"]
    words += ["--preview.every", "-1", "--preview.images", "1", "--sampler.steps", "2", "--evaluate.every", "-1"]
    words += ["--checkpoint.every", "100000", "--ema-snapshots.every", "-1", "--log.every", "2", *flags]
    return subprocess.Popen(
        [sys.executable, "-m", "unfog", *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def record(folder: Path) -> list[tuple[float, float]]:
    """Return (seconds, images) of each whole line of the record so far."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    rows = [json.loads(line) for line in lines]
    return [(row["seconds"], row["images"]) for row in rows if row["step"] > 0]


def rates(count: int, browser: bool, seconds: float, flags: list[str]) -> list[float]:
    """Return images/s of each of `count` trainings at once."""
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:  # which ends the processes first
        folders = [Path(place) / str(i) for i in range(count)]
        for busy, idle in BROWSER_LOADS if browser else ():
            load = subprocess.Popen([sys.executable, "-c", BROWSER.format(busy=busy, idle=idle)])
            stack.callback(load.wait)
            stack.callback(load.kill)
        for folder in folders:
            process = training(folder, flags)
            stack.callback(process.wait)
            stack.callback(process.kill)
        begun = time.monotonic()
        while not all(len(record(folder)) > 1 for folder in folders):  # all of them train
            if time.monotonic() - begun > STARTING:
                raise SystemExit(f"no training has begun within {STARTING:.0f} s")
            time.sleep(0.2)
        skipped = [len(record(folder)) for folder in folders]
        time.sleep(seconds)
        found = []
        for folder, skip in zip(folders, skipped):
            (early, few), *_, (late, many) = record(folder)[skip - 1 :]
            found.append((many - few) / (late - early))
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="of measuring, after all have begun")
    parser.add_argument("--network", default="tiny")
    parser.add_argument("flags", nargs="*", help="more flags of unfog train, after --")
    asked = parser.parse_args()
    flags = ["--network", asked.network, *asked.flags]
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_NUM_THREADS")
    given = [f"{name}={os.environ[name]}" for name in names if name in os.environ]
    print(f"{asked.network}, {SIZE}x{SIZE}, batch {BATCH}, {os.cpu_count()} cores; {' '.join(given) or 'nothing set'}")
    print(f"{'':26} {'images/s of each':>22} {'times slower':>13} {'ideal':>6}")
    alone = 0.0
    for name, count, browser in (
        ("alone", 1, False),
        ("beside one other", 2, False),
        ("beside two others", 3, False),
        ("beside a browser's load", 1, True),
    ):
        found = rates(count, browser, asked.seconds, flags)
        alone = alone or found[0]
        ideal = "" if browser else str(count)
        each = " ".join(f"{rate:.1f}" for rate in found)
        print(f"{name:26} {each:>22} {alone / statistics.mean(found):13.2f} {ideal:>6}", flush=True)


if __name__ == "__main__":
    main()
