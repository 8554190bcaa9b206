"""The U-Net by itself: what it computes at the start, what it depends on, what it refuses."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from unfog.errors import RequestError
from unfog.models import group_norm as norms
from unfog.models.group_norm import group_norm
from unfog.models.layers import attention, sinusoids
from unfog.models.settings import SIZES, UNet
from unfog.models.unet import UNetModel, _ResidualBlock  # each layer is compared with its equation
from unfog.values.condition_format import ConditionFormat
from unfog.values.conditions import Conditions

MICRO = UNet(channels=(16, 32), attention=(False, True), head_channels=8, norm_groups=4)


def scattered(settings: UNet, image_channels: int = 1, num_classes: int = 0, augment_inputs: int = 0) -> UNetModel:
    """Return a network whose zeros are gone."""
    torch.manual_seed(0)
    model = UNetModel(settings, image_channels, ConditionFormat.numbered(num_classes, augment_inputs))
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter) / max(1, parameter[0].numel()) ** 0.5
    return model


@pytest.mark.parametrize(("name", "millions"), [("tiny", 0.99), ("small", 4.07), ("cifar10", 35.75), ("base", 35.41)])
def test_parameter_counts(name, millions):
    with torch.device("meta"):
        model = UNetModel(SIZES[name], 3, ConditionFormat())
    count = sum(p.numel() for p in model.parameters())
    assert count / 1e6 == pytest.approx(millions, abs=0.005)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, settings in SIZES.items() if isinstance(settings, UNet)])
def test_a_fresh_network_is_the_zero_map(name):
    model = UNetModel(SIZES[name], 1, ConditionFormat.numbered(3)).eval()
    with torch.no_grad():
        y = model(torch.randn(2, 1, 16, 16), torch.tensor([0.0, 900.0]), torch.tensor([0, 3]))
    assert y.shape == (2, 1, 16, 16)
    assert torch.equal(y, torch.zeros_like(y))


def test_output_of_other_channels_leaves_the_rest_as_it_begins():
    torch.manual_seed(0)
    plain = UNetModel(MICRO, 1, ConditionFormat.numbered(2))
    torch.manual_seed(0)
    double = UNetModel(MICRO, 1, ConditionFormat.numbered(2), 2)
    assert double(torch.randn(3, 1, 8, 8), torch.zeros(3)).shape == (3, 2, 8, 8)
    theirs = double.state_dict()
    different = {name for name, value in plain.state_dict().items() if not torch.equal(value, theirs[name])}
    assert different == {"conv_out.weight", "conv_out.bias"}


@pytest.mark.slow
def test_every_parameter_learns():
    # The last convolution moves in the first update, every block's last layer in the second, the rest from then on.
    torch.manual_seed(0)
    model = UNetModel(MICRO, 1, ConditionFormat.numbered(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, c_noise, label = torch.randn(8, 1, 8, 8), torch.rand(8) * 1000, torch.arange(8) % 3
    silent = []
    for _ in range(3):
        optimizer.zero_grad()
        (model(x, c_noise, label) - x).square().mean().backward()
        silent.append({name for name, p in model.named_parameters() if not p.grad.any()})
        optimizer.step()
    assert silent[0] == {name for name, _ in model.named_parameters()} - {"conv_out.weight", "conv_out.bias"}
    behind_zeros = re.compile(r"embedding|residual\.(norm|conv1|condition)|attention\.(norm|qkv)")
    assert silent[1] == {name for name, _ in model.named_parameters() if behind_zeros.search(name)}
    assert silent[2] == set()


def test_output_depends_on_label_noise_and_image():
    model = scattered(MICRO, num_classes=2).eval()
    x, c_noise, label = torch.randn(1, 1, 8, 8), torch.tensor([3.0]), torch.tensor([0])
    with torch.no_grad():
        y = model(x, c_noise, label)
        for other in (
            model(x, c_noise, label + 1),
            model(x, c_noise + 1, label),
            model(x + 0.1, c_noise, label),
        ):
            assert (other - y).abs().max() > 1e-3


def test_no_label_is_the_null_class():
    model = scattered(MICRO, num_classes=2).eval()
    x, c_noise = torch.randn(2, 1, 8, 8), torch.tensor([3.0, 4.0])
    assert torch.equal(model(x, c_noise), model(x, c_noise, torch.tensor([2, 2])))
    assert not torch.equal(model(x, c_noise), model(x, c_noise, torch.tensor([1, 1])))
    with pytest.raises(RequestError, match="without classes"):
        scattered(MICRO)(x, c_noise, torch.tensor([0, 0]))


def test_images_do_not_see_each_other():
    model = scattered(MICRO).eval()
    x, c_noise = torch.randn(3, 1, 8, 8), torch.tensor([0.0, 10.0, 999.0])
    with torch.no_grad():
        together = model(x, c_noise)
        alone = torch.cat([model(x[i : i + 1], c_noise[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


def test_time_scale_multiplies_the_condition():
    scaled = UNet(channels=(16,), attention=(True,), head_channels=0, norm_groups=4, time_scale=250.0)
    model, x = scattered(scaled), torch.randn(2, 1, 8, 8)
    plain = UNetModel(UNet(channels=(16,), attention=(True,), head_channels=0, norm_groups=4), 1, ConditionFormat())
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model(x, torch.tensor([1.0, -0.5])), plain(x, torch.tensor([250.0, -125.0])))


def test_dropout_only_while_training():
    model = scattered(UNet(channels=(16,), attention=(False,), head_channels=8, norm_groups=4, dropout=0.5))
    x, c_noise = torch.randn(2, 1, 8, 8), torch.tensor([3.0, 4.0])
    assert not torch.equal(model.train()(x, c_noise), model(x, c_noise))
    assert torch.equal(model.eval()(x, c_noise), model(x, c_noise))


@pytest.mark.slow
def test_a_step_is_deterministic():
    def gradients() -> list[torch.Tensor]:
        model = scattered(SIZES["tiny"], num_classes=10)
        torch.manual_seed(1)
        x, c_noise, label = torch.randn(8, 1, 28, 28), torch.rand(8) * 1000, torch.randint(0, 11, (8,))
        with torch.autocast("cpu", torch.bfloat16):
            model(x, c_noise, label).float().square().mean().backward()
        return [p.grad for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(gradients(), gradients()))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_close_to_float32(dtype):
    model = scattered(UNet(channels=(32, 64), attention=(False, True)), 3, num_classes=4)
    x, c_noise, label = torch.randn(4, 3, 16, 16), torch.rand(4) * 1000, torch.arange(4)
    exact = model(x, c_noise, label)
    gradient = torch.autograd.grad(exact.square().mean(), model.conv_in.weight)[0]
    with torch.autocast("cpu", dtype):
        rough = model(x, c_noise, label)
        rough_gradient = torch.autograd.grad(rough.float().square().mean(), model.conv_in.weight)[0]
    assert rough.dtype == dtype
    assert (rough.float() - exact).square().mean() < (0.02 * exact.std()) ** 2
    assert (rough_gradient - gradient).norm() < 0.05 * gradient.norm()


@pytest.mark.slow
def test_compiles_to_one_graph():
    model = scattered(MICRO, num_classes=2).eval()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    x, c_noise, label = torch.randn(2, 1, 8, 8), torch.tensor([3.0, 4.0]), torch.tensor([0, 2])
    assert torch.equal(compiled(x, c_noise, label), model(x, c_noise, label))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_attention_is_its_formula(dtype, tolerance):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 49, 16, dtype=dtype, requires_grad=True) for _ in range(3))
    mixed = attention(q, k, v)
    q64, k64, v64 = (t.detach().double().requires_grad_() for t in (q, k, v))
    scores = torch.einsum("bhnd,bhmd->bhnm", q64, k64) / math.sqrt(16)
    expected = torch.einsum("bhnm,bhmd->bhnd", scores.exp() / scores.exp().sum(-1, keepdim=True), v64)
    assert mixed.dtype == dtype
    assert (mixed - expected).abs().max() < tolerance
    weight = torch.randn_like(expected)
    (mixed * weight).sum().backward()
    (expected * weight).sum().backward()
    for ours, exact in ((q, q64), (k, k64), (v, v64)):
        assert (ours.grad - exact.grad).abs().max() < 2 * tolerance * exact.grad.abs().max()


def test_sinusoids_are_their_formula_even_under_autocast():
    position = torch.tensor([0.0, 0.25, 999.0])
    with torch.autocast("cpu", torch.bfloat16):
        waves = sinusoids(position, 7, freq_shift=1)
    assert waves.dtype == torch.float32
    assert torch.equal(sinusoids(position.double(), 7, freq_shift=1), waves)
    for row, t in zip(waves, position.double()):
        angles = [t * 10_000 ** (-i / 2) for i in range(3)]
        expected = [math.cos(a) for a in angles] + [math.sin(a) for a in angles] + [0.0]
        torch.testing.assert_close(row.double(), torch.tensor(expected, dtype=torch.float64), atol=1e-4, rtol=0)
    flipped = sinusoids(position, 7, freq_shift=1, flip_sin_to_cos=False)
    assert torch.equal(flipped, torch.cat([waves[:, 3:6], waves[:, :3], waves[:, 6:]], dim=1))


def test_sizes_are_checked_before_building():
    settings = UNet(channels=(32, 32, 32), attention=(False, False, False))
    settings.check(28)
    settings.check((8, 64))
    for size, message in (
        (
            30,
            "size = 30 must be a multiple of 4 and at least 8 for a network of 3 levels; "
            "try size = 32, or fewer levels",
        ),
        (
            (32, 4),
            "size = 4x32: both sides must be a multiple of 4 and at least 8 for a network of 3 levels; "
            "try size = 8x32, or fewer levels",
        ),
    ):
        with pytest.raises(RequestError) as refused:
            settings.check(size)
        assert str(refused.value) == message


def test_every_checked_size_works_and_others_do_not():
    model = UNetModel(UNet(channels=(32, 32, 32), attention=(False, False, True)), 1, ConditionFormat()).eval()
    for size in range(8, 29, 5):
        x, c_noise = torch.randn(1, 1, size, size), torch.zeros(1)
        if size % 4 == 0:
            assert model(x, c_noise).shape == x.shape
        else:
            with pytest.raises(RequestError):
                model.settings.check(size)
            with pytest.raises(RuntimeError):
                model(x, c_noise)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"channels": ()}, "give 1 to 12 levels"),
        ({"blocks": 0}, "1 to 100 blocks"),
        ({"attention": (True,)}, "attention has 1 entries, but channels has 3 levels"),
        ({"channels": (60, 80, 96)}, "channels = 60 must be a multiple of norm_groups = 32; try norm_groups=4"),
        (  # all at once, with values that fit together
            {"channels": (16, 48)},
            "attention has 3 entries, but channels has 2 levels, and channels = 16 must be a multiple of norm_groups = "
            "32, and channels = 48 must be a multiple of head_channels = 32 in a level with attention; try "
            "attention=0/1,norm_groups=16,head_channels=24",
        ),
        (
            {"head_channels": 48},
            "channels = 128 must be a multiple of head_channels = 48 in a level with attention; try head_channels=32",
        ),
        ({"dropout": 1.0}, "dropout = 1.0"),
    ],
)
def test_contradictions_are_refused(wrong, message):
    with pytest.raises(RequestError) as refused:
        UNet(**wrong)
    assert message in str(refused.value)


@pytest.mark.slow
def test_settings_load_without_torch():
    code = "import sys, unfog.models.settings; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_upsampling_and_attention_keep_pixels_in_place():
    # A change in one corner must change that corner most: a transposed or shuffled pixel axis would move it.
    model = scattered(UNet(channels=(16, 16), attention=(True, True), head_channels=8, norm_groups=4)).eval()
    x = torch.randn(1, 1, 16, 32)
    bump = F.pad(torch.ones(1, 1, 4, 4), (28, 0, 0, 12))
    with torch.no_grad():
        change = (model(x + bump, torch.zeros(1)) - model(x, torch.zeros(1))).abs()
    assert change[0, 0, :6, 26:].mean() > 3 * change.mean()


def gradients(model: UNetModel, bf16: bool) -> dict[str, torch.Tensor]:
    """Of one training step with dropout, and the random number that follows it."""
    model.zero_grad()
    torch.manual_seed(1)
    x, c_noise, label = torch.randn(3, 1, 8, 8), torch.rand(3) * 1000, torch.tensor([0, 1, 2])
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        output = model(x, c_noise, label)
    output.float().square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()} | {"output": output, "next": torch.rand(1)}


@pytest.mark.slow
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_checkpointing_changes_no_bit(bf16, dropout):
    model = scattered(replace(MICRO, dropout=dropout), num_classes=2)
    plain = gradients(model, bf16)
    assert all(gradient.any() for gradient in plain.values())
    model.checkpointing = True
    again = gradients(model, bf16)
    assert all(torch.equal(again[name], value) for name, value in plain.items())


def saved_bytes(model: UNetModel) -> int:
    """What a forward pass keeps for the backward pass, without the parameters."""
    storages = {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(torch.randn(2, 1, 32, 32), torch.rand(2) * 1000)
    kept = sum(storage.nbytes() for place, storage in storages.items() if place not in weights)
    output.sum().backward()
    return kept


@pytest.mark.slow
def test_checkpointing_keeps_a_fraction():
    settings = UNet(channels=(16, 32), blocks=2, attention=(False, True), head_channels=8, norm_groups=4)
    model = UNetModel(settings, 1, ConditionFormat())
    plain = saved_bytes(model)
    model.checkpointing = True
    assert saved_bytes(model) < 0.3 * plain


@pytest.mark.slow
def test_checkpointing_allows_no_gradient_and_two():
    model = scattered(MICRO)
    model.checkpointing = True
    x, c_noise = torch.randn(2, 1, 8, 8), torch.rand(2) * 1000
    with torch.inference_mode():
        still = model(x, c_noise)
    loss = model(x, c_noise)
    assert torch.equal(loss, still)
    first, second = (
        torch.autograd.grad(loss.sum(), list(model.parameters()), retain_graph=keep) for keep in (True, False)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_what_is_told_of_an_augmentation_counts_and_nothing_is_zero():
    torch.manual_seed(0)
    told = scattered(MICRO, augment_inputs=9)
    untold = UNetModel(MICRO, 1, ConditionFormat())
    untold.load_state_dict({k: v for k, v in told.state_dict().items() if k != "augment_embedding.weight"})
    x, c_noise = torch.randn(3, 1, 8, 8), torch.rand(3) * 1000
    with torch.no_grad():
        plain = told(x, c_noise)
        assert torch.equal(told(x, c_noise, Conditions(augment=torch.zeros(3, 9))), plain)
        assert torch.equal(untold(x, c_noise), plain)
        some = torch.zeros(3, 9)
        some[1, 4] = 1
        changed = (told(x, c_noise, Conditions(augment=some)) != plain).flatten(1).any(1)
    assert changed.tolist() == [False, True, False]


def test_a_network_that_is_told_begins_as_one_that_is_not():
    states = []
    for inputs in (0, 9):
        torch.manual_seed(0)
        states.append(UNetModel(MICRO, 1, ConditionFormat.numbered(2, inputs)).state_dict())
    assert states[1].pop("augment_embedding.weight").shape == (64, 9)
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_an_augmentation_is_not_told_to_a_network_that_does_not_ask():
    with pytest.raises(RequestError, match=r"data\.augment"):
        scattered(MICRO)(torch.randn(1, 1, 8, 8), torch.zeros(1), Conditions(augment=torch.zeros(1, 9)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_group_norm_in_channels_last_is_that_of_torch(dtype):
    """The one that runs on CUDA; here to the bit, as its kernel is torch's in float32."""
    torch.manual_seed(0)
    x, gradient = (torch.randn(2, 8, 5, 3).to(dtype, memory_format=torch.channels_last) for _ in range(2))
    weight, bias = torch.randn(2, 8, requires_grad=True).unbind()
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    ours = group_norm(mine, 4, weight, bias, 1e-5)
    plain = F.group_norm(theirs.float().contiguous(), 4, weight, bias, 1e-5).to(dtype)
    assert ours.dtype == dtype
    assert ours.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(ours, plain)
    of_ours = torch.autograd.grad(ours, (mine, weight, bias), gradient)
    assert of_ours[0].is_contiguous(memory_format=torch.channels_last)
    for one, other in zip(of_ours, torch.autograd.grad(plain, (theirs, weight, bias), gradient)):
        assert torch.equal(one, other)


