"""The memory that a configuration will take, from traces of its real network, its real step and its real sampling."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from unfog.config.schema import Config
from unfog.diffusion.denoiser import Denoiser
from unfog.errors import RequestError
from unfog.pipeline.build import build_augmentation, build_loss, build_network, input_shape, zero_batch
from unfog.planning.fake_process_group import fake_process_group
from unfog.planning.memory_trace import Recorder, Trace, record_trace
from unfog.planning.peak_memory import (
    HOLES,
    HOLES_ACCUMULATING,
    HOLES_RECOMPUTING,
    ONEDNN_HALF,
    Peak,
    find_peak,
)
from unfog.training import optimizers as optim
from unfog.training.distributed.fsdp import build_mesh, gathers_in_bf16, shard_network
from unfog.training.distributed.sharded_tensors import is_sharded, to_local
from unfog.training.optimizer_settings import AdamW, Custom
from unfog.training.precision import DTYPES, Precision
from unfog.training.settings import PrecisionName, Training
from unfog.training.state import TrainState

TRACED = (2, 4)
"""Batch sizes that are traced; what lies beyond follows, as every tensor is affine in the batch size. Not 1: PyTorch
takes a short cut here and there for a dimension of 1, which saves a copy."""
KEPT = 16
"""Traces that are kept; each takes a megabyte or so."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Predicted bytes on the device and in host memory, which on a CPU are the same; of the first of several processes,
    which does what one does alone.

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
    weights: int
    """Of the whole network."""

    @property
    def peak(self) -> int:
        """The most that is needed on the device."""
        return _with_snapshot(max(self.step.total, self.drawing, self.measuring), self.snapshot, self.device)


class MemoryEstimator:
    """Traces of one configuration, each made when it is asked for: a second of work each, and no memory to speak of.

    Those that tell of the same computation are shared, as choosing a micro-batch and telling what it takes ask alike.

    Args:
        config: with the batch of one process.
        processes: that train together.
    """

    _made: ClassVar[dict[tuple[Config, str, int, int, bool, int], Trace]] = {}

    def __init__(self, config: Config, device: str, processes: int = 1):
        self.config, self.device, self.processes = _traceable(config), device, processes
        self._divided, self._known = config.training.is_sharded(processes), False

    def estimate(self, microbatch: int, checkpointing: bool, images: int = 0) -> MemoryEstimate:
        """What training with so many images at once takes; `images` are the bytes of the decoded set in memory."""
        config, step = self.config, self.step(microbatch, checkpointing)
        doubled = 1 + (config.usual_guidance != 1)
        drawing = self._beside(step, min(microbatch, config.preview.images) * doubled)
        measuring = self._beside(step, min(microbatch, config.evaluate.images)) if config.evaluate.every >= 0 else 0
        return MemoryEstimate(self.device, step, drawing, measuring, self._snapshot(step), images, self._weights(step))

    def step(self, microbatch: int, checkpointing: bool) -> Peak:
        """The highest point of training with so many images at once."""
        # The second pass of a step finds the gradients of the first; further ones repeat it.
        whole = microbatch == self.config.training.batch
        passes = 1 if whole else 2
        if whole or microbatch == 1:
            trace = self._traced(microbatch, passes, checkpointing)
        else:
            few, more = (self._traced(n, passes, checkpointing) for n in TRACED)
            trace = few.extrapolate(microbatch, more, *TRACED)
        holes = HOLES if whole else HOLES_ACCUMULATING
        return find_peak(trace, self.device, HOLES_RECOMPUTING if checkpointing else holes)

    def training(self, microbatch: int, checkpointing: bool) -> int:
        """Bytes that training takes at the most, checkpoints included; drawing with as many at once takes less."""
        step = self.step(microbatch, checkpointing)
        return _with_snapshot(step.total, self._snapshot(step), self.device)

    def _weights(self, step: Peak) -> int:
        """Bytes of the whole network."""
        return self._together if self._divided else step.parts["parameters"]

    @cached_property
    def _together(self) -> int:
        """Bytes of the network that is divided."""
        with FakeTensorMode():
            network = build_network(self.config)
            return sum(tensor.nbytes for tensor in (*network.parameters(), *network.buffers()))

    def _snapshot(self, step: Peak) -> int:
        """Host memory of a checkpoint; of a divided network the first one, which one process writes whole, and is told
        to have moments already: later ones take a part of it at each."""
        return round(_checkpoint_bytes(step) * self._weights(step) / step.parts["parameters"])

    def _traced(self, microbatch: int, passes: int, checkpointing: bool) -> Trace:
        key = (_trace_key(self.config), self.device, microbatch, passes, checkpointing, self.processes)
        if key not in self._made:
            if len(self._made) >= KEPT:
                self._made.clear()
            if self._divided and not self._known:
                # At first torch finds out how each operation treats rows, with tensors of its own, and remembers it.
                trace_step(self.config, *key[1:])
                self._known = True
            self._made[key] = trace_step(self.config, *key[1:])
        return self._made[key]

    def _beside(self, step: Peak, images: int) -> int:
        """Calls of the network without gradients for so many images, beside what the run holds all the time."""
        call = find_peak(trace_call(self.config, self.device, images), self.device)
        # Of a divided network a whole copy is there for it.
        return _persistent_bytes(step) + call.total - (0 if self._divided else call.parts["parameters"])


def _traceable(config: Config) -> Config:
    """The configuration, with AdamW in place of an optimiser that looks at values, of which a trace has none.

    Raises:
        RequestError: the optimiser cannot be used at all.
    """
    method = config.optimizer.method
    if not isinstance(method, Custom):
        return config
    optim.build_custom(method, [nn.Parameter(torch.zeros(1))], 1.0)
    try:
        with FakeTensorMode():
            optim.build_custom(method, [nn.Parameter(torch.zeros(1))], 1.0)
    except RequestError:
        return replace(config, optimizer=replace(config.optimizer, method=AdamW()))
    return config


