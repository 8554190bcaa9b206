"""EMA sweep: rebuild the EMA of a run in several widths from its snapshots, measure each, and choose the best."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from unfog.config.requests.ema_sweep import EmaSweepRequest
from unfog.config.schema import Config
from unfog.config.toml import of_type
from unfog.data.dataset import Dataset, evenly_spaced
from unfog.errors import RequestError
from unfog.evaluation.features import open_features
from unfog.evaluation.held_out import MeanEstimate
from unfog.evaluation.pixel_metrics import PIXEL_METRICS
from unfog.inference.compare_images import Comparison
from unfog.inference.compute_metrics import held_out_losses
from unfog.inference.loaded_run import SWEEP_FILE, load_ema_weights, load_run_images
from unfog.pipeline.build import build_held_out_set, build_network, building_for
from unfog.pipeline.generate import GenerationSettings, generate_images, proportional_given
from unfog.process.device import choose_device
from unfog.process.run_folder import RunFolder
from unfog.process.signals import StopSignals
from unfog.process.torch_flags import caller_flags_kept
from unfog.reporting.charts import line_chart
from unfog.reporting.findings import Figure, Finding, write_result
from unfog.reporting.progress import Progress, align_columns, say
from unfog.settings import is_auto
from unfog.training.checkpoints.posthoc_ema import EmaSnapshotFile, Mixture
from unfog.training.settings import PowerEma

_WIDTHS = (0.02, 0.03, 0.04, 0.05, 0.07, 0.1, 0.13, 0.16, 0.2, 0.25)
PAGE_FILE = "ema-sweep.html"
_LOSS = "held_out_loss"
# Metrics of samples against the images of the run.
DRAWN = ("kid", "fid", "fd", "sliced")
_USUAL_N = {_LOSS: 512, "kid": 1000, "fid": 10_000, "fd": 1000, "sliced": 1000}


class WidthResult(NamedTuple):
    """An EMA width, and the metric of the weights with it."""

    width: float
    value: float
    error: float | None
    """Standard error, if known. All widths use the same noise, so smaller differences mean something too."""
    distance: float
    """Relative error of the rebuilt EMA profile."""


@dataclass(frozen=True)
class EmaSweepResult:
    """Result of `ema_sweep`: the metric of each EMA width."""

    metric: str
    n: int
    step: int
    features: str
    """Feature network; "" for the held-out loss."""
    before: float
    """Width of the run's `--ema`."""
    rows: tuple[WidthResult, ...]

    @property
    def best(self) -> WidthResult:
        return min(self.rows, key=lambda row: row.value)

    def __repr__(self) -> str:
        return (
            f"<EMA widths at step {self.step:,}: {self.best.width:g} is the best of {len(self.rows)}, "
            f"{self.metric} {self.best.value:.5g}>"
        )

    def table(self) -> list[list[str]]:
        head = ["width", self.metric, "standard error", "profile off by", ""]
        return [head] + [
            [
                f"{row.width:g}",
                f"{row.value:.5g}",
                "" if row.error is None else f"{row.error:.2g}",
                f"{100 * row.distance:.2g}%",
                "best" if row == self.best else "--ema of the run" if row.width == self.before else "",
            ]
            for row in self.rows
        ]

    def lines(self) -> list[str]:
        return align_columns(self.table(), str.rjust)

    def finding(self) -> Finding:
        """Return the best width as a finding, with the chart."""
        best, usual_row = self.best, next((row for row in self.rows if row.width == self.before), None)
        said = f"of {len(self.rows)} lengths, width {best.width:g} has the lowest {self.metric}, {best.value:.5g}"
        if usual_row is not None and best.width != self.before:
            said += f", where the {self.before:g} of --ema has {usual_row.value:.5g}"
            if best.value > 0:
                more = 100 * (usual_row.value / best.value - 1)
                said += f" ({more:,.{0 if more >= 10 else 1}f}% more)"
        said += f" (step {self.step:,}, n = {self.n:,}{f', features {self.features}' if self.features else ''})"
        # The best may then lie beyond.
        edge = best.width in (self.rows[0].width, self.rows[-1].width) and len(self.rows) > 1
        remedy = "it is at the end of the range; try --widths beyond it" if edge else ""
        series = {self.metric: ([row.width for row in self.rows], [row.value for row in self.rows])}
        figures = (
            Figure(f"{self.metric} by EMA width", svg=line_chart(series, "width", self.metric)),
            Figure("Widths", table=self.table(), caption=_CAPTION),
        )
        return Finding("ema.sweep", "hint" if edge else "fine", said, remedy, asdict(self), figures)


_CAPTION = (
    "Width is the standard deviation of the averaging window as a share of the run so far. Each EMA is a weighted sum "
    "of snapshots. 'Profile off by' is the error of its averaging window; the error of its weights is far smaller."
)


