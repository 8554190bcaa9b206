"""Trial training: real steps of the training loop on a throwaway state, to be timed, counted or compared."""

from __future__ import annotations

import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from unfog.config.schema import Config
from unfog.data.dataset import ImageSet
from unfog.data.stream import ImageStream
from unfog.pipeline.build import build_augmentation, build_loss, build_state, open_task_stream, zero_batch
from unfog.process.device import synchronize
from unfog.training.hooks import Task, TrainingHooks
from unfog.training.loop import LoopSettings, train

_PORTIONS = 3  # of the steps that are timed: the median leaves out a slow moment of the machine
_MOST_STEPS = 200  # in a portion


class _StepLimit(TrainingHooks):
    """Hooks that end the training after so many steps."""

    def __init__(self, steps: int):
        self.left = steps

    def on_step_end(self, step: int) -> None:
        self.left -= 1

    def stop_requested(self) -> bool:
        return self.left <= 0


class TrialTraining:
    """A fresh training state that goes on for as many steps as are asked for. Records nothing, saves nothing.

    No setting of `config` is open, except its length.
    """

    def __init__(self, config: Config, images: ImageSet, device: torch.device):
        self.device, training = device, config.training
        self.state = build_state(config, device)
        stream = open_task_stream(ImageStream(images, training.seed), device)
        self._task = Task(stream, build_augmentation(config), build_loss(config, self.state.levels))
        # A length that is never reached: the hooks end the loop.
        self._settings = LoopSettings(replace(training, images=10**9 * training.batch), config.optimizer)

    def train(self, hooks: TrainingHooks) -> None:
        """Train until the hooks stop it."""
        # The loop seeds the global generators at each step, so they are restored.
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            train(self._settings, self.state, self._task, hooks)

    def run(self, steps: int) -> float:
        """Train so many steps. Return the seconds until the device has finished them."""
        synchronize(self.device)
        started = time.perf_counter()
        self.train(_StepLimit(steps))
        synchronize(self.device)
        return time.perf_counter() - started


class StepTime(NamedTuple):
    """Wall time of training steps, in seconds."""

    first: float
    """Of the first step, which also allocates, and compiles if the network is compiled."""
    step: float
    """Of each step after it, the median."""

    @classmethod
    def measure(cls, run: Callable[[int], float], seconds: float = 3.0) -> StepTime:
        """Time steps for about `seconds` after the first two. `run` takes a number of steps, and returns seconds."""
        first, second = run(1), run(1)
        count = max(1, min(_MOST_STEPS, int(seconds / _PORTIONS / max(second, 1e-6))))
        return cls(first, statistics.median(run(count) / count for _ in range(_PORTIONS)))

    def pays_from(self, slower: StepTime) -> float:
        """Return the step from which on a run is ahead of one that starts and steps like `slower`; inf for never."""
        gain = slower.step - self.step
        return max(0.0, (self.first - slower.first) / gain) if gain > 0 else float("inf")


def random_images(config: Config, count: int = 256) -> ImageSet:
    """Return images of random pixels, or random latents, in the format that a run of `config` trains on."""
    shape, rng = (count, *zero_batch(config, 1).shape[1:]), np.random.default_rng(0)
    pixels: Any = rng.integers(0, 256, shape, dtype=np.uint8)
    if config.uses_latents:
        pixels = rng.standard_normal(shape, dtype=np.float32).astype(np.float16)
    labels = np.arange(count) % len(config.classes) if config.classes else None
    return ImageSet(pixels, labels, [f"random {i}" for i in range(count)], config.classes)


def differing_tensors(one: TrialTraining, other: TrialTraining) -> list[str]:
    """Return the names of the weights, EMAs and moments that two trials do not share, bit for bit."""
    pairs = {name: (tensors, other.state.tensors()[name]) for name, tensors in one.state.tensors().items()}
    return [
        f"{file}: {name}"
        for file, (mine, theirs) in pairs.items()
        for name, tensor in mine.items()
        if not torch.equal(tensor, theirs[name])
    ]


def waits_for_device(work: Callable[[], object], device: torch.device) -> Counter[str] | None:
    """Return how often the host waits for the device during some work, by place; None where torch does not tell.

    Torch tells of CUDA, for most operations that wait.
    """
    if device.type != "cuda":
        return None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")  # the same place waits at every step, and each time counts
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [each for each in caught if "called a synchronizing" in str(each.message)]
    return Counter(f"{Path(each.filename).parent.name}/{Path(each.filename).name}:{each.lineno}" for each in waits)
