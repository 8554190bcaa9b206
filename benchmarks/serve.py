"""What the server of `unfog serve` costs: first answer, long runs, many runs, a tick, memory, and a watched run.

    python benchmarks/serve.py [--runs 100] [--rows 100000] [--seconds 20]

The runs are made up, and share one file of metrics by hard links: time for reading from the disk is not in the figures.
Each figure is wall time and processor time of the server, which alone can be judged on a machine that does other work.
A watched run is not trained here: what a watcher costs it is the processor time of the server in those seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from unfog.config.presets import preset
from unfog.config.toml import to_toml, with_version

import numpy as np

_LEVELS = 8


def make_runs(folder: Path, runs: int, rows: int) -> None:
    """Make runs of `rows` lines each, as training logs them: 16 numbers and a list of eight."""
    folder.mkdir()
    random = np.random.default_rng(0)
    names = [*("loss", "lr", "gradient_norm", "images_per_second", "data_wait", "noise_scale"), *"abcdef"]
    config = with_version(to_toml(replace(preset("default"), source="fashion")))
    metrics = folder / "metrics"
    with metrics.open("w") as file:
        for i in range(rows):
            row = {"step": 10 * i, "images": 640 * i, "seconds": i / 2}
            row |= dict(zip(names, random.random(len(names)).tolist()))
            row["loss_by_level"] = random.random(_LEVELS).tolist()
            file.write(json.dumps(row) + "\n")
    for number in range(runs):
        run = folder / f"run-{number:03}"
        (run / "samples").mkdir(parents=True)
        (run / "config.toml").write_text(config)
        (run / "events.jsonl").write_text(json.dumps({"kind": "started", "step": 0, "steps": 10 * rows}) + "\n")
        os.link(metrics, run / "metrics.jsonl")
    metrics.unlink()


def cpu_of(pid: int) -> float:
    """Return the processor seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Server:
    """A server in a process of its own, with clocks around its answers."""

    def __init__(self, folder: Path) -> None:
        began = time.perf_counter()
        words = ["serve", str(folder), "--port", "0", "--no-browser"]
        self.process = subprocess.Popen([sys.executable, "-m", "unfog", *words], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        self.host, _, self.secret = self.address.removeprefix("http://").rstrip("/").partition("/")
        self.get("")
        self.first = time.perf_counter() - began, self.cpu()

    def cpu(self) -> float:
        """Processor seconds of the process so far."""
        return cpu_of(self.process.pid)

    def memory(self) -> float:
        """Resident memory in MB."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024

    def connect(self, path: str) -> socket.socket:
        """Send a request, and return the connection."""
        name, _, port = self.host.rpartition(":")
        connection = socket.create_connection((name, int(port)), timeout=300)
        head = f"GET /{self.secret}/{path} HTTP/1.1\r\nHost: {self.host}\r\nConnection: close\r\n\r\n"
        connection.sendall(head.encode())
        return connection

    def get(self, path: str) -> bytes:
        """Return the body of an answer."""
        with self.connect(path) as connection:
            answer = b"".join(iter(lambda: connection.recv(2**20), b""))
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b" 200 " in head[:20], head
        return body

    def clock(self, what: str, work: Callable[[], object]) -> None:
        """Print wall time and processor time of the server for some work."""
        wall, cpu = time.perf_counter(), self.cpu()
        work()
        print(f"{what:58} {1000 * (time.perf_counter() - wall):8.0f} ms, processor {1000 * (self.cpu() - cpu):6.0f} ms")


def measure_answers(server: Server, ids: list[int]) -> None:
    """Clock the list, the columns of one run, its thinned columns, and both again."""
    server.clock("list of runs, again", lambda: server.get("api/runs"))
    one = f"api/runs/{ids[0]}"
    server.clock("one run: details and all rows of two columns", lambda: _open_run(server, one))
    whole = f"{one}/thinned?x=step&columns=loss,gradient_norm&points=2000"
    server.clock("another run, thinned to 2,000 points", lambda: server.get(whole.replace(str(ids[0]), str(ids[1]))))
    server.clock("the same, again", lambda: server.get(whole.replace(str(ids[0]), str(ids[1]))))
    server.clock("100 zooms into it", lambda: [server.get(f"{whole}&low={i}&high={9000 + i}") for i in range(100)])
    server.clock("eight runs, thinned", lambda: [server.get(f"api/runs/{i}/thinned?points=2000") for i in ids[:8]])


def _open_run(server: Server, one: str) -> None:
    server.get(one)
    server.get(f"{one}/metrics?columns=step,loss")


def measure_watching(server: Server, folder: Path, seconds: float) -> None:
    """Clock the server while one run grows by a line ten times a second and a browser listens, then while none does."""
    run, over = folder / "run-000", threading.Event()
    copy = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").write_bytes(copy)

    def grow() -> None:
        step = 10 * copy.count(b"\n")
        with (run / "metrics.jsonl").open("a") as file:
            while not over.wait(0.1):
                step += 10
                file.write(json.dumps({"step": step, "loss": 0.5, "lr": 1e-3}) + "\n")
                file.flush()
                now = datetime.now(UTC).isoformat(timespec="milliseconds")
                beat = {"time": now, "pid": os.getpid(), "host": socket.gethostname(), "next": 5.0}
                (run / "heartbeat.json").write_text(json.dumps(beat | {"step": step, "steps": 0, "doing": "training"}))

    writer = threading.Thread(target=grow)
    writer.start()
    for what, listening in (("one browser listens", True), ("none does", False)):
        connection = server.connect("api/stream") if listening else None
        time.sleep(3)
        cpu, began = server.cpu(), time.perf_counter()
        time.sleep(seconds)
        spent = (server.cpu() - cpu) / (time.perf_counter() - began)
        print(f"{f'a run grows, {what}':58} {100 * spent:8.2f}% of a core")
        if connection is not None:
            connection.close()
    over.set()
    writer.join()


def measure_memory(server: Server, ids: list[int]) -> None:
    """Print the memory after many requests, and after as many again."""
    for _ in range(3):
        for i in range(1000):
            server.get(f"api/runs/{ids[i % 8]}/thinned?columns=loss&points=500")
            if i % 10 == 0:
                server.get("api/runs")
        print(f"{'memory after 1,100 more requests':58} {server.memory():8.0f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=20)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "runs"
        make_runs(folder, args.runs, args.rows)
        size = (folder / "run-000" / "metrics.jsonl").stat().st_size
        print(f"{args.runs} runs of {args.rows:,} rows, {size / 1e6:.0f} MB each")
        server = Server(folder)
        print(f"{'first answer, from the start of Python':58} {server.first[0] * 1000:8.0f} ms", end="")
        print(f", processor {1000 * server.first[1]:6.0f} ms")
        ids: list[int] = []
        server.clock("list of runs", lambda: ids.extend(row["id"] for row in json.loads(server.get("api/runs"))))
        print(f"{'memory then':58} {server.memory():8.0f} MB")
        measure_answers(server, ids)
        measure_memory(server, ids)
        measure_watching(server, folder, args.seconds)
        server.process.terminate()
        server.process.wait()


if __name__ == "__main__":
    main()
