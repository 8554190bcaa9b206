"""Model card of an export: README.md with the front matter that the Hugging Face Hub reads, and a grid of samples."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from unfog._version import __version__
from unfog.config.spec_strings import format_spec
from unfog.evaluation.metrics import MetricResult
from unfog.files.safe_files import list_folder
from unfog.inference.compare_images import real_text
from unfog.inference.evaluation_files import Evaluation, describe_sampling
from unfog.inference.guide import is_guided_by_itself
from unfog.inference.loaded_run import LoadedRun
from unfog.process.machine_key import machine_key
from unfog.process.run_folder import source_name
from unfog.reporting.records import read_object
from unfog.text import plural, sanitize
from unfog.values.condition_format import TEXT
from unfog.values.condition_kinds import ColumnFacts, kind_of
from unfog.values.kinds.image_kinds import image_columns
from unfog.values.value_maps import describe

GRID = "samples.png"
_LARGEST_REPORT = 2**30  # bytes of data.json, which names every file
_CLASSES_NAMED = 100
_LIBRARIES = {"diffusers": "diffusers", "onnx": "onnx"}  # other formats are of torch
_FORMATS = {"run": "a run of EMA weights alone"}  # words on the card, where the name of a format says too little
_NO_TASK = "other"  # of the Hub's tasks, for results, which need one


class CardSettings(NamedTuple):
    """Texts of a model card that are not of the run."""

    format: str
    name: str
    """Of the repository on the Hub; "" without one."""
    license: str
    """Identifier of the Hub, such as cc-by-4.0; "" leaves it to the user."""
    grid: str
    """Caption of the grid of samples."""
    usage: str
    """Markdown that shows how to sample from the export."""
    conditions: Sequence[Sequence[str]] = ()
    """Rows of a table of the conditions besides the class: name, kind, values and, with ONNX, the input."""


def model_card(run: LoadedRun, settings: CardSettings) -> str:
    """Return the README.md of an export."""
    title = sanitize(settings.name.rpartition("/")[2] or run.path.resolve().name)
    evaluations = _evaluations(run, draws=settings.format != "denoiser")
    every = [(one, here) for evaluation, here in evaluations for one in evaluation.measured]
    # The Hub knows metrics by one word; "kid 48x80" is of one size.
    measured = [(one, here) for one, here in every if one.value is not None and " " not in one.metric]
    data, task = _data(run), _task(run.config.columns)
    front = {
        **({"license": settings.license} if settings.license else {}),
        "library_name": _LIBRARIES.get(settings.format, "pytorch"),
        **({"pipeline_tag": task} if task != _NO_TASK else {}),
        "tags": ["unfog", "diffusion", *_conditional_tags(run)],
        "metrics": sorted({one.metric for one, _ in measured}),
        "model-index": [{"name": title, "results": _results(task, data.name, measured)}],
    }
    if not measured:  # the Hub refuses an index without results
        del front["metrics"], front["model-index"]
    sections = [
        f"# {_escaped(title)}",
        f"An image diffusion model, trained with Unfog {__version__}: step "
        f"{run.step:,}, {_weights(run)} weights, as {_FORMATS.get(settings.format, settings.format)}.",
        *_guide_section(run),
        f"![Samples of the model]({GRID})\n\n*{_escaped(settings.grid)}*",
        f"## How to use it\n\n{settings.usage}",
        *_conditions_section(settings.conditions),
        f"## Data\n\n{_table(('', ''), data.rows)}",
        f"## Training\n\n{_table(('', ''), _training(run))}",
        _metrics_section(evaluations, "--guide none" if settings.format != "denoiser" else "--guidance 1"),
        _license_section(settings.license),
    ]
    return f"---\n{to_yaml(front)}---\n\n" + "\n\n".join(sections) + "\n"


def _weights(run: LoadedRun) -> str:
    return run.weights if run.ema is None else f"{run.weights} of width {run.ema:g}"


def _guide_section(run: LoadedRun) -> list[str]:
    """Return a sentence on the guide of the run, which an export lacks; [] if it has none either."""
    if not is_guided_by_itself(run):
        return []
    return [
        "Samples of the run that it is of are guided by an earlier EMA (`guide = auto`), which this export lacks: its "
        "samples are not guided."
    ]


def _task(columns: Sequence[ColumnFacts]) -> str:
    """Return the task of the Hub that a run with these conditions, besides the class, does; `_NO_TASK` if it has none.

    Classes alone have no task of their own, and models with them are found among the unconditional ones.
    """
    if not columns:
        return "unconditional-image-generation"
    if any(one.kind == TEXT for one in columns):
        return "text-to-image"
    return "image-to-image" if image_columns(columns) else _NO_TASK


def _conditional_tags(run: LoadedRun) -> list[str]:
    return ["class-conditional"] * bool(run.config.classes) + ["conditional"] * bool(run.config.columns)


class _Data(NamedTuple):
    name: str
    rows: list[tuple[str, str]]


def _data(run: LoadedRun) -> _Data:
    """Describe the images, without their location and file names."""
    config, report = run.config, read_object(run.path / "data.json", _LARGEST_REPORT)
    name = sanitize(source_name(config.source)) or "images"
    counts = report.get("class_counts")
    counts = counts if isinstance(counts, dict) else {}
    shown = [sanitize(name) for name in config.classes[:_CLASSES_NAMED]]
    more = [f"{len(config.classes) - _CLASSES_NAMED:,} more"] if len(config.classes) > _CLASSES_NAMED else []
    named = [f"{one} ({counts[one]:,})" if isinstance(counts.get(one), int) else one for one in shown]
    used, held_out = (report.get(key) for key in ("used", "held_out"))
    known = isinstance(used, int) and isinstance(held_out, int)
    values = config.image_format.values
    sizes = [f"{one.sides} ({plural(one.images)})" for one in config.size_buckets]
    rows = [
        ("source", name),
        ("images", f"{used:,}, of which {held_out:,} were held out of training" if known else "not recorded"),
        ("size", str(config.image_format)),
        *([("trained in sizes", ", ".join(sizes))] if sizes else []),
        *([("-1 to 1 of the model", describe(values.maps))] if values.maps else []),
        *([("seamless along", " and ".join(config.data.wrapped))] if config.data.wrapped else []),
        *([("unknown values", f"{config.data.unknown_share:.2%}, left out")] if config.data.has_unknown else []),
        ("classes", ", ".join([*named, *more]) or "none"),
        *((f"condition {sanitize(one.name)}", _condition(one)) for one in config.columns),
    ]
    return _Data(name, rows)


def _condition(facts: ColumnFacts) -> str:
    """Describe a condition: its kind, and its range or categories in the training images."""
    return f"{facts.kind}, {sanitize(kind_of(facts.kind).evidence(facts))}"


def _training(run: LoadedRun) -> list[tuple[str, str]]:
    config, training = run.config, run.config.training
    parameters = sum(p.numel() for p in run.network.parameters())
    diffusion = config.diffusion
    parts = {name: getattr(diffusion, name) for name in ("path", "schedule", "target", "weighting", "loss")}
    started = source_name(config.init.folder) if config.init.folder else ""
    rows = {
        "network": f"{format_spec(config.network)}, {parameters / 1e6:.2f}M parameters",
        "objective": ", ".join(f"{name} {format_spec(part)}" for name, part in parts.items()),
        "started from": sanitize(started),
        "autoencoder": config.representation.summary(),
        "steps, batch": f"{plural(run.step, 'step')} of {plural(training.batch)}",
        "optimizer": f"{format_spec(config.optimizer.method)}, learning rate {config.optimizer.lr:g}",
        "EMA": format_spec(config.ema),
        "precision, seed": f"{training.precision}, {training.seed}",
        "sampler": f"{config.sampler.kind}, {plural(config.sampler.steps, 'step')}, guidance {config.usual_guidance:g}",
    }
    return [(name, value) for name, value in rows.items() if value]


def _evaluations(run: LoadedRun, draws: bool) -> list[tuple[Evaluation, bool]]:
    """Return the evaluations of exactly these weights, newest first, each metric from the newest one alone.

    True stands for those that were measured on this machine: others came with the run, which may be a stranger's.

    What was measured on samples of a guide is left out, as an exported model has none. So is what was measured with any
    guidance if the export does not draw by itself, as that is of no single output of its network.
    """
    found: list[tuple[Evaluation, bool]] = []
    seen: set[tuple[str, str]] = set()
    there = list_folder(run.path / "evaluations", run.path)
    stored = (path for path in there if path.name.startswith(f"{run.step:08d}-") and path.suffix == ".json")
    # By time, as the names end in digests, which have no order.
    for path in sorted(stored, key=lambda path: path.stat().st_mtime, reverse=True):
        evaluation = Evaluation.read(path)
        # A run has several EMAs at one step, and a figure of another is not one of the exported weights.
        if evaluation is None or evaluation.drawn.get("weights") != _weights(run):
            continue
        guided = "guide" in evaluation.drawn or (not draws and evaluation.drawn.get("guidance", 1) != 1)
        new = [
            one
            for one in evaluation.measured
            if _valid(one) and (one.metric, one.features) not in seen and not (guided and one.drawn)
        ]
        seen.update((one.metric, one.features) for one in new)
        obeyed = evaluation.obeys or evaluation.truth
        judged = bool(obeyed) and not guided and not any(one.judge or one.truth for one, _ in found)
        valued = bool(evaluation.worth) and not any(one.worth for one, _ in found)
        if new or judged or valued:
            said = Evaluation(evaluation.step, evaluation.drawn, new)
            said = said if guided else replace(said, copies=evaluation.copies, verdict=evaluation.verdict)
            said = (
                replace(said, obeys=evaluation.obeys, judge=evaluation.judge, truth=evaluation.truth)
                if judged
                else said
            )
            said = replace(said, worth=evaluation.worth) if valued else said
            found.append((said, Evaluation.read(path, machine_key()) is not None))
    return found


def _valid(one: MetricResult) -> bool:
    """Return True unless a stored result, which anybody may have edited, has a value of another type."""
    numbers = [one.value, one.low, one.high, one.error, one.real, one.real_low, one.real_high]
    finite = all(n is None or (isinstance(n, float | int) and math.isfinite(n)) for n in numbers)
    counted = all(isinstance(n, int) for n in (one.n, one.n_reference))
    return finite and counted and all(isinstance(text, str) for text in (one.metric, one.features, one.resize))


def _metrics_section(evaluations: Sequence[tuple[Evaluation, bool]], unguided: str) -> str:
    if not evaluations:
        return f"## Metrics\n\nNot measured. `unfog evaluate RUN {unguided}` measures them; then export again."
    texts = []
    for one, here in evaluations:
        rows = [_metric_row(metric) for metric in one.measured]
        head = ("metric", "value", "standard error", "95% interval", "real images", "n", "reference", "features")
        copies = "; ".join(f"by {found['by']}: {found['evidence']}" for found in one.copies)
        how = sanitize(describe_sampling(one.drawn, without="reference"))
        texts += [
            _escaped(sanitize(one.verdict)),
            _table(head, rows) if rows else "",
            *_condition_tables(one),
            f"Samples: {_escaped(how)}.",
            "" if here else "These values came with the run; the machine that wrote this card has not measured them.",
            f"Copies of training images, {_escaped(sanitize(copies))}." if copies else "",
        ]
    note = "*Real images* is the value that other real images reach. Errors are from the sampling of images."
    return "\n\n".join(["## Metrics", *filter(None, texts), note])


def _condition_tables(evaluation: Evaluation) -> list[str]:
    """Return the tables on conditions as Markdown; [] if somebody has edited values into ones of another type."""
    texts = list[str]()
    with suppress(TypeError, ValueError, AttributeError):
        for said, rows in evaluation.condition_tables():
            shown = [[sanitize(cell) for cell in row] for row in rows]
            texts.append(f"{_escaped(sanitize(said))}\n\n{_table(shown[0], shown[1:])}")
    return texts


def _metric_row(one: MetricResult) -> tuple[str, ...]:
    value, error = ("" if number is None else f"{number:.4g}" for number in (one.value, one.error))
    counts = (f"{one.n:,}", f"{one.n_reference:,}" if one.n_reference else "")
    features = "" if one.features == "none" else f"{one.features}, resize {one.resize}"
    return one.metric, value or "refused", error, one.interval(), real_text(one, 4), *counts, features


def _results(task: str, dataset: str, measured: Sequence[tuple[MetricResult, bool]]) -> list[dict[str, Any]]:
    """Return the results of the Hub's model-index; a name carries the error, for which the index has no field."""
    metrics = []
    for one, here in measured:
        facts = [f"n = {one.n:,}"]
        facts += [f"features {one.features}"] if one.features != "none" else []
        facts += [f"standard error {one.error:.3g}"] if one.error is not None else []
        facts += [f"95% {one.low:.4g} to {one.high:.4g}"] if one.low is not None and one.high is not None else []
        facts += [] if here else ["not measured on the machine that wrote this card"]
        metrics.append({"type": one.metric, "value": one.value, "name": f"{one.metric} ({', '.join(facts)})"})
    return [{"task": {"type": task}, "dataset": {"name": dataset, "type": dataset}, "metrics": metrics}]


