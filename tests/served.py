"""Run folders that look like real ones, and a real server on them, for the tests of `unfog serve`."""

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from unfog.config.presets import preset
from unfog.config.toml import to_toml, with_version

SECRET = "5ec4e7" * 5 + "00"
HOST = "127.0.0.1:8642"


def make_run(folder: Path, rows: int = 40, **settings) -> Path:
    """A run of `rows` logged steps with two previews, as training leaves it."""
    (folder / "samples").mkdir(parents=True)
    config = replace(preset("default"), source="fashion", **settings)
    (folder / "config.toml").write_text(with_version(to_toml(config)))
    with (folder / "metrics.jsonl").open("w") as file:
        for i in range(rows):
            file.write(json.dumps(row_of(i)) + "\n")
    events = [
        {"time": "2026-01-01T00:00:00+00:00", "step": 0, "kind": "choice", "name": "lr", "value": "1", "reason": "r"},
        {"time": "2026-01-01T00:00:00+00:00", "step": 0, "kind": "started", "steps": rows},
        {"time": "2026-01-01T00:00:01+00:00", "step": 5, "kind": "step_refused", "layer": "conv", "images": ["a.png"]},
        {"time": "2026-01-01T00:01:00+00:00", "step": rows, "kind": "finished"},
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    for step in (10, 20):
        picture = np.full((8, 12, 3), step, np.uint8)
        Image.fromarray(picture).save(folder / "samples" / f"{step:08d}.png")
    return folder


def row_of(i: int) -> dict:
    """A line of metrics.jsonl: held-out losses are rare, and there is a list."""
    row = {"step": i, "images": 8 * i, "seconds": i / 2, "loss": 1 / (i + 1), "loss_by_level": [i, i + 0.5, None]}
    return row | ({"held_out_loss": abs(i - 20) / 10} if i % 10 == 0 else {})


def unpack(answer: bytes) -> tuple[dict, dict[str, np.ndarray]]:
    """Header and columns of a binary answer, read as the page reads it."""
    length = int.from_bytes(answer[:4], "little")
    header = json.loads(answer[4 : 4 + length])
    assert (4 + length) % 8 == 0
    values = np.frombuffer(answer[4 + length :], "<f8").reshape(len(header["columns"]), header["rows"])
    return header, dict(zip(header["columns"], values))


class Address:
    """Where a server listens."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.host, _, rest = text.removeprefix("http://").partition("/")
        self.path = f"/{rest}"
        name, _, port = self.host.rpartition(":")
        self.place = (name, int(port))

    def send(self, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, dict[str, str], bytes]:
        """Send one request as bytes, with no header but Host and those given (`_` stands for `-`)."""
        given = {"Host": self.host} | {name.replace("_", "-"): value for name, value in headers.items()}
        if body:
            given.setdefault("Content-Length", str(len(body)))
        head = "".join(f"{name}: {value}\r\n" for name, value in given.items())
        return self.send_raw(f"{method} {self.path}{path} HTTP/1.1\r\n{head}Connection: close\r\n\r\n".encode() + body)

    def send_raw(self, request: bytes) -> tuple[int, dict[str, str], bytes]:
        """Send bytes, and return status, headers (names in lower case) and body of the answer."""
        with socket.create_connection(self.place, timeout=120) as connection:
            connection.sendall(request)
            answer = b""
            while part := connection.recv(2**16):
                answer += part
        head, _, body = answer.partition(b"\r\n\r\n")
        status, *lines = head.decode("latin-1").split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        return int(status.split()[1]), headers, body

    def get(self, path: str):
        """The JSON of an address."""
        status, _, body = self.send("GET", path)
        assert status == 200, body
        return json.loads(body)

    def post(self, path: str, body: dict) -> tuple[int, dict]:
        """Status and JSON of a button."""
        status, _, answer = self.send("POST", path, json.dumps(body).encode(), Content_Type="application/json")
        return status, json.loads(answer)


@contextmanager
def serving(folder: Path, *words: str, cwd: Path | None = None, **environment: str):
    """A real `unfog serve` in a process of its own, started as the script `unfog` is; yields (address, process)."""
    command = [sys.executable, "-P", "-m", "unfog", "serve", str(folder), "--port", "0", "--no-browser", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=cwd, env={**os.environ, **environment}, **pipes) as process:
        try:
            address = Address(process.stdout.readline().strip())
            until = time.monotonic() + 120
            while time.monotonic() < until:
                try:
                    if address.send("GET", "api/runs")[0] == 200:
                        break
                except OSError:
                    assert process.poll() is None, process.stderr.read()
                time.sleep(0.05)
            yield address, process
        finally:
            process.terminate()
            process.wait(120)
