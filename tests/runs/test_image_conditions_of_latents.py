"""Images as conditions of runs on latents: the condition stays in pixels, whose squares become channels."""

from dataclasses import replace
from runpy import run_path

import numpy as np
import pytest
import torch
from PIL import Image

import unfog
from random_weights import randomized
from tiny_networks import NETWORKS
from unfog.data.augmentation import AugmentWithConditions
from unfog.data.packs.latent_cache import Normalise
from unfog.errors import RequestError
from unfog.models.autoencoder import AutoencoderModel
from unfog.models.autoencoder_settings import Autoencoder
from unfog.models.image_conditions import ImageInput
from unfog.models.network_settings import build_model
from unfog.pipeline.latents import save_autoencoder
from unfog.values.condition_format import ConditionFormat
from unfog.values.condition_kinds import ColumnFacts
from unfog.values.conditions import Conditions

H, W, FACTOR = 16, 32, 4
NEVER = {"every": -1}
FACTS = (ColumnFacts("grey", "grey", statistics=(1.0, H, W)), ColumnFacts("mask", "mask", ("a", "b"), (1.0, H, W)))


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_of_latents_see_each_pixel_of_a_condition(name):
    format = ConditionFormat(columns=FACTS, image_factor=FACTOR)
    network = build_model(NETWORKS[name], 4, format).eval()
    assert format.input_channels == network.image_input.channels == (2 + 3) * FACTOR**2
    with torch.no_grad():
        network = randomized(network)
    x, noise = torch.randn(1, 4, H // FACTOR, W // FACTOR), torch.zeros(1)
    image = torch.rand(1, 2, H, W).round().requires_grad_()
    network(x, noise, Conditions(image=image)).square().sum().backward()
    assert (image.grad[:, 0] != 0).all()  # a mask has no gradient, as its numbers are compared
    for wrong in (image[..., : W // 2], image[:, :, :4, :8]):
        with pytest.raises(RequestError, match="pixels, and the network takes 32x16"):
            network(x, noise, Conditions(image=wrong))
    with torch.no_grad():
        hidden = network(x, noise, Conditions(image=torch.full_like(image, float("nan"))))
        assert torch.allclose(hidden, network(x, noise, Conditions()), atol=1e-5)


def test_squares_of_pixels_are_channels_behind_each_latent():
    layer = ImageInput(FACTS[1:], FACTOR)
    mask = torch.zeros(1, 1, H, W)
    mask[0, 0, 5, 9] = 1
    channels = layer(torch.zeros(1, 4, H // FACTOR, W // FACTOR), mask)[0, 4:]
    # Label "b" at row 1 and column 1 of the square of the latent (1, 2); "a" everywhere else, and all is known.
    a, b, unknown = channels.split(FACTOR**2)
    assert b.nonzero().tolist() == [[1 * FACTOR + 1, 1, 2]]
    assert torch.equal(a, 1 - b)
    assert not unknown.any()


def test_a_condition_is_mirrored_with_its_latents():
    normalise = Normalise((0.0,), (1.0,), 1.0, flip=True)
    latents = torch.randn(64, 1, 1, 2, 4)
    stored = torch.cat([latents, latents.flip(-1)], 1).half()
    image = torch.randn(64, 2, 8, 16)
    columns = tuple(replace(one, statistics=(1.0, 8, 16)) for one in FACTS)
    torch.manual_seed(0)
    x0, told = AugmentWithConditions(normalise, columns, makes=False).with_conditions(stored, Conditions(image=image))
    mirrored = (x0[:, 0] == stored[:, 1, 0].float()).all((1, 2))
    assert 16 < mirrored.sum() < 48
    assert torch.equal(told.image, torch.where(mirrored[:, None, None, None], image.flip(-1), image))
    torch.manual_seed(0)
    assert torch.equal(normalise(stored)[0], x0)  # the same draws as without conditions


@pytest.fixture
def pairs(tmp_path):
    """Images, masks, and an autoencoder with random weights."""
    rng = np.random.default_rng(0)
    for name in ("images", "masks"):
        (tmp_path / name).mkdir()
    for i in range(24):
        Image.fromarray(rng.integers(0, 2, (H, W), np.uint8)).save(tmp_path / "masks" / f"{i:03}.png")
        Image.fromarray(rng.integers(0, 255, (H, W, 3), np.uint8)).save(tmp_path / "images" / f"{i:03}.png")
    torch.manual_seed(0)
    autoencoder = AutoencoderModel(Autoencoder(factor=FACTOR, latent_channels=4, channels=(8, 8)), 3)
    with torch.no_grad():
        save_autoencoder(tmp_path / "autoencoder", randomized(autoencoder).eval())
    return tmp_path


@pytest.mark.slow
def test_a_run_on_latents_learns_from_images_resumes_to_the_bit_draws_and_is_exported(pairs):
    condition = f"degrade:factor=4,grey,hole,mask={pairs / 'masks'}"
    options = {
        "network": "dit:width=32,depth=1,head_channels=16,patch=2",
        "batch": 4,
        "device": "cpu",
        "preview": NEVER,
        "evaluate": {"every": 2, "images": 2},
    }
    options |= {"condition": condition, "flip": True, "autoencoder_folder": str(pairs / "autoencoder")}
    options |= {"size": f"{W}x{H}"}
    whole = unfog.train(pairs / "images", out=pairs / "whole", steps=3, **options)
    unfog.train(pairs / "images", out=pairs / "part", steps=2, **options)
    resumed = unfog.resume(pairs / "part", steps=3)
    for name, weight in whole.network.state_dict().items():
        assert torch.equal(weight, resumed.network.state_dict()[name]), name
    with torch.no_grad():
        randomized(whole.network)
    picture = np.asarray(Image.open(pairs / "images" / "003.png"))
    asked = {"steps": 2, "guidance": 1}
    nothing = np.asarray(whole.sample(1, **asked))
    for name in ("degrade", "grey"):
        assert not np.array_equal(nothing, np.asarray(whole.sample(1, given={name: picture}, **asked)))
    mask = np.asarray(Image.open(pairs / "masks" / "003.png"))
    assert not np.array_equal(nothing, np.asarray(whole.sample(1, given={"mask": mask}, **asked)))
    # The export compares itself with the run.
    whole.export(pairs / "out")
    described = run_path(str(pairs / "out/sample.py"))["load"](pairs / "out")[0]
    assert described["image_factor"] == FACTOR
    assert described["input"] == [4, H // FACTOR, W // FACTOR]
