"""Choose the micro-batch: as many images per forward pass as fit the memory of a machine, at an unchanged batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from unfog.config.schema import Config
from unfog.errors import RequestError
from unfog.models.network_settings import NetworkSettings
from unfog.planning.flops import Device
from unfog.planning.memory_estimate import MemoryEstimator
from unfog.planning.memory_recorder import CUDA_CONTEXT, CUDNN_WORKSPACE, ONEDNN_HALF
from unfog.process.device import available_memory, total_memory
from unfog.settings import is_auto
from unfog.text import format_bytes, manual, plural
from unfog.training.distributed.process_group import local_world_size, processes_per_gpu
from unfog.values.condition_format import TEXT_HEAD, ConditionFormat

# Share of the available memory that a prediction may take; predictions are within 15% of the measured peak.
MARGIN = 0.85


class MicrobatchChoice(NamedTuple):
    """The largest micro-batch that fits, and why."""

    microbatch: int
    """Images per forward pass; the whole batch if that fits."""
    checkpointing: bool
    reason: str

    @classmethod
    def largest(
        cls, config: Config, device: torch.device, available: int, name: str = "", processes: int = 1
    ) -> MicrobatchChoice:
        """Return the largest micro-batch whose predicted peak fits so many available bytes with a margin.

        A divisor of the batch is preferred, unless it is less than half of what fits. Gradient checkpointing, which
        costs time, is used only if not even one image fits without. `config` has a resolved network and the batch of
        one of the `processes`; its own micro-batch is ignored. Precision auto counts as fp32, which takes the most.
        `name` is that of the device in messages; "" is torch's. RequestError if not even one image fits.
        """
        batch, checkpointing = config.training.batch, config.training.checkpointing
        bound = memory_upper_bound(config, batch)
        if bound < available * MARGIN:  # almost always; saves the second that a trace takes
            reason = f"needs less than {format_bytes(bound)} of {format_bytes(available)} available"
            return cls(batch, checkpointing, reason)
        peak = MemoryEstimator(with_precision(config), device.type, processes).training
        # False before True: without checkpointing first, unless it was asked for.
        for recompute in sorted({checkpointing, True}):
            count = _largest_that_fits(batch, lambda n, recompute=recompute: peak(n, recompute) < available * MARGIN)  # type: ignore[misc]
            if count:
                need, most = format_bytes(peak(count, recompute)), format_bytes(available)
                reason = f"{plural(count)} at once need{'s' * (count == 1)} about {need} of {most} available"
                if count < batch:
                    reason += f", all {batch:,} would need {format_bytes(peak(batch, checkpointing))}"
                return cls(count, recompute, reason)
        raise RequestError(
            f"one image of {config.image_format.sides} pixels through this network needs about "
            f"{format_bytes(peak(1, True))} to train, also with gradient checkpointing, and {name or device} has "
            f"{format_bytes(available)} available; give a smaller --size or "
            f"--network{_more_devices_remedy(config, processes)}"
        )


@dataclass(frozen=True)
class Machine:
    """The machine that a run is for: the one at hand, or one that is known by its data sheet."""

    device: torch.device
    name: str = ""
    """For messages; "" is the name of the device."""
    memory: int | None = None
    """Bytes available to one process; None is what is free here when it is asked for."""
    rooms: tuple[int, ...] = ()
    """Bytes by which a micro-batch is chosen, the usual number first; () is `memory`, or what the device has."""
    data_sheet: Device | None = None
    """Predicts the speed; None measures it here."""
    timed: bool = True
    """False: the network cannot run here, so that nothing is measured."""

    def memory_needed(self, config: Config, processes: int) -> tuple[int, int]:
        """Return the bytes that one process needs for its share of a batch, and those that are available."""
        available = _memory_per_process(self.device) if self.memory is None else self.memory
        return _required_memory(config, self.device, available, processes), available

    def largest_microbatch(self, config: Config, processes: int, available: int | None = None) -> MicrobatchChoice:
        """Return the largest micro-batch that fits so many bytes; None: the memory of the machine, free or not.

        RequestError if not even one image does.
        """
        rooms = self.rooms or (rooms_per_process(self.device) if self.memory is None else (self.memory,))
        *first, last = rooms if available is None else (available,)
        # The usual room; where not even one image fits in it, the whole memory is tried.
        for room in first:
            with suppress(RequestError):
                return MicrobatchChoice.largest(config, self.device, room, self.name, processes)
        return MicrobatchChoice.largest(config, self.device, last, self.name, processes)


def _memory_per_process(device: torch.device) -> int:
    """Return bytes that this process can allocate on a device, an equal share if other ranks of this machine use it."""
    return available_memory(device) // _processes_per_device(device)


def rooms_per_process(device: torch.device) -> tuple[int, ...]:
    """Return bytes by which a process chooses its micro-batch, the usual number first; whatever is free at the moment.

    On a CPU half of the memory, as other programs use the rest, or all of it where not even one image fits in half.
    """
    total = total_memory(device) // _processes_per_device(device)
    if device.type == "cpu":
        return total // 2, total
    return (total - CUDA_CONTEXT * (device.type == "cuda"),)


def _more_devices_remedy(config: Config, processes: int) -> str:
    if processes == 1:
        return f", or divide it among several devices, as {manual('docs/distributed.md')} says"
    return ", or start more processes" if config.training.shard else ", or divide it: --training.shard"


def _required_memory(config: Config, device: torch.device, available: int, processes: int = 1) -> int:
    """Return bytes of training with the micro-batch of `config`, or an upper bound if that is available anyway."""
    at_once = config.training.microbatch or config.training.batch
    bound = memory_upper_bound(config, at_once)
    if bound < available:
        return int(bound)
    estimator = MemoryEstimator(with_precision(config), device.type, processes)
    return estimator.training(at_once, config.training.checkpointing)


def _largest_that_fits(batch: int, fits: Callable[[int], bool]) -> int:
    """Return the largest count that fits, or a divisor of the batch above half of that; 0 if none fits."""
    if fits(batch):
        return batch
    if not fits(1):
        return 0
    low, high = 1, batch  # low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    divisor = next(n for n in range(low, 0, -1) if batch % n == 0)
    # Else in as few forward passes, of sizes as equal as possible.
    return divisor if 2 * divisor > low else -(-batch // -(-batch // low))


def memory_upper_bound(config: Config, at_once: int) -> float:
    """Return bytes that training or sampling with so many images at once never exceeds, on the host or on a device.

    Infinite for an open network. The bound takes microseconds, where an estimate takes a second or more, and in most
    runs it is all that is needed.
    """
    if config.network is None:
        return float("inf")
    channels, height, width = config.with_most_pixels.input_shape
    side = math.sqrt(height * width)
    told = config.conditions
    weights, activations = config.network.size_bound(channels + told.input_channels, side, told.inputs)
    if told.text is not None:
        more = _text_bound(config.network, told, side)
        weights, activations = weights + more[0], activations + more[1]
    # 17 = weights, gradients, two averages, two moments and what the optimiser allocates for a moment, with gaps
    # between them; a checkpoint's snapshot of all that; and the gradient buckets of several processes.
    # 2 = every layer of a block keeps its input in fp32, twice; a captured step also while a preview is drawn.
    beside = bool(config.training.capture)
    workspace = max((1 + beside) * CUDNN_WORKSPACE, ONEDNN_HALF)
    return 4 * (17 * weights + (2 + beside) * at_once * activations) + workspace


def _text_bound(network: NetworkSettings, told: ConditionFormat, side: float) -> tuple[float, float]:
    """Return upper bounds of what captions add: (weights, numbers kept for the backward pass of each image).

    Infinite where no bound is known: for some networks, for a pretrained text encoder, and until the width of the text
    encoder is chosen.
    """
    if told.text is None or told.text_model is not None or not told.text_width or not network.takes_text:
        return math.inf, math.inf
    vocabulary, length = map(int, told.text.statistics)
    width, layers, tokens = told.text_width, told.text_layers, length + 1  # and the start
    weights, activations = network.text_bound(side, width, tokens)
    if math.isinf(weights):
        return weights, activations
    weights += width * (vocabulary + tokens + 4 * network.widest + 12 * layers * width)
    return weights, activations + tokens * (8 * width + layers * (60 * width + 8 * (width // TEXT_HEAD + 1) * tokens))


def _processes_per_device(device: torch.device) -> int:
    """Return how many of torchrun's processes on this machine share this device at most."""
    return processes_per_gpu() if device.type == "cuda" else local_world_size()


def with_precision(config: Config) -> Config:
    """Return the configuration with fp32, which takes the most memory, if its precision is open."""
    if not is_auto(config.training, "precision"):
        return config
    return replace(config, training=replace(config.training, precision="fp32"))
