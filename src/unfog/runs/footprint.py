"""The memory that a configuration will take, from traces of its real network, its real step and its real sampling."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from unfog.config.tree import Config
from unfog.data.nonleaking import CONDITIONS
from unfog.diagnosis.plan.memory import (
    CUDNN_WORKSPACE,
    HOLES,
    HOLES_ACCUMULATING,
    HOLES_RECOMPUTING,
    ONEDNN_HALF,
    Peak,
    peak_of,
)
from unfog.diagnosis.plan.trace import Recorder, Trace, record
from unfog.diffusion.denoiser import Denoiser
from unfog.errors import RequestError
from unfog.models.settings import DiT, MPUNet, UNet
from unfog.runs.build import augmentation, blank_batch, build_network, loss_function, shape_of
from unfog.training import optim
from unfog.training.methods import AdamW, Custom
from unfog.training.precision import DTYPES, Precision
from unfog.training.settings import PrecisionName, Training
from unfog.training.state import TrainState

TRACED = (2, 4)
"""Batch sizes that are traced; what lies beyond follows, as every tensor is affine in the batch size. Not 1: PyTorch
takes a short cut here and there for a dimension of 1, which saves a copy."""
KEPT = 16
"""Traces that are kept; each takes a megabyte or so."""


@dataclass(frozen=True)
class Footprint:
    """Predicted bytes on the device and in host memory, which on a CPU are the same.

    A CUDA context is no part of it: it is there before memory is asked for, and what is available is without it.
    """

    device: str
    step: Peak
    """A training step, and what the run holds all the time: weights, their average, the optimiser's moments."""
    drawing: int
    """Highest point of drawing a preview, likewise with what is held all the time; fp32, without gradients."""
    measuring: int
    """Of the held-out loss."""
    snapshot: int
    """Host memory that a checkpoint takes while it is written."""
    images: int
    """Host memory of the decoded images, where they are not in a file."""

    @property
    def peak(self) -> int:
        """The most that is needed on the device."""
        return on_top(max(self.step.total, self.drawing, self.measuring), self.snapshot, self.device)


class Traces:
    """Traces of one configuration, each made when it is asked for: a second of work each, and no memory to speak of.

    Those that tell of the same computation are shared, as choosing a micro-batch and telling what it takes ask alike.
    """

    _made: ClassVar[dict[tuple[Config, str, int, int, bool], Trace]] = {}

    def __init__(self, config: Config, device: str):
        self.config, self.device = traceable(config), device

    def footprint(self, microbatch: int, checkpointing: bool, images: int = 0) -> Footprint:
        """What training with so many images at once takes; `images` are the bytes of the decoded set in memory."""
        config, step = self.config, self.step(microbatch, checkpointing)
        doubled = 1 + (config.usual_guidance != 1)
        drawing = self._beside(step, min(microbatch, config.preview.images) * doubled)
        measuring = self._beside(step, min(microbatch, config.evaluate.images)) if config.evaluate.every >= 0 else 0
        return Footprint(self.device, step, drawing, measuring, snapshot_of(step), images)

    def step(self, microbatch: int, checkpointing: bool) -> Peak:
        """The highest point of training with so many images at once."""
        # The second pass of a step finds the gradients of the first; further ones repeat it.
        whole = microbatch == self.config.training.batch
        passes = 1 if whole else 2
        if whole or microbatch == 1:
            trace = self._traced(microbatch, passes, checkpointing)
        else:
            few, more = (self._traced(n, passes, checkpointing) for n in TRACED)
            trace = few.at(microbatch, more, *TRACED)
        holes = HOLES if whole else HOLES_ACCUMULATING
        return peak_of(trace, self.device, HOLES_RECOMPUTING if checkpointing else holes)

    def training(self, microbatch: int, checkpointing: bool) -> int:
        """Bytes that training takes at the most, checkpoints included; drawing with as many at once takes less."""
        step = self.step(microbatch, checkpointing)
        return on_top(step.total, snapshot_of(step), self.device)

    def _traced(self, microbatch: int, passes: int, checkpointing: bool) -> Trace:
        key = (alike(self.config), self.device, microbatch, passes, checkpointing)
        if key not in self._made:
            if len(self._made) >= KEPT:
                self._made.clear()
            self._made[key] = trace_step(self.config, self.device, microbatch, passes, checkpointing)
        return self._made[key]

    def _beside(self, step: Peak, images: int) -> int:
        """Calls of the network without gradients for so many images, beside what the run holds all the time."""
        call = peak_of(trace_call(self.config, self.device, images), self.device)
        return held_by(step) + call.total - call.parts["parameters"]


