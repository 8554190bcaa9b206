"""Metrics of drawn pictures during training, the best checkpoint by one of them, and the warning of overfitting."""

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import unfog
from conftest import NETWORK, TRANSFORMER, without_clock
from test_training import positions
from unfog.config.resume_rules import settings_digests
from unfog.config.schema import Config
from unfog.data.dataset import evenly_spaced
from unfog.diffusion.objective import Objective
from unfog.diffusion.sampler import Sampler
from unfog.errors import RequestError
from unfog.evaluation.features import open_features
from unfog.evaluation.metrics import compare_features
from unfog.inference.run import Run
from unfog.pipeline.generate import GenerationSettings, generate_images, trial_steps
from unfog.pipeline.load_data import load_images
from unfog.process.signals import StopSignals
from unfog.reporting.records import read_events, read_metrics
from unfog.runs import previews
from unfog.runs.evaluation_hook import (  # costs are given, as a clock would not repeat them
    _TARGET_TIMES,
    MIN_SAMPLES,
    _Costs,
    _fit_to_budget,
    _metrics_due,
)
from unfog.training.checkpoints import format as checkpoint
from unfog.training.length import LengthPlan
from unfog.training.settings import Evaluate, Training
from unfog.values.condition_format import given_labels

pytestmark = pytest.mark.slow

METRICS = {"images": 8, "levels": 2, "every": 4, "metrics": ["kid", "sliced"], "samples": 20, "reference": 60}
SETTINGS = {
    "network": TRANSFORMER,
    "device": "cpu",
    "precision": "fp32",
    "batch": 8,
    "lr": 3e-3,
    "log": {"every": 4},
    "preview": {"images": 2, "every": -1},
    "checkpoint": {"every": 4, "keep": 20},
    "sampler": {"steps": 2},
    "data": {"held_out": 0.2},
}


def images(count: int = 200) -> np.ndarray:
    """Squares of one shade on another, 16 x 16."""
    rng = np.random.default_rng(1)
    pixels = np.full((count, 16, 16), 30, np.uint8)
    for picture in pixels:
        y, x = rng.integers(0, 9, 2)
        picture[y : y + 7, x : x + 7] = rng.integers(120, 255)
    return pixels


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("measured") / "run"
    evaluate = {**METRICS, "metrics_every": 8, "best": "kid"}
    unfog.train(images(), out=out, steps=24, evaluate=evaluate, **SETTINGS)
    return out


def test_values_are_logged_when_they_are_due(measured):
    rows = read_metrics(measured / "metrics.jsonl")
    assert [row["step"] for row in rows if "kid" in row] == [8, 16, 24]
    assert [row["step"] for row in rows if "held_out_loss" in row] == [0, 4, 8, 12, 16, 20, 24]
    drawn = [row for row in rows if "kid" in row]
    assert all(row["drawn"] == 20 and row["kid_error"] > 0 and row["sliced"] > 0 for row in drawn)
    assert [event["step"] for event in read_events(measured / "events.jsonl") if event["kind"] == "measured"] == [
        0,
        8,
        16,
        24,
    ]
    embedded = re.search(r'id="embedded">(.*)</script>', (measured / "report.html").read_text())[1]
    assert {"kid", "kid_error", "sliced"} <= set(json.loads(embedded)["runs"][0]["columns"])


def test_values_do_not_depend_on_interruptions(measured, tmp_path):
    folder = shutil.copytree(measured, tmp_path / "run")
    for path in (folder / "checkpoints").iterdir():
        if int(path.name) > 12:
            shutil.rmtree(path)
    unfog.resume(folder)
    assert without_clock(folder / "metrics.jsonl") == without_clock(measured / "metrics.jsonl")
    for name in checkpoint.FILES:
        mine, theirs = (f / "checkpoints" / "00000024" / name for f in (folder, measured))
        assert mine.read_bytes() == theirs.read_bytes(), name


def test_the_best_is_kept_by_what_was_chosen(measured):
    saved, _ = checkpoint.list_checkpoints(measured / "checkpoints")
    kid = {row["step"]: row["kid"] for row in read_metrics(measured / "metrics.jsonl") if "kid" in row}
    assert {one.step: one.value for one in saved if one.value is not None} == kid
    assert {one.metric for one in saved} == {"kid"}
    best = min(kid, key=lambda step: kid[step])
    assert checkpoint.best_of(saved).step == best
    assert Run(measured, best=True).checkpoint.step == best
    by_recall = [one._replace(chosen_by="recall:x") for one in saved]
    assert checkpoint.best_of(by_recall).step == max(kid, key=lambda step: kid[step])


