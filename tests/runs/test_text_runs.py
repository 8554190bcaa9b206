"""Runs with texts: resumed, split into micro-batches, planned, and begun from weights without texts."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import unfog
from conftest import FEW_PICTURES
from random_weights import randomized
from text_columns import Squares, format_of_texts, tokens_of
from unfog.config.requests.sample import SampleRequest
from unfog.config.schema import Config
from unfog.config.toml import from_toml, to_toml
from unfog.data.sources import registry
from unfog.diffusion.denoiser import Denoiser
from unfog.errors import RequestError
from unfog.models.settings import DiT, TextEncoderSettings
from unfog.pipeline.build import build_network
from unfog.pipeline.generate import conditional_denoiser
from unfog.planning.flops import NetworkCost
from unfog.planning.memory_estimate import MemoryEstimator
from unfog.planning.microbatch import memory_upper_bound
from unfog.runs.sample import sample
from unfog.training.settings import AdamW, Optimizer
from unfog.values.conditions import Conditions

NEVER = {"every": -1}
UNET = "unet:channels=8/16,norm_groups=4,attention=0/0,mid_attention=false,head_channels=8"
TINY = {"size": 8, "network": UNET, "batch": 4, "device": "cpu", "evaluate": NEVER, **FEW_PICTURES}
FACTS = format_of_texts().text


@pytest.fixture
def squares(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_registered", [*registry._registered, Squares])
    path = tmp_path / "set.squares"
    path.write_text("24")
    return path


def weights(run):
    return run.network.state_dict()


@pytest.mark.slow
def test_a_resumed_run_equals_one_that_ran_through(squares, tmp_path, capsys):
    through = unfog.train(squares, out=tmp_path / "through", steps=3, precision="fp32", **TINY)
    said = "".join(capsys.readouterr())
    assert "text_encoder.width = 64: by the widest layer of the network, 16" in said
    assert through.config.text_encoder == TextEncoderSettings(2, 64)
    unfog.train(squares, out=tmp_path / "run", steps=2, precision="fp32", ema_snapshots=NEVER, **TINY)
    short = unfog.resume(tmp_path / "run", steps=3)
    one, other = weights(through), weights(short)
    assert {*one} == {*other}
    assert all(torch.equal(one[name], other[name]) for name in one)
    with pytest.raises(RequestError, match=r"text_encoder\.width"):
        unfog.resume(tmp_path / "run", steps=4, text_encoder={"width": 96})


@pytest.mark.slow
def test_a_text_is_new_and_at_zero_from_weights_without_it(squares, tmp_path, capsys):
    pictures = np.random.default_rng(0).integers(0, 255, (16, 8, 8, 3), np.uint8)
    plain = unfog.train(pictures, out=tmp_path / "plain", steps=2, optimizer={"lr": 1e-2}, **TINY)
    run = unfog.train(squares, out=tmp_path / "run", steps=1, init=tmp_path / "plain", optimizer={"lr": 1e-9}, **TINY)
    assert "text = text: its layers are new and begin at zero" in "".join(capsys.readouterr())
    x, level = torch.randn(2, 3, 8, 8), torch.tensor([10.0, 800.0])
    told = Conditions(tokens=torch.tensor([tokens_of("r b"), tokens_of("")]))
    with torch.no_grad():
        torch.testing.assert_close(run.network(x, level, told), plain.network(x, level), rtol=1e-3, atol=1e-4)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """A run of a few steps with random weights, so that each text has an effect."""
    rng = np.random.default_rng(0)
    captions = ["a red heart", "a dark heart", "a red star", "a dark star"] * 6
    run = unfog.train(
        rng.integers(0, 255, (24, 8, 8, 3), np.uint8),
        conditions={"text": captions, "age": rng.random(24)},
        labels=[0, 1] * 12,
        out=tmp_path_factory.mktemp("drawn") / "run",
        steps=2,
        condition_dropout=0.1,
        precision="fp32",
        **TINY,
    )
    run.network.load_state_dict(randomized(run.network).state_dict())
    return run


@pytest.mark.slow
def test_a_negative_prompt_takes_the_place_of_no_text(drawn):
    config, (tokens,) = drawn.config, dict(drawn.config.conditions.parse({"text": "dark star"}))["text"]
    asked = {"n": 2, "prompt": ["a red heart", "star"], "given": {"age": 0.5}, "label": [0, 1]}
    prepared = drawn.prepare(**asked, guidance=3, negative="Dark star")
    assert prepared.generation.negative == tokens
    assert "negative dark star" in prepared.caption
    assert drawn.digest(prepared) != drawn.digest(drawn.prepare(**asked, guidance=3))
    denoiser, x, logsnr = Denoiser(drawn.network, config.diffusion), torch.randn(2, 3, 8, 8), torch.zeros(2)
    with torch.no_grad():
        told = prepared.generation.conditions(config, range(2), torch.device("cpu"))
        away = Conditions(*(None if each is None else each.clone() for each in told.dropped()))
        away = away._replace(tokens=torch.tensor([tokens, tokens]))
        more, less = denoiser(x, logsnr, told), denoiser(x, logsnr, away)
        guided = conditional_denoiser(denoiser, config, prepared.generation, told)
        torch.testing.assert_close(guided(x, logsnr), less + 3 * (more - less))
        # With a weaker network only its text is another one.
        less = 0.5 * denoiser(x, logsnr, told._replace(tokens=away.tokens))
        guided = conditional_denoiser(
            denoiser, config, prepared.generation, told, lambda *inputs: 0.5 * denoiser(*inputs)
        )
        torch.testing.assert_close(guided(x, logsnr), less + 3 * (more - less))
        # Outside of the interval nothing is guided.
        outside = replace(prepared.generation, interval=(0.9, 1.0))
        torch.testing.assert_close(conditional_denoiser(denoiser, config, outside, told)(x, logsnr), more)
        # With a weight for each condition it is told wherever the text is hidden.
        weighed = replace(prepared.generation, guidance=(("class", 2.0), ("text", 3.0)))
        none = told._replace(tokens=away.tokens, label=torch.full((2,), -1))
        steps = [denoiser(x, logsnr, each) for each in (none, told._replace(tokens=away.tokens), told)]
        guided = conditional_denoiser(denoiser, config, weighed, told)(x, logsnr)
        torch.testing.assert_close(guided, steps[0] + 2 * (steps[1] - steps[0]) + 3 * (steps[2] - steps[1]))
    for none in ("", " "):
        assert drawn.prepare(**asked, guidance=3, negative=none).generation.negative == ()
    assert drawn.prepare(**asked, guidance=3, negative_prompt="dark").generation.negative == (
        *drawn.config.conditions.read_negative("dark"),
    )
    refused = [({}, "guidance = 1"), ({"guidance": 3, "negative": 5}, "negative")]
    for wrong, said in [*refused, ({"guidance": {"age": 2}}, "whose weight is 1"), ({"guidance": {"text": 0}}, "is 0")]:
        with pytest.raises(RequestError, match=said):
            drawn.prepare(**asked, **{"guidance": 1, "negative": "dark", **wrong})


@pytest.mark.slow
def test_words_that_are_one_prompt_in_pieces_are_named(drawn, tmp_path, capsys):
    """`--prompt a red heart -n 2` was advised to draw a third sample."""

    def said(name, *prompts, n=2):
        sample(SampleRequest(run=drawn.path, prompt=prompts, n=n, steps=1, device="cpu", out=tmp_path / name))
        return "".join(capsys.readouterr())

    told = '3 prompts of one word each: a, red, heart; one prompt of several words stands in quotes: --prompt "a red'
    for n in (2, 3):
        words = said(str(n), "a", "red", "heart", n=n)
        assert told in words
        assert "-n 3" not in words
        assert ("the first 2 of 3 prompts are drawn" in words) == (n == 2)
    assert "one word each" not in said("unspaced", "赤い花", "青い鳥")
    assert "-n 3 draws all of them" in said("phrases", "a red heart", "dark", "star")
    assert "one word each" not in said("one", "heart")


@pytest.mark.slow
def test_the_way_between_two_seeds_is_animated_with_its_pictures_as_frames(drawn, tmp_path, capsys):
    file, out = tmp_path / "way.webp", tmp_path / "out"
    way = {"n": 3, "to_seed": 2, "prompt": ("star",), "label": ("0",)}
    sample(SampleRequest(run=drawn.path, animate=file, steps=1, device="cpu", out=out, **way))
    assert f"animation: {file}" in capsys.readouterr().err
    shown = []
    with Image.open(file) as image:
        assert image.n_frames == 3  # and not one for each step
        for number in range(3):
            image.seek(number)
            shown.append(np.asarray(image.convert("RGB"), int))
    # One picture and not the grid of all; WebP has losses.
    assert shown[0].shape == (128, 128, 3)
    for number, picture in enumerate(shown):
        (one,) = out.glob(f"{number:06d}*.png")
        expected = np.asarray(Image.open(one).convert("RGB"), int).repeat(16, 0).repeat(16, 1)
        assert np.abs(picture - expected).mean() < 25
    assert np.abs(shown[0] - shown[2]).mean() > 30


@pytest.mark.slow
def test_captions_that_alternate_between_two_seeds_are_warned_of(drawn, capsys):
    for prompt, seed, warned in (
        (["a red heart", "star"], 2, True),
        (["star"], 2, False),
        (["dark", "star"], None, False),
    ):
        drawn.prepare(3, prompt=prompt, given={"age": 0.5}, label=1, to_seed=seed)
        assert ("which alternate on the way to seed 2; give one" in capsys.readouterr().err) is warned


def test_plans_count_encoder_and_attention():
    network, adamw = DiT(width=16, depth=1, head_channels=8, patch=4), Optimizer(lr=1e-3, method=AdamW())
    config = replace(Config(), network=network, optimizer=adamw, data=replace(Config().data, size=16, channels=3))
    with_text = replace(config, columns=(FACTS,), text_encoder=TextEncoderSettings(2, 96))
    costs = [NetworkCost.of(lambda c=c: build_network(c), c.input_shape, c.conditions) for c in (config, with_text)]
    assert costs[1].training > costs[0].training + 3 * 2 * 7 * 2 * 12 * 96**2  # matrices of two layers for 7 tokens
    peaks = [MemoryEstimator(each, "cpu").step(2, False).total for each in (config, with_text)]
    assert peaks[1] > peaks[0] + 4 * 4 * 2 * 12 * 96**2  # weights, their average, and two moments
    assert memory_upper_bound(with_text, 2) - memory_upper_bound(config, 2) > peaks[1] - peaks[0]


def test_settings_of_the_encoder_are_kept_in_files():
    config = replace(Config(), text_encoder=TextEncoderSettings(3, 128))
    assert from_toml(to_toml(config), Config()).text_encoder == TextEncoderSettings(3, 128)