FUSED = """
import sys, torch
from torch.nn import functional as F
from unfog.models.fused_group_norm import group_norm_silu

torch.manual_seed(0)
for batch, channels, side, groups, dtype, most in (
    (2, 12, 6, 3, torch.float32, 1e-6), (1, 32, 8, 8, torch.bfloat16, 1e-2), (2, 8, 16, 2, torch.float32, 1e-6)
):
    x = (3 + 2 * torch.randn(batch, channels, side, side)).to(dtype, memory_format=torch.channels_last)
    weight, bias = torch.randn(2, batch, channels)
    found, inputs = [], [x, weight, bias]
    for double in (False, True):
        leaves = [t.detach().to(torch.float64 if double else t.dtype).requires_grad_() for t in inputs]
        x, weight, bias = leaves
        if double:
            y = F.silu(F.group_norm(x, groups, eps=1e-5) * weight[..., None, None] + bias[..., None, None])
        else:
            y = group_norm_silu(x, groups, weight, bias, 1e-5)
            assert y.dtype == dtype and y.is_contiguous(memory_format=torch.channels_last)
        gradient = torch.linspace(-1, 1, y.numel()).view_as(y)
        (y * gradient).sum().backward()
        found.append([y.detach(), *(leaf.grad for leaf in leaves)])
    for mine, exact in zip(*found):
        assert (mine.double() - exact).norm() < most * exact.norm(), (mine, exact)
print("equal")
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton, which builds of torch for CUDA bring")
def test_fused_norm_and_activation_are_those_of_torch():
    """Its kernels, by the interpreter of Triton on the CPU: outputs and gradients against float64."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", FUSED], env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "equal", done.stderr


@pytest.mark.parametrize("scale_shift", [True, False])
def test_a_network_with_fused_norms_is_the_same_network(scale_shift, monkeypatch):
    """What it hands to the kernel, which is replaced by its formula; off it is not called."""
    network = scattered(replace(MICRO, scale_shift=scale_shift), 3)
    x, c_noise, seen = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last), torch.rand(2), []

    def formula(x, groups, weight, bias, eps):
        seen.append(x.shape)
        return F.silu(F.group_norm(x, groups, eps=eps) * weight[:, :, None, None] + bias[:, :, None, None])

    monkeypatch.setitem(sys.modules, "unfog.models.fused_group_norm", SimpleNamespace(group_norm_silu=formula))
    usual = network(x, c_noise)
    assert not seen
    monkeypatch.setattr(norms, "find_spec", lambda name: name)
    norms.fuse_norms(network)
    network(x.contiguous(), c_noise)
    network.eval()(x, c_noise)
    assert not seen  # the kernel is for channels_last, and for training
    network.train()
    torch.testing.assert_close(network(x, c_noise), usual)
    assert len(seen) == sum(isinstance(part, _ResidualBlock) for part in network.modules()) * 2 + 1
