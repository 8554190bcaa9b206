"""Tutorials: their output is recorded, their pictures are there, and the commands of one run on a small scale."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / "docs").exists(), reason="installed without its repository")
TUTORIALS = sorted((ROOT / "docs/tutorials").glob("*.md"))
RECORDED = {"cifar10", "cluster", "drawings", "first-hour", "latents", "own-data", "own-network-and-loss"}
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
LARGEST = 300_000  # bytes of a picture; the moving one of the README may have a megabyte


@pytest.fixture
def recorder(scripts_on_path):
    import record_tutorials

    return record_tutorials


@pytest.fixture
def notebook_recorder(recorder):
    import record_notebooks

    return record_notebooks


@pytest.fixture
def tutorial_images(scripts_on_path):
    import tutorial_images

    return tutorial_images


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


def shows(source):
    """Say whether a cell prints or shows something: it ends with a value, or trains."""
    last = ast.parse(source).body[-1]
    return isinstance(last, ast.Expr) or any(word in source for word in ("unfog.train(", "unfog.resume("))


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_notebooks_have_their_outputs(file, notebook_recorder):
    assert file.stem in notebook_recorder.NAMES
    text = file.read_text("utf-8")
    assert len(text.encode()) < notebook_recorder.LARGEST
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), (
        "run scripts/pages/record_notebooks.py"
    )
    kinds = [[output["output_type"] for output in cell["outputs"]] for cell in cells]
    assert not any("error" in each for each in kinds)
    assert [bool(each) for each in kinds] == [shows("".join(cell["source"])) for cell in cells]
    assert "image/png" in text
    outputs = json.dumps([cell["outputs"] for cell in cells])
    assert not re.search(r"(?<![\w/])/(root|home/(?!me\b)\w+|tmp|work|Users)/|site-packages", outputs), (
        "paths of a machine"
    )


def test_a_notebook_is_recorded_with_its_own_code_and_without_paths(notebook_recorder, tmp_path):
    file, folder = tmp_path / "small.ipynb", tmp_path / "folder"
    folder.mkdir()
    drive = notebook_recorder.DRIVE
    sources = [f"place = '{drive}/run'", "import os\nprint(os.getcwd(), place)\nplace"]
    file.write_text(nbformat.writes(nbformat.v4.new_notebook(cells=[*map(nbformat.v4.new_code_cell, sources)])))
    notebook_recorder.record(file, folder)
    cells = nbformat.read(file, as_version=4).cells
    assert [cell.source for cell in cells] == sources
    assert not cells[0].outputs
    printed, value = cells[1].outputs
    assert printed.text == f"/home/me {drive}/run\n"
    assert value.data["text/plain"] == f"'{drive}/run'"
    assert str(tmp_path) not in file.read_text()


def test_textures_have_no_seam_and_are_the_same_each_time(tutorial_images):
    images = tutorial_images.textures(count=200).astype(float)
    inside = np.abs(np.diff(images, axis=2)).mean()
    across = np.abs(images[:, :, 0] - images[:, :, -1]).mean()
    # 9,600 pairs of values across a side: their mean difference is that of neighbours, to a few percent.
    assert abs(across / inside - 1) < 0.1
    assert np.array_equal(images, tutorial_images.textures(count=200))


def test_clouds_of_scenes_hide_all_bands_and_plants_are_bright_in_the_near_infrared(tutorial_images):
    scenes = np.stack([tutorial_images.scene(np.random.default_rng(seed)) for seed in range(40)]).reshape(-1, 4)
    cloud = (scenes == tutorial_images.CLOUD).any(1)
    assert 0.02 < cloud.mean() < 0.4
    assert (scenes[cloud] == tutorial_images.CLOUD).all()
    blue, _, red, infrared = scenes[~cloud].astype(float).T
    plants = infrared > 2 * red  # of crops at least; of soil at most 1.4, of water under 1
    assert blue[plants].mean() < red[~plants].mean()
    assert 0.2 < plants.mean() < 0.9


@pytest.mark.exhaustive
@pytest.mark.parametrize("page", sorted(RECORDED))
def test_the_commands_of_a_tutorial_run(page, tmp_path, tutorial_images):
    file = ROOT / f"docs/tutorials/{page}.md"
    (tmp_path / "drawings").mkdir()
    for i, pixels in enumerate(tutorial_images.textures(count=120)):
        Image.fromarray(pixels).resize((72, 72)).save(tmp_path / "drawings" / f"{i:03d}.png")
    command = [sys.executable, "scripts/pages/record_tutorials.py", file, "--quick", "--folder", tmp_path / "work"]
    command += ["--images", f"drawings={tmp_path / 'drawings'}"]
    before = file.read_bytes()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert file.read_bytes() == before
