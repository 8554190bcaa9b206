"""What an evaluation of a run is asked for and what it finds, as it is printed and stored."""

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
from unfog.errors import RequestError
from unfog.evaluation.features import Features
from unfog.evaluation.metrics import MetricResult
from unfog.pipeline.generate import GenerationSettings
from unfog.reporting.records import write_atomic
from unfog.training.settings import Evaluate, SamplingPrecision, names_in

FORMAT = 1
ARITHMETIC = 2
"""Of how figures come of pictures and images: those that another one gave are measured anew."""
LOSSES = ("held_out", "bits")
"""Metrics of the held-out images, for which nothing is drawn."""
ON_REQUEST = ("fid_infinity",)
"""Metrics that are measured where they are named alone, as they take thousands of pictures."""
METRICS = (*Evaluate.DRAWN, *ON_REQUEST, *LOSSES)
HELD_OUT = "held-out"


@dataclass(frozen=True)
class EvaluationRequest:
    """What to measure, and how the pictures for it are drawn. What is left open is chosen, and printed."""

    metrics: tuple[str, ...] = ()
    """Of METRICS; () is all that can be measured, but for WHERE_ASKED."""
    n: int = 0
    """Pictures to draw; 0 is 1,000 on a CPU, and 10,000 elsewhere."""
    features: str = ""
    """inception, texture, pixels, or a TorchScript file; "" is inception for fid or where its file is there, else
    texture."""
    reference: str = ""
    """What they are compared with: "" is the training images, "held-out" those, or any SOURCE."""
    sampler: str | None = None
    steps: int | None = None
    seed: int = 0
    guidance: float | None = None
    batch: int = 64
    precision: SamplingPrecision = "fp32"
    against: int | None = None
    """Step of another checkpoint, whose held-out loss is compared image by image."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "metrics", names_in(self.metrics))
        for name in self.metrics:
            if name not in METRICS:
                raise RequestError(f"metrics names {name!r}, which is not one of {', '.join(METRICS)}")
        if self.n and not 10 <= self.n <= 10_000_000:
            raise RequestError(f"n = {self.n} pictures: at least 10 are needed for any metric; 1000 is a beginning")
        if self.batch < 1:
            raise RequestError(f"batch = {self.batch} must be at least 1")
        if self.against is not None and self.metrics and "held_out" not in self.metrics:
            raise RequestError("--against compares held-out losses, so --metrics must have held_out")


class EvaluationSetup(NamedTuple):
    """What is asked for, with what was left open settled."""

    metrics: tuple[str, ...]
    features: Features | None
    drawing: GenerationSettings
    reference: ImageSet
    rows: NDArray[np.int64]
    """Which images of the reference."""
    what: str
    """The reference, for people."""
    against: int | None


@dataclass(frozen=True)
class Evaluation:
    """What was found of a run."""

    step: int
    drawn: Mapping[str, Any]
    """How: sampler, steps, seed, guidance, weights, n, what the reference is."""
    measured: Sequence[MetricResult]
    copies: Sequence[Mapping[str, Any]] = ()
    """Of each search for copies of training images: by, severity, evidence, remedy, facts, picture (a file name)."""
    seconds: float = 0.0
    asked: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, metric: str) -> MetricResult:
        """What was measured under this name. KeyError if it was not."""
        for one in self.measured:
            if one.metric == metric:
                return one
        raise KeyError(metric)

    def lines(self) -> list[str]:
        """As a table, with what there is to say about it."""
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
        """How it was drawn, in words."""
        return ", ".join(f"{name} {value}" for name, value in self.drawn.items())

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"format": FORMAT, **asdict(self)}

    def write(self, path: Path) -> None:
        """Store it, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, (json.dumps(self.to_dict(), indent=2, allow_nan=False) + os.linesep).encode())

    @classmethod
    def read(cls, path: Path) -> Evaluation | None:
        """What `write` stored; None if there is nothing, or something else."""
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            stored = json.loads(path.read_bytes())
            if stored.pop("format") == FORMAT:
                measured = [MetricResult(**one) for one in stored.pop("measured")]
                return cls(measured=measured, **stored)
        return None


def _table_row(one: MetricResult) -> tuple[str, ...]:
    """The cells of a row of the table."""
    within = "" if one.low is None or one.high is None else f"{one.low:.4g} to {one.high:.4g}"
    value = "refused" if one.value is None else f"{one.value:.4g}"
    reference = f"{one.n_reference:,}" if one.n_reference else "-"
    return one.metric, value, within, f"{one.n:,}", reference, one.features, one.resize
