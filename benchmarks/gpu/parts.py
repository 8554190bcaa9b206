"""The parts of the benchmark: what each is, how long it may take, what it needs, and how one is run in a process."""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rows import Row

NEEDED = ("torch", "numpy", "PIL", "safetensors", "tyro", "rich", "jinja2")
"""Modules without which Unfog does not start."""
WANTED = {"diffusers": "its training step is not timed, nor is an export to it", "triton": "nothing can be compiled"}


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


PARTS = (
    Part("device", "part_device", 45),
    Part("exact", "part_exact", 50),
    Part("commands", "part_commands", 70),
    Part("ranks", "part_ranks", 40),
    Part("profile", "part_profile", 45, "unet-64"),
    *(Part(f"steps {network}", "part_steps", 110, network) for network in ("unet-64", "cifar10", "dit-latents")),
)
"""In order of what a person wants to know first: the last ones get what time is left."""


def missing(names: Sequence[str]) -> list[str]:
    """Return the modules that this Python does not have."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def check_packages(cpu: bool) -> Iterator[Row]:
    """Yield a row about the packages that are missing, and what is left out without each."""
    if gone := missing(NEEDED):
        said = f"{', '.join(gone)}: README.md says how to bring wheels along; the parts that need them are skipped"
        yield Row("packages", "needed", said, "failed")
    for name in missing([*WANTED]):
        if not (cpu and name == "triton"):
            yield Row("packages", name, f"not installed, so {WANTED[name]}", "skipped")


def run_part(part: Part, cpu: bool, out: Path, seconds: float) -> list[Row]:
    """Run a part in a process of its own for at most `seconds`. Whatever happens to it, rows come back."""
    if gone := missing(part.needs):
        return [Row(part.name, "all of it", f"needs {', '.join(gone)}", "skipped")]
    place = out / "parts" / part.name.replace(" ", "-")
    place.parent.mkdir(parents=True, exist_ok=True)
    result, log = place.with_suffix(".jsonl"), place.with_suffix(".log")
    result.unlink(missing_ok=True)
    # What parts train is not kept: gigabytes, of which the rows tell.
    with log.open("w") as file, tempfile.TemporaryDirectory(prefix="unfog-gpu-") as folder:
        words = [sys.executable, __file__, part.module, part.argument, str(result), folder, f"{seconds:.0f}"]
        words += ["--cpu"] * cpu
        process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status, ended = process.wait(timeout=seconds), ""
        except subprocess.TimeoutExpired:
            status, ended = -1, f"not finished after {seconds:.0f} s"
        finally:
            # The part may have left ranks or compilers behind, which would disturb the next one.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    rows = Row.read(result)
    if status:
        last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-1:]
        rows.append(Row(part.name, "the rest", ended or f"exit status {status}: {' '.join(last)}"[:300], "failed"))
    return rows or [Row(part.name, "all of it", "yielded nothing", "failed")]


def attempt(part: str, name: str, error: BaseException) -> Row:
    """Return the row of something that raised an error."""
    first = str(error).strip().partition("\n")[0]
    return Row(part, name, f"{type(error).__name__}: {first}"[:300], "failed")


def _main(module: str, argument: str, result: str, folder: str, seconds: str, *flags: str) -> None:
    """Measure one part, writing each row as soon as it is there."""
    setting = Setting("--cpu" in flags, Path(folder), float(seconds))
    began = time.monotonic()
    with Path(result).open("w") as file:
        for row in importlib.import_module(module).measure(setting, *([argument] if argument else [])):
            print(f"{time.monotonic() - began:6.1f} s  {row.part}, {row.name}: {row.said}", flush=True)
            file.write(f"{row.to_json()}\n")
            file.flush()


if __name__ == "__main__":
    _main(*sys.argv[1:])
