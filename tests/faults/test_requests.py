"""Asking a run to stop or to save, by every way, in every phase; and two processes that want the same run."""

import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from conftest import NETWORK
from faults.harness import (
    FULL,
    GRACE,
    USUAL,
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
    steps_saved,
    train,
    train_or_resume,
)
from unfog.reporting.records import read_metrics

WAYS = ["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP", "STOP"]

# Says when the preview, the evaluation, the first training step or the decoding begins.
ANNOUNCE = """
import sys
import unfog.data.prepare as prepare
from unfog.diffusion.objective import Objective
from unfog.runs.session import Session

def announced(owner, name, phase):
    function = getattr(owner, name)
    def call(*words, **named):
        print(f"phase {phase}", file=sys.stderr, flush=True)
        return function(*words, **named)
    setattr(owner, name, call)

announced(Session, "preview", "preview")
announced(Session, "evaluate", "evaluation")
announced(Objective, "__call__", "step")
announced(prepare, "decode_all", "decoding")
from unfog.cli.main import main
main(sys.argv[1:])
"""
LEARNING = {"--preview.every": -1, "--evaluate.every": -1}
SHORT = Recipe("short", steps=120, every=6, flags=LEARNING)
# Each takes some seconds, and comes three times. The small transformer would be through before it is asked to stop.
SLOW = {**LEARNING, "--network": NETWORK}
SLOW_PREVIEW = {**SLOW, "--preview.every": 5, "--sampler.steps": 400}
SLOW_EVALUATION = {**SLOW, "--evaluate.every": 5, "--evaluate.levels": 60, "--evaluate.images": 100}
SMALLER = "unet:channels=8,attention=0,mid_attention=0,norm_groups=4,head_channels=8"
PHASES = {
    "first step": SHORT,
    "training": SHORT,
    "saving": Recipe("saves", steps=60, every=2, flags=LEARNING),
    "preview": Recipe("previews", steps=10, every=5, flags=SLOW_PREVIEW),
    "evaluation": Recipe("evaluations", steps=10, every=5, flags=SLOW_EVALUATION),
}


def stops_in_time(job: Job, way: str, run: Path) -> None:
    """Ask, and see it end soon, saved, with a word on who asked."""
    job.ask(way, run)
    said = job.ends(status=3, seconds=GRACE)
    assert {"SIGINT": "Ctrl-C"}.get(way, way) in said
    assert events(run, "stopped")
    assert not (run / "STOP").exists(), "a request is taken away when it is obeyed"


def in_phase(job: Job, phase: str, run: Path, chance: random.Random) -> bool:
    """Wait for a random moment of that phase; False if there is none any more."""
    if phase == "saving":
        return job.until(lambda: saving(run))
    word = f"phase {'step' if phase in ('first step', 'training') else phase}\n"
    if not job.until(lambda: word in job.said):
        return False
    return phase == "first step" or job.outlives(chance.uniform(0, 0.5 if phase == "training" else 2))


@long_form
@pytest.mark.parametrize("phase", PHASES)
def test_stops_by_each_way_in_one_life(undisturbed, tmp_path, faults, phase):
    recipe, run, chance = PHASES[phase], tmp_path / "run", random.Random(phase)
    with faults.tried(f"asked to stop: {phase}") as attempt:
        for way in WAYS:
            job = train_or_resume(recipe, run, script=ANNOUNCE)
            if not in_phase(job, phase, run, chance):
                break
            stops_in_time(job, way, run)
            attempt.lost.append(lost_steps(run))
        train_or_resume(recipe, run).ends()
        assert attempt.lost, "it ended before it could be asked"
        assert set(attempt.lost) == {0}
        assert_same(run, undisturbed(recipe))


@pytest.mark.skipif(FULL, reason="the short form of the above")
def test_stops_in_a_preview(tmp_path, faults):
    run = tmp_path / "run"
    with faults.tried("asked to stop: preview") as attempt:
        job = train(PHASES["preview"], run, script=ANNOUNCE)
        assert in_phase(job, "preview", run, random.Random(0))
        stops_in_time(job, "STOP", run)
        attempt.lost.append(lost_steps(run))


@long_form
@pytest.mark.parametrize("way", WAYS[:4])
def test_asked_while_it_starts(tmp_path, faults, way):
    """Before Python listens, the system ends it; after that it ends by itself. Either way nothing is in the way."""
    run, chance = tmp_path / "run", random.Random(way)
    begins = {"SIGTERM": -15, "SIGINT": 130, "SIGUSR1": -10, "SIGHUP": -1}[way]
    with faults.tried("asked to stop: starting") as attempt:
        for _ in range(4):
            shutil.rmtree(run, ignore_errors=True)
            job = train(SHORT, run)
            job.outlives(chance.uniform(0.05, 2))
            job.ask(way, run)
            job.process.wait(GRACE)
            assert job.process.returncode in (3, 130, begins, -2), job.said
            assert "defect" not in job.said
            attempt.lost.append(0)
        train_or_resume(SHORT._replace(steps=6), run).ends()


@pytest.fixture(scope="session")
def photos(shared) -> Path:
    """Thousands of pictures that take seconds to decode: links to a few large ones, so they are soon made."""

    def make(place: Path) -> None:
        place.mkdir()
        pixels = np.linspace(0, 255, 900 * 900 * 3).reshape(900, 900, 3).astype(np.uint8)
        for kind in range(4):
            Image.fromarray(np.roll(pixels, 200 * kind, axis=1)).save(place / f"{kind}.png", compress_level=1)
        for i in range(4, 3000):
            (place / f"{i}.png").hardlink_to(place / f"{i % 4}.png")

    return made_once(shared / "photos", make)


