"""How many images go through the network at once: as many as memory takes, while the batch stays what it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from unfog.config.tree import Config
from unfog.diagnosis.plan.memory import available_memory
from unfog.errors import RequestError
from unfog.runs.disk import size
from unfog.runs.footprint import Traces, at_most, with_precision

MARGIN = 0.85
"""Share of the available memory that a prediction may take; predictions are within about 10%."""


class Fit(NamedTuple):
    """What fits, and why."""

    microbatch: int
    """Images at once; the whole batch where that fits."""
    checkpointing: bool
    reason: str


def choose_microbatch(config: Config, device: torch.device, available: int | None = None, name: str = "") -> Fit:
    """The largest micro-batch whose predicted peak fits what is available, with a margin.

    One that divides the batch is preferred, unless it is less than half of what fits. Gradient checkpointing, which
    costs time, comes in only where not even one image fits without.

    Args:
        config: with network and image size settled; its own micro-batch does not count. Precision auto counts as fp32,
            which takes the most.
        device: where it will train.
        available: bytes; left open, what the device has now.
        name: of the device, for people; left open, as torch calls it.

    Raises:
        RequestError: not even one image fits.
    """
    room = available_memory(device) if available is None else available
    config = replace(config, training=replace(config.training, microbatch=0))
    batch, checkpointing = config.training.batch, config.training.checkpointing
    if at_most(config) < room * MARGIN:  # hardly ever a question; a trace would take a second
        return Fit(batch, checkpointing, f"needs less than {size(at_most(config))} of {size(room)} available")
    traces = Traces(with_precision(config), device.type)
    if available is None:
        traces.training(batch, checkpointing)  # loads what tracing needs, which takes memory for good
        room = available_memory(device)

    def peak(count: int, checkpointing: bool) -> int:
        return traces.training(count, checkpointing)

    for recompute in sorted({checkpointing, True}):
        count = largest(batch, lambda n, recompute=recompute: peak(n, recompute) < room * MARGIN)  # type: ignore[misc]
        if count:
            need = "needs" if count == 1 else "need"
            reason = f"{count_of(count)} at once {need} about {size(peak(count, recompute))} of {size(room)} available"
            if count < batch:
                reason += f", all {batch:,} would need {size(peak(batch, checkpointing))}"
            return Fit(count, recompute, reason)
    raise RequestError(
        f"one image of {config.data.size} pixels through this network needs about {size(peak(1, True))} to train, also "
        f"with gradient checkpointing, and {name or device} has {size(room)} available; give a smaller --size or "
        "--network"
    )


def needed(config: Config, device: torch.device, available: int) -> int:
    """Bytes of training with as many images at once as is set, or what it surely stays below, where that is there."""
    glance, training = at_most(config), config.training
    if glance < available:
        return int(glance)
    at_once = training.microbatch or training.batch
    return Traces(with_precision(config), device.type).training(at_once, training.checkpointing)


def largest(batch: int, fits: Callable[[int], bool]) -> int:
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
