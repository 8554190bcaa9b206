"""Training that goes wrong: it ends with finite numbers or with the right diagnosis, and saves nothing else."""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from faults.harness import (
    Job,
    Recipe,
    assert_same,
    assert_saved_is_finite,
    events,
    long_form,
    lost_steps,
    made_once,
    resume,
    step_reached,
    train,
    train_or_resume,
)
from unfog.reporting.records import read_metrics

# Disturbs the loss of the n-th pass.
DISTURB = """
import sys
import torch
from unfog.diffusion.objective import Objective

undisturbed, n = Objective.__call__, 0

def disturbed(self, network, x0, *rest):
    global n
    n += 1
    {before}
    loss = undisturbed(self, network, x0, *rest)
    {after}
    return loss

Objective.__call__ = disturbed
from unfog.cli.main import main
main(sys.argv[1:])
"""


def disturbing(before: str = "pass", after: str = "pass") -> str:
    return DISTURB.format(before=before, after=after)


SOLID = disturbing("x0 = torch.where(x0.std((2, 3), keepdim=True).amax(1, keepdim=True) < 1e-4, torch.nan, x0)")
"""An image of a single colour is not a number."""
BAD_WEIGHT = """
import sys
import torch
from unfog.training.gradient import GradientComputer

undisturbed, n = GradientComputer.compute, 0

def disturbed(self, *rest):
    global n
    n += 1
    if n == 50:
        next(self.state.model.parameters()).data.view(-1)[0] = torch.nan
    return undisturbed(self, *rest)

GradientComputer.compute = disturbed
from unfog.cli.main import main
main(sys.argv[1:])
"""
INFINITE = disturbing(after="if n > 100: loss = loss._replace(per_image=loss.per_image * torch.inf)")
EXPLODING = disturbing(after="if n > 100: loss = loss._replace(per_image=loss.per_image * 1.5 ** (n - 100))")
SPIKE = disturbing(after="if 100 < n < 112: loss = loss._replace(per_image=loss.per_image * 1e6)")

RECIPE = Recipe(
    "trouble",
    steps=90,
    every=5,
    flags={
        "--training.patience": 5,
        "--training.rollbacks": 3,
        "--checkpoint.keep": 3,
        "--microbatch": 4,
        "--preview.every": -1,
        "--evaluate.every": 30,
        "--optimizer.warmup": 5,
        "--size": 16,
    },
)


@pytest.fixture
def photos(shared) -> Path:
    """120 pictures, one of them of a single colour."""

    def make(place: Path) -> None:
        place.mkdir()
        for i in range(119):
            noise = np.random.default_rng(i).integers(0, 256, (4, 4, 3), dtype=np.uint8)
            Image.fromarray(noise).resize((16, 16)).save(place / f"{i:03d}.png")
        Image.new("RGB", (16, 16), (200, 30, 90)).save(place / "poison.png")

    return made_once(shared / "pictures", make)


@pytest.fixture
def trouble(photos, tmp_path) -> Callable[..., Job]:
    """Begins a run on the pictures, with flags and a driver."""
    return lambda script="", **flags: train(
        RECIPE._replace(source=str(photos), flags={**RECIPE.flags, **flags}), tmp_path / "run", script=script
    )


def test_a_poisoned_image_is_refused_and_named(trouble, tmp_path, faults):
    run = tmp_path / "run"
    with faults.tried("poisoned image") as attempt:
        said = trouble(SOLID).ends()
        refused = events(run, "step_refused")
        assert refused, "the image came by"
        assert all(event["images"] == ["poison.png"] for event in refused if "images" in event)
        assert all(len(event["levels"]) == 1 and event["layer"] for event in refused if "images" in event)
        assert "poison.png" in said
        assert step_reached(run) == RECIPE.steps
        assert not events(run, "rolled_back")
        assert_saved_is_finite(run)
        attempt.lost.append(0)


