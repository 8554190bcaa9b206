"""Whole runs with objectives that learn: interrupted equals uninterrupted, and everything that a run does works."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import unfog
from conftest import NETWORK, TRANSFORMER, without_clock
from unfog.inference.exports.diffusers import export_difference
from unfog.training.checkpoints import format as checkpoint

pytestmark = pytest.mark.slow

IMAGES = np.random.default_rng(0).integers(0, 256, (120, 8, 8, 1), dtype=np.uint8)
COMMON = {
    "network": TRANSFORMER,
    "precision": "fp32",
    "device": "cpu",
    "batch": 8,
    "microbatch": 3,
    "steps": 12,
    "preview": {"every": 12, "images": 2},
    "evaluate": {"every": 12, "images": 4, "levels": 2},
    "checkpoint": {"every": 6, "keep": 9},
    "log": {"every": 3},
}
LEARNED = {"path": "vp", "schedule": "cosine:steps=50,zero_terminal=1", "target": "v"}


def trained(out: Path, **settings: object) -> Path:
    labels = np.arange(len(IMAGES)) % 3
    return unfog.train(IMAGES, labels=labels, out=out, **COMMON | settings).path


@pytest.mark.parametrize(
    "settings",
    [
        {"weighting": "uncertainty", "diffusion": {"adaptive": 0.5}, "sampler": {"steps": 2}},
        {"diffusion": {"learned_variance": True}, "sampler": {"kind": "ddpm", "steps": 3}, **LEARNED},
    ],
    ids=["levels", "learned variance"],
)
def test_interrupted_is_uninterrupted(tmp_path: Path, settings: dict[str, object]) -> None:
    straight, broken = (trained(tmp_path / name, **settings) for name in ("straight", "broken"))
    shutil.rmtree(broken / "checkpoints/00000012")
    unfog.resume(broken)
    for name in (*(f"checkpoints/00000012/{file}" for file in checkpoint.FILES), "samples/00000012.png"):
        assert (broken / name).read_bytes() == (straight / name).read_bytes(), name
    assert without_clock(broken / "metrics.jsonl") == without_clock(straight / "metrics.jsonl")
    saved = json.loads((broken / "checkpoints/00000012/state.json").read_text())
    assert saved["levels"]["seen"] == 12 * 8 if "weighting" in settings else saved["levels"] is None
    assert "equal to the bit" in unfog.verify(broken)
    pictures = unfog.load(broken).sample(2)
    assert pictures.shape == (2, 8, 8, 1)
    assert unfog.load(broken).sample(2, guidance=3.0, seed=1).shape == (2, 8, 8, 1)


def test_runs_follow_what_they_measure(tmp_path: Path) -> None:
    """Uncertainty is plain MSE, and adaptive levels are even ones, until something is learned."""
    weights = [
        (trained(tmp_path / name, steps=4, **settings) / "checkpoints/00000004/model.safetensors").read_bytes()
        for name, settings in (
            ("plain", {"weighting": "plain"}),
            ("uncertainty", {"weighting": "uncertainty"}),
            ("adaptive", {"diffusion": {"adaptive": 0.5}}),
        )
    ]
    assert len(set(weights)) == 3


def test_the_variance_is_learned_and_used(tmp_path: Path) -> None:
    """The ddpm sampler heeds the second half of the output, and only it does."""
    import torch

    run = unfog.load(trained(tmp_path / "run", network=NETWORK, diffusion={"learned_variance": True}, **LEARNED))
    assert run.network.conv_out.weight.shape[0] == 2
    before = {kind: run.sample(4, steps=5, sampler=kind, guidance=1.0) for kind in ("ddpm", "ddim")}
    with torch.no_grad():
        run.network.conv_out.bias[1] += 3.0
    after = {kind: run.sample(4, steps=5, sampler=kind, guidance=1.0) for kind in ("ddpm", "ddim")}
    assert np.array_equal(before["ddim"], after["ddim"])
    assert not np.array_equal(before["ddpm"], after["ddpm"])
    assert export_difference(run) < 1e-5
