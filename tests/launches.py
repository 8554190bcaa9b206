"""What tests of several processes share: torchrun, and what it leaves behind."""

import json
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from conftest import NETWORK
from forked import Forked
from unfog.training.checkpoints.format import read_tensors

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
SETTINGS = (
    *("--network", NETWORK.replace("dropout=0.1", "dropout=0"), "--batch", 10, "--precision", "fp32", "--lr", "1e-3"),
    *("--preview.every", -1, "--preview.images", 1, "--sampler.steps", 2, "--log.every", 1, "--evaluate.every", -1),
    *("--checkpoint.every", 4, "--ema-snapshots.every", -1, "--device", "cpu", "--optimizer.schedule", "constant"),
)


STARTED = []


@pytest.fixture
def ended():
    """Leaves nothing running where a test fails: torchrun ends its workers."""
    yield
    while STARTED:
        with STARTED.pop() as process:
            if process.poll() is None:
                process.terminate()


def started(*words):
    said = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen([str(word) for word in words], **said)
    STARTED.append(process)
    return process


def forked(words, script=""):
    STARTED.append(Forked(words, script, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
    return STARTED[-1]


def output(process, status=0):
    said, _ = process.communicate(timeout=300)
    assert process.returncode == status, said
    return said


def launched(size, command, folder, *words, restarts=0):
    source = ("fashion", "--out") if command == "train" else ()
    return started(*TORCHRUN, size, "--max-restarts", restarts, "-m", "unfog", command, *source, folder, *words)


def alone(command, folder, *words):
    source = ("fashion", "--out") if command == "train" else ()
    return output(forked([command, *source, folder, *words]))


def cases(tmp_path, size, names):
    found = tmp_path / "found.json"
    output(started(*TORCHRUN, size, Path(__file__).with_name("ranks.py"), found, ",".join(names)))
    return json.loads(found.read_text())


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def weights(folder):
    newest = max((folder / "checkpoints").glob("[0-9]*"))
    return {
        f"{file} {name}": tensor
        for file in ("model", "ema", "optimizer")
        for name, tensor in read_tensors(newest / f"{file}.safetensors").items()
    }


def largest_difference(a, b):
    assert a.keys() == b.keys()
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


def workers(process):
    """Process numbers by rank, of what torchrun has started."""
    found = {}
    for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        with suppress(OSError):  # it has just ended
            lines = Path(f"/proc/{child}/environ").read_bytes().decode().split("\0")
            found |= {int(line.removeprefix("RANK=")): int(child) for line in lines if line.startswith("RANK=")}
    return found


def wait_for_steps(folder, steps, process):
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and process.poll() is None:
        if (folder / "metrics.jsonl").exists() and len(rows(folder)) >= steps:
            return
        time.sleep(0.05)
    raise AssertionError(output(process))
