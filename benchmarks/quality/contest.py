"""What the scripts of the contest share: the contestants, the places of files, and the commands that do the work.

    OUT/sets/cifar10/00000.png …            the images, made by sets.py, which all contestants train on
    OUT/rates.json                          images per second of each contestant, by rates.py
    OUT/cells/cifar10/20m/default-0/        a cell (20 minutes' worth, seed 0), by cells.py; score.json by score.py
    OUT/page.md, OUT/grids/*.png            by page.py

A cell is trained for rate x minutes images rather than for a time, so it comes out the same on a loaded machine. Ours
train in the precision that rates.py was told: the faster one of the machine, which `unfog train` says.

    sh benchmarks/quality/make_peers.sh PEERS
    python benchmarks/quality/sets.py OUT cifar10=cifar10/train emoji=emoji
    python benchmarks/quality/rates.py OUT --peers PEERS                        # nothing else running
    python benchmarks/quality/cells.py OUT --peers PEERS --minutes 20
    python benchmarks/quality/score.py OUT --peers PEERS --n 2500
    python benchmarks/quality/page.py OUT > OUT/page.md
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Contestant:
    """A recipe, ours or a peer's."""

    name: str
    what: str
    """In words, for the page."""
    flags: str = ""
    """Of `unfog train`."""
    peer: str = ""
    """The script of a peer, which runs in the peers' environment; "" is ours."""
    common: str = ""
    """Flags that all of ours have; those above win."""

    def arguments(self) -> list[str]:
        """The flags, each once: what a contestant gives itself takes the place of the common one."""
        given: dict[str, list[str]] = {}
        for word in [*shlex.split(self.common), "--", *shlex.split(self.flags)]:
            if word.startswith("--"):
                given[word] = []
                last = word
            else:
                given[last].append(word)
        return [word for flag, values in given.items() if flag != "--" for word in (flag, *values)]


def ladder() -> list[Contestant]:
    """The contestants of ladder.toml."""
    table = tomllib.loads((HERE / "ladder.toml").read_text())
    return [Contestant(common=table["common"], **entry) for entry in table["contestant"]]


def chosen(names: str) -> list[Contestant]:
    """Those with these names, separated by commas; all for "". Ends with a list of them where one is unknown."""
    known = {contestant.name: contestant for contestant in ladder()}
    wanted = [name for name in names.split(",") if name]
    if unknown := set(wanted) - known.keys():
        sys.exit(f"{', '.join(sorted(unknown))} is not in ladder.toml; there is {', '.join(known)}")
    return [known[name] for name in wanted] if wanted else list(known.values())


@dataclass(frozen=True)
class Cell:
    """A contestant on a set, for so many minutes' worth, from a seed."""

    out: Path
    set: str
    contestant: Contestant
    minutes: float
    seed: int = 0

    @property
    def images(self) -> Path:
        """The folder of the set."""
        return self.out / "sets" / self.set

    @property
    def folder(self) -> Path:
        """Where it is."""
        return self.out / "cells" / self.set / f"{self.minutes:g}m" / f"{self.contestant.name}-{self.seed}"

    @property
    def trained(self) -> Path:
        """What says that it is trained."""
        return self.folder / "trained.json"

    @property
    def score(self) -> Path:
        """What says that it is measured."""
        return self.folder / "score.json"

    def train(self, images: int, peers: Path, precision: str) -> list[str]:
        """The command that trains it, or goes on with it; a peer has its own precision."""
        if self.contestant.peer:
            script, run = HERE / "peers" / self.contestant.peer, self.folder / "peer"
            words = ["train", self.images, run, images, self.seed]
            return [str(peers / "bin" / "python"), str(script), *map(str, words)]
        run = self.folder / "run"
        if (run / "config.toml").exists():
            return [sys.executable, "-m", "unfog", "resume", str(run)]
        flags = self.contestant.arguments()
        flags += [] if "--precision" in flags else ["--precision", precision]
        flags += ["--images", str(images), "--seed", str(self.seed)]
        return [sys.executable, "-m", "unfog", "train", str(self.images), "--out", str(run), *flags]

    def draw(self, n: int, peers: Path, peer_steps: int) -> list[str]:
        """The command that draws n pictures by the contestant's own sampler: pictures.npy and drawn.json.

        `peer_steps` are those of a peer's sampler, whose default takes 1,000 calls a picture.
        """
        if self.contestant.peer:
            script = HERE / "peers" / self.contestant.peer
            words = ["draw", self.images, self.folder / "peer", n, self.seed, self.folder, peer_steps]
            return [str(peers / "bin" / "python"), str(script), *map(str, words)]
        return [
            sys.executable,
            str(HERE / "draw.py"),
            str(self.folder / "run"),
            str(n),
            str(self.seed),
            str(self.folder),
        ]

    @property
    def metrics(self) -> Path:
        """Lines with the images seen and the seconds spent so far."""
        return self.folder / ("peer" if self.contestant.peer else "run") / "metrics.jsonl"


def pace(metrics: Path) -> float:
    """Images per second of a training, from the first quarter of its log to its end."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    rows = [row for row in rows if row.get("images") and row.get("seconds")]
    first, last = rows[len(rows) // 4], rows[-1]
    return float((last["images"] - first["images"]) / (last["seconds"] - first["seconds"]))


def run(command: list[str], log: Path, threads: int = 0) -> float:
    """Run a command with its output in a file; the seconds it took. Ends with the last lines where it fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
    started = time.perf_counter()
    with log.open("a") as file:
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment, check=False)
    if done.returncode:
        sys.exit(
            f"{shlex.join(command)} ended with {done.returncode}:\n" + "\n".join(log.read_text().splitlines()[-15:])
        )
    return time.perf_counter() - started


def rates(out: Path) -> dict[str, Any]:
    """rates.json, which rates.py writes."""
    path = out / "rates.json"
    return json.loads(path.read_text()) if path.exists() else {}


def write(path: Path, value: object) -> None:
    """JSON, whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=1) + "\n")
    partial.replace(path)
