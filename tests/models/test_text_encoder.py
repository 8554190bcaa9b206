"""Texts in the networks: exact masks, an output of zero at first, gradients, dropout, and a task that needs words."""

import pytest
import torch
from torch.nn import functional as F

from text_columns import TEXTS, format_of_texts, square, tokens_of
from unfog.diffusion.diffusion import Diffusion
from unfog.diffusion.objective import Objective
from unfog.errors import RequestError
from unfog.models.edm2_unet import MPUNetModel
from unfog.models.layers import ConditionalNetwork
from unfog.models.network_settings import build_model
from unfog.models.settings import DdpmPytorch, DiT, MPUNet, TextEncoderSettings, UNet
from unfog.training.optimizers import split_for_muon
from unfog.values.condition_format import ConditionFormat
from unfog.values.conditions import NO_CONDITIONS, Conditions

NETWORKS = {
    "unet": UNet(channels=(16, 32), attention=(False, True), head_channels=16, norm_groups=8),
    "mpunet": MPUNet(channels=(16, 32), attention=(False, False)),
    "dit": DiT(width=32, depth=2, head_channels=16, patch=4),
}
X, LEVEL = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(1)), torch.linspace(1, 900, 3)
WORDS = torch.tensor([[5, 9, 2, -1], [200, 255, 0, 1], [-1, -1, -1, -1]])


def network(name: str, fresh: bool = False, **others) -> ConditionalNetwork:
    torch.manual_seed(0)
    model = build_model(NETWORKS[name], 1, format_of_texts(**others)).eval()
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


@each
def test_gradients_reach_every_part_of_the_encoder(name):
    model = network(name)
    model(X, LEVEL, Conditions(tokens=WORDS)).square().mean().backward()
    without = [part for part, p in model.named_parameters() if "text" in part and (p.grad is None or not p.grad.any())]
    assert not without
    words = model.text_encoder.words.weight.grad
    seen = {*WORDS[WORDS >= 0].tolist(), model.text_encoder.vocabulary}  # and the start
    assert {*words.abs().sum(1).nonzero().flatten().tolist()} == seen


@each
def test_recomputed_blocks_give_the_same_bits(name):
    gradients = []
    for checkpointing in (False, True):
        model = network(name)
        model.checkpointing = checkpointing
        model(X, LEVEL, Conditions(tokens=WORDS)).square().mean().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients))


@each
def test_texts_are_beside_every_other_condition(name):
    model = network(name, classes=("a", "b"), augment_inputs=9, mask_channels=1)
    told = Conditions(torch.tensor([0, 1, -1]), torch.zeros(3, 9), (X > 0).float(), tokens=WORDS)
    assert model(X, LEVEL, told).shape == X.shape
    assert not torch.equal(model(X, LEVEL, told), model(X, LEVEL, told.dropped(only="tokens")))


def test_muon_takes_matrices_and_no_embeddings():
    for name in NETWORKS:
        model = network(name)
        names = {id(p): part for part, p in model.named_parameters()}
        matrices, others = ([names[id(p)] for p in part] for part in split_for_muon(model))
        assert any("text_encoder.layers" in part for part in matrices)
        assert any(".text." in part for part in matrices)
        assert {"text_encoder.words.weight", "text_encoder.places.weight", "text_embedding.weight"} <= {*others}


def test_a_text_is_hidden_whole():
    torch.manual_seed(0)
    x0, words, seen = torch.randn(8, 1, 8, 8), torch.arange(48).reshape(8, 6), []

    def remember(x, level, conditions):
        seen.append(conditions.tokens)
        return x

    objective = Objective(Diffusion(), 0.5, 0.3, format_of_texts().spans)
    objective(remember, x0, Conditions(tokens=words))
    hidden = (seen[0] == -1).all(1)
    assert 0 < hidden.sum() < 8
    assert torch.equal(seen[0][~hidden], words[~hidden])


def test_a_network_without_texts_refuses_them():
    model = build_model(NETWORKS["unet"], 1)
    with pytest.raises(RequestError, match="a text was given"):
        model(X, LEVEL, Conditions(tokens=WORDS))
    with pytest.raises(RequestError, match="unet, mpunet, dit"):
        build_model(DdpmPytorch(width=16), 1, format_of_texts())
    with pytest.raises(RequestError, match="auto"):
        build_model(NETWORKS["unet"], 1, format_of_texts(width=0))


def test_a_network_has_no_layer_for_texts_that_are_not_there():
    for settings in NETWORKS.values():
        names = [*build_model(settings, 1, ConditionFormat(("a", "b"), 9)).state_dict()]
        assert not any("text" in name for name in names)


def test_the_width_follows_that_of_the_network():
    assert [TextEncoderSettings.width_for(widest) for widest in (16, 80, 256, 2048)] == [64, 96, 256, 512]
    with pytest.raises(RequestError, match="multiple of 32"):
        TextEncoderSettings(width=50)


@pytest.mark.slow
@each
def test_texts_compile_to_one_graph(name):
    model, graphs = network(name), []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=count, fullgraph=True, dynamic=False)
    padded = torch.cat([WORDS, torch.full((3, 2), -1)], dim=1)
    for words in (padded, padded.flip(1), torch.full_like(padded, -1)):  # texts of other lengths in one shape
        told = Conditions(tokens=words)
        torch.testing.assert_close(compiled(X, LEVEL, told), model(X, LEVEL, told), rtol=1e-4, atol=1e-5)
    assert len(graphs) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("name", "lr", "steps"), [("unet", 3e-3, 120), ("mpunet", 5e-2, 60), ("dit", 1e-2, 100)])
def test_a_network_learns_to_obey_words(name, lr, steps):
    """In noise alone, the best guess without a text is the mean of the eight pictures."""
    torch.manual_seed(0)
    model = build_model(NETWORKS[name], 3, format_of_texts())
    words = torch.tensor([tokens_of(text) for text in TEXTS])
    images = torch.stack([torch.from_numpy(square(text, 8)).permute(2, 0, 1) for text in TEXTS]).float() / 127.5 - 1
    chance = (images - images.mean(0)).square().mean().item()
    optimizer, level = torch.optim.AdamW(model.parameters(), lr), torch.full((8,), 999.0)

    def error(seed: int, words: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
        return F.mse_loss(model(noise, level, Conditions(tokens=words)), images)

    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1, step / 10) * (1 - step / steps)
        optimizer.zero_grad()
        error(step, words).backward()
        optimizer.step()
        if isinstance(model, MPUNetModel):
            model.project()
    with torch.no_grad():
        assert error(1000, words) < 0.4 * chance
        assert error(1000, words.roll(2, 0)) > chance, "words of another colour draw it"
