"""Checks of generated images with any channels and values: power spectrum, histograms and correlation of channels."""

from __future__ import annotations

from dataclasses import asdict

from unfog.evaluation.metrics import MetricResult
from unfog.evaluation.value_metrics import VALUE_METRICS, Curve, RealImages, ValueSource
from unfog.inference.compare_images import real_text
from unfog.reporting.charts import curve_chart
from unfog.reporting.findings import Figure, Finding

# Of the largest value that random halves of the real images have: what is surely more, and what is a defect.
_MORE, _FAR = 1.25, 4.0
_CHARTS = 4  # of the farthest channels
_WHAT = {
    "spectrum": "the power spectra of generated and training images differ by {value:.3g} (mean of |ln| over octaves)",
    "histogram": "the values of generated and training images differ by {value:.3g} standard deviations",
    "correlation": "the correlations of channels of generated and training images differ by {value:.3g}",
}


def check_values(samples: ValueSource, real: RealImages, unready: str, longer: str) -> list[Finding]:
    """Compare generated images [N, C, H, W] with training images of the same channels.

    `unready` is the remedy for a network that has not learned yet, "" for one that has; `longer` is that of others.
    """
    results, curves = real.compare(VALUE_METRICS, samples), real.curves(VALUE_METRICS, samples)
    return [
        _check(name, results[name], [one for one in curves if one.metric == name], unready or longer, bool(unready))
        for name in VALUE_METRICS
    ]


def _check(name: str, results: list[MetricResult], curves: list[Curve], remedy: str, early: bool) -> Finding:
    """run.spectrum, run.histogram and run.correlation: compare the distance with that of real images from others."""
    whole, code = results[0], f"run.{name}"
    if whole.value is None:
        damaged = "NaN" in whole.note
        return Finding(code, "warning" if damaged else "fine", f"{name}: {whole.note}", remedy if damaged else "")
    facts = {one.metric: {"value": one.value, "low": one.real_low, "high": one.real_high} for one in results}
    evidence = _WHAT[name].format(value=whole.value) + (f"; {whole.note}" if name == "correlation" else "")
    if whole.real_high is None:
        return Finding(code, "fine", f"{evidence}; too few training images to compare with each other", facts=facts)
    evidence += f"; halves of as many training images differ by {real_text(whole)}"
    return Finding.graded(
        code,
        evidence,
        (whole.value > _FAR * whole.real_high, "hint" if early else "warning", "", remedy),
        (whole.value > _MORE * whole.real_high, "hint", "", remedy),
        facts=facts,
        figures=_figures(results, curves),
    )


def _figures(results: list[MetricResult], curves: list[Curve]) -> tuple[Figure, ...]:
    """Return a table of all channels, if there are parts, and charts of the farthest ones."""
    table = [("", "generated", "training images, halves")]
    table += [(one.metric, f"{one.value:.4g}", real_text(one)) for one in results if one.value is not None]
    title = f"Distance of generated from training images, {results[0].n} of each"
    figures = [Figure(title, table=table)] if len(results) > 1 else []
    distances = {one.metric: one.value or 0.0 for one in results}
    far = sorted(curves, key=lambda one: distances.get(f"{one.metric}_{one.channel}", 0.0), reverse=True)[:_CHARTS]
    for curve in sorted(far, key=lambda one: one.channel):
        figures.append(
            Figure(f"{curve.metric} of channel {curve.channel}".capitalize(), svg=curve_chart(asdict(curve)))
        )
    return tuple(figures)
