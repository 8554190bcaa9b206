"""`unfog tune`: find the best noise levels for sampling a run in few steps, and print the error of each grid."""

from __future__ import annotations

from unfog.config.requests.tune import TuneRequest
from unfog.inference.tune import tune
from unfog.reporting.progress import print_result


def main(request: TuneRequest) -> int:
    """Tune, print the errors of all grids, and return the exit status."""
    print_result(tune(request).table())
    return 0
