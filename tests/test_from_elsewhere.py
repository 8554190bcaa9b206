"""Files of weights that no network here is equal to are refused with the reason; commands of docs/from parse."""

import pickle
import re
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from unfog.cli.main import main
from unfog.cli.requests import read_request

PAGES = sorted((Path(__file__).parent.parent / "docs/from").glob("*.md"))


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["unet.emb_fourier.freqs", "unet.emb_noise.weight", "unet.enc.64x64_conv.weight"], "EDM2"),
        (["model.map_layer0.weight", "model.map_layer1.weight", "model.enc.32x32_conv.weight"], "SongUNet"),
        (["model.init_conv.weight", "model.time_mlp.1.weight", "model.final_conv.weight"], "linear attention"),
        (["something.weight"], "is not a folder"),
    ],
)
def test_weights_that_do_not_map_are_refused_with_the_reason(tmp_path, names, reason, capsys):
    save_file({name: torch.zeros(2) for name in names}, tmp_path / "w.safetensors")
    assert reason in _refusal(tmp_path / "w.safetensors", capsys)


def test_a_pickle_is_not_opened(tmp_path, capsys):
    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    (tmp_path / "model-1.pt").write_bytes(pickle.dumps(Trap()))
    assert "A pickle is not read" in _refusal(tmp_path / "model-1.pt", capsys)
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
    for words in map(shlex.split, found):
        words[1] = "fashion"
        assert read_request("train", words[1:]).settings.training.batch
