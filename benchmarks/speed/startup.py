"""What a start takes up to its first step: of a new run, and of one that is gone on with, by part.

    python benchmarks/speed/startup.py SOURCE [--rounds 3] [-- FLAGS OF unfog train]

Each start is a process of its own. The first one of all decodes the images, where nobody has yet, and is not counted.
Reported: seconds of the processor and of the clock, each the least of the rounds, as a busy machine only adds to them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Seconds = tuple[float, float]  # of the processor, of the clock
PARTS = {
    "images": ("unfog.runs.train", ["load_images"]),
    "choices": ("unfog.planning.auto_settings:AutoSettings", ["resolve"]),
    "session": ("unfog.runs.train", ["open_session"]),
    "images checked": ("unfog.runs.train", ["quick_check_images"]),
    "settings checked": ("unfog.runs.train:Session", ["write_data_files", "settings_findings"]),
    "dry run": ("unfog.runs.session:Session", ["_dry_run"]),
}
ALL = ["imports", *PARTS, "rest, with the first step", "in all"]


def inside(words: list[str]) -> None:
    """Be such a start: print its parts as JSON after the first step, and end there."""
    begun, spent = (time.process_time(), time.perf_counter()), dict.fromkeys(PARTS, (0.0, 0.0))
    import unfog.cli.read_request  # which `run` would import otherwise, and this module when it is called
    import unfog.runs.train  # noqa: F401
    from unfog.cli.main import _run
    from unfog.runs.session import Session

    imports = since((0.0, begun[1]))
    for part, (place, names) in PARTS.items():
        for name in names:
            clock(spent, part, place, name)

    def stop(session: Session, step: int) -> None:
        whole = since((0.0, begun[1]))
        known = [imports, *spent.values()]
        rest = tuple(total - sum(one[i] for one in known) for i, total in enumerate(whole))
        print(json.dumps([imports, *spent.values(), rest, whole]), flush=True)
        os._exit(0)  # as a kill would: what a start costs does not include leaving

    Session.on_step_end = stop  # type: ignore
    _run(words)


def since(begun: Seconds) -> Seconds:
    """What has passed on both clocks."""
    return time.process_time() - begun[0], time.perf_counter() - begun[1]


def clock(spent: dict[str, Seconds], part: str, place: str, name: str) -> None:
    """Add what a function takes to a part."""
    module, _, inner = place.partition(":")
    owner: Any = sys.modules[module]
    owner = getattr(owner, inner) if inner else owner
    function: Callable[..., Any] = getattr(owner, name)

    def clocked(*args: Any, **kwargs: Any) -> Any:
        begun = time.process_time(), time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            cpu, wall = since(begun)
            spent[part] = (spent[part][0] + cpu, spent[part][1] + wall)

    setattr(owner, name, clocked)


def start(*words: object) -> list[Seconds]:
    """The parts of a start in a process of its own."""
    command = [sys.executable, __file__, "--inside", *map(str, words)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return [(cpu, wall) for cpu, wall in json.loads(done.stdout)]


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("flags", nargs="*", help="of unfog train")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        runs = Path(name)
        words = ("train", given.source, "--steps", given.steps, *given.flags, "--out")
        start(*words, runs / "first")
        new = [start(*words, runs / str(i)) for i in range(given.rounds)]
        resumed = [start("resume", runs / "first") for _ in range(given.rounds)]
    print(f"\n{'seconds of processor / clock':30} {'train':>14} {'resume':>14}")
    for i, part in enumerate(ALL):
        least = [[min(one[i][j] for one in rounds) for j in (0, 1)] for rounds in (new, resumed)]
        print(f"{part:30} " + " ".join(f"{cpu:6.2f} / {wall:5.2f}" for cpu, wall in least))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        inside(sys.argv[2:])
    else:
        main()
