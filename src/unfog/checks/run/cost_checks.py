"""Checks of what a run costs: time besides training, speed, memory, unused images and the batch."""

from __future__ import annotations

import math
import shlex
from functools import partial

import numpy as np

from unfog.checks.run.run_record import RunRecord
from unfog.config.schema import Config
from unfog.data.settings import Data
from unfog.planning.intervals import round_down_to_125
from unfog.reporting.charts import line_chart
from unfog.reporting.findings import Figure, Finding, Severity
from unfog.reporting.progress import format_duration
from unfog.reporting.records import finite_number, smoothed
from unfog.settings import is_auto
from unfog.text import plural, without_secrets
from unfog.training.statistics import batch_advice
from unfog.training.statistics import noise_scale as ratio_of_means

# A batch so many times smaller or larger than the gradient noise scale is worth a word.
_UNLIKE = 8.0
# Shares of the time spent waiting for data from which on it is worth a word, and a warning.
_WAITS, _STARVES = 0.05, 0.10
# The same for previews, evaluations and checkpoints.
_A_LOT, _MOST = 0.25, 0.50
# Seconds of them that are worth a warning.
_A_WHILE = 20.0
# Share that one of these should cost.
_AIM = 0.05
# Speed of the last third of a run over that of the first, below which it has slowed down.
_SLOWER = 0.7
# Lines of metrics that a trend needs.
_FEW = 9


def check_costs(record: RunRecord) -> list[Finding]:
    """Check what slows the run down or takes memory, images that it leaves unused, and the batch."""
    costs = (_check_data_wait, _check_overhead, _check_speed, _check_memory, _check_unused_images, _check_noise_scale)
    return [finding for check in costs if (finding := check(record)) is not None]


def _check_data_wait(record: RunRecord) -> Finding | None:
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
    remedy = f"decode them once: {_pack(record.config)}, and train on OUT; or --data.cache disk"
    return Finding.graded(
        "run.data_wait",
        f"training waited for images {share:.1%} of the time",
        (share >= _STARVES, "warning", "", remedy),
        (share >= _WAITS, "hint", "", remedy),
        facts={"share": share},
        figures=(Figure("Waiting for data", svg=chart),),
    )


def _pack(config: Config) -> str:
    """Return the `unfog pack` command for this run's size, channels, background and range."""
    data, source = config.data, shlex.quote(without_secrets(config.source))
    command = f"unfog pack {source} OUT --size {data.size} --data.channels {data.channels}"
    if data.background != Data().background:
        command += f" --data.background {shlex.quote(data.background)}"
    if not is_auto(data, "range"):
        command += f" --data.range {' '.join(f'{value:.17g}' for value in data.range)}{' --data.clip' * data.clip}"
    return command


def _check_overhead(record: RunRecord) -> Finding | None:
    """run.overhead: share of the time of previews, evaluations, checkpoints and metrics, with better intervals."""
    if record.seconds < 1 or record.step < 1:
        return None
    config, rows = record.config, [("", "times", "seconds", "share of the run", "interval", "interval for 5%")]
    asides = (
        ("preview", "preview.every", config.preview.every, _spent(record, "preview", "seconds")),
        ("evaluate", "evaluate.every", config.evaluate.every, _spent(record, "evaluated", "seconds")),
        ("checkpoint", "checkpoint.every", config.checkpoint.every, _spent(record, "checkpoint", "snapshot_seconds")),
        ("metrics", "evaluate.metrics-every", config.evaluate.metrics_every, _spent(record, "measured", "seconds")),
    )
    seconds = {name: sum(spent) for name, _, _, spent in asides}
    total = sum(seconds.values())
    share = min(1.0, total / record.seconds)
    speeds = record.column("images_per_second")[1]
    step = record.batch / float(np.median(speeds)) if len(speeds) and speeds.min() > 0 else record.seconds / record.step
    changes, shares = [], []
    for name, flag, now, spent in asides:
        if not spent:
            continue
        cost, times = seconds[name], len(spent)
        # At least four times in the run.
        better = min(_round_up(cost / times / (_AIM * step)), round_down_to_125(record.steps / 4))
        rows.append((name, f"{times:,}", f"{cost:,.1f}", f"{cost / record.seconds:.1%}", f"{now}", f"{better}"))
        shares.append(f"{name} {min(1.0, cost / record.seconds):.0%}")
        if cost > _AIM * record.seconds and better > now > 0:
            changes.append(f"--{flag} {better}")
    took = f"{share:.0%} of {format_duration(record.seconds)} ({', '.join(shares)})"
    over = record.step >= record.steps
    remedy = f"make them rarer next time: {' '.join(changes)}" if over else record.command("resume", " ".join(changes))
    worth = share >= _A_LOT and bool(changes)
    return Finding.graded(
        "run.overhead",
        f"previews, evaluations and checkpoints took {took}",
        (worth and share >= _MOST and total >= _A_WHILE, "warning", "", remedy),
        (worth, "hint", "", remedy),
        facts={"share": share, "seconds": seconds},
        figures=(Figure("Time besides training", table=rows),),
    )


