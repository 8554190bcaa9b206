"""`unfog find-lr`: find a learning rate on a throwaway copy, and print it."""

from __future__ import annotations

from dataclasses import replace

from unfog.config.requests.plan import FindLrRequest
from unfog.process.run_folder import next_folder
from unfog.reporting.progress import print_result
from unfog.runs.find_lr import find_lr


def main(request: FindLrRequest) -> int:
    """Print the learning rate, and return the exit status: 1 where none was found."""
    found = find_lr(replace(request, out=request.out or next_folder(request.source, "find-lr")))
    print_result(f"{found.suggestion:g}" if found.suggestion else "none")
    return 0 if found.suggestion else 1
