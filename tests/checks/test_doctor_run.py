"""The examination of a run: what is planted in a real one is found, and nothing if nothing is."""

import json
import re
import shutil
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
import torch
from PIL import Image

import unfog
from unfog.checks.run.run_checks import check_run
from unfog.errors import RequestError
from unfog.process.identity import uptime
from unfog.process.run_folder import RunFolder
from unfog.reporting.findings import write_findings
from unfog.training.checkpoints import format as checkpoint
from unfog.training.checkpoints import snapshot
from unfog.training.checkpoints.load import read_state, read_tensors

pytestmark = pytest.mark.slow

STEPS, IMAGES = 120, 140
SMALL = "unet:channels=16,attention=0,mid_attention=0,norm_groups=4"


def picture(i: int) -> Image.Image:
    """A coloured disc on a coloured ground: no two alike."""
    random = np.random.default_rng(i)
    y, x = np.mgrid[:16, :16]
    inside = np.hypot(y - random.uniform(5, 11), x - random.uniform(5, 11)) < random.uniform(2, 6)
    pixels = np.where(inside[..., None], random.integers(0, 256, 3), random.integers(0, 256, 3))
    return Image.fromarray((pixels + random.normal(0, 4, pixels.shape)).clip(0, 255).astype(np.uint8))


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    for i in range(IMAGES):
        picture(i).save(folder / f"{i:03d}.png")
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _one_cache(cache, monkeypatch):
    monkeypatch.setenv("UNFOG_CACHE", str(cache))


@pytest.fixture(scope="module")
def trained(photos, tmp_path_factory):
    settings = {"network": SMALL, "device": "cpu", "precision": "fp32", "batch": 16, "steps": STEPS, "lr": 6e-3}
    rest = {
        "log": {"every": 5},
        "preview": {"every": -1, "images": 1},
        "sampler": {"steps": 8},
        "data": {"held_out": 0.2},
    }
    rest |= {"evaluate": {"every": 20, "levels": 8}, "checkpoint": {"every": 40}}
    return unfog.train(photos, out=tmp_path_factory.mktemp("run") / "run", **settings, **rest).path


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


def examined(run, **more):
    return {finding.code: finding for finding in check_run(RunFolder(run), "cpu", **{"samples": 32, **more})}


def rewrite_average(run, change):
    """Put other averaged weights into the newest checkpoint, which is whole again afterwards."""
    saved, _ = checkpoint.newest(run / "checkpoints")
    kinds = {kind: read_tensors(saved.folder / f"{kind}.safetensors", saved.folder) for kind in ("model", "ema")}
    kinds["optimizer"] = read_tensors(saved.folder / "optimizer.safetensors", saved.folder)
    tensors = {kind: {name: t.clone() for name, t in named.items()} for kind, named in kinds.items()}
    change(tensors["ema"], tensors["model"])
    state, config = read_state(saved.folder), (saved.folder / checkpoint.CONFIG).read_text()
    parts = (saved.step, tensors, state, saved.anchor, False, config, saved.made_on, 0.0)
    snapshot.write_checkpoint(snapshot.Snapshot(*parts), run / "checkpoints")


def rewrite_beat(run, age, **fields):
    beat = json.loads((run / "heartbeat.json").read_bytes())
    time = (datetime.now(UTC) - timedelta(seconds=age)).isoformat(timespec="milliseconds")
    clock = {"time": time, "uptime": uptime() - age}
    (run / "heartbeat.json").write_text(json.dumps(beat | clock | fields))


def test_a_healthy_run_gets_no_warning_and_every_check_is_told(trained, tmp_path):
    before = sorted(path for path in trained.rglob("*"))
    found = examined(trained)
    assert {code for code, finding in found.items() if finding.severity in ("fatal", "warning")} == set()
    assert {"run.state", "run.checkpoints", "run.loss", "run.lr", "run.gradient", "run.unstable"} <= found.keys()
    assert {"run.ema_behind", "run.overfitting", "run.memorised", "run.tint", "run.contrast"} <= found.keys()
    assert {"run.saturated", "run.blank_samples", "run.data_wait", "run.overhead", "run.data"} <= found.keys()
    assert found["run.state"].facts["state"] == "finished"
    assert found["run.ema_behind"].severity == "fine"
    assert "run.skipped" not in found
    assert sorted(path for path in trained.rglob("*")) == before, "an examination changes nothing"
    page = write_findings(tmp_path / "doctor", "a run", list(found.values()))
    told = json.loads((page.parent / "findings.json").read_text())["findings"]
    assert {one["code"] for one in told} == found.keys()
    assert page.read_text().count("data:image/png;base64,") >= 2


