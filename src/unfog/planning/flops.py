"""Count the floating-point operations of a network, and predict the time that a device takes for them."""

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
"""Share of a GPU's dense rate that such networks reach in eager PyTorch, from small ones at low resolution to large
ones. An assumption: not measured."""

LAUNCH = 14e-6
"""Seconds that the host takes to launch an operation, which limits a small network on a large GPU. Estimated."""


class NetworkCost(NamedTuple):
    """FLOPs and kernel launches that a network takes for one image."""

    forward: float
    """FLOPs of a forward pass; a multiplication and an addition count as two."""
    training: float
    """FLOPs of forward and backward pass."""
    operations: int
    """Kernels of a forward and backward pass, for any batch size."""


class TimeRange(NamedTuple):
    """Seconds at best and at worst."""

    low: float
    high: float

    def times(self, count: float) -> TimeRange:
        return TimeRange(count * self.low, count * self.high)


def _attention(query, key, value, *args, out_shape=None, **kwargs) -> int:  # type: ignore[no-untyped-def]
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


def _attention_backward(gradient, query, key, value, *args, out_shape=None, **kwargs) -> int:  # type: ignore[no-untyped-def]
    return int(sdpa_backward_flop_count(gradient, query, key, value))  # type: ignore[no-untyped-call]


ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
"""FLOP formulas by shapes [B, heads, N, D], for the attention kernel of fake tensors, which PyTorch has none for."""


def count_flops(build: Callable[[], nn.Module], shape: tuple[int, int, int]) -> NetworkCost:
    """Count the operations of a network for one image, on fake tensors.

    Args:
        build: makes the network, (x, c_noise) -> y.
        shape: [C, H, W] of an image.
    """
    batch = 2  # not 1, for which PyTorch takes other kernels here and there
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
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.operations += func.namespace == "aten" and not func.is_view
        return func(*args, **(kwargs or {}))


def step_time(work: NetworkCost, batch: int, passes: int, device: Device, half: bool, checkpointing: bool) -> TimeRange:
    """Predict the seconds of a training step: of its FLOPs, or of its kernel launches if those take longer."""
    flops = batch * (work.training + work.forward * checkpointing)  # recomputes the forward pass
    launches = passes * work.operations * LAUNCH * (4 / 3 if checkpointing else 1)
    return _seconds(flops, device.half if half else device.full, launches)


def call_time(work: NetworkCost, images: int, device: Device) -> TimeRange:
    """Predict the seconds of a forward pass of so many images in fp32, without gradients."""
    return _seconds(images * work.forward, device.full, work.operations / 3 * LAUNCH)


def _seconds(flops: float, rate: float, launches: float) -> TimeRange:
    worst, best = UTILISATION
    return TimeRange(max(flops / (rate * best), launches), max(flops / (rate * worst), launches))