def _spent(record: RunRecord, kind: str, field: str) -> list[float]:
    told = (finite_number(row.get(field)) for row in record.events_of(kind))
    return [seconds for seconds in told if seconds >= 0]


def _round_up(x: float) -> int:
    """Return the smallest of 1, 2, 5, 10, 20, 50, … that is at least x."""
    power = 10 ** math.floor(math.log10(max(x, 1.0)))
    return int(next(m * power for m in (1, 2, 5, 10) if m * power >= x))


def _check_speed(record: RunRecord) -> Finding | None:
    """run.pace: check that training does not slow down, as by heat or by another program."""
    steps, speeds = record.column("images_per_second")
    if len(speeds) < _FEW:
        return None
    # Not the first line, which has the compilation and the filling of caches in it.
    third = len(speeds) // 3
    before, now = float(np.median(speeds[1 : 1 + third])), float(np.median(speeds[-third:]))
    chart = line_chart({"images a second": (steps, speeds)}, "step", "images a second", zero_y=True)
    finding = partial(Finding, "run.pace", facts={"before": before, "now": now}, figures=(Figure("Speed", svg=chart),))
    if now >= _SLOWER * before:
        return finding("fine", f"{now:,.0f} images a second, steady")
    evidence = f"training became slower: {now:,.0f} images a second in the last third, {before:,.0f} in the first"
    remedy = (
        "check for other programs on the machine, for overheating (nvidia-smi -q -d PERFORMANCE), and for a slow disk"
    )
    return finding("hint", evidence, remedy)


def _check_memory(record: RunRecord) -> Finding | None:
    """run.memory: report out-of-memory errors that shrank the micro-batch."""
    shortages = record.events_of("out_of_memory")
    if not shortages:
        return None
    now, checkpointing = finite_number(shortages[-1].get("microbatch")), bool(shortages[-1].get("checkpointing"))
    now = int(now) if now >= 1 else 1
    how = "one image at a time, with gradient checkpointing" if checkpointing else f"{plural(now)} at a time"
    again = f"memory ran out {plural(len(shortages), 'time')}"
    evidence = f"{again}; training continues with {how}, at the same batch size"
    remedy = f"next time start with --microbatch {now}" + " --training.checkpointing" * checkpointing
    facts = {"times": len(shortages), "microbatch": now, "checkpointing": checkpointing}
    return Finding("run.memory", "hint", evidence, remedy, facts)


def _check_unused_images(record: RunRecord) -> Finding | None:
    """run.data: share of the images that could not be used."""
    found, used = finite_number(record.data.get("found")), finite_number(record.data.get("used"))
    if not (found > 0 and used >= 0):
        return None
    lost = max(0.0, found - used)
    facts = {"found": int(found), "used": int(used)}
    if not lost:
        return Finding("run.data", "fine", f"each of {plural(int(found))} is used", "", facts)
    severity: Severity = "warning" if lost > 0.05 * found else "hint"
    evidence = f"{plural(int(lost))} of {int(found):,} could not be used ({lost / found:.1%})"
    return Finding("run.data", severity, evidence, f"{record.path / 'data.json'} lists them with the reasons", facts)


def _check_noise_scale(record: RunRecord) -> Finding | None:
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
    facts = {"noise_scale": scale, "batch": batch}
    if scale is None:
        evidence = "the gradient of a batch is almost only noise, so its scale cannot be measured"
        return Finding("run.noise_scale", "hint", evidence, _larger(record, _UNLIKE * batch), facts)
    series = {"measured": (steps, scales), "smoothed": (steps, smoothed(scales)), "batch": (steps, 0 * steps + batch)}
    chart = line_chart(series, "step", "images", log_y=True, faint=("measured",))
    better = _power_of_two(2 * max(scale, 1))
    # The rate follows the square root of the batch, as the automatic one does.
    smaller = (
        f"a smaller batch learns as much per step: --batch {better}, with the learning rate scaled by the "
        f"square root: --lr {record.config.optimizer.lr * math.sqrt(better / batch):.2g}"
    )
    return Finding.graded(
        "run.noise_scale",
        batch_advice(scale, batch),
        (batch > _UNLIKE * scale, "hint", "", smaller),
        (scale > _UNLIKE * batch, "hint", "", _larger(record, max(1, min(scale / 2, _UNLIKE * batch)))),
        facts=facts,
        figures=(Figure("Gradient noise scale", svg=chart, caption="Images in which signal and noise are equal."),),
    )


def _larger(record: RunRecord, images: float) -> str:
    """Return the advice to train with a batch of about so many images."""
    batch, better = record.batch, _power_of_two(images)
    return (
        f"a larger batch learns about as much per image, where time allows: --batch {better} --microbatch "
        f"{record.config.training.microbatch or batch} --lr "
        f"{record.config.optimizer.lr * math.sqrt(better / batch):.2g}"
    )


def _power_of_two(images: float) -> int:
    return int(2 ** max(0, round(math.log2(images))))
