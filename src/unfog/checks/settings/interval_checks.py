"""Checks of previews, evaluation, checkpoints, guidance and class labels."""

from __future__ import annotations

import math

from unfog.config.schema import Config
from unfog.data.dataset import Dataset
from unfog.planning.timing import forward_passes, repetitions
from unfog.reporting.findings import Finding
from unfog.reporting.progress import format_duration, format_number

_MOST_ASIDE = 0.2
"""Share of the time that previews and evaluation may take."""
_SHORT_RUN = 500
"""Steps below which that share is only mentioned, as it is over soon."""
_FEW_HELD_OUT = 16
_ENOUGH_TO_HOLD_OUT = 100
"""Images, of fewer of which none is held out."""


def check_run_costs(config: Config, held_out: int, seconds_per_step: float | None) -> Finding:
    """Check the share of the time that previews, evaluation and metrics take, by their forward passes."""
    costs, steps = forward_passes(config, held_out), config.training.images // config.training.batch
    whole = sum(costs.values())
    aside = 1 - costs["training"] / whole
    facts = {f"{name}_share": cost / whole for name, cost in costs.items()}
    said = f"previews take about {format_number(100 * costs['preview'] / whole)}% of the time and evaluation "
    said += f"{format_number(100 * costs['evaluate'] / whole)}%"
    if costs["metrics"]:
        said += f", generating for metrics {format_number(100 * costs['metrics'] / whole)}%"
    if seconds_per_step:
        spent = steps * seconds_per_step * (whole / costs["training"] - 1)
        said, facts["seconds"] = f"{said}, {format_duration(spent)} in all", spent
    if aside <= _MOST_ASIDE:
        return Finding("settings.asides", "fine", said, facts=facts)
    name = max(("preview", "evaluate", "metrics"), key=costs.__getitem__)
    if name == "metrics":
        remedy = f"a lower --evaluate.samples, or --evaluate.metrics-every {steps}: once, at the end"
    else:
        interval = _interval(costs, name, config, steps)
        ends = costs[name] / repetitions(getattr(config, name).every, steps) * 2
        rarely = ends < costs["training"] * _MOST_ASIDE / 2
        remedy = f"--{name}.every {interval}" if rarely else f"a lower --{name}.images"
    return Finding("settings.asides", "warning" if steps >= _SHORT_RUN else "hint", said, remedy, facts)


def _interval(costs: dict[str, float], name: str, config: Config, steps: int) -> int:
    """Return the interval at which one of them takes half of the share that all may take."""
    one = costs[name] / repetitions(getattr(config, name).every, steps)
    often = max(1.0, costs["training"] * _MOST_ASIDE / 2 / one - 2)
    return math.ceil(steps / often)


def check_held_out(config: Config, prepared: Dataset) -> Finding:
    """Check that enough images are held out for a meaningful held-out loss."""
    held, trained = len(prepared.held_out), len(prepared.train)
    used, levels = min(held, config.evaluate.images), config.evaluate.levels
    facts = {"held_out": held, "used": used, "levels": levels}
    if config.evaluate.every < 0:
        return Finding("settings.held_out", "fine", "evaluation is switched off", facts=facts)
    if not held and trained < _ENOUGH_TO_HOLD_OUT:
        said = f"none of {trained} images is held out, as a small set needs all for training; judge by the samples"
        return Finding("settings.held_out", "fine", said, facts=facts)
    if not held:
        said = "nothing is held out, so memorization would go unnoticed"
        return Finding("settings.held_out", "hint", said, "--data.held-out 0.05", facts)
    said = f"the held-out loss is over {used} images at {levels} noise levels each"
    if used >= _FEW_HELD_OUT:
        return Finding("settings.held_out", "fine", said, facts=facts)
    if held >= _FEW_HELD_OUT:
        remedy = f"--evaluate.images {min(64, held)}"
    else:
        share = min(0.5, math.ceil(100 * _FEW_HELD_OUT / (held + trained)) / 100)
        remedy = f"--data.held-out {share:g}"
    return Finding("settings.held_out", "hint", f"{said}, too few for a reliable loss", remedy, facts)


def check_checkpoints(config: Config, seconds_per_step: float | None) -> Finding:
    """Check how much training a crash can lose."""
    every, steps = config.checkpoint.every, config.training.images // config.training.batch
    lost = min(every, steps) if every > 0 else steps
    hours = None if seconds_per_step is None else lost * seconds_per_step / 3600
    facts = {"every": every, "steps_to_lose": lost, "hours_to_lose": hours}
    said = f"a crash loses {lost:,} of {steps:,} steps at most"
    said += "" if hours is None else f", {format_duration(hours * 3600)}"
    long = steps > 2000 and lost > steps / 2 if hours is None else hours > 1
    if long:
        at = 1000 if not seconds_per_step else max(1, min(1000, int(1200 / seconds_per_step)))
        return Finding("settings.checkpoints", "warning", said, f"--checkpoint.every {at}", facts)
    return Finding("settings.checkpoints", "fine", said, facts=facts)


def check_guidance(config: Config) -> Finding:
    """Check that guidance has an effect and that labels are learned."""
    facts = {"guidance": config.guidance, "label_dropout": config.label_dropout, "classes": len(config.classes)}
    if config.classes and config.label_dropout == 1:
        said = "label_dropout = 1 hides every label, so classes are not learned"
        return Finding("settings.guidance", "warning", said, "--label-dropout 0.1", facts)
    if config.guidance != 1 and config.classes and config.label_dropout == 0:
        said = f"guidance = {config.guidance:g} has no effect, as the network never sees an image without its class"
        return Finding("settings.guidance", "warning", said, "--label-dropout 0.1", facts)
    if config.guidance > 10 and config.classes:
        said = f"guidance = {config.guidance:g} oversaturates colours and leaves little variety"
        return Finding("settings.guidance", "hint", said, "--guidance 1.5", facts)
    if config.classes and config.label_dropout > 0.5:
        said = f"{100 * config.label_dropout:.0f}% of the images lose their class, so classes are learned slowly"
        return Finding("settings.guidance", "hint", said, "--label-dropout 0.1", facts)
    used = f"guidance {config.guidance:g}, {100 * config.label_dropout:.0f}% of labels hidden in training"
    return Finding("settings.guidance", "fine", used if config.classes else "no classes", facts=facts)


def check_labels(config: Config, prepared: Dataset) -> Finding:
    """Check that every label is a class of the network."""
    rows, sets = len(config.classes), [images for images in (prepared.train, prepared.held_out) if len(images)]
    found = [images.labels for images in sets if images.labels is not None]
    if not rows:
        if found:
            said = "the images have labels, and the network has no classes"
            return Finding("settings.labels", "fatal", said, "--data.labels none")
        return Finding("settings.labels", "fine", "no classes")
    low, high = min(int(each.min()) for each in found) if found else -1, max((int(e.max()) for e in found), default=-1)
    facts = {"classes": rows, "lowest": low, "highest": high}
    said = f"labels {low} to {high} for {rows} classes and the null class"
    if len(found) != len(sets) or low < 0 or high >= rows:
        return Finding("settings.labels", "fatal", said, "--data.labels folders reads them again", facts)
    return Finding("settings.labels", "fine", said, facts=facts)