def _conditions_section(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the section on conditions besides the class; [] without any."""
    if not rows:
        return []
    head = ("name", "kind", "values", "input of the graph")[: len(rows[0])]
    said = "Numbers are in the units of the source. None, NaN and an omitted condition leave it open"
    graph = "; in the graph NaN, or -1 for a category, leaves it open" if len(head) == 4 else ""
    return [f"## Conditions\n\n{_table(head, rows)}\n\n{said}{graph}."]


def _license_section(name: str) -> str:
    if name:
        return f"## Licence\n\n{name}, as its author has stated. Unfog, which trained it, is Apache-2.0."
    return (
        "## Licence\n\nNone is stated. Before you share this model, add a line `license: …` to the top of this file; "
        "what the training images permit decides."
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_escaped(cell) for cell in line) + " |" for line in lines)


def _escaped(text: str) -> str:
    """Return a text in which Markdown and HTML find nothing: names of classes and files are anybody's."""
    for character in "\\`*_[]<>|":
        text = text.replace(character, f"\\{character}")
    return text


def to_yaml(value: Any, indent: str = "") -> str:
    """Return plain values as YAML in blocks; texts are quoted as in JSON, which YAML contains."""
    if isinstance(value, Mapping):
        return "".join(f"{indent}{key}:{_yaml_item(one, indent)}" for key, one in value.items())
    return "".join(f"{indent}-{_yaml_item(one, indent)}" for one in value)


def _yaml_item(value: Any, indent: str) -> str:
    if isinstance(value, Mapping | list):
        return "\n" + to_yaml(value, f"{indent}  ")
    return f" {json.dumps(value, ensure_ascii=False)}\n"
