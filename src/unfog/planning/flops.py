"""Floating-point operations of a network, and the time that a device takes for them; data sheets of accelerators."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from unfog.errors import RequestError
from unfog.planning.memory_recorder import clear_package_caches
from unfog.process.device import synchronize
from unfog.training.settings import Training
from unfog.training.stability.out_of_memory import microbatch_size
from unfog.values.condition_format import ConditionFormat
from unfog.values.conditions import Conditions

GB = 10**9
_TFLOPS = 10**12


@dataclass(frozen=True)
class Device:
    """Memory and rates of an accelerator; rates are dense, with accumulation in fp32."""

    name: str
    memory: int
    """Bytes."""
    half: float
    """FLOP/s of matrix products in its 16-bit type."""
    full: float
    """FLOP/s in fp32 without TF32, which unfog leaves off."""
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Its native training precision."""

    @classmethod
    def find(cls, name: str) -> Device:
        """Return the device of a name such as "H100" or "rtx 4090". Raises `RequestError` if it is unknown."""
        plain = name.lower().replace("nvidia", "").replace("rtx", "").strip(" -_").replace(" ", "-").replace("_", "-")
        if plain not in _DEVICES:
            raise RequestError(
                f"there is no data sheet of a device {name!r}; give one of {', '.join(_DEVICES)}, or omit --for "
                "(device= in Python) to plan for this machine"
            )
        return _DEVICES[plain]

    @classmethod
    def of_gpu(cls, name: str) -> Device | None:
        """Return the data sheet of a GPU as its driver names it: "NVIDIA H100 80GB HBM3". None if it is not known."""
        words = re.findall(r"[a-z0-9]+", name.lower())
        keys = [word for word in words if word in _DEVICES]
        # Cards with one of these words are other ones, or slices of one, of which no data sheet is here. An A100 is as
        # fast on any board.
        others = {"laptop", "mobile", "ti", "super", "d", "max", "nvl", "ada", "pcie", "mig"}
        if len(keys) != 1 or (others & {*words}) - ({"pcie"} if keys == ["a100"] else set()):
            return None
        return _DEVICES["a100-40" if keys == ["a100"] and "40gb" in words else keys[0]]


_DEVICES = {
    "b200": Device("NVIDIA B200", 180 * GB, 2250 * _TFLOPS, 75 * _TFLOPS),
    "h200": Device("NVIDIA H200", 141 * GB, 989 * _TFLOPS, 67 * _TFLOPS),
    "h100": Device("NVIDIA H100 SXM", 80 * GB, 989 * _TFLOPS, 67 * _TFLOPS),
    "a100": Device("NVIDIA A100 80GB", 80 * GB, 312 * _TFLOPS, 19.5 * _TFLOPS),
    "a100-40": Device("NVIDIA A100 40GB", 40 * GB, 312 * _TFLOPS, 19.5 * _TFLOPS),
    "l40s": Device("NVIDIA L40S", 48 * GB, 362 * _TFLOPS, 91.6 * _TFLOPS),
    "a10": Device("NVIDIA A10", 24 * GB, 125 * _TFLOPS, 31.2 * _TFLOPS),
    "l4": Device("NVIDIA L4", 24 * GB, 121 * _TFLOPS, 30.3 * _TFLOPS),
    "5090": Device("NVIDIA RTX 5090", 32 * GB, 209 * _TFLOPS, 105 * _TFLOPS),
    "4090": Device("NVIDIA RTX 4090", 24 * GB, 165 * _TFLOPS, 82.6 * _TFLOPS),
    "3090": Device("NVIDIA RTX 3090", 24 * GB, 71 * _TFLOPS, 35.6 * _TFLOPS),
    "3060": Device("NVIDIA RTX 3060", 12 * GB, 25.6 * _TFLOPS, 12.7 * _TFLOPS),
    "v100": Device("NVIDIA V100 32GB", 32 * GB, 125 * _TFLOPS, 15.7 * _TFLOPS, "fp16"),
    "t4": Device("NVIDIA T4", 16 * GB, 65 * _TFLOPS, 8.1 * _TFLOPS, "fp16"),
}


_MATRIX = 1024  # side of the matrices by which a CPU is rated

# Share of a dense rate that such networks reach, from small ones at low resolution to large ones. In 16 bits they wait
# for memory, eager code most: counted from shapes, copies and the rates of an H100's parts, and not measured on one.
_UTILISATION = {"eager": (0.11, 0.18), "compiled": (0.20, 0.30), "fp32": (0.15, 0.40)}

# Seconds that the host takes for an operation of a plain step, which limits a small network on a large GPU. One machine
# of 16 virtual cores took 95e-6 for those of `small`; others are faster.
_LAUNCH = 50e-6


