"""The request for an evaluation of a run, and its result, as it is printed and stored."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unfog.data.dataset import ImageSet
from unfog.evaluation.features import Features
from unfog.evaluation.metrics import MetricResult
from unfog.pipeline.generate import GenerationSettings
from unfog.reporting.records import write_atomic

FORMAT = 1
ARITHMETIC = 2
"""Version of the computation of metrics; results of another version are computed again."""
HELD_OUT = "held-out"


class EvaluationSetup(NamedTuple):
    """An evaluation request with every open setting chosen."""

    metrics: tuple[str, ...]
    features: Features | None
    generation: GenerationSettings
    reference: ImageSet
    rows: NDArray[np.int64]
    """Rows of the reference images that are compared."""
    reference_name: str
    against: int | None


@dataclass(frozen=True)
class Evaluation:
    """Metrics of one evaluation of a run, with how its samples were generated."""

    step: int
    drawn: Mapping[str, Any]
    """Settings of the samples: sampler, steps, seed, guidance, weights, reference."""
    measured: Sequence[MetricResult]
    copies: Sequence[Mapping[str, Any]] = ()
    """Searches for copies of training images: by, severity, evidence, remedy, facts, picture (a file name)."""
    seconds: float = 0.0
    asked: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, metric: str) -> MetricResult:
        """Return the metric of this name. KeyError if there is none."""
        for one in self.measured:
            if one.metric == metric:
                return one
        raise KeyError(metric)

    def lines(self) -> list[str]:
        """Return the metrics as a table, with notes below."""
        rows: list[tuple[str, ...]] = [("metric", "value", "95% interval", "n", "reference", "features", "resize")]
        rows += [_table_row(one) for one in self.measured]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        notes = [f"{one.metric}: {one.note}" for one in self.measured if one.note]
        return [
            f"step {self.step:,}: {self.how}",
            *table,
            *notes,
            *(f"copies, by {one['by']}: {one['evidence']}" for one in self.copies),
        ]

    @property
    def how(self) -> str:
        """Settings of the samples, as text."""
        return ", ".join(f"{name} {value}" for name, value in self.drawn.items())

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, (json.dumps(self.to_dict(), indent=2, allow_nan=False) + os.linesep).encode())

    @classmethod
    def read(cls, path: Path) -> Evaluation | None:
        """Return what `write` stored; None if the file is missing, damaged or of another format."""
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            stored = json.loads(path.read_bytes())
            if stored.pop("format") == FORMAT:
                measured = [MetricResult(**one) for one in stored.pop("measured")]
                return cls(measured=measured, **stored)
        return None


def _table_row(one: MetricResult) -> tuple[str, ...]:
    within = "" if one.low is None or one.high is None else f"{one.low:.4g} to {one.high:.4g}"
    value = "refused" if one.value is None else f"{one.value:.4g}"
    reference = f"{one.n_reference:,}" if one.n_reference else "-"
    return one.metric, value, within, f"{one.n:,}", reference, one.features, one.resize
