"""Estimate the memory of a configuration from traces of its real network, training step and sampling."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from unfog.config.schema import Config
from unfog.diffusion.denoiser import Denoiser
from unfog.errors import RequestError
from unfog.pipeline.build import build_augmentation, build_loss, build_network
from unfog.planning.memory_recorder import (
    HOLES,
    HOLES_RECOMPUTING,
    ONEDNN_HALF,
    MemoryRecorder,
    Peak,
    Trace,
    fake_process_group,
)
from unfog.training import optimizers as optim
from unfog.training.distributed.fsdp import build_mesh, gathers_in_bf16, shard_network
from unfog.training.hooks import Augmentation, LossFunction, augmented
from unfog.training.precision import DTYPES, Precision
from unfog.training.settings import AdamW, Custom, PrecisionName, Training
from unfog.training.sharded_tensors import is_sharded, to_local
from unfog.training.state import TrainState

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh  # takes a second, which only sharding needs

# Batch sizes that are traced; others are extrapolated, as every tensor is affine in the batch size. Not 1, for which
# PyTorch saves a copy here and there.
_TRACED = (2, 4)
_KEPT = 16  # traces in the cache, of about a megabyte each


@dataclass(frozen=True)
class MemoryEstimate:
    """Predicted bytes of rank 0 on the device and in host memory, which are the same on a CPU.

    Without the CUDA context, which is not part of the available memory either.
    """

    device: str
    step: Peak
    """A training step, with what the run holds all the time: weights, EMA and moments of the optimiser."""
    drawing: int
    """Peak of generating a preview, with what the run holds all the time; in fp32 without gradients."""
    measuring: int
    """Peak of the held-out loss."""
    snapshot: int
    """Host memory of a checkpoint while it is written."""
    images: int
    """Host memory of the decoded images, unless they are memory-mapped."""
    weights: int
    """Bytes of the whole network."""
    graph: int = 0
    """What a captured step keeps of the device between steps, on which previews and held-out loss come on top."""

    @property
    def peak(self) -> int:
        """The largest peak on the device."""
        return _with_snapshot(max(self.step.total, self.drawing, self.measuring), self.snapshot, self.device)


class _TracedStep(NamedTuple):
    """A training step whose memory on rank 0, which has the largest shard, is traced."""

    config: Config
    device: str
    microbatch: int
    passes: int
    """Micro-batches of the step."""
    checkpointing: bool = False
    processes: int = 1

    @property
    def sharded(self) -> bool:
        return self.config.training.is_sharded(self.processes)


class MemoryEstimator:
    """Estimates the memory of one configuration from traces, each of which takes a second of work and little memory.

    Traces are cached, as the search of a micro-batch needs the same ones again and again. `config` has the batch of one
    of the processes that train together; `device` is a type, such as "cuda".
    """

    # No `functools.cache`: a trace empties those of the package (`clear_package_caches`).
    _made: ClassVar[dict[_TracedStep, Trace]] = {}
    _derived: ClassVar[set[_TracedStep]] = set()  # traced once, with one image and pass, for the sharding alone

    def __init__(self, config: Config, device: str, processes: int = 1):
        self.config, self.device, self.processes = _traceable(config.with_most_pixels), device, processes
        self._divided = config.training.is_sharded(processes)

    def estimate(self, microbatch: int, checkpointing: bool, images: int = 0) -> MemoryEstimate:
        """Return the estimate for a micro-batch; `images` are the bytes of decoded images in memory."""
        config, step = self.config, self.step(microbatch, checkpointing)
        doubled = 1 + (config.usual_guidance != 1)
        graph = self._graph(step, microbatch)
        drawing = graph + self._beside(step, min(microbatch, config.preview.images) * doubled)
        measures = config.evaluate.every >= 0
        measuring = graph + self._beside(step, min(microbatch, config.evaluate.images)) if measures else 0
        snapshot, weights = self._snapshot(step), self._weights(step)
        return MemoryEstimate(self.device, step, drawing, measuring, snapshot, images, weights, graph)

    def step(self, microbatch: int, checkpointing: bool) -> Peak:
        """Return the peak of a training step with a micro-batch."""
        # The second pass of a step finds the gradients of the first; further ones repeat it.
        whole = microbatch == self.config.training.batch
        passes = 1 if whole else 2
        if whole or microbatch == 1:
            trace = self._traced(microbatch, passes, checkpointing)
        else:
            few, more = (self._traced(n, passes, checkpointing) for n in _TRACED)
            try:
                trace = few.extrapolate(microbatch, more, *_TRACED)
            except ValueError:  # code of a user may compute otherwise for another number of images
                trace = self._traced(microbatch, passes, checkpointing)
        return trace.peak(self.device, HOLES_RECOMPUTING if checkpointing else HOLES)

    def training(self, microbatch: int, checkpointing: bool) -> int:
        """Return the peak bytes of training with checkpoints.

        Generating as many samples at once takes less than a step, unless that is captured.
        """
        step = self.step(microbatch, checkpointing)
        if self._graph(step, microbatch):
            return self.estimate(microbatch, checkpointing).peak
        return _with_snapshot(step.total, self._snapshot(step), self.device)

    def _graph(self, step: Peak, microbatch: int) -> int:
        """Return the bytes that a captured step reserves for its replays; 0 if the step is not captured.

        A graph has addresses in it, so torch gives the memory that was used in a capture to nothing else: inputs,
        activations, gradients and workspace. Weights, EMAs and moments were there before.
        """
        training = self.config.training
        captured = training.capture and self.device == "cuda" and self.processes == 1 and microbatch == training.batch
        return step.total - persistent_bytes(step) if captured else 0

    def _weights(self, step: Peak) -> int:
        return self._unsharded_bytes if self._divided else step.parts["parameters"]

    @cached_property
    def _unsharded_bytes(self) -> int:
        with FakeTensorMode():
            network = build_network(self.config)
            return sum(tensor.nbytes for tensor in (*network.parameters(), *network.buffers()))

    def _snapshot(self, step: Peak) -> int:
        # Of a sharded network, rank 0 writes the first checkpoint whole; later ones take a part of it on each rank.
        return round(checkpoint_bytes(step) * self._weights(step) / step.parts["parameters"])

    def _traced(self, microbatch: int, passes: int, checkpointing: bool) -> Trace:
        step = _TracedStep(self.config, self.device, microbatch, passes, checkpointing, self.processes)
        key = step._replace(config=_trace_key(self.config, self.device))
        if key not in self._made:
            if len(self._made) >= _KEPT:
                self._made.clear()
            first = key._replace(microbatch=1, passes=1, checkpointing=False)
            if self._divided and first not in self._derived:
                # The first trace also has tensors by which torch derives the sharding of each operation, once.
                _trace_step(step)
                self._derived.add(first)
            self._made[key] = _trace_step(step)
        return self._made[key]

    def _beside(self, step: Peak, images: int) -> int:
        """Return the peak of a forward pass without gradients, on top of what the run holds all the time."""
        call = _trace_call(self.config, self.device, images).peak(self.device)
        # A sharded network is gathered into a whole copy for it.
        return persistent_bytes(step) + call.total - (0 if self._divided else call.parts["parameters"])


def sampling_memory(config: Config, device: str, images: int, half: torch.dtype | None = None) -> int:
    """Return the bytes that generating so many images at once takes on a type of device, beside the network's weights.

    `half` is the type that the network computes in, None for fp32. Latents are counted, and not their decoding.
    """
    peak = _trace_call(config, device, images, half).peak(device)
    return peak.total - peak.parts["parameters"]


def _traceable(config: Config) -> Config:
    """Return the configuration, with AdamW for an optimiser that reads values, which fake tensors do not have.

    RequestError if the optimiser cannot be built at all.
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


