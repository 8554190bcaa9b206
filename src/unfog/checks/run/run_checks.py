"""Checks of a run, from what it has recorded and from what its newest weights do, and how to run all of them.

To add a check, write a function that returns a Finding, or None if it does not apply, here or in one of the modules
beside this one, and call it in that module's `check_progress`, `check_costs`, `check_trends` or `check_samples`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from unfog.checks.run.cost_checks import check_costs
from unfog.checks.run.loss_checks import LossImages, check_ema, check_overfitting, loss_images, measure_losses
from unfog.checks.run.run_record import RunRecord
from unfog.checks.run.sample_checks import SampleRemedies, check_samples, check_values
from unfog.checks.run.trend_checks import check_trends, has_high_rate
from unfog.checks.settings.learning_rate_checks import usual_learning_rate
from unfog.checks.settings.settings_checks import check_sampling
from unfog.config.schema import Config
from unfog.config.toml import read_toml
from unfog.data.dataset import Dataset, ImageSet, evenly_spaced
from unfog.diffusion.diffusion import Diffusion
from unfog.errors import RequestError, RunError
from unfog.evaluation.held_out import midpoints
from unfog.evaluation.value_metrics import RealImages
from unfog.inference.compare_images import FEWEST_COMPARED, ImageRows
from unfog.inference.memorization import FEWEST, check_memorization_by_pixels
from unfog.pipeline.build import build_loss_at, build_network, building_for, without_augmentation
from unfog.pipeline.generate import GenerationSettings, generate_images, proportional_given
from unfog.pipeline.load_data import load_images
from unfog.process.device import choose_device
from unfog.process.heartbeat import Heartbeat
from unfog.process.run_folder import RunFolder
from unfog.process.signals import StopSignals
from unfog.reporting.charts import Floats
from unfog.reporting.findings import Figure, Finding
from unfog.reporting.image_grids import Pixels
from unfog.reporting.progress import Progress, format_duration
from unfog.reporting.records import UNBEGUN, WAITING, run_state
from unfog.text import plural, sanitize
from unfog.training.checkpoints import format as checkpoint
from unfog.training.checkpoints.load import load_weights, read_state
from unfog.training.settings import Custom
from unfog.values.columns import CLASS
from unfog.values.condition_format import ConditionFormat, Given, given_labels

_COMPARED = 2000  # training images that generated ones are compared with
# Words of errors about a full disk; "disk" alone could be part of a path.
_FULL = ("disk is full", "No space left", "uota exceeded", "has no room")


class _Weights(NamedTuple):
    """Weights of the newest whole checkpoint, and the settings that trained them."""

    step: int
    config: Config
    updates: int
    networks: Mapping[str, nn.Module]
    """"model" and "ema"; loaded at once, because a running process may delete the checkpoint at any moment."""
    device: torch.device
    """Where losses and samples are computed."""


def check_run(folder: RunFolder, device: str = "auto", samples: int = 64) -> list[Finding]:
    """Run all checks on a run folder without changing it; what cannot be checked is listed in run.skipped.

    The run may still be training. It generates `samples` images, which may be 0, on auto, cpu, cuda, cuda:1 or mps.
    RequestError if it is not a run or an export of one, its settings are unreadable, or there is no such device.
    """
    config = folder.read_config()
    config.task.check_generates(str(folder.path), f"`unfog report {folder.path}` shows its losses and reconstructions")
    saved, _ = checkpoint.list_checkpoints(folder.checkpoints)
    if saved and saved[-1].is_weights_only:
        raise RequestError(
            f"{folder.path} is an export, which has no record of its training to check; `unfog evaluate` measures it"
        )
    where = choose_device(device)
    record = RunRecord.read(folder.path, config, Heartbeat.read(folder.path))
    skipped: list[str] = []
    weights, broken = _newest_weights(folder, config.autoencoder_folder, where, skipped)
    record = record.with_broken(broken)
    prepared = _load_run_images(config, skipped)
    findings: list[Finding] = []
    relative = pixelwise = None
    usual_lr = _usual_learning_rate(folder, config)
    if weights is not None and prepared is not None:
        findings, relative, pixelwise = _check_weights(record, weights, prepared, samples, usual_lr, skipped)
    memorized = any(f.code in ("run.memorised", "run.overfitting") and f.severity == "warning" for f in findings)
    findings = [
        *check_progress(record, usual_lr),
        *check_trends(record, usual_lr, relative, pixelwise, memorized),
        *findings,
        *check_sampling(config, record.command),
        *check_costs(record),
    ]
    if skipped:
        findings.append(Finding("run.skipped", "hint", f"not checked: {'; '.join(skipped)}"))
    return findings


def _newest_weights(
    folder: RunFolder, autoencoder: str, device: torch.device, skipped: list[str]
) -> tuple[_Weights | None, list[checkpoint.BrokenCheckpoint]]:
    """Load the newest intact weights, None before the first update; and list the broken checkpoints.

    `autoencoder` is the folder that the run's autoencoder is in now, "" without one.
    """
    broken: list[checkpoint.BrokenCheckpoint] = []
    try:
        saved, found = checkpoint.newest_intact(folder.checkpoints)
        broken = [one for one in found if one.folder.exists()]  # a running process may have deleted others
        updates = 0 if saved is None else int(read_state(saved.folder)["updates"])
        if saved is None or not updates:
            none = "no checkpoint is intact" if broken and saved is None else "nothing trained is saved yet"
            skipped.append(f"checks of the weights, as {none}")
            return None, broken
        config = replace(read_toml(saved.folder / checkpoint.CONFIG, Config()), autoencoder_folder=autoencoder)
        with building_for(saved.folder / "model.safetensors", folder.path):
            networks = {kind: build_network(config) for kind in ("model", "ema")}
        for kind, network in networks.items():
            load_weights(saved.folder, kind, network)
        return _Weights(saved.step, config, updates, networks, device), broken
    except (RunError, RequestError, KeyError, TypeError, ValueError, OSError) as error:
        # The checkpoint may be deleted at this moment; the record can be checked all the same.
        skipped.append(f"checks of the weights ({error})")
        return None, broken


def _load_run_images(config: Config, skipped: list[str]) -> Dataset | None:
    """Load the training images, from the cache where possible; None if they are missing or have changed."""
    try:
        prepared, found = load_images(config, StopSignals())
    except (RequestError, RunError, OSError) as error:
        skipped.append(f"checks against the images ({error})")
        return None
    # Against other images every sample would look new, and every loss as if it were held out.
    if config.fingerprint and found.fingerprint != config.fingerprint:
        skipped.append(f"checks against the images, as {sanitize(config.source)} has changed since training")
        return None
    return prepared


def _usual_learning_rate(folder: RunFolder, config: Config) -> float | None:
    """Return the automatic rate; None for an open network, a custom optimiser, or settings unlike the weights."""
    saved, _ = checkpoint.list_checkpoints(folder.checkpoints)
    if config.network is None or isinstance(config.optimizer.method, Custom):  # before a network is built in vain
        return None
    weights = saved[-1].folder / "model.safetensors" if saved else None
    with suppress(RunError), building_for(weights, folder.path):
        return usual_learning_rate(config, sum(p.numel() for p in build_network(config).parameters()))
    return None


def _check_weights(
    record: RunRecord, weights: _Weights, prepared: Dataset, samples: int, usual_lr: float | None, skipped: list[str]
) -> tuple[list[Finding], float | None, float | None]:
    """Check losses, and so many samples. Returns the same as `_check_losses`; None if memory did not suffice."""
    findings: list[Finding] = []
    relative = pixelwise = None
    try:
        findings, relative, pixelwise = _check_losses(record, weights, prepared, skipped)
        if samples > 0:
            # While next to nothing is learned, remedies for colours or contrast of samples would mislead.
            unready = "train longer first" if pixelwise is None or pixelwise > 0.9 else ""
            if weights.step < 0.2 * record.steps:
                unready = "continue training; it is too early to tell"
            if high := has_high_rate(record, usual_lr, pixelwise):
                unready = "lower the learning rate first"
            found = _check_samples(record, weights, prepared, samples, unready, skipped)
            findings += _without_hints(found) if high else found
    except torch.OutOfMemoryError:
        skipped.append(f"checks of the weights, as {weights.device} has too little memory free (try --device cpu)")
    return findings, relative, pixelwise


def _without_hints(findings: list[Finding]) -> list[Finding]:
    """Return findings whose hints are fine: they stay on the page, behind what has to be mended before them."""
    return [replace(one, severity="fine") if one.severity == "hint" else one for one in findings]


def _check_losses(
    record: RunRecord, weights: _Weights, prepared: Dataset, skipped: list[str]
) -> tuple[list[Finding], float | None, float | None]:
    """Check losses with fixed noise.

    Returns:
        The findings; and the loss on training images relative to that of predicting 0, and relative to that of the
        best prediction from each pixel alone. None if a loss is not finite.
    """
    config, images = weights.config, prepared.of_one_size.as_network_input
    see = without_augmentation(config)
    seen, unseen = (loss_images(part, weights.device, see) for part in (images.train, images.held_out))
    levels = midpoints(config.evaluate.levels)
    batch = config.training.microbatch or config.training.batch
    assert seen is not None, "a run has training images"
    # Fewer give no standard error to judge a difference by.
    own = unseen if unseen is not None and len(unseen.x0) >= 8 else seen
    passes = len(levels) * sum(len(some.x0) for some in (seen, unseen, own) if some is not None)

    def losses(kind: str, some: LossImages) -> Floats:
        loss_at = build_loss_at(weights.networks[kind].to(weights.device).eval(), config)
        return measure_losses(loss_at, some, levels, batch, progress=progress.advance)

    with Progress("measuring losses", passes) as progress:
        on_seen = losses("ema", seen)
        on_unseen = None if unseen is None else losses("ema", unseen)
        raw = losses("model", own)
    average, what = (on_seen, "training images") if own is seen or on_unseen is None else (on_unseen, "held-out images")
    if not all(np.isfinite(one).all() for one in (on_seen, on_unseen, raw) if one is not None):
        skipped.append("the losses of the weights, as they are not finite")
        return [], None, None
    findings = [check_ema(record, average, raw, weights.updates, what)]
    if on_unseen is None:
        skipped.append("overfitting, as no images are held out (--data.held-out 0.05 holds some out, of 100 or more)")
    else:
        findings.append(check_overfitting(record, on_seen, on_unseen))
    some = images.train.pixels[evenly_spaced(len(images.train), _COMPARED)]
    zero, pixelwise = _baseline_losses(config.diffusion, see(torch.from_numpy(np.ascontiguousarray(some))), levels)
    # Early on the EMA may lag behind weights that have learned, so the better of the two counts.
    lost = min(float(on_seen.mean()), float(raw.mean()))
    # Images that are all equal have no error of pixels by themselves to compare with.
    blank = max(float(zero.mean()), 1e-30)
    return findings, lost / blank, lost / max(float(pixelwise.mean()), 1e-3 * blank)


def _check_samples(
    record: RunRecord, weights: _Weights, prepared: Dataset, samples: int, unready: str, skipped: list[str]
) -> list[Finding]:
    """Check images generated with the EMA weights, without guidance, which would shift colours."""
    config, network = weights.config, weights.networks["ema"].to(weights.device)
    if not config.image_format.is_picture:
        return _check_values(record, weights, prepared, samples, unready, skipped)
    given = conditions_of_samples(config.conditions, prepared.train, samples)
    labels = given_labels(given)
    batch = config.training.microbatch or config.training.batch
    with Progress("generating images", samples) as progress:
        settings = GenerationSettings(samples, config.sampler, given, batch=min(batch, 64))
        generated = generate_images(network, config, settings, progress.update)
    training, training_labels = _training_pixels(prepared.train, labels)
    own = np.array([labels[i % len(labels)] for i in range(samples)]) if labels else None
    findings = check_samples((generated, own), (training, training_labels), unready, SampleRemedies.of(record))
    if len(prepared.train) < FEWEST:
        skipped.append(f"memorization, as there are only {len(prepared.train)} training images")
    else:
        with Progress("searching memorized images", len(prepared.train)) as progress:
            findings.append(check_memorization_by_pixels(generated, prepared, progress.update))
    return findings


def _check_values(
    record: RunRecord, weights: _Weights, prepared: Dataset, samples: int, unready: str, skipped: list[str]
) -> list[Finding]:
    """Check generated images of other values than pictures have, with the EMA weights, without guidance."""
    config, network = weights.config, weights.networks["ema"].to(weights.device)
    count = len(prepared.train) // 2
    if min(samples, count) < FEWEST_COMPARED:
        skipped.append(
            f"samples, as comparing values needs {FEWEST_COMPARED} of them and twice as many training images"
        )
        return []
    batch = min(config.training.microbatch or config.training.batch, 64)
    with Progress("generating images", samples) as progress:
        # In the proportions of the data, which histograms depend on.
        given = proportional_given(config.conditions, prepared.train, samples)
        settings = GenerationSettings(samples, config.sampler, given, batch=batch)
        generated = generate_images(network, config, settings, progress.update).transpose(0, 3, 1, 2)
    rows = evenly_spaced(len(prepared.train), 2 * min(samples, count))
    real = RealImages(ImageRows(prepared.train, rows), wrap=config.data.wrapped, unknown=config.data.unknown_values)
    return check_values(generated, real, unready, SampleRemedies.of(record).longer)


def conditions_of_samples(format: ConditionFormat, images: ImageSet, samples: int) -> Given:
    """Return all classes in turn; if the run has other conditions too, all conditions of some training images."""
    if format.columns:
        return proportional_given(format, images, samples)
    # With more classes than samples, evenly spread ones.
    return format.parse({CLASS: evenly_spaced(len(format.classes), samples)} if format.classes else {})


def _training_pixels(images: ImageSet, labels: tuple[int, ...]) -> tuple[Pixels, NDArray[np.int64] | None]:
    """Return up to 2,000 images [N, H, W, C] of these classes, all for (), and their labels."""
    if images.labels is None or not labels:
        rows = evenly_spaced(len(images), _COMPARED)
        return images.pixels[rows].transpose(0, 2, 3, 1), None
    wanted = np.flatnonzero(np.isin(images.labels, labels))
    rows = wanted[evenly_spaced(len(wanted), _COMPARED)]
    taken = images.take(rows)
    return taken.pixels.transpose(0, 2, 3, 1), taken.labels


def _baseline_losses(diffusion: Diffusion, x0: Tensor, levels: Tensor) -> tuple[Floats, Floats]:
    """Return the losses [L] of two predictions without learning, at noise quantiles [L], on images x0 [N, C, H, W].

    The first predicts 0. The second is the best linear prediction of each pixel by itself, given the mean image: for a
    pixel of variance s^2, y given x_t has the variance (a sigma - b alpha)^2 s^2 / (alpha^2 s^2 + sigma^2).
    """
    x0 = x0.double()
    power = float(x0.square().mean())
    # Per pixel, because many pixels are equal in all images. A single image has no variance.
    spread = (x0.var(0) if len(x0) > 1 else x0[0].square()).flatten()
    logsnr = diffusion.schedule(levels.double())
    alpha, sigma = diffusion.path(logsnr)
    a, b = diffusion.target(alpha, sigma, diffusion.sigma_data)
    weight = diffusion.weight(logsnr)
    zero = weight * (a.square() * power + b.square())
    left = torch.stack([(spread / (p * spread + q)).mean() for p, q in zip(alpha.square(), sigma.square())])
    linear = weight * (a * sigma - b * alpha).square() * left
    return zero.numpy(), linear.numpy()


def check_progress(record: RunRecord, usual_lr: float | None) -> list[Finding]:
    """Check state and checkpoints; `usual_lr` is the automatic learning rate, None if it is not known."""
    return [_check_state(record, usual_lr), _check_checkpoints(record)]


def _check_state(record: RunRecord, usual_lr: float | None = None) -> Finding:
    """run.state: progress of the run, and the command to continue."""
    state, word = run_state(record.events, record.heartbeat)
    place = f"step {record.step:,} of {record.steps:,}" if record.steps else f"step {record.step:,}"
    facts: dict[str, Any] = {"state": state, "step": record.step, "steps": record.steps, "reason": word}
    finding, resume = partial(Finding, "run.state", facts=facts), f"go on: {record.command('resume')}"
    if state == "finished":
        took = f" in {format_duration(record.seconds)}" if record.seconds else ""
        return finding("fine", f"finished at {place}{took}")
    if state == "running" and word == WAITING["disk"]:
        remedy = "free some space; training then continues by itself, and nothing is lost"
        return finding("warning", f"at {place}, {word}", remedy)
    if state == "standing still":
        return finding("warning", f"at {place}, standing still: {word}", _after_standstill(record, word))
    if state == "running":
        return finding("fine", f"running, at {place}: {word or 'at work'}")
    if state == "stopped":
        return finding("hint", f"stopped on request at {place}, and saved", resume)
    if state == "not begun":
        return finding("warning", "training has not started, and no process is running", resume)
    if state == "failed":
        evidence = f"failed at {place}: {_shorten(word) or 'no reason was recorded'}"
        return finding("fatal" if "diverged" in word else "warning", evidence, _after_failure(record, word, usual_lr))
    return _killed(record, place, word, facts)


def _after_standstill(record: RunRecord, word: str) -> str:
    pid = int((record.heartbeat or {})["pid"])
    if "suspended" in word:
        return f"kill -CONT {pid} continues it"
    return (
        f"it may wait for a disk, a network or a device; if it stays so, kill -9 {pid}, and {record.command('resume')}"
    )


def _after_failure(record: RunRecord, word: str, usual_lr: float | None) -> str:
    if "diverged" in word:
        return record.stability_remedy(usual_lr)
    if any(full in word for full in _FULL):
        return f"free some space, then {record.command('resume')}"
    if "one image at a time" in word:  # with gradient checkpointing, so that nothing is left to do without
        return "train again with a smaller --size or --network, or on a machine with more memory"
    if "memory" in word.lower():
        now = record.config.training.microbatch or record.batch
        less = f"--microbatch {now // 2}" if now > 1 else "--training.checkpointing"
        return f"use less memory: {record.command('resume', less)}"
    return f"fix that, then {record.command('resume')}; with --debug it shows where it failed"


def _shorten(reason: str) -> str:
    words = " ".join(reason.split())
    return words if len(words) <= 160 else f"{words[:160].rsplit(' ', 1)[0]} …"


def _killed(record: RunRecord, place: str, word: str, facts: dict[str, Any]) -> Finding:
    newest = record.saved[-1].step if record.saved else 0
    lost = max(0, record.step - newest)
    seconds = lost * record.seconds / record.step if record.step else 0.0
    age = float((record.heartbeat or {}).get("age", float("nan")))
    silent = f"its last heartbeat is {format_duration(age)} old" if record.heartbeat else "it has no heartbeat"
    if str((record.heartbeat or {}).get("doing")) in UNBEGUN:
        silent = "a later resume did not start training"
    doing = f", while {word}" if word else ""
    evidence = (
        f"the process was killed at about {place}{doing}: {silent}; "
        f"{plural(lost, 'step')} since the checkpoint of step {newest:,} will be trained again"
    )
    if seconds >= 1:
        evidence += f" ({format_duration(seconds)})"
    remedy = f"continue: {record.command('resume')}; if it is killed again, look for the out-of-memory killer (dmesg)"
    if lost > 2 * max(record.config.checkpoint.every, 1) and record.config.checkpoint.every != 1:
        every = record.config.checkpoint.every
        often = every // 2 if every > 0 else lost // 4
        remedy += f", and save more often: --checkpoint.every {max(1, often)}"
    facts |= {"lost_steps": lost, "heartbeat_age": age if record.heartbeat else None}
    return Finding("run.state", "warning", evidence, remedy, facts)


def _check_checkpoints(record: RunRecord) -> Finding:
    """run.checkpoints: list the checkpoints, and those that cannot be used."""
    kept = [f"{one.step:,}" for one in record.saved]
    facts = {"steps": [one.step for one in record.saved], "broken": [one.folder.name for one in record.broken]}
    rows = [("step", "held-out loss", "kept for")]
    for one in record.saved:
        loss = "" if one.held_out_loss is None else f"{one.held_out_loss:.4g}"
        rows.append((f"{one.step:,}", loss, "its held-out loss" if one.for_best else ""))
    figures = (Figure("Checkpoints", table=rows),) if kept else ()
    if record.broken:
        evidence = f"{plural(len(record.broken), 'checkpoint')} cannot be used ({record.broken[0].reason})"
        remedy = f"a resume ignores them and continues from step {kept[-1]}" if kept else "train again"
        return Finding("run.checkpoints", "warning", evidence, remedy, facts, figures)
    if not kept:
        return Finding("run.checkpoints", "hint", "nothing has been saved yet, so only the record is checked")
    return Finding("run.checkpoints", "fine", f"checkpoints of steps {', '.join(kept)}", "", facts, figures)