def test_too_few_sampling_steps_are_told_without_samples(run):
    assert "settings.sampler" not in examined(run, samples=0)
    file = run / "config.toml"
    file.write_text(re.sub(r"^steps = 8$", "steps = 2", file.read_text("utf-8"), flags=re.M), "utf-8")
    assert examined(run, samples=0)["settings.sampler"].remedy == f"unfog sample {run} --steps 20"


def test_the_same_run_gets_the_same_findings(run):
    first, second = examined(run, samples=8), examined(run, samples=8)
    assert {code: dict(f.facts) for code, f in first.items()} == {code: dict(f.facts) for code, f in second.items()}


def test_a_tint_in_the_average_is_found_and_named(run):
    def redden(ema, model):
        ema["conv_out.bias"][0] -= 0.3  # the flow target is eps - x0

    rewrite_average(run, redden)
    tint = examined(run)["run.tint"]
    assert tint.severity == "warning"
    assert "in red" in tint.evidence
    assert tint.facts["casts"]["red"][0] > 8


def test_an_average_that_was_never_updated_is_behind(run):
    from unfog.pipeline.build import build_network

    fresh = build_network(RunFolder(run).read_config()).state_dict()
    rewrite_average(run, lambda ema, model: [ema[name].copy_(fresh[name]) for name in ema])
    behind = examined(run, samples=0)["run.ema_behind"]
    assert behind.severity == "warning"
    assert "--weights raw" in behind.remedy


def test_a_network_that_answers_nothing_has_not_learned(run):
    def deafen(ema, model):
        for weights in (ema, model):
            weights["conv_out.weight"].zero_()
            weights["conv_out.bias"].zero_()

    rewrite_average(run, deafen)
    found = examined(run)
    assert found["run.not_learning"].severity == "fatal"
    assert found["run.not_learning"].facts["of_answering_0"] == pytest.approx(1, abs=0.05)
    assert found["run.blank_samples"].severity == "hint", "nothing can be expected of it yet"


def test_copies_of_few_training_images_are_found(run, photos, tmp_path, monkeypatch):
    """The drawn pictures are training images with a little noise on them."""
    from unfog.checks.run import run_checks as examination

    def copies(network, config, drawing, *rest):
        chosen = np.random.default_rng(0).choice(IMAGES, drawing.count)
        pixels = np.stack([np.asarray(picture(int(i))) for i in chosen]).astype(float)
        return (pixels + np.random.default_rng(1).normal(0, 6, pixels.shape)).clip(0, 255).astype(np.uint8)

    def others(network, config, drawing, *rest):
        return np.stack([np.asarray(picture(1000 + i)) for i in range(drawing.count)])

    monkeypatch.setattr(examination, "generate_images", copies)
    found = examined(run)["run.memorised"]
    assert found.severity == "warning"
    assert found.facts["copies"] > 16
    monkeypatch.setattr(examination, "generate_images", others)
    assert examined(run)["run.memorised"].severity == "fine"


def test_a_killed_run_says_what_is_lost_and_how_to_go_on(run):
    lines = (run / "events.jsonl").read_text().splitlines(keepends=True)
    (run / "events.jsonl").write_text("".join(lines[:-1]) + '{"step": 1')
    rewrite_beat(run, 7200, doing="training", next=5.0, started=1)  # by a process that is gone
    shutil.rmtree(run / "checkpoints" / f"{STEPS:08d}")
    state = examined(run, samples=0)["run.state"]
    newest = max(int(path.name) for path in (run / "checkpoints").iterdir())
    assert state.severity == "warning"
    assert state.facts["state"] == "killed"
    assert state.facts["lost_steps"] == STEPS - newest > 0
    assert state.facts["heartbeat_age"] == pytest.approx(7200, abs=60)
    assert f"unfog resume {run}" in state.remedy


def test_a_run_at_work_is_running(run):
    rewrite_beat(run, 1, doing="preview", next=5.0)
    state = examined(run, samples=0)["run.state"]
    assert (state.severity, state.facts["state"]) == ("fine", "running")
    assert "preview" in state.evidence


