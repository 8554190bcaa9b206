"""Real steps on throwaway networks, to be timed, counted or compared; time of each part of a run."""

from __future__ import annotations

import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from unfog.config.schema import Config
from unfog.data.dataset import ImageSet, evenly_spaced
from unfog.data.stream import ImageStream
from unfog.device.compilation import compile_errors_explained
from unfog.diffusion.denoiser import Denoiser
from unfog.errors import Interrupted
from unfog.pipeline.build import (
    build_augmentation,
    build_loss,
    build_network,
    build_state,
    open_task_stream,
)
from unfog.pipeline.generate import GenerationSettings, sample_calls
from unfog.planning.flops import TimeRange
from unfog.process.device import synchronize
from unfog.reporting.progress import Progress
from unfog.settings import AUTO, is_auto
from unfog.text import plural
from unfog.training.hooks import Task, TrainingHooks
from unfog.training.loop import LoopSettings, train
from unfog.training.precision import DTYPES, drawing_precision
from unfog.training.settings import SamplingPrecision
from unfog.training.stability.out_of_memory import microbatch_size
from unfog.training.state import TrainState

_SLOW = 5  # times the seconds for timing: no step is begun once one that took longer has ended
_TIMED = 64  # images that steps are timed with, if none are decoded yet
_PORTIONS = 3  # of the steps that are timed: the median leaves out a slow moment of the machine
# Cores below which a machine is called busy: the thread that trains never waits for long, and would have one to itself.
_BUSY = 0.7
_MOST_STEPS = 200  # in a portion
_LARGE = 5e11  # operations of a step from which on it may take long on a CPU
_LONGEST = 15.0  # seconds of a step from which on its time may be estimated
_FEW = 4  # images of the steps that are timed in place of it
_SAMPLES = (16, 64, 10_000, 50_000)  # whose times are listed: a grid to look at, and the usual numbers for metrics
# Floating-point operations of a step that takes minutes on a CPU, so that it is predicted instead of timed.
TOO_SLOW = 2e13


class _StepTimer(TrainingHooks):
    """Training hooks that record the time after each step."""

    def __init__(
        self, seconds: float, progress: Progress, stop_requested: Callable[[], bool], compiles: bool, least: int = 0
    ):
        self.seconds, self.compiles, self.least = seconds, compiles, least
        self.progress = progress
        self.interrupted = stop_requested
        self.times, self.processor = [time.perf_counter()], [time.process_time()]

    def on_step_end(self, step: int) -> None:
        # The loop is a step ahead of the device at most, which it waits for to see whether a gradient was finite.
        self.times.append(time.perf_counter())
        self.processor.append(time.process_time())
        self.progress.update(step)

    def stop_requested(self) -> bool:
        """Return True once the time is over after two steps or more, or one very slow one, or a stop is requested.

        The first `least` steps are taken however long they last.
        """
        taken = len(self.times) - 1
        if taken < self.least:
            return self.interrupted()
        # The first step may compile for a minute, which says nothing about the second.
        spent = self.times[-1] - self.times[min(taken, int(self.compiles))]
        enough = spent > self.seconds if taken > 1 + self.compiles else taken and spent > _SLOW * self.seconds
        return bool(enough) or self.interrupted()

    def step_time(self) -> StepTime:
        first, *others = [b - a for a, b in pairwise(self.times)]
        since = 1 if others else 0  # as the first step may compile, which other processes do
        cores = (self.processor[-1] - self.processor[since]) / max(self.times[-1] - self.times[since], 1e-9)
        return StepTime(first, statistics.median(others or [first]), cores)


def measure_step(
    config: Config,
    images: ImageSet,
    device: torch.device,
    stop_requested: Callable[[], bool],
    limit: float = 3.0,
    least: int = 0,
) -> StepTime:
    """Return the wall time of an optimiser step, from about `limit` seconds of real training, or `least` steps."""
    trial = TrialTraining(config, images, device)
    with Progress(f"measuring steps in {config.training.precision}", None) as progress:
        clock = _StepTimer(limit, progress, stop_requested, bool(config.training.compile), least)
        trial.train(clock, stop_requested)
    if stop_requested():
        raise Interrupted
    # The host of another device waits for it, however idle its own cores are.
    return clock.step_time() if device.type == "cpu" else clock.step_time()._replace(cores=None)


