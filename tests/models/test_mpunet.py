"""The magnitude-preserving U-Net: its formulas, and that magnitudes are preserved, at the start and after training."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from conftest import advance
from unfog.models import edm2_unet
from unfog.models.edm2_unet import (  # each layer is compared with its equation
    MPUNetModel,
    _mp_cat,
    _mp_silu,
    _mp_sum,
    _MPAttention,
    _MPBlock,
    _MPConv,
    _MPEmbedding,
    _MPLinear,
    _project_by_row_length,
    _unit_rms,
    _Weights,
)
from unfog.models.layers import sinusoids
from unfog.models.settings import MPUNet
from unfog.training.precision import Precision
from unfog.training.settings import Optimizer, PowerEma
from unfog.training.state import TrainState
from unfog.values.condition_format import ConditionFormat

MICRO = MPUNet(channels=(16, 32), attention=(False, True), head_channels=8)


def rms(x: torch.Tensor) -> float:
    return float(x.detach().double().square().mean().sqrt())


def test_silu_is_divided_by_what_it_makes_of_a_normal_distribution():
    x = torch.linspace(-12, 12, 200_001, dtype=torch.float64)
    density = (-x.square() / 2).exp() / math.sqrt(2 * math.pi)
    second_moment = torch.trapezoid(F.silu(x).square() * density, x)
    assert math.sqrt(second_moment) == pytest.approx(edm2_unet._SILU_RMS, abs=5e-4)
    torch.testing.assert_close(_mp_silu(x) * edm2_unet._SILU_RMS, x / (1 + (-x).exp()))


@pytest.mark.parametrize("t", [0.0, 0.3, 0.5, 1.0])
def test_a_sum_of_two_keeps_the_magnitude_in_these_shares(t):
    # Orthogonal vectors of unit magnitude, so that the identity is exact.
    a, b = torch.tensor([1.0, 1, 1, 1]).double(), torch.tensor([1.0, -1, 1, -1]).double()
    mixed = _mp_sum(a, b, t)
    assert rms(mixed) == pytest.approx(1)
    assert float(mixed @ b / (mixed @ a).clamp_min(1e-30)) * (1 - t) == pytest.approx(t) or t == 1


@pytest.mark.parametrize("t", [0.3, 0.5])
def test_joined_channels_share_the_magnitude_however_many_there_are(t):
    a, b = (_unit_rms(torch.randn(2, channels, 3, 3).double(), (1, 2, 3)) for channels in (4, 12))
    joined = _mp_cat(a, b, t)
    assert joined.shape == (2, 16, 3, 3)
    assert rms(joined) == pytest.approx(1)
    shares = joined[:, :4].square().sum(), joined[:, 4:].square().sum()
    assert float(shares[1] / shares[0]) == pytest.approx((t / (1 - t)) ** 2)


def test_unit_rms_is_its_formula_and_its_gradient_orthogonal():
    x = torch.randn(3, 5, 4, dtype=torch.float64, requires_grad=True)
    y = _unit_rms(x, 1)
    torch.testing.assert_close(y.square().mean(1), torch.ones(3, 4, dtype=torch.float64), atol=1e-6, rtol=0)
    torch.testing.assert_close(y, x / x.square().mean(1, keepdim=True).sqrt(), atol=1e-6, rtol=0)
    towards = torch.randn_like(y)
    (y * towards).sum().backward()
    # Relative to both lengths, as the root mean square is rounded to float32.
    along = (x.grad * x).sum(1).abs() / (towards.norm(dim=1) * y.norm(dim=1))
    assert float(along.max().detach()) < 1e-6
    assert torch.equal(_unit_rms(torch.zeros(2, 3), 1), torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (_MPLinear(24, 64), torch.randn(256, 24)),
        (_MPConv(6, 32, 3), torch.randn(8, 6, 16, 16)),
        (_MPConv(48, 32, 1), torch.randn(8, 48, 8, 8)),
        (_MPEmbedding(4, 40), torch.arange(4).repeat(8)),
    ],
)
def test_a_layer_keeps_the_magnitude_whatever_its_weights_are_stored_at(layer, x):
    torch.manual_seed(0)
    y = layer(x)
    inner = y[..., 1:-1, 1:-1] if y.ndim == 4 else y  # at the border zeros come in
    assert rms(inner) == pytest.approx(1, abs=0.05)
    with torch.no_grad():
        layer.weight.mul_(torch.rand(len(layer.weight), *[1] * (layer.weight.ndim - 1)) * 9 + 0.1)
    torch.testing.assert_close(layer(x), y, atol=1e-4, rtol=1e-4)
    (layer(x) * torch.randn_like(y)).sum().backward()
    gradient, weight = layer.weight.grad.flatten(1), layer.weight.flatten(1)
    along = (gradient * weight).sum(1) / (gradient.norm(dim=1) * weight.norm(dim=1)).clamp_min(1e-12)
    assert float(along.abs().max()) < 1e-4
    layer.project()
    torch.testing.assert_close(layer.weight.flatten(1).square().mean(1), torch.ones(len(layer.weight)))
    torch.testing.assert_close(layer(x), y, atol=1e-4, rtol=1e-4)


def test_a_convolution_is_that_with_weights_over_the_root_of_their_number():
    layer, x = _MPConv(5, 3, 3), torch.randn(2, 5, 6, 6)
    torch.testing.assert_close(layer(x), F.conv2d(x, layer.weight / math.sqrt(45), padding=1), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(layer(x, torch.tensor(0.25)), layer(x) / 4)


def test_attention_goes_by_the_cosine():
    torch.manual_seed(0)
    layer, x = _MPAttention(16, 8), torch.randn(2, 16, 3, 4)
    flat = layer.qkv(x).flatten(2)  # [B, 3 * heads * D, N]
    mixed = []
    for head in range(2):
        q, k, v = (flat[:, part * 16 + head * 8 : part * 16 + head * 8 + 8] for part in range(3))
        q, k, v = (t / t.square().mean(1, keepdim=True).sqrt() for t in (q, k, v))
        cosine = torch.einsum("bdn,bdm->bnm", q, k) / 8
        assert cosine.abs().max() <= 1.001
        mixed.append(torch.einsum("bnm,bdm->bdn", (cosine * math.sqrt(8)).softmax(-1), v))
    expected = _mp_sum(x, layer.out(torch.cat(mixed, 1).unflatten(2, (3, 4))), 0.3)
    torch.testing.assert_close(layer(x), expected, atol=1e-5, rtol=1e-5)


def test_sinusoids_have_unit_magnitude_at_every_level():
    waves = sinusoids(torch.tensor([0.0, 0.3, 17.0, 999.0]), 32) * math.sqrt(2)
    torch.testing.assert_close(waves.square().mean(1), torch.ones(4), atol=1e-5, rtol=0)


def magnitudes(model: MPUNetModel) -> dict[str, float]:
    """Root mean square of what each block of the network makes of noise."""
    seen: dict[str, float] = {}
    hooks = [
        module.register_forward_hook(lambda m, i, o, name=name: seen.update({name: rms(o)}))
        for name, module in model.named_modules()
        if isinstance(module, _MPBlock | _MPAttention)
    ]
    with torch.no_grad():
        model(torch.randn(8, 3, 32, 32), torch.rand(8) * 1000, torch.arange(8) % 5)
    for hook in hooks:
        hook.remove()
    return seen


def trained(model: MPUNetModel, steps: int, lr: float) -> TrainState:
    """After steps on patterns that a label tells, as the training loop takes them."""
    state = TrainState(model, Optimizer(lr=lr, weight_decay=0.0), PowerEma(), Precision("fp32", torch.device("cpu")))
    for _ in range(steps):
        label = torch.randint(0, 4, (8,))
        wave = torch.linspace(0, 6.28, 16) * (label[:, None] + 1)
        goal = wave.sin()[:, None, None, :].expand(-1, 3, 16, 16)
        loss = (model(goal + torch.randn(8, 3, 16, 16), torch.rand(8) * 1000, label) - goal).square().mean()
        state.optimizer.zero_grad()
        loss.backward()
        state.optimizer.step()
        advance(state, 8, True, [])
    return state


@pytest.mark.slow
def test_magnitudes_of_a_fresh_network():
    torch.manual_seed(0)
    seen = magnitudes(MPUNetModel(MPUNet(channels=(32, 64, 64)), 3, ConditionFormat.numbered(4)))
    assert len(seen) == 19
    for name, value in seen.items():
        assert 0.8 < value < 1.2, f"{name}: {value}"


@pytest.mark.slow
def test_magnitudes_after_training():
    torch.manual_seed(0)
    model = MPUNetModel(MICRO, 3, ConditionFormat.numbered(4))
    state = trained(model, 30, 0.02)
    for name, value in magnitudes(model).items():
        assert 0.6 < value < 1.6, f"{name}: {value}"
    for name, module in model.named_modules():
        if isinstance(module, _Weights):
            row = module.weight.detach().flatten(1).square().mean(1).sqrt()
            torch.testing.assert_close(row, torch.ones_like(row), atol=1e-5, rtol=0, msg=name)
    assert float(model.gain_out.detach()) != 0
    # The average is of projected weights, each as long as they agree: below 1, and used at 1.
    average = torch.cat([p.flatten() for p in state.ema.parameters if p.ndim])
    assert 0.5 < rms(average) < 1


def test_weights_are_projected_together_as_one_by_one():
    """To the bit; together on CUDA, where each operation is a launch."""
    torch.manual_seed(0)
    model = MPUNetModel(MICRO, 3, ConditionFormat.numbered(2))
    weights = [module.weight for module in model.modules() if isinstance(module, _Weights)]
    for weight in weights:
        weight.data += torch.randn(weight.shape)
    moved = [weight.detach().clone() for weight in weights]
    model.project()
    one_by_one = [weight.detach().clone() for weight in weights]
    for weight, value in zip(weights, moved):
        weight.data.copy_(value)
    _project_by_row_length(weights)
    assert not torch.equal(weights[0], moved[0])
    for weight, value in zip(weights, one_by_one):
        assert torch.equal(weight, value)


@pytest.mark.slow
def test_weights_grow_unless_they_are_projected():
    torch.manual_seed(0)
    model = MPUNetModel(MICRO, 3, ConditionFormat.numbered(4))
    model.project = lambda: None
    trained(model, 20, 0.05)
    lengths = [rms(m.weight.detach()) for m in model.modules() if isinstance(m, _Weights)]
    assert min(lengths) > 0.999
    assert sum(lengths) / len(lengths) > 1.03


def test_a_forward_pass_changes_no_weight():
    model = MPUNetModel(MICRO, 3, ConditionFormat.numbered(4)).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.randn(2, 3, 8, 8), torch.rand(2)).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


def test_blocks_are_limited_in_fp16_alone():
    """EDM2 clips to 256; a fp16 sum of squares of more would overflow."""
    torch.manual_seed(0)
    block = MPUNetModel(MICRO, 3, ConditionFormat()).down[0].eval()
    channels = block.conv1.weight.shape[1]
    x, embedding = torch.randn(1, channels, 4, 4) * 2000, torch.zeros(1, max(MICRO.channels))
    block.down = False  # without the normalisation at the entry, as on the way up
    free = block(x, embedding)
    assert free.abs().max() > 1000
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        limited = block(x.half(), embedding.half())
    assert limited.dtype == torch.float16
    torch.testing.assert_close(limited.float(), free.detach().clamp(-256, 256), rtol=2e-2, atol=2)
