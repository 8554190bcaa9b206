"""Measuring a run: what is drawn, kept, shared between processes, measured and told."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file

import unfog
from conftest import TRANSFORMER
from forked import Forked
from unfog.config.requests.evaluate import EvaluationRequest
from unfog.config.spec_strings import StepOrRun
from unfog.config.toml import of_type
from unfog.data.dataset import Dataset, ImageSet
from unfog.data.settings import Data
from unfog.errors import RequestError, RunError
from unfog.evaluation import features as store  # counts its calls
from unfog.evaluation.distances import FeatureStatistics
from unfog.evaluation.features import features_folder, open_features
from unfog.evaluation.held_out import HeldOut, MeanEstimate, fixed_losses, midpoints, summarize_losses
from unfog.evaluation.metrics import compare_features
from unfog.inference import compute_metrics
from unfog.inference.compute_metrics import open_against, paired_difference
from unfog.inference.evaluation_files import Evaluation, GeneratedSamples
from unfog.inference.loaded_run import LoadedRun
from unfog.inference.memorization import (
    Nearness,
    UnseenImages,
    check_memorization,
    check_memorization_by_features,
    check_memorization_by_pixels,
    find_nearest_features,
)
from unfog.inference.run import Run
from unfog.pipeline.generate import GenerationSettings, generate_images, proportional_labels
from unfog.pipeline.load_data import load_images
from unfog.process.signals import StopSignals
from unfog.reporting.report import write_report
from unfog.training.distributed.world import World
from unfog.values.columns import CLASS
from unfog.values.conditions import NO_CONDITIONS, Conditions
from waiting import wait_until

pytestmark = pytest.mark.slow

SETTINGS = {
    "network": TRANSFORMER,
    "device": "cpu",
    "precision": "fp32",
    "batch": 8,
    "lr": 3e-3,
    "log": {"every": 6},
    "preview": {"images": 2, "every": -1},
    "evaluate": {"images": 16, "levels": 3, "every": 6},
    "checkpoint": {"every": 6, "keep": 10},
    "sampler": {"steps": 3},
    "data": {"held_out": 0.2},
}


def blobs(count: int = 300) -> tuple[np.ndarray, np.ndarray]:
    """Discs on a gradient, 16 x 16, three quarters of them of the first class."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:16, :16]
    centre, radius = rng.uniform(4, 12, (count, 2, 1, 1)), rng.uniform(2, 5, (count, 1, 1))
    inside = (y - centre[:, 0]) ** 2 + (x - centre[:, 1]) ** 2 < radius**2
    shade = rng.integers(0, 80, (count, 1, 1)) + 5 * x[None]
    labels = (np.arange(count) % 4 == 0).astype(np.int64)
    return np.where(inside, 250 - 100 * labels[:, None, None], shade).astype(np.uint8), labels


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("shared-cache")


@pytest.fixture(autouse=True)
def _shared_cache(cache, monkeypatch, _own_cache):
    monkeypatch.setenv("UNFOG_CACHE", str(cache))


@pytest.fixture(scope="module")
def trained(tmp_path_factory, cache) -> Path:
    images, labels = blobs()
    out = tmp_path_factory.mktemp("evaluate") / "run"
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("UNFOG_CACHE", str(cache))
        unfog.train(images, labels=labels, out=out, steps=24, **SETTINGS)
    return out


@pytest.fixture
def run(trained, tmp_path) -> Run:
    """A copy without evaluations."""
    shutil.copytree(trained, tmp_path / "run")
    return unfog.load(tmp_path / "run")


