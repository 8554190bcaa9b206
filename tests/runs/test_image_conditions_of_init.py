"""Images as conditions that are added to trained weights: their inputs begin at zero."""

import numpy as np
import pytest
import torch
from PIL import Image

import unfog
from conftest import FEW_PICTURES
from random_weights import randomized
from tiny_networks import NETWORKS
from unfog.config.schema import Config
from unfog.data.settings import Data
from unfog.errors import RequestError
from unfog.pipeline.build import build_network
from unfog.runs.weights.weights_source import WeightsSource
from unfog.values.condition_kinds import ColumnFacts
from unfog.values.conditions import Conditions

H, W = 8, 16
AGE = ColumnFacts("age", "number", statistics=(50.0, 20.0, 20.0, 89.0))
GREY = ColumnFacts("grey", "grey", statistics=(1.0, H, W))
MASK = ColumnFacts("mask", "mask", ("0", "1", "2"), (1.0, H, W))
DEGRADE = ColumnFacts("degrade", "degrade", statistics=(3.0, H, W, 2.0))


def config_of(network, columns):
    return Config(network=network, data=Data(size=f"{W}x{H}", channels=3), columns=columns)


@pytest.mark.parametrize("name", NETWORKS)
def test_outputs_are_those_of_the_weights_until_images_are_trained(name, tmp_path):
    before = config_of(NETWORKS[name], (AGE, GREY))
    after = config_of(NETWORKS[name], (AGE, DEGRADE, GREY, MASK))
    with torch.no_grad():
        old = randomized(build_network(before).eval())
    state = old.state_dict()
    source = WeightsSource(before, tmp_path / "model.safetensors", "weights")
    fitted, (choice,) = source.fit(dict(state), after)
    assert (choice.name, choice.value) == ("images", "degrade, grey, mask")
    assert "degrade, mask begin at zero" in choice.reason
    new = build_network(after).eval()
    new.load_state_dict(fitted)
    x, noise, rng = torch.randn(2, 3, H, W), torch.tensor([-0.5, 1.0]), torch.Generator().manual_seed(0)
    grey, small = torch.rand(2, 1, H, W, generator=rng), torch.rand(2, 3, H, W, generator=rng)
    mask = torch.randint(0, 3, (2, 1, H, W), generator=rng).float()
    small[1, :, 4:] = grey[0, :, :4] = mask[0, :, 2:5] = float("nan")  # not known
    age = torch.tensor([[30.0], [float("nan")]])
    with torch.no_grad():
        expected = old(x, noise, Conditions(numbers=age, image=grey))
        found = new(x, noise, Conditions(numbers=age, image=torch.cat([small, grey, mask], 1)))
        # The norm of weights of EDM2 has a constant of 1e-4, whose share depends on their number.
        limit = 1e-3 if name == "mpunet" else 1e-5
        assert (found - expected).abs().max() < limit * expected.abs().max()
        # What the weights knew still counts, and its place is right.
        assert not torch.allclose(found, new(x, noise, Conditions(numbers=age)), atol=1e-3)
    # The new inputs learn.
    new(x, noise, Conditions(numbers=age, image=torch.cat([small, grey, mask], 1))).square().sum().backward()
    layer = new.get_parameter(f"{new.ends[0]}.weight")
    assert (layer.grad.flatten(2).abs().sum((0, 2)) if layer.ndim == 4 else layer.grad.abs().sum(0)).min() > 0


def test_weights_of_another_shape_are_refused(tmp_path):
    before, after = (config_of(NETWORKS["unet"], columns) for columns in ((), (GREY,)))
    state = build_network(before).state_dict()
    source = WeightsSource(before, tmp_path / "model.safetensors", "weights")
    for name, spoiled in {
        "conv_in.weight": torch.zeros(8, 5, 3, 3),
        "conv_out.weight": torch.zeros(3, 9, 3, 3),
    }.items():
        with pytest.raises(RequestError, match="does not fit its own settings"):
            source.fit(state | {name: spoiled}, after)
    with pytest.raises(RequestError, match="does not fit its own settings"):
        source.fit({name: weight for name, weight in state.items() if name != "conv_in.weight"}, after)


@pytest.mark.parametrize("name", ["edm", "edm2", "ddpm-pytorch", "diffusers-dit"])
def test_networks_of_other_programs_refuse_images(name):
    from unfog.models.settings import DdpmPytorch, DiffusersDiT, Edm, Edm2

    network = {"edm": Edm, "edm2": Edm2, "ddpm-pytorch": DdpmPytorch, "diffusers-dit": DiffusersDiT}[name]()
    with pytest.raises(RequestError, match="grey is an image as a condition"):
        build_network(config_of(network, (GREY,)))


@pytest.mark.slow
def test_an_image_is_added_to_a_trained_run_and_the_run_resumes_to_the_bit(tmp_path, capsys):
    (tmp_path / "images").mkdir()
    for i, pixels in enumerate(np.random.default_rng(0).integers(0, 256, (24, H, W, 3), np.uint8)):
        Image.fromarray(pixels).save(tmp_path / "images" / f"{i}.png")
    tiny = {"batch": 8, "device": "cpu", "evaluate": {"every": -1}, **FEW_PICTURES}
    first = unfog.train(
        tmp_path / "images", out=tmp_path / "first", steps=2, network="tiny", size=f"{W}x{H}", condition="grey", **tiny
    )
    capsys.readouterr()
    options = tiny | {"init": str(first.folder.path), "condition": "degrade:factor=2,grey"}
    whole = unfog.train(tmp_path / "images", out=tmp_path / "whole", steps=3, **options)
    said = "".join(capsys.readouterr())
    assert "degrade begins at zero" in said
    unfog.train(tmp_path / "images", out=tmp_path / "part", steps=2, **options)
    resumed = unfog.resume(tmp_path / "part", steps=3)
    for name, weight in whole.network.state_dict().items():
        assert torch.equal(weight, resumed.network.state_dict()[name]), name
    with pytest.raises(RequestError, match="were trained with grey, an image as a condition"):
        unfog.train(tmp_path / "images", out=tmp_path / "lost", steps=1, **options | {"condition": "degrade:factor=2"})
    assert not (tmp_path / "lost").exists()
