"""How a start grows: what is imported, opened and drawn before the first step, in counts rather than in seconds."""

import builtins
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from conftest import NETWORK
from counting import Counting
from unfog.config.presets import preset
from unfog.config.toml import update
from unfog.data.stream import ImageStream
from unfog.pipeline.load_data import load_images
from unfog.process.run_folder import RunFolder
from unfog.process.signals import StopSignals
from unfog.runs import session
from unfog.runs.resume import resume
from unfog.runs.train import train_run

pytestmark = pytest.mark.slow

IMAGES = 1200
SAMPLED = 300  # files of a folder whose stamp looks into them: every fourth here; of more, at most 512
HELP = [
    "unfog",
    "unfog._version",
    "unfog.cli",
    "unfog.cli.main",
    "unfog.device",
    "unfog.device.cores",
    "unfog.errors",
    "unfog.from_python",
    "unfog.process",
    "unfog.process.command_clock",
    "unfog.process.early_signals",
]


@pytest.mark.parametrize("word", ["--help", "--version"])
def test_what_answers_at_once_imports_next_to_nothing(word):
    """Python itself takes most of the time then. Whatever joins these must be as light, and no package."""
    code = (
        "import sys\n"
        "from unfog.cli.main import main\n"
        f"try: main([{word!r}])\n"
        "except SystemExit: pass\n"
        "sys.stderr.write(' '.join(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    loaded = set(done.stderr.split())
    assert sorted(name for name in loaded if name.split(".")[0] == "unfog") == HELP
    foreign = {name.split(".")[0] for name in loaded} - set(sys.stdlib_module_names) - {"unfog"}
    assert not {name for name in foreign if name in ("torch", "numpy", "PIL", "rich", "safetensors")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """1,200 pictures in ten folders."""
    place = tmp_path_factory.mktemp("pictures")
    for i in range(IMAGES):
        path = place / str(i % 10) / f"{i}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(np.full((4, 4, 3), i % 256, np.uint8)).save(path)
    return place


class Files:
    """Counts what is done to the files below a folder."""

    def __init__(self, folder: Path, monkeypatch):
        self.folder, self.opened, self.looked_at, self.decoded = str(folder), [], [], 0
        for owner, name, calls in ((builtins, "open", self.opened), (os, "open", self.opened)):
            monkeypatch.setattr(owner, name, self._noting(getattr(owner, name), calls))
        monkeypatch.setattr(os, "stat", self._noting(os.stat, self.looked_at))
        decode = Image.open

        def opened(*args, **kwargs):
            self.decoded += 1
            return decode(*args, **kwargs)

        monkeypatch.setattr(Image, "open", opened)

    def _noting(self, inner, calls):
        def outer(path, *args, **kwargs):
            if isinstance(path, str | os.PathLike) and str(path).startswith(self.folder) and str(path).endswith(".png"):
                calls.append(str(path))
            return inner(path, *args, **kwargs)

        return outer


def test_a_second_start_looks_at_each_file_once_and_decodes_none(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("UNFOG_CACHE", str(tmp_path))
    config = update(replace(preset("default"), source=str(folder)), {"data": {"cache": "disk"}}, "")
    with StopSignals() as stop:
        first, facts = load_images(config, stop)
        files = Files(folder, monkeypatch)
        for asked in (config, config.adopt(facts)):  # begun anew, and gone on with
            files.opened.clear(), files.looked_at.clear()
            again, _ = load_images(asked, stop)
            assert len(again.train) == len(first.train)
            grid = str(folder / "grid.png")  # a folder of samples would have it
            assert sorted({*files.looked_at} - {grid}) == sorted(str(path) for path in folder.glob("*/*.png"))
            assert len(files.looked_at) - files.looked_at.count(grid) == IMAGES
            assert files.looked_at.count(grid) == 1
            assert len(files.opened) == len(set(files.opened)) == SAMPLED
    assert files.decoded == 0


def configured(**training):
    small = {
        "network": NETWORK,
        "training": {"batch": 8, "images": 8 * 2_000_000, "precision": "fp32", **training},
        "optimizer": {"lr": 1e-3},
        "data": {"size": 8},
        "sampler": {"steps": 2},
        "preview": {"images": 2},
        "evaluate": {"images": 4, "levels": 2},
        "averages": {"every": -1},
    }
    return update(replace(preset("default"), source="fashion"), small, "")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two million steps, stopped after two."""
    folder = tmp_path_factory.mktemp("run") / "run"
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("UNFOG_CACHE", str(tmp_path_factory.mktemp("cache")))
        stop_after(2, patched)
        assert not train_run(configured(), folder)[1]
    return folder


def stop_after(step, monkeypatch):
    advance = session.Session.on_step_end

    def advanced(self, done):
        advance(self, done)
        if done >= step:
            self.stop.request("the test")

    monkeypatch.setattr(session.Session, "on_step_end", advanced)


def resumed_at(step, run, tmp_path, monkeypatch):
    """(positions that were read, operations until the step after this one is done) of a resume that begins there."""
    folder = tmp_path / str(step)
    shutil.copytree(run, folder)
    load, batch, read = session.load_checkpoint, ImageStream.batch, []

    def loaded(place, state):
        load(place, state)
        state.seen = 8 * step

    def noted(self, first, size):
        read.append((first, size))
        return batch(self, first, size)

    with monkeypatch.context() as patched, Counting() as counting:
        patched.setattr(session, "load_checkpoint", loaded)
        patched.setattr(ImageStream, "batch", noted)
        stop_after(step + 1, patched)
        assert not resume(RunFolder(folder))[1]
    return read, counting.operations["loop"]


def test_a_resume_costs_the_same_wherever_it_begins(run, tmp_path, monkeypatch):
    early, operations = resumed_at(10, run, tmp_path, monkeypatch)
    late, as_many = resumed_at(10**6, run, tmp_path, monkeypatch)
    assert early == [(80, 8)]
    assert late == [(8 * 10**6, 8)]
    assert operations == as_many
