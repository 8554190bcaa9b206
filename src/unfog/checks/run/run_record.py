"""The record of a run, read once for all checks. Any part of it may be missing or damaged."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from unfog.config.schema import Config
from unfog.reporting.charts import Floats
from unfog.reporting.records import (
    LENGTH_EVENT,
    SESSION_STARTS,
    Row,
    drop_undone_events,
    finite_column,
    finite_number,
    read_events,
    read_metrics,
    read_object,
)
from unfog.training.checkpoints.format import BrokenCheckpoint, CheckpointInfo, list_checkpoints

# Settings whose change makes a run forget its roll-backs, as `events.jsonl` names them (`settings_digests`).
FRESH_START_SETTINGS = (
    *("optimizer.", "training.clip", "training.precision", "training.seed", "network.dropout"),
    *("label_dropout", "condition_dropout"),
    *("data.flip", "data.jitter", "data.crop", "data.roll", "data.background", "data.range", "data.clip"),
    *("data.held_out", "images"),
    *(
        "diffusion.weighting",
        "diffusion.adaptive",
        "diffusion.loss",
        "ema:",
        "ema.",
    ),  # not ema_snapshots, which change no step
)
_LARGEST_REPORT = 2**30  # bytes of data.json, which names every file
# Times that a rate is below the usual one, from which on another cause is likelier.
_FAR_BELOW = 5.0


@dataclass(frozen=True, eq=False)
class RunRecord:
    """Metrics, events, heartbeat, checkpoint manifests and data report of a run folder."""

    path: Path
    config: Config
    metrics: Sequence[Row] = ()
    events: Sequence[Row] = ()
    heartbeat: Mapping[str, Any] | None = None
    """The heartbeat with its age, as `Heartbeat.read` gives it; None without one."""
    saved: Sequence[CheckpointInfo] = ()
    """Oldest first."""
    broken: Sequence[BrokenCheckpoint] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    """data.json, less its list of files; {} without the file."""

    @classmethod
    def read(cls, path: Path, config: Config, beat: Mapping[str, Any] | None) -> RunRecord:
        """Read the record of a run folder; what is missing or damaged is left out."""
        saved, broken = list_checkpoints(path / "checkpoints")
        metrics, events = read_metrics(path / "metrics.jsonl"), drop_undone_events(read_events(path / "events.jsonl"))
        report = read_object(path / "data.json", _LARGEST_REPORT)
        report.pop("files", None)
        return cls(path, config, metrics, events, beat, saved, broken, report)

    def with_broken(self, broken: Sequence[BrokenCheckpoint]) -> RunRecord:
        """Add checkpoints that turned out to be broken when they were read, which manifests cannot show."""
        folders = {one.folder for one in broken}
        saved = [one for one in self.saved if one.folder not in folders]
        return replace(self, saved=saved, broken=broken) if broken else self

    @property
    def batch(self) -> int:
        return self.config.training.batch

    @property
    def steps(self) -> int:
        """Steps of the whole run, as planned last; 0 if its length was never resolved."""
        for row in reversed(self.events):
            if row.get("kind") in (*SESSION_STARTS, LENGTH_EVENT) and (steps := finite_number(row.get("steps"))) > 0:
                return int(steps)
        return self.config.training.images // self.batch or self.config.training.steps

    @cached_property
    def step(self) -> int:
        """Last step in any part of the record."""
        # Of all, as each may be missing, and a killed process wrote its last lines into some of them only.
        told = [finite_number(row.get("step")) for row in (*self.metrics, *self.events, self.heartbeat or {})]
        told += [float(one.step) for one in self.saved]
        return int(max((step for step in told if step > 0), default=0))

    @property
    def seconds(self) -> float:
        """Wall time of the run over all its resumes; 0 if not known."""
        told = (finite_number(row.get("seconds")) for row in self.metrics)
        return max((seconds for seconds in told if seconds > 0), default=0.0)

    def events_of(self, kind: str) -> list[Row]:
        """Return the events of a kind, in order."""
        return [row for row in self.events if row.get("kind") == kind]

    def column(self, name: str) -> tuple[Floats, Floats]:
        """Return (steps, values) of the metric lines that have a finite number under this name."""
        return finite_column(self.metrics, name)

    def command(self, verb: str, flags: str = "") -> str:
        """Return the shell command `unfog VERB RUN FLAGS`."""
        return f"unfog {verb} {shlex.quote(str(self.path))} {flags}".rstrip()

    def resume_command(self, flags: str) -> str:
        """Return `unfog resume RUN FLAGS`, with twice the steps for a finished run, which would stop at once."""
        return self.command("resume", f"{flags} --steps {2 * self.steps}" if self.step >= self.steps > 0 else flags)

    @cached_property
    def _afresh(self) -> int:
        """Index of the last event that changed a setting of the training steps; -1 without one."""
        # The same settings whose change makes the guard forget its roll-backs, so that both judge the same stretch.
        changes = (i for i, row in enumerate(self.events) if row.get("kind") == "changed")
        return max(
            (i for i in changes if str(self.events[i].get("setting")).startswith(FRESH_START_SETTINGS)), default=-1
        )

    @property
    def changed_at(self) -> int:
        """Step of the last change to a setting of the training steps; 0 without one."""
        step = finite_number(self.events[self._afresh].get("step")) if self._afresh >= 0 else 0.0
        return int(step) if step > 0 else 0

    def recent_events(self, kind: str) -> list[Row]:
        """Return the events of a kind since `changed_at`; older ones say nothing about the present settings."""
        return [row for row in self.events[self._afresh + 1 :] if row.get("kind") == kind]

    @property
    def lr_scale(self) -> float:
        """Factor that is left of the learning rate after roll-backs, each of which halves it."""
        rates = [rate for row in self.recent_events("rolled_back") if (rate := finite_number(row.get("lr"))) > 0]
        return min(1.0, rates[-1] / self.config.optimizer.lr) if rates and self.config.optimizer.lr else 1.0

    def lower_learning_rate(self, usual: float | None) -> float | None:
        """Return a lower learning rate to try; None if the rate is far below the usual one, and not the cause."""
        now = self.config.optimizer.lr * self.lr_scale
        if usual and now < usual / _FAR_BELOW:
            return None
        if usual and usual < 0.7 * self.config.optimizer.lr:
            return min(usual, now)
        return max(now / 3, (usual or 0.0) / (2 * _FAR_BELOW))

    def stability_remedy(self, usual: float | None) -> str:
        """Return the remedy for a loss that rises or is not finite; `usual`: the automatic learning rate, if known."""
        lr = self.lower_learning_rate(usual)
        if lr is not None:
            return f"a lower learning rate: {self.resume_command(f'--lr {lr:.2g}')}, or train again with it"
        now = self.config.optimizer.lr * self.lr_scale
        said = f"{now:.2g} is far below the usual rate of {usual:.2g}, so it is hardly the cause"
        if self.config.training.precision != "fp32":
            return f"{said}; compute in fp32: {self.resume_command('--precision fp32')}"
        return f"{said}; check the images: unfog doctor {shlex.quote(self.config.source)}"
