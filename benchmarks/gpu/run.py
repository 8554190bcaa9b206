"""Everything that can be proven and measured on a GPU, in nine minutes. `run.sh` calls it; README.md has more.

benchmarks/gpu/run.sh [--out FOLDER] [--cpu] [--minutes 9] [--parts device,exact,…]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from parts import PARTS, check_packages, run_part
from rows import Row, ledger_row, picture, summary, table


def main(arguments: list[str]) -> int:
    """Run the parts, write what they found, and return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "gpu-results")))
    parser.add_argument("--cpu", action="store_true", help="rehearse on the CPU, with tiny networks")
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--parts", default="", help="only parts that begin with one of these words")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    began, rows = time.monotonic(), list(check_packages(given.cpu))
    for part in PARTS:
        if given.parts and not part.name.startswith(tuple(given.parts.split(","))):
            continue
        left = 60 * given.minutes - (time.monotonic() - began) - 5  # for the files
        # A loaded CPU takes its time, and nothing waits for it.
        seconds = min(left, part.seconds * (4 if given.cpu else 1))
        if seconds < 5:
            rows.append(Row(part.name, "all of it", f"no time is left of {given.minutes:g} minutes", "skipped"))
            continue
        started = time.monotonic()
        found = run_part(part, given.cpu, given.out, seconds)
        rows += found
        print(f"{part.name}: {summary(found)}, {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    machine = describe_machine()
    write(given, machine, rows, time.monotonic() - began)
    print("\n".join(table(rows)))
    print(f"\n{machine}: {summary(rows)}; {given.out}/gpu.json, gpu.png, ledger.md")
    return 1 if any(row.state == "failed" for row in rows) else 0


def write(given: argparse.Namespace, machine: str, rows: list[Row], seconds: float) -> None:
    """Write gpu.json, table.md, ledger.md and gpu.png."""
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    command = "benchmarks/gpu/run.sh" + " --cpu" * given.cpu
    whole = {"date": date, "machine": machine, "command": command, "seconds": seconds, "rows": [*map(asdict, rows)]}
    (given.out / "gpu.json").write_text(json.dumps(whole, indent=2, ensure_ascii=False) + "\n")
    (given.out / "table.md").write_text("\n".join(table(rows)) + "\n")
    (given.out / "ledger.md").write_text(ledger_row(date, machine, command, rows) + "\n")
    try:
        picture(given.out / "gpu.png", f"{machine}, {date}", rows)
    except ImportError as error:  # Pillow is among the packages that may be missing
        print(f"no picture: {error}", file=sys.stderr)


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
