"""The times of a plan: of a step and a call of the network, and of all that a run does with them."""

from __future__ import annotations

import math
import statistics
import time

import torch

from unfog.config.schema import Config
from unfog.diffusion.denoiser import Denoiser
from unfog.pipeline.build import build_network
from unfog.planning.accelerators import Device
from unfog.planning.auto_settings import AutoSettings
from unfog.planning.flops import NetworkCost, TimeRange, call_time, step_time
from unfog.planning.memory_estimate import batch_shape, blank_labels
from unfog.planning.run_costs import forward_passes, repetitions
from unfog.reporting.findings import Finding
from unfog.reporting.progress import Progress, format_duration
from unfog.training.stability.out_of_memory import microbatch_size

PICTURES = (16, 64, 10_000, 50_000)
"""How many pictures it is told for what they take: to look at, and for a metric."""
TOO_SLOW = 2e13
"""Floating-point operations of a step that nobody waits for on a CPU, as it takes minutes."""
MATRIX = 1024
LONG = 30 * 86400.0
"""Seconds."""


def benchmark_cpu(memory: int, processes: int = 1) -> Device:
    """What each of so many processes has of the CPU at hand, by its rate of matrix products: for a plan of what cannot
    be timed, or takes minutes a step."""
    a, spent = torch.ones(MATRIX, MATRIX), []
    for _ in range(5):
        started = time.perf_counter()
        _ = a @ a
        spent.append(time.perf_counter() - started)
    rate = 2 * MATRIX**3 / min(spent) / processes
    return Device("cpu", memory, rate, rate, "fp32")


def pace_of(
    auto: AutoSettings, work: NetworkCost, other: Device | None, device: torch.device, untimed: bool
) -> tuple[TimeRange, TimeRange]:
    """Seconds of a step, and of a call of the network for each image; not known where it would not run here."""
    config = auto.process_config()
    count = microbatch_size(config.training)
    if other:
        return step_of(config, work, other), call_time(work, count, other).times(1 / count)
    if untimed:
        return TimeRange(float("nan"), float("nan")), TimeRange(float("nan"), float("nan"))
    pace, once = auto.seconds_per_step(), seconds_per_call(config, device) / count
    return TimeRange(pace, pace), TimeRange(once, once)


def step_of(config: Config, work: NetworkCost, other: Device) -> TimeRange:
    """Estimated seconds of a step."""
    training = config.training
    count = -(-training.batch // microbatch_size(training))
    half = training.precision != "fp32"
    return step_time(work, training.batch, count, other, half, training.checkpointing)


def run_times(config: Config, step: TimeRange, call: TimeRange, held_out: int) -> dict[str, TimeRange]:
    """Seconds by what takes them. `call` is of the network for one image, in fp32 and without gradients."""
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
    return found | {f"drawing {count:,} pictures": picture.times(count) for count in PICTURES}


@torch.inference_mode()
def seconds_per_call(config: Config, device: torch.device) -> float:
    """Median wall time of one call of the network on as many images as go through at once, in fp32."""
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
    """A warning where nobody will wait so long."""
    if not total.low > LONG:
        return None
    remedy = "a smaller --size, --network, --batch or --steps, or another machine: --for h100"
    return Finding("plan.time", "warning", f"all of it takes {format_time(total)}", remedy, {"seconds": total.low})


def format_time(seconds: TimeRange) -> str:
    """A span of time in words; "?" where it is not known."""
    if math.isnan(seconds.low):
        return "?"
    low, high = (f"{s * 1e3:.0f} ms" if s < 1 else f"{s:.1f} s" if s < 10 else format_duration(s) for s in seconds)
    return low if low == high else f"{low} to {high}"


def format_flops(flops: float) -> str:
    """Operations in words."""
    return f"{flops / 1e9:,.3g} GFLOP" if flops < 1e12 else f"{flops / 1e12:,.3g} TFLOP"