def test_images_that_moved_away_are_said_to_be_missed(run, photos, tmp_path):
    away = tmp_path / "away"
    shutil.move(photos, away)
    try:
        found = examined(run)
    finally:
        shutil.move(away, photos)
    assert "images" in found["run.skipped"].evidence
    assert not {"run.memorised", "run.tint", "run.overfitting"} & found.keys()
    assert {"run.state", "run.loss", "run.data_wait"} <= found.keys()


def test_other_images_than_it_was_trained_on_are_not_compared(run, photos):
    other = photos / "zzz.png"
    picture(999).save(other)
    try:
        found = examined(run, samples=8)
    finally:
        other.unlink()
    assert "has changed since training" in found["run.skipped"].evidence
    assert "run.memorised" not in found


def test_a_damaged_checkpoint_is_told_and_the_one_before_is_examined(run):
    newest = run / "checkpoints" / f"{STEPS:08d}"
    data = bytearray((newest / "ema.safetensors").read_bytes())
    data[-1] ^= 1
    (newest / "ema.safetensors").write_bytes(data)
    found = examined(run, samples=0)
    assert "run.ema_behind" in found
    assert found["run.ema_behind"].facts["updates"] < STEPS
    told = found["run.checkpoints"]
    assert told.severity == "warning"
    assert "sha256 differs" in told.evidence
    assert told.facts["broken"] == [newest.name]
    assert STEPS not in told.facts["steps"]
    assert told.remedy.endswith(f"continues from step {max(told.facts['steps'])}")
    (newest / "manifest.json").unlink()
    assert examined(run, samples=0)["run.checkpoints"].severity == "warning"


def test_where_every_checkpoint_is_damaged_it_is_told(run):
    for folder in (run / "checkpoints").iterdir():
        (folder / "ema.safetensors").write_bytes(b"")
    found = examined(run, samples=0)
    assert found["run.checkpoints"].severity == "warning"
    assert found["run.checkpoints"].facts["steps"] == []
    assert "no checkpoint is intact" in found["run.skipped"].evidence


def test_a_checkpoint_that_a_live_run_removes_meanwhile_was_read_before(run, monkeypatch):
    """The images are read after the weights, which takes long; until then the run has made newer ones."""
    from unfog.checks.run import run_checks as examination

    images_of = examination._load_run_images

    def meanwhile(config, skipped):
        shutil.rmtree(run / "checkpoints")
        return images_of(config, skipped)

    monkeypatch.setattr(examination, "_load_run_images", meanwhile)
    found = examined(run, samples=8)
    assert {"run.ema_behind", "run.overfitting", "run.tint"} <= found.keys()


@pytest.mark.parametrize("gone", ["metrics.jsonl", "events.jsonl", "heartbeat.json", "data.json", "checkpoints"])
def test_whatever_is_missing_the_rest_is_examined(run, gone):
    path = run / gone
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    found = examined(run, samples=0)
    assert "run.state" in found
    assert ("run.skipped" in found) == (gone == "checkpoints")


def test_records_full_of_nonsense_are_survived(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    odd = [None, "word", [], {}, True, -1e300, [None] * 3, [[1]]]
    with (run / "metrics.jsonl").open("w") as file:
        for i, row in enumerate(rows):
            file.write(json.dumps({name: odd[(i + j) % len(odd)] for j, name in enumerate(row)}) + "\n")
    kinds = ("started", "step_refused", "rolled_back", "preview", "checkpoint", "evaluated", "failed")
    with (run / "events.jsonl").open("w") as file:
        for i, kind in enumerate(kinds):
            fields = ("step", "seconds", "snapshot_seconds", "images", "levels", "layer", "lr", "reason", "time")
            file.write(json.dumps({name: odd[(i + j) % 8] for j, name in enumerate(fields)} | {"kind": kind}) + "\n")
    (run / "data.json").write_text('{"found": "many", "used": null}')
    (run / "heartbeat.json").write_text('{"time": "2026-01-01T00:00:00+00:00", "next": 5, "step": [], "doing": 3}')
    found = examined(run, samples=0)
    write_findings(run / "doctor", "nonsense", list(found.values()))
    assert "run.state" in found


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(RequestError, match="is not a run"):
        check_run(RunFolder(tmp_path), "cpu")


def test_the_generator_of_the_caller_is_left_alone(run):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    examined(run, samples=8)
    assert torch.equal(torch.get_rng_state(), before)
