"""Checks of trends: loss, learning rate, gradient norm, skipped steps and roll-backs."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from unfog.checks.run.run_record import RunRecord
from unfog.checks.settings.length_checks import format_count, recognisable_from
from unfog.reporting.charts import Floats, line_chart
from unfog.reporting.findings import Figure, Finding, Severity
from unfog.reporting.progress import format_number
from unfog.reporting.records import LENGTH_EVENT, Row, finite_number, smoothed
from unfog.text import plural, without_secrets

# Fewest lines of metrics that show a trend.
_FEW = 6
# Fall of the loss for twice the images, as a share, that makes going on worth it.
_IMPROVES = 0.03
# The same that a run has early on, or for ever with far too low a rate.
_STEEP = 0.10
# Share of what answering 0 loses that a network is soon below.
_UNLEARNED = 0.95
# Times the usual rate beyond which it may be why; DDPM's 2e-4 is 1/15 of it for a small network, slow and sound.
_HIGH, _LOW, _FAR_TOO_LOW = 5.0, 1 / 8, 1 / 30
# Share of its peak below which a rate trains nothing, and shares of a run from which on that is a warning, and fatal.
_NO_RATE, _IDLE, _MOSTLY_IDLE = 1e-3, 0.1, 0.5
# Steps after which something must have been learned.
_SOON = 100


def check_trends(
    record: RunRecord, usual_lr: float | None, relative: float | None, pixelwise: float | None, memorized: bool
) -> list[Finding]:
    """Check loss, learning rate, gradient and stability.

    `usual_lr` would be chosen automatically. `relative` and `pixelwise` are the loss over that of predicting 0, and
    over that of the best prediction from each pixel alone. None stands for what is not known. `memorized`: more
    training would only memorize the images.
    """
    longer_helps = not (memorized or has_high_rate(record, usual_lr, pixelwise))
    found = [
        _check_loss(record, relative, pixelwise, longer_helps),
        _check_idle(record) or _check_learning_rate(record, usual_lr, pixelwise),
        _check_gradient(record),
        _check_stability(record, usual_lr),
    ]
    return [finding for finding in found if finding is not None]


def has_high_rate(record: RunRecord, usual_lr: float | None, pixelwise: float | None) -> bool:
    """Return True if run.lr_high is found: other remedies wait for a lower rate. Arguments as for `check_trends`."""
    if _check_idle(record):
        return False
    found = _check_learning_rate(record, usual_lr, pixelwise)
    return found is not None and found.code == "run.lr_high"


class _Trend(NamedTuple):
    """A linear fit of log(loss) over log2(images), for the last two doublings."""

    fall: float
    """Relative fall of the loss with each doubling of the images; negative where it rises."""
    error: float
    """Standard error of `fall`."""
    last: float
    """Fitted loss at the end."""

    @property
    def rises(self) -> bool:
        return self.fall < -_IMPROVES and self.fall < -3 * self.error


def _loss_trend(record: RunRecord) -> _Trend | None:
    """Fit the trend of the loss; None with too few lines."""
    steps, values = record.column("loss")
    # The last two doublings, in which log loss over log images is nearly a line; the fast start would tilt it.
    keep = (steps >= steps[-1] / 4) & (values > 0) if len(steps) else steps > 0
    if keep.sum() < _FEW:
        return None
    x, y = np.log2(steps[keep]), np.log(values[keep])
    x = x - x[-1]
    if np.ptp(x) < 0.5:  # for example where the record lost its beginning
        return None
    slope, end = np.polyfit(x, y, 1)
    residual = float(np.square(y - slope * x - end).sum() / max(1, len(x) - 2))
    error = math.sqrt(residual / float(np.square(x - x.mean()).sum()))
    return _Trend(1 - math.exp(slope), error, float(np.exp(end)))


def _check_loss(
    record: RunRecord, relative: float | None, of_pixelwise: float | None, longer_helps: bool = True
) -> Finding | None:
    """run.not_learning where simple predictions do as well; else run.loss: level, falling or rising."""
    _, values = record.column("loss")
    if not len(values):
        return None
    facts: dict[str, Any] = {"loss": float(values[-1]), "of_answering_0": relative, "of_pixelwise": of_pixelwise}
    figures = (_loss_figure(record),)
    if (
        relative is not None
        and of_pixelwise is not None
        and record.step >= _SOON
        and (relative > _UNLEARNED or of_pixelwise > 1)
    ):
        return _not_learning(record, relative, of_pixelwise, facts, figures)
    finding, trend = partial(Finding, "run.loss", facts=facts, figures=figures), _loss_trend(record)
    if trend is None:
        return finding("fine", f"the loss is {values[-1]:.3g}; it is too early for a trend")
    facts |= trend._asdict()
    known = _compare_with_pixelwise(of_pixelwise)
    if trend.rises:
        evidence = f"the loss rises, by {-trend.fall:.0%} with twice the images; it is {trend.last:.3g}{known}"
        return finding("warning", evidence, record.stability_remedy(None))
    if trend.fall > max(_IMPROVES, 2 * trend.error):
        evidence = f"the loss still falls, by {trend.fall:.0%} with twice the images; it is {trend.last:.3g}{known}"
        if record.step < record.steps or not longer_helps:
            return finding("fine", evidence)
        return finding("hint", evidence, _train_longer(record, trend))
    return finding(
        "fine", f"the loss has levelled off at {trend.last:.3g}{known} ({-trend.fall:+.1%} with twice the images)"
    )


def _compare_with_pixelwise(relative: float | None) -> str:
    """Compare a loss with that of the best guess of each pixel from itself alone; "" if that is not known."""
    if relative is None:
        return ""
    if round(relative, 2) >= 1:
        return ", no better than a guess of each pixel alone"
    return f", {relative:.2f} times that of a guess of each pixel alone"


def _train_longer(record: RunRecord, trend: _Trend) -> str:
    """Return the remedy of a run that ended while its loss fell: at least until samples are usually recognisable."""
    seen, needed = record.step * record.batch, recognisable_from(record.config)
    # Weights of another run have seen images before. Early on, the loss does not fall as it did so far.
    if seen < needed and not record.config.init.folder:
        longer = record.command("resume", f"--steps {math.ceil(needed / record.batch)}")
        return (
            f"train longer: {longer}; {format_count(seen)} images are seen, and samples become recognisable after "
            f"about {format_count(needed)}"
        )
    longer, expected = record.command("resume", f"--steps {2 * record.steps}"), trend.last * (1 - trend.fall)
    return f"train longer: {longer}; expect about {expected:.3g}"


def _not_learning(
    record: RunRecord, relative: float, of_pixelwise: float, facts: dict[str, Any], figures: tuple[Figure, ...]
) -> Finding:
    """run.not_learning: the loss after some hundred steps is still that of a network that predicts little."""
    evidence = (
        f"the loss is {relative:.2f} of the loss of predicting 0, and {of_pixelwise:.2f} of that of predicting "
        "each pixel by itself: the network has learned almost nothing"
    )
    source, settings = map(shlex.quote, (without_secrets(record.config.source), str(record.path / "config.toml")))
    remedy = f"another learning rate: unfog find-lr {source} --config {settings}"
    if (idle := _idle_share(record)) >= _IDLE:
        remedy = f"the learning rate was 0 for {idle:.0%} of the run, which is why: see run.lr_zero"
    severity: Severity = "fatal" if record.step >= 0.5 * record.steps else "warning"
    return Finding("run.not_learning", severity, evidence, remedy, facts, figures)


def _loss_figure(record: RunRecord) -> Figure:
    steps, values = record.column("loss")
    series = {"loss": (steps, values)}
    if len(values) >= 20:
        series["smoothed"] = (steps, smoothed(values))
    series["held-out"] = record.column("held_out_loss")
    # Of a loss that has fallen far, a linear axis would show the last part as a flat line.
    positive = values.min() > 0 and values.max() > 8 * values.min()
    chart = line_chart(series, "step", "loss", log_y=bool(positive), faint=("loss",) if "smoothed" in series else ())
    return Figure("Loss", svg=chart)


def _check_learning_rate(record: RunRecord, usual_lr: float | None, of_pixelwise: float | None) -> Finding | None:
    """run.lr_high and run.lr_low, where the rate is unusual and its effects show; else run.lr."""
    lr, roll_backs = record.config.optimizer.lr, len(record.recent_events("rolled_back"))
    steps, norms = record.column("gradient_norm")
    if not lr or not len(steps):
        return None
    trend = _loss_trend(record)
    clip = record.config.training.clip
    clipped = float((norms[len(norms) // 4 :] > clip).mean()) if clip else 0.0
    growth = _gradient_growth(norms)
    times = lr / usual_lr if usual_lr else None
    compared = f", {format_number(times)} times the usual {usual_lr:.2g}" if times and usual_lr else ""
    signs = []
    if roll_backs:
        signs.append(f"{plural(roll_backs, 'roll-back')} halved it")
    if of_pixelwise is not None and of_pixelwise > 0.9 and record.step >= _SOON:
        signs.append(f"the loss is still {of_pixelwise:.2f} of the loss of predicting each pixel by itself")
    if trend is not None and trend.rises:
        signs.append(f"the loss rises by {-trend.fall:.0%} with twice the images")
    # Either alone is usual: norms grow as a network learns details, and a tight clip cuts most steps of a sound run.
    if growth > 4 and clipped > 0.9:
        signs.append(f"the gradient norm has grown {growth:.0f} times and is clipped in {clipped:.0%} of the steps")
    facts = {"lr": lr, "usual": usual_lr, "clipped": clipped, "growth": growth, "signs": signs}
    figures = (Figure("Learning rate", svg=line_chart({"rate": record.column("lr")}, "step", "rate", zero_y=True)),)
    above = times is None or times > _HIGH
    # A rate that cannot be compared needs two signs, as each of them has other causes too.
    if signs and above and (times is not None or len(signs) > 1):
        evidence = f"the learning rate {lr:.2g}{compared} is too high: {', and '.join(signs)}"
        return Finding("run.lr_high", "warning", evidence, record.stability_remedy(usual_lr), facts, figures)
    steep = trend is not None and trend.fall > max(_STEEP, 3 * trend.error)
    if usual_lr and times is not None and times < _LOW and (steep or (of_pixelwise or 0.0) > 0.9):
        why = f"the loss still falls by {trend.fall:.0%} with twice the images" if trend else ""
        if not steep:
            why = f"little is learned, and {why}" if trend and trend.fall > _IMPROVES else "little is learned"
        evidence = f"the learning rate {lr:.2g}{compared} is too low: after {plural(record.step, 'step')} {why}"
        remedy = f"continue with a higher rate: {record.resume_command(f'--lr {usual_lr:.2g}')}, or train again with it"
        severity: Severity = "warning" if times < _FAR_TOO_LOW else "hint"
        return Finding("run.lr_low", severity, evidence, remedy, facts, figures)
    return Finding("run.lr", "fine", f"learning rate {lr:.2g}{compared}", "", facts, figures)


def _idle_share(record: RunRecord) -> float:
    """Return the share of the steps so far that were trained at next to no learning rate."""
    steps, rates = record.column("lr")
    if not len(rates) or rates.max() <= 0:
        return 0.0
    # A line stands for the steps since the one before. Roll-backs halve the rate, and are another finding.
    taken = np.diff(steps, prepend=0)
    return float(taken[rates < _NO_RATE * rates.max() * record.lr_scale].sum() / max(taken.sum(), 1))


def _check_idle(record: RunRecord) -> Finding | None:
    """run.lr_zero: a learning rate of 0 for long, as of a time budget whose schedule ended before the run did."""
    share = _idle_share(record)
    if share < _IDLE:
        return None
    planned = record.events_of(LENGTH_EVENT)
    why = ": the schedule had ended, and its time budget had not" if planned else ""
    evidence = f"the learning rate was 0, or below a thousandth of its peak, for {share:.0%} of the run{why}"
    # As many steps again as were lost, at the least: the position in the schedule is then that of the step.
    remedy = f"continue with a schedule that is not over: {record.command('resume', f'--steps {2 * record.step}')}"
    chart = line_chart({"rate": record.column("lr")}, "step", "rate", zero_y=True)
    severity: Severity = "fatal" if share >= _MOSTLY_IDLE else "warning"
    return Finding("run.lr_zero", severity, evidence, remedy, {"share": share}, (Figure("Learning rate", svg=chart),))


def _gradient_growth(norms: Floats) -> float:
    """Return the median gradient norm of the last quarter over that of the second; the first includes warm-up."""
    quarter = len(norms) // 4
    if quarter < 2:
        return 1.0
    before = float(np.median(norms[quarter : 2 * quarter]))
    return float(np.median(norms[-quarter:])) / max(before, 1e-30)


def _check_gradient(record: RunRecord) -> Finding | None:
    """run.gradient: growth of the gradient norm, and how often it is clipped."""
    steps, norms = record.column("gradient_norm")
    if len(norms) < _FEW:
        return None
    clip, later = record.config.training.clip, norms[len(norms) // 4 :]
    clipped, growth = float((later > clip).mean()) if clip else 0.0, _gradient_growth(norms)
    median = float(np.median(later))
    series = {"gradient norm": (steps, norms)}
    if clip:
        series["clipped above"] = (steps, 0 * steps + clip)
    chart = line_chart(series, "step", "norm", log_y=bool(norms.min() > 0))
    grows = f"; it has grown {growth:.1f} times since the first quarter of the run"
    return Finding.graded(
        "run.gradient",
        f"gradient norm {median:.2g}, above the clip of {clip:g} in {clipped:.0%} of the logged steps",
        (growth > 4, "hint", grows, "watch the loss; if it rises, lower --lr"),
        facts={"median": median, "clipped": clipped, "growth": growth},
        figures=(Figure("Gradient norm", svg=chart, caption="Before clipping."),),
    )


def _check_stability(record: RunRecord, usual_lr: float | None = None) -> Finding | None:
    """run.unstable: steps skipped because of non-finite numbers, and roll-backs, with their causes."""
    refused, roll_backs = record.recent_events("step_refused"), record.recent_events("rolled_back")
    steps = record.step - record.changed_at
    if steps <= 0:
        return None
    since = f" since settings changed at step {record.changed_at:,}" if record.changed_at else ""
    if not (refused or roll_backs):
        return Finding("run.unstable", "fine", f"none of {plural(steps, 'step')}{since} was skipped or rolled back")
    share = len(refused) / steps
    images = Counter(str(name) for row in refused for name in _list_field(row, "images"))
    layers = Counter(str(row["layer"]) for row in refused if row.get("layer"))
    facts = {
        "refused": len(refused),
        "share": share,
        "rolled_back": len(roll_backs),
        "images": dict(images.most_common(10)),
        "layers": dict(layers.most_common(10)),
        "lr_scale": record.lr_scale,
    }
    told = []
    if refused:
        told.append(
            f"{plural(len(refused), 'step')} of {steps:,}{since} ({share:.1%}) skipped, as numbers were not finite"
        )
    if roll_backs:
        reason = str(roll_backs[-1].get("reason", ""))[:160]
        told.append(
            f"{plural(len(roll_backs), 'roll-back')}, the last at step "
            f"{finite_number(roll_backs[-1].get('step')):,.0f}: {reason}"
        )
    remedy = _after_trouble(record, images, layers, bool(roll_backs), usual_lr)
    severity: Severity = "warning" if roll_backs or share > 0.01 else "hint"
    return Finding("run.unstable", severity, "; ".join(told), remedy, facts, (_troubles(refused, roll_backs),))


def _after_trouble(
    record: RunRecord, images: Counter[str], layers: Counter[str], went_back: bool, usual_lr: float | None
) -> str:
    often = [name for name, times in images.most_common(3) if times > 1]
    if often:
        return f"check these images, or train without them: {', '.join(often)}"
    if went_back:
        lr = record.config.optimizer.lr * record.lr_scale
        return f"training continues with a rate of {lr:.2g}; if it happens again: {record.stability_remedy(usual_lr)}"
    if usual_lr and record.config.optimizer.lr * record.lr_scale > _HIGH * usual_lr:
        return record.stability_remedy(usual_lr)
    where = f" (first in {layers.most_common(1)[0][0]})" if layers else ""
    return f"if it continues, compute in fp32{where}: {record.resume_command('--precision fp32')}"


def _troubles(refused: list[dict[str, Any]], roll_backs: list[dict[str, Any]]) -> Figure:
    """Return a table of the first twenty events."""
    rows = [("step", "what", "where", "images", "noise levels")]
    for row in sorted((*refused, *roll_backs), key=lambda row: finite_number(row.get("step")))[:20]:
        back = row in roll_backs
        what = f"rolled back: {row.get('reason', '')}" if back else f"skipped, gradient norm {row.get('gradient_norm')}"
        levels = ", ".join(f"{finite_number(level):.2f}" for level in _list_field(row, "levels"))
        names = ", ".join(map(str, _list_field(row, "images")))
        rows.append((str(row.get("step", "")), what, str(row.get("layer", "")), names[:200], levels[:80]))
    return Figure("Skipped steps and roll-backs", table=rows)


def _list_field(row: Row, name: str) -> list[Any]:
    """Return the list under this name in a row; [] without one."""
    value = row.get(name)
    return value if isinstance(value, list) else []