def test_losses_by_image_add_up_to_what_training_records():
    generator = torch.Generator().manual_seed(3)
    held_out = HeldOut(torch.randn(10, 1, 4, 4, generator=generator), NO_CONDITIONS, midpoints(5))

    def loss_at(x0, conditions, u, noise):
        error = (x0 * u[:, None, None, None] - noise).square().mean((1, 2, 3))
        return error, 2 * error

    losses = held_out.losses(loss_at, batch=4)
    measured = summarize_losses(losses, 4)
    assert losses.shape == (2, 5, 10)
    assert losses[0].mean(1).tolist() == pytest.approx(measured["held_out_by_level"], rel=1e-12)
    assert losses[0].mean().item() == pytest.approx(measured["held_out_loss"], rel=1e-12)
    assert torch.equal(losses[1], 2 * losses[0])
    assert torch.equal(losses, held_out.losses(loss_at, batch=10))  # the same noise whatever the batch


def test_every_image_has_its_own_label_level_and_noise_in_any_batch():
    x0, label, u = torch.rand(5, 1, 2, 2), torch.arange(5), torch.rand(2, 5)
    noise, passes = torch.rand(2, 5, 1, 2, 2), list[int]()

    def loss_at(x0, conditions, u, noise):
        return x0.sum((1, 2, 3)) + 10 * conditions.label, 100 * u + noise.sum((1, 2, 3))

    found = fixed_losses(loss_at, x0, Conditions(label), u, noise.__getitem__, 2, passes.append)
    assert torch.equal(found[0], (x0.sum((1, 2, 3)) + 10 * label).double().expand(2, -1))
    assert torch.equal(found[1], (100 * u + noise.sum((2, 3, 4))).double())
    assert passes == [2, 2, 1] * 2
    one = fixed_losses(loss_at, x0, Conditions(label), u, noise.__getitem__, 5, only=slice(1, None))
    assert torch.equal(one[:, 1], found[:, 1])
    assert not one[:, 0].any()


def test_pairs_tell_apart_what_lies_within_each_others_intervals():
    generator = torch.Generator().manual_seed(0)
    common = torch.rand(3, 200, generator=generator, dtype=torch.float64) * 10
    better = common - 0.01 - 0.01 * torch.rand(3, 200, generator=generator, dtype=torch.float64)
    a, b, difference = (
        MeanEstimate.over_images(common),
        MeanEstimate.over_images(better),
        paired_difference(better, common),
    )
    assert abs(a.value - b.value) < min(a.error, b.error)
    assert difference.value < -10 * difference.error
    by_image = (better - common).numpy().mean(0)
    assert difference.value == pytest.approx(by_image.mean())
    assert difference.error == pytest.approx(by_image.std(ddof=1) / math.sqrt(200))
    assert math.isnan(MeanEstimate.over_images(common[:, :1]).error)
    with pytest.raises(ValueError, match="same images"):
        paired_difference(common, better[:, :10])


def test_everything_is_measured_stored_and_shown(run, capsys):
    found = run.evaluate(n=40, features="pixels", batch=16)
    names = [one.metric for one in found.measured]
    assert {"kid", "precision", "recall", "density", "coverage", "sliced", "detail", "held_out"} == {
        name for name in names if "_" not in name or name == "held_out"
    } - {"fd"}
    assert found.lines()[0] == found.verdict
    assert found["kid"].real < found["kid"].value
    assert found["kid"].n == 40
    assert found["kid"].n_reference == 252
    assert "sampler dpmpp" in found["kid"].drawn
    counted = list[int]()
    generate_images(run.network, run.config, replace(run.prepare(1).generation, count=1), calls=counted.append)
    assert [found.drawn["calls"]] == counted
    assert f", {counted[0]} calls a sample, " in found.lines()[1]
    assert found["held_out"].low < found["held_out"].value < found["held_out"].high
    said = capsys.readouterr().err
    assert "40 samples will take about" in said
    (path,) = (run.path / "evaluations").glob("*.json")
    assert Evaluation.read(path) == found
    assert found["detail_6"].low < found["detail_6"].value < found["detail_6"].high
    assert found["detail"].real == pytest.approx(1, abs=0.3)
    frequency, generated, real = (found.spectrum[name] for name in ("frequency", "generated", "real"))
    assert len(frequency) == len(generated) == len(real) > 16
    assert (path.with_suffix("") / "spectrum.svg").read_text().startswith('<svg xmlns="')
    assert {one["by"] for one in found.copies} == {"pixels", "small pixels"}
    for one in found.copies:
        assert (run.path / "evaluations" / one["picture"]).is_file()
    table = "\n".join(found.lines())
    assert "kid" in table
    assert "area 8" in table
    (run.path / "evaluations" / "damaged.json").write_text('{"step": 3, "measured": [7], "copies": 5}')
    page = write_report(run.path).read_text()
    assert f'"metric":"kid","value":{found["kid"].value!r},' in page


