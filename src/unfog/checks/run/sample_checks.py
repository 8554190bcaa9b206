"""Checks of generated images against training images.

Pictures: brightness, tint, contrast, noise, detail and clipping. Other values: power spectrum, histograms and
correlation of channels.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from unfog.checks.run.run_record import RunRecord
from unfog.diffusion.noise import cleanest_level
from unfog.evaluation.metrics import MetricResult
from unfog.evaluation.pixel_metrics import FINE, band_floors, band_powers
from unfog.evaluation.value_metrics import VALUE_METRICS, Curve, RealImages
from unfog.evaluation.value_sources import ValueSource
from unfog.inference.compare_images import luma_spectra, real_text, spectrum_chart
from unfog.reporting.charts import Floats, curve_chart
from unfog.reporting.findings import Figure, Finding, Severity
from unfog.reporting.image_grids import Pixels, grid
from unfog.settings import is_auto
from unfog.training.settings import PowerEma
from unfog.values.image_format import channel_names

# Standard errors from which on a difference is not the luck of the draw; some ten of them are looked at.
_CERTAIN = 4.0
# Levels of 255 by which a channel, or all of them, may be off before it is a defect rather than a detail.
_TINTED, _DARK = 8.0, 20.0
# Of those, what is worth a word.
_NOTICED = 0.4
# Energy between neighbouring pixels over that of the data: noise is left, or nothing is drawn out.
_NOISY, _SMOOTH = 2.5, 0.2
# Such energy, of ten levels, hardly shows; it is added to both, so that flat pictures have a ratio as well.
_FAINT = 100.0
# Jitter of colours from which on it shows in samples.
_JITTER = 0.2
# Standard deviation in levels below which a picture shows nothing.
_BLANK = 2.0
# Share of pixels at 0 or 255 beyond that of the data.
_CLIPPED = 0.10
# Fine detail, as a share of that of the data, that is surely less or more.
_SOFT, _ROUGH = 0.9, 1.25
# Standard errors of the fine detail. It varies so much between images that four would hide all but blurs.
_SURE = 2.0
_Labelled = tuple[Pixels, NDArray[np.int64] | None]


class SampleRemedies(NamedTuple):
    """Remedies for samples, which depend on the settings of their run."""

    finer: str = ""
    """A command that samples in smaller steps; "" if none takes smaller ones."""
    sharper: str = ""
    """A command that ends sampling at a lower noise level, and what it does; "" if it ends at the lowest."""
    untinted: str = ""
    """Settings other than the run's that tint less."""

    @classmethod
    def of(cls, record: RunRecord) -> SampleRemedies:
        """Return the remedies for the samples of a run."""
        config, sampler = record.config, record.config.sampler
        most, finer = config.diffusion.schedule.steps, ""
        steps = min(2 * sampler.steps, most) if most and sampler.grid in ("schedule", "tuned") else 2 * sampler.steps
        if sampler.kind == "adaptive":
            change = record.resume_command(f"--sampler.tolerance {max(sampler.tolerance / 4, 1e-6):.2g}")
            finer = f"sample in smaller steps: {change}"
        elif steps > sampler.steps:
            finer = f"take more sampling steps: {record.command('sample', f'--steps {steps}')}"
        jitter = config.data.jitter
        tint = [f"samples have the colours of --data.jitter {jitter:g}, so train again with less"] * (jitter > _JITTER)
        tint += ["the v and flow targets tint less than eps"] * (config.diffusion.target.kind == "eps")
        if isinstance(config.ema, PowerEma) and config.ema.width > 0.01:
            tint.append(f"a lower --ema power:width than {config.ema.width:g} helps late in a run")
        return cls(finer, _lower_end(record), ", and ".join(tint))

    @property
    def longer(self) -> str:
        return "train longer" + f", or {self.finer}" * bool(self.finer)


_NO_RUN = SampleRemedies()


def _lower_end(record: RunRecord) -> str:
    """Return the command that ends sampling at a lower noise level, and what it does; "" if that is the lowest."""
    sampler, schedule = record.config.sampler, record.config.diffusion.schedule
    lowest, last = cleanest_level(schedule), cleanest_level(schedule, sampler.last)
    ends = last if sampler.kind == "adaptive" else float(sampler.visits(schedule)[-2])
    if ends > lowest - 0.1:  # logsnr
        return ""
    is_given = not is_auto(sampler, "last")
    flag = "--sampler.last 0" if is_given and sampler.grid in ("karras", "logsnr") else "--sampler.grid karras"
    if is_given and flag != "--sampler.last 0":
        flag = "--sampler.last 0" if sampler.kind == "adaptive" else f"{flag} --sampler.last 0"
    return (
        f"{record.resume_command(flag)}, which ends sampling at a lower noise level: more detail, and after a short "
        f"training more noise; {record.command('evaluate', '--metrics detail')} measures both"
    )


