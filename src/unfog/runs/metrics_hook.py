"""Metrics of generated samples during training, within a given share of its time.

At the beginning, generation and metrics are timed once; the numbers of samples and reference images and the interval
are then resolved and stored like other automatic settings. From then on metrics are due as a function of settings and
step alone, so an interrupted run measures at the same steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from unfog.config.schema import Config
from unfog.data.dataset import ImageSet, evenly_spaced
from unfog.errors import RequestError
from unfog.evaluation.feature_store import compute_features
from unfog.evaluation.features import Features, open_features
from unfog.evaluation.metrics import MetricResult, compare_features
from unfog.evaluation.sliced_wasserstein import compare_pixels
from unfog.inference.compute_metrics import ImageRows
from unfog.pipeline.build import build_network
from unfog.pipeline.generate import default_generation, generate_images, proportional_labels
from unfog.planning.auto_settings import AutoSettings
from unfog.planning.intervals import Choice
from unfog.planning.step_benchmark import seconds_per_sample, wall_seconds
from unfog.reporting.image_grids import Pixels
from unfog.reporting.progress import Progress, format_duration, plural, warn
from unfog.runs.previews import Previews

MIN_SAMPLES, _MAX_SAMPLES, _MAX_REFERENCE = 100, 5000, 10_000  # limits of what is chosen automatically
TARGET_TIMES = 5  # evaluations with metrics in a run, if the share of time permits
_PIXEL_METRIC = "sliced"  # compares pixels instead of features
TRIAL_SAMPLES = 10  # of the dry run: the fewest that every metric accepts


class _Costs(NamedTuple):
    """Seconds to generate a sample, seconds to compute its features, and the number of features."""

    sample: float
    features: float
    width: int


def resolve_metrics(auto: AutoSettings, images: ImageSet, device: torch.device) -> None:
    """Resolve what is open of the metrics' settings, once the other settings are resolved.

    RequestError if no evaluation is due in this run, or there are too few images.
    """
    config, evaluate = auto.config, auto.config.evaluate
    if not evaluate.metrics:
        return
    if evaluate.every < 0:
        raise RequestError("evaluate.metrics are measured at evaluations, and evaluate.every = -1 makes none")
    if len(images) < TRIAL_SAMPLES:
        raise RequestError(
            f"evaluate.metrics need at least {TRIAL_SAMPLES} training images, and there are {len(images)}"
        )
    if evaluate.samples and evaluate.reference and evaluate.metrics_every:
        return
    training = auto.seconds_per_step() * (config.training.images // config.training.batch)
    allowed = evaluate.share * training
    costs = _time_costs(config, images, open_features(evaluate.features, device, only_known=True), device)

    def once(samples: int, reference: int) -> float:
        metrics = _metric_seconds(config, samples, reference, costs.width)
        return samples * (costs.sample + costs.features) + metrics

    chosen, each = _fit_to_budget(config, len(images), costs, allowed, once)
    auto.config = replace(config, evaluate=chosen)
    share, best = f"{evaluate.share:.0%}", "held_out_loss"
    if chosen.metrics_every < 0:
        instead = "; the best checkpoint is chosen by the held-out loss" if chosen.best != best else ""
        auto.config = replace(config, evaluate=replace(chosen, best=best))
        warn(
            f"during training, no {' or '.join(chosen.metrics)} is measured: {chosen.samples} samples take about "
            f"{format_duration(each)}, and {share} of the time is {format_duration(allowed)}{instead}. "
            "Give a higher --evaluate.share, or measure afterwards: unfog evaluate RUN"
        )
        return
    what = f"{chosen.samples} samples against {chosen.reference} training images, every {chosen.metrics_every} steps"
    reason = f"about {format_duration(each)} each time; at most {share} of {format_duration(training)} of training"
    auto.choices.append(Choice("evaluate.metrics", what, reason))


def _fit_to_budget(
    config: Config, images: int, costs: _Costs, allowed: float, once: Callable[[int, int], float]
) -> tuple[Any, float]:
    """Resolve the open settings of evaluation so that all metrics of the run take the `allowed` seconds at most.

    `once` maps (samples, reference images) to the seconds of one evaluation. Returns the settings, with
    metrics_every = -1 if not even one evaluation fits; and the seconds of one.
    """
    evaluate, steps = config.evaluate, config.training.images // config.training.batch
    affordable = int(allowed / 4 / max(costs.features, 1e-9))  # features of the reference take a quarter, once
    reference = evaluate.reference or max(MIN_SAMPLES, min(affordable, _MAX_REFERENCE))
    reference = min(images, reference)
    left = allowed - reference * costs.features
    wanted = int(left / TARGET_TIMES / max(costs.sample + costs.features, 1e-9))
    samples = evaluate.samples or max(MIN_SAMPLES, min(wanted, _MAX_SAMPLES))
    each = once(samples, reference)
    while not evaluate.samples and samples > MIN_SAMPLES and TARGET_TIMES * each > left:
        samples = max(MIN_SAMPLES, samples * 2 // 3)
        each = once(samples, reference)
    times = int(left / max(each, 1e-9))
    every = evaluate.metrics_every
    if every == 0:
        # A multiple of the interval of evaluations, rounded up so that there are at most `times`.
        apart = max(1, math.ceil(steps / max(times, 1) / evaluate.every))
        every = apart * evaluate.every if times > 0 else -1
    return replace(evaluate, samples=samples, reference=reference, metrics_every=every), each


def _time_costs(config: Config, images: ImageSet, features: Features, device: torch.device) -> _Costs:
    """Time the generation of a few samples, with fresh weights, and their features."""
    with Progress("timing samples for the metrics", None):
        network, few = build_network(config).to(device), min(config.training.batch, 64)
        sampling = seconds_per_sample(network, config, default_generation(config, few, few))
        pixels = torch.from_numpy(np.ascontiguousarray(images.pixels[evenly_spaced(len(images), few)]))
        width = features(pixels).shape[1]
        return _Costs(sampling, wall_seconds(lambda: features(pixels).cpu()) / len(pixels), width)


def _metric_seconds(config: Config, samples: int, reference: int, width: int) -> float:
    """Return the seconds that the metrics take for so many samples, measured with random features."""
    generator = torch.Generator().manual_seed(0)
    real, fake = (torch.randn(n, width, generator=generator) for n in (reference, samples))
    pixels = None
    if _PIXEL_METRIC in config.evaluate.metrics:
        shape = (samples, config.data.channels, config.data.size, config.data.size)
        pixels = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    with Progress("timing the metrics", None):
        return wall_seconds(lambda: _compute_metrics(config, real, fake, pixels, pixels), warm=False)


def _compute_metrics(
    config: Config, real: Tensor, fake: Tensor, real_pixels: Tensor | None, fake_pixels: Tensor | None
) -> dict[str, MetricResult]:
    names = [name for name in config.evaluate.metrics if name != _PIXEL_METRIC]
    found = dict(zip(names, compare_features(names, real, fake), strict=True))
    if _PIXEL_METRIC in config.evaluate.metrics and real_pixels is not None and fake_pixels is not None:
        found[_PIXEL_METRIC] = compare_pixels([_PIXEL_METRIC], real_pixels, fake_pixels)[0]
    return found


def metrics_due(config: Config, step: int) -> bool:
    """Return True if metrics are due at the evaluation after this step: at the last one, and at the first after each
    multiple of `metrics_every`."""
    every, steps = config.evaluate.metrics_every, config.training.images // config.training.batch
    return every >= 0 and (step >= steps or step // every > (step - config.evaluate.every) // every)


class MetricsHook:
    """Computes metrics of samples during training, from the EMA weights and always from the same noise."""

    def __init__(self, config: Config, images: ImageSet, previews: Previews, device: torch.device):
        self.config, self.images, self.previews = config, images, previews
        self.features = open_features(config.evaluate.features, device, only_known=True)
        self._real: Tensor | None = None

    def dry_run(self) -> dict[str, float]:
        """Compute the metrics of a few samples, so that errors surface early; there is nothing to record.

        RequestError if the best checkpoint is chosen by FID, and there are fewer samples than features.
        """
        self._measure(TRIAL_SAMPLES)
        evaluate, width = self.config.evaluate, self._reference().shape[1]
        if "fid" in evaluate.metrics and (few := min(evaluate.samples, len(self._reference()))) <= width:
            said = f"fid needs more than {width:,} samples with {self.features.name}, and here are {few:,}"
            if evaluate.best == "fid":
                raise RequestError(f"evaluate.best = fid: {said}; choose by kid, or set --evaluate.samples")
            warn(f"{said}; it is left out. kid holds at any number")
        return {}

    def measure(self) -> dict[str, float]:
        """Return values for the record by name, with their standard errors where known."""
        return self._measure(self.config.evaluate.samples)

    def _measure(self, count: int) -> dict[str, float]:
        config, metrics = self.config, self.config.evaluate.metrics
        labels = proportional_labels(self.images.labels, count)

        def generate(batch: int) -> Pixels:
            return generate_images(
                self.previews.state.model, config, replace(default_generation(config, count, batch), labels=labels)
            )

        pixels = np.ascontiguousarray(self.previews.with_ema_weights(count, generate).transpose(0, 3, 1, 2))
        fake = compute_features(pixels, self.features)
        real = pixels  # not looked at unless pixels are compared
        if _PIXEL_METRIC in metrics:
            real = np.ascontiguousarray(self.images.pixels[evenly_spaced(len(self.images), count)])
        found = _compute_metrics(config, self._reference(), fake, torch.from_numpy(real), torch.from_numpy(pixels))
        record: dict[str, float] = {"drawn": count}
        for name, one in found.items():
            record |= {} if one.value is None else {name: one.value}
            record |= {} if one.error is None else {f"{name}_error": one.error}
        return record

    def _reference(self) -> Tensor:
        """Return the features of the reference images, computed at the first call."""
        if self._real is None:
            rows = evenly_spaced(len(self.images), self.config.evaluate.reference)
            with Progress(f"{self.features.name} of {plural(len(rows), 'training image')}", len(rows)) as progress:
                self._real = compute_features(
                    ImageRows(self.images, rows),
                    self.features,
                    f"{self.images.fingerprint} spread",
                    lambda done, total: progress.update(done),
                )
        return self._real
