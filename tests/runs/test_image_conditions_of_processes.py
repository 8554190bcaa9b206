"""Images as conditions in several processes that are killed, and in compiled networks."""

import numpy as np
import pytest
import torch
from PIL import Image

from launches import ended, kill_after_checkpoint, launched, output  # noqa: F401  a fixture
from random_weights import randomized
from tiny_networks import NETWORKS
from unfog.models.network_settings import build_model
from unfog.training.checkpoints.load import read_tensors
from unfog.values.condition_format import ConditionFormat
from unfog.values.condition_kinds import ColumnFacts
from unfog.values.conditions import Conditions

H, W = 8, 16
FACTS = (
    ColumnFacts("depth", "image", statistics=(1.0, H, W, -5.0, 20.0)),
    ColumnFacts("hole", "hole", statistics=(3.0, H, W)),
    ColumnFacts("mask", "mask", ("a", "b"), (1.0, H, W)),
)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.usefixtures("ended")
def test_two_ranks_with_images_that_are_killed_end_as_one_process_would(tmp_path):
    rng = np.random.default_rng(0)
    for name in ("images", "masks"):
        (tmp_path / name).mkdir()
    for i in range(40):
        Image.fromarray(rng.integers(0, 2, (H, W), np.uint8)).save(tmp_path / "masks" / f"{i:03}.png")
        Image.fromarray(rng.integers(0, 255, (H, W, 3), np.uint8)).save(tmp_path / "images" / f"{i:03}.png")
    words = ["--condition", f"degrade:factor=2,grey,hole,mask={tmp_path / 'masks'}", "--size", f"{W}x{H}"]
    words += ["--network", "tiny", "--batch", "4", "--steps", "9", "--flip", "--data.augment", "0.3"]
    words += ["--checkpoint.every", "3", "--checkpoint.keep", "9", "--preview.every", "-1", "--evaluate.every", "-1"]
    words += ["--device", "cpu", "--microbatch", "1", "--precision", "fp32"]
    runs = {name: tmp_path / name for name in ("one", "two", "killed")}
    for name, count in (("one", 1), ("two", 2)):
        output(launched(count, "train", runs[name], *words, images=tmp_path / "images"))
    process = launched(2, "train", runs["killed"], *words, images=tmp_path / "images")
    kill_after_checkpoint(runs["killed"], 3, process)
    output(launched(2, "resume", runs["killed"]))
    for file in ("model.safetensors", "ema.safetensors"):
        found = {name: run / "checkpoints" / "00000009" / file for name, run in runs.items()}
        assert found["two"].read_bytes() == found["killed"].read_bytes()
        one, two = (read_tensors(found[name], runs[name]) for name in ("one", "two"))
        for name, weight in one.items():  # sums of gradients have another order
            torch.testing.assert_close(two[name], weight, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.slow
def test_a_network_with_images_compiles_as_one_graph(name):
    network = build_model(NETWORKS[name], 3, ConditionFormat(columns=FACTS)).eval()
    with torch.no_grad():
        network = randomized(network)
    told = Conditions(image=torch.rand(2, 5, H, W).round())
    told.image[1, :4] = float("nan")
    x, noise = torch.randn(2, 3, H, W), torch.tensor([0.5, 1.0])
    compiled = torch.compile(network, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, noise, told), network(x, noise, told), rtol=1e-5, atol=1e-5)
