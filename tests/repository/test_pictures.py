"""Pictures of the pages: each is shown and small, and those that a script draws from code are still what it draws."""

import re
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"
pytestmark = pytest.mark.skipif(not PICTURES.exists(), reason="installed without its repository")
LARGEST = 300_000  # bytes


@pytest.fixture
def draw_parts(scripts_on_path):
    import draw_parts

    return draw_parts


def test_each_picture_is_shown_on_a_page_and_is_small():
    text = "".join(path.read_text("utf-8") for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    files = [path for path in PICTURES.rglob("*") if path.is_file()]
    assert [path.name for path in files if f"pictures/{path.relative_to(PICTURES).as_posix()})" not in text] == []
    assert [path.name for path in files if path.stat().st_size > LARGEST] == []


def test_the_plans_of_parts_are_those_that_the_script_draws(draw_parts):
    drawn = {part.replace(" ", "-"): draw_parts.plan(part) for part in draw_parts.CALLS} | {"plan": draw_parts.plan()}
    assert {name: (draw_parts.OUT / f"{name}.svg").read_text("utf-8") for name in drawn} == drawn


def test_each_part_with_a_page_is_in_the_plan(draw_parts):
    pages = {page.stem.replace("-", " ") for page in draw_parts.PAGES.glob("*.md")} - {"README"}
    assert pages == draw_parts.BOXES.keys() - draw_parts.OWN
    assert pages == draw_parts.CALLS.keys() | {name.replace("-", " ") for name in draw_parts.DRAWN} - {"plan", "ranks"}


@pytest.mark.parametrize("name", ["ranks", "weighting", "loss", "value-map", "sampler"])
@pytest.mark.slow
def test_curves_are_those_of_the_code_that_pages_show(draw_parts, name):
    """Words are equal, and places within a fifth of a pixel, as processors round differently."""
    number = re.compile(r"-?\d+\.?\d*")
    drawn, stored = draw_parts.DRAWN[name](), (draw_parts.OUT / f"{name}.svg").read_text("utf-8")
    assert number.sub("", drawn) == number.sub("", stored)
    numbers = [np.array(number.findall(text), float) for text in (drawn, stored)]
    np.testing.assert_allclose(*numbers, rtol=0, atol=0.2)