def test_statistics_of_the_real_images_are_kept_for_the_next_checkpoint(run):
    found = run.evaluate("fid,kid", n=10, features="texture", batch=16)["fd"]
    real, features = _prepared(run).train, open_features("texture")
    kept = features_folder(f"{real.fingerprint} spread", found.n_reference, features) / "statistics.safetensors"
    x = features(torch.from_numpy(np.ascontiguousarray(real.pixels[:])))
    torch.testing.assert_close(load_file(kept)["covariance"], FeatureStatistics.of(x).covariance)


def test_features_of_drawn_pictures_are_kept_until_the_result_is_stored(run, monkeypatch):
    def full(*given: object) -> None:
        raise OSError(28, "No space left on device")

    kept = Path(os.environ["UNFOG_CACHE"]) / "features"
    before, write, asked = set(kept.glob("*")), Evaluation.write, {"metrics": "kid", "n": 30, "features": "texture"}
    monkeypatch.setattr(Evaluation, "write", full)
    with pytest.raises(RunError, match="cannot be written"):
        run.evaluate(**asked)
    (folder,) = (run.path / "evaluations" / "drawn").iterdir()
    drawn = features_folder(f"{folder.name} sealed", 30, open_features("texture"))
    assert drawn in set(kept.glob("*"))
    monkeypatch.setattr(Evaluation, "write", write)
    compute = store._compute

    def not_again(pixels: object, *given: object) -> torch.Tensor:
        assert not isinstance(pixels, GeneratedSamples)
        return compute(pixels, *given)

    monkeypatch.setattr(store, "_compute", not_again)
    found = run.evaluate(**asked)
    real = features_folder(
        f"{_prepared(run).train.fingerprint} spread", found["kid"].n_reference, open_features("texture")
    )
    assert real.is_dir()
    assert set(kept.glob("*")) <= before | {real}
    assert run.evaluate(**asked) == found


def test_values_are_those_of_pictures_drawn_by_hand(run):
    found = run.evaluate("kid,coverage", n=30, features="pixels", batch=16, seed=5, reference="held-out")
    names = proportional_labels(_prepared(run).train.labels, 30)
    guided = {"guidance": run.config.usual_guidance, "interval": run.config.guidance_interval}
    asked = GenerationSettings(30, run.config.sampler, ((CLASS, names),), seed=5, batch=16, **guided)
    pictures = generate_images(run.network, run.config, asked)
    features = open_features("pixels")
    held_out = _prepared(run).held_out
    real = features(torch.from_numpy(np.ascontiguousarray(held_out.pixels[:])))
    fake = features(torch.from_numpy(np.ascontiguousarray(pictures.transpose(0, 3, 1, 2))))
    expected = compare_features(["kid", "coverage"], real, fake)
    assert [one.value for one in found.measured] == [one.value for one in expected]
    assert [one.n_reference for one in found.measured] == [48, 48]


def _prepared(run: Run) -> Dataset:
    return load_images(run.config, StopSignals())[0]