# All of them first: so short a run would decode the few that it needs while it trains.
DECODING = {**LEARNING, "--size": 16, "--data.cache": "memory"}


@long_form
@pytest.mark.parametrize("way", WAYS)
def test_asked_while_it_decodes(photos, tmp_path, faults, way):
    recipe = Recipe("decoding", steps=6, every=6, flags=DECODING, source=str(photos))
    run, chance = tmp_path / "run", random.Random(way)
    with faults.tried("asked to stop: decoding") as attempt:
        job = train(recipe, run, script=ANNOUNCE)
        assert in_phase(job, "decoding", run, chance), job.said
        job.ask(way, run)
        assert "saving" not in job.ends(status=130, seconds=GRACE)
        assert not run.exists(), "nothing was saved, so nothing is left"
        attempt.lost.append(0)


@long_form
def test_asked_while_it_decodes_for_a_resume(photos, undisturbed, tmp_path, faults):
    recipe = Recipe("decoded", steps=6, every=6, flags=DECODING, source=str(photos))
    run, chance = tmp_path / "run", random.Random(1)
    with faults.tried("asked to stop: decoding") as attempt:
        shutil.copytree(undisturbed(recipe), run)
        shutil.rmtree(run / "checkpoints/00000006")
        kept = snapshot(run / "checkpoints")
        for way in ("SIGTERM", "STOP"):
            job = resume(run, script=ANNOUNCE)
            assert in_phase(job, "decoding", run, chance), job.said
            job.ask(way, run)
            job.ends(status=3, seconds=GRACE)
            assert snapshot(run / "checkpoints") == kept
            attempt.lost.append(0)
        resume(run).ends()
        assert_same(run, undisturbed(recipe))


@long_form
@pytest.mark.timeout(900)
@pytest.mark.skipif(not shutil.which("g++") and not shutil.which("clang++"), reason="needs a C++ compiler")
def test_asked_while_it_compiles(undisturbed, tmp_path, faults, monkeypatch):
    flags = {**LEARNING, "--network": SMALLER, "--microbatch": 8, "--preview.images": 8, "--training.compile": True}
    recipe, run, chance = Recipe("compiled", steps=12, every=6, flags=flags), tmp_path / "run", random.Random(2)
    reference = undisturbed(recipe)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))  # nothing compiled yet
    with faults.tried("asked to stop: compiling") as attempt:
        for way in ("SIGTERM", "SIGINT", "STOP"):
            job = train_or_resume(recipe, run, script=ANNOUNCE)
            assert in_phase(job, "first step", run, chance)
            assert job.outlives(chance.uniform(0.5, 4))
            stops_in_time(job, way, run)
            attempt.lost.append(lost_steps(run))
        train_or_resume(recipe, run).ends()
        assert_same(run, reference)


def test_a_save_is_made_on_request_and_the_run_goes_on(undisturbed, tmp_path, faults):
    recipe = SHORT._replace(name="asked", every=-1)
    run = tmp_path / "run"
    with faults.tried("asked to save: training") as attempt:
        job = train(recipe, run, script=ANNOUNCE)
        assert in_phase(job, "first step", run, random.Random(3))
        (run / "SAVE").touch()
        assert job.until(lambda: len(steps_saved(run)) >= 2)
        assert job.until(lambda: not (run / "SAVE").exists())
        if FULL:
            job.ends()
            assert_same(run, undisturbed(recipe))
        attempt.lost.append(0)


@long_form
@pytest.mark.parametrize("insist", [0.3, 3])
def test_a_second_signal_ends_it_at_once_and_loses_nothing_that_was_saved(undisturbed, tmp_path, faults, insist):
    recipe, run = PHASES["preview"], tmp_path / "run"
    with faults.tried("asked twice") as attempt:
        job = train(recipe, run, script=ANNOUNCE)
        assert in_phase(job, "preview", run, random.Random(4))
        job.ask("SIGINT", run)
        if job.outlives(insist):
            job.ask("SIGINT", run)
        job.process.wait(GRACE)
        assert job.process.returncode in (3, 130), job.said
        attempt.lost.append(0)
        train_or_resume(recipe, run).ends()
        assert_same(run, undisturbed(recipe))


def test_of_two_that_resume_at_once_one_wins(undisturbed, tmp_path, faults):
    run = tmp_path / "run"
    shutil.copytree(undisturbed(USUAL), run)
    with faults.tried("two processes on one run") as attempt:
        for turn in range(20 if FULL else 1):
            chance = random.Random(turn)
            jobs = []
            for _ in range(2):
                jobs.append(resume(run, "--steps", 48 + 20 * (turn + 1), "--preview.every", "-1"))
                sleep_up_to(chance, 0.1)
            for job in jobs:
                job.process.wait(60)
            assert sorted(job.process.returncode for job in jobs) == [0, 2], [job.said for job in jobs]
            loser = next(job for job in jobs if job.process.returncode == 2)
            assert "another process" in loser.said
            attempt.lost.append(0)
        steps = [row["step"] for row in read_metrics(run / "metrics.jsonl")]
        assert steps == sorted(set(steps)), "each step is logged once"
