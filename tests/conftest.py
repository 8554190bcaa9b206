"""What the tests share: one thread a process, and a network and settings small enough to train in seconds."""

import no_collector  # noqa: F401  # before all that is imported

# isort: split
import atexit
import gc
import itertools
import json
import os
import shutil
import tempfile
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np

import unfog  # noqa: F401  # before torch, whose idle threads it makes sleep; the processes of tests inherit that

# isort: split
import pytest
import torch
from hypothesis import settings

from unfog.data.sources.builtin_fashion import FashionSource

torch.set_num_threads(1)
os.fsync = os.fstat  # no test cuts the power, so none needs to wait for the disk, as a run does a hundred times
os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start

# A change is judged by the same examples as the one before it; HYPOTHESIS_PROFILE=search tries others each time.
settings.register_profile("steady", max_examples=50, derandomize=True, deadline=None)
settings.register_profile("thorough", max_examples=100, derandomize=True, deadline=None)
settings.register_profile("search", max_examples=1000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))

NETWORK = "unet:channels=8/16,attention=0/1,mid_attention=0,norm_groups=4,head_channels=8,dropout=0.1"
TRANSFORMER = "dit:width=16,depth=1,head_channels=8,patch=4,dropout=0.1"
"""Takes a third of the time, where it does not matter which network is trained."""
FEW_PICTURES = {"preview": {"every": -1, "images": 1}, "sampler": {"steps": 2}}
"""For runs whose pictures do not matter: 16 in 20 steps, at the beginning and the end, take longer than training."""
QUIET = ("--preview.every", "-1", "--preview.images", "1", "--sampler.steps", "2", "--evaluate.every", "-1")
"""The same for the command line, without evaluation."""


BEGAN, BUDGET = time.monotonic(), float(os.environ.get("UNFOG_TEST_BUDGET", "inf"))


def pytest_collection_modifyitems(items):
    """Where time is limited, what other runs leave out comes first."""
    for item in items:
        if marker := item.get_closest_marker("may_fail"):
            (reason,) = marker.args
            item.user_properties.append(("may_fail", reason))
    if "UNFOG_TEST_BUDGET" in os.environ:
        items.sort(key=lambda item: item.get_closest_marker("exhaustive") is None)


def pytest_terminal_summary(terminalreporter):
    """Print the reasons of failed tests that may fail; reports of xdist workers hold properties, and no markers."""
    for report in terminalreporter.getreports("failed"):
        for name, reason in report.user_properties:
            if name == "may_fail":
                terminalreporter.write_line(f"MAY FAIL {report.nodeid}: {reason}")


def pytest_collection_finish():
    gc.freeze()  # a million objects that live as long as the tests are looked through no more
    gc.enable()


def pytest_runtest_setup(item):
    if time.monotonic() > BEGAN + BUDGET:
        pytest.skip("out of time")
    torch.manual_seed(0)  # what a test draws does not depend on the tests before it, and is the same each time


@pytest.fixture(scope="session", autouse=True)
def _nobodys_cache(tmp_path_factory):
    """What a module's own fixtures make is made before a test has its cache; nor is that a person's."""
    with pytest.MonkeyPatch.context() as patched:
        caches = tmp_path_factory.mktemp("caches")
        patched.setenv("UNFOG_CACHE", str(caches / "shared"))
        patched.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        patched.delenv("UNFOG_INCEPTION", raising=False)
        yield (caches / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def _own_cache(_nobodys_cache, monkeypatch):
    cache = next(_nobodys_cache)  # `mktemp` would look at the names of all of them each time
    cache.mkdir()
    monkeypatch.setenv("UNFOG_CACHE", str(cache))


@pytest.fixture
def scripts_on_path(monkeypatch):
    """Let a test import what is in scripts/ and scripts/pages/, whose modules import each other."""
    for folder in ("scripts", "scripts/pages"):
        monkeypatch.syspath_prepend(Path(__file__).parents[1] / folder)


if "UNFOG_TESTS" not in os.environ:  # else this is a worker of xdist
    os.environ["UNFOG_TESTS"] = tempfile.mkdtemp(prefix="unfog-tests-")
    atexit.register(shutil.rmtree, os.environ["UNFOG_TESTS"], ignore_errors=True)


@cache
def few_images() -> str:
    """A file of 640 of the built-in images with their classes: it opens a second of a core sooner than all 10,000.

    All workers of xdist use the same one, as runs that are compared name it.
    """
    folder = Path(os.environ["UNFOG_TESTS"])
    file, mine = folder / "few.npz", folder / f"{os.getpid()}.npz"
    if not file.exists():
        built_in = FashionSource()
        some = slice(None, None, len(built_in.names) // 640)
        names = [built_in.names[i].split("/")[0] for i in range(len(built_in.names))]
        np.savez(mine, images=built_in.tiles[some], labels=np.array(names[some]))
        with suppress(FileExistsError):  # another worker was sooner, and a run may have begun with its file
            file.hardlink_to(mine)
        mine.unlink()
    return str(file)


def advance(state, images: int, accepted: bool = True, losses=()) -> None:
    """Count a step as the training loop does, after the optimiser's part of it."""
    state.seen += images
    if accepted:
        state.follow_update(list(losses))
        state.count_update(list(losses))


def without_clock(path: Path) -> list[dict]:
    """Metrics of a run, less what a clock measured."""
    memory = ("memory_mib", "memory_device_mib", "memory_reserved_mib", "disk_free_mib")
    clock = ("seconds", "images_per_second", "data_wait", *memory)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in clock} for row in rows]