def test_asked_again_it_is_read_and_more_pictures_go_on_where_fewer_ended(run):
    first = run.evaluate("kid", n=32, features="pixels", batch=16)
    (folder,) = (run.path / "evaluations" / "drawn").iterdir()
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert sorted(before) == ["00000000.safetensors", "00000016.safetensors"]
    run.evaluate("kid", n=48, features="pixels", batch=16)
    after = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert len(after) == 3
    assert before.items() <= after.items()
    shutil.rmtree(folder)
    assert run.evaluate("kid", n=32, features="pixels", batch=16) == first
    assert not folder.exists()


def test_a_lost_or_broken_chunk_is_drawn_again_to_the_bit(run):
    first = run.evaluate("kid", n=48, features="pixels", batch=16)
    (folder,) = (run.path / "evaluations" / "drawn").iterdir()
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / "00000016.safetensors").unlink()
    (folder / "00000032.safetensors").write_bytes(whole["00000032.safetensors"][:100])
    kept = (folder / "00000000.safetensors").stat().st_mtime_ns
    for path in (run.path / "evaluations").glob("*.json"):
        path.unlink()
    shutil.rmtree(Path(os.environ["UNFOG_CACHE"]) / "features")
    again = run.evaluate("kid", n=48, features="pixels", batch=16)
    assert again.measured == first.measured
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole
    assert (folder / "00000000.safetensors").stat().st_mtime_ns == kept


@pytest.mark.parametrize("how", ["forged", "another machine", "flipped bit", "earlier version"])
def test_pictures_and_results_that_were_not_made_here_are_made_again(run, capsys, monkeypatch, how):
    asked = {"metrics": "kid,sliced", "n": 32, "features": "pixels", "batch": 16}
    first = run.evaluate(**asked)
    (folder,) = (run.path / "evaluations" / "drawn").iterdir()
    (result,) = (run.path / "evaluations").glob("*.json")
    file, whole, value = folder / "00000016.safetensors", result.read_text(), first["kid"].value
    stored = load_arrays(file)
    if how == "another machine":
        monkeypatch.setattr("unfog.inference.evaluate.machine_key", lambda: b"another key")
    elif how == "flipped bit":
        stored["pictures"][3, 0, 0, 0] ^= 1
        save_arrays(stored, file)
    else:  # real images, with a seal from elsewhere, or none
        real = _prepared(run).train.pixels[:16]
        seal = {"seal": stored["seal"]} if how == "forged" else {}
        save_arrays({"pictures": np.ascontiguousarray(real)} | seal, file)
    result.write_text(whole.replace(str(value), "-1.0") if how != "another machine" else whole)
    shutil.rmtree(Path(os.environ["UNFOG_CACHE"]) / "features")
    capsys.readouterr()
    again = run.evaluate(**asked)
    assert again.measured == first.measured
    said = capsys.readouterr().err
    assert "measured again" in said
    assert f"{32 if how == 'another machine' else 16} samples in {folder} were not drawn on this machine" in said
    assert "measured before" not in said
    run.evaluate(**asked)
    assert "measured before" in capsys.readouterr().err


def test_any_range_of_samples_is_read_from_its_chunks(tmp_path):
    samples = GeneratedSamples(tmp_path, 10, 4, tmp_path, b"key", 1)
    numbers = np.arange(10, dtype=np.uint8)
    samples.generate_missing(lambda first, count: numbers[first : first + count, None, None, None], World())
    for first in range(10):
        for last in range(first, 11):
            assert samples[first:last].ravel().tolist() == list(range(first, last))


def test_ranks_that_do_not_share_a_folder_are_told(tmp_path):
    pictures = GeneratedSamples(tmp_path, 40, 16, tmp_path, b"key", 16)
    with pytest.raises(RunError, match="share the run folder"):
        pictures.generate_missing(lambda first, count: np.zeros((count, 4, 4, 1), np.uint8), _Alone(0, 2))
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["00000000.safetensors", "00000032.safetensors"]


class _Alone(World):
    """One of two, whose partner writes elsewhere."""

    def barrier(self) -> None:
        return


