"""`unfog find-lr`: search a learning rate by training throwaway networks on the images."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from unfog.config.requests.plan import FindLrRequest
from unfog.config.schema import Config
from unfog.config.validate import check_request
from unfog.data.dataset import Dataset
from unfog.data.stream import ImageStream
from unfog.errors import RequestError
from unfog.pipeline.build import build_augmentation, build_objective, build_state, without_augmentation
from unfog.pipeline.load_data import load_images
from unfog.planning.auto_settings import AutoSettings
from unfog.planning.lr_range_test import LossProbe, LrRangeResult, LrTestSetup
from unfog.process import command_clock
from unfog.process.device import choose_device
from unfog.process.run_folder import source_name
from unfog.process.signals import StopSignals
from unfog.process.torch_flags import caller_flags_kept
from unfog.reporting.charts import line_chart
from unfog.reporting.findings import Figure, Finding, Severity, write_result
from unfog.reporting.progress import say
from unfog.runs.weights.init_weights import adopt_latent_statistics, load_initial_weights
from unfog.text import sanitize

_LEAST_SHARE = 0.5  # of the time that is for the test, however long the images took to read
_WRITING = 1.0  # seconds for the files and the end of the process
_PROBED = 256  # images, each with noise at a level of its own
_JSON_FILE, _PAGE_FILE = "lr-range.json", "lr-range.html"


@dataclass(frozen=True)
class FindLrResult:
    """Result of `find_lr`: the range test, and the files written."""

    range: LrRangeResult
    usual: float
    """The rate of a run with these settings: given, or by the rule of thumb."""
    json: Path | None
    page: Path | None
    """The files written, or None."""

    @property
    def suggestion(self) -> float | None:
        return self.range.suggestion

    @property
    def reason(self) -> str:
        return self.range.reason

    def __repr__(self) -> str:
        found = "none found" if self.suggestion is None else f"{self.suggestion:.2g}"
        return f"<learning rate: {found}, {self.reason}; the usual one is {self.usual:.2g}>"

    def finding(self) -> Finding:
        """Return the suggestion as a finding, with the chart."""
        found, usual = self.range, self.usual
        severity: Severity = "fine"
        remedy = ""
        if found.suggestion is None:
            severity, evidence = "warning", f"no learning rate can be suggested: {found.reason}"
        else:
            evidence = f"learning rate {found.suggestion:g}: {found.reason}"
            factor = max(found.suggestion / usual, usual / found.suggestion)
            # The test itself is no more exact than that.
            if factor <= 3:
                evidence += f"; close to the {usual:g} of these settings"
            else:
                side = "lower" if usual < found.suggestion else "higher"
                evidence += f"; the {usual:g} of these settings is {factor:.2g} times {side}"
                severity, remedy = "hint", f"train with --lr {found.suggestion:g}"
        facts = {"suggestion": found.suggestion, "usual": usual}
        figures = (Figure("Loss by learning rate", svg=lr_chart(found), caption=_CAPTION),)
        return Finding("lr.range", severity, evidence, remedy, facts, figures)


_CAPTION = (
    "1 is the loss of predicting nothing. The ramp is one throwaway network whose rate grows with each step: it shows "
    "where learning begins and where it ends. Trials are fresh networks at one rate each, with the schedule of a run. "
    "They are short, which favours high rates: for a very long run, take a lower rate rather than a higher one."
)


@caller_flags_kept()
def find_lr(request: FindLrRequest) -> FindLrResult:
    """Search a learning rate, within so many seconds from the start of the command.

    Overwrites lr-range.json and lr-range.html in the folder `out`, unless it is None. It takes longer where reading the
    images takes over half of that time, or where a step takes seconds, as there is a least number of steps.
    """
    began = command_clock.began()
    config, out, seconds = request.settings, request.out, request.seconds
    if not (math.isfinite(seconds) and seconds > 0):
        raise RequestError(f"seconds = {seconds} must be above 0; 90 is usual")
    if out is not None and out.exists() and not out.is_dir():
        raise RequestError(f"{out} is a file; give a folder for {_JSON_FILE} and {_PAGE_FILE}")
    check_request(config)
    device = choose_device(config.training.device)
    with StopSignals(saves=False) as stop:
        config = adopt_latent_statistics(config)
        prepared, facts = load_images(config, stop)
        config = config.adopt(facts)
        initial = load_initial_weights(config) if config.init.folder else None
        images = prepared.of_one_size.as_network_input.train
        auto = AutoSettings(initial.config if initial else config, images, device, stop)
        auto.resolve_training()
        for choice in auto.choices:
            say(f"  {choice}")
        config = auto.config
        subject = _test_setup(config, prepared, device, stop, initial and initial.state)
        # What was read for the first time may have used up the time, and a test of no steps finds nothing.
        left = max(_LEAST_SHARE * seconds, seconds - _WRITING - (time.monotonic() - began))
        found = subject.run(left)
    files = (None, None) if out is None else (out / _JSON_FILE, out / _PAGE_FILE)
    result = FindLrResult(found, config.optimizer.lr, *files)
    say(f"  {result.finding()}")
    if out is not None:
        _write_result(result, config, out)
        say(f"  the curve is in {out / _PAGE_FILE}")
    return result


def _test_setup(
    config: Config,
    prepared: Dataset,
    device: torch.device,
    stop: StopSignals,
    weights: dict[str, Tensor] | None = None,
) -> LrTestSetup:
    """Return the range test of a run with resolved settings, which starts from `weights` if given."""
    seen = prepared.of_one_size.as_network_input
    # Held-out images, if there are any: the ramp could learn the others by heart.
    images = seen.held_out if len(seen.held_out) else seen.train
    index = np.linspace(0, len(images) - 1, _PROBED).astype(np.int64)  # repeats images if there are fewer
    taken = images.take(index)
    x0 = without_augmentation(config)(torch.from_numpy(taken.pixels)).to(device)
    return LrTestSetup(
        config.training,
        config.optimizer,
        lambda: build_state(config, device, weights),
        ImageStream(seen.train, config.training.seed),
        build_augmentation(config),
        build_objective(config),
        LossProbe.create(x0, taken.conditions.to(device)),
        stop,
    )


def _write_result(result: FindLrResult, config: Config, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    found = asdict(result.range)
    found["ramp"]["smooth"] = result.range.ramp.smooth
    record = {"suggestion": result.suggestion, "reason": result.reason, "usual": result.usual, **found}
    title = f"Learning rate for {sanitize(source_name(config.source))}"
    write_result(out / _JSON_FILE, record, out / _PAGE_FILE, title, result.finding())


def lr_chart(found: LrRangeResult) -> str:
    """Draw losses by learning rate as SVG: the ramp, its smoothed values, and the trials if there are any."""
    ramp = found.ramp
    x = [math.log10(rate) for rate in ramp.rates]
    # A loss that explodes would leave no room for the rest of the curve.
    top = 1.3 * max(ramp.start, 1.0)
    series = {
        "ramp, each step": (x, [min(loss, top) for loss in ramp.losses]),
        "ramp": (x[: len(ramp.smooth)], [min(loss, top) for loss in ramp.smooth]),  # may be shorter, as nan is left out
    }
    if found.trials:
        trials = sorted(found.trials, key=lambda trial: trial.lr)
        series[f"trials of {trials[0].steps} steps"] = (
            [math.log10(trial.lr) for trial in trials],
            [min(trial.loss, top) for trial in trials],
        )
    return line_chart(series, "learning rate, power of ten", "relative loss", zero_y=True, faint=["ramp, each step"])
