"""Exports as a run: Unfog samples from them and trains on from them; nothing else of the run is in them."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import unfog
from conftest import FEW_PICTURES
from unfog.errors import RequestError, RunError
from unfog.export.source_code import usage
from unfog.inference.run import Run

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
