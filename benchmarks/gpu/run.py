"""Proves and measures what it can on a GPU, in visits of minutes. `run.sh` calls it; README.md has more.

benchmarks/gpu/run.sh [--visit first|second|all|quality] [--out FOLDER] [--minutes N] [--wheels FOLDER] [--cpu]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from packages import check_packages, unpack
from parts import MINUTES, PARTS, VISITS, run_part, seconds_of
from rows import Row, ledger_row, picture, short_summary, summary, table

_HERE = Path(__file__).parent
_LEAST = 5.0  # seconds that must be left for a part to be begun
_FOR_FILES = 5.0
_FOR_HEAD = 90.0  # torch may be read from a cold disk


def main(arguments: list[str]) -> int:
    """Run the parts of a visit, write what they found, and return 1 if one failed."""
    given = _parse(arguments)
    if given.make_reference:
        import reference

        reference.make()
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through `finally`, which writes what there is
    given.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    rows = [*unpack(given.wheels, given.work / "packages"), *check_packages(given.cpu)]
    head = _describe_environment(given.work / "results")
    results, live = _Results(given, rows, began), list[Row]()
    try:
        for name in given.names:
            left = 60 * given.minutes - (time.monotonic() - began) - _FOR_FILES
            rows += _run(name, given, head, left, live)
            live.clear()
            results.write()
    finally:
        rows += live  # of a part that was stopped with the visit
        results.write()
        print("\n".join(table(rows)), flush=True)
        print("\n".join(["", *short_summary(results.machine, rows)]), flush=True)
    return 1 if any(row.state == "failed" for row in rows) else 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--visit", choices=[*VISITS], default="all")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "gpu-results")))
    parser.add_argument("--minutes", type=float, help="in all; each visit has its usual ones")
    parser.add_argument("--parts", default="", help="only parts that begin with one of these words, of any visit")
    parser.add_argument("--wheels", type=Path, default=_HERE / "wheels", help="folder of wheels that are missing here")
    parser.add_argument("--cpu", action="store_true", help="rehearse on the CPU, with tiny networks")
    parser.add_argument("--work", type=Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--make-reference", action="store_true", help="write reference.json anew, on a CPU")
    given = parser.parse_args(arguments)
    given.minutes = given.minutes or MINUTES[given.visit] * (4 if given.cpu else 1)
    wanted = tuple(given.parts.split(",")) if given.parts else ()
    given.names = [name for name in (PARTS if wanted else VISITS[given.visit]) if not wanted or name.startswith(wanted)]
    if not given.names:
        parser.error(f"--parts {given.parts}: there are {', '.join(PARTS)}")
    return given


def _run(name: str, given: argparse.Namespace, head: str, left: float, live: list[Row]) -> list[Row]:
    """Run a part in what time is left, and say how it went; `live` gets its rows as they come."""

    def tell(row: Row) -> None:
        live.append(row)
        print(f"  {row.state}: {row.name}: {row.said}"[:200], file=sys.stderr, flush=True)

    part, started = PARTS[name], time.monotonic()
    seconds = min(left, seconds_of(part, given.cpu))
    if seconds < _LEAST:
        return [Row(name, "all of it", f"no time is left of {given.minutes:g} minutes", "skipped")]
    found = run_part(part, given.cpu, given.work / "results", seconds, head, tell)
    print(f"{name}: {summary(found)}, {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    return found


def _describe_environment(results: Path) -> str:
    """Return what every log begins with; in a process of its own, which a broken torch may end."""
    results.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, str(_HERE / "environment.py")]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_FOR_HEAD)
        head = done.stdout + done.stderr
    except subprocess.TimeoutExpired:
        head = f"torch was not imported within {_FOR_HEAD:g} s"
    (results / "environment.txt").write_text(head)
    return head


class _Results:
    """The files of a visit: few, as some machines give back no more; one archive holds the others."""

    def __init__(self, given: argparse.Namespace, rows: list[Row], began: float):
        self.given, self.rows, self.began, self.machine = given, rows, began, describe_machine()
        self.date = datetime.now(UTC).strftime("%Y-%m-%d")

    def write(self) -> None:
        """Write summary.txt, table.md, gpu.json, gpu.png, and results.tar.gz with these, the logs and a ledger row."""
        given, rows, results = self.given, self.rows, self.given.work / "results"
        command = f"benchmarks/gpu/run.sh --visit {given.visit}" + " --cpu" * given.cpu
        whole = {"date": self.date, "machine": self.machine, "command": command}
        whole |= {"seconds": round(time.monotonic() - self.began, 1), "rows": [*map(asdict, rows)]}
        texts = {
            "gpu.json": json.dumps(whole, indent=2, ensure_ascii=False),
            "table.md": "\n".join(table(rows)),
            "summary.txt": "\n".join(short_summary(self.machine, rows)),
        }
        for name, text in texts.items():
            (given.out / name).write_text(f"{text}\n")
        (results / "ledger.toml").write_text(ledger_row(self.date, self.machine, command, rows) + "\n")
        names = [given.out / name for name in texts]
        try:
            picture(given.out / "gpu.png", f"{self.machine}, {self.date}", rows)
            names.append(given.out / "gpu.png")
        except ImportError as error:  # Pillow is among the packages that may be missing
            print(f"no picture: {error}", file=sys.stderr)
        # Written anew after each part, so that a visit that is killed leaves the archive of those before.
        fresh = given.out / "results.tar.gz.new"
        with tarfile.open(fresh, "w:gz") as archive:
            for path in (*sorted(results.iterdir()), *names):
                archive.add(path, f"results/{path.name}")
        fresh.replace(given.out / "results.tar.gz")


def describe_machine() -> str:
    """Return the GPU with its driver, or the processor; torch's version, and the number of cores."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,power.limit", "--format=csv,noheader"]
    try:
        gpus = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
        name = f"{len(gpus)} x {gpus[0]}"
    except (OSError, subprocess.SubprocessError, IndexError):
        name = platform.processor() or platform.machine()
    try:
        from importlib.metadata import version

        torch = version("torch")
    except ImportError:
        torch = "missing"
    return f"{name}, torch {torch}, {os.cpu_count()} cores, Python {platform.python_version()}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
