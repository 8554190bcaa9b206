"""Evaluation during training: the held-out loss, a warning of overfitting, and metrics of generated samples."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from unfog.checks.run.loss_checks import ROSE, held_out_history
from unfog.checks.run.run_record import RunRecord
from unfog.config.schema import Config
from unfog.data.dataset import Dataset, ImageSet, evenly_spaced
from unfog.errors import RequestError
from unfog.evaluation.features import Features, open_features
from unfog.evaluation.image_agreement import SSIM, ImageAgreement
from unfog.evaluation.judge import Judge
from unfog.evaluation.judged_kinds import ConditionScore, main_scores
from unfog.inference.compare_images import Comparison
from unfog.inference.obeyed_conditions import ConditionJudge, check_condition_metrics, in_parts, judged_columns
from unfog.inference.true_images import DRAWS, MOST_IMAGES, compare_with_truth, compared_columns
from unfog.pipeline.build import build_network
from unfog.pipeline.generate import GenerationSettings, cost_per_sample, proportional_given
from unfog.planning.auto_settings import AutoSettings
from unfog.planning.flops import measure_flops
from unfog.planning.intervals import Choice
from unfog.reporting.findings import Finding
from unfog.reporting.progress import Progress, warn
from unfog.reporting.recorder import Recorder
from unfog.reporting.records import read_events, read_metrics
from unfog.runs.previews import Previews
from unfog.runs.ranks import RunContext
from unfog.settings import is_auto
from unfog.training.length import LengthPlan
from unfog.training.settings import Evaluate

MIN_SAMPLES, _MAX_SAMPLES, _MAX_REFERENCE = 100, 5000, 10_000  # limits of what is chosen automatically
_TARGET_TIMES = 5  # evaluations with metrics in a run, if the share of time permits
_OVERFITTING = "overfitting"  # the kind of event
_MIN_HELD_OUT = 8  # images; the gap to the training loss says little of fewer
_PIXEL_METRIC = "sliced"  # compares pixels instead of features
_PER_VALUE = 2500  # operations on a pixel value that take as long as those besides products and convolutions; measured
_MOST_RECORDED = 20  # conditions whose own scores are in the record
TRIAL_SAMPLES = 10  # of the dry run: the fewest that every metric accepts


class _Costs(NamedTuple):
    """FLOPs to generate a sample, to compute its features and judge it, and of the training; number of features."""

    sample: float
    features: float
    width: int
    training: float = 0.0
    judge: float = 0.0
    """FLOPs to train the judge of conditions, once."""


def resolve_metrics(auto: AutoSettings, images: ImageSet, device: torch.device) -> None:
    """Resolve what is open of the metrics' settings, so that they take their share of the training's arithmetic.

    RequestError if no evaluation is due in this run, there are too few images, or the best checkpoint is chosen by FID
    and there are fewer samples than features.
    """
    evaluate = auto.config.evaluate
    if not evaluate.metrics:
        return
    if evaluate.every < 0:
        raise RequestError(
            "evaluate.metrics are measured at evaluations, but evaluate.every = -1 turns these off; give "
            "another interval"
        )
    if len(images) < TRIAL_SAMPLES:
        raise RequestError(
            f"evaluate.metrics need at least {TRIAL_SAMPLES} training images, but there are only {len(images)}"
        )
    check_condition_metrics(evaluate.metrics, auto.config.conditions)
    is_open = is_auto(evaluate, "samples", "reference", "metrics_every")
    has_fid = "fid" in evaluate.metrics
    if is_open or (has_fid and evaluate.metrics_every >= 0):
        features = _features_of(auto.config, device)
        if is_open:
            _choose_samples(auto, images, features, device)
        if has_fid and features is not None and auto.config.evaluate.metrics_every >= 0:
            _check_fid(auto.config, images, features)


def _features_of(config: Config, device: torch.device) -> Features | None:
    """Return the features of the metrics; None if no metric compares any."""
    if set(config.evaluate.metrics) <= {*config.evaluate.VALUES, config.evaluate.OBEYS}:
        return None
    return open_features(config.evaluate.features, device, only_known=True)


def _choose_samples(auto: AutoSettings, images: ImageSet, features: Features | None, device: torch.device) -> None:
    """Choose the open numbers of samples and of reference images, and the interval of the metrics."""
    config, evaluate = auto.config, auto.config.evaluate
    # Counted rather than timed, so that a repeated command measures at the same steps.
    costs = _count_costs(config, images, features, device)
    allowed = evaluate.share * costs.training

    def once(samples: int, reference: int) -> float:
        metrics = _metric_flops(config, samples, reference, costs.width)
        # Draws for held-out images that are compared with their truth.
        others = min(samples, DRAWS * MOST_IMAGES) * _is_compared(config)
        return samples * (costs.sample + costs.features) + others * costs.sample + metrics

    chosen, each = _fit_to_budget(config, len(images), costs, allowed, once)
    _adopt_metrics(auto, chosen, each / costs.training)


def _comparison(config: Config, images: ImageSet, features: Features | None) -> Comparison:
    """Return the comparison with evenly spread training images."""
    evaluate = config.evaluate
    rows = evenly_spaced(len(images), evaluate.reference)
    data = config.data
    return Comparison(evaluate.metrics, features, images, rows, wrap=data.wrapped, unknown=data.unknown_values)


def _check_fid(config: Config, images: ImageSet, features: Features) -> None:
    """Warn that FID needs more samples; RequestError if the best checkpoint is chosen by it."""
    evaluate = config.evaluate
    instead = "--evaluate.metrics kid --evaluate.best" if evaluate.best == "fid" else "--evaluate.metrics"
    larger = "--evaluate.samples and --evaluate.reference"
    try:
        _comparison(config, images, features).check_count("fid", evaluate.samples, instead, larger)
    except RequestError as error:
        if evaluate.best == "fid":
            raise RequestError(f"evaluate.best = fid: {error}") from None
        warn(f"{error}; it is left out")


def _adopt_metrics(auto: AutoSettings, chosen: Evaluate, each: float) -> None:
    """Take settings of the metrics that take `each` of the arithmetic of training each time; warn if they take none."""
    config, evaluate = auto.config, auto.config.evaluate
    auto.config = replace(config, evaluate=chosen)
    share, best = f"at most {evaluate.share:.2g} of the arithmetic of training", "held_out_loss"
    if chosen.metrics_every < 0:
        instead = "; the best checkpoint is chosen by the held-out loss" if chosen.best != best else ""
        auto.config = replace(config, evaluate=replace(chosen, best=best))
        warn(
            f"{' and '.join(chosen.metrics)} will not be measured during training: {chosen.samples} samples "
            f"would take {each:.2g} of the arithmetic of training, and --evaluate.share "
            f"allows {evaluate.share:.2g}{instead}. Give a higher --evaluate.share, or measure afterwards: "
            "unfog evaluate RUN"
        )
        return
    what = f"{chosen.samples} samples against {chosen.reference} training images, every {chosen.metrics_every} steps"
    reason = f"{each:.2g} each time; {share} in all"
    auto.choices.append(Choice("evaluate.metrics", what, reason))


def _fit_to_budget(
    config: Config, images: int, costs: _Costs, allowed: float, once: Callable[[int, int], float]
) -> tuple[Any, float]:
    """Resolve the open settings of evaluation so that all metrics of the run take the `allowed` FLOPs at most.

    `once` maps (samples, reference images) to the FLOPs of one evaluation. Returns the settings, with
    metrics_every = -1 if not even one evaluation fits; and the FLOPs of one.
    """
    evaluate, steps = config.evaluate, config.training.images // config.training.batch
    affordable = int(allowed / 4 / max(costs.features, 1e-9))  # features of the reference take a quarter, once
    reference = evaluate.reference
    if is_auto(evaluate, "reference"):
        reference = max(MIN_SAMPLES, min(affordable, _MAX_REFERENCE))
    reference = min(images, reference)
    left = allowed - reference * costs.features - costs.judge
    wanted = int(left / _TARGET_TIMES / max(costs.sample + costs.features, 1e-9))
    is_open = is_auto(evaluate, "samples")
    samples = max(MIN_SAMPLES, min(wanted, _MAX_SAMPLES)) if is_open else evaluate.samples
    each = once(samples, reference)
    # The metrics' own time is not in `wanted`, and grows faster than the number of samples.
    while is_open and samples > MIN_SAMPLES and _TARGET_TIMES * each > left:
        samples = max(MIN_SAMPLES, samples * 2 // 3)
        each = once(samples, reference)
    times = int(left / max(each, 1e-9))
    every = evaluate.metrics_every
    if is_auto(evaluate, "metrics_every"):
        # A multiple of the interval of evaluations, rounded up so that there are at most `times`.
        apart = max(1, math.ceil(steps / max(times, 1) / evaluate.every))
        every = apart * evaluate.every if times > 0 else -1
    return replace(evaluate, samples=samples, reference=reference, metrics_every=every), each


def _count_costs(config: Config, images: ImageSet, features: Features | None, device: torch.device) -> _Costs:
    """Count the arithmetic of a few samples, of their features, and of training."""
    with Progress("counting the arithmetic of the metrics", None):
        network, few = build_network(config).to(device), min(config.training.batch, 64)
        sample = cost_per_sample(network, config, GenerationSettings.default(config, few, few), measure_flops)
        width, extraction = 0, 0.0
        if features is not None:
            pixels = torch.from_numpy(np.ascontiguousarray(images.pixels[evenly_spaced(len(images), few)]))
            width = features(pixels).shape[1]
            extraction = measure_flops(lambda: features(pixels)) / len(pixels) + _PER_VALUE * pixels[0].numel()
        judge, judged = 0.0, judged_columns(config.conditions)
        if judged and config.evaluate.OBEYS in config.evaluate.metrics:
            own = Judge.untrained(judged, config.image_format)
            each = measure_flops(lambda: own.network(torch.zeros(1, config.image_format.channels, *own.grid)))
            extraction, judge = extraction + each, 3.0 * each * own.images_seen(len(images))
        x, zeros = torch.zeros(few, *config.input_shape, device=device), torch.zeros(few, device=device)
        with torch.no_grad():
            told = config.conditions.blank(few).to(device)
            forward = measure_flops(lambda: network(x, zeros, told)) / few
    # A backward pass costs two forward passes. In 16 bits both take about two thirds of the time.
    passes = 3.0 if config.training.precision == "fp32" else 2.0
    return _Costs(sample, extraction, width, passes * forward * config.training.images, judge)


def _is_compared(config: Config) -> bool:
    return config.evaluate.OBEYS in config.evaluate.metrics and bool(compared_columns(config.conditions))


def _metric_flops(config: Config, samples: int, reference: int, width: int) -> float:
    """Return the FLOPs of the metrics of so many samples, with twice the weight for those in float64."""
    names, images = config.evaluate.metrics, samples + reference
    values = samples * config.image_format.count
    # Products of all pairs of images; covariances and their eigenvectors; projections of patches, which are sorted.
    others = ("fid", _PIXEL_METRIC, config.evaluate.OBEYS, *config.evaluate.VALUES)
    pairs = 4.0 * images**2 * width * len([name for name in names if name not in others])
    # All metrics of values read the samples and twice as many real images.
    of_values = 3 * _PER_VALUE * values * bool({*names} & {*config.evaluate.VALUES})
    covariances = (4.0 * images * width**2 + 80.0 * width**3) * ("fid" in names)
    return pairs + covariances + 20 * _PER_VALUE * values * (_PIXEL_METRIC in names) + of_values


def _metrics_due(config: Config, step: int, plan: LengthPlan) -> bool:
    """Return True if metrics are due: after the last step, or at the first evaluation after each of their intervals.

    A plan that multiplies the interval of evaluations multiplies that of metrics too. A plan that has time for the last
    evaluation alone has no time to draw samples for metrics.
    """
    stretch = plan.stretch
    if not stretch:
        return False
    apart, every = stretch * config.evaluate.every, stretch * config.evaluate.metrics_every
    return every >= 0 and (step >= plan.steps or step // every > (step - apart) // every)


class EvaluationHook:
    """Evaluates a run as it trains, and records how long that took."""

    def __init__(self, context: RunContext, config: Config, dataset: Dataset, previews: Previews):
        self._context, self._config, self._dataset, self._previews = context, config, dataset, previews
        wanted = config.evaluate.metrics and config.evaluate.metrics_every >= 0
        self._compared: Comparison | None = None
        if wanted:
            features = _features_of(config, context.device)
            self._compared = _comparison(config, dataset.of_one_size.train, features)

    @cached_property
    def _judge(self) -> ConditionJudge:
        return ConditionJudge.open(self._config, self._dataset.of_one_size)

    def dry_run(self) -> None:
        """Compute the metrics of a few samples, so that errors surface early; there is nothing to record."""
        if self._compared is not None:
            self._measure(self._compared, TRIAL_SAMPLES)

    def evaluate(self, step: int, recorder: Recorder) -> dict[str, Any]:
        """Return numbers for the record; empty if there is nothing to measure."""
        started = time.perf_counter()
        finding = None
        with self._context.heartbeat.during("evaluation"):
            record = self._previews.held_out_loss()
            with suppress(OSError):  # the record cannot be read now
                finding = self._check_overfitting(step, record)
        if record:
            recorder.event("evaluated", step, seconds=round(time.perf_counter() - started, 3))
        if finding is not None:
            recorder.event(_OVERFITTING, step, **finding.facts)
            recorder.warn(step, f"overfitting: {finding.evidence}; {finding.remedy}")
        return record | self._evaluate_samples(step, recorder)

    def _evaluate_samples(self, step: int, recorder: Recorder) -> dict[str, float]:
        compared, started, record = self._compared, time.perf_counter(), dict[str, float]()
        plan = self._previews.state.length.at(step)
        if compared is None or (step > 0 and not _metrics_due(self._config, step, plan)):
            return {}
        with self._context.heartbeat.during("measuring samples"):
            if step > 0:
                record = self._measure(compared, self._config.evaluate.samples)
            else:  # samples of a fresh network are noise
                self.dry_run()
        recorder.event("measured", step, seconds=round(time.perf_counter() - started, 3), **record)
        return record

    def _measure(self, compared: Comparison, count: int) -> dict[str, float]:
        """Return values for the record by name, of `count` samples, with their standard errors where known.

        The samples are those of the EMA weights, always from the same noise.
        """
        # In proportion, or the metrics would compare the shares of the classes.
        given = proportional_given(self._config.conditions, compared.reference, count)
        pixels = np.ascontiguousarray(self._previews.samples(count, given).transpose(0, 3, 1, 2))
        measured = compared.measure(pixels, compared.compute_features(pixels, "samples"))
        record: dict[str, float] = {"drawn": count}
        for name, (one, *_) in measured.items():
            record |= {} if one.value is None else {name: one.value}
            record |= {} if one.error is None else {f"{name}_error": one.error}
            record |= {} if one.real_high is None else {f"{name}_real": one.real_high}
        if self._config.evaluate.OBEYS in compared.metrics:
            columns, scores = self._config.conditions.columns_of(given, range(count)), list[ConditionScore]()
            if judged_columns(self._config.conditions):
                scores = self._judge.score(in_parts(pixels), columns)
            dataset, draw = self._dataset.of_one_size, self._previews.samples
            agreed = compare_with_truth(self._config, dataset, draw, min(MOST_IMAGES, count // DRAWS))
            record |= {one.measure.lower(): one.value for one in agreed} | self._obeyed(scores, agreed)
        return record

    def _obeyed(self, scores: Sequence[ConditionScore], agreed: Sequence[ImageAgreement]) -> dict[str, float]:
        """Return the mean score of all conditions, that of real images, and the score of each, for the record.

        The score of conditions that are images is SSIM, which like all others is at most 1.
        """
        name, judged = self._config.evaluate.OBEYS, main_scores(scores)
        main = [(one.condition, one.value) for one in judged]
        main += [(one.condition, one.value) for one in agreed if one.measure == SSIM]
        if not main:
            return {}
        record = {name: sum(value for _, value in main) / len(main)}
        if real := [one.real for one in judged if one.real is not None]:
            record[f"{name}_real"] = sum(real) / len(real)
        # Trackers take no other characters in names.
        named = [(re.sub(r"[^\w.-]", "_", condition), value) for condition, value in main[:_MOST_RECORDED]]
        return {f"{name}_{condition}": value for condition, value in named} | record

    def _check_overfitting(self, step: int, measured: dict[str, Any]) -> Finding | None:
        """Return the finding of `unfog doctor RUN` if it is a warning, once in a run, as of this evaluation."""
        context, config, dataset = self._context, self._config, self._dataset
        if "held_out_loss" not in measured or len(dataset.held_out) < _MIN_HELD_OUT:
            return None
        # From the record, which also holds what a process before a resume has warned of.
        if any(event.get("kind") == _OVERFITTING for event in read_events(context.folder.events)):
            return None
        metrics = [*read_metrics(context.folder.metrics), {"step": step, **measured}]
        record = RunRecord(context.folder.path, config, metrics)
        # Losses on training images cost time, so they are measured only where the held-out loss has risen.
        if held_out_history(record)[2] <= ROSE:
            return None
        finding = self._previews.find_overfitting(record, dataset)
        return finding if finding is not None and finding.severity == "warning" else None
