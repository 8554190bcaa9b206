"""kill -9 at any moment, many times in the life of one run: it ends as if nothing had happened."""

import random
from pathlib import Path

import pytest

from conftest import NETWORK
from faults.harness import (
    FULL,
    Job,
    Recipe,
    assert_same,
    events,
    lost_steps,
    saving,
    sleep_up_to,
    snapshot,
    steps_saved,
    train_or_resume,
)

# A U-Net, as the run is to last for all kills.
SLOWER = Recipe("slower", steps=48, every=4, flags={"--network": NETWORK})
LIFE = Recipe("life", steps=160, every=3, flags={"--checkpoint.keep": 2}) if FULL else SLOWER
# Seconds of a process, over which the moments are spread: short enough for the run to need many.
WALL = 1.0
LIVES = [(seed, 10) for seed in range(5)] if FULL else [(0, 8)]


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
