"""What an evaluation during training is: held-out loss, whether it begins to rise, and metrics of drawn pictures."""

from __future__ import annotations

import time
from typing import Any

import torch

from unfog.config.schema import Config
from unfog.data.dataset import Dataset
from unfog.process.heartbeat import Heartbeat
from unfog.process.run_folder import RunFolder
from unfog.reporting.recorder import Recorder
from unfog.runs.metrics_hook import MetricsHook, metrics_due
from unfog.runs.overfit_watch import EVENT, OverfittingMonitor
from unfog.runs.previews import Previews


class EvaluationHook:
    """Evaluates a run as it trains, and tells the record what that cost."""

    def __init__(self, folder: RunFolder, config: Config, prepared: Dataset, looks: Previews, device: torch.device):
        self.config, self.looks = config, looks
        self.overfit = OverfittingMonitor(folder, config, prepared, looks)
        wanted = config.evaluate.metrics and config.evaluate.metrics_every >= 0
        self.metrics = MetricsHook(config, prepared.train, looks, device) if wanted else None

    def try_metrics(self) -> None:
        """Try out what is measured of drawn pictures. RequestError if the best cannot be chosen by it."""
        if self.metrics is not None:
            self.metrics.try_out()

    def evaluate(self, step: int, recorder: Recorder, pulse: Heartbeat) -> dict[str, Any]:
        """Numbers for the record; before the first step, drawn pictures are only tried. Empty if there is nothing."""
        started = time.perf_counter()
        with pulse.during("evaluation"):
            record = self.looks.held_out_loss()
            finding = self.overfit.check(step, record)
        if record:
            recorder.event("evaluated", step, seconds=round(time.perf_counter() - started, 3))
        if finding is not None:
            recorder.event(EVENT, step, **finding.facts)
            recorder.warn(step, f"overfitting: {finding.evidence}; {finding.remedy}")
        return record | self._of_pictures(step, recorder, pulse)

    def _of_pictures(self, step: int, recorder: Recorder, pulse: Heartbeat) -> dict[str, Any]:
        metrics, started = self.metrics, time.perf_counter()
        if metrics is None or not (step == 0 or metrics_due(self.config, step)):
            return {}
        with pulse.during("measuring pictures"):
            record = metrics.try_out() if step == 0 else metrics.measure()
        recorder.event("measured", step, seconds=round(time.perf_counter() - started, 3), **record)
        return record
