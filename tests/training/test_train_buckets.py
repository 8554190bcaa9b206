"""Runs on images of several aspects: on several processes, and after they were paused and killed."""

import os
import signal
import time

import pytest
from PIL import Image

from launches import (
    SETTINGS,
    ended,  # noqa: F401  a fixture
    forked,
    largest_difference,
    launched,
    output,
    rows,
    wait_for_steps,
    weights,
)
from unfog.process.run_folder import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ended")]

STEPS = 9
KEEP = (*SETTINGS, "--aspect", "keep", "--size", 16)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A folder of 30 wide, 30 square and 30 tall images of two classes."""
    place = tmp_path_factory.mktemp("mixed")
    for i in range(90):
        folder = place / "ab"[i % 2]
        folder.mkdir(exist_ok=True)
        Image.new("RGB", ((48, 32), (36, 36), (32, 48))[i % 3], (2 * i, 255 - i, i)).save(folder / f"{i:02d}.png")
    return place


@pytest.fixture(scope="module")
def unbroken(images, tmp_path_factory):
    """A run of one process, from beginning to end."""
    run = tmp_path_factory.mktemp("unbroken") / "run"
    output(train(images, run))
    assert len(RunFolder(run).read_config().size_buckets) == 3
    return run


def train(images, run):
    return forked(["train", images, "--out", run, "--steps", STEPS, *KEEP])


def test_any_number_of_processes_trains_on_the_same_buckets(images, unbroken, tmp_path):
    run = tmp_path / "run"
    output(launched(2, "train", run, "--steps", 5, *KEEP, images=images))
    output(launched(3, "resume", run, "--steps", STEPS))
    assert largest_difference(weights(unbroken), weights(run)) < 1e-4
    for a, b in zip(rows(unbroken), rows(run), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)


def test_a_run_that_was_paused_and_killed_ends_with_the_same_bits(images, unbroken, tmp_path):
    run = tmp_path / "run"
    with train(images, run) as process:
        wait_for_steps(run, 2, process)
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(0.3)
        os.kill(process.pid, signal.SIGCONT)
        wait_for_steps(run, 5, process)
        process.kill()
    assert not (run / "checkpoints" / f"{STEPS:08d}").exists(), "it ended before it could be killed"
    output(forked(["resume", run]))
    assert largest_difference(weights(unbroken), weights(run)) == 0
    assert [row["loss"] for row in rows(unbroken)] == [row["loss"] for row in rows(run)]
