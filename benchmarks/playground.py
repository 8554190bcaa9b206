"""How soon the page of `unfog serve` shows a denoising step, and how soon a drawing is cancelled, in a real Chromium.

    python benchmarks/playground.py RUNS [--steps 200]

RUNS is a folder with a run. A step counts as seen when its pixels are on the canvas; the time begins in the worker,
after the step was computed. A cancellation begins with the press of the button, and ends when the page knows of it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from browsers import open_browser, serving  # noqa: E402
from waiting import wait_until  # noqa: E402

PLAYGROUND = "document.querySelector('unfog-playground')"
# `computed` is the time of the newest step, so a step that was left out is not counted.
WATCH = f"""(() => {{
  const seen = (window.lags = []);
  const steps = new Set();
  document.addEventListener('painted', (event) => {{
    const job = {PLAYGROUND}.job, step = Number(event.detail.match(/steps\\/(\\d+)/)?.[1] ?? -1);
    if (step < 0 || step !== job.step || steps.has(step)) return;
    steps.add(step);
    seen.push(Date.now() - 1000 * job.computed);
  }});
}})()"""
CANCEL = f"""(() => {{
  window.pressed = Date.now();
  window.before = {PLAYGROUND}.job.done;
  {PLAYGROUND}.data.on('draw', (event) => event.state === 'cancelled' && (window.ended ??= Date.now()));
  {PLAYGROUND}.cancel({PLAYGROUND}.job.job);
}})()"""


def main() -> None:
    """Measure, and print a line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    asked = parser.parse_args()
    with serving(asked.runs) as (address, _), open_browser() as browser:
        page = browser.new_page(viewport={"width": 1200, "height": 1000})
        page.goto(f"{address}#/draw")
        page.wait_for_selector(".controls button.accent", timeout=60_000)

        def draw(count: int, steps: int, seed: int) -> None:
            for label, value in (("Pictures", count), ("Steps", steps)):
                page.fill(f".controls label:has-text('{label}') input", str(value))
            page.fill("#seed", str(seed))
            page.click(".controls button.accent")

        draw(1, 3, int(time.time()))  # starts the worker
        wait_until(lambda: page.evaluate(f"{PLAYGROUND}.job?.state") == "done", 300)
        page.evaluate(WATCH)
        draw(4, asked.steps, 1)
        wait_until(lambda: page.evaluate(f"{PLAYGROUND}.job.seconds > 0 && {PLAYGROUND}.job.settings.seed === 1"), 600)
        lags = sorted(page.evaluate("lags"))
        seconds = page.evaluate(f"{PLAYGROUND}.job.seconds")
        late = lags[int(0.95 * len(lags))]
        print(f"{len(lags)} of {asked.steps} steps seen, at {1000 * seconds / asked.steps:.0f} ms a step")
        print(f"seen after: median {statistics.median(lags):.0f} ms, 95% {late:.0f} ms, longest {lags[-1]:.0f} ms")
        draw(4, 1000, 2)
        wait_until(lambda: page.evaluate(f"{PLAYGROUND}.job.state === 'drawing' && {PLAYGROUND}.job.done > 5"), 300)
        page.evaluate(CANCEL)
        wait_until(lambda: page.evaluate("window.ended > 0"), 60)
        wait_until(lambda: page.evaluate(f"{PLAYGROUND}.job.state") == "cancelled")
        took, more = page.evaluate("ended - pressed"), page.evaluate(f"{PLAYGROUND}.job.done - before")
        print(f"cancelled {took:.0f} ms after the press, {more} steps after the one that the page had shown")


if __name__ == "__main__":
    main()