def measure_step_at_most(
    config: Config, images: ImageSet, device: torch.device, stop_requested: Callable[[], bool], operations: float
) -> StepTime:
    """Return the wall time of a step as `measure_step` does; on a slow CPU by estimate, from steps of a few images.

    `operations` are the floating-point operations of the step.
    """
    training, batch = config.training, config.training.batch
    if device.type == "cpu" and operations > _LARGE and batch > _FEW:
        microbatch = min(training.microbatch, _FEW)
        few = replace(config, training=replace(training, batch=_FEW, microbatch=microbatch))
        tried = measure_step(few, images, device, stop_requested, limit=1.0)
        if tried.step * batch / _FEW > _LONGEST:
            return tried._replace(first=tried.first * batch / _FEW, step=tried.step * batch / _FEW, timed=_FEW)
    return measure_step(config, images, device, stop_requested)


def decoded_images(images: ImageSet) -> ImageSet:
    """Return the images if they are decoded, else a few of them decoded, so that steps are timed without decoding."""
    if isinstance(images.pixels, np.ndarray):
        return images
    pixels, columns, rows = images.take(evenly_spaced(len(images), _TIMED))
    return ImageSet(pixels, [images.names[i] for i in rows], columns)


def forward_passes(config: Config, held_out: int) -> dict[str, float]:
    """Return the cost of each part of a run with resolved settings, in forward passes of one image in fp32.

    The keys are "training", "preview", "evaluate" and "metrics". Where the number of samples for metrics is chosen
    automatically, "metrics" is the share of the training time that they may take.
    """
    evaluate, steps = config.evaluate, config.training.images // config.training.batch
    calls = sample_calls(GenerationSettings.default(config, 1, 1), config.diffusion.schedule)
    # A backward pass costs two forward passes. bf16 and fp16, which only training uses, take about two thirds of fp32.
    training = config.training.images * (3.0 if config.training.precision == "fp32" else 2.0)
    metrics = 0.0
    if evaluate.metrics and evaluate.metrics_every >= 0:
        is_open = is_auto(evaluate, "samples", "metrics_every")
        # Metrics run at the first evaluation after each multiple of their interval, and after the last step.
        count = 1 + max(0, steps - 1) // max(evaluate.metrics_every, evaluate.every, 1)
        metrics = evaluate.share * training if is_open else float(count * evaluate.samples * calls)
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


def run_times(config: Config, step: TimeRange, call: TimeRange, held_out: int) -> dict[str, TimeRange]:
    """Return the seconds of each part of a run with resolved settings, from those of a training step and of a `call`.

    A call is a forward pass of one image without gradients, in the precision of drawing.
    """
    steps, asides = config.training.images // config.training.batch, forward_passes(config, held_out)
    previews = repetitions(config.preview.every, steps)
    evaluations = repetitions(config.evaluate.every, steps) if config.evaluate.every > 0 else 0
    found = {
        "step": step,
        f"training ({plural(steps, 'step')})": step.times(steps),
        f"previews ({previews:,})": call.times(asides["preview"]),
        f"evaluations ({evaluations:,})": call.times(asides["evaluate"]),
    }
    if asides["metrics"]:
        found["sampling for metrics"] = call.times(asides["metrics"])
    total = [sum(part[i] for name, part in found.items() if name != "step") for i in (0, 1)]
    found["in all"] = TimeRange(*total)
    sample = call.times(sample_calls(_usual_drawing(config, steps), config.diffusion.schedule))
    return found | {f"sampling {count:,} images": sample.times(count) for count in _SAMPLES}


def _usual_drawing(config: Config, steps: int) -> GenerationSettings:
    """Return how `unfog sample` draws from a run of so many steps: guided, if a snapshot is early enough for it."""
    drawing = GenerationSettings.default(config, 1, 1)
    # Of any scale, as only 1 turns guidance off.
    return replace(drawing, guidance=2.0) if config.is_guided_at(steps) else drawing