@caller_flags_kept()
def ema_sweep(request: EmaSweepRequest) -> EmaSweepResult:
    """Rebuild EMAs of several widths, measure each, and make the best one the run's own.

    Writes ema-sweep.json and ema-sweep.html into the run. `unfog sample` and `unfog.load` read the former. If the run
    cannot be written to, the table is printed and RunError raised.
    """
    metric, n, widths, step = _checked(request)
    folder = RunFolder(request.run)
    config, kept = folder.read_config(), EmaSnapshotFile.read_all(folder.averages)
    config.task.check_generates(str(folder.path), "sweep a diffusion run")
    to_measure = _rebuildable_widths(kept, config, widths, step)
    step = Mixture.solve(kept, to_measure[0], step).step
    place = choose_device(request.device)
    folder.check_writable()  # fails now rather than after minutes
    with StopSignals(saves=False) as stop:
        prepared = load_run_images(config, stop)
        with building_for(kept[-1].path, folder.path):
            network = build_network(config)
        network = network.to(place).eval()
        n, by, measured = _build_measure(replace(request, n=n), config, prepared, place)
        rows = []
        with Progress("lengths", len(to_measure), delay=0.5) as progress:
            for done, width in enumerate(to_measure):
                stop.leave_if_requested()
                progress.update(done, f"width {width:g}")
                mix = load_ema_weights(network, folder, width, step)
                rows.append(WidthResult(width, *measured(network), mix.error))
    swept = EmaSweepResult(metric, n, step, by, getattr(config.ema, "width", 0.0), tuple(rows))
    with folder.saving_results(swept.lines):
        _write_result(swept, folder)
    return swept


def _checked(request: EmaSweepRequest) -> tuple[str, int, tuple[float, ...], int | None]:
    """Return metric, number of images, widths and step; from Python, a request may hold anything."""
    metric = request.metric
    if metric not in _USUAL_N:
        raise RequestError(f"metric = {metric!r} must be one of {', '.join(_USUAL_N)}")
    n, widths = of_type(int, request.n, "n"), of_type(tuple[float, ...], request.widths, "widths")
    step = of_type(int | None, request.checkpoint, "step")
    of_type(str, request.features, "features")
    if n < 0:
        raise RequestError(f"n = {n} must be at least 1, or 0 for the usual number")
    return metric, _USUAL_N[metric] if is_auto(request, "n") else n, widths, step


def _rebuildable_widths(
    kept: list[EmaSnapshotFile], config: Config, widths: tuple[float, ...], step: int | None
) -> list[float]:
    """Return the widths to measure, in order: those given, or the usual ones that can be rebuilt.

    RequestError if a given width cannot be rebuilt, or none of the usual ones can.
    """
    if widths:
        for width in widths:
            Mixture.solve(kept, width, step)
        return sorted(set(widths))
    found: list[float] = []
    own = {config.ema.width} if isinstance(config.ema, PowerEma) else set()
    Mixture.solve(kept, next(iter(own), _WIDTHS[5]), step)  # raises the reason, if no width can be rebuilt
    for width in sorted({*_WIDTHS, *own}):
        try:
            Mixture.solve(kept, width, step)
            found.append(width)
        except RequestError:
            say(f"  width {width:g} is skipped: the snapshots are too far apart for it")
    return found


# Maps a network with EMA weights to (value, standard error or None).
Measure = Callable[[nn.Module], tuple[float, float | None]]


def _build_measure(
    request: EmaSweepRequest, config: Config, prepared: Dataset, device: torch.device
) -> tuple[int, str, Measure]:
    """Return the number of images, the name of the features, and the measure, which uses the same noise each time.

    RequestError if there are no held-out images, or no such features.
    """
    metric, n = request.metric, request.n
    if metric == _LOSS:
        return _held_out_measure(n, config, prepared, device)
    prepared = prepared.of_one_size  # which the samples have
    if n < 10:
        raise RequestError(f"n = {n} samples: {metric} needs at least 10; {_USUAL_N[metric]} is usual")
    # Rather images that were not trained on, if they are enough for the metric.
    images = prepared.held_out if len(prepared.held_out) >= n else prepared.train
    name = request.features
    if is_auto(request, "features"):
        name = "inception" if metric == "fid" else "texture"
    features = None if metric in PIXEL_METRICS else open_features(name, device)
    compared = Comparison((metric,), features, images, evenly_spaced(len(images), n), wrap=config.data.wrapped)
    compared.check_count(metric, n, "--metric")
    # Classes in proportion to the data, or the metric would compare the proportions.
    given = proportional_given(config.conditions, images, n)
    drawing = replace(GenerationSettings.default(config, n, min(n, 64)), given=given)

    def value(network: nn.Module) -> tuple[float, float | None]:
        with Progress("generating", n) as progress:
            samples = generate_images(network, config, drawing, progress.update).transpose(0, 3, 1, 2)
        samples = np.ascontiguousarray(samples)
        found, *_ = compared.measure(samples, compared.compute_features(samples, "samples"))[metric]
        if found.value is None:
            raise RequestError(f"{metric} cannot be computed: {found.note}")
        return found.value, found.error

    return n, "7x7 patches" if features is None else features.name, value


def _held_out_measure(n: int, config: Config, prepared: Dataset, device: torch.device) -> tuple[int, str, Measure]:
    """Return the measure of the held-out loss of `n` images, or as many as there are."""
    held_out = build_held_out_set(prepared, config, device, n)
    if held_out is None:
        raise RequestError(f"this run has no held-out images; choose --metric {DRAWN[0]}")

    def value(network: nn.Module) -> tuple[float, float | None]:
        mean = MeanEstimate.over_images(held_out_losses(network, config, held_out, 64, lambda images: None))
        return mean.value, None if math.isnan(mean.error) else mean.error

    return held_out.images, "", value


def _write_result(swept: EmaSweepResult, folder: RunFolder) -> None:
    """Write ema-sweep.json, whose width is the default of the run from now on, and ema-sweep.html."""
    record = {"width": swept.best.width, **asdict(swept), "rows": [row._asdict() for row in swept.rows]}
    title = f"EMA width of {folder.path.name}"
    write_result(folder.path / SWEEP_FILE, record, folder.path / PAGE_FILE, title, swept.finding())
