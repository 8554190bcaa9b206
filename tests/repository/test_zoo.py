"""The runs of the zoo are what their page says: each loads, draws, and has the weights whose sha256 is there."""

import hashlib
import re
from pathlib import Path

import numpy as np
import pytest

import unfog

ZOO = Path(__file__).parents[2] / "zoo"
pytestmark = pytest.mark.skipif(not ZOO.exists(), reason="installed without its repository")
RUNS = ("fashion", "emoji")
MOST_BYTES, MOST_IN_ALL = 4_000_000, 8_000_000


def weights(name: str) -> Path:
    (found,) = (ZOO / name).glob("checkpoints/*/ema.safetensors")
    return found


def test_the_zoo_is_small_and_is_what_its_page_says():
    page = (ZOO / "README.md").read_text()
    assert {path.parent.name for path in ZOO.glob("*/config.toml")} == set(RUNS)
    sizes = [sum(path.stat().st_size for path in (ZOO / name).rglob("*.*")) for name in RUNS]
    assert max(sizes) < MOST_BYTES
    assert sum(sizes) < MOST_IN_ALL
    digests = re.findall(r"\b[0-9a-f]{64}\b", page)
    assert digests == [hashlib.sha256(weights(name).read_bytes()).hexdigest() for name in RUNS]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size", "asked"),
    [("fashion", (28, 28, 1), {"label": "bag"}), ("emoji", (24, 24, 3), {"prompt": "red heart"})],
)
def test_a_run_of_the_zoo_draws(name, size, asked):
    run = unfog.load(ZOO / name)
    images = np.asarray(run.sample(2, steps=8, **asked))
    assert images.shape == (2, *size)
    # White or black ground with a thing on it: neither noise nor one colour.
    border = np.concatenate([images[:, 0].ravel(), images[:, -1].ravel()]).astype(float)
    assert images.std() > 20
    assert border.std() < images.std()
    assert "license:" in (ZOO / name / "README.md").read_text()
