"""Tutorials: their output is recorded, their pictures are there, and the commands of one run on a small scale."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / "docs").exists(), reason="installed without its repository")
TUTORIALS = sorted((ROOT / "docs/tutorials").glob("*.md"))
RECORDED = {"first-hour", "own-network-and-loss"}
LARGEST = 300_000  # bytes of a picture; the moving one of the README may have a megabyte


@pytest.fixture
def recorder(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import record_tutorials

    return record_tutorials


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_each_command_behind_a_prompt_has_its_output(page):
    blocks = re.findall(r"^```console\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S)
    assert blocks or page.stem not in RECORDED
    for block in blocks:
        assert any(not line.startswith("$ ") for line in block.splitlines()), f"not recorded: {block}"


def test_pictures_of_the_docs_exist_and_are_small():
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for picture in re.findall(r"!\[[^\]]*\]\((?!https?:)([^)]+)\)", page.read_text("utf-8")):
            file = page.parent / picture
            assert file.is_file(), (page.name, picture)
            assert file.stat().st_size < (1_000_000 if page.name == "README.md" else LARGEST), picture


def test_outputs_are_shortened_in_the_middle(recorder):
    assert recorder.shown("a\nb\rc\n\n", 2, 1) == ["a", "b", "c"]
    assert recorder.shown("1\n2\n3\n4\n5\n6\n", 2, 1) == ["1", "2", "…", "6"]


def test_a_page_is_run_in_order_and_changed_at_its_outputs_alone(recorder, tmp_path):
    page = tmp_path / "pages" / "page.md"
    page.parent.mkdir()
    page.write_text(
        "# A page\n\n<!-- file: say.py -->\n```python\nprint('from a file')\n```\n\n"
        "```console\n$ python say.py\nstale\n$ echo one; \\\n  echo two\n```\n\n```bash\nexit 1\n```\n"
    )
    text = page.read_text()
    assert recorder.main([str(page), "--folder", str(tmp_path / "work")]) == 0
    new = "$ python say.py\nfrom a file\n$ echo one; \\\n  echo two\none\ntwo\n"
    assert page.read_text() == text.replace("$ python say.py\nstale\n$ echo one; \\\n  echo two\n", new)


def test_a_command_that_fails_stops_the_recording(recorder, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```console\n$ echo why; exit 4\n```\n")
    with pytest.raises(SystemExit, match="why"):
        recorder.main([str(page), "--folder", str(tmp_path / "work")])


@pytest.mark.exhaustive
def test_the_commands_of_a_tutorial_run(tmp_path):
    page = ROOT / "docs/tutorials/own-network-and-loss.md"
    command = [sys.executable, "scripts/record_tutorials.py", page, "--quick", "--folder", tmp_path]
    before = page.read_bytes()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert page.read_bytes() == before
