"""Train twice on a folder, once undisturbed and once killed with SIGKILL at random moments, and compare what is left.

    python benchmarks/kill_and_resume.py SOURCE [--kills 3] [flags of unfog train]

Prints the sha256 of the final ema.safetensors and model.safetensors of both runs, and when the kills came. Exit
status 1 if anything differs.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def unfog(*words: str) -> subprocess.Popen[bytes]:
    """Start a command."""
    return subprocess.Popen([sys.executable, "-m", "unfog", *words], stdout=subprocess.DEVNULL)


def digests(run: Path) -> dict[str, str]:
    """sha256 of the newest weights."""
    newest = max((run / "checkpoints").glob("0*"))
    names = ("ema.safetensors", "model.safetensors")
    return {f"{newest.name}/{name}": hashlib.sha256((newest / name).read_bytes()).hexdigest() for name in names}


def main() -> int:
    """Run, kill, resume, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("--kills", type=int, default=3)
    given, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as name:
        whole, killed = Path(name) / "whole", Path(name) / "killed"
        started = time.perf_counter()
        if unfog("train", given.source, "--out", str(whole), *flags).wait():
            return 1
        seconds = time.perf_counter() - started
        chance = random.Random(0)
        process = unfog("train", given.source, "--out", str(killed), *flags)
        for _ in range(given.kills):
            moment = chance.uniform(0.2, 0.5) * seconds
            try:
                process.wait(moment)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                print(f"killed after {moment:.1f} s", flush=True)
                process = unfog("resume", str(killed))
        if process.wait():
            return 1
        mine, theirs = digests(killed), digests(whole)
    for key, digest in theirs.items():
        print(f"{key}: {digest[:16]} undisturbed, {mine.get(key, 'missing')[:16]} killed and resumed")
    print("equal" if mine == theirs else "DIFFERENT")
    return int(mine != theirs)


if __name__ == "__main__":
    sys.exit(main())
