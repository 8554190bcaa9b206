"""Measure the time of training steps and samples on throwaway networks, before a run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from unfog.config.schema import Config
from unfog.data.dataset import ImageSet, evenly_spaced
from unfog.data.stream import ImageStream
from unfog.diffusion.sampler import Sampler
from unfog.errors import Interrupted
from unfog.pipeline.build import build_augmentation, build_loss, build_state
from unfog.pipeline.generate import GenerationSettings, generate_images
from unfog.reporting.progress import Progress
from unfog.training.hooks import Task, TrainingHooks
from unfog.training.loop import LoopSettings, train

TIMED = 64
"""Images that steps are timed with, if none are decoded yet."""


class _StepTimer(TrainingHooks):
    """Training hooks that record the time after each step."""

    def __init__(self, seconds: float, progress: Progress, stop_requested: Callable[[], bool]):
        self.seconds = seconds
        self.progress = progress
        self.interrupted = stop_requested
        self.times = [time.perf_counter()]

    def on_step_end(self, step: int) -> None:
        # The loop has just synchronised with the device, to see whether the gradient is finite.
        self.times.append(time.perf_counter())
        self.progress.update(step)

    def stop_requested(self) -> bool:
        """Return True once the time is over after two steps or more, or a stop is requested."""
        enough = len(self.times) > 2 and self.times[-1] - self.times[0] > self.seconds
        return enough or self.interrupted()

    def seconds_per_step(self) -> float:
        """Return the median, without the first step, which also allocates."""
        return statistics.median(b - a for a, b in zip(self.times[1:], self.times[2:]))


def seconds_per_step(
    config: Config, images: ImageSet, device: torch.device, stop_requested: Callable[[], bool], limit: float = 3.0
) -> float:
    """Return the median wall time of an optimiser step, from about `limit` seconds of real training."""
    mine = [device] if device.type == "cuda" else []
    # The loop seeds the global generators at each step, so they are restored.
    state = build_state(config, device)
    with torch.random.fork_rng(mine), Progress(f"measuring steps in {config.training.precision}", None) as progress:
        clock = _StepTimer(limit, progress, stop_requested)
        train(
            LoopSettings(replace(config.training, images=10**9 * config.training.batch), config.optimizer),
            state,
            Task(
                ImageStream(images, config.training.seed), build_augmentation(config), build_loss(config, state.levels)
            ),
            clock,
        )
    if stop_requested():
        raise Interrupted
    return clock.seconds_per_step()


def decoded_images(images: ImageSet) -> ImageSet:
    """Return the images if they are decoded, else a few of them decoded, so that steps are timed without decoding."""
    if isinstance(images.pixels, np.ndarray):
        return images
    pixels, labels, rows = images.take(evenly_spaced(len(images), TIMED))
    return ImageSet(pixels, labels, [images.names[i] for i in rows], images.classes)


def seconds_per_sample(network: nn.Module, config: Config, drawing: GenerationSettings) -> float:
    """Return the wall time of generating one sample, from the first two sampler steps of those in `drawing`."""
    sampler, steps = drawing.sampler, _trial_steps(drawing.sampler)
    trial = replace(drawing, sampler=replace(sampler, steps=steps))
    return wall_seconds(lambda: generate_images(network, config, trial)) / drawing.count * sampler.steps / steps


def _trial_steps(sampler: Sampler) -> int:
    # The adaptive sampler decides itself how many steps it takes, so a part of them says nothing.
    return sampler.steps if sampler.kind == "adaptive" else min(2, sampler.steps)


def wall_seconds(work: Callable[[], object], warm: bool = True) -> float:
    """Return the wall time of `work`; with `warm`, of its second call, as the first also allocates."""
    if warm:
        work()
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