def test_checkpoints_of_before_are_compared_by_their_held_out_loss(measured, tmp_path):
    folder = shutil.copytree(measured / "checkpoints", tmp_path / "checkpoints")
    for path in folder.glob("*/manifest.json"):
        manifest = json.loads(path.read_text())
        del manifest["chosen_by"], manifest["value"], manifest["sha256"]
        path.write_text(json.dumps(manifest | {"sha256": checkpoint.manifest_digest(manifest)}))
    saved, broken = checkpoint.list_checkpoints(folder)
    assert not broken
    losses = {one.step: one.held_out_loss for one in saved if one.held_out_loss is not None}
    assert checkpoint.best_of(saved).step == min(losses, key=lambda step: losses[step])


def test_another_choice_begins_anew_and_the_held_out_loss_is_measured_as_before():
    plain = Config()
    by_kid = replace(plain, evaluate=Evaluate(metrics=("kid",), best="kid"))
    more = replace(plain, evaluate=Evaluate(metrics=("kid",), best="kid", samples=50))
    keys = [settings_digests(config) for config in (plain, by_kid, more)]
    assert len({key["best"] for key in keys}) == 3
    for purpose in ("measure", "training", "repeat"):
        assert len({key[purpose] for key in keys}) == 1


@given(
    draw=st.floats(1e-4, 10),
    features=st.floats(1e-5, 1),
    compute=st.floats(0, 100),
    step=st.floats(1e-3, 10),
    share=st.floats(0.001, 0.5),
    steps=st.integers(1, 100_000),
    every=st.integers(1, 1000),
    images=st.integers(10, 100_000),
)
def test_the_share_is_never_exceeded(draw, features, compute, step, share, steps, every, images):
    evaluate = Evaluate(metrics=("kid",), share=share, every=min(every, steps))
    config = Config(training=Training(images=64 * steps), evaluate=evaluate)
    allowed = share * step * steps

    def once(samples: int, reference: int) -> float:
        return samples * (draw + features) + compute * (samples + reference) / 10_000

    chosen, each = _fit_to_budget(config, images, _Costs(draw, features, 192), allowed, once)
    settled = replace(config, evaluate=chosen)
    evaluations = [s for s in range(1, steps + 1) if s % chosen.every == 0 or s == steps]
    drawn = [s for s in evaluations if _metrics_due(settled, s, LengthPlan(0, steps, 1, 0.0))]
    assert len(drawn) * each + bool(drawn) * chosen.reference * features <= allowed * (1 + 1e-9)
    assert each == once(chosen.samples, chosen.reference)
    if drawn:
        assert drawn[-1] == steps
        assert chosen.samples >= MIN_SAMPLES
    else:
        assert once(MIN_SAMPLES, chosen.reference) + chosen.reference * features > allowed * (1 - 1e-9)


def test_metrics_follow_the_stretched_evaluations():
    config = Config(evaluate=Evaluate(metrics=("kid",), every=10, metrics_every=30))
    found = {}
    for stretch in (1, 2, 4):
        plan = LengthPlan(0, 370, stretch, 0.0)
        found[stretch] = [s for s in range(10 * stretch, 361, 10 * stretch) if _metrics_due(config, s, plan)]
    assert found == {1: [*range(30, 361, 30)], 2: [*range(60, 361, 60)], 4: [120, 240, 360]}
    assert _metrics_due(config, 370, LengthPlan(5, 370, 4, 0)), "the last step"


def test_the_adaptive_sampler_is_timed_as_it_draws():
    assert trial_steps(Sampler("adaptive", steps=20)) == 20
    assert trial_steps(Sampler("dpmpp", steps=20)) == 2
    assert trial_steps(Sampler("dpmpp", steps=1)) == 1


def test_what_is_affordable_is_used():
    """Pictures for a tenth of a second each in an hour: 5% are 180 s, five times 360 pictures less the reference."""
    config = Config(training=Training(images=64 * 3600), evaluate=Evaluate(metrics=("kid",), every=100))
    chosen, each = _fit_to_budget(config, 10**6, _Costs(0.1, 1e-3, 192), 180.0, lambda n, reference: n * 0.101)
    assert chosen.reference == 10_000
    assert 0.9 * 170 < _TARGET_TIMES * each <= 170
    assert chosen.metrics_every in (700, 800)


