"""The contest's harness: its contestants can be trained, and its arithmetic is right."""

import json
import shlex
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import unfog
from unfog.cli.read_request import read_request
from unfog.config.requests.evaluate import EvaluationRequest
from unfog.config.toml import update
from unfog.models.network_settings import build_model
from unfog.models.settings import SIZES
from unfog.training.settings import PowerEma

QUALITY = Path(unfog.__file__).parents[2] / "benchmarks" / "quality"


@pytest.fixture
def contest(monkeypatch):
    monkeypatch.syspath_prepend(str(QUALITY))
    import contest

    yield contest
    sys.modules.pop("contest")


@pytest.mark.slow
def test_every_contestant_of_ours_is_a_request_for_a_network_of_the_size_it_says(contest, tmp_path):
    names = [contestant.name for contestant in contest.ladder()]
    assert len(set(names)) == len(names)
    assert {"ddpm", "default", "diffusers", "denoising-diffusion-pytorch"} <= set(names)
    for contestant in contest.ladder():
        if contestant.peer:
            assert (QUALITY / "peers" / contestant.peer).is_file()
            continue
        config = read_request("train", ["fashion", *contestant.arguments(), "--images", "640"]).settings
        parameters = sum(p.numel() for p in build_model(config.network, 3).parameters())
        wanted = 1.05e6 if "tiny" in contestant.name else 4.0e6
        assert parameters == pytest.approx(wanted, rel=0.1), contestant.name
        assert config.optimizer.method.kind == ("muon" if "muon" in contestant.name else "adamw")
        assert config.data.labels == "none"
        assert config.preview.every == config.evaluate.every == config.checkpoint.every == -1


def test_flags_of_a_contestant_take_the_place_of_the_common_ones(contest):
    flags = contest.Contestant("x", "", "--network tiny --flip", common="--network small --size 32").arguments()
    assert flags == ["--network", "tiny", "--size", "32", "--flip"]
    betas = contest.Contestant("x", "", "--optimizer.betas 0.9 0.99", common="--size 32").arguments()
    assert betas == ["--size", "32", "--optimizer.betas", "0.9", "0.99"]


def test_pace_leaves_the_beginning_out(contest, tmp_path):
    log = tmp_path / "metrics.jsonl"
    # Ten seconds to warm up, then 50 images/s.
    rows = [{"step": 0, "held_out_loss": 1.0}] + [{"images": 100 * i, "seconds": 10 + 2 * i} for i in range(1, 9)]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert contest.pace(log) == pytest.approx(50)


def test_a_cell_of_ours_goes_on_where_it_was(contest, tmp_path):
    cell = contest.Cell(tmp_path, "emoji", contest.chosen("default")[0], 2, 1)
    assert cell.folder == tmp_path / "cells" / "emoji" / "2m" / "default-1"
    command = cell.train(1000, tmp_path, "fp32")
    assert command[2:4] == ["unfog", "train"]
    assert command[-6:] == ["--precision", "fp32", "--images", "1000", "--seed", "1"]
    (cell.folder / "run").mkdir(parents=True)
    (cell.folder / "run" / "config.toml").touch()
    assert cell.train(1000, tmp_path, "fp32")[2:] == ["unfog", "resume", str(cell.folder / "run")]
    with pytest.raises(SystemExit, match="nobody is not in ladder"):
        contest.chosen("nobody")


PEERS = ("edm", "diffusers_flow", "tuned", "shared")


@pytest.fixture
def peers(monkeypatch):
    pytest.importorskip("diffusers")
    monkeypatch.syspath_prepend(str(QUALITY / "peers"))
    yield {name: import_module(name) for name in PEERS}
    for name in PEERS:
        sys.modules.pop(name)


class _Zero(torch.nn.Module):
    def forward(self, x, timestep):
        return SimpleNamespace(sample=torch.zeros_like(x))


@pytest.mark.slow
def test_edm_of_a_peer_draws_what_it_was_told_the_data_is(peers):
    # With an answer of zero the guess is c_skip x, exact for a Gaussian of deviation sigma_data.
    assert float(peers["edm"].heun(_Zero(), 64, 60).std()) == pytest.approx(0.5, abs=0.01)
    # Its weighted loss is then that of guessing nothing: the residual's variance, which c_out makes one.
    torch.manual_seed(0)
    gaussian = 0.5 * torch.randn(512, 3, 16, 16)
    assert float(peers["edm"].loss_of(_Zero(), gaussian)) == pytest.approx(1, abs=0.02)


def test_tuned_peers_have_our_network_and_average(peers):
    ours = build_model(SIZES["tiny"], 3)
    theirs = peers["tuned"].network()
    assert sum(p.numel() for p in theirs.parameters()) == sum(p.numel() for p in ours.parameters())
    from diffusers.training_utils import EMAModel

    ema = EMAModel(theirs.parameters(), decay=1, use_ema_warmup=True, inv_gamma=7.94, power=1.0)
    for step in (200, 1000, 4000):
        assert 1 - ema.get_decay(step) == pytest.approx(1 - PowerEma().decay(step), rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("peer", ["edm", "diffusers_flow"])
def test_tuned_peers_train_and_draw(peers, peer, tmp_path):
    images = tmp_path / "images"
    images.mkdir()
    rng = np.random.default_rng(0)
    for i in range(64):
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), np.uint8)).save(images / f"{i}.png")
    peers[peer].main("train", str(images), tmp_path / "run", 128, 0)
    peers[peer].main("draw", str(images), tmp_path / "run", 2, 0, str(tmp_path), "19")
    assert np.load(tmp_path / "pictures.npy").shape == (2, 32, 32, 3)
    assert json.loads((tmp_path / "drawn.json").read_text())["calls"] == 19


def test_records_of_the_speedrun_are_requests():
    records = tomllib.loads((QUALITY.parent / "speedrun" / "records.toml").read_text())
    for name, record in records.items():
        assert record.keys() <= {"change", "rate", "flags", "draw"}, name
        read_request("train", ["fashion", *shlex.split(record["flags"]), "--images", "640"])
        update(EvaluationRequest(), record.get("draw", {}), name)
