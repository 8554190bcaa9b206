"""`unfog ema-sweep`: find the best EMA width of a run, and print it."""

from __future__ import annotations

from unfog.config.requests.ema_sweep import EmaSweepRequest
from unfog.inference.ema_sweep import PAGE_FILE, ema_sweep
from unfog.inference.loaded_run import SWEEP_FILE
from unfog.reporting.progress import print_result, say


def main(request: EmaSweepRequest) -> int:
    """Sweep, print the best width, and return the exit status."""
    swept = ema_sweep(request)
    for line in swept.lines():
        say(f"  {line}")
    say(f"  {swept.finding()}")
    say(f"  {PAGE_FILE} shows it; this run is sampled with this width until {SWEEP_FILE} is deleted")
    print_result(f"{swept.best.width:g}")
    return 0
