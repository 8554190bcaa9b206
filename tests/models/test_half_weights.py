"""16-bit copies of the weights: the same gradients as autocast's own casts, to the bit, on a CPU."""

import pytest
import torch
from torch import nn

from unfog.models.dit import DiTModel
from unfog.models.settings import DiT, UNet
from unfog.models.unet import UNetModel
from unfog.training.precision import HalfWeights
from unfog.values.condition_format import ConditionFormat

CLASSES = ConditionFormat.numbered(2)
NETWORKS = {
    "unet": lambda: UNetModel(UNet(channels=(32, 32), attention=(False, True), dropout=0.1), 3, CLASSES),
    "dit": lambda: DiTModel(DiT(width=32, depth=1, head_channels=16, patch=4), 3, CLASSES),
}


def network_of(name: str) -> nn.Module:
    """Return a network none of whose parts begins as zero."""
    torch.manual_seed(0)
    network = NETWORKS[name]()
    for parameter in network.parameters():
        parameter.data += 0.02 * torch.randn(parameter.shape)
    return network


def gradients_of(network: nn.Module, dtype: torch.dtype, half: HalfWeights | None) -> dict[str, torch.Tensor]:
    """Return the gradients of two micro-batches."""
    for part in range(2):
        torch.manual_seed(part)
        x, c_noise, label = torch.randn(2, 3, 16, 16), torch.rand(2), torch.tensor([0, 2])
        with torch.autocast("cpu", dtype, cache_enabled=False):
            loss = network(x, c_noise, label).float().square().mean()
        loss.backward()
        if half is not None:
            half.collect_gradients()
    return {name: parameter.grad for name, parameter in network.named_parameters() if parameter.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_are_those_of_autocast_to_the_bit(name, recomputed):
    network, dtype = network_of(name), torch.bfloat16
    network.checkpointing = recomputed
    usual = gradients_of(network, dtype, None)
    network.zero_grad()
    half = HalfWeights(network, dtype)
    with half.in_use():
        same = gradients_of(network, dtype, half)
    assert usual.keys() == same.keys()
    for key, value in usual.items():
        assert value.dtype == same[key].dtype == torch.float32
        assert torch.equal(value, same[key]), key
        assert value.abs().max() > 0


def test_copies_follow_the_weights_and_are_not_used_outside():
    network = network_of("unet")
    names, half = list(network.state_dict()), HalfWeights(network, torch.bfloat16)
    inputs = torch.randn(1, 3, 16, 16), torch.rand(1)
    before = network.eval()(*inputs)
    with half.in_use(), torch.autocast("cpu", torch.bfloat16):
        network(*inputs)
    assert torch.equal(network(*inputs), before)
    for parameter in network.parameters():
        parameter.data.zero_()
    with half.in_use(), torch.autocast("cpu", torch.bfloat16):
        assert not network(*inputs).any()
    assert list(network.state_dict()) == names


def test_layers_of_other_kinds_keep_their_weights():
    class Own(nn.Linear):
        pass

    half = HalfWeights(nn.Sequential(Own(2, 2), nn.LayerNorm(2), nn.Embedding(2, 2)), torch.bfloat16)
    assert half._copies == []
