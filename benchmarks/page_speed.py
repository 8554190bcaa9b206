"""Measure the page in a real Chromium: zooming 100,000 points, a list of 200 runs, and many runs laid over one another.

    python benchmarks/page_speed.py

Run folders are made in a temporary folder. Frames are counted by requestAnimationFrame while the range of all charts
changes at every frame; Chromium draws with the processor where there is no GPU.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from browsers import WatchedPage, open_browser, serving
from serve import cpu_of
from waiting import wait_until

# Zooms to and fro for five seconds, and gives the frames' times in milliseconds.
ZOOM = """async () => {
  const {zoom} = await import('./static/zoom.js'), times = [], begun = performance.now();
  const last = document.querySelector('unfog-chart').series[0].x.at(-1);
  for (let now = begun; now - begun < 5000;) {
    const share = 0.02 + 0.48 * (1 + Math.cos((now - begun) / 800));
    zoom([last / 2 * (1 - share), last / 2 * (1 + share)], false);
    const next = await new Promise(requestAnimationFrame);
    times.push(next - now);
    now = next;
  }
  return times.slice(5);
}"""


def make_run(folder: Path, rows: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    steps, noise = np.arange(1, rows + 1), rng.standard_normal((rows, 2))
    loss = 0.3 + 1 / np.sqrt(steps) + 0.03 * noise[:, 0]
    with (folder / "metrics.jsonl").open("w") as file:
        for i in range(rows):
            row = {"step": i + 1, "images": 8 * (i + 1), "seconds": i / 10, "loss": loss[i]}
            file.write(json.dumps({**row, "gradient_norm": abs(noise[i, 1]), "lr": 1e-4}) + "\n")
    events = [{"time": "2026-01-01T00:00:00", "step": 0, "kind": "started", "steps": rows}]
    events.append({"time": "2026-01-01T01:00:00", "step": rows, "kind": "finished"})
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (folder / "config.toml").write_text('version = 1\nsource = "fashion"\n')


def busy(clock) -> float:
    """Return the processor seconds that the page's main thread has used."""
    return next(
        one["value"] for one in clock.send("Performance.getMetrics")["metrics"] if one["name"] == "TaskDuration"
    )


def clock_of(watched):
    """Return a session of the debugger for `busy`."""
    clock = watched.context.new_cdp_session(watched.page)
    clock.send("Performance.enable", {"timeDomain": "threadTicks"})
    return clock


def measure(browser, folder: Path) -> None:
    with serving(folder) as (address, _):
        watched = WatchedPage(browser, viewport={"width": 1280, "height": 900})
        page, begun = watched.page, time.monotonic()
        page.goto(address)
        page.wait_for_selector("table.runs tbody tr")
        count = page.evaluate("document.querySelectorAll('table.runs tbody tr').length")
        print(f"list of {count} runs: shown after {time.monotonic() - begun:.2f} s")
        typed = "(e) => { const t = performance.now(); e.value = 'run-1'; e.dispatchEvent(new Event('input')); "
        typed += "return new Promise((r) => requestAnimationFrame(() => setTimeout(() => r(performance.now() - t)))); }"
        print(f"search in it: {page.eval_on_selector('input[type=search]', typed):.0f} ms until drawn")
        runs = page.evaluate("fetch('api/runs').then((answer) => answer.json())")
        ids = {run["name"]: str(run["id"]) for run in runs}
        begun = time.monotonic()
        page.goto(f"{address}#/run/{ids['long']}")
        page.reload()
        page.wait_for_selector("unfog-chart canvas", timeout=120_000)
        print(f"run of 100,000 rows: charts drawn after {time.monotonic() - begun:.2f} s")
        wait_until(lambda: page.evaluate("document.querySelectorAll('unfog-chart canvas').length") >= 3)
        # On a busy machine frames come late; what counts besides is the processor time that one takes.
        clock = clock_of(watched)
        before = busy(clock)
        times = np.array(page.evaluate(ZOOM))
        used = 1000 * (busy(clock) - before) / (len(times) + 5)
        drawn = page.evaluate("[...document.querySelectorAll('unfog-chart')].filter((c) => c.seen).length")
        rate, late = 1000 / times.mean(), np.quantile(times, 0.95)
        said = f"{rate:.0f} frames/s, median {np.median(times):.1f} ms, 95% {late:.1f} ms"
        print(f"zooming it, {drawn} charts in view: {said}; {used:.1f} ms of processor time a frame")
        chosen = ",".join(ids[f"run-{i:03d}"] for i in range(8))
        begun = time.monotonic()
        page.goto(f"{address}#/compare/{chosen}")
        page.wait_for_selector("unfog-compare unfog-chart canvas", timeout=120_000)
        print(f"eight runs of 2,000 rows laid over one another: after {time.monotonic() - begun:.2f} s")


def measure_long(browser, folder: Path) -> None:
    """Clock eight long runs that no server has read yet: until their curves are there, and until all rows are."""
    with serving(folder) as (address, process):
        watched = WatchedPage(browser, viewport={"width": 1280, "height": 900})
        page = watched.page
        page.goto(address)
        page.wait_for_selector("table.runs tbody tr")
        ids = page.evaluate("fetch('api/runs').then((answer) => answer.json())")
        clock = clock_of(watched)
        begun, before, drawn = time.monotonic(), cpu_of(process.pid), busy(clock)
        page.goto(f"{address}#/compare/{','.join(str(run['id']) for run in ids[:8])}")
        page.wait_for_selector("unfog-compare unfog-chart canvas", timeout=120_000)
        seen = time.monotonic() - begun
        stores = "document.querySelector('unfog-compare').runs.every(({store}) => !store.sampled)"
        wait_until(lambda: page.evaluate(stores), 300)
        print(f"eight runs of 100,000 rows: laid over one another after {seen:.2f} s, ", end="")
        print(f"all rows after {time.monotonic() - begun:.2f} s; processor time of the server ", end="")
        print(f"{cpu_of(process.pid) - before:.1f} s, of the page {busy(clock) - drawn:.1f} s")


def make_long(folder: Path) -> None:
    """Make eight runs that share a long record by hard links."""
    folder.mkdir()
    first = folder / "long-0"
    make_run(first, 100_000, 0)
    rows = (json.loads(line) for line in (first / "metrics.jsonl").read_text().splitlines())
    more = dict.fromkeys(("images_per_second", "data_wait", "noise_scale", *"abcdef"), 0.1234567890123456)
    lines = [json.dumps({**row, **more, "loss_by_level": [row["loss"]] * 8}) + "\n" for row in rows]
    (first / "metrics.jsonl").write_text("".join(lines))
    for i in range(1, 8):
        make_run(folder / f"long-{i}", 1, i)
        (folder / f"long-{i}" / "metrics.jsonl").unlink()
        os.link(first / "metrics.jsonl", folder / f"long-{i}" / "metrics.jsonl")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, open_browser() as browser:
        make_run(Path(folder) / "long", 100_000, 0)
        for i in range(199):
            make_run(Path(folder) / f"run-{i:03d}", 2000 if i < 8 else 100, i)
        measure(browser, Path(folder))
        make_long(Path(folder) / "others")
        measure_long(browser, Path(folder) / "others")


if __name__ == "__main__":
    main()
