"""Runs with texts: resumed, split into micro-batches, planned, begun from weights without texts, and not exported."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import unfog
from text_columns import Squares, tokens_of
from unfog.config.schema import Config
from unfog.config.toml import from_toml, to_toml
from unfog.data.sources import registry
from unfog.errors import RequestError
from unfog.models.settings import SIZES, TextEncoderSettings
from unfog.pipeline.build import build_network
from unfog.planning.flops import NetworkCost
from unfog.planning.memory_estimate import MemoryEstimator
from unfog.planning.microbatch import memory_upper_bound
from unfog.values.condition_kinds import ColumnFacts
from unfog.values.conditions import Conditions

NEVER = {"every": -1}
UNET = "unet:channels=8/16,norm_groups=4,attention=0/0,mid_attention=false,head_channels=8"
TINY = {"size": 8, "network": UNET, "batch": 4, "device": "cpu", "preview": NEVER, "evaluate": NEVER}
FACTS = ColumnFacts("text", "text", statistics=(256.0, 6.0))


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
    with pytest.raises(RequestError, match="no format of an export"):
        short.export(tmp_path / "export")
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


def test_plans_count_encoder_and_attention():
    config = replace(Config(), network=SIZES["tiny"], data=replace(Config().data, size=16, channels=3))
    with_text = replace(config, columns=(FACTS,), text_encoder=TextEncoderSettings(2, 96))
    costs = [NetworkCost.of(lambda c=c: build_network(c), c.input_shape, c.conditions) for c in (config, with_text)]
    assert costs[1].training > costs[0].training + 3 * 2 * 7 * 2 * 12 * 96**2  # matrices of two layers for 7 tokens
    peaks = [MemoryEstimator(each, "cpu").step(2, False).total for each in (config, with_text)]
    assert peaks[1] > peaks[0] + 4 * 4 * 2 * 12 * 96**2  # weights, their average, and two moments
    assert memory_upper_bound(with_text, 2) > peaks[1]


def test_settings_of_the_encoder_are_kept_in_files():
    config = replace(Config(), text_encoder=TextEncoderSettings(3, 128))
    assert from_toml(to_toml(config), Config()).text_encoder == TextEncoderSettings(3, 128)
