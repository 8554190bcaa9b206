"""How the tests of faults start the program, wait for a moment in it, disturb it, and compare what it leaves."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from conftest import NETWORK, TRANSFORMER, few_images, without_clock
from forked import Forked
from unfog.reporting.records import read_events, read_metrics

FULL = os.environ.get("UNFOG_FAULTS") == "full"
long_form = pytest.mark.exhaustive("long form")
"""Marks what only `make test-faults` and `make test-all` run."""

BASE = {
    "--network": NETWORK if FULL else TRANSFORMER,
    "--precision": "fp32",
    "--device": "cpu",
    "--batch": 8,
    "--microbatch": 3,
    "--lr": "1e-3",
    "--flip": True,
    "--data.jitter": 0.1,
    "--sampler.steps": 3,
    "--log.every": 1,
    "--preview.every": 12,
    "--preview.images": 4,
    "--evaluate.every": 12,
    "--evaluate.images": 8,
    "--evaluate.levels": 2,
    "--checkpoint.keep": 100,
    "--ema-snapshots.every": 5,
}
GRACE = 10  # seconds that a request to stop may take


class Recipe(NamedTuple):
    """A run that can be repeated to the bit. `name` is unique; `every` are the steps between checkpoints."""

    name: str
    steps: int
    every: int
    flags: dict[str, object] = {}  # noqa: RUF012
    """In place of, or besides, those of BASE."""
    source: str = ""
    """Or a few of the built-in images."""

    def words(self, run: Path) -> list[str]:
        """The command that begins it in the folder `run`."""
        flags = {**BASE, "--steps": self.steps, "--checkpoint.every": self.every, **self.flags}
        words = [[flag] if value is True else [flag, str(value)] for flag, value in flags.items()]
        return ["train", self.source or few_images(), "--out", str(run), *(word for pair in words for word in pair)]


USUAL = Recipe("usual", steps=48, every=4)


class Job:
    """A process of the program, in a session of its own; what it says goes to a file.

    `script` is run in place of `-m unfog`: a driver that disturbs the program from inside and then calls its main
    function. `before` are words in front of the command, `options` those of `subprocess.Popen`.
    """

    alive: ClassVar[list[Job]] = []

    def __init__(self, *words: object, script: str = "", before: Sequence[str] = (), **options) -> None:
        self.output = tempfile.TemporaryFile("w+b")  # noqa: SIM115
        streams = {"stdin": subprocess.DEVNULL, "stdout": self.output, "stderr": self.output}
        options = streams | {"start_new_session": True} | options
        if before or "LD_PRELOAD" in os.environ:  # which only a fresh interpreter heeds
            python = [sys.executable, "-c", script] if script else [sys.executable, "-m", "unfog"]
            self.process = subprocess.Popen([*before, *python, *map(str, words)], **options)
        else:
            self.process = Forked(words, script, **options)
        Job.alive.append(self)

    @property
    def said(self) -> str:
        """Everything so far."""
        return os.pread(self.output.fileno(), 1 << 24, 0).decode("utf-8", "replace")

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self.process.poll() is None

    def until(self, condition: Callable[[], object], seconds: float = 120) -> bool:
        """Wait until something is true; False if the process ended first."""
        limit = time.monotonic() + seconds
        while not condition():
            if not self.running:
                return False
            assert time.monotonic() < limit, f"waited in vain; it said: {self.said}"
            time.sleep(0.002)
        return True

    def outlives(self, seconds: float) -> bool:
        """Wait that long; False if the process ended first."""
        end = time.monotonic() + seconds
        return self.until(lambda: time.monotonic() > end)

    def ask(self, way: str, run: Path) -> None:
        """Ask it to stop: by a signal of that name, or by the file STOP."""
        if way == "STOP":
            (run / "STOP").touch()
        else:
            self.process.send_signal(getattr(signal, way))

    def kill(self) -> None:
        """End it as a power cut would."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def ends(self, status: int = 0, seconds: float = 200) -> str:
        """Wait for its end, check the exit status, and give what it said."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds} s; it said: {self.said}") from None
        assert self.process.returncode == status, self.said
        return self.said

    @classmethod
    def end_all(cls) -> None:
        """Leave no process behind, whatever became of the test."""
        while cls.alive:
            job = cls.alive.pop()
            job.kill()
            job.output.close()


def train(recipe: Recipe, run: Path, *more: object, **options) -> Job:
    """Begin a run."""
    return Job(*recipe.words(run), *more, **options)


def resume(run: Path, *more: object, **options) -> Job:
    """Go on with a run."""
    return Job("resume", run, *more, **options)


def train_or_resume(recipe: Recipe, run: Path, *more: object, **options) -> Job:
    """What a person types next: `resume` as soon as there is a run, else `train` again."""
    return resume(run, *more, **options) if (run / "config.toml").exists() else train(recipe, run, *more, **options)


def step_reached(run: Path) -> int:
    """The last step that the metrics tell of; 0 before there are any."""
    return max((row["step"] for row in read_metrics(run / "metrics.jsonl")), default=0)


def steps_saved(run: Path) -> list[int]:
    """The steps of the checkpoints that are there by name, in order."""
    folder = run / "checkpoints"
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit()) if folder.is_dir() else []


def newest(run: Path) -> Path:
    """Folder of the newest checkpoint, by name."""
    return run / "checkpoints" / f"{steps_saved(run)[-1]:08d}"


def saving(run: Path) -> bool:
    """Whether a checkpoint is being written."""
    with suppress(FileNotFoundError):
        return any(name.startswith(".partial-") for name in os.listdir(run / "checkpoints"))
    return False


def events(run: Path, kind: str) -> list[dict]:
    """The events of one kind."""
    return [event for event in read_events(run / "events.jsonl") if event["kind"] == kind]


def lost_steps(run: Path) -> int:
    """Steps that were done and will be done again."""
    return max(0, step_reached(run) - max(steps_saved(run), default=0))


def sleep_up_to(chance: random.Random, seconds: float) -> None:
    """Pass a random part of that time."""
    time.sleep(chance.uniform(0, seconds))


def assert_same(run: Path, reference: Path, pictures: bool = True) -> None:
    """Weights, EMA, optimiser, position, settings, metrics (less what a clock measured), previews: to the bit."""
    mine, theirs = newest(run), newest(reference)
    assert mine.name == theirs.name
    names = sorted(path.name for path in theirs.iterdir())
    assert sorted(path.name for path in mine.iterdir()) == names
    for name in names:
        if name not in ("manifest.json", "config.toml"):
            assert (mine / name).read_bytes() == (theirs / name).read_bytes(), f"{name} differs"
    for one, other in ((mine, theirs), (run, reference)):
        # A run names its own copy of an autoencoder by the place of the run.
        settings = (one / "config.toml").read_text().replace(str(run), str(reference))
        assert settings == (other / "config.toml").read_text()
    assert without_clock(run / "metrics.jsonl") == without_clock(reference / "metrics.jsonl")
    if pictures:
        assert all_pictures(run) == all_pictures(reference)


def all_pictures(run: Path) -> dict[str, bytes]:
    """The previews and the like, by name."""
    found = sorted(run.glob("samples/*.png")) + sorted(run.glob("denoising/*.png"))
    assert found
    return {str(path.relative_to(run)): path.read_bytes() for path in found}


def assert_saved_is_finite(run: Path) -> None:
    """No number in any checkpoint is NaN or infinite."""
    files = list(run.glob("checkpoints/*/*.safetensors"))
    assert files
    for file in files:
        for name, tensor in load_file(file).items():
            assert bool(torch.isfinite(tensor.float()).all()), f"{name} in {file}"


def made_once(place: Path, make: Callable[[Path], None]) -> Path:
    """A folder that several test processes use and the first to come makes."""
    import fcntl  # not there on Windows, where the tests here are left out

    place.parent.mkdir(parents=True, exist_ok=True)
    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / ".made").exists():
            shutil.rmtree(place, ignore_errors=True)
            make(place)
            (place / ".made").touch()
    return place


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, to see later that nothing changed."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def as_json(path: Path) -> dict:
    """A JSON file."""
    return json.loads(path.read_text())