def _trace_key(config: Config, device: str) -> Config:
    """Return the configuration without the settings that do not change the trace of a step on a type of device."""
    used = config.training
    # On CUDA alone the format decides what normalisation keeps (`unfog.models.group_norm`).
    memory_format = used.memory_format if device == "cuda" else Training().memory_format
    training = Training(
        precision=used.precision, noise=used.noise, clip=used.clip, shard=used.shard, memory_format=memory_format
    )
    optimizer, usual = replace(config.optimizer, lr=1.0, warmup=1), Config()
    asides = {name: getattr(usual, name) for name in ("preview", "evaluate", "log", "checkpoint")}
    # Only whether there are snapshots matters.
    averages = replace(config.ema_snapshots, every=min(config.ema_snapshots.every, 0))
    return replace(config, training=training, optimizer=optimizer, ema_snapshots=averages, **asides)


def persistent_bytes(step: Peak) -> int:
    """Return bytes of what a run holds all the time: weights, moments, EMA."""
    return sum(step.parts[part] for part in ("parameters", "moments", "average"))


def checkpoint_bytes(step: Peak) -> int:
    """Return host memory of a checkpoint while it is written and read back."""
    weights = step.parts["parameters"]
    # All tensors, and the largest file twice. With two averages, an EMA snapshot of them in float16 may be on its way.
    return persistent_bytes(step) + (3 if step.parts["average"] > 1.5 * weights else 2) * weights


