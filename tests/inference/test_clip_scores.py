"""CLIP score of a run: of its samples and held-out images by hand, stored, shown, and refused with a remedy."""

import json

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'unfog[text]'")

import unfog
from command import exit_status
from test_image_text import save_image_text
from test_pretrained_text import CAPTIONS, NETWORK, TINY, save_encoder
from unfog.errors import RequestError
from unfog.inference.evaluation_files import Evaluation
from unfog.models.pretrained.image_text import ImageTextModel
from unfog.pipeline.generate import proportional_given
from unfog.pipeline.load_data import load_images
from unfog.process.signals import StopSignals
from unfog.values.condition_kinds import kind_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run with captions, of which some images have none, and a CLIP."""
    folder = tmp_path_factory.mktemp("clip_scores")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("UNFOG_CACHE", str(folder / "cache"))
        images = np.random.default_rng(0).integers(0, 256, (112, 8, 8, 3), np.uint8)
        captions = [text if i % 8 else None for i, text in enumerate((CAPTIONS * 5)[:112])]
        settings = {**TINY, "network": NETWORK, "data": {"held_out": 0.25}, "sampler": {"steps": 2}}
        run = unfog.train(images, conditions={"text": captions}, out=folder / "run", steps=2, **settings)
        plain = unfog.train(images, out=folder / "plain", steps=1, **settings)
        yield run, plain, save_image_text(folder / "model")


def cosine(model, images, captions):
    """Mean cosine of images [N, H, W, 3] that have a caption."""
    known = [i for i, text in enumerate(captions) if text]
    told = model.texts([captions[i] for i in known])
    seen = model.images(torch.from_numpy(np.ascontiguousarray(np.asarray(images)[known].transpose(0, 3, 1, 2))))
    return float((seen * told).sum(1).mean()), len(known)


def test_samples_and_held_out_images_are_measured(made, capsys, tmp_path, monkeypatch):
    run, _, folder = made
    # Parts of one image, so that some have no caption at all.
    monkeypatch.setattr(
        "unfog.inference.clip_scores.in_parts", lambda images: (images[i : i + 1] for i in range(len(images)))
    )
    words = ("--clip-folder", folder, "-n", 16, "--steps", 2, "--device", "cpu", "--out", tmp_path / "out.json")
    assert exit_status("evaluate", run.path, "--metrics", "clip", *words) == 0
    said = capsys.readouterr().out
    assert "CLIP score: cosine by model (sha256 " in said
    stored = json.loads((tmp_path / "out.json").read_text())
    (one,) = stored["obeys"]
    assert (one["condition"], one["measure"]) == ("text", "CLIP score")
    model = ImageTextModel(str(folder), torch.device("cpu"), "clip_folder")
    with StopSignals() as stop:
        dataset, _ = load_images(run.config, stop)
    ((_, tokens),) = proportional_given(run.config.conditions, dataset.train, 16)
    facts = run.config.conditions.text
    asked = [kind_of("text").show(facts, row) for row in tokens]
    asked = [asked[i % len(asked)] for i in range(16)]
    images = run.sample(16, prompt=[text or "" for text in asked], steps=2, guidance=1)
    value, n = cosine(model, images, asked)
    assert (one["n"], one["value"]) == (n, pytest.approx(value, abs=1e-3))
    held = dataset.held_out
    captions = [kind_of("text").show(facts, row) for row in held.columns["text"].values.tolist()]
    real, n_real = cosine(model, held.pixels[:].transpose(0, 2, 3, 1), captions)
    assert (one["n_real"], one["real"]) == (n_real, pytest.approx(real, abs=1e-5))
    assert n_real < len(held), "images without a caption are left out"
    # It is stored by the contents of the folder, and read again.
    (path,) = (run.path / "evaluations").glob("*.json")
    assert Evaluation.read(path).obeys[0].value == one["value"]
    with (folder / "preprocessor_config.json").open("w") as file:
        json.dump({"image_mean": [0.1, 0.2, 0.3]}, file)
    other = run.evaluate("clip", n=16, steps=2, clip_folder=str(folder))
    assert other.obeys[0].value != one["value"]
    both = run.evaluate("clip,worth", n=16, steps=2, clip_folder=str(folder))
    assert both.obeys[0].value == other.obeys[0].value


def test_what_cannot_be_measured_is_refused(made, tmp_path):
    run, plain, folder = made
    for one, asked, said in (
        (run, {"metrics": "clip"}, "needs --clip-folder"),
        (run, {"metrics": "kid", "clip_folder": str(folder)}, "add it to --metrics"),
        (plain, {"metrics": "clip", "clip_folder": str(folder)}, "of runs with captions"),
        (plain, {"clip_folder": str(folder)}, "of runs with captions"),
        (run, {"metrics": "clip", "clip_folder": str(save_encoder(tmp_path / "bert"))}, "we read clip"),
        (run, {"metrics": "clip", "clip_folder": str(tmp_path / "none")}, "config.json cannot be read"),
    ):
        with pytest.raises(RequestError, match=said):
            one.evaluate(n=16, steps=1, **asked)
    assert exit_status("evaluate", tmp_path, "--reference", tmp_path, "--metrics", "clip") == 2