def seconds_per_call(config: Config, device: torch.device, precision: SamplingPrecision = AUTO) -> float:
    """Return the median wall time of a forward pass of one micro-batch, as samples are drawn in a precision."""
    network = build_network(config).to(device).eval()  # outside of inference mode, as it may be tried with gradients
    dtype = DTYPES.get(drawing_precision(precision, device, config.training.precision))
    denoise, count = Denoiser(network, config.diffusion, dtype=dtype), microbatch_size(config.training)
    x, logsnr = torch.zeros(count, *config.input_shape, device=device), torch.zeros(count, device=device)
    conditions = config.conditions.blank(count).to(device)
    spent = []
    with torch.inference_mode(), Progress("measuring a call of the network", 4) as progress:
        for done in range(4):
            started = time.perf_counter()
            denoise(x, logsnr, conditions).sum().item()  # waits for the device, which works asynchronously
            spent.append(time.perf_counter() - started)
            progress.update(done + 1)
    return statistics.median(spent[1:])  # the first also allocates


class _StepLimit(TrainingHooks):
    """Hooks that end the training of `state` after so many images more."""

    def __init__(self, state: TrainState, images: int):
        self.state, self.end = state, state.seen + images

    def stop_requested(self) -> bool:
        # By the position: on a GPU the loop reports the end of a step after it launched the next one.
        return self.state.seen >= self.end


class TrialTraining:
    """A fresh training state that goes on for as many steps as are asked for. Records nothing, saves nothing.

    No setting of `config` is open, except its length.
    """

    def __init__(self, config: Config, images: ImageSet, device: torch.device):
        self.device, training = device, config.training
        self.state = build_state(config, device)
        stream = open_task_stream(ImageStream(images, training.seed), device)
        self._task = Task(stream, build_augmentation(config), build_loss(config, self.state))
        # A length that is never reached: the hooks end the loop.
        self._settings = LoopSettings(replace(training, images=10**9 * training.batch), config.optimizer)

    def train(self, hooks: TrainingHooks, stopped: Callable[[], bool] = lambda: False) -> None:
        """Train until the hooks stop it. RunError if torch cannot compile; Interrupted if a stop is why it cannot."""
        explained = compile_errors_explained(stopped=stopped)
        # The loop seeds the global generators at each step, so they are restored.
        with explained, torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            train(self._settings, self.state, self._task, hooks)

    def run(self, steps: int) -> float:
        """Train so many steps. Return the seconds until the device has finished them."""
        synchronize(self.device)
        started = time.perf_counter()
        self.train(_StepLimit(self.state, steps * self._settings.training.batch))
        synchronize(self.device)
        return time.perf_counter() - started


class StepTime(NamedTuple):
    """Wall time of training steps, in seconds."""

    first: float
    """Of the first step, which also allocates, and compiles if the network is compiled."""
    step: float
    """Of each step after it, the median."""
    cores: float | None = None
    """Cores that the process had meanwhile, on average; None if steps do not compute on them, or it is not known."""
    timed: int = 0
    """Images from whose time that of a whole step is estimated; 0 if whole steps were timed."""

    @property
    def doubt(self) -> str:
        """The reasons not to trust the pace: it is an estimate, or other processes kept the cores busy; "" without."""
        reasons = []
        if self.timed:
            reasons.append(f"estimated from steps of {plural(self.timed)}, as a whole one takes long here")
        if self.cores is not None and self.cores < _BUSY:
            busy = f"the machine is busy, and the steps had {self.cores:.0%} of a core"
            reasons.append(f"{busy}: do not trust this pace")
        return "; ".join(reasons)

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
    pixels = config.representation.random(count, np.random.default_rng(0))
    conditions = config.conditions
    columns = conditions.columns_of(conditions.usual, range(count))
    return ImageSet(pixels, [f"random {i}" for i in range(count)], columns)


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
    """Return how often the host waits for the device during some work, by place; None if torch does not report it.

    Torch reports most of the operations that wait, on CUDA alone.
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
