"""The transformer: its parts against their formulas and against torch's, positions, patches, tokens."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from unfog.models.dit import (  # each layer is compared with its equation
    DiTModel,
    _Attention,
    _Block,
    _RMSNorm,
    _rotate,
    _rotations,
    _SwiGLU,
)
from unfog.models.settings import DiT
from unfog.values.condition_format import ConditionFormat

MICRO = DiT(width=32, depth=2, head_channels=8)


def filled(module: nn.Module) -> nn.Module:
    """With random weights in place of zeros and ones."""
    for parameter in module.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return module


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_rms_norm_is_torchs(dtype, tolerance):
    torch.manual_seed(0)
    ours, theirs = filled(_RMSNorm(24)), nn.RMSNorm(24, eps=1e-6)
    theirs.load_state_dict(ours.state_dict())
    x = (3 * torch.randn(5, 7, 24)).to(dtype).requires_grad_()
    y = ours(x)
    assert y.dtype == dtype
    torch.testing.assert_close(y.float(), theirs(x.float()), atol=3 * tolerance, rtol=tolerance)
    torch.testing.assert_close(
        _RMSNorm(24, learned=False)(x).float(), F.rms_norm(x.float(), (24,)), atol=3 * tolerance, rtol=tolerance
    )
    weight = torch.randn(5, 7, 24)
    mine = torch.autograd.grad((y.float() * weight).sum(), x)[0]
    other = torch.autograd.grad((theirs(x.float()) * weight).sum(), x)[0]
    torch.testing.assert_close(mine.float(), other.float(), atol=3 * tolerance, rtol=tolerance)


def test_swiglu_is_its_formula():
    torch.manual_seed(0)
    layer = _SwiGLU(24)
    gate, value = layer.enter.weight.double().chunk(2)
    x = torch.randn(3, 24).double()
    inner = x @ gate.T
    expected = (inner / (1 + (-inner).exp()) * (x @ value.T)) @ layer.out.weight.double().T
    torch.testing.assert_close(layer.double()(x), expected)
    assert sum(p.numel() for p in _SwiGLU(96).parameters()) == 8 * 96**2  # as of a plain layer of 4 times the width


def complex_rotation(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Rotary positions as a product of complex numbers, pair by pair: [N, D] float64."""
    pairs = x.shape[1] // 2
    z = torch.complex(x[:, :pairs], x[:, pairs:])
    for n in range(rows * columns):
        row, column = divmod(n, columns)
        for i in range(pairs):
            place, j = (row, i) if i < pairs // 2 else (column, i - pairs // 2)
            z[n, i] *= torch.polar(torch.tensor(1.0).double(), torch.tensor(place * 100 ** (-2 * j / pairs)).double())
    return torch.cat([z.real, z.imag], dim=1)