def traceable(config: Config) -> Config:
    """The configuration, with AdamW in place of an optimiser that looks at values, of which a trace has none.

    Raises:
        RequestError: the optimiser cannot be used at all.
    """
    method = config.optimizer.method
    if not isinstance(method, Custom):
        return config
    optim.custom(method, [nn.Parameter(torch.zeros(1))], 1.0)
    try:
        with FakeTensorMode():
            optim.custom(method, [nn.Parameter(torch.zeros(1))], 1.0)
    except RequestError:
        return replace(config, optimizer=replace(config.optimizer, method=AdamW()))
    return config


def alike(config: Config) -> Config:
    """The configuration without what makes no difference to a step's trace."""
    training = Training(precision=config.training.precision, clip=config.training.clip)
    optimizer, usual = replace(config.optimizer, lr=1.0, warmup=1), Config()
    asides = {name: getattr(usual, name) for name in ("preview", "evaluate", "log", "checkpoint")}
    averages = replace(config.averages, every=min(config.averages.every, 0))  # whether there are any
    return replace(config, training=training, optimizer=optimizer, averages=averages, **asides)


def held_by(step: Peak) -> int:
    """Bytes of what a run holds all the time: weights, moments, average."""
    return sum(step.parts[part] for part in ("parameters", "moments", "average"))


def snapshot_of(step: Peak) -> int:
    """Host memory that a checkpoint takes while it is written and read back: all tensors, the largest file twice.

    Where there are two averages, a snapshot of them in float16 may be on its way as well.
    """
    weights = step.parts["parameters"]
    return held_by(step) + (3 if step.parts["average"] > 1.5 * weights else 2) * weights


def on_top(peak: int, snapshot: int, device: str) -> int:
    """A peak with what is beside it in that memory."""
    return peak + (snapshot if device == "cpu" else 0)


def trace_step(config: Config, device: str, microbatch: int, passes: int, checkpointing: bool = False) -> Trace:
    """What training steps of `passes` micro-batches allocate, from the building of the network on."""
    training, cpu = config.training, torch.device("cpu")
    # The scaler of fp16 looks at values; what it keeps is one number. Elsewhere the imitation casts.
    here: PrecisionName = "fp32" if device != "cpu" or training.precision == "fp32" else "bf16"
    augment, objective = augmentation(config), loss_function(config)

    def work(recorder: Recorder) -> None:
        if here == "bf16":
            recorder.allocate(ONEDNN_HALF, "library")
        recorder.kind = "parameters"
        network = build_network(config)
        network.checkpointing = checkpointing
        recorder.kind = "workspace"
        second = config.averages.profile(config.ema)
        state = TrainState(network, config.optimizer, config.ema, Precision(here, cpu), second)
        for average in filter(None, (state.ema, state.second)):
            recorder.name("average", [*average.parameters, *average.buffers])
        make_moments(recorder, state)
        for _ in range(passes):
            label = labels_for(config, microbatch)
            with recorder.keeping("activations"):
                x0, condition = augment(blank_batch(config, microbatch))
                with state.precision.autocast():
                    loss = objective(network, x0, label, condition)
                total = loss.per_image.sum() / training.batch
                del x0, condition
            state.precision.backward(total)
            recorder.name("gradients", (p.grad for p in network.parameters()))
            del loss, total, label
        state.precision.gradient_norm(state.optimizer)
        state.precision.update(state.optimizer, training.clip, 2 * training.clip, True)  # clipped, whatever it is
        state.optimizer.zero_grad(set_to_none=True)
        state.project()
        for average in filter(None, (state.ema, state.second)):
            average.update(1)

    return record(work, device, DTYPES.get(training.precision))


def make_moments(recorder: Recorder, state: TrainState) -> None:
    """Let the optimiser allocate what it keeps, as its first step does."""
    for parameter in state.model.parameters():
        parameter.grad = torch.empty_like(parameter)
    state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)
    recorder.name("moments", (optim.moments(state.optimizer, state.model).values()))


