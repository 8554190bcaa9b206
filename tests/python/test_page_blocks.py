"""The blocks of Python on pages that are not made of one program, with a small run in place of theirs."""

import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import unfog
from conftest import NETWORK

DOCS = Path(__file__).parents[2] / "docs"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not DOCS.exists(), reason="installed without its repository"),
]
CLASSES = ["bag", "coat", "shoe"]
FEW = {"steps": 2, "batch": 4, "network": NETWORK, "lr": 1e-3, "preview": {"images": 1, "every": -1}}
RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (12, 16, 16, 3), np.uint8)
# Names that a page speaks of and does not make.
NAMES: dict[str, dict[str, object]] = {
    "arrays": {"fields": RNG.normal(size=(12, 16, 16, 4)).astype(np.float32)},
    "conditions": {"images": IMAGES[:3], "ages": [20.0, 50.0, 80.0]},
    "guide": {"network": lambda x, c_noise, conditions: x, "x0": torch.zeros(2, 3, 8, 8)},
    "image-conditions": {
        "images": IMAGES,
        "labels": RNG.integers(0, 2, (12, 16, 16)),
        "temperatures": RNG.normal(size=12),
    },
    "metrics": {
        "train_pixels": IMAGES.transpose(0, 3, 1, 2),
        "generated_pixels": IMAGES[::-1].copy().transpose(0, 3, 1, 2),
    },
    "networks": {"x": torch.zeros(2, 3, 16, 16), "c_noise": torch.zeros(2), "label": torch.tensor([0, 9])},
    "objectives": {"x0": torch.zeros(2, 1, 16, 16)},
    "sampling": {},
    "text": {"images": IMAGES, "captions": ["a red heart", "a blue heart", "a dark heart"] * 4},
}
# Words of blocks that need a package or files of their own, or show a line of another section; each is in one block.
OTHERS = {
    "arrays": ["import xarray"],
    "conditions": ["temperatures", "grid=", 'evaluate("obeys'],
    "image-conditions": ["picture_with_nan", "pipe("],
    "networks": ["import UNet2DModel"],
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on three classes of grey images."""
    out = tmp_path_factory.mktemp("page") / "run"
    unfog.train(IMAGES[..., 0], labels=[CLASSES[i % 3] for i in range(12)], out=out, **FEW)
    return out


@pytest.mark.parametrize("page", NAMES)
def test_blocks_run(page, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    Path("photos").mkdir()
    Path("runs/fashion").symlink_to(run)
    for i in range(3):
        Image.fromarray(IMAGES[i]).save(f"photos/{i}.png")
    np.save("images.npy", IMAGES)
    np.save("masks.npy", NAMES["image-conditions"]["labels"] > 0)
    np.savez("cells.npz", x=IMAGES, mask=NAMES["image-conditions"]["labels"] > 0, age=np.arange(12.0))
    monkeypatch.setattr(unfog, "train", partial(unfog.train, **FEW))
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text("utf-8"), re.DOTALL)
    names = {"__name__": "page", "unfog": unfog, "run": unfog.load(run), **NAMES[page]}
    done, others = 0, OTHERS.get(page, [])
    for number, block in enumerate(blocks):
        if not any(word in block for word in others):
            exec(compile(block, f"docs/{page}.md, block {number}", "exec"), names)
            done += 1
    assert done == len(blocks) - len(others)
    assert done
