"""The parts of the benchmark: what each is, how long it may take, the visits, and how one is run in a process."""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from packages import NEEDED, missing_distributions
from rows import Row


@dataclass(frozen=True)
class Setting:
    """What every part is told."""

    cpu: bool
    """Rehearse on the CPU with tiny networks."""
    folder: Path
    """An empty folder of the part's own."""
    seconds: float
    """Time that the part has."""

    @property
    def device(self) -> str:
        return "cpu" if self.cpu else "cuda"


@dataclass(frozen=True)
class Part:
    """A module with a function `measure(setting)` that yields rows, and the seconds that it may take on a GPU."""

    name: str
    module: str
    seconds: float
    argument: str = ""
    needs: tuple[str, ...] = NEEDED


PARTS = {
    part.name: part
    for part in (
        Part("smoke eager", "part_smoke", 40, "eager"),  # the first one reads torch from the disk
        Part("smoke captured", "part_smoke", 25, "captured"),
        Part("smoke compiled", "part_smoke", 120, "compiled"),
        Part("values", "part_values", 110),
        Part("exact", "part_exact", 60),
        Part("device", "part_device", 40),
        Part("commands", "part_commands", 60),
        Part("steps small", "part_steps", 60, "small"),
        Part("steps cifar10", "part_steps", 250, "cifar10"),
        Part("steps dit-latents", "part_steps", 150, "dit-latents"),
        Part("steps unet-64", "part_steps", 60, "unet-64"),
        Part("profile cifar10", "part_profile", 40, "cifar10"),
        Part("profile dit-latents", "part_profile", 40, "dit-latents"),
        Part("ranks", "part_ranks", 30),
        Part("quality", "part_quality", 480),
    )
}
_SMOKE = ("smoke eager", "smoke captured", "smoke compiled")
_SPEED = ("profile cifar10", "profile dit-latents", "ranks", "steps small", "steps cifar10", "steps dit-latents")
VISITS = {
    "first": (*_SMOKE, "values", "exact", "device", "commands"),
    "second": (*_SMOKE[:2], *_SPEED, "steps unet-64"),
    "all": ("smoke eager", "values", "exact", "commands", *_SPEED, "device", "steps unet-64"),
    "quality": ("smoke eager", "quality"),
}
"""Parts of each visit, in order of what a person wants to know first: the last ones get what time is left."""
MINUTES = {"first": 5.0, "second": 8.0, "all": 9.0, "quality": 9.0}
_FOR_STACKS = 0.5  # seconds in which a part that is not finished writes the stacks of its threads
_ON_CPU = 4  # times the seconds of a part: a loaded CPU takes its time, and nothing waits for it


def run_part(
    part: Part,
    cpu: bool,
    out: Path,
    seconds: float,
    head: str = "",
    tell: Callable[[Row], object] = lambda row: None,
) -> list[Row]:
    """Run a part in a process of its own for at most `seconds`. Whatever happens to it, rows come back.

    `tell` is called with each row as it comes. The log, which begins with `head`, and the rows stay in `out`/parts.
    """
    if gone := missing_distributions(part.needs):
        return [Row(part.name, "all of it", f"needs {', '.join(gone)}", "skipped")]
    place = out / "parts" / part.name.replace(" ", "-")
    place.parent.mkdir(parents=True, exist_ok=True)
    result, log = place.with_suffix(".jsonl"), place.with_suffix(".log")
    result.unlink(missing_ok=True)
    log.write_text(f"{head}\n\n" if head else "")
    # What parts train is not kept: gigabytes, of which the rows tell.
    with log.open("a") as file, tempfile.TemporaryDirectory(prefix="unfog-gpu-") as folder:
        words = [sys.executable, __file__, part.module, part.argument, str(result), folder, f"{seconds:.0f}"]
        words += ["--cpu"] * cpu
        process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = _follow(process, result, time.monotonic() + seconds, tell)
            if status is None:  # the log says where the part was
                process.send_signal(signal.SIGUSR1)
                time.sleep(_FOR_STACKS)
        finally:
            # The part may have left ranks or compilers behind, which would disturb the next one.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    rows = Row.read(result)
    if status != 0:
        last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-1:]
        ended = f"not finished after {seconds:.0f} s" if status is None else f"exit status {status}: {' '.join(last)}"
        rows.append(Row(part.name, "the rest", ended[:300], "failed"))
    return rows or [Row(part.name, "all of it", "yielded nothing", "failed")]


def _follow(
    process: subprocess.Popen[bytes], result: Path, deadline: float, tell: Callable[[Row], object]
) -> int | None:
    """Return the exit status of a part, None if it is still running at the deadline; tell of its rows meanwhile."""
    told = 0
    while True:
        ended = process.poll() is not None or time.monotonic() > deadline
        for row in (rows := Row.read(result))[told:]:
            tell(row)
        told = len(rows)
        if ended:
            return process.poll()
        time.sleep(0.1)


def seconds_of(part: Part, cpu: bool) -> float:
    """Return the seconds that a part may take."""
    return part.seconds * (_ON_CPU if cpu else 1)


def attempt(part: str, name: str, error: BaseException) -> Row:
    """Return the row of something that raised an error, whose traceback goes to the log."""
    traceback.print_exception(error)
    sys.stderr.flush()
    first = str(error).strip().partition("\n")[0]
    return Row(part, name, f"{type(error).__name__}: {first}"[:300], "failed")


def _main(module: str, argument: str, result: str, folder: str, seconds: str, *flags: str) -> None:
    """Measure one part, writing each row as soon as it is there."""
    faulthandler.register(signal.SIGUSR1)
    setting = Setting("--cpu" in flags, Path(folder), float(seconds))
    began = time.monotonic()
    with Path(result).open("w") as file:
        for row in importlib.import_module(module).measure(setting, *([argument] if argument else [])):
            print(f"{time.monotonic() - began:6.1f} s  {row.part}, {row.name}: {row.said}", flush=True)
            file.write(f"{row.to_json()}\n")
            file.flush()


if __name__ == "__main__":
    _main(*sys.argv[1:])
