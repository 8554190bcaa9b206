"""The error that training averages: squared, absolute, pseudo-Huber, or that of a person's own module."""

from __future__ import annotations

import math
import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unfog
from conftest import FEW_PICTURES, TRANSFORMER, few_images
from unfog import custom
from unfog.config.resume_rules import settings_digests
from unfog.config.schema import Config
from unfog.config.toml import from_toml, to_toml, update
from unfog.custom import consent
from unfog.diffusion.diffusion import Diffusion
from unfog.diffusion.losses.pixel_loss import AbsoluteError, CustomLoss, PixelLoss, PseudoHuber, SquaredError
from unfog.diffusion.objective import Objective, weighted_error
from unfog.errors import RequestError
from unfog.values.conditions import NO_CONDITIONS

MODULE = """
import torch
from torch import nn

def cubed(y, target, power=3.0):
    return (y - target).abs() ** power

def of_images(y, target):
    return (y - target).square().mean((1, 2, 3))

def total(y, target):
    return (y - target).square().mean()

def rooted(y, target):
    return (y - target).square().sqrt()

def constant(y, target):
    return torch.zeros_like(y)

class Blurred(nn.Module):
    def __init__(self, width=3):
        super().__init__()
        self.layer = nn.Conv2d(1, 1, width, padding=width // 2)

    def forward(self, y, target):
        return self.layer((y - target).flatten(0, 1)[:, None]).view(y.shape).square()
"""
SETTINGS: dict[str, Any] = {
    "size": 16,
    "network": TRANSFORMER,
    "batch": 4,
    "microbatch": 3,
    "device": "cpu",
    "evaluate": {"every": -1},
    **FEW_PICTURES,
}


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "losses_of_mine.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("cubed", "of_images", "total", "rooted", "constant", "Blurred"):
        consent.give(f"losses_of_mine.{name}")
    yield "custom:path=losses_of_mine."
    sys.modules.pop("losses_of_mine", None)


def objective(loss: PixelLoss, **settings: Any) -> Objective:
    return Objective(Diffusion(loss=loss), **settings)


def of(loss: PixelLoss, **settings: Any) -> Tensor:
    torch.manual_seed(0)
    return objective(loss, **settings)(lambda x, c, conditions: 0.7 * x, torch.rand(6, 1, 4, 4)).per_image


def test_pseudo_huber_becomes_the_squared_and_the_absolute_error():
    y, target = torch.randn(2, 4, 3, 5, 5)
    large, small = PseudoHuber(c=1e3)(y, target), PseudoHuber(c=1e-6)(y, target)
    torch.testing.assert_close(2e3 * large, SquaredError()(y, target), rtol=1e-4, atol=1e-9)
    torch.testing.assert_close(small, AbsoluteError()(y, target), rtol=0, atol=2e-6)
    d = (y - target).double()
    torch.testing.assert_close(PseudoHuber(0.3)(y, target).double(), (d.square() + 0.09).sqrt() - 0.3)


@pytest.mark.parametrize("loss", [SquaredError(), PseudoHuber(0.1), AbsoluteError()])
def test_the_gradient_is_that_of_finite_differences_and_0_at_the_target(loss):
    target = torch.zeros(1, 1, 1, 4, dtype=torch.float64)
    y = torch.tensor([[[[-1.0, 0.01, 0.5, 0.0]]]], dtype=torch.float64, requires_grad=True)
    loss(y, target).sum().backward()
    assert y.grad is not None
    assert y.grad[0, 0, 0, 3] == 0
    step = 1e-6
    slopes = (loss(y.detach() + step, target) - loss(y.detach() - step, target)) / (2 * step)
    torch.testing.assert_close(y.grad, slopes, rtol=1e-4, atol=1e-8)


def test_the_default_is_the_squared_error_to_the_bit():
    weight, y, target = torch.rand(4), torch.randn(4, 2, 8, 8), torch.randn(4, 2, 8, 8)
    assert torch.equal(weighted_error(weight, y, target), weight * (y - target).square().mean((1, 2, 3)))
    assert Diffusion().loss == SquaredError()


@pytest.mark.parametrize("loss", [PseudoHuber(), AbsoluteError()])
def test_null_loss_is_that_of_an_output_of_0(loss):
    """The guard against divergence compares with it: the loss of a network that answers 0 is at most that."""
    torch.manual_seed(0)
    found = objective(loss)(lambda x, c, conditions: torch.zeros_like(x), torch.rand(64, 1, 8, 8))
    assert 0.3 < float(found.measured.mean() / found.null_loss.mean()) < 1.0


@pytest.mark.parametrize("loss", [PseudoHuber(), AbsoluteError()])
def test_unknown_pixels_do_not_count(loss):
    x0 = torch.rand(3, 1, 6, 6)
    hidden = x0.clone()
    hidden[..., :2] = math.nan
    u, noise = torch.tensor([0.2, 0.5, 0.8]), torch.randn(3, 1, 6, 6)

    def network(x: Tensor, c: Tensor, conditions: Any) -> Tensor:
        return 0.7 * x

    masked = objective(loss, has_unknown=True)(network, hidden, u=u, noise=noise)
    cropped = objective(loss)(network, x0[..., 2:], u=u, noise=noise[..., 2:])
    torch.testing.assert_close(masked.per_image, cropped.per_image)


