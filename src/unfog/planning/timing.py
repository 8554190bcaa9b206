"""Times of a plan: of a network call, and of each part of a run."""

from __future__ import annotations

import math
import statistics
import time

import torch

from unfog.config.schema import Config
from unfog.diffusion.denoiser import Denoiser
from unfog.pipeline.build import build_network
from unfog.planning.accelerators import Device
from unfog.planning.flops import TimeRange
from unfog.planning.memory_estimate import batch_shape, blank_labels
from unfog.planning.run_costs import forward_passes, repetitions
from unfog.reporting.findings import Finding
from unfog.reporting.progress import Progress, format_duration
from unfog.training.stability.out_of_memory import microbatch_size

_SAMPLES = (16, 64, 10_000, 50_000)  # whose times are listed: a grid to look at, and the usual numbers for metrics
TOO_SLOW = 2e13
"""Floating-point operations of a step that takes minutes on a CPU, so that it is predicted instead of timed."""
_MATRIX = 1024
_LONG = 30 * 86400.0  # seconds from which on a plan warns


def benchmark_cpu(memory: int, processes: int = 1) -> Device:
    """Return a data sheet of the CPU at hand, shared by `processes`, from its rate of matrix products."""
    a, spent = torch.ones(_MATRIX, _MATRIX), []
    for _ in range(5):
        started = time.perf_counter()
        _ = a @ a
        spent.append(time.perf_counter() - started)
    rate = 2 * _MATRIX**3 / min(spent) / processes
    return Device("cpu", memory, rate, rate, "fp32")


def run_times(config: Config, step: TimeRange, call: TimeRange, held_out: int) -> dict[str, TimeRange]:
    """Return the seconds of each part of a run.

    Args:
        config: resolved settings.
        step: seconds of a training step.
        call: seconds of a forward pass of one image in fp32 without gradients.
        held_out: number of held-out images.
    """
    steps, asides = config.training.images // config.training.batch, forward_passes(config, held_out)
    previews = repetitions(config.preview.every, steps)
    evaluations = repetitions(config.evaluate.every, steps) if config.evaluate.every > 0 else 0
    found = {
        "step": step,
        f"training ({steps:,} steps)": step.times(steps),
        f"previews ({previews:,})": call.times(asides["preview"]),
        f"evaluations ({evaluations:,})": call.times(asides["evaluate"]),
    }
    if asides["metrics"]:
        found["drawing for metrics"] = call.times(asides["metrics"])
    total = [sum(part[i] for name, part in found.items() if name != "step") for i in (0, 1)]
    found["in all"] = TimeRange(*total)
    picture = call.times(asides["preview"] / (previews * config.preview.images))
    return found | {f"drawing {count:,} pictures": picture.times(count) for count in _SAMPLES}


@torch.inference_mode()
def seconds_per_call(config: Config, device: torch.device) -> float:
    """Return the median wall time of a forward pass of one micro-batch in fp32."""
    network = build_network(config).to(device).eval()
    denoise, count = Denoiser(network, config.diffusion), microbatch_size(config.training)
    x, logsnr = torch.zeros(batch_shape(config, count), device=device), torch.zeros(count, device=device)
    label = blank_labels(config, count)
    label = None if label is None else label.to(device)
    spent = []
    with Progress("measuring a call of the network", 4) as progress:
        for done in range(4):
            started = time.perf_counter()
            denoise(x, logsnr, label).sum().item()
            spent.append(time.perf_counter() - started)
            progress.update(done + 1)
    return statistics.median(spent[1:])  # the first also allocates


def time_finding(total: TimeRange) -> Finding | None:
    """Return a warning if a run takes more than a month."""
    if not total.low > _LONG:
        return None
    remedy = "a smaller --size, --network, --batch or --steps, or another machine: --for h100"
    return Finding("plan.time", "warning", f"all of it takes {format_time(total)}", remedy, {"seconds": total.low})


def format_time(seconds: TimeRange) -> str:
    """Format seconds; "?" if they are unknown."""
    if math.isnan(seconds.low):
        return "?"
    low, high = (f"{s * 1e3:.0f} ms" if s < 1 else f"{s:.1f} s" if s < 10 else format_duration(s) for s in seconds)
    return low if low == high else f"{low} to {high}"


def format_flops(flops: float) -> str:
    return f"{flops / 1e9:,.3g} GFLOP" if flops < 1e12 else f"{flops / 1e12:,.3g} TFLOP"