class _ColorStatistics(NamedTuple):
    """N images with C channels and their statistics, in levels of 0 to 255."""

    pixels: Pixels
    """[N, H, W, C]."""
    means: Floats
    """[N, C]."""
    contrast: Floats
    """[N]: standard deviation over the pixels of all channels."""
    detail: Floats
    """[N]: mean square difference from the mean of the four neighbours."""
    clipped: Floats
    """[N]: share of values that are 0 or 255."""
    weight: Floats
    """[N], of mean 1: weights that make all classes count alike."""
    group: NDArray[np.int64]
    """[N]: class of each."""


def _color_statistics(pixels: Pixels, classes: NDArray[np.int64] | None = None) -> _ColorStatistics:
    """Compute statistics of images, uint8 [N, H, W, C]; with classes [N], every class has the same weight."""
    x = pixels.astype(np.float64)
    inner = x[:, 1:-1, 1:-1]
    around = (x[:, :-2, 1:-1] + x[:, 2:, 1:-1] + x[:, 1:-1, :-2] + x[:, 1:-1, 2:]) / 4
    group = np.zeros(len(x), np.int64) if classes is None else classes
    counts = np.bincount(group)
    return _ColorStatistics(
        pixels,
        x.mean((1, 2)),
        x.reshape(len(x), -1).std(1),
        np.square(inner - around).mean((1, 2, 3)),
        ((pixels == 0) | (pixels == 255)).mean((1, 2, 3)),
        len(x) / (counts[group] * (counts > 0).sum()),
        group,
    )


def _weighted_mean(values: Floats, of: _ColorStatistics) -> tuple[float, float]:
    """Return the weighted mean of values [N] and its standard error, from the variation within classes."""
    weight = of.weight / of.weight.sum()
    # A class of which nothing was drawn has no mean, and is divided by 1.
    means = np.bincount(of.group, values) / np.maximum(np.bincount(of.group), 1)
    counts = np.bincount(of.group)[of.group]
    # Each class loses one degree of freedom; a class of one image has no variation of its own.
    residual = (values - means[of.group]) * np.sqrt(counts / np.maximum(counts - 1, 1))
    alone = counts == 1
    if alone.any():
        residual[alone] = np.sqrt(np.square(residual[~alone]).mean()) if (~alone).any() else values.std()
    return float(weight @ values), float(np.sqrt(np.square(weight * residual).sum()))


class _Difference(NamedTuple):
    """Generated minus training, in levels, with its standard error."""

    value: float
    error: float

    def beyond(self, tolerance: float) -> bool:
        # Both: large enough to matter, and more than the choice of images explains.
        return abs(self.value) > max(tolerance, _CERTAIN * self.error)


def _difference(drawn: Floats, drawn_of: _ColorStatistics, data: Floats, data_of: _ColorStatistics) -> _Difference:
    (a, a_error), (b, b_error) = _weighted_mean(drawn, drawn_of), _weighted_mean(data, data_of)
    return _Difference(a - b, float(np.hypot(a_error, b_error)))


def check_samples(generated: _Labelled, training: _Labelled, unready: str, remedies: SampleRemedies) -> list[Finding]:
    """Compare generated images, uint8 [N, H, W, C] and their classes [N] or None, with training images.

    `unready` is the remedy for a network that has not learned yet; "" for one that has.
    """
    drawn, data = _color_statistics(*generated), _color_statistics(*training)
    figure = _comparison_figure(generated[0], training[0])
    return [
        _check_blank(drawn, data, figure, unready, remedies),
        _check_color_cast(drawn, data, figure, unready, remedies),
        _check_contrast(drawn, data, unready, remedies),
        _check_saturation(drawn, data, unready, remedies),
        _check_detail(drawn, data, unready, remedies),
    ]


