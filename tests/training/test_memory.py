"""Memory that does not suffice: the same batch in smaller pieces, also where it is the system that refuses."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import forked
import unfog
from conftest import TRANSFORMER, few_images
from test_training import Diary, denoising, linear_state, reconstruction, run, weights
from unfog.errors import RunError
from unfog.models.unet import UNetModel
from unfog.training.loop import Intervals
from unfog.training.stability.out_of_memory import is_out_of_memory
from unfog.training.statistics import noise_scale

pytestmark = pytest.mark.slow


class Refused(Diary):
    def __init__(self):
        super().__init__()
        self.at_once = []

    def on_out_of_memory(self, state):
        self.at_once.append(state.microbatch)


def too_large_above(images, inner):
    """A loss that asks the allocator for what no machine has, if there are more images than this."""

    def loss(model, x0, conditions):
        if len(x0) > images:
            torch.empty(2**60)
        return inner(model, x0, conditions)

    return loss


@pytest.mark.parametrize(("fits", "ends_at"), [(5, [4]), (3, [4, 2]), (1, [4, 2, 1])])
def test_halved_until_it_fits_and_the_same_as_asked_for_so(fits, ends_at):
    refused, asked = linear_state(), linear_state()
    diary = run(refused, too_large_above(fits, denoising), Refused())
    run(asked, denoising, microbatch=ends_at[-1])
    assert diary.at_once == ends_at
    assert torch.equal(weights(refused), weights(asked))


def test_half_of_an_odd_number_is_rounded_up():
    assert run(linear_state(), too_large_above(2, denoising), Refused(), microbatch=3).at_once == [2]


def test_the_mean_stays_exact():
    refused, whole = linear_state(), linear_state()
    run(refused, too_large_above(3, reconstruction), Refused())
    run(whole, reconstruction)
    torch.testing.assert_close(weights(refused), weights(whole), rtol=1e-5, atol=1e-6)


def test_one_image_too_many_is_said():
    with pytest.raises(RunError, match="one image at a time"):
        run(linear_state(), too_large_above(0, denoising), Refused())


class Hungry(nn.Conv2d):
    """A network that fits only with gradient checkpointing."""

    checkpointing = False

    def forward(self, x):
        if not self.checkpointing:
            torch.empty(2**60)
        return super().forward(x)


def test_checkpointing_is_what_comes_after_a_single_image():
    state = linear_state()
    state.model.__class__ = Hungry
    diary = run(state, denoising, Refused())
    assert diary.at_once == [4, 2, 1, 1]
    assert state.model.checkpointing


def test_what_else_goes_wrong_is_not_tried_again():
    def broken(model, x0, conditions):
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes"):
        run(linear_state(), broken, Refused())


def test_position_of_the_smaller_batch_is_part_of_the_state():
    first, second = linear_state(), linear_state()
    run(first, too_large_above(3, denoising), Refused(), images=40)
    second.load_progress(json.loads(json.dumps(first.progress())))
    assert second.microbatch == 2
    second.adopt_settings({"training": "", "repeat": "other settings", "measure": ""})
    assert second.microbatch == 0


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("std::bad_alloc"), torch.OutOfMemoryError("CUDA out of")]
)
def test_errors_of_memory_are_known(error):
    assert is_out_of_memory(error)
    assert not is_out_of_memory(ValueError("out of memory"))


def test_noise_scale_is_logged_under_accumulation_only():
    diary, whole = Diary(), Diary()
    every = Intervals(5, 0, 0, 0)
    run(linear_state(), denoising, diary, every, microbatch=2)
    run(linear_state(), denoising, whole, every)
    records = [record for _, _, record in diary.records]
    assert all(record["gradient_noise"] > 0 for record in records)
    assert noise_scale(records) > 0
    assert all("noise_scale" not in record for _, _, record in whole.records)


def test_a_preview_that_does_not_fit_is_drawn_in_parts_and_changes_no_step(tmp_path, monkeypatch):
    settings = {"network": TRANSFORMER, "precision": "fp32", "steps": 4, "batch": 8, "sampler": {"steps": 2}}
    settings |= {"preview": {"images": 20, "every": 2}, "evaluate": {"images": 30, "levels": 2, "every": 2}}
    unfog.train(few_images(), out=tmp_path / "whole", **settings)
    forward = UNetModel.forward

    def hungry(self, x, *others):
        if not self.training and len(x) > 3:
            torch.empty(2**60)
        return forward(self, x, *others)

    monkeypatch.setattr(UNetModel, "forward", hungry)
    unfog.train(few_images(), out=tmp_path / "parts", **settings)
    for name in ("model", "ema", "optimizer"):
        file = Path("checkpoints", "00000004", f"{name}.safetensors")
        assert (tmp_path / "parts" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    pictures = [np.asarray(Image.open(tmp_path / run / "samples" / "00000004.png"), int) for run in ("whole", "parts")]
    assert abs(pictures[0] - pictures[1]).max() <= 1
    assert json.loads((tmp_path / "parts" / "checkpoints" / "00000004" / "state.json").read_text())["microbatch"] == 0


LIMITED = """
import resource, sys, torch
from pathlib import Path
from unfog.cli.main import main
from unfog.planning.auto_settings import AutoSettings
from unfog.runs.session import Session
from unfog.training import loop

AutoSettings.resolve_microbatch = lambda self, resuming=False: None  # as if the prediction had been wrong
retry, halved = loop.retry_with_smaller_micro_batches, Session.on_out_of_memory

def squeezed(*words, **options):
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit(pages * resource.getpagesize() + int(sys.argv[1]) * 2**20)
    return retry(*words, **options)

def limit(size=resource.RLIM_INFINITY):
    resource.setrlimit(resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))

def eased(*words):  # the allocator of C keeps addresses that were freed, so that even one image may be refused
    limit()
    halved(*words)

loop.retry_with_smaller_micro_batches, Session.on_out_of_memory = squeezed, eased
torch.set_num_threads(1)
main(sys.argv[2:])
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="limits the address space as Linux does")
@pytest.mark.exhaustive
def test_a_batch_that_the_system_refuses_is_trained_on_in_pieces(tmp_path):
    out = tmp_path / "run"
    words = ["train", "fashion", "--out", out, "--steps", "1", "--batch", "800", "--microbatch", "800"]
    words += ["--network", "tiny", "--precision", "fp32", "--preview.images", "4", "--evaluate.images", "20"]
    words += ["--sampler.steps", "2", "--evaluate.levels", "2"]
    done = forked.run(["400", *words], LIMITED)
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    pieces = [event["microbatch"] for event in events if event["kind"] == "out_of_memory"]
    assert pieces == [400]
    assert json.loads((out / "checkpoints" / "00000001" / "state.json").read_text())["microbatch"] == 400
