"""Where the time of a training step and of a sampling step goes, by kind of operator, and how near the limit they are.

    python benchmarks/speed/profile_step.py [--network small] [--size 32] [--batch 16] [--precision fp32] [--threads 0]
        [--format auto] [--device cpu]

Printed: the rate of one large matrix product on this machine in this precision; floating-point operations of a step
(as torch's FlopCounterMode counts them), the rate they were done at and its share of the former (MFU); then the share
of each kind of operator, from torch's profiler. A step is forward, mean squared error and backward; a sampling step is
one call of the network without gradients. The time of a step is the least of `--rounds`; the profile is of one more.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from unfog.config.schema import Config
from unfog.data.settings import Data
from unfog.models.settings import SIZES
from unfog.pipeline.build import build_network
from unfog.planning.flops import matmul_seconds
from unfog.training.precision import Precision, default_memory_format
from unfog.training.settings import Training

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

KINDS = {
    "convolution": ("convolution",),
    "attention": ("attention", "softmax"),
    "matrix product": ("::mm", "addmm", "bmm", "linear"),
    "normalisation": ("group_norm", "layer_norm", "normalize"),
    "activation": ("silu", "sigmoid"),
    "copy, cast, join": ("copy", "cat", "clone", "contiguous", "_to_copy", "upsample", "slice", "chunk"),
    "sum and product": ("add", "mul", "sub", "div", "sum", "mean", "pow", "rsqrt", "square", "neg"),
    "memory": ("empty", "fill", "zero", "resize"),
}


def main() -> None:
    """Both steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="small", choices=SIZES)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--format", default="auto", choices=("auto", "contiguous", "channels_last"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    if asked.threads:
        torch.set_num_threads(asked.threads)
    device, precision = torch.device(asked.device), Precision(asked.precision, torch.device(asked.device))
    form = default_memory_format(device, asked.precision)[0] if asked.format == "auto" else asked.format
    training = Training(batch=asked.batch, precision=asked.precision, memory_format=form, images=asked.batch)
    config = replace(Config(network=SIZES[asked.network]), data=Data(size=asked.size, channels=3), training=training)
    network = build_network(config).to(device)
    with torch.no_grad():  # nothing begins as zero, which would be no work for some kernels
        for parameter in network.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    x, c = torch.randn(asked.batch, 3, asked.size, asked.size, device=device), torch.rand(asked.batch, device=device)

    def train() -> None:
        network.zero_grad(set_to_none=True)
        with precision.autocast():
            y = network(x, c)
        y.float().square().mean().backward()

    @torch.inference_mode()
    def sample() -> None:
        with precision.autocast():
            network(x, c)

    limit = matrix_rate(device, torch.bfloat16 if asked.precision == "bf16" else torch.float32)
    print(f"{asked.network}, {asked.size}x{asked.size}, batch {asked.batch}, {asked.precision}, {form}")
    threads, load = torch.get_num_threads(), os.getloadavg()[0]
    print(f"{threads} threads, load {load:.1f}; a matrix product: {limit / 1e9:,.0f} GFLOP/s")
    for name, step in (("training", train), ("sampling", sample)):
        tell(name, step, asked.rounds, limit, device)


def tell(name: str, step: Callable[[], None], rounds: int, limit: float, device: torch.device) -> None:
    """The table of one kind of step."""
    with FlopCounterMode(display=False) as counter:
        step()
    seconds = min(timed(step, device) for _ in range(rounds))
    rate = counter.get_total_flops() / seconds
    print(f"\n{name} step: {seconds * 1e3:.0f} ms, {counter.get_total_flops() / 1e9:.1f} GFLOP, ", end="")
    print(f"{rate / 1e9:,.0f} GFLOP/s, MFU {rate / limit:.0%}\n\n| kind | share | calls |\n|---|---|---|")
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=activities) as profiler:
        step()
    spent: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in profiler.key_averages():
        mine = event.self_device_time_total if device.type == "cuda" else event.self_cpu_time_total
        kind = next((k for k, parts in KINDS.items() if any(part in event.key for part in parts)), "other")
        spent[kind] += mine
        calls[kind] += event.count if "::" in event.key else 0
    whole = sum(spent.values())
    for kind, microseconds in spent.most_common():
        print(f"| {kind} | {microseconds / whole:.1%} | {calls[kind]:,} |")


def timed(step: Callable[[], None], device: torch.device) -> float:
    """Seconds of one."""
    started = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations per second of a square matrix product, the best of several."""
    n = 8192 if device.type == "cuda" else 1536
    return 2 * n**3 / matmul_seconds(dtype, device, n)


if __name__ == "__main__":
    main()
