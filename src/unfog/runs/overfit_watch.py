"""A warning while it happens: the network learns its images by heart, and its held-out loss rises again."""

from __future__ import annotations

from typing import Any

from unfog.config.schema import Config
from unfog.data.dataset import Dataset
from unfog.doctor.run.loss_checks import ROSE, check_overfitting, held_out_history, loss_images
from unfog.doctor.run.run_record import RunRecord
from unfog.pipeline.build import without_augmentation
from unfog.process.run_folder import RunFolder
from unfog.reporting.findings import Finding
from unfog.reporting.records import read_events, read_metrics
from unfog.runs.previews import Previews

EVENT = "overfitting"
FEWEST = 8
"""Held-out images, of fewer of which a gap says little."""


class OverfittingMonitor:
    """Looks at each evaluation whether the rule of `unfog doctor RUN` is met, and says so once in a run.

    Nothing that training does depends on it, so what it knows is the record alone, also after a resume.
    """

    def __init__(self, folder: RunFolder, config: Config, prepared: Dataset, looks: Previews):
        self.folder, self.config, self.prepared, self.looks = folder, config, prepared, looks
        self._told: bool | None = None

    @property
    def warned(self) -> bool:
        """Whether it was said before, in this process or in one that the run was resumed from."""
        if self._told is None:
            events = read_events(self.folder.events)
            self._told = any(event.get("kind") == EVENT for event in events)
        return self._told

    def check(self, step: int, measured: dict[str, Any]) -> Finding | None:
        """The warning, if it is due after this evaluation, which is not in the record yet.

        Losses on training images are measured only where the held-out loss has risen, so it costs nothing before.
        """
        if (
            self.config.trains_autoencoder
            or self.warned
            or "held_out_loss" not in measured
            or len(self.prepared.held_out) < FEWEST
        ):
            return None
        metrics = [*read_metrics(self.folder.metrics), {"step": step, **measured}]
        record = RunRecord(self.folder.path, self.config, metrics)
        if held_out_history(record)[2] <= ROSE:
            return None
        device = self.looks.state.precision.device
        see, seen_by = without_augmentation(self.config), self.prepared.as_network_input
        seen, unseen = (loss_images(part, device, see) for part in (seen_by.train, seen_by.held_out))
        if seen is None or unseen is None:
            return None
        found = check_overfitting(record, self.looks.losses(seen), self.looks.losses(unseen))
        if found.severity != "warning":
            return None
        self._told = True
        return found
