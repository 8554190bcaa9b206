"""What tests of several processes share: torchrun, and what it leaves behind."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

import unfog
from conftest import NETWORK, few_images
from forked import Forked
from unfog.training.checkpoints.load import read_tensors

SETTINGS = (
    *("--network", NETWORK.replace("dropout=0.1", "dropout=0"), "--batch", 10, "--precision", "fp32", "--lr", "1e-3"),
    *("--preview.every", -1, "--preview.images", 1, "--sampler.steps", 2, "--log.every", 1, "--evaluate.every", -1),
    *("--checkpoint.every", 4, "--ema-snapshots.every", -1, "--device", "cpu", "--optimizer.schedule", "constant"),
)


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
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
    said, _ = process.communicate(timeout=560)
    assert process.returncode == status, said
    return said


AGENT = """
import ctypes, os, runpy, sys, uuid
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

def rank(words):
    ctypes.CDLL(None).prctl(15, f"rank {os.environ['RANK']}".encode(), 0, 0, 0)  # the name of a process, in /proc
    sys.argv = words
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as left:
        if left.code:
            raise

size, restarts = map(int, sys.argv[1:3])
where = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "run_id": str(uuid.uuid4())}
launch = LaunchConfig(1, 1, size, max_restarts=restarts, start_method="fork", **where)
elastic_launch(launch, rank)(sys.argv[3:])
"""
"""What torchrun does, but that ranks are forked instead of starting interpreters that import torch."""


def launched(size, command, folder, *words, restarts=0, images=None):
    source = (images or few_images(), "--out") if command == "train" else ()
    return forked(
        [size, restarts, Path(unfog.__file__).with_name("__main__.py"), command, *source, folder, *words], AGENT
    )


def launched_script(size, file, *words):
    return forked([size, 0, Path(__file__).with_name(file), *words], AGENT)


def alone(command, folder, *words):
    source = (few_images(), "--out") if command == "train" else ()
    return output(forked([command, *source, folder, *words]))


def cases(tmp_path, size, names):
    found = tmp_path / "found.json"
    output(launched_script(size, "ranks.py", found, ",".join(names)))
    return json.loads(found.read_text())


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def weights(folder):
    newest = max((folder / "checkpoints").glob("[0-9]*"))
    return {
        f"{file} {name}": tensor
        for file in ("model", "ema", "optimizer")
        for name, tensor in read_tensors(newest / f"{file}.safetensors", newest).items()
    }


def largest_difference(a, b):
    assert a.keys() == b.keys()
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


def workers(process):
    """Process numbers by rank, of what torchrun has started."""
    found = {}
    for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        with suppress(OSError):  # it has just ended
            name = Path(f"/proc/{child}/comm").read_text().split()
            found |= {int(name[1]): int(child)} if name[0] == "rank" else {}
    return found


def wait_for_steps(folder, steps, process):
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and process.poll() is None:
        if (folder / "metrics.jsonl").exists() and len(rows(folder)) >= steps:
            return
        time.sleep(0.05)
    raise AssertionError(output(process))


def kill_after_checkpoint(folder, step, process):
    """Kill all ranks of a training as soon as it has the checkpoint of a step, and wait for its launcher."""
    while not (folder / "checkpoints" / f"{step:08}").is_dir():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    for worker in workers(process).values():
        os.kill(worker, signal.SIGKILL)
    process.communicate()
    assert process.returncode, "it ended before it could be killed"
