"""Evaluation during training: the held-out loss, a warning of overfitting, and metrics of generated samples."""

from __future__ import annotations

import time
from typing import Any

from unfog.checks.run.loss_checks import ROSE, check_overfitting, held_out_history, loss_images
from unfog.checks.run.run_record import RunRecord
from unfog.config.schema import Config
from unfog.data.dataset import Dataset
from unfog.pipeline.build import without_augmentation
from unfog.reporting.findings import Finding
from unfog.reporting.recorder import Recorder
from unfog.reporting.records import read_events, read_metrics
from unfog.runs.context import RunContext
from unfog.runs.metrics_hook import MetricsHook, metrics_due
from unfog.runs.previews import Previews

_OVERFITTING = "overfitting"  # the kind of event
_MIN_HELD_OUT = 8  # images; the gap to the training loss says little of fewer


class EvaluationHook:
    """Evaluates a run as it trains, and records how long that took."""

    def __init__(self, context: RunContext, config: Config, dataset: Dataset, previews: Previews):
        self._context, self._config, self._dataset, self._previews = context, config, dataset, previews
        wanted = config.evaluate.metrics and config.evaluate.metrics_every >= 0
        self._metrics = MetricsHook(config, dataset.train, previews, context.device) if wanted else None
        self._warned: bool | None = None  # None: the record was not read yet

    def dry_run(self) -> None:
        if self._metrics is not None:
            self._metrics.dry_run()

    def evaluate(self, step: int, recorder: Recorder) -> dict[str, Any]:
        """Return numbers for the record; empty if there is nothing to measure."""
        started = time.perf_counter()
        with self._context.heartbeat.during("evaluation"):
            record = self._previews.held_out_loss()
            finding = self._check_overfitting(step, record)
        if record:
            recorder.event("evaluated", step, seconds=round(time.perf_counter() - started, 3))
        if finding is not None:
            recorder.event(_OVERFITTING, step, **finding.facts)
            recorder.warn(step, f"overfitting: {finding.evidence}; {finding.remedy}")
        return record | self._evaluate_samples(step, recorder)

    def _evaluate_samples(self, step: int, recorder: Recorder) -> dict[str, Any]:
        metrics, started = self._metrics, time.perf_counter()
        if metrics is None or not (step == 0 or metrics_due(self._config, step)):
            return {}
        with self._context.heartbeat.during("measuring samples"):
            # Before the first step they would measure noise, so they are only tried out.
            record = metrics.dry_run() if step == 0 else metrics.measure()
        recorder.event("measured", step, seconds=round(time.perf_counter() - started, 3), **record)
        return record

    def _check_overfitting(self, step: int, measured: dict[str, Any]) -> Finding | None:
        """Return the finding of `unfog doctor RUN` if it is a warning, once in a run, as of this evaluation."""
        context, config, dataset = self._context, self._config, self._dataset
        if config.trains_autoencoder or "held_out_loss" not in measured or len(dataset.held_out) < _MIN_HELD_OUT:
            return None
        if self._has_warned():
            return None
        metrics = [*read_metrics(context.folder.metrics), {"step": step, **measured}]
        record = RunRecord(context.folder.path, config, metrics)
        # Losses on training images cost time, so they are measured only where the held-out loss has risen.
        if held_out_history(record)[2] <= ROSE:
            return None
        transform, images = without_augmentation(config), dataset.as_network_input
        train, held_out = (loss_images(part, context.device, transform) for part in (images.train, images.held_out))
        if train is None or held_out is None:
            return None
        finding = check_overfitting(record, self._previews.losses(train), self._previews.losses(held_out))
        if finding.severity != "warning":
            return None
        self._warned = True
        return finding

    def _has_warned(self) -> bool:
        """Return True if the record holds the warning, also of a process that the run was resumed from."""
        if self._warned is None:
            events = read_events(self._context.folder.events)
            self._warned = any(event.get("kind") == _OVERFITTING for event in events)
        return self._warned