def _check_color_cast(
    drawn: _ColorStatistics,
    data: _ColorStatistics,
    figure: Figure,
    unready: str = "",
    remedies: SampleRemedies = _NO_RUN,
) -> Finding:
    """run.tint: compare brightness, and each channel relative to the mean of all channels."""
    brightness = _difference(drawn.means.mean(1), drawn, data.means.mean(1), data)
    names = channel_names(drawn.means.shape[1])
    casts = {}
    if len(names) > 1:
        # The relative channel varies far less between images than the channel itself, so few samples show a faint tint.
        mine, theirs = (s.means - s.means.mean(1, keepdims=True) for s in (drawn, data))
        casts = {n: _difference(mine[:, c], drawn, theirs[:, c], data) for c, n in enumerate(names)}
    off, slightly = (
        brightness.beyond(part * _DARK) or any(cast.beyond(part * _TINTED) for cast in casts.values())
        for part in (1.0, _NOTICED)
    )
    evidence = (
        f"generated images differ from the training images by {brightness.value:+.1f} ± "
        f"{brightness.error:.1f} of 255 levels in brightness"
    )
    if casts:
        name, worst = max(casts.items(), key=lambda item: abs(item[1].value))
        evidence += f", and by {worst.value:+.1f} ± {worst.error:.1f} in {name}"
    longer = "train longer" + f"; {remedies.untinted}" * bool(remedies.untinted)
    return Finding.graded(
        "run.tint",
        evidence,
        (off and not unready, "warning", "", longer),
        (off or slightly, "hint", "", unready or longer),
        facts={"brightness": [*brightness], "casts": {name: [*cast] for name, cast in casts.items()}},
        figures=(_channel_table(drawn, data), figure),
    )


def _check_contrast(drawn: _ColorStatistics, data: _ColorStatistics, unready: str, remedies: SampleRemedies) -> Finding:
    """run.contrast: compare the mean contrast, over the pixels of all channels."""
    # As with _FAINT, so that blank pictures have a ratio too.
    ratio = (_weighted_mean(drawn.contrast, drawn)[0] + _BLANK) / (_weighted_mean(data.contrast, data)[0] + _BLANK)
    gap = _difference(drawn.contrast, drawn, data.contrast, data)
    return Finding.graded(
        "run.contrast",
        f"the contrast of generated images is {ratio:.2f} times that of the training images",
        (not 0.7 <= ratio <= 1.4 and gap.beyond(4.0), "hint", "", unready or remedies.longer),
        facts={"ratio": ratio, "difference": [*gap]},
    )


def _check_saturation(
    drawn: _ColorStatistics,
    data: _ColorStatistics,
    unready: str = "",
    remedies: SampleRemedies = _NO_RUN,
) -> Finding:
    """run.saturated: compare the share of values at 0 and 255."""
    mine, theirs = _weighted_mean(drawn.clipped, drawn)[0], _weighted_mean(data.clipped, data)[0]
    more = mine - theirs > _CLIPPED and _difference(drawn.clipped, drawn, data.clipped, data).beyond(_CLIPPED)
    return Finding.graded(
        "run.saturated",
        f"{mine:.1%} of generated values are 0 or 255, against {theirs:.1%} in training images",
        (more, "hint" if unready else "warning", "", unready or remedies.longer),
        facts={"drawn": mine, "data": theirs},
    )


def _check_detail(
    drawn: _ColorStatistics, data: _ColorStatistics, unready: str = "", remedies: SampleRemedies = _NO_RUN
) -> Finding:
    """run.detail: compare the variance of luma at high frequencies, generated over training."""
    generated, real = images = [torch.from_numpy(of.pixels.transpose(0, 3, 1, 2).copy()) for of in (drawn, data)]
    fine = [band_powers(pixels).numpy()[:, -FINE:].sum(1) for pixels in images]
    (value, error), (usual, usual_error) = (_weighted_mean(x, of) for x, of in zip(fine, (drawn, data)))
    # The floor is what rounding to 8 bits adds; a ratio of two roundings says nothing.
    if usual <= 2 * sum(band_floors(*images[0].shape[2:])[-FINE:]):
        return Finding("run.detail", "fine", "the training images have no fine detail to compare")
    ratio, spread = value / usual, _SURE * math.hypot(error / max(value, 1e-12), usual_error / usual)
    evidence = (
        f"generated images have {ratio:.2f} ± {ratio * spread / _SURE:.2f} times the variance of luma of training "
        "images at high frequencies"
    )
    sharper = "; ".join(filter(None, ("train longer, or with a larger network", remedies.sharper)))
    chart = spectrum_chart(luma_spectra(real, generated), "training")
    return Finding.graded(
        "run.detail",
        evidence,
        (ratio * math.exp(spread) < _SOFT, "hint", ": they are too smooth", unready or sharper),
        (ratio > _ROUGH * math.exp(spread), "hint", ": they are grainy", unready or remedies.longer),
        facts={"ratio": ratio, "error": ratio * spread / _SURE},
        figures=(Figure("Spectrum of generated and of training images", svg=chart),),
    )


