"""Times of steps and samples, measured on throwaway networks; network calls and time of each part of a run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from torch import nn

from unfog.config.schema import Config
from unfog.data.dataset import ImageSet, evenly_spaced
from unfog.diffusion.denoiser import Denoiser
from unfog.diffusion.sampler import TWO_CALLS, Sampler
from unfog.errors import Interrupted
from unfog.pipeline.build import blank_labels, build_network, input_shape
from unfog.pipeline.generate import GenerationSettings, generate_images
from unfog.planning.flops import Device, TimeRange
from unfog.planning.trial_training import StepTime, TrialTraining
from unfog.process.device import synchronize
from unfog.reporting.progress import Progress
from unfog.training.hooks import TrainingHooks
from unfog.training.stability.out_of_memory import microbatch_size

_SLOW = 5  # times the seconds for timing: a step that takes longer is not repeated
_TIMED = 64  # images that steps are timed with, if none are decoded yet


class _StepTimer(TrainingHooks):
    """Training hooks that record the time after each step."""

    def __init__(self, seconds: float, progress: Progress, stop_requested: Callable[[], bool], compiles: bool):
        self.seconds, self.compiles = seconds, compiles
        self.progress = progress
        self.interrupted = stop_requested
        self.times = [time.perf_counter()]

    def on_step_end(self, step: int) -> None:
        # The loop has just synchronised with the device, to see whether the gradient is finite.
        self.times.append(time.perf_counter())
        self.progress.update(step)

    def stop_requested(self) -> bool:
        """Return True once the time is over after two steps or more, or one very slow one, or a stop is requested."""
        taken = len(self.times) - 1
        # The first step may compile for a minute, which says nothing of the second.
        spent = self.times[-1] - self.times[min(taken, int(self.compiles))]
        enough = spent > self.seconds if taken > 1 + self.compiles else taken and spent > _SLOW * self.seconds
        return bool(enough) or self.interrupted()

    def step_time(self) -> StepTime:
        first, *others = [b - a for a, b in pairwise(self.times)]
        return StepTime(first, statistics.median(others or [first]))


def measure_step(
    config: Config, images: ImageSet, device: torch.device, stop_requested: Callable[[], bool], limit: float = 3.0
) -> StepTime:
    """Return the wall time of an optimiser step, from about `limit` seconds of real training."""
    trial = TrialTraining(config, images, device)
    with Progress(f"measuring steps in {config.training.precision}", None) as progress:
        clock = _StepTimer(limit, progress, stop_requested, config.training.compile)
        trial.train(clock)
    if stop_requested():
        raise Interrupted
    return clock.step_time()


def decoded_images(images: ImageSet) -> ImageSet:
    """Return the images if they are decoded, else a few of them decoded, so that steps are timed without decoding."""
    if isinstance(images.pixels, np.ndarray):
        return images
    pixels, labels, rows = images.take(evenly_spaced(len(images), _TIMED))
    return ImageSet(pixels, labels, [images.names[i] for i in rows], images.classes)


def cost_per_sample(
    network: nn.Module, config: Config, drawing: GenerationSettings, measure: Callable[[Callable[[], object]], float]
) -> float:
    """Return what `measure` gives for one sample, from the first two sampler steps of those in `drawing`."""
    sampler, steps = drawing.sampler, _trial_steps(drawing.sampler)
    trial = replace(drawing, sampler=replace(sampler, steps=steps))
    return measure(lambda: generate_images(network, config, trial)) / drawing.count * sampler.steps / steps


def _trial_steps(sampler: Sampler) -> int:
    # The adaptive sampler decides itself how many steps it takes, so a part of them says nothing.
    return sampler.steps if sampler.kind == "adaptive" else min(2, sampler.steps)


def forward_passes(config: Config, held_out: int) -> dict[str, float]:
    """Return the cost of each part of a run, in forward passes of one image in fp32.

    The keys are "training", "preview", "evaluate" and "metrics". Where the number of samples for metrics is chosen
    automatically, "metrics" is the share of the training time that they may take.

    Args:
        config: resolved settings.
        held_out: number of held-out images.
    """
    evaluate, steps = config.evaluate, config.training.images // config.training.batch
    calls = config.sampler.steps * (2 if config.sampler.kind in TWO_CALLS else 1)
    calls *= 2 if config.usual_guidance != 1 else 1
    # A backward pass costs two forward passes. bf16 and fp16, which only training uses, take about two thirds of fp32.
    training = config.training.images * (3.0 if config.training.precision == "fp32" else 2.0)
    metrics = 0.0
    if evaluate.metrics and evaluate.metrics_every >= 0:
        fixed = evaluate.samples and evaluate.metrics_every
        # Metrics run at the first evaluation after each multiple of their interval, and after the last step.
        count = 1 + max(0, steps - 1) // max(evaluate.metrics_every, evaluate.every, 1)
        metrics = float(count * evaluate.samples * calls) if fixed else evaluate.share * training
    evaluated = min(evaluate.images, held_out) * evaluate.levels * (evaluate.every > 0)
    return {
        "training": training,
        "preview": repetitions(config.preview.every, steps) * config.preview.images * calls,
        "evaluate": repetitions(evaluate.every, steps) * evaluated,
        "metrics": metrics,
    }


def repetitions(every: int, steps: int) -> int:
    """Return how often a run previews or evaluates: at both ends, and every so many steps if that is not -1."""
    return 2 + (max(0, steps - 1) // every if every > 0 else 0)


_SAMPLES = (16, 64, 10_000, 50_000)  # whose times are listed: a grid to look at, and the usual numbers for metrics
# Floating-point operations of a step that takes minutes on a CPU, so that it is predicted instead of timed.
TOO_SLOW = 2e13
_MATRIX = 1024


def matmul_seconds(dtype: torch.dtype, device: torch.device, side: int) -> float:
    """Return the seconds of one product of two square matrices, the fastest of several.

    Raises:
        RuntimeError: the device has no such arithmetic.
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
        found["sampling for metrics"] = call.times(asides["metrics"])
    total = [sum(part[i] for name, part in found.items() if name != "step") for i in (0, 1)]
    found["in all"] = TimeRange(*total)
    picture = call.times(asides["preview"] / (previews * config.preview.images))
    return found | {f"sampling {count:,} images": picture.times(count) for count in _SAMPLES}


@torch.inference_mode()
def seconds_per_call(config: Config, device: torch.device) -> float:
    """Return the median wall time of a forward pass of one micro-batch in fp32."""
    network = build_network(config).to(device).eval()
    denoise, count = Denoiser(network, config.diffusion), microbatch_size(config.training)
    x, logsnr = torch.zeros(count, *input_shape(config), device=device), torch.zeros(count, device=device)
    label = blank_labels(config, count)
    label = None if label is None else label.to(device)
    spent = []
    with Progress("measuring a call of the network", 4) as progress:
        for done in range(4):
            started = time.perf_counter()
            denoise(x, logsnr, label).sum().item()  # waits for the device, which works asynchronously
            spent.append(time.perf_counter() - started)
            progress.update(done + 1)
    return statistics.median(spent[1:])  # the first also allocates
