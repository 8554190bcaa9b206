"""Exports as a run: Unfog samples from them and trains on from them; nothing else of the run is in them."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import unfog
from conftest import FEW_PICTURES
from test_export import DIT, run_of
from test_export_conditions import masked
from unfog.config.presets import preset
from unfog.config.toml import update
from unfog.data.settings import parse_condition
from unfog.errors import RequestError, RunError
from unfog.export.source_code import usage
from unfog.inference.exports import small_run
from unfog.inference.exports.small_run import settings_to_hand_on, write_small_run
from unfog.inference.guide import is_guided_by_itself
from unfog.inference.loaded_run import SWEEP_FILE
from unfog.inference.run import Run
from unfog.process.run_folder import RunFolder
from unfog.serve.controls import _NOT_FROM_PAGE  # settings that are paths
from unfog.values.unknown import mask_to_text

pytestmark = pytest.mark.slow
QUICK = {"steps": 3, "batch": 4, "seed": 1, **FEW_PICTURES}
NETWORK = "dit:depth=1,width=32,patch=4"


@pytest.fixture(scope="module")
def handed_on(tmp_path_factory):
    """A run of two classes, and its export as a run."""
    place = tmp_path_factory.mktemp("small")
    numbers = np.random.default_rng(0)
    for name in ("ant", "bee"):
        (place / "photos" / name).mkdir(parents=True)
        for i in range(6):
            picture = Image.fromarray(numbers.integers(0, 256, (8, 8, 3), dtype=np.uint8))
            picture.save(place / "photos" / name / f"{i}.png")
    run = unfog.train(place / "photos", out=place / "run", network=NETWORK, size=8, **QUICK)
    run.export(place / "out", format="run", license="mit", steps=3)
    return place


def pixels(run: Run) -> np.ndarray:
    return np.asarray(run.sample(4, steps=3)).astype(int)


def test_an_export_draws_the_samples_of_its_run_but_for_16_bits(handed_on):
    ours, theirs = unfog.load(handed_on / "run"), unfog.load(handed_on / "out")
    assert theirs.classes == ("ant", "bee")
    assert theirs.config.sampler.steps == 3
    assert np.abs(pixels(ours) - pixels(theirs)).max() <= 1
    for name, weight in ours.network.state_dict().items():
        assert torch.equal(theirs.network.state_dict()[name], weight.half().float())


def test_an_export_has_no_place_of_this_machine_and_half_the_bytes(handed_on):
    files = {path.relative_to(handed_on / "out").as_posix(): path for path in (handed_on / "out").rglob("*.*")}
    whole = handed_on / "run/checkpoints/00000003/ema.safetensors"
    small = files.pop("checkpoints/00000003/ema.safetensors")
    assert small.stat().st_size < 0.6 * whole.stat().st_size
    assert set(files) == {"README.md", "config.toml", "samples.png", "checkpoints/00000003/manifest.json"}
    for name in set(files) - {"samples.png"}:
        assert str(handed_on) not in files[name].read_text()
    assert 'source = "photos"' in files["config.toml"].read_text()
    assert "unfog train SOURCE --init FOLDER" in files["README.md"].read_text()
    uploaded = usage("run", "me/photos", {"classes": []}, False, unfog.load(handed_on / "out").config.image_format, "")
    assert "hf download me/photos --local-dir FOLDER\nunfog sample FOLDER" in uploaded


def test_a_run_begins_with_the_weights_of_an_export_and_none_goes_on_from_it(handed_on, tmp_path):
    begun = unfog.train(handed_on / "photos", out=tmp_path / "next", init=handed_on / "out", **QUICK)
    first = Run(begun.path, step=0).network.state_dict()
    theirs = unfog.load(handed_on / "out").network.state_dict()
    assert all(torch.equal(first[name], weight) for name, weight in theirs.items())
    raw = {"folder": str(handed_on / "out"), "weights": "raw"}
    with pytest.raises(RequestError, match="EMA weights alone"):
        unfog.train(handed_on / "photos", out=tmp_path / "raw", init=raw, **QUICK)
    with pytest.raises(RequestError, match="EMA weights alone"):
        unfog.load(handed_on / "out", weights="raw")
    with pytest.raises(RequestError, match=r"no state of training .* --init"):
        unfog.resume(handed_on / "out")
    with pytest.raises(RequestError, match="no record of its training"):
        unfog.doctor(handed_on / "out")


def test_damage_of_an_export_is_found(handed_on, tmp_path):
    copy = Path(shutil.copytree(handed_on / "out", tmp_path / "copy"))
    weights = copy / "checkpoints/00000003/ema.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(RunError, match="sha256 differs"):
        unfog.load(copy)


def test_a_pipeline_of_our_own_is_not_taken_for_one_of_diffusers(handed_on, tmp_path):
    """Its scheduler is one of many that the network suits, so that another objective would be read off it."""
    (tmp_path / "unet").mkdir()
    (tmp_path / "unet/config.json").write_text('{"_class_name": "UNet2DModel"}')
    (tmp_path / "unet/diffusion_pytorch_model.safetensors").touch()
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "scheduler/scheduler_config.json").write_text('{"_class_name": "DPMSolverMultistepScheduler"}')
    (tmp_path / "model_index.json").write_text('{"_class_name": ["pipeline", "UnfogPipeline"]}')
    for use in (unfog.load, lambda folder: unfog.train(handed_on / "photos", out=tmp_path / "o", init=folder, **QUICK)):
        with pytest.raises(RequestError, match=r"do not state its objective.*--format run"):
            use(tmp_path)


@pytest.fixture(scope="module")
def guided(tmp_path_factory):
    """A run without classes, which its own earlier EMA guides, with snapshots of its EMAs."""
    return unfog.train(
        np.random.default_rng(1).integers(0, 256, (100, 8, 8, 3), dtype=np.uint8),  # enough to hold some out
        out=tmp_path_factory.mktemp("guided") / "run",
        network=NETWORK,
        size=8,
        **QUICK | {"steps": 6, "ema_snapshots": {"every": 1}},
    )


PLACES = (
    *("/tmp/a b/private/", "~/private/", "s3://private/x/", "../private/"),
    *("\\\\server\\private\\", "C:\\private\\"),
)
SETTINGS = {
    "source": "{}lab",
    "data.labels": "{}lab.csv:file,label",
    "data.condition": "grey,{}lab.csv:age,stain:category,degrade:factor=2,depth={}depths:mask",
    "evaluate.features": "{}lab.pt",
    "log.sinks": "custom:path=private.Tracker",
}


@pytest.mark.parametrize("place", PLACES)
def test_no_folder_is_left_in_the_settings(tmp_path, place):
    config = preset("default")
    for name in (*_NOT_FROM_PAGE, *SETTINGS):
        value = SETTINGS.get(name, "{}lab").replace("{}", place)
        for part in reversed(name.split(".")):
            value = {part: (value,) if part == "sinks" else value}
        config = update(config, value, "")
    handed = settings_to_hand_on(config, config.sampler)
    RunFolder(tmp_path).write_config(handed)
    text = (tmp_path / "config.toml").read_text()
    assert not [word for word in ("private", "server", "a b", "~", "..", "C:") if word in text]
    assert (handed.source, handed.data.labels) == ("lab", "lab.csv:file,label")
    assert handed.data.condition == "grey,degrade:factor=2,depth=depths:mask,lab.csv:age,stain:category"
    assert parse_condition(handed.data.condition) == ("lab.csv", {"age": "", "stain": "category"})
    assert (handed.evaluate.features, handed.log.sinks, handed.checkpoint.mirror) == ("texture", (), "")


def test_a_mask_is_handed_on_and_decoded(handed_on, tmp_path):
    """Its text is base64, in which "/" is a digit."""
    masks = (np.random.default_rng(seed).random((4, 8, 8)) < 0.3 for seed in range(1000))
    run = masked(mask=next(mask for mask in masks if "+/" in mask_to_text(mask)), source="photos")
    run.checkpoint = unfog.load(handed_on / "run").checkpoint
    write_small_run(run, run.network, run.config.sampler, tmp_path)
    known = RunFolder(tmp_path).read_config().data.known_in_samples()
    assert np.array_equal(known, run.config.data.known_in_samples())
    run.config = replace(run.config, data=replace(run.config.data, unknown_mask="damage"))
    (tmp_path / "other").mkdir()
    with pytest.raises(RequestError, match="unknown_mask is damaged"):
        write_small_run(run, run.network, run.config.sampler, tmp_path / "other")


def test_raw_weights_are_refused(handed_on, tmp_path):
    run = unfog.load(handed_on / "run", weights="raw")
    with pytest.raises(RequestError, match="--weights raw was given; omit it"):
        run.export(tmp_path / "out", format="run")
    assert not (tmp_path / "out").exists()


def test_another_width_is_stored_without_the_measurements_of_the_first(guided, tmp_path):
    width = 0.2
    run = unfog.load(guided.path, ema=width)
    run.export(tmp_path / "asked", format="run", steps=3)
    swept = Path(shutil.copytree(guided.path, tmp_path / "run"))
    unfog.load(swept).export(tmp_path / "plain", format="run", steps=3)
    (swept / SWEEP_FILE).write_text(f'{{"width": {width}}}')
    unfog.load(swept).export(tmp_path / "swept", format="run", steps=3)
    shutil.rmtree(RunFolder(swept).averages)  # so that the EMA of the checkpoint is used
    unfog.load(swept).export(tmp_path / "lost", format="run", steps=3)
    for name, expected in {"asked": width, "swept": width, "plain": 0.1, "lost": 0.1}.items():
        found = unfog.load(tmp_path / name)
        assert found.config.ema.width == expected
        measured = found.checkpoint.held_out_loss, found.checkpoint.value
        assert (measured == (None, None)) == (expected == width)
    for key, weight in unfog.load(tmp_path / "asked").network.state_dict().items():
        assert torch.equal(weight, run.network.state_dict()[key].half().float())


@pytest.mark.parametrize("format", ["run", "safetensors"])
def test_an_export_says_that_it_has_no_guide(guided, handed_on, tmp_path, capsys, format):
    unfog.load(guided.path).export(tmp_path / "out", format=format, steps=3)
    assert "to keep the guide, copy the folder of the run" in capsys.readouterr().err
    assert "its samples are not guided" in (tmp_path / "out/README.md").read_text()
    assert "guided" not in (handed_on / "out/README.md").read_text()


@pytest.mark.parametrize(
    "change",
    [{"weights": "raw"}, {"guide": "none"}, {"every": 0}, {"every": 1000}],
    ids=lambda change: next(iter(change)),
)
def test_a_run_without_a_guide_of_its_own_loses_none(guided, change):
    run = unfog.load(guided.path)
    assert is_guided_by_itself(run)
    snapshots = replace(run.config.ema_snapshots, every=change.get("every", run.config.ema_snapshots.every))
    run.config = replace(run.config, guide=change.get("guide", "auto"), ema_snapshots=snapshots)
    run.weights = change.get("weights", "ema")
    assert not is_guided_by_itself(run)


def test_the_tolerance_allows_the_depth_of_16_bits_and_finds_a_wrong_weight(handed_on, tmp_path, monkeypatch):
    run = unfog.load(handed_on / "run")
    deep = run_of(network=replace(DIT, depth=40), source="photos")
    deep.checkpoint = run.checkpoint
    deep.export(tmp_path / "deep", format="run", steps=1)
    assert 1e-3 < deep.export_difference < 5e-3  # beyond the tolerance of other formats, and far from its own
    monkeypatch.setattr(small_run, "_half", lambda tensor: tensor * 1.05)
    with pytest.raises(RunError, match="differs from the run"):
        run.export(tmp_path / "out", format="run", steps=3)
