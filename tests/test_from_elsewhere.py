"""Files of weights that hold more than tensors run nothing; commands of docs/from parse."""

import pickle
import re
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from test_elsewhere_networks import SHAPES, references
from unfog.cli.main import main
from unfog.cli.requests import read_request

PAGES = sorted((Path(__file__).parent.parent / "docs/from").glob("*.md"))


def test_a_pickle_runs_nothing(tmp_path, capsys):
    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    (tmp_path / "old.pt").write_bytes(pickle.dumps(Trap()))
    assert "a pickle of torch before 1.6" in _refusal(tmp_path / "old.pt", capsys)
    (tmp_path / "network.pkl").write_bytes(pickle.dumps(Trap()))
    assert "is not a folder" in _refusal(tmp_path / "network.pkl", capsys)
    torch.save({"model": Trap()}, tmp_path / "model-1.pt")
    assert "cannot be read as plain tensors" in _refusal(tmp_path / "model-1.pt", capsys)
    assert not (tmp_path / "ran").exists()


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
        assert read_request("train", words[1:]).settings.training.batch
