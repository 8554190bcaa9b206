"""The examples of docs/python.md, run in order."""

import re
from pathlib import Path

import pytest

from conftest import NETWORK

PAGE = Path(__file__).parents[2] / "docs" / "python.md"


@pytest.mark.slow
def test_the_examples_run_in_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 5
    names: dict[str, object] = {"__name__": "page", "SMALLER": NETWORK, "FEW": {"images": 1, "every": -1}}
    for block in blocks:
        # As the page has them, network and previews take half a minute.
        quick = block.replace('network="tiny"', "network=SMALLER").replace("=1e-3,", "=1e-3, preview=FEW,")
        exec(compile(quick, str(PAGE), "exec"), names)
    said = capsys.readouterr().out
    assert re.search(r"# (<run runs/first: .*>)", blocks[0])[1].replace("0.99M", "0.05M") in said
    assert "saved runs/classes/checkpoints/00000006" in said
    assert (tmp_path / "odd.png").is_file()
