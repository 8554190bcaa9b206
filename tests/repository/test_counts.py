"""What a step and a picture cost, in counts that no busy machine changes: operations, copies, waits, new tensors.

A number here is not a law of nature. Where a change makes one smaller, write the smaller one down. Where it makes one
larger, look first whether the work can be done in what there was: each operation takes a launch on a GPU in every step
of every run. What is gained for it belongs into the message of the commit that raises the number.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from conftest import NETWORK
from counting import Counting
from unfog.config.presets import preset
from unfog.config.toml import update
from unfog.data.dataset import ImageSet
from unfog.data.stream import ImageStream
from unfog.pipeline.build import build_augmentation, build_loss, build_state
from unfog.pipeline.generate import GenerationSettings, generate_images
from unfog.training.hooks import Task, TrainingHooks
from unfog.training.loop import LoopSettings, train

CPU = torch.device("cpu")
BATCH, SIDE, STEPS = 8, 8, 3
NUMBERS = 3 * SIDE * SIDE  # of an image

WEIGHTS = 122

# Of a step, by what is done for it: operations, new tensors, bytes of these. Those of our own, exactly.
OWN = {
    "data": (2, 0, 0),
    "augmentation": (2, 1, 4 * BATCH * NUMBERS),
    "objective": (81, 74, 57_472),
    "loop": (25, 12 + WEIGHTS, 1_504),
}
# What torch takes for the network and for Muon's matrices differs by its version; so no more than these.
TORCH = {"forward": (294, 198, 1_692_384), "backward": (513, 299, 2_012_020)}
OPTIMIZERS = {"adamw": (4, 0, 0), "muon": (954, 343, 1_963_832)}
# Of each call of the network in a drawing, beyond its own operations.
SAMPLING = {("dpmpp", 1.0): 49, ("dpmpp", 2.0): 61, ("unipc", 1.0): 70, ("unipc", 2.0): 82}


def remedy(what, counted, expected):
    return f"{what}: {counted} where {expected} was expected; what to do then stands at the top of this file"


class Stopping(TrainingHooks):
    """Ends the loop after `until` steps."""

    step = until = 0

    def on_step_end(self, step):
        self.step = step

    def stop_requested(self):
        return self.step == self.until


class Pixels(np.ndarray):
    """Images in memory that note how many bytes are copied out of them."""

    copied = 0

    def take(self, *args, **kwargs):
        out = super().take(*args, **kwargs)
        Pixels.copied += out.nbytes
        return out


def configured(method="adamw", **settings):
    small = {
        "network": NETWORK,
        "training": {"batch": BATCH, "images": 100 * BATCH, "precision": "fp32"},
        "optimizer": {"method": method, "lr": 1e-3, "warmup": 1},
        "data": {"size": SIDE, "channels": 3},
        "averages": {"every": 10},
    }
    return update(update(preset("default"), small, ""), settings, "")


def counted_steps(config, monkeypatch, microbatch=0):
    """`Counting` of STEPS steps as the loop takes them, after two others, which also allocate."""
    config = replace(config, training=replace(config.training, microbatch=microbatch))
    pixels = np.random.default_rng(0).integers(0, 256, (40, 3, SIDE, SIDE), dtype=np.uint8).view(Pixels)
    state, stream = build_state(config, CPU), ImageStream(ImageSet(pixels, ["image"] * 40), 0)
    counting, run, augment = Counting(), Stopping(), build_augmentation(config)
    loss = build_loss(config, state)

    def augmented(pixels):
        with counting.during("augmentation"):
            return augment(pixels)

    def objective(*args):
        with counting.during("objective"):
            return loss(*args)

    counting.wrap(stream, "batch", "data")
    counting.wrap(state.model, "forward", "forward")
    counting.wrap(state.precision, "backward", "backward")
    counting.wrap(state.optimizer, "step", "optimizer")
    for until in (2, 2 + STEPS):
        run.until = until
        counting.__init__()
        Pixels.copied = 0
        with counting, monkeypatch.context() as patched:
            counting.watch_reads(patched)
            train(LoopSettings(config.training, config.optimizer), state, Task(stream, augmented, objective), run)
    assert state.updates == state.seen // BATCH == 2 + STEPS
    return counting


def of(counting, phase):
    """(operations, new tensors, bytes) of a step."""
    totals = counting.operations[phase], counting.tensors[phase], counting.bytes[phase]
    assert not any(total % STEPS for total in totals), "steps differ"
    return tuple(total // STEPS for total in totals)


@pytest.mark.parametrize("method", ["adamw", "muon"])
@pytest.mark.slow
def test_a_step(method, monkeypatch):
    counting = counted_steps(configured(method), monkeypatch)
    assert len(list(build_state(configured(), CPU).model.parameters())) == WEIGHTS
    for phase, expected in OWN.items():
        counted = of(counting, phase)
        assert counted == expected, remedy(f"{phase} (operations, tensors, bytes)", counted, expected)
    for phase, most in (TORCH | {"optimizer": OPTIMIZERS[method]}).items():
        counted = of(counting, phase)
        assert all(a <= b for a, b in zip(counted, most)), remedy(phase, counted, f"no more than {most}")
    assert set(counting.operations) == {*OWN, *TORCH, "optimizer"}


@pytest.mark.slow
def test_an_image_is_copied_once_as_bytes_and_once_as_numbers(monkeypatch):
    """Out of the set, and to float32; on a GPU the first copy is what goes there."""
    counting = counted_steps(configured(), monkeypatch)
    assert Pixels.copied == STEPS * BATCH * NUMBERS
    assert counting.image_bytes == STEPS * [4 * BATCH * NUMBERS]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"training": {"microbatch": 4}}, {"diffusion": {"adaptive": 0.5}}])
def test_a_step_waits_once_for_the_device(settings, monkeypatch):
    """For whether it is accepted. Not for each micro-batch, and not to follow the losses."""
    assert counted_steps(configured(**settings), monkeypatch).waits == STEPS * ["tolist"]


def counted_drawing(kind, guidance, steps, monkeypatch):
    config = replace(configured(sampler={"kind": kind, "steps": steps}, label_dropout=0.1), classes=("a", "b"))
    network, counting = build_state(config, CPU).model, Counting()
    counting.wrap(network, "forward", "forward")
    with counting, monkeypatch.context() as patched:
        counting.watch_reads(patched)
        generate_images(network, config, replace(GenerationSettings.default(config, 4, 4), guidance=guidance))
    return counting


@pytest.mark.parametrize("training", [False, True])
def test_sampling_leaves_a_network_in_its_mode(training):
    config = configured(sampler={"steps": 1})
    network = build_state(config, CPU).model.train(training)
    generate_images(network, config, GenerationSettings.default(config, 1, 1))
    assert network.training == training


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "guidance"), SAMPLING)
def test_a_call_of_the_network_in_a_drawing(kind, guidance, monkeypatch):
    few, more = (counted_drawing(kind, guidance, steps, monkeypatch) for steps in (10, 12))
    counted = (more.operations["loop"] - few.operations["loop"]) / 2
    expected = SAMPLING[kind, guidance]
    assert counted == expected, remedy(f"operations of {kind} with guidance {guidance}", counted, expected)
    # Guidance within an interval reads each level once, and saves a call of the network outside of it.
    reads = 0 if guidance == 1 else 2
    assert len(more.waits) - len(few.waits) == reads, "a step of a sampler must not wait for the device"