@long_form
def test_a_poisoned_weight_is_named_and_taken_back(trouble, tmp_path, faults):
    run = tmp_path / "run"
    with faults.tried("poisoned weight") as attempt:
        said = trouble(BAD_WEIGHT).ends()
        (back,) = events(run, "rolled_back")
        assert "not finite" in back["reason"]
        assert any(event.get("phase") == "weights" and event["layer"] for event in events(run, "step_refused"))
        assert "is not finite" in said
        assert_saved_is_finite(run)
        assert not [row for row in read_metrics(run / "metrics.jsonl") if row.get("loss", 0) > 2]
        attempt.lost.append(back["step"] - back["to"])


@long_form
@pytest.mark.parametrize(("name", "script"), [("loss infinite for good", INFINITE), ("loss that explodes", EXPLODING)])
def test_trouble_that_stays_ends_with_a_diagnosis_and_good_weights(trouble, tmp_path, faults, name, script):
    run = tmp_path / "run"
    with faults.tried(name) as attempt:
        said = trouble(script).ends(status=1)
        assert "--lr" in said
        assert "defect" not in said
        assert len(events(run, "rolled_back")) == 4
        assert events(run, "failed")
        assert_saved_is_finite(run)
        last = events(run, "rolled_back")[-1]
        attempt.lost.append(last["step"] - last["to"])
        resume(run, "--lr", "5e-4").ends()
        assert step_reached(run) == RECIPE.steps
        assert_saved_is_finite(run)


@long_form
def test_a_short_spike_is_ridden_out_or_taken_back(trouble, tmp_path, faults):
    run = tmp_path / "run"
    with faults.tried("loss that jumps for a moment") as attempt:
        trouble(SPIKE).ends()
        assert len(events(run, "rolled_back")) <= 1
        assert read_metrics(run / "metrics.jsonl")[-1]["held_out_loss"] < 1.5
        assert_saved_is_finite(run)
        attempt.lost.append(sum(event["step"] - event["to"] for event in events(run, "rolled_back")))


@long_form
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("times", "clip"), [(10, 1), (100, 1), (100, 0), (1000, 1)])
def test_a_learning_rate_that_is_far_too_high(trouble, tmp_path, faults, precision, times, clip):
    run = tmp_path / "run"
    with faults.tried(f"learning rate {times} times too high") as attempt:
        job = trouble(**{"--lr": 3e-3 * times, "--precision": precision, "--training.clip": clip})
        job.process.wait(200)
        assert job.process.returncode in (0, 1), job.said
        assert "defect" not in job.said
        assert_saved_is_finite(run)
        if job.process.returncode == 1:
            assert "--lr" in job.said
            if times == 1000:  # the weights may be beyond help; that was said
                return
            resume(run, "--lr", "1e-3", "--precision", "fp32").ends()  # as it advises
        held_out = read_metrics(run / "metrics.jsonl")[-1]["held_out_loss"]
        assert held_out < 3, "it ended with weights that know something, or said so"
        attempt.lost.append(sum(event["step"] - event["to"] for event in events(run, "rolled_back")))


@long_form
def test_killed_among_refused_steps_and_roll_backs(photos, shared, tmp_path, faults):
    """With no patience at all, each time that the bad image comes is a roll-back."""
    flags = {**RECIPE.flags, "--training.patience": 1, "--training.rollbacks": 20}
    recipe = RECIPE._replace(source=str(photos), flags=flags)
    reference = made_once(shared / "rolled-back", lambda place: train(recipe, place, script=SOLID).ends())
    assert len(events(reference, "rolled_back")) > 2
    run, chance = tmp_path / "run", random.Random(5)
    with faults.tried("kill -9 among refused steps and roll-backs") as attempt:
        for _ in range(8):
            job = train_or_resume(recipe, run, script=SOLID)
            if job.outlives(chance.uniform(1, 4)):
                job.kill()
                attempt.lost.append(lost_steps(run))
        train_or_resume(recipe, run, script=SOLID).ends()
        assert_same(run, reference)
