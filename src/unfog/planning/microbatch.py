"""How many images go through the network at once: as many as memory takes, while the batch stays what it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from unfog.config.schema import Config
from unfog.errors import RequestError
from unfog.planning.memory_bound import memory_upper_bound
from unfog.planning.memory_estimate import MemoryEstimator, with_precision
from unfog.planning.peak_memory import available_memory
from unfog.reporting.progress import format_bytes
from unfog.training.distributed.rendezvous import processes_per_device

MARGIN = 0.85
"""Share of the available memory that a prediction may take; predictions are within about 10%."""


class MicrobatchChoice(NamedTuple):
    """What fits, and why."""

    microbatch: int
    """Images at once; the whole batch where that fits."""
    checkpointing: bool
    reason: str


def choose_microbatch(
    config: Config, device: torch.device, available: int | None = None, name: str = "", processes: int = 1
) -> MicrobatchChoice:
    """The largest micro-batch whose predicted peak fits what is available, with a margin.

    One that divides the batch is preferred, unless it is less than half of what fits. Gradient checkpointing, which
    costs time, comes in only where not even one image fits without.

    Args:
        config: with network and image size settled, and the batch of one process; its own micro-batch does not count.
            Precision auto counts as fp32, which takes the most.
        device: where it will train.
        available: bytes; left open, what this process can take now.
        name: of the device, for people; left open, as torch calls it.
        processes: that train together.

    Raises:
        RequestError: not even one image fits.
    """
    room = memory_per_process(device) if available is None else available
    config = replace(config, training=replace(config.training, microbatch=0))
    batch, checkpointing = config.training.batch, config.training.checkpointing
    if memory_upper_bound(config) < room * MARGIN:  # hardly ever a question; a trace would take a second
        return MicrobatchChoice(
            batch,
            checkpointing,
            f"needs less than {format_bytes(memory_upper_bound(config))} of {format_bytes(room)} available",
        )
    traces = MemoryEstimator(with_precision(config), device.type, processes)
    if available is None:
        traces.training(batch, checkpointing)  # loads what tracing needs, which takes memory for good
        room = memory_per_process(device)

    def peak(count: int, checkpointing: bool) -> int:
        return traces.training(count, checkpointing)

    for recompute in sorted({checkpointing, True}):
        count = _largest_that_fits(batch, lambda n, recompute=recompute: peak(n, recompute) < room * MARGIN)  # type: ignore[misc]
        if count:
            need = "needs" if count == 1 else "need"
            reason = (
                f"{count_of(count)} at once {need} about {format_bytes(peak(count, recompute))} of "
                f"{format_bytes(room)} available"
            )
            if count < batch:
                reason += f", all {batch:,} would need {format_bytes(peak(batch, checkpointing))}"
            return MicrobatchChoice(count, recompute, reason)
    raise RequestError(
        f"one image of {config.data.size} pixels through this network needs about {format_bytes(peak(1, True))} to "
        f"train, also with gradient checkpointing, and {name or device} has {format_bytes(room)} available; give a "
        f"smaller --size or --network{_more_devices_remedy(config, processes)}"
    )


def memory_per_process(device: torch.device) -> int:
    """Bytes that this process can take on a device: an even part, where others of its machine compute there too."""
    return available_memory(device) // processes_per_device(device)


def _more_devices_remedy(config: Config, processes: int) -> str:
    """What else helps a network that does not fit a device, to be appended to a remedy."""
    if processes == 1:
        return ", or divide it among several devices: docs/distributed.md"
    return ", or start more processes" if config.training.shard else ", or divide it: --training.shard"


def required_memory(config: Config, device: torch.device, available: int, processes: int = 1) -> int:
    """Bytes of training with as many images at once as is set, or what it surely stays below, where that is there."""
    glance, training = memory_upper_bound(config), config.training
    if glance < available:
        return int(glance)
    at_once = training.microbatch or training.batch
    return MemoryEstimator(with_precision(config), device.type, processes).training(at_once, training.checkpointing)


def _largest_that_fits(batch: int, fits: Callable[[int], bool]) -> int:
    """The largest count that fits, or a divisor of the batch above half of that; 0 if not even one does."""
    if fits(batch):
        return batch
    if not fits(1):
        return 0
    low, high = 1, batch  # fits, does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    divisors = [n for n in range(low, 0, -1) if batch % n == 0]
    if 2 * divisors[0] > low:
        return divisors[0]
    return -(-batch // -(-batch // low))  # in as few passes, as even as can be


def count_of(images: int) -> str:
    """A number of images in words."""
    return "1 image" if images == 1 else f"{images:,} images"
