"""Seamless images: networks whose images continue at their other side, random rolls, and what refuses them."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import unfog
from conftest import FEW_PICTURES
from random_weights import randomized
from unfog.checks.run.loss_checks import _overfitting_remedy  # else a run has to overfit first
from unfog.checks.run.run_record import RunRecord
from unfog.checks.settings.settings_checks import check_edges
from unfog.config.resume_rules import check_changes, settings_digests
from unfog.config.schema import Config
from unfog.config.validate import check_request
from unfog.data.augmentation import Augment
from unfog.data.settings import Data
from unfog.device.sharded_rng import rows_of
from unfog.errors import RequestError
from unfog.models.autoencoder import AutoencoderModel
from unfog.models.autoencoder_settings import Autoencoder
from unfog.models.edm2_unet import MPUNetModel
from unfog.models.layers import Conv2d, pad
from unfog.models.network_settings import CustomNetwork, build_model
from unfog.models.settings import FOREIGN_NETWORKS, DiT, MPUNet, UNet
from unfog.pipeline.build import build_network
from unfog.pipeline.latents import save_autoencoder
from unfog.training.precision import HalfWeights
from unfog.values.condition_format import ConditionFormat
from unfog.values.image_format import BYTES

UNET = UNet(channels=(16, 32, 32), attention=(False, False, True), head_channels=8, norm_groups=4)
# With the shifts that it can be compared at: multiples of its lowest level, or of its patch.
NETWORKS = {
    "unet": (UNET, 4),
    "unet-ddpm": (replace(UNET, downsample_padding=0, scale_shift=False), 4),
    "mpunet": (MPUNet(channels=(8, 16, 16), attention=(False, False, True), head_channels=8), 4),
    "dit": (DiT(width=32, depth=2, head_channels=16), 2),
    "dit-patch4": (DiT(width=32, depth=2, head_channels=16, patch=4, modulation="block"), 4),
}
SHIFTS = {"x": (0, 12), "y": (8, 0), "xy": (4, 20)}


def network(name: str, wrap: str) -> torch.nn.Module:
    built = build_model(NETWORKS[name][0], 2, ConditionFormat.numbered(3), wrap=wrap)
    model = randomized(built).eval()
    return model if name == "mpunet" else model.double()  # whose unit rows are float32


def output(model: torch.nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        y: Tensor = model(x.to(next(model.parameters()).dtype), torch.tensor([1.5, 300.0]), torch.tensor([0, 2]))
    return y


def images(height: int = 24, width: int = 40) -> Tensor:
    return torch.randn(2, 2, height, width, generator=torch.Generator().manual_seed(1)).double()


# Networks.


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("wrap", SHIFTS)
def test_a_rolled_image_gives_the_rolled_output(name, wrap):
    # Computed in float64, and equal to the bit in float32: sums over pixels, of norms and attention, depend on their
    # order in the last bits. `mpunet` computes in float32 alone.
    model, x = network(name, wrap), images()
    y, rolled = output(model, x), output(model, x.roll(SHIFTS[wrap], (2, 3)))
    if name == "mpunet":
        torch.testing.assert_close(rolled, y.roll(SHIFTS[wrap], (2, 3)), atol=2e-5, rtol=0)
    else:
        assert torch.equal(rolled.float(), y.roll(SHIFTS[wrap], (2, 3)).float())
    assert y.std() > 0.1


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(("wrap", "shift"), [("", (4, 0)), ("", (0, 4)), ("x", (4, 0)), ("y", (0, 4))])
def test_an_axis_that_is_not_wrapped_keeps_its_edges(name, wrap, shift):
    model, x = network(name, wrap), images()
    difference = output(model, x.roll(shift, (2, 3))) - output(model, x).roll(shift, (2, 3))
    assert difference.abs().max() > 1e-2


@pytest.mark.parametrize("name", NETWORKS)
def test_smaller_shifts_are_learned_and_not_given(name):
    # As docs/guide.md says: a network that halves or takes patches has a grid.
    model, x = network(name, "xy"), images()
    difference = output(model, x.roll(1, 3)) - output(model, x).roll(1, 3)
    assert difference.abs().max() > 1e-2


def test_weights_are_those_of_a_network_without_wrap():
    for settings, _ in NETWORKS.values():
        states = []
        for wrap in ("", "xy"):
            torch.manual_seed(0)
            states.append(build_model(settings, 2, wrap=wrap).state_dict())
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_every_convolution_with_a_margin_is_wrapped():
    for name in NETWORKS:
        model = network(name, "x")
        margins = [
            module for module in model.modules() if isinstance(module, torch.nn.Conv2d) and max(module.kernel_size) > 1
        ]
        assert all(isinstance(module, Conv2d) and module.wrap == "x" for module in margins)
        assert bool(margins) == name.startswith("unet")


def test_a_convolution_wraps_as_torch_does():
    torch.manual_seed(0)
    x, ours, theirs = (
        images().float(),
        Conv2d(2, 5, 3, padding=1),
        torch.nn.Conv2d(2, 5, 3, 1, 1, padding_mode="circular"),
    )
    theirs.load_state_dict(ours.state_dict())
    ours.wrap = "xy"
    torch.testing.assert_close(ours(x), theirs(x))


def test_pad_continues_one_axis_and_fills_the_other_with_zeros():
    x = torch.arange(6.0).view(1, 1, 2, 3)
    assert pad(x, (1, 1, 1, 0), "x")[0, 0].tolist() == [[0, 0, 0, 0, 0], [2, 0, 1, 2, 0], [5, 3, 4, 5, 3]]
    assert pad(x, (1, 0, 1, 0), "y")[0, 0].tolist() == [[0, 3, 4, 5], [0, 0, 1, 2], [0, 3, 4, 5]]
    assert torch.equal(pad(x, (1, 2, 1, 0), ""), F.pad(x, (1, 2, 1, 0)))


def test_gradient_checkpointing_and_gradients_know_of_it():
    model = build_model(UNET, 2, wrap="xy")
    model.load_state_dict(randomized(model).state_dict())
    x = images().float()
    grads = []
    for model.checkpointing in (False, True):
        model.zero_grad()
        model(x, torch.ones(2)).square().mean().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads))


def test_copies_of_16_bits_are_of_wrapped_convolutions_too():
    model = build_model(UNET, 2, wrap="x")
    copies = HalfWeights(model, torch.bfloat16)
    layers = [layer for layer in model.modules() if isinstance(layer, torch.nn.Conv2d | torch.nn.Linear)]
    assert len(copies._copies) == sum(1 + (layer.bias is not None) for layer in layers)
    x = images().float()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        expected = model.conv_in(x)
        with copies.in_use():
            assert torch.equal(model.conv_in(x), expected)


# Rolls.


def numbered(n: int = 64, height: int = 6, width: int = 10) -> Tensor:
    """Images whose pixels differ from each other."""
    return torch.arange(height * width, dtype=torch.uint8).view(1, 1, height, width).repeat(n, 1, 1, 1)


@pytest.mark.parametrize("wrap", ["x", "y", "xy"])
def test_training_images_are_rolled_exactly_along_the_axes_of_wrap(wrap):
    torch.manual_seed(0)
    pixels = numbered()
    x0, condition = Augment.from_settings(Data(size="10x6", channels=1, wrap=wrap))(pixels)
    plain = BYTES.to_model(pixels)
    shifts = set()
    for image, before in zip(x0, plain):
        down, across = divmod(int((image == before.flatten()[0]).flatten().nonzero()), 10)
        assert torch.equal(image, before.roll((down, across), (1, 2)))
        shifts.add((down, across))
    assert condition is None
    assert {down for down, _ in shifts} == ({*range(6)} if "y" in wrap else {0})
    assert {across for _, across in shifts} == ({*range(10)} if "x" in wrap else {0})


def test_rolls_are_off_without_wrap_and_by_their_setting():
    for data in (Data(wrap="none"), Data(wrap="xy", roll=False)):
        state = torch.get_rng_state()
        x0, _ = Augment.from_settings(data)(numbered())
        assert torch.equal(x0, BYTES.to_model(numbered()))
        assert torch.equal(torch.get_rng_state(), state)


def test_rolls_do_not_depend_on_how_a_batch_is_split():
    augment, pixels = Augment(roll="xy"), numbered(8)
    torch.manual_seed(3)
    whole, _ = augment(pixels)
    parts = []
    for start in (0, 5):
        torch.manual_seed(3)
        size = 5 if start == 0 else 3
        with rows_of(start, 8):
            parts.append(augment(pixels[start : start + size])[0])
    assert torch.equal(torch.cat(parts), whole)


# Settings.


@pytest.mark.parametrize("changes", [{"crop": 0.1}, {"augment": 0.15}, {"aspect": "keep"}])
def test_what_cuts_or_turns_the_edges_is_refused(changes):
    with pytest.raises(RequestError, match=f"wrap = x needs whole images, and {next(iter(changes))}"):
        Data(wrap="x", **changes)


@pytest.mark.parametrize("settings", [*(kind() for kind in FOREIGN_NETWORKS), CustomNetwork(path="torch.nn.Identity")])
def test_other_networks_are_refused(settings):
    with pytest.raises(RequestError, match="wrap = xy needs a network"):
        build_model(settings, 3, wrap="xy")
    with pytest.raises(RequestError, match="wrap = xy needs a network"):
        check_request(Config(source="fashion", network=settings, data=Data(wrap="xy")))


CODEC = Autoencoder(factor=4, channels=(8, 8), norm_groups=4)


def test_an_autoencoder_is_refused():
    with pytest.raises(RequestError, match="wrap = x is not for autoencoders"):
        check_request(Config(source="fashion", data=Data(wrap="x"), autoencoder=CODEC))


def test_latents_are_refused(tmp_path):
    save_autoencoder(tmp_path / "autoencoder", AutoencoderModel(CODEC, 1))
    with pytest.raises(RequestError, match=r"wrap = x joins the edges of pixels.*omit --wrap"):
        check_request(Config(source="fashion", data=Data(wrap="x"), autoencoder_folder=str(tmp_path / "autoencoder")))


def test_digests_and_packs_do_not_know_a_run_without_wrap():
    assert settings_digests(Config()) == settings_digests(Config(data=Data(wrap="none", roll=True)))
    assert settings_digests(Config()) != settings_digests(Config(data=Data(wrap="x")))
    assert Data(wrap="xy").later_key == Data().later_key


def test_a_resume_keeps_its_wrap():
    before, now = Config(data=Data(wrap="xy")), Config(data=Data(wrap="x"))
    for force in (False, True):
        with pytest.raises(RequestError, match=r"data.wrap is 'xy' in this run and cannot become 'x' on resume"):
            check_changes(before, now, force)
    assert check_changes(before, Config(data=Data(wrap="xy", roll=False)))


def test_the_start_warns_of_images_with_a_seam():
    ramp = torch.linspace(-1, 1, 16).expand(3, 1, 16, 16)
    wave = (2 * math.pi * torch.arange(16) / 16).sin().expand(3, 1, 16, 16)
    assert check_edges(wave, "xy").severity == "fine"
    found = check_edges(ramp, "xy")
    assert (found.code, found.severity) == ("settings.wrap", "warning")
    assert "omit x from wrap" in found.remedy
    assert check_edges(ramp, "y").severity == "fine"


def test_checks_recommend_no_augmentation_that_is_refused():
    for settings, advised in (({}, True), ({"wrap": "xy"}, False), ({"unknown": "nan"}, False)):
        config = Config(data=Data(size=8, channels=1, **settings))
        remedy = _overfitting_remedy(RunRecord(Path("run"), config))
        assert ("--data.augment" in remedy) == advised
        assert "--flip" in remedy


@pytest.mark.slow
def test_a_run_its_resume_and_what_starts_from_it_are_seamless(tmp_path):
    images = (numbered(12, 8, 8).repeat(1, 3, 1, 1).permute(0, 2, 3, 1) * 3).numpy()
    settings = {"network": UNet(channels=(8, 16), attention=(False, True), norm_groups=4, head_channels=8), "batch": 4}
    settings |= {"device": "cpu", "evaluate": {"every": -1}} | FEW_PICTURES
    run = unfog.train(images, out=tmp_path / "run", steps=1, wrap="x", **settings)
    run = unfog.resume(tmp_path / "run", steps=2)
    assert run.config.data.wrap == "x"
    assert run.network.conv_in.wrap == run.network.wrap == "x"
    del settings["network"]
    other = unfog.train(images, out=tmp_path / "other", steps=1, init=str(tmp_path / "run"), **settings)
    assert other.config.data.wrap == "x"


def test_a_run_builds_its_network_with_its_wrap():
    config = Config(network=NETWORKS["mpunet"][0], data=Data(size=8, channels=1, wrap="y"))
    built = build_network(config)
    assert isinstance(built, MPUNetModel)
    assert built.wrap == built.conv_in.wrap == "y"