class NetworkCost(NamedTuple):
    """FLOPs and kernel launches that a network takes for one image."""

    forward: float
    """FLOPs of a forward pass; a multiplication and an addition count as two."""
    training: float
    """FLOPs of forward and backward pass."""
    operations: int
    """Kernels of a forward and backward pass, for any batch size."""

    def call_time(self, images: int, device: Device) -> TimeRange:
        """Predict the seconds of a forward pass of so many images as samples are drawn there, without gradients."""
        launches = self.operations / 3 * _LAUNCH  # a forward pass is about a third of them
        return _seconds(images * self.forward, device, "fp32" if device.precision == "fp32" else "eager", launches)

    def step_time(self, device: Device, training: Training) -> TimeRange:
        """Predict the seconds of a training step: of its FLOPs, or of its kernel launches if those take longer."""
        recomputing = training.checkpointing  # takes another forward pass, a third of forward and backward pass
        flops = training.batch * (self.training + self.forward * recomputing)
        passes = -(-training.batch // microbatch_size(training))
        launches = 1 if training.capture else passes * self.operations * (4 / 3 if recomputing else 1)
        way = "fp32" if training.precision == "fp32" else "compiled" if training.compile else "eager"
        return _seconds(flops, device, way, launches * _LAUNCH)

    @classmethod
    def of(
        cls, build: Callable[[], nn.Module], shape: tuple[int, int, int], conditions: ConditionFormat | None = None
    ) -> NetworkCost:
        """Count the operations for one image [C, H, W] of the network that `build` makes, on fake tensors."""
        batch = 2  # not 1, for which PyTorch takes other kernels here and there
        clear_package_caches()
        try:
            with FakeTensorMode():
                network, count = build(), _OperationCounter()
                inputs = torch.zeros(batch, *shape), torch.zeros(batch), *_blank_conditions(conditions, batch)
                with FlopCounterMode(display=False, custom_mapping=_ATTENTION) as flops:
                    y: Tensor = network(*inputs)
                    forward = flops.get_total_flops()
                    y.sum().backward()  # type: ignore[no-untyped-call]
                    both = flops.get_total_flops()
                with count:
                    network(*inputs).sum().backward()
        finally:
            clear_package_caches()
        return cls(forward / batch, both / batch, count.operations)


def _blank_conditions(conditions: ConditionFormat | None, batch: int) -> tuple[Conditions, ...]:
    """Return the conditions of a batch, also empty ones, which somebody's `forward` may need; () for None."""
    return () if conditions is None else (conditions.blank(batch),)


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


# FLOP formulas by shapes [B, heads, N, D], for the attention kernel of fake tensors, which PyTorch has none for.
_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


def measure_flops(work: Callable[[], object]) -> float:
    """Return the FLOPs of the matrix products and convolutions of a computation, which is done."""
    flops = FlopCounterMode(display=False, custom_mapping=_ATTENTION)
    # Its own tracker of modules hooks into gradients, which fails in inference mode. Only the total is wanted.
    flops.mod_tracker = cast(Any, _NoModules())
    with flops:
        work()
    return float(flops.get_total_flops())


class _NoModules(nullcontext[None]):
    parents = frozenset({"Global"})


class _OperationCounter(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.operations += func.namespace == "aten" and not func.is_view  # a view launches no kernel
        return func(*args, **(kwargs or {}))


def _seconds(flops: float, device: Device, way: str, launches: float) -> TimeRange:
    """Return the seconds of some arithmetic in one `way` of `_UTILISATION`, or of its launches if those take longer."""
    (worst, best), rate = _UTILISATION[way], device.full if way == "fp32" else device.half
    return TimeRange(max(flops / (rate * best), launches), max(flops / (rate * worst), launches))


def matmul_seconds(dtype: torch.dtype, device: torch.device, side: int) -> float:
    """Return the seconds of one product of two square matrices, the fastest of several.

    RuntimeError if the device has no such arithmetic.
    """
    # Not of ones, which a GPU multiplies sooner, as few of its bits change; and not by the generators of a run.
    generator = torch.Generator(device).manual_seed(0)
    matrix = torch.randn(side, side, device=device, generator=generator).to(dtype)
    fastest = float("inf")
    for _ in range(6):  # the first one also prepares; the fastest is what other work on the machine disturbed least
        synchronize(device)
        started = time.perf_counter()
        torch.mm(matrix, matrix)
        synchronize(device)
        fastest = min(fastest, time.perf_counter() - started)
    return fastest


def benchmark_cpu(memory: int, processes: int = 1) -> Device:
    """Return a data sheet of the CPU at hand, shared by `processes`, from its rate of matrix products."""
    rate = 2 * _MATRIX**3 / matmul_seconds(torch.float32, torch.device("cpu"), _MATRIX) / processes
    return Device("cpu", memory, rate, rate, "fp32")
