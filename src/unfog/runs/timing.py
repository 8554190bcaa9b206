"""The times of a plan: of a step and a call of the network, and of all that a run does with them."""

from __future__ import annotations

import statistics
import time

import torch

from unfog.config.tree import Config
from unfog.diagnosis.plan.cost import Range, Work, training_time
from unfog.diagnosis.plan.devices import Device
from unfog.diffusion.denoiser import Denoiser
from unfog.reporting.progress import Progress, duration
from unfog.runs.build import build_network
from unfog.runs.footprint import images_shape, labels_for
from unfog.runs.sampling import usual_guidance

PICTURES = (16, 64, 10_000, 50_000)
"""How many pictures it is told for what they take: to look at, and for a metric."""


def step_of(config: Config, work: Work, other: Device) -> Range:
    """Estimated seconds of a step."""
    training = config.training
    passes = -(-training.batch // at_once(config))
    half = training.precision != "fp32"
    return training_time(work, training.batch, passes, other, half, training.checkpointing)


def times_of(config: Config, step: Range, call: Range, held_out: int) -> dict[str, Range]:
    """Seconds by what takes them. `call` is of the network for one image, in fp32 and without gradients."""
    steps = config.training.images // config.training.batch
    calls = config.sampler.steps * (1 + (config.sampler.kind == "heun")) * (1 + (usual_guidance(config) != 1))
    previews = 2 + max(0, steps - 1) // config.preview.every if config.preview.every > 0 else 2
    evaluations = 2 + max(0, steps - 1) // config.evaluate.every if config.evaluate.every > 0 else 0
    measured = min(config.evaluate.images, held_out) * config.evaluate.levels
    times = {
        "step": step,
        f"training ({steps:,} steps)": step.times(steps),
        f"previews ({previews:,})": call.times(previews * config.preview.images * calls),
        f"evaluations ({evaluations:,})": call.times(evaluations * measured),
    }
    total = [sum(part[i] for name, part in times.items() if name != "step") for i in (0, 1)]
    times["in all"] = Range(*total)
    return times | {f"drawing {count:,} pictures": call.times(count * calls) for count in PICTURES}


@torch.inference_mode()
def seconds_per_call(config: Config, device: torch.device) -> float:
    """Median wall time of one call of the network on as many images as go through at once, in fp32."""
    network = build_network(config).to(device).eval()
    denoise, count = Denoiser(network, config.diffusion), at_once(config)
    x, logsnr = torch.zeros(images_shape(config, count), device=device), torch.zeros(count, device=device)
    label = labels_for(config, count)
    label = None if label is None else label.to(device)
    times = []
    with Progress("measuring a call of the network", 4) as progress:
        for done in range(4):
            started = time.perf_counter()
            denoise(x, logsnr, label).sum().item()
            times.append(time.perf_counter() - started)
            progress.update(done + 1)
    return statistics.median(times[1:])  # the first also allocates


def at_once(config: Config) -> int:
    """Images that go through the network at once."""
    return config.training.microbatch or config.training.batch


def told_time(seconds: Range) -> str:
    """A span of time in words."""
    if seconds.low != seconds.low:
        return "not measured, as it does not fit"
    low, high = (f"{s * 1e3:.0f} ms" if s < 1 else f"{s:.1f} s" if s < 10 else duration(s) for s in seconds)
    return low if low == high else f"{low} to {high}"
