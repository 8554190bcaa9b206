"""Checks of what a run spends its time on, of unused images, and of the batch size."""

from __future__ import annotations

import math
import shlex

import numpy as np

from unfog.checks.run.run_record import RunRecord
from unfog.config.schema import Config
from unfog.data.settings import Data
from unfog.reporting.charts import line_chart
from unfog.reporting.findings import Figure, Finding, Severity
from unfog.reporting.progress import format_duration, plural
from unfog.reporting.records import finite_number
from unfog.reporting.report_charts import smoothed
from unfog.text import without_secrets
from unfog.training.statistics import batch_advice
from unfog.training.statistics import noise_scale as ratio_of_means

_WAITS, _STARVES = 0.05, 0.10
"""Shares of the time spent waiting for data from which on it is worth a word, and a warning."""
_A_LOT, _MOST = 0.25, 0.50
"""The same for previews, evaluations and checkpoints."""
_A_WHILE = 20.0
"""Seconds of them that are worth a warning."""
_AIM = 0.05
"""Share that one of these should cost."""
_SLOWER = 0.7
"""Speed of the last third of a run over that of the first, below which it has slowed down."""
_FEW = 9
"""Lines of metrics that a trend needs."""
_UNLIKE = 8.0
"""A batch so many times smaller or larger than the gradient noise scale is worth a word."""


def check_data_wait(record: RunRecord) -> Finding | None:
    """run.data_wait: share of the time that the network waits for images."""
    steps, waits = record.column("data_wait")
    if not len(waits):
        return None
    # Each line covers the steps since the one before; the first includes the cold start, so it does not count.
    weights = np.diff(steps, prepend=0.0).clip(0.0)
    if len(waits) > 3:
        weights[0] = 0.0
    share = float((waits * weights).sum() / max(weights.sum(), 1e-9))
    chart = line_chart({"waiting": (steps, waits)}, "step", "share of the time", zero_y=True)
    facts = {"share": share}
    exhibits = (Figure("Waiting for data", svg=chart),)
    evidence = f"training waited for images {share:.1%} of the time"
    if share < _WAITS:
        return Finding("run.data_wait", "fine", evidence, "", facts, exhibits)
    remedy = f"decode them once: {_pack(record.config)}, and train on OUT; or --data.cache disk"
    severity: Severity = "warning" if share >= _STARVES else "hint"
    return Finding("run.data_wait", severity, evidence, remedy, facts, exhibits)


def _pack(config: Config) -> str:
    """Return the `unfog pack` command for this run's size, channels and background."""
    data, source = config.data, shlex.quote(without_secrets(config.source))
    command = f"unfog pack {source} OUT --size {data.size} --data.channels {data.channels}"
    if data.background != Data().background:
        command += f" --data.background {shlex.quote(data.background)}"
    return command


def check_overhead(record: RunRecord) -> Finding | None:
    """run.overhead: share of the time of previews, evaluations, checkpoints and metrics, with better intervals."""
    if record.seconds < 1 or record.step < 1:
        return None
    costs = {
        "preview": _spent(record, "preview", "seconds"),
        "evaluate": _spent(record, "evaluated", "seconds"),
        "checkpoint": _spent(record, "checkpoint", "snapshot_seconds"),
        "metrics": _spent(record, "measured", "seconds"),
    }
    config = record.config
    intervals = {f"{name}.every": getattr(config, name).every for name in costs if name != "metrics"}
    intervals["evaluate.metrics-every"] = config.evaluate.metrics_every
    total = sum(sum(spent) for spent in costs.values())
    share = min(1.0, total / record.seconds)
    speeds = record.column("images_per_second")[1]
    step = record.batch / float(np.median(speeds)) if len(speeds) and speeds.min() > 0 else record.seconds / record.step
    rows = [("", "times", "seconds", "share of the run", "interval", "interval for 5%")]
    changes = []
    for (name, spent), (flag, now) in zip(costs.items(), intervals.items()):
        if not spent:
            continue
        # At least four times in the run.
        better = min(_round_up(sum(spent) / len(spent) / (_AIM * step)), _round_down(record.steps / 4))
        rows.append(
            (name, f"{len(spent):,}", f"{sum(spent):,.1f}", f"{sum(spent) / record.seconds:.1%}", f"{now}", f"{better}")
        )
        if sum(spent) > _AIM * record.seconds and better > now > 0:
            changes.append(f"--{flag} {better}")
    facts = {"share": share, "seconds": {name: sum(spent) for name, spent in costs.items()}}
    parts = ", ".join(f"{name} {min(1.0, sum(spent) / record.seconds):.0%}" for name, spent in costs.items() if spent)
    evidence = f"previews, evaluations and checkpoints took {share:.0%} of {format_duration(record.seconds)} ({parts})"
    exhibits = (Figure("Time besides training", table=rows),)
    if share < _A_LOT or not changes:
        return Finding("run.overhead", "fine", evidence, "", facts, exhibits)
    severity: Severity = "warning" if share >= _MOST and total >= _A_WHILE else "hint"
    over = record.step >= record.steps
    remedy = f"less often next time: {' '.join(changes)}" if over else record.command("resume", " ".join(changes))
    return Finding("run.overhead", severity, evidence, remedy, facts, exhibits)


def _spent(record: RunRecord, kind: str, field: str) -> list[float]:
    told = (finite_number(row.get(field)) for row in record.events_of(kind))
    return [seconds for seconds in told if seconds >= 0]


def _round_up(x: float) -> int:
    """Return the smallest of 1, 2, 5, 10, 20, 50, … that is at least x."""
    power = 10 ** math.floor(math.log10(max(x, 1.0)))
    return int(next(m * power for m in (1, 2, 5, 10) if m * power >= x))


