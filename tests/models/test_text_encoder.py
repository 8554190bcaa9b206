"""Texts in the networks: exact masks, an output of zero at first, gradients, dropout, and a task that needs words."""

import pytest
import torch

from unfog.models.layers import ConditionalNetwork
from unfog.models.network_settings import build_model
from unfog.models.settings import DiT, MPUNet, UNet
from unfog.values import condition_kinds
from unfog.values.condition_format import ConditionFormat
from unfog.values.condition_kinds import ColumnFacts, ConditionKind
from unfog.values.conditions import NO_CONDITIONS, Conditions

VOCABULARY, LENGTH = 256, 6


class _TextKind(ConditionKind):
    name, field = "text", "tokens"

    def inputs(self, facts):
        return 0

    def width(self, facts):
        return int(facts.statistics[1])


@pytest.fixture(autouse=True)
def kind(monkeypatch):
    if "text" not in condition_kinds.KINDS:
        monkeypatch.setitem(condition_kinds.KINDS, "text", _TextKind())


NETWORKS = {
    "unet": UNet(channels=(16, 32), attention=(False, True), head_channels=16, norm_groups=8),
    "mpunet": MPUNet(channels=(16, 32), attention=(False, False)),
    "dit": DiT(width=32, depth=2, head_channels=16, patch=4),
}
X, LEVEL = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(1)), torch.linspace(1, 900, 3)
WORDS = torch.tensor([[5, 9, 2, -1], [200, 255, 0, 1], [-1, -1, -1, -1]])


def format_of(**others) -> ConditionFormat:
    facts = ColumnFacts("text", "text", statistics=(float(VOCABULARY), float(LENGTH)))
    return ConditionFormat(columns=(facts,), text_layers=2, text_width=32, **others)


def network(name: str, fresh: bool = False, **others) -> ConditionalNetwork:
    torch.manual_seed(0)
    model = build_model(NETWORKS[name], 1, format_of(**others)).eval()
    if not fresh:  # one of whose layers none answers 0
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


each = pytest.mark.parametrize("name", NETWORKS)


@each
def test_a_text_changes_the_output_and_its_padding_does_not(name):
    model = network(name)
    told = model(X, LEVEL, Conditions(tokens=WORDS))
    padded = torch.cat([WORDS, torch.full((3, 7), -1)], dim=1)
    torch.testing.assert_close(model(X, LEVEL, Conditions(tokens=padded)), told, rtol=1e-4, atol=1e-5)
    # Each text by itself has less padding, or none.
    for i, length in enumerate((3, 4, 0)):
        alone = model(X[i : i + 1], LEVEL[i : i + 1], Conditions(tokens=WORDS[i : i + 1, :length]))
        torch.testing.assert_close(alone, told[i : i + 1], rtol=1e-4, atol=1e-5)
    other = model(X, LEVEL, Conditions(tokens=WORDS.flip(1)))
    assert (other[2] - told[2]).abs().max() < 1e-5
    assert all((other[i] - told[i]).abs().max() > 1e-3 for i in (0, 1))


@each
def test_a_padded_text_is_the_same_in_bf16(name):
    model = network(name)
    padded = torch.cat([WORDS, torch.full((3, 5), -1)], dim=1)
    with torch.autocast("cpu", torch.bfloat16):
        told, longer = (model(X, LEVEL, Conditions(tokens=words)).float() for words in (WORDS, padded))
        other = model(X, LEVEL, Conditions(tokens=WORDS.flip(0))).float()
    error = (told - longer).square().mean().sqrt()
    assert error < 0.02 * told.square().mean().sqrt()
    assert error < 0.1 * (told - other).square().mean().sqrt()


@each
def test_no_text_is_a_hidden_one(name):
    model = network(name)
    nothing = model(X, LEVEL, NO_CONDITIONS)
    hidden = model(X, LEVEL, Conditions(tokens=WORDS).dropped())
    torch.testing.assert_close(hidden, nothing, rtol=1e-4, atol=1e-5)
    assert hidden.isfinite().all()


@each
def test_a_fresh_network_ignores_the_text(name):
    model = network(name, fresh=True)
    with torch.no_grad():
        for part, parameter in model.named_parameters():
            if part in ("gain_out", "conv_out.weight", "patch_out.weight", "modulation.weight"):
                parameter.normal_(generator=torch.Generator().manual_seed(3))
    told = model(X, LEVEL, Conditions(tokens=WORDS))
    assert told.abs().max() > 0.01
    assert torch.equal(told, model(X, LEVEL, Conditions(tokens=WORDS.flip(0))))
