"""`unfog plan`: arithmetic counted on the real network, time and memory of machines that are not here, what is said."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from unfog.config.tree import Config
from unfog.data.settings import Data
from unfog.diagnosis.plan.cost import Range, training_time, work_of
from unfog.diagnosis.plan.devices import DEVICES, GB, find_device
from unfog.errors import RequestError
from unfog.models.settings import SIZES, UNet
from unfog.models.unet import UNetModel
from unfog.runs.plan import plan
from unfog.runs.timing import times_of, told_time
from unfog.training.settings import Optimizer, Training

SMALL = UNet((8, 16), attention=(False, True), mid_attention=False, norm_groups=4, head_channels=8)


def asked(**training) -> Config:
    data = Data(size=16, cache="memory")
    return Config(
        "fashion", data, SMALL, training=Training(**{"steps": 1000, **training}), optimizer=Optimizer(lr=1e-3)
    )


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 5, 3, padding=1)

    def forward(self, x, c_noise):
        return self.layer(x * 2)


def test_operations_of_a_convolution():
    work = work_of(Convolution, (3, 8, 8))
    assert work.forward == 2 * 8 * 8 * 5 * 3 * 9
    assert work.training == 2 * work.forward  # its input asks for no gradient


def test_operations_of_ddpm():
    """6.06 billion multiplications and additions an image, as is told of DDPM's CIFAR-10 network."""
    work = work_of(lambda: UNetModel(SIZES["cifar10"], 3), (3, 32, 32))
    assert work.forward / 2 == pytest.approx(6.06e9, rel=0.01)
    assert 2.9 < work.training / work.forward < 3.05


def test_time_is_arithmetic_or_launches():
    device = find_device("h100")
    work = work_of(Convolution, (3, 8, 8))._replace(training=1e12, forward=3e11, operations=1000)
    fast, slow = training_time(work, 64, 1, device, half=True, checkpointing=False)
    assert fast == pytest.approx(64e12 / (0.40 * 989e12))
    assert slow == pytest.approx(64e12 / (0.15 * 989e12))
    assert training_time(work, 64, 1, device, half=True, checkpointing=True).low == pytest.approx(1.3 * fast)
    assert training_time(work, 64, 1, device, half=False, checkpointing=False).low > 5 * fast
    tiny = training_time(work._replace(training=1e6), 64, 2, device, half=True, checkpointing=False)
    assert tiny.low == tiny.high > 1e-3


def test_devices_are_found_however_they_are_written():
    assert find_device("RTX 4090") is find_device("nvidia_rtx_4090") is DEVICES["4090"]
    assert find_device("H200").memory == 141 * GB
    with pytest.raises(RequestError, match="h100"):
        find_device("h1000")


def test_what_a_run_takes_is_the_sum_of_its_parts():
    config = asked(images=64_000, steps=0)
    config = replace(config, preview=replace(config.preview, every=100), evaluate=replace(config.evaluate, every=250))
    times = times_of(config, Range(0.1, 0.2), Range(0.01, 0.02), held_out=40)
    assert times["training (1,000 steps)"] == (100, 200)
    assert times["previews (11)"].low == pytest.approx(11 * 16 * 20 * 0.01)  # the first, nine on the way, the last
    assert times["evaluations (5)"].low == pytest.approx(5 * 40 * 8 * 0.01)
    assert times["in all"].high == pytest.approx(200 + 2 * (11 * 16 * 20 + 5 * 40 * 8) * 0.01)
    assert times["drawing 10,000 pictures"].low == pytest.approx(10_000 * 20 * 0.01)
    assert told_time(Range(0.0123, 0.2)) == "12 ms to 200 ms"


def test_a_plan_for_another_machine():
    planned = plan(asked(), "t4")
    assert planned.config.training.precision == "fp16"
    assert planned.config.training.images == 64_000
    assert not any(finding.severity == "fatal" for finding in planned.findings)
    text = "\n".join(planned.lines())
    for words in ("NVIDIA T4", "estimated", "GFLOP an image", "activations", "training (1,000 steps)", "a checkpoint"):
        assert words in text
    plain = json.loads(json.dumps(planned.to_dict()))
    assert plain["memory"]["step"] == sum(plain["memory"]["parts"].values()) < plain["memory"]["peak"] < 16 * GB
    assert not torch.is_inference_mode_enabled()


def test_what_was_asked_for_and_does_not_fit_is_fatal_and_what_fits_is_said():
    planned = plan(asked(batch=200_000, microbatch=100_000, precision="fp32"), "3060")
    fatal = [finding for finding in planned.findings if finding.severity == "fatal"]
    assert [finding.code for finding in fatal] == ["plan.memory"]
    fits = fatal[0].facts["microbatch"]
    assert 100 < fits < 100_000
    assert f"--microbatch {fits}" in fatal[0].remedy
    chosen = plan(asked(batch=200_000, precision="fp32"), "3060")
    assert chosen.config.training.microbatch == fits
    assert chosen.memory.peak < 12 * GB


@pytest.mark.slow
def test_a_plan_for_this_machine_measures_it():
    planned = plan(asked(device="cpu", precision="fp32"))
    assert not planned.estimated
    assert 0 < planned.times["step"].low == planned.times["step"].high < 60
    assert planned.times["in all"].low > planned.times["training (1,000 steps)"].low
