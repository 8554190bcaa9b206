"""The page of symptoms has a picture and what the doctor says for each bad run, and its script still runs."""

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / "docs").exists(), reason="installed without its repository")


@pytest.fixture
def symptoms(scripts_on_path):
    import draw_symptoms

    return draw_symptoms


def test_each_symptom_has_its_picture_and_what_the_doctor_says(symptoms):
    page = symptoms.PAGE.read_text("utf-8")
    assert sorted(re.findall(r"\(pictures/fix-(\w+)\.png\)", page)) == sorted(symptoms.SYMPTOMS)
    for name, symptom in symptoms.SYMPTOMS.items():
        assert (symptoms.PICTURES / f"fix-{name}.png").stat().st_size < 120_000
        block = re.search(rf"<!-- doctor: {name} -->\n```console\n(.*?)^```$", page, re.M | re.S)
        assert bool(block) == bool(symptom.codes)
        if block:
            command, *said = block[1].splitlines()
            assert command == f"$ {symptom.asked}"
            assert re.match(r"  (fatal|warning|hint): ", said[0])


def test_findings_are_written_into_their_block_alone(symptoms):
    page = "".join(f"<!-- doctor: {name} -->\n```console\n$ old {name}\n```\n" for name in ("a", "b"))
    assert symptoms.with_findings(page, "b", ["$ new", r"  hint: \1"]) == page.replace("$ old b", "$ new\n  hint: \\1")


def test_the_nearest_image_is_found_whatever_the_order(symptoms):
    random = np.random.default_rng(0)
    real = [Image.fromarray(random.integers(0, 256, (4, 4, 3), np.uint8)) for _ in range(5)]
    near = [Image.fromarray((np.asarray(image).astype(int) + 3).clip(0, 255).astype(np.uint8)) for image in real]
    assert symptoms.nearest(near[::-1], real) == real[::-1]


def test_images_keep_their_shape_in_the_picture(symptoms):
    wide, square = Image.new("RGB", (32, 16), (0, 0, 0)), Image.new("RGB", (16, 16), (0, 0, 0))
    page = np.asarray(symptoms.sheet([("wide", [wide]), ("square", [square])]))
    black = (page[symptoms.TOP :] == 0).all(2)
    assert black[:, : page.shape[1] // 2].sum() * 2 == pytest.approx(black[:, page.shape[1] // 2 :].sum(), rel=0.15)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["steps", "mirrored", "cut"])  # those that need no drawings of another package
def test_the_script_runs_and_changes_nothing_in_quick(symptoms, name, tmp_path):
    files = [symptoms.PAGE, symptoms.PICTURES / f"fix-{name}.png"]
    before = [file.read_bytes() for file in files]
    assert symptoms.main([str(tmp_path), "--quick", "--only", name]) == 0
    assert [file.read_bytes() for file in files] == before
    assert len(list((tmp_path / f"{name}-left").glob("0*.png"))) >= symptoms.COUNT
