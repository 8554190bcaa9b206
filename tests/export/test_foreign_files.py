"""Files of weights that hold more than tensors run nothing; commands of docs/from parse."""

import pickle
import re
import shlex
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hostile import Trap, safetensors
from test_foreign_networks import SHAPES, references
from unfog.cli.main import main
from unfog.cli.read_request import read_request

PAGES = sorted((Path(__file__).parents[2] / "docs/from").glob("*.md"))


def test_a_pickle_runs_nothing(tmp_path, capsys):
    trap = Trap(tmp_path / "ran")
    (tmp_path / "old.pt").write_bytes(pickle.dumps(trap))
    assert "a pickle of torch before 1.6" in _refusal(tmp_path / "old.pt", capsys)
    (tmp_path / "network.pkl").write_bytes(pickle.dumps(trap))
    assert "is not a folder" in _refusal(tmp_path / "network.pkl", capsys)
    torch.save({"model": trap}, tmp_path / "model-1.pt")
    assert "cannot be read as plain tensors" in _refusal(tmp_path / "model-1.pt", capsys)
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_what_a_small_file_unpacks_to_or_claims_is_looked_at_before(tmp_path, capsys, monkeypatch):
    torch.save({"a": torch.zeros(3)}, tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain:
        members = {name: plain.read(name) for name in plain.namelist()}
    with zipfile.ZipFile(tmp_path / "deflated.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, bytes(10**6) if name.endswith(".pkl") else content)
    monkeypatch.setattr(torch, "load", None)  # nothing is unpickled
    assert "compressed members" in _refusal(tmp_path / "deflated.pt", capsys)
    monkeypatch.setattr("unfog.export.foreign_weights._LARGEST_PICKLE", 10)
    assert "a pickle of over" in _refusal(tmp_path / "plain.pt", capsys)
    monkeypatch.undo()
    wide = {
        "init_conv.weight": (9000, 3, 7, 7),
        "time_mlp.1.weight": (9000, 9000),
        "final_conv.weight": (3, 9000, 1, 1),
    }
    torch.save({name: torch.zeros(1).expand(shape) for name, shape in wide.items()}, tmp_path / "wide.pt")
    assert "bytes in a file of" in _refusal(tmp_path / "wide.pt", capsys)
    entries = {f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(50_001)}
    (tmp_path / "many.safetensors").write_bytes(safetensors(entries))
    assert "over 50,000 tensors" in _refusal(tmp_path / "many.safetensors", capsys)


def test_a_network_far_larger_than_its_weights_is_not_made(tmp_path, capsys):
    """Settings are told by single shapes: of a few kilobytes they may be those of gigabytes."""
    marks = {"emb_fourier.freqs": (20_000,), "emb_noise.weight": (1, 1), "enc.8x8_conv.weight": (20_000, 1)}
    marks |= {"enc.8x8_block0.conv_res1.weight": (20_000, 1), "enc.8x8_block1.conv_res1.weight": (20_000, 1)}
    marks |= {"enc.16x16_block0.conv_res1.weight": (20_000, 1), "enc.16x16_conv.weight": (20_000, 4, 1, 1)}
    save_file({name: torch.zeros(shape) for name, shape in marks.items()}, tmp_path / "a.safetensors")
    said = _refusal(tmp_path / "a.safetensors", capsys)
    assert re.search("does not fit|looks like|must be", said), said
    assert "bug in unfog" not in said


def _refusal(path, capsys) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["train", "fashion", "--init", str(path), "--steps", "1"])
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_the_pages_make_requests(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = page.read_text().replace("\\\n", " ")
    found = re.findall(r"^    (?:.*-m )?unfog (train .*)$", text, re.MULTILINE)
    assert found
    case = "ddpmpp" if page.stem == "edm" else "ddpm"
    save_file(references.weights(SHAPES[case]), tmp_path / "w.safetensors")
    for words in map(shlex.split, found):
        words[1] = "fashion"
        if "--init" in words:
            words[words.index("--init") + 1] = "w.safetensors"
        assert read_request("train", words[1:]).source == "fashion"