def test_without_the_file_of_inception_pictures_are_compared_by_texture(run, capsys):
    found = run.evaluate(n=20, batch=20)
    assert {"held_out", "sliced", "kid", "fd"} <= {one.metric for one in found.measured}
    assert found["kid"].features == "texture"
    said = capsys.readouterr().err
    assert "inception-2015-12-05.pt. " in said
    assert "--features" in said
    with pytest.raises(RequestError, match="inception needs"):
        run.evaluate("fid", n=20)


def test_the_distance_at_infinite_n_is_measured_where_it_is_asked_for(run):
    found = run.evaluate("fid_infinity,kid", n=20, features="pixels")
    assert found["fd_infinity"].value is None
    assert "too few for 192 features" in found["fd_infinity"].note
    assert "fd_infinity" not in {one.metric for one in run.evaluate(n=20, features="pixels").measured}


def test_two_checkpoints_are_compared_on_the_same_noise(run, monkeypatch, capsys):
    monkeypatch.setattr(type(run.config), "usual_guide", "auto")  # for which this run has no snapshots
    found = run.evaluate("held_out", against=6)
    assert not (run.path / "evaluations" / "drawn").exists()
    difference = found["held_out_difference"]
    early = Run(run.path, step=6).evaluate("held_out")
    assert difference.value == pytest.approx(found["held_out"].value - early["held_out"].value, rel=1e-9)
    assert difference.value < 0
    assert difference.error < found["held_out"].error
    assert "lower than that at step 6" in difference.note
    assert "guide" not in capsys.readouterr().err  # which no loss depends on
    with pytest.raises(RequestError, match="no checkpoint of step 7"):
        run.evaluate(n=20, against=7)
    assert not (run.path / "evaluations" / "drawn").exists()  # it was said before anything was drawn


@pytest.mark.slow
def test_two_runs_are_compared_on_the_same_images_and_noise(run, tmp_path):
    """By the loss of the first, whatever loss the other was trained with."""
    shutil.copytree(run.path, tmp_path / "other", ignore=shutil.ignore_patterns("evaluations"))
    settings = (tmp_path / "other/config.toml").read_text()
    (tmp_path / "other/config.toml").write_text(re.sub(r"(?m)^loss = .*$", 'loss = "l1"', settings))
    for saved in (tmp_path / "other/checkpoints").iterdir():
        if not re.search(r"\D0*6$|^0*6$", saved.name):
            shutil.rmtree(saved)
    found = run.evaluate("held_out", against=tmp_path / "other")
    step = run.evaluate("held_out", against=6)
    assert found["held_out_difference"].value == step["held_out_difference"].value
    assert found["held_out_difference"].note.startswith(f"lower than that of {tmp_path / 'other'} at step 6")
    assert [of_type(StepOrRun | None, text, "against") for text in ("runs/b", "6", 6)] == [Path("runs/b"), 6, 6]
    (tmp_path / "other/config.toml").write_text(re.sub(r"(?m)^held_out = .*$", "held_out = 0.3", settings))
    with pytest.raises(RequestError, match=r"has other images than .*compare samples of both"):
        run.evaluate("held_out", against=str(tmp_path / "other"))


def test_the_other_run_of_a_comparison_has_the_size_and_the_ema_of_this_one(run, monkeypatch):
    made = []

    class Other(LoadedRun):
        def __init__(self, path, weights, device, ema):
            made.append(ema)
            super().__init__(path, weights, device=device)

    monkeypatch.setattr(compute_metrics, "LoadedRun", Other)
    resized = run.at_size(32)
    assert resized.config.data.size != run.config.data.size
    resized.ema = 0.1
    assert open_against(resized, run.path).name == f"that of {run.path} at step {run.step:,}"  # not of other images
    assert made == [0.1]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"metrics": ["kidd"]}, "metrics names 'kidd'"),
        ({"metrics": 5}, "metrics = 5 is not a list"),
        ({"n": 3}, "at least 10"),
        ({"metrics": "kid", "against": 6}, "--against compares held-out losses"),
        ({"metrics": "kid", "features": "nothing.pt"}, "cannot be read"),
        ({"steps": 0}, "steps"),
        ({"metrics": "fid", "n": 30, "features": "pixels"}, "fid is refused: 30 images .* the 192 .*--metrics kid"),
    ],
)
def test_what_cannot_be_asked_is_refused(run, asked, said):
    with pytest.raises(RequestError, match=said):
        run.evaluate(**asked)
    assert not (run.path / "evaluations").exists()