def test_the_held_out_loss_is_in_the_chosen_error_and_that_of_the_noise_squared():
    x0, noise, logsnr = torch.rand(2, 1, 4, 4), torch.randn(2, 1, 4, 4), torch.tensor([0.0, 1.0])

    def network(x: Tensor, c: Tensor, conditions: Any) -> Tensor:
        return 0.7 * x

    loss, mse = objective(AbsoluteError()).at(network, x0, NO_CONDITIONS, logsnr, noise)
    squared, same = objective(SquaredError()).at(network, x0, NO_CONDITIONS, logsnr, noise)
    assert torch.equal(mse, same)
    assert (loss > squared.sqrt() * 0.5).all()
    assert (loss <= squared.sqrt() * 1.0001).all()


@pytest.mark.slow
def test_the_error_compiles_without_a_graph_break():
    compiled = partial(torch.compile, backend="aot_eager", fullgraph=True, dynamic=False)
    for loss in (PseudoHuber(0.1), AbsoluteError()):
        torch.testing.assert_close(of(loss, weighted_error=compiled(weighted_error)), of(loss))


def test_settings_name_losses_and_the_loss_enters_the_digests():
    config = update(Config(), {"diffusion": {"loss": "pseudo-huber:c=0.1"}}, "")
    assert config.diffusion.loss == PseudoHuber(0.1)
    assert from_toml(to_toml(config), Config()) == config
    usual, changed = settings_digests(Config()), settings_digests(config)
    assert all(usual[name] != changed[name] for name in ("training", "repeat", "measure", "objective"))
    assert usual["training"] == "93c87372ba0b177d"
    for wrong, said in (("pseudo-huber:c=0", "from 1e-6"), ("l3", "unknown"), ("custom", "must name a module")):
        with pytest.raises(RequestError, match=said):
            tried(wrong)


def tried(spec: str, masked: bool = False) -> None:
    """Try out the loss of a spec string, as a run does before it reads images."""
    loss = update(Config(), {"diffusion": {"loss": spec}}, "").diffusion.loss
    assert isinstance(loss, CustomLoss)
    loss.try_out((1, 8, 8), masked)


def test_own_functions_and_classes(mine):
    """A function is called with its arguments, a network is built once, the same each time, and is not trained."""
    y, target = torch.randn(2, 3, 2, 5, 5)
    cubed = CustomLoss("losses_of_mine.cubed", ("power=4",))
    torch.testing.assert_close(cubed(y, target), (y - target) ** 4)
    assert of(cubed).shape == (6,)
    torch.testing.assert_close(of(CustomLoss("losses_of_mine.of_images")), of(SquaredError()))
    torch.manual_seed(3)
    before = torch.get_rng_state()
    blurred = CustomLoss("losses_of_mine.Blurred", ("width=5",))
    first = blurred(y, target)
    assert torch.equal(torch.get_rng_state(), before)
    assert not first.requires_grad
    from unfog.diffusion.losses import pixel_loss

    pixel_loss._function.cache_clear()
    assert torch.equal(blurred(y, target), first)
    y.requires_grad_()
    blurred(y, target).sum().backward()
    assert y.grad is not None
    assert isinstance(pixel_loss._function(blurred, y.device), nn.Module)


@pytest.mark.parametrize(
    ("name", "masked", "said"),
    [
        ("total", False, "errors of shape"),
        ("of_images", True, "unknown pixels"),
        ("rooted", False, "finite"),
        ("constant", False, "cannot be used"),
        ("cubed,power='x'", False, "cannot be used"),
        ("cubed,power=x", False, "keyword argument"),
        ("missing", False, "cannot be imported"),
    ],
)
def test_a_loss_that_cannot_train_is_refused_before_the_run(mine, name, masked, said):
    consent.give("losses_of_mine.missing")
    with pytest.raises(RequestError, match=said):
        tried(mine + name, masked)


def test_a_registered_loss_has_a_name(monkeypatch):
    monkeypatch.setitem(custom.REGISTERED["loss"], "quartic", None)
    custom.register("loss")(type("Quartic", (AbsoluteError,), {"kind": "quartic"}))
    assert update(Config(), {"diffusion": {"loss": "quartic"}}, "").diffusion.loss.kind == "quartic"


@pytest.mark.slow
def test_a_run_trains_with_an_own_loss_and_a_resume_refuses_another(mine, tmp_path):
    run = unfog.train(few_images(), out=tmp_path / "run", steps=2, loss=f"{mine}cubed,power=2.5", **SETTINGS)
    assert "losses_of_mine.cubed" in (run.path / "config.toml").read_text()
    assert unfog.resume(run.path, steps=3).sample(1, seed=0).shape[0] == 1
    with pytest.raises(RequestError, match="--force"):
        unfog.resume(run.path, steps=4, loss="l1")
    unfog.resume(run.path, steps=4, loss="l1", force=True)