def trace_call(config: Config, device: str, images: int) -> Trace:
    """What drawing allocates for each call of the network: fp32, no gradients."""
    shape = images_shape(config, images)

    def work(recorder: Recorder) -> None:
        recorder.kind = "parameters"
        network = build_network(config).eval()
        recorder.kind = "workspace"
        with torch.no_grad():
            x, logsnr = torch.zeros(shape), torch.zeros(images)
            x0 = Denoiser(network, config.diffusion)(x, logsnr, labels_for(config, images))
            del x, x0

    return record(work, device)


def images_shape(config: Config, images: int) -> tuple[int, int, int, int]:
    """[B, C, H, W] of so many as the network sees them."""
    return (images, *shape_of(config))


def labels_for(config: Config, images: int) -> Tensor | None:
    """Labels of so many images, where there are classes."""
    return torch.zeros(images, dtype=torch.int64) if config.classes else None


def at_most(config: Config) -> float:
    """Bytes that training surely does not exceed, in host memory or on a device; infinite where nothing is known.

    A glance at the settings of the network, for the usual case in which memory is no question at all: every layer of a
    block keeps what it gets in fp32, twice.
    """
    network = config.network
    if isinstance(network, UNet):
        weights, activations = _of_unet(network, config)
    elif isinstance(network, MPUNet):
        weights, activations = _of_mpunet(network, config)
    elif isinstance(network, DiT):
        weights, activations = _of_dit(network, config)
    else:
        return float("inf")
    batch = config.training.microbatch or config.training.batch
    # Weights, gradients, two averages, two moments and what the optimiser takes for a moment, with holes between; and a
    # checkpoint's snapshot, which is as large once more.
    return 4 * (16 * weights + 2 * batch * activations) + max(CUDNN_WORKSPACE, ONEDNN_HALF)


def _rows(config: Config) -> int:
    """Of the embeddings of class and augmentation."""
    return len(config.classes) + 1 + CONDITIONS


def _of_unet(network: UNet, config: Config) -> tuple[float, float]:
    """Numbers that its weights are at most, and that an image leaves for the backward pass."""
    first = last = network.channels[0]
    rows = _rows(config) + 5 * first + 1  # the rest is of the noise level
    weights, activations = 4.0 * first * rows, 0.0
    for level, channels in enumerate(network.channels):
        pixels = (shape_of(config)[1] / 2**level) ** 2
        attends = network.attention[level] or (network.mid_attention and level == len(network.channels) - 1)
        blocks = 2 * network.blocks + 4  # down, up, and the middle ones and resampling
        wide = last + channels + (network.channels[level + 1] if level + 1 < len(network.channels) else channels)
        weights += blocks * (9 * wide * channels + 9 * channels**2 + 8 * first * channels + 5 * channels**2 * attends)
        activations += blocks * pixels * (6 * wide + 12 * channels + 16 * channels * attends)
        heads = channels / (network.head_channels or channels)
        activations += blocks * attends * 4 * heads * pixels**2
        last = channels
    return weights, activations


def _of_mpunet(network: MPUNet, config: Config) -> tuple[float, float]:
    """The same; every block is taken to be as wide as all that it might join."""
    width = max(network.channels)
    weights, activations, last = float(width * (_rows(config) + network.channels[0])), 0.0, network.channels[0]
    for level, channels in enumerate(network.channels):
        pixels = (shape_of(config)[1] / 2**level) ** 2
        attends = network.attention[level]
        blocks = 2 * network.blocks + 4  # down, up, and the middle ones and resampling
        wide = last + channels + (network.channels[level + 1] if level + 1 < len(network.channels) else channels)
        weights += blocks * wide * (9 * wide + width + 5 * channels * attends)
        activations += blocks * pixels * (14 * wide + 30 * channels * attends)
        heads = channels / (network.head_channels or channels)
        activations += blocks * attends * 4 * heads * pixels**2
        last = channels
    return weights, activations


def _of_dit(network: DiT, config: Config) -> tuple[float, float]:
    """The same."""
    width, tokens = network.width, (shape_of(config)[1] / network.patch) ** 2
    values = network.patch**2 * 2 * max(1, shape_of(config)[0])  # of a patch, in and out
    weights = width * (network.depth * 19.0 * (width + 8) + 12 * width + _rows(config) + 2 * values)
    heads = width / network.head_channels
    return weights, network.depth * tokens * (60 * width + 4 * heads * tokens) + tokens * (8 * width + values)


def with_precision(config: Config) -> Config:
    """The same with a precision, as traces need one: fp32 where it is open, which takes the most."""
    if config.training.precision != "auto":
        return config
    return replace(config, training=replace(config.training, precision="fp32"))
