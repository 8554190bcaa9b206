"""What a run has written down, read once for all that is asked of it. Nothing in it has to be there, or be in order."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from unfog.config.schema import Config
from unfog.reporting.charts import Floats
from unfog.reporting.records import Row, finite_number, read_events, read_metrics
from unfog.reporting.report_charts import finite_column
from unfog.training.checkpoints.format import BrokenCheckpoint, CheckpointInfo, list_checkpoints

BEGINNINGS = ("started", "resumed")
ENDS = ("finished", "stopped", "failed")
FRESH_START_SETTINGS = (
    *("optimizer.", "training.clip", "training.precision", "training.seed", "network.dropout", "label_dropout"),
    *("data.flip", "data.jitter", "data.crop", "data.background", "data.held_out", "images"),
    *("diffusion.weighting", "diffusion.adaptive", "ema"),
)
"""Settings whose change makes a run forget its roll-backs, as `events.jsonl` names them: see `runs.changes.keys_of`."""
_FAR_BELOW = 5.0
"""Times that a rate is below the usual one, from which on another cause is likelier."""


@dataclass(frozen=True, eq=False)
class RunRecord:
    """A run folder's metrics, events, heartbeat, checkpoints by their manifests, and the account of its images."""

    path: Path
    config: Config
    metrics: Sequence[Row] = ()
    events: Sequence[Row] = ()
    heartbeat: Mapping[str, Any] | None = None
    """The heartbeat with its age, as `process.heartbeat.read_heartbeat` gives it; None where there is none."""
    saved: Sequence[CheckpointInfo] = ()
    """Oldest first."""
    broken: Sequence[BrokenCheckpoint] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    """data.json, less its list of files; {} where there is none."""

    @classmethod
    def read(cls, path: Path, config: Config, beat: Mapping[str, Any] | None) -> RunRecord:
        """The record of the run in this folder; what is missing or damaged is left out."""
        saved, broken = list_checkpoints(path / "checkpoints")
        metrics, events = read_metrics(path / "metrics.jsonl"), still_true(read_events(path / "events.jsonl"))
        return cls(path, config, metrics, events, beat, saved, broken, _read_data_report(path / "data.json"))

    def with_broken(self, broken: Sequence[BrokenCheckpoint]) -> RunRecord:
        """The same, where reading the newest checkpoints found these broken, as manifests do not tell of all damage."""
        folders = {one.folder for one in broken}
        saved = [one for one in self.saved if one.folder not in folders]
        return replace(self, saved=saved, broken=broken) if broken else self

    @property
    def batch(self) -> int:
        """Images of a step."""
        return self.config.training.batch

    @property
    def steps(self) -> int:
        """Steps of the whole run; 0 where its length was never settled."""
        return self.config.training.images // self.batch or self.config.training.steps

    @cached_property
    def step(self) -> int:
        """The last step that anything tells of."""
        told = [finite_number(row.get("step")) for row in (*self.metrics, *self.events, self.heartbeat or {})]
        told += [float(one.step) for one in self.saved]
        return int(max((step for step in told if step > 0), default=0))

    @property
    def seconds(self) -> float:
        """Wall time of the run over all its resumes; 0 if not known."""
        told = (finite_number(row.get("seconds")) for row in self.metrics)
        return max((seconds for seconds in told if seconds > 0), default=0.0)

    def events_of(self, kind: str) -> list[Row]:
        """The events of a kind, in order."""
        return [row for row in self.events if row.get("kind") == kind]

    def column(self, name: str) -> tuple[Floats, Floats]:
        """(steps, values) of the lines of metrics that have a finite number of this name."""
        return finite_column(self.metrics, name)

    def command(self, verb: str, flags: str = "") -> str:
        """`unfog VERB RUN FLAGS`, to be typed as it is."""
        return f"unfog {verb} {shlex.quote(str(self.path))} {flags}".rstrip()

    def resume_command(self, flags: str) -> str:
        """`unfog resume RUN FLAGS`; of a run that is at its end twice as long, as it would do nothing else."""
        return self.command("resume", f"{flags} --steps {2 * self.steps}" if self.step >= self.steps > 0 else flags)

    @cached_property
    def _afresh(self) -> int:
        """The place, among the events, of the last change to what steps come of; -1 where there is none."""
        changes = (i for i, row in enumerate(self.events) if row.get("kind") == "changed")
        return max(
            (i for i in changes if str(self.events[i].get("setting")).startswith(FRESH_START_SETTINGS)), default=-1
        )

    @property
    def changed_at(self) -> int:
        """The step at which what steps come of was changed last; 0 where it never was."""
        step = finite_number(self.events[self._afresh].get("step")) if self._afresh >= 0 else 0.0
        return int(step) if step > 0 else 0

    def recent_events(self, kind: str) -> list[Row]:
        """The events of a kind since that change: what came before tells nothing of the settings as they are."""
        return [row for row in self.events[self._afresh + 1 :] if row.get("kind") == kind]

    @property
    def lr_scale(self) -> float:
        """What roll-backs have left of the learning rate: half of it each."""
        rates = [rate for row in self.recent_events("rolled_back") if (rate := finite_number(row.get("lr"))) > 0]
        return min(1.0, rates[-1] / self.config.optimizer.lr) if rates and self.config.optimizer.lr else 1.0

    def lower_learning_rate(self, usual: float | None) -> float | None:
        """A learning rate to try where this one proved too high: the usual one, if that is known and lower.

        None where the rate is far below the usual one, so that it is not to blame.
        """
        now = self.config.optimizer.lr * self.lr_scale
        if usual and now < usual / _FAR_BELOW:
            return None
        if usual and usual < 0.7 * self.config.optimizer.lr:
            return min(usual, now)
        return max(now / 3, (usual or 0.0) / (2 * _FAR_BELOW))

    def stability_remedy(self, usual: float | None) -> str:
        """How to go on where the loss rises or is not finite; `usual`: the rate that would be chosen, if known."""
        lr = self.lower_learning_rate(usual)
        if lr is not None:
            return f"a lower learning rate: {self.resume_command(f'--lr {lr:.2g}')}, or train anew with it"
        now = self.config.optimizer.lr * self.lr_scale
        said = f"{now:.2g} is far below the usual rate of {usual:.2g}, and so hardly to blame"
        if self.config.training.precision != "fp32":
            return f"{said}; compute in fp32: {self.resume_command('--precision fp32')}"
        return f"{said}; look at the images: unfog doctor {shlex.quote(self.config.source)}"


def still_true(events: Sequence[Row]) -> list[Row]:
    """The events that no later session took back: one that begins at a step trains all steps after it again."""
    kept, begun = list[Row](), math.inf
    for row in reversed(events):
        step = finite_number(row.get("step"))
        if not step > begun:
            kept.append(row)
        if row.get("kind") in BEGINNINGS and step < begun:
            begun = step
    return kept[::-1]


def list_field(row: Row, name: str) -> list[Any]:
    """The list of this name in a row; [] where there is none."""
    value = row.get(name)
    return value if isinstance(value, list) else []


def _read_data_report(path: Path) -> dict[str, Any]:
    """data.json without its list of files; {} where there is none that can be read."""
    try:
        account = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return {k: v for k, v in account.items() if k != "files"} if isinstance(account, dict) else {}
