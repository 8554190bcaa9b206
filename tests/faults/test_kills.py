"""kill -9 at any moment, many times in the life of one run: it ends as if nothing had happened."""

import random
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from conftest import NETWORK
from faults.harness import (
    FULL,
    Job,
    Recipe,
    assert_same,
    events,
    long_form,
    lost_steps,
    made_once,
    resume,
    saving,
    sleep_up_to,
    snapshot,
    step_reached,
    steps_saved,
    train,
    train_or_resume,
)

MAPPED = {"--data.jitter": 0, "--data.map": "standard,log,arcsinh", "--data.unknown": "nan", "--size": "16x12"}
# A U-Net, as the run is to last for all kills.
SLOWER = Recipe("slower", steps=48, every=4, flags={"--network": NETWORK})
LIFE = Recipe("life", steps=160, every=3, flags={"--checkpoint.keep": 2}) if FULL else SLOWER
# Seconds of a process, over which the moments are spread: short enough for the run to need many.
WALL = 1.0
LIVES = [(seed, 10) for seed in range(5)] if FULL else [(0, 5)]


@pytest.mark.parametrize(("seed", "kills"), LIVES)
def test_a_run_that_is_killed_all_its_life_ends_as_if_nothing_had_happened(undisturbed, tmp_path, faults, seed, kills):
    reference, run, chance = undisturbed(LIFE), tmp_path / "run", random.Random(seed)
    with (
        faults.tried("kill -9 at a random moment") as anywhere,
        faults.tried("kill -9 while a checkpoint is written") as in_a_save,
    ):
        for kill in range(kills):
            job = train_or_resume(LIFE, run)
            attempt = in_a_save if kill % 5 in (1, 3) else anywhere
            if attempt is in_a_save:
                wait_for_a_save(job, run, chance)
            else:
                job.outlives(chance.uniform(0, WALL))
            if not job.running:  # a fast machine came to the end of the run
                break
            job.kill()
            attempt.lost.append(lost_steps(run))
        saved = max(steps_saved(run))
        train_or_resume(LIFE, run).ends()
        if saved < LIFE.steps:  # a fast machine may have come to the end of the run before the last kill
            assert events(run, "resumed")[-1]["step"] == saved, "it went on from the newest checkpoint"
        assert_same(run, reference)
        assert averages(run) == averages(reference)
        assert max(anywhere.lost + in_a_save.lost) <= 2 * LIFE.every, "a kill costs two intervals at the most"


@pytest.mark.parametrize(
    "kind", ["hdf5 chunks", pytest.param("npy", marks=long_form), pytest.param("zarr 3", marks=long_form)]
)
def test_a_run_on_mapped_values_with_unknown_pixels_survives_kills_to_the_bit(
    undisturbed, shared, tmp_path, faults, kind
):
    """Floats of three channels, each with a map of its own, of which pixels are unknown that differ by image."""
    science = pytest.importorskip("scientific_files")

    def make(place: Path) -> None:
        place.mkdir()
        rng = np.random.default_rng(0)
        values = rng.normal(0, 1, (40, 12, 16, 3)) * [1, 10, 1000] + [0, 50, -300]
        values[..., 1] = np.exp(values[..., 1] / 20)
        values[rng.random(values.shape) < 0.2] = np.nan
        science.WRITERS[kind](place, values.astype(np.float32))

    images = made_once(shared / f"images {kind}", make)
    source = {"hdf5 chunks": "a.h5:x", "npy": "a.npy", "zarr 3": "a.zarr"}[kind]
    recipe = Recipe(f"values {kind}", steps=18, every=3, flags=MAPPED, source=f"{images}/{source}")
    reference, run = undisturbed(recipe), tmp_path / "run"
    with faults.tried(f"kill -9 of a run on {kind} with value maps and unknown pixels") as attempt:
        for step in (5, 11) if FULL else (5,):
            job = train_or_resume(recipe, run)
            assert job.until(partial(reached, run, step)), job.said
            job.kill()
            attempt.lost.append(lost_steps(run))
        train_or_resume(recipe, run).ends()
        assert_same(run, reference)
    if FULL:
        with faults.tried(f"Ctrl-C in a run on {kind} with value maps and unknown pixels"):
            stopped = tmp_path / "stopped"
            job = train(recipe, stopped)
            assert job.until(partial(reached, stopped, 4)), job.said
            job.ask("SIGINT", stopped)
            job.ends(3)
            resume(stopped).ends()
            assert_same(stopped, reference)


def reached(run: Path, step: int) -> bool:
    """Whether the metrics have a step."""
    return step_reached(run) >= step


def averages(run: Path) -> dict[str, bytes]:
    """The snapshots of averages, and what should not be beside them."""
    found = snapshot(run / "averages")
    assert found
    return found


def wait_for_a_save(job: Job, run: Path, chance: random.Random) -> None:
    """Until a checkpoint is being written, and a little longer."""
    for _ in range(chance.randint(1, 3)):
        job.until(lambda: not saving(run))
        job.until(lambda: saving(run))
    sleep_up_to(chance, 0.02)