def test_rotary_positions_are_products_of_complex_numbers():
    x = torch.randn(3 * 5, 16).double()
    angles = _rotations(3, 5, 16, x.device)
    assert angles.shape == (15, 8)
    torch.testing.assert_close(_rotate(x, angles.double()), complex_rotation(x, 3, 5), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(_rotate(x, angles.double()).norm(dim=1), x.norm(dim=1))


def test_products_depend_on_the_distance_only():
    q, k = torch.randn(2, 16).double()
    angles = _rotations(6, 7, 16, q.device).double()
    product = _rotate(q.expand(42, 16), angles) @ _rotate(k.expand(42, 16), angles).T
    product = product.unflatten(0, (6, 7)).unflatten(2, (6, 7))  # by row and column of the query, of the key
    torch.testing.assert_close(product[1, 2, 3, 5], product[2, 3, 4, 6], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(product[5, 6, 3, 1], product[3, 6, 1, 1], atol=1e-5, rtol=1e-5)
    assert abs(product[1, 2, 3, 5] - product[1, 2, 5, 3]) > 1e-3  # rows are not columns
    assert abs(product[1, 2, 3, 5] - product[3, 2, 1, 5]) > 1e-3  # nor is above below
    # A larger picture turns the same places by the same angles: any resolution is another crop of the same plane.
    larger = _rotations(9, 9, 16, q.device).unflatten(0, (9, 9))[:6, :7].flatten(0, 1)
    assert torch.equal(larger.double(), angles)


def test_without_positions_tokens_may_be_permuted():
    torch.manual_seed(0)
    block, x, condition = filled(_Block(MICRO)), torch.randn(2, 12, 32), torch.randn(2, 6 * 32)
    order = torch.randperm(12)
    angles = _rotations(3, 4, 8, x.device)
    with torch.no_grad():
        y, none = block(x, condition, angles), torch.zeros_like(angles)
        torch.testing.assert_close(block(x[:, order], condition, angles[order]), y[:, order], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(
            block(x[:, order], condition, none), block(x, condition, none)[:, order], atol=1e-5, rtol=1e-5
        )
        assert (block(x[:, order], condition, angles) - y[:, order]).abs().max() > 1e-3


def test_attention_does_not_care_where_on_the_plane_it_is():
    torch.manual_seed(0)
    layer, x = filled(_Attention(MICRO)), torch.randn(1, 12, 32)
    plane = _rotations(9, 9, 8, x.device).unflatten(0, (9, 9))
    with torch.no_grad():
        corner, middle = (layer(x, plane[r : r + 3, c : c + 4].flatten(0, 1)) for r, c in ((0, 0), (5, 3)))
    torch.testing.assert_close(corner, middle, atol=1e-5, rtol=1e-5)


def test_queries_and_keys_are_normalised():
    torch.manual_seed(0)
    layer, x = filled(_Attention(MICRO)), torch.randn(2, 12, 32)
    angles = _rotations(3, 4, 8, x.device)
    y = layer(x, angles)
    with torch.no_grad():
        layer.qkv.weight[:64] *= 7  # queries and keys; values are the rest
    torch.testing.assert_close(layer(x, angles), y, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("modulation", ["shared", "block"])
def test_a_block_is_its_formula(modulation):
    torch.manual_seed(0)
    block = filled(_Block(DiT(width=32, depth=1, head_channels=8, modulation=modulation)))
    x, condition = torch.randn(2, 12, 32), torch.randn(2, 6 * 32 if modulation == "shared" else 32)
    angles = _rotations(3, 4, 8, x.device)
    if modulation == "shared":
        six = (condition + block.modulation.offset).unflatten(1, (6, 1, 32))
    else:
        six = (condition @ block.modulation.weight.T + block.modulation.bias).unflatten(1, (6, 1, 32))
    shift1, scale1, gate1, shift2, scale2, gate2 = six.unbind(1)
    h = x + gate1 * block.attention(F.rms_norm(x, (32,), None, 1e-6) * (1 + scale1) + shift1, angles)
    expected = h + gate2 * block.mlp(F.rms_norm(h, (32,), None, 1e-6) * (1 + scale2) + shift2)
    torch.testing.assert_close(block(x, condition, angles), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("patch", [1, 2, 4])
def test_patches_are_put_back_where_they_were_taken(patch):
    model = DiTModel(DiT(width=3 * patch**2 * 4, depth=1, head_channels=4, patch=patch), 3, ConditionFormat())
    size = 3 * patch**2
    with torch.no_grad():  # the pixels of a patch go through the token and out again
        model.patch_in.weight.copy_(torch.eye(4 * size)[:, :size])
        model.patch_out.weight.copy_(torch.eye(4 * size)[:size])
        model.norm_out = nn.Identity()
        x = torch.randn(2, 3, 4 * patch, 8 * patch)
        torch.testing.assert_close(model(x, torch.zeros(2)), x)


def test_a_token_is_a_square_of_pixels():
    torch.manual_seed(0)
    model = filled(DiTModel(DiT(width=32, depth=1, head_channels=8, patch=4), 1, ConditionFormat())).eval()
    model.blocks = nn.ModuleList()  # nothing lets tokens see each other
    x = torch.randn(1, 1, 16, 16)
    bump = torch.zeros_like(x)
    bump[0, 0, 5, 9] = 1
    with torch.no_grad():
        changed = (model(x + bump, torch.zeros(1)) - model(x, torch.zeros(1))).abs()[0, 0] > 1e-6
    assert changed[4:8, 8:12].all()
    assert changed.sum() == 16


def test_matrices_are_weights_of_linear_layers():
    """So that an optimiser for matrices finds them."""
    model = DiTModel(MICRO, 3, ConditionFormat.numbered(4))
    linear = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    matrices = {name for name, p in model.named_parameters() if p.ndim > 1}
    assert matrices - linear == {"class_embedding.weight"}
    assert all(math.prod(p.shape) == max(p.shape) for name, p in model.named_parameters() if name not in matrices)