def test_what_is_not_affordable_is_left_out_and_said(tmp_path, capsys):
    evaluate = {**METRICS, "samples": 0, "share": 0.0001, "best": "kid"}
    run = unfog.train(images(), out=tmp_path / "run", steps=4, evaluate=evaluate, **SETTINGS)
    said = capsys.readouterr().err
    assert "kid and sliced will not be measured" in said
    assert "the best checkpoint is chosen by the held-out loss" in said
    assert run.config.evaluate.best == "held_out_loss"
    assert Run(run.path, best=True).checkpoint.step in (0, 4)
    assert "unfog evaluate RUN" in said
    assert not any("kid" in row for row in read_metrics(tmp_path / "run" / "metrics.jsonl"))


def test_settled_values_are_stored_and_printed(tmp_path, capsys):
    evaluate = {**METRICS, "samples": 0, "reference": 0, "share": 0.5, "metrics": ["kid"]}
    slower = SETTINGS | {"network": NETWORK}  # else the measurement takes as long as the training
    run = unfog.train(images(), out=tmp_path / "run", steps=60, evaluate=evaluate, **slower)
    settled = run.config.evaluate
    assert settled.samples >= MIN_SAMPLES
    assert settled.reference >= MIN_SAMPLES
    assert settled.metrics_every % settled.every == 0
    assert f"{settled.samples} samples against {settled.reference} training images" in capsys.readouterr().err
    rows = [row["step"] for row in read_metrics(run.path / "metrics.jsonl") if "kid" in row]
    assert rows
    assert rows[-1] == 60


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"metrics": ["fud"]}, "names 'fud'"),
        ({"best": "kid"}, "best = kid is not measured"),
        ({"metrics": ["kid"], "best": "recall"}, "best = recall is not measured"),
        ({"share": 0.0}, "share = 0.0"),
        ({"samples": 5}, "samples = 5"),
        ({"metrics": ["kid"], "every": -1}, "evaluate.every = -1 turns these off"),
        ({"metrics": ["kid"], "features": "inception"}, "inception needs"),
        ({"metrics": ["kid"], "features": __file__ + ".pt"}, "cannot be read"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_training(settings, said, tmp_path):
    with pytest.raises(RequestError, match=said):
        unfog.train(images(), out=tmp_path / "run", steps=2, evaluate=settings, **SETTINGS)
    assert not (tmp_path / "run").exists()


def test_features_that_are_not_there_are_missed_before_images_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr("unfog.runs.train.load_images", lambda *given: pytest.fail("images were read"))
    with pytest.raises(RequestError, match="inception needs"):
        unfog.train(
            images(), out=tmp_path / "run", steps=2, evaluate={"metrics": ["kid"], "features": "inception"}, **SETTINGS
        )


def test_the_best_is_not_chosen_by_what_will_not_be_measured(tmp_path):
    evaluate = {**METRICS, "metrics": ["fid"], "features": "pixels", "best": "fid", "metrics_every": 4}
    with pytest.raises(RequestError, match=r"20 images .*192 features.*--evaluate\.best kid"):
        unfog.train(images(), out=tmp_path / "run", steps=4, evaluate=evaluate, **SETTINGS)


def test_the_doctor_finds_that_the_best_cannot_be_chosen_by_fid(tmp_path):
    evaluate = {**METRICS, "metrics": ["fid"], "features": "pixels", "best": "fid", "metrics_every": 4}
    findings = unfog.doctor(images(), out=tmp_path / "page", steps=4, evaluate=evaluate, **SETTINGS)
    (fatal,) = [one for one in findings if one.severity == "fatal"]
    assert "evaluate.best = fid" in fatal.evidence
    assert "--evaluate.best kid" in fatal.evidence


@pytest.mark.exhaustive
def test_overfitting_is_said_once_with_the_best_step(tmp_path, capsys):
    """Noise cannot be learned but by heart."""
    noise = np.random.default_rng(0).integers(0, 256, (104, 8, 8), dtype=np.uint8)
    network = "unet:channels=32,attention=0,mid_attention=0,norm_groups=4,head_channels=8"
    settings = {
        **SETTINGS,
        "network": network,
        "data": {"held_out": 0.5},
        "log": {"every": 100},
        "batch": 16,
        "lr": 6e-3,
    }
    settings |= {"ema": "power:width=0.05", "checkpoint": {"every": -1}}
    evaluate = {"images": 32, "levels": 4, "every": 50}
    run = unfog.train(noise, out=tmp_path / "run", steps=500, evaluate=evaluate, **settings)
    said = [event for event in read_events(run.path / "events.jsonl") if event["kind"] == "overfitting"]
    assert len(said) == 1
    losses = {
        row["step"]: row["held_out_loss"]
        for row in read_metrics(run.path / "metrics.jsonl")
        if math.isfinite(row.get("held_out_loss", math.nan)) and row["step"] <= said[0]["step"]
    }
    best = min(losses, key=lambda step: losses[step])
    assert said[0]["lowest_at"] == best
    err = capsys.readouterr().err
    assert err.count("overfitting: ") == 1
    assert f"its lowest, at step {best}" in err
    assert "sample" in err
    again = unfog.resume(run.path, steps=550)
    assert len([event for event in read_events(again.path / "events.jsonl") if event["kind"] == "overfitting"]) == 1


def test_what_is_asked_for_on_a_resume_is_tried_out_before_it_goes_on(measured, tmp_path):
    folder = shutil.copytree(measured, tmp_path / "run")
    before = (folder / "config.toml").read_text()
    few = {**METRICS, "metrics": ["fid"], "best": "fid", "metrics_every": 8}
    with pytest.raises(RequestError, match=r"evaluate\.best = fid: fid is refused"):
        unfog.resume(folder, steps=28, evaluate=few)
    assert (folder / "config.toml").read_text() == before
    assert len(list((folder / "checkpoints").iterdir())) == len(list((measured / "checkpoints").iterdir()))


def test_snapshots_of_what_was_rolled_back_are_gone(tmp_path, monkeypatch):
    step_of, undisturbed = positions(), Objective.__call__

    def disturbed(self, network, x0, *rest):
        loss = undisturbed(self, network, x0, *rest)
        wrong = step_of.get(torch.initial_seed()) in (10, 11)
        return loss._replace(per_image=loss.per_image * math.nan) if wrong else loss

    monkeypatch.setattr(Objective, "__call__", disturbed)
    settings = SETTINGS | {"training": {"patience": 2}, "averages": {"every": 2}, "data": {"held_out": 0}}
    out = unfog.train(images(120), out=tmp_path / "run", steps=16, **settings).path
    (back,) = [event for event in read_events(out / "events.jsonl") if event["kind"] == "rolled_back"]
    assert (back["step"], back["to"]) == (12, 8)
    kept = sorted(int(path.stem) for path in (out / "averages").iterdir())
    assert kept == [2, 4, 6, 8, 12, 14, 16]


def test_pictures_are_drawn_in_the_proportions_of_the_classes(tmp_path, monkeypatch):
    drawn = []

    def spy(network, config, drawing, *rest, **more):
        drawn.append(drawing)
        return generate_images(network, config, drawing, *rest, **more)

    monkeypatch.setattr(previews, "generate_images", spy)
    labels = (np.arange(200) % 4 == 0).astype(np.int64)
    evaluate = {**METRICS, "samples": 40, "metrics_every": 4}
    unfog.train(images(), labels=labels, out=tmp_path / "run", steps=4, evaluate=evaluate, **SETTINGS)
    tried, measured = (one for one in drawn if one.count >= 10)  # the rest are previews
    labels = given_labels(measured.given)
    assert (tried.count, measured.count, len(labels)) == (10, 40, 40)
    assert 8 <= sum(labels) <= 12


def test_values_are_those_of_the_average_drawn_by_hand(measured):
    run = Run(measured, step=24)
    rows = read_metrics(measured / "metrics.jsonl")
    pictures = generate_images(run.network, run.config, GenerationSettings.default(run.config, 20, 8)).transpose(
        0, 3, 1, 2
    )
    train = load_images(run.config, StopSignals())[0].train
    texture = open_features("texture")
    real = texture(torch.from_numpy(train.pixels[evenly_spaced(len(train), 60)]))
    fake = texture(torch.from_numpy(np.ascontiguousarray(pictures)))
    assert rows[-1]["kid"] == pytest.approx(compare_features(["kid"], real, fake)[0].value, rel=1e-4)