def _round_down(x: float) -> int:
    """Return the largest of 1, 2, 5, 10, … that is at most x; at least 1."""
    power = 10 ** math.floor(math.log10(max(x, 1.0)))
    return int(next(m * power for m in (5, 2, 1) if m * power <= max(x, 1.0)))


def check_speed(record: RunRecord) -> Finding | None:
    """run.pace: check that training does not slow down, as by heat or by another program."""
    steps, speeds = record.column("images_per_second")
    if len(speeds) < _FEW:
        return None
    third = len(speeds) // 3
    before, now = float(np.median(speeds[1 : 1 + third])), float(np.median(speeds[-third:]))
    chart = line_chart({"images a second": (steps, speeds)}, "step", "images a second", zero_y=True)
    exhibits = (Figure("Speed", svg=chart),)
    facts = {"before": before, "now": now}
    if now >= _SLOWER * before:
        return Finding("run.pace", "fine", f"{now:,.0f} images a second, steady", "", facts, exhibits)
    evidence = f"training became slower: {now:,.0f} images a second in the last third, {before:,.0f} in the first"
    remedy = "look for another program on the machine, for heat (nvidia-smi -q -d PERFORMANCE), or for a slow disk"
    return Finding("run.pace", "hint", evidence, remedy, facts, exhibits)


def check_memory(record: RunRecord) -> Finding | None:
    """run.memory: report out-of-memory errors that shrank the micro-batch."""
    shortages = record.events_of("out_of_memory")
    if not shortages:
        return None
    last = shortages[-1]
    now = int(finite_number(last.get("microbatch"))) if finite_number(last.get("microbatch")) >= 1 else 1
    facts = {"times": len(shortages), "microbatch": now, "checkpointing": bool(last.get("checkpointing"))}
    how = (
        "one image at a time, with gradient checkpointing"
        if facts["checkpointing"]
        else plural(now, "image") + " at a time"
    )
    evidence = (
        f"memory did not suffice {plural(len(shortages), 'time')}; training continues with {how}, at the same "
        f"batch size"
    )
    remedy = f"next time start with --microbatch {now}"
    remedy += " --training.checkpointing" if facts["checkpointing"] else ""
    return Finding("run.memory", "hint", evidence, remedy, facts)


def check_unused_images(record: RunRecord) -> Finding | None:
    """run.data: share of the images that could not be used."""
    found, used = finite_number(record.data.get("found")), finite_number(record.data.get("used"))
    if not (found > 0 and used >= 0):
        return None
    lost = max(0.0, found - used)
    facts = {"found": int(found), "used": int(used)}
    if not lost:
        return Finding("run.data", "fine", f"all {int(found):,} images are used", "", facts)
    severity: Severity = "warning" if lost > 0.05 * found else "hint"
    evidence = f"{plural(int(lost), 'image')} of {int(found):,} could not be used ({lost / found:.1%})"
    return Finding("run.data", severity, evidence, f"{record.path / 'data.json'} names each and why", facts)


def check_noise_scale(record: RunRecord) -> Finding | None:
    """run.noise_scale: compare the batch with the gradient noise scale (McCandlish et al. 2018, appendix A.1).

    Far below it, a larger batch makes the same progress from as many images; far above it, a smaller one does.
    """
    steps, scales = record.column("noise_scale")
    steps, scales = steps[scales > 0], scales[scales > 0]
    parts = ("gradient_signal", "gradient_noise")
    measured = [row for row in record.metrics if all(math.isfinite(finite_number(row.get(part))) for part in parts)]
    if len(measured) < 3:
        return None
    scale, batch = ratio_of_means(measured[len(measured) // 2 :]), record.batch
    if scale is None:
        evidence = "the gradient noise is too large to measure: a batch is almost only noise"
        unknown = {"noise_scale": None, "batch": batch}
        return Finding("run.noise_scale", "hint", evidence, _larger(record, _UNLIKE * batch), unknown)
    series = {"measured": (steps, scales), "smoothed": (steps, smoothed(scales)), "batch": (steps, 0 * steps + batch)}
    chart = line_chart(series, "step", "images", log_y=True, faint=("measured",))
    exhibits = (Figure("Gradient noise scale", svg=chart, caption="Images in which signal and noise are equal."),)
    facts = {"noise_scale": scale, "batch": batch}
    evidence = batch_advice(scale, batch)
    if batch > _UNLIKE * scale:
        better = _power_of_two(2 * max(scale, 1))
        remedy = (
            f"a smaller batch learns as much from a step: --batch {better}, and the rate by the square root: "
            f"--lr {record.config.optimizer.lr * math.sqrt(better / batch):.2g}"
        )
        return Finding("run.noise_scale", "hint", evidence, remedy, facts, exhibits)
    if scale > _UNLIKE * batch:
        remedy = _larger(record, min(scale / 2, _UNLIKE * batch))
        return Finding("run.noise_scale", "hint", evidence, remedy, facts, exhibits)
    return Finding("run.noise_scale", "fine", evidence, "", facts, exhibits)


def _larger(record: RunRecord, images: float) -> str:
    """Return the advice to train with a batch of about so many images."""
    batch, better = record.batch, _power_of_two(images)
    return (
        f"where time allows, a larger batch learns about as much from an image: --batch {better} "
        f"--microbatch {record.config.training.microbatch or batch} "
        f"--lr {record.config.optimizer.lr * math.sqrt(better / batch):.2g}"
    )


def _power_of_two(images: float) -> int:
    return int(2 ** max(0, round(math.log2(images))))