def _with_snapshot(peak: int, snapshot: int, device: str) -> int:
    return peak + (snapshot if device == "cpu" else 0)


def _trace_step(step: _TracedStep) -> Trace:
    """Trace a training step, from the building of the network on."""
    config, training = step.config, step.config.training
    augment, objective = build_augmentation(config), build_loss(config)

    def work(recorder: MemoryRecorder) -> None:
        state = _build_state(recorder, step, mesh)
        for _ in range(step.passes):
            _run_micro_batch(recorder, step, state, augment, objective)
        # The same calls in the same order as `training.loop`, as each allocates.
        state.precision.gradient_norm(state.optimizer)
        state.precision.update(state.optimizer, training.clip, 2 * training.clip, True)  # clips for any norm
        state.optimizer.zero_grad(set_to_none=True)
        state.project()
        for average in filter(None, (state.ema, state.second_ema)):
            average.update(1)

    with fake_process_group(step.processes) if step.sharded else nullcontext():
        mesh = build_mesh("cpu", step.processes) if step.sharded else None
        return Trace.record(work, step.device, DTYPES.get(training.precision))


def _build_state(recorder: MemoryRecorder, step: _TracedStep, mesh: DeviceMesh | None) -> TrainState:
    """Build what a run holds all the time: network, EMAs and optimiser."""
    config, precision = step.config, step.config.training.precision
    # fp16 is traced as bf16, as its loss scaler reads values. Elsewhere than on a CPU, _AutocastEmulation casts.
    here: PrecisionName = "fp32" if step.device != "cpu" or precision == "fp32" else "bf16"
    if here == "bf16":
        recorder.allocate(ONEDNN_HALF, "library")
    recorder.kind = "parameters"
    network = build_network(config)
    if mesh is not None:
        shard_network(network, mesh, gathers_in_bf16(precision, step.device))
        recorder.begin()  # the network is built on the meta device: see `Shards`
    network.checkpointing = step.checkpointing
    recorder.kind = "workspace"
    second = config.ema_snapshots.second_schedule(config.ema)
    state = TrainState(network, config.optimizer, config.ema, Precision(here, torch.device("cpu")), second)
    for average in filter(None, (state.ema, state.second_ema)):
        recorder.name("average", map(to_local, [*average.parameters, *average.buffers]))
    _allocate_moments(recorder, state)
    if step.processes > 1 and not step.sharded:
        # Gradient buckets of DistributedDataParallel, made in C++ where no trace sees them.
        recorder.allocate(sum(p.nbytes for p in network.parameters()), "exchange")
    return state


def _run_micro_batch(
    recorder: MemoryRecorder, step: _TracedStep, state: TrainState, augment: Augmentation, objective: LossFunction
) -> None:
    config, network = step.config, state.model
    conditions = config.conditions.blank(step.microbatch)
    with recorder.keeping("activations"):
        x0, conditions = augmented(augment, config.representation.zeros(step.microbatch), conditions)
        with state.precision.autocast():
            loss = objective(network, x0, conditions)
        if step.sharded:  # layers around the blocks stay gathered until the backward pass is over
            recorder.name("gathered", (p for p in network.parameters() if p.ndim and not is_sharded(p)))
        total = loss.per_image.sum() / config.training.batch
        del x0, conditions  # the training loop holds neither any longer in the backward pass
    state.precision.backward(total)
    recorder.name("gradients", (to_local(p.grad) for p in network.parameters() if p.grad is not None))


def _allocate_moments(recorder: MemoryRecorder, state: TrainState) -> None:
    """Let the optimiser allocate its state, as its first step does."""
    for parameter in state.model.parameters():
        parameter.grad = torch.empty_like(parameter)
    state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)
    recorder.name("moments", map(to_local, optim.optimizer_tensors(state.optimizer, state.model).values()))


def _trace_call(config: Config, device: str, images: int, half: torch.dtype | None = None) -> Trace:
    """Trace a forward pass of sampling without gradients, in fp32 or under autocast to `half`."""
    shape = (images, *config.input_shape)

    def work(recorder: MemoryRecorder) -> None:
        recorder.kind = "parameters"
        network = build_network(config).eval()
        recorder.kind = "workspace"
        with torch.no_grad():
            x, logsnr = torch.zeros(shape), torch.zeros(images)
            denoise = Denoiser(network, config.diffusion, dtype=half if device == "cpu" else None)
            x0 = denoise(x, logsnr, config.conditions.blank(images))
            del x, x0

    return Trace.record(work, device, half)
