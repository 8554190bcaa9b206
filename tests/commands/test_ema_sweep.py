"""`unfog ema-sweep` on a real run: what it measures, chooses and leaves behind, and what then samples with it."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import unfog
from command import exit_status
from conftest import TRANSFORMER
from unfog.errors import RequestError, RunError
from unfog.inference import ema_sweep
from unfog.inference.ema_sweep import PAGE_FILE, EmaSweepResult, WidthResult
from unfog.inference.loaded_run import SWEEP_FILE, swept_width
from unfog.inference.run import Run
from unfog.reporting.records import read_events, read_metrics
from unfog.training.checkpoints.posthoc_ema import EmaSnapshotFile
from unfog.values.condition_format import given_labels

pytestmark = pytest.mark.slow

STEPS, EVERY = 48, 2
SETTINGS = {
    "network": TRANSFORMER, "precision": "fp32", "device": "cpu", "batch": 8, "size": 8, "lr": 3e-3,
    "log": {"every": 16}, "preview": {"every": -1, "images": 2}, "sampler": {"steps": 2},
    "evaluate": {"every": 16, "images": 16, "levels": 2}, "checkpoint": {"every": 24},
}  # fmt: skip


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """Blobs that a network of any size learns something of."""
    place = tmp_path_factory.mktemp("data") / "blobs.npy"
    x, y = np.meshgrid(np.arange(8), np.arange(8))
    centres = np.random.default_rng(0).integers(2, 6, (400, 2, 1, 1))
    np.save(place, (255 * np.exp(-((x - centres[:, 0]) ** 2 + (y - centres[:, 1]) ** 2) / 4)).astype(np.uint8))
    return place


@pytest.fixture(scope="module")
def whole(photos, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sweep") / "run"
    unfog.train(photos, out=folder, steps=STEPS, averages={"every": EVERY}, **SETTINGS)
    return folder


@pytest.fixture
def run(whole, tmp_path) -> Path:
    return shutil.copytree(whole, tmp_path / "run")


def pixels(file: Path) -> bytes:
    """The pixels without the text, which tells the command."""
    return Image.open(file).tobytes()


def weights(of: Run) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in of.network.parameters()])


def test_sweep_measures_every_length_and_the_run_follows_the_best(run, capsys):
    assert exit_status("ema-sweep", str(run), "--widths", "0.05", "0.1", "0.2") == 0
    out, err = capsys.readouterr()
    found = json.loads((run / SWEEP_FILE).read_text())
    values = {row["width"]: row["value"] for row in found["rows"]}
    assert list(values) == [0.05, 0.1, 0.2]
    assert found["width"] == min(values, key=values.get) == float(out)
    assert found["n"] > 10
    assert f"{values[0.05]:.5g}" in err
    assert "<svg" in (run / PAGE_FILE).read_text()
    # The run's own width is measured as the run itself did at its end, on the same images.
    logged = [row["held_out_loss"] for row in read_metrics(run / "metrics.jsonl") if "held_out_loss" in row]
    again = unfog.ema_sweep(run, n=16, widths=[0.1])
    assert again.rows[0].value == pytest.approx(logged[-1], rel=2e-3)


def test_a_chosen_width_is_what_is_loaded_and_sampled(run, tmp_path, capsys):
    usual, narrow, raw = unfog.load(run), unfog.load(run, ema=0.05), Run(run, "raw")
    same = unfog.load(run, ema=0.1)
    scale = (weights(usual) - weights(raw)).norm()
    assert (weights(same) - weights(usual)).norm() < 5e-4 * weights(usual).norm()  # the rounding of the files
    assert (weights(narrow) - weights(raw)).norm() < 0.8 * scale
    (run / SWEEP_FILE).write_text(json.dumps({"width": 0.05}))
    assert torch.equal(weights(unfog.load(run)), weights(narrow))
    assert torch.equal(weights(Run(run, "raw")), weights(raw))
    for flags, into in ((["--ema", "0.05"], "a"), ([], "b")):
        assert exit_status("sample", str(run), "-n", "2", "--out", str(tmp_path / into), *flags) == 0
    first, second = (sorted((tmp_path / into).glob("0*.png")) for into in "ab")
    assert [pixels(file) for file in first] == [pixels(file) for file in second]
    (run / SWEEP_FILE).write_text(json.dumps({"width": 0.1}))
    assert torch.equal(weights(unfog.load(run)), weights(usual))  # the checkpoint's own, which no file has rounded


def test_checkpoints_are_compared_by_averages_of_the_chosen_width(run):
    (run / SWEEP_FILE).write_text(json.dumps({"width": 0.05}))
    losses = [Run(run, step=step).evaluate("held_out")["held_out"].value for step in (48, 24)]
    found = unfog.load(run).evaluate("held_out", against=24)
    assert found["held_out"].value == pytest.approx(losses[0], rel=1e-9)
    assert found["held_out_difference"].value == pytest.approx(losses[0] - losses[1], rel=1e-6)


@pytest.mark.parametrize(("best", "usual", "said"), [
    (0.5, 1.0, "has 1 (100% more)"), (0.5, 0.52, "has 0.52 (4.0% more)"), (-0.001, 0.002, "has 0.002 (step 9"),
])  # fmt: skip
def test_how_much_more_the_usual_length_has(best, usual, said):
    swept = EmaSweepResult(
        "kid",
        10,
        9,
        "",
        0.1,
        (WidthResult(0.05, best, None, 0.0), WidthResult(0.1, usual, None, 0.0), WidthResult(0.2, 9, None, 0.0)),
    )
    assert said in swept.finding().evidence


def test_any_step_up_to_the_last(run):
    at = Run(run, ema=0.08, step=31)
    assert torch.equal(weights(at), weights(Run(run, ema=0.08, step=30)))
    assert not torch.equal(weights(at), weights(unfog.load(run, ema=0.08)))
    with pytest.raises(RequestError, match="step = 49 must be from 2 to 48"):
        Run(run, ema=0.08, step=49)
    with pytest.raises(RequestError, match="one of them"):
        Run(run, "raw", ema=0.08)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"width": null}', '{"width": 9}', '{"width": "x"}', "\xff"])
def test_a_choice_that_is_none_is_passed_over(run, text):
    (run / SWEEP_FILE).write_bytes(text.encode("latin-1"))
    assert swept_width(run) is None


def test_without_snapshots_the_checkpoint_is_used_and_a_sweep_refused(run, capsys):
    (run / SWEEP_FILE).write_text(json.dumps({"width": 0.05}))
    shutil.rmtree(run / "averages")
    usual = unfog.load(run)
    assert "cannot be used, so the EMA of the checkpoint is" in capsys.readouterr().err
    (run / SWEEP_FILE).unlink()
    assert torch.equal(weights(usual), weights(unfog.load(run)))
    for call in (lambda: unfog.ema_sweep(run), lambda: unfog.load(run, ema=0.05)):
        with pytest.raises(RequestError, match="no EMA snapshots"):
            call()


def test_pictures_are_compared_by_any_features(run):
    found = unfog.ema_sweep(run, metric="kid", n=40, widths=[0.05, 0.15], features="pixels")
    assert found.features == "pixels"
    assert found.n == 40
    assert all(row.error is not None and row.error > 0 for row in found.rows)
    assert found.finding().facts["step"] == STEPS
    small = unfog.ema_sweep(run, metric="sliced", n=20, widths=[0.1])
    assert small.rows[0].value > 0
    assert small.features == "7x7 patches"
    with pytest.raises(RequestError, match="metric = 'beauty'"):
        unfog.ema_sweep(run, metric="beauty")


def test_pictures_that_are_compared_have_classes_as_often_as_the_data(photos, tmp_path, monkeypatch):
    images = np.load(photos)
    run = tmp_path / "classes"
    labels = np.arange(len(images)) % 10 == 0
    unfog.train(images, labels=labels, out=run, steps=8, averages={"every": 4}, **SETTINGS)
    drawn, draw = [], ema_sweep.generate_images

    def seen(network, config, drawing, *others):
        drawn.append(drawing)
        return draw(network, config, drawing, *others)

    monkeypatch.setattr(ema_sweep, "generate_images", seen)
    unfog.ema_sweep(run, metric="kid", n=40, widths=[0.1], features="pixels")
    assert given_labels(drawn[0].given).count(1) == pytest.approx(4, abs=1)
    assert len(given_labels(drawn[0].given)) == 40


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"n": "20"}, "n = '20'"),
        ({"widths": 0.05}, "widths = 0.05 is not a list"),
        ({"widths": ["a"]}, "widths"),
        ({"step": "24"}, "step = '24'"),
        ({"metric": "kid", "features": 5}, "features = 5"),
    ],
)
def test_what_is_of_another_type_is_refused_in_a_line(run, asked, said):
    with pytest.raises(RequestError, match=said):
        unfog.ema_sweep(run, **asked)


def test_what_cannot_be_measured_is_refused_before_drawing(run, monkeypatch):
    monkeypatch.setattr("unfog.inference.ema_sweep.generate_images", lambda *given: pytest.fail("pictures were drawn"))
    with pytest.raises(RequestError, match=r"fd .*40 images .*192 features.*--metric kid"):
        unfog.ema_sweep(run, metric="fd", n=40, widths=[0.1], features="pixels")
    with pytest.raises(RequestError, match="n = 3 samples: sliced needs at least 10"):
        unfog.ema_sweep(run, metric="sliced", n=3, widths=[0.1])


def test_a_sweep_that_cannot_be_written_is_printed(run, capsys):
    (run / SWEEP_FILE).mkdir()
    with pytest.raises(RunError, match=r"cannot be written to"):
        unfog.ema_sweep(run, widths=[0.1, 0.2], n=8)
    rows = [line.split() for line in capsys.readouterr().err.splitlines()]
    assert {"0.1", "0.2"} <= {row[0] for row in rows if row}


def test_what_cannot_be_written_stops_no_run(run, whole):
    """The snapshots' folder is somebody's file: training ends as it would, and says what is missing."""
    shutil.rmtree(run / "averages")
    shutil.rmtree(run / "checkpoints/00000048")
    (run / "averages").write_text("notes")
    unfog.resume(run)
    ours, theirs = (f / "checkpoints/00000048" for f in (run, whole))
    for name in ("model", "ema", "ema2"):
        assert (ours / f"{name}.safetensors").read_bytes() == (theirs / f"{name}.safetensors").read_bytes()
    left_out = [event["step"] for event in read_events(run / "events.jsonl") if event["kind"] == "averages_left_out"]
    assert left_out == list(range(26, 49, 2))
    assert EmaSnapshotFile.read_all(run / "averages") == []


def test_automatic_snapshots_are_chosen_printed_and_stored(photos, tmp_path, capsys):
    """None in a short run; from 200 steps on some 24, and none with a fixed decay, which no sum rebuilds."""
    quick = {**SETTINGS, "evaluate": {"every": -1}, "log": {"every": 100}}
    unfog.train(photos, out=tmp_path / "short", steps=2, **quick)
    assert unfog.load(tmp_path / "short").config.ema_snapshots.every == -1
    assert not (tmp_path / "short/averages").exists()
    capsys.readouterr()
    unfog.train(photos, out=tmp_path / "long", steps=200, **quick)
    assert "ema_snapshots.every = 8: " in capsys.readouterr().err
    assert len(EmaSnapshotFile.read_all(tmp_path / "long/averages")) == 25
    capsys.readouterr()
    unfog.train(photos, out=tmp_path / "fixed", steps=2, ema="fixed", averages={"every": 5}, **quick)
    assert "ema_snapshots.every = -1: an EMA of fixed decay" in capsys.readouterr().err
    assert not (tmp_path / "fixed/checkpoints/00000002/ema2.safetensors").exists()
    with pytest.raises(RequestError, match="too close"):
        unfog.train(photos, out=tmp_path / "near", steps=2, averages={"every": 5, "second": 0.1})


def test_killed_and_resumed_leaves_the_same_snapshots(run, whole):
    """As a kill leaves it: no newer checkpoint, snapshots of steps that are to come again, and half of one."""
    shutil.rmtree(run / "checkpoints/00000048")
    for name in ("00000030.safetensors", ".partial-00000050"):
        (run / "averages" / name).write_bytes(b"half of it")
    shutil.copy(run / "averages/00000028.safetensors", run / "averages/00000027.safetensors")  # of another interval
    (run / "averages/00000040.safetensors").unlink()
    unfog.resume(run)
    mine, theirs = ({p.name: p.read_bytes() for p in (f / "averages").iterdir()} for f in (run, whole))
    assert mine == theirs
    assert (run / "checkpoints/00000048/ema2.safetensors").read_bytes() == (
        whole / "checkpoints/00000048/ema2.safetensors"
    ).read_bytes()


def test_a_run_stopped_between_two_snapshots_is_sampled_as_of_the_last(run):
    (run / SWEEP_FILE).write_text(json.dumps({"width": 0.05}))
    (run / "averages/00000048.safetensors").unlink()
    assert torch.equal(weights(unfog.load(run)), weights(Run(run, ema=0.05, step=46)))
