"""How the objects of the package show themselves: arrays of samples, `repr`, and HTML in notebooks."""

import base64
import re
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

import unfog
from conftest import NETWORK
from unfog.diffusion.sampler import Sampler
from unfog.errors import RequestError
from unfog.inference.ema_sweep import EmaSweepResult, WidthResult
from unfog.inference.evaluation_files import Evaluation
from unfog.inference.samples import Samples
from unfog.inference.tune import TuneResult
from unfog.reporting.findings import Finding
from unfog.reporting.notebook import LiveText, figure, preformatted

IMAGES = np.random.default_rng(0).integers(0, 256, (12, 8, 8, 3), np.uint8)
SETTINGS = {"size": 8, "batch": 4, "lr": 1e-3, "network": NETWORK, "preview": {"images": 1}}


def shown(html: str) -> Image.Image:
    (found,) = re.findall(r'src="data:image/png;base64,([^"]+)"', html)
    return Image.open(BytesIO(base64.b64decode(found)))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    place = tmp_path_factory.mktemp("shown")
    return unfog.train(IMAGES, out=place / "run <&>", steps=2, ema_snapshots={"every": 1}, **SETTINGS)


@pytest.mark.slow
def test_samples_are_an_array_and_give_pil_images(run):
    samples = run.sample(num_samples=3, num_inference_steps=2, batch_size=2, random_seed=1)
    assert isinstance(samples, np.ndarray)
    assert np.array_equal(samples, run.sample(3, steps=2, batch=2, seed=1))
    images = samples.pil()
    assert [(one.mode, one.size) for one in images] == [("RGB", (8, 8))] * 3
    assert np.array_equal(np.stack([np.asarray(one) for one in images]), samples)
    assert np.array_equal(np.asarray(samples[2].pil()), samples[2])
    assert repr(samples) == (
        "<samples: 3 images of 8x8 pixels, run <&>, step 2, ema, dpmpp 2 steps, guidance 2, guide auto, seed 1; "
        "uint8 [3, 8, 8, 3]>"
    )
    assert repr(samples[:1]).startswith("<samples: 1 image of 8x8 pixels, run <&>, step 2")


def test_what_is_computed_from_samples_is_an_array_like_any_other():
    samples = Samples.of(IMAGES, "caption")
    scaled = samples / 255
    assert repr(scaled) == repr(IMAGES / 255)
    assert scaled._repr_html_() is None
    with pytest.raises(RequestError, match="float64 of shape 12x8x8x3"):
        scaled.pil()
    assert samples.mean() == IMAGES.mean()
    assert Samples.of(IMAGES[..., :1], "").pil()[0].mode == "L"


def test_a_grid_in_html_is_bounded_and_escaped():
    html = Samples.of(IMAGES, "a <b>")._repr_html_()
    assert "12 images of 8x8 pixels, a &lt;b&gt;" in html
    assert shown(html).width > 100  # small images are enlarged
    large = np.zeros((300, 256, 512, 1), np.uint8)
    html = figure(large, "large")
    assert shown(html).size == (6 * 128 + 5 * 2, 6 * 64 + 5 * 2)
    assert "large (the first 36 of 300)" in html


def test_a_run_says_what_it_is_and_shows_its_newest_preview(run):
    assert repr(run) == (f"<run {run.path}: unet, 0.05M parameters; 8x8 RGB; no classes; ema weights of step 2 on cpu>")
    html = run._repr_html_()
    assert "run &lt;&amp;&gt;" in html
    assert "ema of step 2" in html
    assert np.array_equal(np.asarray(shown(html)), np.asarray(Image.open(run.folder.newest_preview)))
    for preview in (run.path / "samples").glob("*.png"):
        preview.unlink()
    assert "<img" not in run._repr_html_()


@pytest.mark.slow
def test_results_say_what_they_are_in_a_line():
    plan = unfog.plan(IMAGES, steps=2, device="h200", **SETTINGS)
    assert repr(plan) == "<plan: 0.05M parameters, 12 images of 8x8, batches of 4>"
    assert "memory" in plan._repr_html_()
    tuned = TuneResult(Sampler(kind="heun", steps=5), {"schedule": 0.02, "tuned": 0.01}, 0.001, 7)
    assert repr(tuned) == "<noise levels of heun in 5 steps, by error: tuned 0.0100, schedule 0.0200>"
    assert "RMS" in tuned._repr_html_()
    widths = (WidthResult(0.05, 0.3, None, 0.0), WidthResult(0.1, 0.2, None, 0.0))
    swept = EmaSweepResult("held_out_loss", 9, 1000, "", 0.1, widths)
    assert repr(swept) == "<EMA widths at step 1,000: 0.1 is the best of 2, held_out_loss 0.2>"
    assert repr(Evaluation(5, {}, [])) == "<evaluation of step 5: no metrics>"
    assert "<pre>" in Evaluation(5, {}, [])._repr_html_()
    finding = Finding("data.count", "hint", "3 images", "add some")
    assert repr([finding]) == "[<finding data.count, hint: 3 images; add some>]"
    assert preformatted(["a", "<b>"]) == "<pre>a\n&lt;b&gt;</pre>"
    assert not LiveText.available()


@pytest.mark.parametrize("name", unfog.__all__)
def test_no_public_name_shows_an_address_alone(name):
    thing = getattr(unfog, name)
    assert name == "__version__" or (thing.__doc__ and name in repr(thing))
