"""The charts of a report: the columns of metrics.jsonl that they show, and how."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from unfog.reporting.charts import Floats, Series, line_chart
from unfog.reporting.records import Row, finite_number

SMOOTHED_FROM = 20  # with fewer points a smoothed line says nothing
_LEVELS = "noise level: clean 0 to noisy 1"
_METRICS = {
    "fid": "Fréchet distance",
    "kid": "Kernel distance",
    "sliced": "Sliced Wasserstein distance",
    "precision": "Precision",
    "recall": "Recall",
    "density": "Density",
    "coverage": "Coverage",
}


class _Chart(NamedTuple):
    """A chart with its heading and a line that says how to read it."""

    title: str
    svg: Markup
    caption: str


def metric_charts(metrics: Sequence[Row]) -> list[_Chart]:
    """The charts that these lines of metrics have numbers for."""
    made = [
        _loss(metrics),
        _levels(
            metrics,
            {"training": "loss_by_level", "held-out": "held_out_by_level"},
            "Loss by noise level",
            "loss",
            "The latest, in equal shares of the noise levels that training draws.",
        ),
        _levels(
            metrics,
            {"held-out": "held_out_noise_error"},
            "Noise-prediction error by noise level",
            "squared error",
            "Held-out images; 1 is what predicting no noise at all would give.",
        ),
        *(_from_zero(metrics, name, title, f"{name}, of generated images") for name, title in _METRICS.items()),
        _Chart(
            "Gradient norm",
            _line_chart({"gradient norm": finite_column(metrics, "gradient_norm")}, "step", "norm"),
            "Before clipping.",
        ),
        _from_zero(metrics, "lr", "Learning rate", "learning rate"),
        _from_zero(metrics, "images_per_second", "Speed", "images a second"),
        _from_zero(metrics, "data_wait", "Waiting for data", "share of the time"),
    ]
    return [chart for chart in made if chart.svg]


def finite_column(metrics: Sequence[Row], name: str) -> tuple[Floats, Floats]:
    """(steps, values) of the lines that hold a finite number of this name."""
    rows = [(finite_number(row.get("step", 0)), finite_number(row.get(name))) for row in metrics]
    points = np.array(rows, np.float64).reshape(-1, 2)
    points = points[np.isfinite(points).all(axis=1)]
    return points[:, 0], points[:, 1]


def smoothed(values: Floats) -> Floats:
    """Exponential average over a fortieth of the values, but at first over an eighth of those so far."""
    smoothed = np.empty_like(values)
    average = 0.0
    for i, value in enumerate(values):
        average += (value - average) / max(1.0, min(len(values) / 40, (i + 1) / 8))
        smoothed[i] = average
    return smoothed


def _loss(metrics: Sequence[Row]) -> _Chart:
    steps, values = finite_column(metrics, "loss")
    series: dict[str, tuple[Floats, Floats]] = {"loss": (steps, values)}
    if len(values) >= SMOOTHED_FROM:
        series["smoothed"] = (steps, smoothed(values))
    series["held-out"] = finite_column(metrics, "held_out_loss")
    faint = ("loss",) if "smoothed" in series else ()
    caption = "Held-out: the same images, noise and noise levels each time."
    return _Chart("Loss", _line_chart(series, "step", "loss", faint), caption if len(series["held-out"][0]) else "")


def _levels(metrics: Sequence[Row], names: dict[str, str], title: str, y_label: str, caption: str) -> _Chart:
    """The latest lists of these names over the middles of their bins."""
    series = {}
    for label, name in names.items():
        latest: list[object] = next((row[name] for row in reversed(metrics) if isinstance(row.get(name), list)), [])
        values = np.array([finite_number(value) for value in latest], np.float64)
        series[label] = ((np.arange(len(values)) + 0.5) / max(1, len(values)), values)
    return _Chart(title, _line_chart(series, _LEVELS, y_label), caption)


def _from_zero(metrics: Sequence[Row], name: str, title: str, y_label: str) -> _Chart:
    svg = line_chart({title.lower(): finite_column(metrics, name)}, "step", y_label, zero_y=True)
    return _Chart(title, Markup(svg), "")


def _line_chart(series: Series, x_label: str, y_label: str, faint: Collection[str] = ()) -> Markup:
    """The chart, logarithmic where the values span most of a decade and more."""
    values = np.concatenate([np.asarray(y, np.float64) for _, y in series.values()])
    values = values[np.isfinite(values)]
    log = len(values) > 1 and values.min() > 0 and values.max() > 8 * values.min()
    # line_chart escapes every text that it is given.
    return Markup(line_chart(series, x_label, y_label, log_y=bool(log), faint=faint))
