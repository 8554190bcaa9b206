"""What a page that stays open costs: a training run watched and not watched in turn, and an hour of ticks in minutes.

    python benchmarks/serve_watch.py pairs [--pairs 12] [--seconds 6]
    python benchmarks/serve_watch.py hour [--ticks 3600]

`pairs` trains one run, opens and closes the page's stream of events in turn, and compares steps a second and processor
seconds a step; on a machine that does other work the latter count. `hour` shortens the server's tick to 40 ms while a
run grows by a line a tick, keeps the page of that run open in a real Chromium, and prints the memory of both sides.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parent))
from browsers import WatchedPage, open_browser
from serve import Server, cpu_of, make_runs

NETWORK = "unet:channels=8/16,attention=0/1,mid_attention=0,norm_groups=4,head_channels=8"
_FAST = "import unfog.serve.server as s; s._TICK_SECONDS = 0.04; from unfog.cli.main import main; main({words!r})"


def step_of(run: Path) -> int:
    """Return the last step that a run has logged; 0 before the first."""
    lines = (run / "metrics.jsonl").read_bytes().splitlines() if (run / "metrics.jsonl").exists() else []
    return int(json.loads(lines[-1])["step"]) if lines else 0


def measure_pairs(folder: Path, pairs: int, seconds: float) -> None:
    """Print the ratio of watched to unwatched, of steps a second and of processor seconds a step, with its error."""
    run = folder / "runs" / "live"
    words = ["train", "fashion", "--out", str(run), "--network", NETWORK, "--steps", "1000000", "--batch", "8"]
    words += ["--size", "16", "--log.every", "2", "--evaluate.every", "-1", "--preview.every", "-1"]
    training = subprocess.Popen([sys.executable, "-m", "unfog", *words], stderr=subprocess.DEVNULL)
    try:
        while step_of(run) < 100:
            time.sleep(0.5)
        server = Server(folder / "runs")
        speeds, costs, served = [], [], 0.0
        for i in range(2 * pairs):
            connection = server.connect("api/stream") if i % 2 else None
            time.sleep(0.5)
            step, cpu, begun, before = step_of(run), cpu_of(training.pid), time.monotonic(), server.cpu()
            time.sleep(seconds)
            steps, took = step_of(run) - step, time.monotonic() - begun
            speeds.append(steps / took)
            costs.append((cpu_of(training.pid) - cpu) / steps)
            if connection is not None:
                served += (server.cpu() - before) / took / pairs
                connection.close()
        for what, values in (("steps a second", speeds), ("processor seconds a step", costs)):
            ratios = np.array(values[1::2]) / np.array(values[::2])
            error = 100 * ratios.std(ddof=1) / np.sqrt(len(ratios))
            change = f"{100 * (ratios.mean() - 1):+.2f}% ± {error:.2f}%"
            print(f"{what}: {np.mean(values):.4g}; watched against not watched: {change}")
        print(f"the server takes {100 * served:.2f}% of a core while it is watched")
        server.process.kill()
    finally:
        training.kill()
        training.wait()


def measure_hour(folder: Path, ticks: int) -> None:
    """Print the memory of server and page after a sixth of the ticks, and after all of them."""
    make_runs(folder / "runs", 2, 200)
    run = folder / "runs" / "run-000"
    (run / "metrics.jsonl").unlink()  # it shares the file of the other
    (run / "metrics.jsonl").touch()
    words = ["serve", str(folder / "runs"), "--port", "0", "--no-browser"]
    process = subprocess.Popen([sys.executable, "-c", _FAST.format(words=words)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    try:
        with open_browser() as browser, (run / "metrics.jsonl").open("a") as file:
            page = WatchedPage(browser, viewport={"width": 1280, "height": 900}).page
            for step in range(1, ticks + 1):
                row = {"step": step, "images": 8 * step, "seconds": float(step), "loss": 1 / step, "lr": 1e-4}
                file.write(json.dumps({**row, "gradient_norm": 1.0, "loss_by_level": [1 / step] * 8}) + "\n")
                file.flush()
                now = datetime.now(UTC).isoformat(timespec="milliseconds")
                beat = {"time": now, "pid": os.getpid(), "host": socket.gethostname(), "next": 60.0}
                beat |= {"step": step, "steps": ticks, "doing": "training"}
                (run / "heartbeat.json").write_text(json.dumps(beat))
                if step == 2:
                    page.goto(address)
                    page.click("a:text-is('run-000')")
                    page.wait_for_selector("unfog-chart canvas")
                    clock = page.context.new_cdp_session(page)
                    clock.send("Performance.enable")
                page.wait_for_timeout(40)
                if step in (ticks // 6, ticks // 2, ticks):
                    print(f"after {step} ticks: {_memory(clock, process.pid)}", flush=True)
            print("rows on the page:", page.evaluate("document.querySelector('unfog-run').store.rows"))
    finally:
        process.kill()
        process.wait()


def _memory(clock, server: int) -> str:
    clock.send("HeapProfiler.collectGarbage")
    found = {one["name"]: one["value"] for one in clock.send("Performance.getMetrics")["metrics"]}
    lines = Path(f"/proc/{server}/status").read_text().splitlines()
    resident = next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024
    heap = found["JSHeapUsedSize"] / 1e6
    page = f"page {heap:.2f} MB of heap, {found['Nodes']:.0f} nodes, {found['JSEventListeners']:.0f} listeners"
    return f"server {resident:.1f} MB, {page}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("pairs", "hour"))
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument("--ticks", type=int, default=3600)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        if args.what == "pairs":
            measure_pairs(Path(place), args.pairs, args.seconds)
        else:
            measure_hour(Path(place), args.ticks)


if __name__ == "__main__":
    main()