def test_copies_are_found_in_features_and_unseen_pictures_are_not():
    generator = torch.Generator().manual_seed(1)
    train = torch.randn(140, 64, generator=generator)
    unseen, fresh = torch.randn(60, 64, generator=generator), torch.randn(40, 64, generator=generator)
    copied = train[:40] + 0.05 * torch.randn(40, 64, generator=generator)
    pictures = np.zeros((40, 8, 8, 1), np.uint8)
    usual = find_nearest_features(unseen, train)
    for drawn, severity in ((copied, "warning"), (fresh, "fine")):
        found = find_nearest_features(drawn, train)
        finding = check_memorization(pictures, pictures, Nearness(found, usual, "held-out images", 140, 1e-3))
        assert finding.severity == severity
    assert find_nearest_features(copied, train).image[:, 0].tolist() == list(range(40))
    without_self = find_nearest_features(train, train, list(range(140)))
    assert (without_self.image[:, 0] != torch.arange(140)).all()
    assert without_self.distance.isfinite().all()


def command(*words: object, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def values(folder: Path) -> list[dict]:
    (path,) = (folder / "evaluations").glob("*.json")
    return json.loads(path.read_text())["measured"]


@pytest.mark.exhaustive
def test_two_processes_measure_what_one_does(run, tmp_path):
    other = shutil.copytree(run.path, tmp_path / "other")
    asked = ("--metrics", "kid,coverage,held_out", "-n", 50, "--features", "pixels", "--batch", 8, "--device", "cpu")
    launched = ("torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m", "unfog")
    process = command(*launched, "evaluate", other, *asked, UNFOG_CACHE=str(tmp_path / "cache"))
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert out.count("\nkid ") == 1  # the first of them speaks
    run.evaluate("kid,coverage,held_out", n=50, features="pixels", batch=8)
    assert values(other) == values(run.path)


def test_a_signal_ends_it_with_3_and_the_same_command_goes_on(run):
    words = ("evaluate", run.path, "--metrics", "kid", "-n", 160, "--features", "pixels", "--batch", 8)
    words = (*words, "--steps", 8, "--device", "cpu")
    process = Forked(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    drawn = run.path / "evaluations" / "drawn"
    wait_until(lambda: len(list(drawn.glob("*/*.safetensors"))) >= 3 or process.poll() is not None)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 3, err
    some = {path: path.stat().st_mtime_ns for path in drawn.glob("*/*.safetensors")}
    assert 3 <= len(some) < 20
    process = Forked(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "samples exist already" in err
    assert all(path.stat().st_mtime_ns == before for path, before in some.items())
    assert len(list(drawn.glob("*/*.safetensors"))) == 20


def test_metrics_are_split_at_commas():
    assert EvaluationRequest(metrics=("kid, fid", "bits")).metrics == ("kid", "fid", "bits")


def test_noise_of_a_measurement_is_of_its_image_its_level_and_the_seed():
    held_out = HeldOut(torch.zeros(10, 1, 4, 4), NO_CONDITIONS, midpoints(5))

    def first(x0, conditions, u, noise):
        return noise[:, 0, 0, 0], noise[:, 0, 0, 0]

    noise = held_out.losses(first, batch=4)[0]
    assert len(noise.unique()) == 50
    assert torch.equal(held_out.losses(first, batch=10)[0], noise)
    assert not torch.isin(held_out.losses(first, batch=4, seed=1)[0], noise).any()


ASKED = [{}, {"guidance": 3.0}, {"seed": 1}, {"steps": 2}, {"sampler": "ddim"}, {"batch": 5}, {"precision": "bf16"}]


def test_what_is_asked_for_otherwise_is_drawn_and_measured_anew(run):
    for more in ASKED:
        run.evaluate("kid", **{"n": 10, "features": "pixels", "batch": 10, **more})
    assert len(list((run.path / "evaluations" / "drawn").iterdir())) == len(ASKED)
    assert len(list((run.path / "evaluations").glob("*.json"))) == len(ASKED)


def test_what_is_compared_otherwise_is_measured_anew_of_the_same_pictures(run):
    asked = [{}, {"reference": "held-out"}, {"features": "texture"}, {"metrics": "kid,coverage"}]
    for more in asked:
        run.evaluate(**{"metrics": "kid", "n": 10, "features": "pixels", "batch": 10, **more})
    assert len(list((run.path / "evaluations").glob("*.json"))) == len(asked)
    assert len(list((run.path / "evaluations" / "drawn").iterdir())) == 1


def without_held_out():
    """140 pictures of noise to train on, and 40 others."""
    pixels = np.random.default_rng(0).integers(0, 256, (180, 3, 8, 8), dtype=np.uint8)
    train, none = (ImageSet(part, tuple(map(str, range(len(part))))) for part in (pixels[:140], pixels[:0]))
    return Dataset(Data(size=8, channels=3), train, none, None), pixels[140:]


@pytest.mark.parametrize("copied", [True, False])
def test_copies_are_told_where_nothing_is_held_out_by_pixels(copied):
    """Training images say then how near an unseen one usually comes, each without itself."""
    prepared, fresh = without_held_out()
    drawn = (prepared.train.pixels[:40] if copied else fresh).transpose(0, 2, 3, 1)
    assert check_memorization_by_pixels(drawn, prepared, lambda done: None).severity == (
        "warning" if copied else "fine"
    )


@pytest.mark.parametrize(
    ("settings", "said"), [({"wrap": "x"}, True), ({"wrap": "x", "roll": False}, True), ({}, False)]
)
def test_the_search_by_pixels_states_that_it_finds_no_rolled_copies(settings, said):
    prepared, _ = without_held_out()
    prepared = replace(prepared, settings=Data(size=8, channels=3, **settings))
    drawn = np.roll(prepared.train.pixels[:40], 4, axis=3).transpose(0, 2, 3, 1)
    finding = check_memorization_by_pixels(drawn, prepared, lambda done: None)
    assert ("moved around" in finding.evidence) == said


@pytest.mark.parametrize("copied", [True, False])
def test_copies_are_told_where_nothing_is_held_out_by_features(copied):
    prepared, fresh = without_held_out()
    drawn = prepared.train.pixels[:40] if copied else fresh
    of, rows = (lambda pixels: torch.from_numpy(pixels).flatten(1) / 255), np.arange(140)
    real, unseen = of(prepared.train.pixels), of(UnseenImages(prepared).pixels)
    found = check_memorization_by_features(drawn.transpose(0, 2, 3, 1), of(drawn), real, rows, unseen, prepared)
    assert found.severity == ("warning" if copied else "fine")


def test_figures_of_another_arithmetic_are_measured_anew_of_the_same_pictures(run, monkeypatch):
    for arithmetic in (2, 1, 2):
        monkeypatch.setattr("unfog.inference.evaluate.ARITHMETIC", arithmetic)
        run.evaluate("kid", n=10, features="pixels", batch=10)
    assert len(list((run.path / "evaluations").glob("*.json"))) == 2
    assert len(list((run.path / "evaluations" / "drawn").iterdir())) == 1
