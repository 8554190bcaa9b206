"""The script of the speedrun, end to end at the smallest scale, and its files."""

import json
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from conftest import NETWORK
from unfog.cli.read_request import read_request

FOLDER = Path(__file__).parents[2] / "benchmarks/speedrun"


@pytest.fixture
def record(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import record

    yield record
    sys.modules.pop("record")


SMALLEST = f"""
[one]
change = "a change"
rate = 0.2
flags = "--network {NETWORK} --batch 4 --size 8 --sampler.steps 3 --device cpu"
[guided]
change = "too many calls"
rate = 0.2
flags = "--network {NETWORK} --batch 4 --size 8 --sampler.steps 21 --device cpu"
"""


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_record_is_trained_drawn_measured_and_not_done_again(record, tmp_path, capsys):
    random = np.random.default_rng(0)
    (tmp_path / "data").mkdir()
    for i in range(30):
        Image.fromarray(random.integers(0, 256, (8, 8, 3), np.uint8)).save(tmp_path / "data" / f"{i}.png")
    (tmp_path / "records.toml").write_text(SMALLEST)
    given = ["--source", str(tmp_path / "data"), "--records", str(tmp_path / "records.toml"), "--minutes", "1"]
    given += ["-n", "12", "--features", "pixels"]
    record.main([str(tmp_path / "out"), "one", *given])
    line = capsys.readouterr().out.splitlines()[-1]
    stored = json.loads((tmp_path / "out/one/0.json").read_text())
    assert stored["images"] == 12
    assert stored["calls"] == 3
    assert stored["measured"]["kid"]["n"] == 12
    assert line == record.row("one", stored)
    assert line.count("|") == 10
    before = (tmp_path / "out/one/0/metrics.jsonl").read_bytes()
    record.main([str(tmp_path / "out"), "one", *given])
    assert (tmp_path / "out/one/0/metrics.jsonl").read_bytes() == before
    with pytest.raises(SystemExit, match="21 calls"):
        record.main([str(tmp_path / "out"), "guided", *given])


def test_every_record_is_a_recipe_that_the_command_takes():
    for one in tomllib.loads((FOLDER / "records.toml").read_text()).values():
        assert set(one) - {"draw"} == {"change", "rate", "flags"}
        assert read_request("train", ["fashion", *one["flags"].split(), "--images", "640"]).settings.data.size == 32
