"""The contest's harness: its contestants can be trained, and its arithmetic is right."""

import json
import sys
from pathlib import Path

import pytest

import unfog
from unfog.cli.requests import read_request
from unfog.models.network_settings import build_model

QUALITY = Path(unfog.__file__).parents[2] / "benchmarks" / "quality"


@pytest.fixture
def contest(monkeypatch):
    monkeypatch.syspath_prepend(str(QUALITY))
    import contest

    yield contest
    sys.modules.pop("contest")


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
