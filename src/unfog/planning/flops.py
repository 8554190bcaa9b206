"""Time: how many operations a network takes, and how long a device takes for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from unfog.planning.accelerators import Device
from unfog.planning.memory_trace import clear_package_caches

UTILISATION = (0.15, 0.40)
"""Share of a GPU's dense rate that convolutional networks of this kind reach in eager PyTorch, from small ones at low
resolution to large ones. An assumption: no GPU has been measured."""

LAUNCH = 14e-6
"""Seconds that the host takes for one operation; a small network on a large GPU waits for nothing else. Estimated."""


class NetworkCost(NamedTuple):
    """What one image costs."""

    forward: float
    """Floating-point operations of one call of the network, an addition and a multiplication counted as two."""
    training: float
    """Of forward and backward."""
    operations: int
    """Kernels of a forward and backward pass, whatever the batch."""


class TimeRange(NamedTuple):
    """Seconds, at the best and at the worst."""

    low: float
    high: float

    def times(self, count: float) -> TimeRange:
        """So many of them."""
        return TimeRange(count * self.low, count * self.high)


def _attention(query, key, value, *args, out_shape=None, **kwargs) -> int:  # type: ignore[no-untyped-def]
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


def _attention_backward(gradient, query, key, value, *args, out_shape=None, **kwargs) -> int:  # type: ignore[no-untyped-def]
    return int(sdpa_backward_flop_count(gradient, query, key, value))  # type: ignore[no-untyped-call]


ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
"""By shapes [B, heads, N, D]: what tensors without values take for attention, unknown to PyTorch's counter."""


def count_flops(build: Callable[[], nn.Module], shape: tuple[int, int, int]) -> NetworkCost:
    """Count what a network does for one image [C, H, W], on tensors that have no values.

    Args:
        build: makes the network, (x, c_noise) -> y.
        shape: of an image.
    """
    batch = 2
    clear_package_caches()
    try:
        with FakeTensorMode():
            network, count = build(), _OperationCounter()
            x, c_noise = torch.zeros(batch, *shape), torch.zeros(batch)
            with FlopCounterMode(display=False, custom_mapping=ATTENTION) as flops:
                y: Tensor = network(x, c_noise)
                forward = flops.get_total_flops()
                y.sum().backward()  # type: ignore[no-untyped-call]
                both = flops.get_total_flops()
            with count:
                network(x, c_noise).sum().backward()
    finally:
        clear_package_caches()
    return NetworkCost(forward / batch, both / batch, count.operations)


class _OperationCounter(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations other than views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.operations += func.namespace == "aten" and not func.is_view
        return func(*args, **(kwargs or {}))


def step_time(work: NetworkCost, batch: int, passes: int, device: Device, half: bool, checkpointing: bool) -> TimeRange:
    """Seconds of an optimiser step, estimated: arithmetic at a share of the device's rate, or the host's launches."""
    flops = batch * (work.training + work.forward * checkpointing)  # which computes everything once more
    launches = passes * work.operations * LAUNCH * (4 / 3 if checkpointing else 1)
    return _at(flops, device.half if half else device.full, launches)


def call_time(work: NetworkCost, images: int, device: Device) -> TimeRange:
    """Seconds of one call of the network in fp32 for so many images, without gradients."""
    return _at(images * work.forward, device.full, work.operations / 3 * LAUNCH)


def _at(flops: float, rate: float, launches: float) -> TimeRange:
    worst, best = UTILISATION
    return TimeRange(max(flops / (rate * best), launches), max(flops / (rate * worst), launches))
