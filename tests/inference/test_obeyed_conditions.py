"""Whether samples of a run have what was asked, and what its conditions are worth: from the command to the report."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

import unfog
from conftest import FEW_PICTURES
from unfog.cli.main import main
from unfog.errors import RequestError
from unfog.evaluation.judge import Judge
from unfog.inference.evaluation_files import Evaluation
from unfog.inference.obeyed_conditions import ConditionJudge
from unfog.pipeline.load_data import load_images
from unfog.process.signals import StopSignals
from unfog.reporting.page.run_data import read_evaluations

pytestmark = pytest.mark.slow
MEASURES = "PSNR", "SSIM", "CRPS"
NEVER = {"every": -1}
TINY = {"network": "dit:depth=1,width=32,patch=4", "batch": 4, "device": "cpu", "steps": 1, **FEW_PICTURES}


@pytest.fixture(autouse=True)
def _quick_judges(monkeypatch):
    monkeypatch.setattr("unfog.evaluation.judge._STEPS", (30, 30))


def shades(count=120):
    """Grey squares, with their shade, which is not known of some, and which of two halves is white."""
    draw = np.random.default_rng(0)
    shade, half = draw.integers(0, 200, count), draw.integers(0, 2, count)
    images = np.repeat(shade[:, None, None], 256, 1).reshape(count, 16, 16).astype(np.uint8)
    images[half == 0, :8] = 255
    images[half == 1, 8:] = 255
    return images, {
        "shade": np.where(np.arange(count) % 5, shade, np.nan),
        "half": ["top" if i == 0 else "low" for i in half],
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    images, conditions = shades()
    out = tmp_path_factory.mktemp("obeyed") / "run"
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("UNFOG_CACHE", str(out.parent / "cache"))
        data = {"held_out": 0.2}
        unfog.train(images, conditions=conditions, out=out, data=data, evaluate=NEVER, **TINY)
    return out


@pytest.fixture
def run(trained, monkeypatch):
    monkeypatch.setenv("UNFOG_CACHE", str(trained.parent / "cache"))
    return unfog.load(trained)


def test_an_evaluation_says_whether_conditions_are_obeyed_and_what_they_are_worth(run, tmp_path, capsys, monkeypatch):
    words = ["evaluate", str(run.path), "--metrics", "obeys,worth", "-n", "40", "--steps", "2", "--device", "cpu"]
    with pytest.raises(SystemExit):
        main([*words, "--out", str(tmp_path / "out.json")])
    said = capsys.readouterr().out
    assert "real images: 20 held-out images and 20 training images that it was not trained on" in said
    assert "Rise of the held-out loss" in said
    assert "metric  value" not in said  # an empty table
    stored = json.loads((tmp_path / "out.json").read_text())
    assert [(one["condition"], one["measure"]) for one in stored["obeys"]] == [
        ("half", "accuracy"),
        ("shade", "R2"),
        ("shade", "error"),
    ]
    assert [one["condition"] for one in stored["worth"]] == ["half", "shade", "all"]
    half, shade, _ = stored["obeys"]
    assert (half["n"], half["real"] > 0.9, half["obeyed"]) == (40, True, half["obeyed"])
    assert 20 < shade["n"] < 40  # of the others the shade is not known
    (path,) = (run.path / "evaluations").glob("*.json")
    kept = Evaluation.read(path)
    assert kept.obeys[0].value == half["value"]
    assert kept.worth[2].none is not None
    assert "half accuracy" in repr(kept)
    (shown,) = read_evaluations(run.path)
    obeys, worth = shown["tables"]
    assert [row[-1] for row in obeys["rows"]] == [one.obeyed for one in kept.obeys]
    assert worth["rows"][0][:2] == ("half", f"{kept.worth[0].shuffled:.4g}")
    # The judge is in the cache: no other one is trained.
    monkeypatch.setattr(Judge, "train", lambda *words: pytest.fail("trained again"))
    run.evaluate("obeys", n=20, steps=2)


def test_a_model_that_draws_something_else_is_noticed(run):
    with StopSignals() as stop:
        dataset, _ = load_images(run.config, stop)
    judge = ConditionJudge.open(run.config, dataset)
    columns, pixels = dataset.train.columns, dataset.train.pixels
    right = {(one.condition, one.measure): one for one in judge.score([pixels], columns)}
    order = np.random.default_rng(0).permutation(len(pixels))
    broken = {(one.condition, one.measure): one for one in judge.score([pixels[order]], columns)}
    assert {one.obeyed for one in right.values()} == {"yes"}
    assert {one.obeyed for one in broken.values()} == {"no"}
    assert broken["half", "accuracy"].value == pytest.approx(0.5, abs=0.15)


def test_a_damaged_judge_in_the_cache_is_trained_again(run, trained):
    with StopSignals() as stop:
        dataset, _ = load_images(run.config, stop)
    before = ConditionJudge.open(run.config, dataset)
    paths = [*(trained.parent / "cache").glob("judge-*.safetensors")]
    assert paths
    for path in paths:
        path.write_bytes(b"\x80\x04damaged")
    again = ConditionJudge.open(run.config, dataset)
    assert all(torch.equal(a, b) for a, b in zip(before.real, again.real, strict=True))


def test_captions_are_judged_by_retrieval_in_evaluations_and_while_a_run_trains(tmp_path, monkeypatch):
    monkeypatch.setenv("UNFOG_CACHE", str(tmp_path / "cache"))
    images, conditions = shades()
    captions = [f"the {half} is white" if i % 7 else "" for i, half in enumerate(conditions["half"])]
    evaluate = {"every": 1, "metrics": ["obeys"], "samples": 12, "reference": 20, "metrics_every": 1, "best": "obeys"}
    settings = TINY | {"data": {"held_out": 0.2}}
    run = unfog.train(images, conditions={"text": captions}, out=tmp_path / "run", evaluate=evaluate, **settings)
    record = json.loads((run.path / "metrics.jsonl").read_text().splitlines()[-1])
    assert 0 <= record["obeys_text"] <= 1
    assert record["obeys_real"] > 0.9
    found = run.evaluate(n=40, steps=2, metrics="obeys,worth")
    assert [one.measure for one in found.obeys] == ["R@1", "R@5"]
    assert found.obeys[0].n < 40  # without those that have no caption
    assert "text: 2 captions to look for, of which chance finds 50.0% and 100.0%" in found.judge
    assert [one.condition for one in found.worth] == ["text"]
    assert found.worth[0].none is not None
    with StopSignals() as stop:
        dataset, _ = load_images(run.config, stop)
    judge, pixels = ConditionJudge.open(run.config, dataset), dataset.train.pixels
    right, _ = judge.score([pixels], dataset.train.columns)
    assert (right.value > 0.9, right.obeyed) == (True, "yes")


def test_runs_without_conditions_are_told_nothing_and_asked_for_it_refuse(tmp_path, capsys):
    images, _ = shades()
    run = unfog.train(images, out=tmp_path / "run", data={"held_out": 0.2}, evaluate=NEVER, **TINY)
    found = run.evaluate("held_out")
    assert not any((found.obeys, found.judge, found.worth))
    assert len(found.lines()) == 3
    for metric in ("obeys", "worth"):
        with pytest.raises(RequestError, match="of runs with conditions"):
            run.evaluate(metric)
    with pytest.raises(RequestError, match="needs a run"):
        unfog.evaluate(images, images, "obeys")


def test_a_run_with_unknown_pixels_and_nothing_held_out_is_measured_by_its_values(tmp_path):
    images = shades(20)[0].astype(np.float32)
    images[:, 0, 0] = np.nan
    data = {"unknown": "nan", "dtype": "float32", "held_out": 0}
    run = unfog.train(images[..., None], out=tmp_path / "run", data=data, evaluate=NEVER, **TINY)
    values = {one.metric: one.value for one in run.evaluate(n=10).measured}
    assert values["spectrum"] > 0
    assert values["histogram"] > 0
    assert values["correlation"] is None  # a single channel


def test_training_records_whether_conditions_are_obeyed(tmp_path):
    images, conditions = shades()
    evaluate = {"every": 2, "metrics": ["obeys"], "samples": 12, "reference": 20, "metrics_every": 2, "best": "obeys"}
    settings = TINY | {"steps": 2, "data": {"held_out": 0.2}}
    run = unfog.train(images, conditions=conditions, out=tmp_path / "run", evaluate=evaluate, **settings)
    record = json.loads((run.path / "metrics.jsonl").read_text().splitlines()[-1])
    assert record["obeys"] == pytest.approx(
        (record["obeys_half"] + record.get("obeys_shade", record["obeys_half"])) / 2
    )
    assert record["obeys_real"] > 0.5
    with pytest.raises(RequestError, match="of runs with conditions"):
        unfog.train(images, out=tmp_path / "plain", evaluate=evaluate, **settings)


def test_a_run_without_conditions_is_evaluated_by_the_usual_metrics(tmp_path, monkeypatch):
    monkeypatch.setenv("UNFOG_CACHE", str(tmp_path / "cache"))
    images = np.random.default_rng(0).integers(0, 256, (120, 16, 16, 3)).astype(np.uint8)
    run = unfog.train(images, out=tmp_path / "run", data={"held_out": 0.2}, evaluate=NEVER, **TINY)
    found = run.evaluate(n=24, steps=2, features="texture")
    assert not found.obeys
    assert not found.worth
    assert {"kid", "detail"} <= {one.metric for one in found.measured}


def coloured(count=120):
    """Images in colour whose mask is where they are bright, and the masks, of labels 0 and 1."""
    draw = np.random.default_rng(1)
    masks = np.zeros((count, 16, 16), np.uint8)
    for mask, (y, x) in zip(masks, draw.integers(0, 8, (count, 2)), strict=True):
        mask[y : y + 8, x : x + 8] = 1
    images = draw.integers(0, 100, (count, 16, 16, 3)) + 150 * masks[..., None]
    return images.astype(np.uint8), masks


@pytest.fixture(scope="module")
def with_images(tmp_path_factory):
    out = tmp_path_factory.mktemp("images")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("UNFOG_CACHE", str(out / "cache"))
        patched.setattr("unfog.evaluation.judge._STEPS", (60, 60))
        images, masks = coloured()
        for name, each in {"images": images, "masks": masks}.items():
            (out / name).mkdir()
            for i, one in enumerate(each):
                Image.fromarray(one).save(out / name / f"{i:03}.png")
        evaluate = {"every": 2, "metrics": ["obeys"], "samples": 12, "reference": 20, "metrics_every": 2}
        condition = f"mask={out / 'masks'},grey"
        settings = TINY | {"steps": 2, "data": {"held_out": 0.2}}
        unfog.train(out / "images", condition=condition, out=out / "run", evaluate=evaluate, **settings)
    return out / "run"


def test_masks_are_judged_and_other_images_compared_with_the_truth(with_images, monkeypatch):
    record = json.loads((with_images / "metrics.jsonl").read_text().splitlines()[-1])
    assert record["obeys_grey"] == record["ssim"]
    assert record["obeys"] == pytest.approx((record["ssim"] + record["obeys_mask"]) / 2)
    assert record["obeys_real"] > 0.9
    assert 0 < record["crps"] < 0.5
    monkeypatch.setenv("UNFOG_CACHE", str(with_images.parent / "cache"))
    monkeypatch.setattr("unfog.evaluation.judge._STEPS", (60, 60))
    found = unfog.load(with_images).evaluate("obeys,worth", n=20, steps=2)
    assert [one.measure for one in found.obeys] == ["pixel accuracy", "mean IoU"]
    assert found.obeys[1].real > 0.9 > found.obeys[1].shuffled
    assert [(one.condition, one.measure) for one in found.truth] == [
        ("grey", name) for name in ("PSNR", "SSIM", "CRPS")
    ]
    psnr, ssim, crps = found.truth
    assert psnr.low < psnr.value < psnr.high
    assert psnr.given > psnr.value  # the network draws noise
    assert (psnr.n, psnr.draws) == (28, 4)
    assert ssim.given < 1
    assert crps.given < crps.value
    assert {one.condition for one in found.worth} == {"mask", "grey", "all"}
    lines = "\n".join(found.lines())
    assert "without a judge" not in lines
    assert "Draws and the held-out images, 4 draws for each" in lines
    (shown,) = read_evaluations(with_images)
    assert [row[:2] for row in shown["tables"][1]["rows"]] == [("grey", name) for name in MEASURES]


def test_a_network_that_ignores_a_mask_is_noticed(with_images, monkeypatch):
    monkeypatch.setenv("UNFOG_CACHE", str(with_images.parent / "cache"))
    monkeypatch.setattr("unfog.evaluation.judge._STEPS", (60, 60))
    run = unfog.load(with_images)
    with StopSignals() as stop:
        dataset, _ = load_images(run.config, stop)
    judge = ConditionJudge.open(run.config, dataset)
    pixels = dataset.train.pixels[:]
    right, broken = (judge.score([each], dataset.train.columns) for each in (pixels, np.roll(pixels, 1, 0)))
    assert {one.obeyed for one in right} == {"yes"}
    assert {one.obeyed for one in broken} == {"no"}