def _check_blank(
    drawn: _ColorStatistics,
    data: _ColorStatistics,
    figure: Figure,
    unready: str = "",
    remedies: SampleRemedies = _NO_RUN,
) -> Finding:
    """run.blank_samples: check for blank, noisy or blurred images."""
    empty, usual = float((drawn.contrast < _BLANK).mean()), float((data.contrast < _BLANK).mean())
    detail = (_weighted_mean(drawn.detail, drawn)[0] + _FAINT) / (_weighted_mean(data.detail, data)[0] + _FAINT)
    grave: Severity = "hint" if unready else "warning"
    soon = "train longer, or with another --lr"
    noisy = unready or soon + f"; if that does not help, {remedies.finer}" * bool(remedies.finer)
    smooth = unready or f"{soon}, or with a larger network; more sampling steps may help"
    finding = partial(Finding, "run.blank_samples", facts={"blank": empty, "blank_in_data": usual, "detail": detail})
    if empty - usual > 0.2:
        evidence = f"{empty:.0%} of the generated images are blank ({usual:.0%} of the training images)"
        return finding(grave, evidence, unready or soon, figures=(figure,))
    evidence = f"generated images have {detail:.2f} times the fine detail of training images"
    if detail > _NOISY:
        return finding(grave, f"{evidence}: noise is left", noisy, figures=(figure,))
    if detail < _SMOOTH:
        return finding("hint", f"{evidence}: they are blurred", smooth, figures=(figure,))
    return finding("fine", f"{evidence}, and none of them is blank")


def _channel_table(drawn: _ColorStatistics, data: _ColorStatistics) -> Figure:
    names = channel_names(drawn.means.shape[1])
    rows = [("", *names)]
    for title, of in (("generated", drawn), ("training", data)):
        cells = (_weighted_mean(of.means[:, c], of) for c in range(len(names)))
        rows.append((title, *(f"{mean:.1f} ± {error:.1f}" for mean, error in cells)))
    return Figure("Mean level by channel, of 255", table=rows)


def _comparison_figure(drawn: Pixels, data: Pixels) -> Figure:
    n = min(24, len(drawn), len(data))
    both = np.concatenate([drawn[:n], data[np.linspace(0, len(data) - 1, n).astype(int)]])
    picture = grid(both, row_names=["generated"] * n + ["training"] * n, scale=max(1, 48 // drawn.shape[1]))
    return Figure("Generated images and training images", picture)


# Times the largest distance between random halves of the real images from which on that of the samples is a hint, or a
# warning.
_MORE, _FAR = 1.25, 4.0
_CHARTS = 4  # of the farthest channels
_WHAT = {
    "spectrum": "the power spectra of generated and training images differ by {value:.3g} (mean of |ln| over octaves)",
    "histogram": "the values of generated and training images differ by {value:.3g} standard deviations",
    "correlation": "the correlations of channels of generated and training images differ by {value:.3g}",
}


def check_values(samples: ValueSource, real: RealImages, unready: str, longer: str) -> list[Finding]:
    """Compare generated images [N, C, H, W] with training images of the same channels.

    `unready` is the remedy if the network has not learned yet, "" if it has, for which `longer` is the remedy.
    """
    measured = real.measure(samples)
    results, curves = real.compare(VALUE_METRICS, measured), real.curves(VALUE_METRICS, measured)
    return [
        _check_distance(
            name, results[name], [one for one in curves if one.metric == name], unready or longer, bool(unready)
        )
        for name in VALUE_METRICS
    ]


def _check_distance(name: str, results: list[MetricResult], curves: list[Curve], remedy: str, early: bool) -> Finding:
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
        figures=_distance_figures(results, curves),
    )


def _distance_figures(results: list[MetricResult], curves: list[Curve]) -> tuple[Figure, ...]:
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