def _trace_key(config: Config) -> Config:
    """The configuration without what makes no difference to a step's trace."""
    given = config.training
    training = Training(precision=given.precision, clip=given.clip, shard=given.shard)
    optimizer, usual = replace(config.optimizer, lr=1.0, warmup=1), Config()
    asides = {name: getattr(usual, name) for name in ("preview", "evaluate", "log", "checkpoint")}
    averages = replace(config.ema_snapshots, every=min(config.ema_snapshots.every, 0))  # whether there are any
    return replace(config, training=training, optimizer=optimizer, ema_snapshots=averages, **asides)


def _persistent_bytes(step: Peak) -> int:
    """Bytes of what a run holds all the time: weights, moments, average."""
    return sum(step.parts[part] for part in ("parameters", "moments", "average"))


def _checkpoint_bytes(step: Peak) -> int:
    """Host memory that a checkpoint takes while it is written and read back: all tensors, the largest file twice.

    Where there are two averages, a snapshot of them in float16 may be on its way as well.
    """
    weights = step.parts["parameters"]
    return _persistent_bytes(step) + (3 if step.parts["average"] > 1.5 * weights else 2) * weights


def _with_snapshot(peak: int, snapshot: int, device: str) -> int:
    """A peak with what is beside it in that memory."""
    return peak + (snapshot if device == "cpu" else 0)


def trace_step(
    config: Config, device: str, microbatch: int, passes: int, checkpointing: bool = False, processes: int = 1
) -> Trace:
    """What training steps of `passes` micro-batches allocate, from the building of the network on.

    Args:
        processes: that train together; the trace is of the first, which of a divided network has the most.
    """
    training, cpu, apart = config.training, torch.device("cpu"), config.training.is_sharded(processes)
    # The scaler of fp16 looks at values; what it keeps is one number. Elsewhere the imitation casts.
    here: PrecisionName = "fp32" if device != "cpu" or training.precision == "fp32" else "bf16"
    augment, objective = build_augmentation(config), build_loss(config)

    def work(recorder: Recorder) -> None:
        if here == "bf16":
            recorder.allocate(ONEDNN_HALF, "library")
        recorder.kind = "parameters"
        network = build_network(config)
        if mesh is not None:
            shard_network(network, mesh, gathers_in_bf16(training.precision, device))
            recorder.begin()  # as no device has it whole: see `Shards`
        network.checkpointing = checkpointing
        recorder.kind = "workspace"
        second = config.ema_snapshots.second_schedule(config.ema)
        state = TrainState(network, config.optimizer, config.ema, Precision(here, cpu), second)
        for average in filter(None, (state.ema, state.second)):
            recorder.name("average", map(to_local, [*average.parameters, *average.buffers]))
        _allocate_moments(recorder, state)
        if processes > 1 and not apart:  # DistributedDataParallel has gradients travel from memory of their own
            recorder.allocate(sum(p.nbytes for p in network.parameters()), "exchange")
        for _ in range(passes):
            label = blank_labels(config, microbatch)
            with recorder.keeping("activations"):
                x0, condition = augment(zero_batch(config, microbatch))
                with state.precision.autocast():
                    loss = objective(network, x0, label, condition)
                if apart:  # what is around the blocks stays together until the backward pass is over
                    recorder.name("gathered", (p for p in network.parameters() if p.ndim and not is_sharded(p)))
                total = loss.per_image.sum() / training.batch
                del x0, condition
            state.precision.backward(total)
            recorder.name("gradients", (to_local(p.grad) for p in network.parameters() if p.grad is not None))
            del loss, total, label
        state.precision.gradient_norm(state.optimizer)
        state.precision.update(state.optimizer, training.clip, 2 * training.clip, True)  # clipped, whatever it is
        state.optimizer.zero_grad(set_to_none=True)
        state.project()
        for average in filter(None, (state.ema, state.second)):
            average.update(1)

    with fake_process_group(processes) if apart else nullcontext():
        mesh = build_mesh("cpu", processes) if apart else None
        return record_trace(work, device, DTYPES.get(training.precision))


def _allocate_moments(recorder: Recorder, state: TrainState) -> None:
    """Let the optimiser allocate what it keeps, as its first step does."""
    for parameter in state.model.parameters():
        parameter.grad = torch.empty_like(parameter)
    state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)
    recorder.name("moments", map(to_local, optim.optimizer_tensors(state.optimizer, state.model).values()))


def trace_call(config: Config, device: str, images: int) -> Trace:
    """What drawing allocates for each call of the network: fp32, no gradients."""
    shape = batch_shape(config, images)

    def work(recorder: Recorder) -> None:
        recorder.kind = "parameters"
        network = build_network(config).eval()
        recorder.kind = "workspace"
        with torch.no_grad():
            x, logsnr = torch.zeros(shape), torch.zeros(images)
            x0 = Denoiser(network, config.diffusion)(x, logsnr, blank_labels(config, images))
            del x, x0

    return record_trace(work, device)


def batch_shape(config: Config, images: int) -> tuple[int, int, int, int]:
    """[B, C, H, W] of so many as the network sees them."""
    return (images, *input_shape(config))


def blank_labels(config: Config, images: int) -> Tensor | None:
    """Labels of so many images, where there are classes."""
    return torch.zeros(images, dtype=torch.int64) if config.classes else None


def with_precision(config: Config) -> Config:
    """The same with a precision, as traces need one: fp32 where it is open, which takes the most."""
    if config.training.precision != "auto":
        return config
    return replace(config, training=replace(config.training, precision="fp32"))
