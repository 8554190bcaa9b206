"""`unfog doctor RUN`: what a finished, running or failed run has written down, and what its newest weights do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from unfog.config.schema import Config
from unfog.config.toml import read_toml
from unfog.data.dataset import Dataset, ImageSet, evenly_spaced
from unfog.doctor.run.color_statistics import (
    check_blank,
    check_contrast,
    check_saturation,
    check_tint,
    color_statistics,
    comparison_figure,
)
from unfog.doctor.run.cost_checks import check_costs
from unfog.doctor.run.loss_checks import baseline_losses, check_ema, check_overfitting, loss_images, measure_losses
from unfog.doctor.run.run_record import RunRecord
from unfog.doctor.run.status_checks import check_status
from unfog.doctor.run.trend_checks import check_trends
from unfog.doctor.settings.learning_rate_checks import fine_tuning, usual_learning_rate
from unfog.errors import RequestError, RunError
from unfog.evaluation.held_out import midpoints
from unfog.inference.memorization import check_memorization_by_pixels
from unfog.inference.nearest_images import FEWEST
from unfog.pipeline.build import build_loss_at, build_network, without_augmentation
from unfog.pipeline.generate import GenerationSettings, generate_images
from unfog.pipeline.load_data import load_images
from unfog.process.device import choose_device
from unfog.process.heartbeat import read_heartbeat
from unfog.process.run_folder import RunFolder
from unfog.process.signals import StopSignals
from unfog.reporting.charts import Floats
from unfog.reporting.findings import Finding
from unfog.reporting.image_grids import Pixels
from unfog.reporting.progress import Progress
from unfog.text import sanitize
from unfog.training.checkpoints import format as checkpoint
from unfog.training.optimizer_settings import Custom

_COMPARED = 2000
"""Training images that drawn ones are compared with as a whole."""


class _Weights(NamedTuple):
    """Those of the newest whole checkpoint, and the settings that trained it."""

    step: int
    config: Config
    updates: int
    networks: Mapping[str, nn.Module]
    """By kind, "model" and "ema"; read at once, as a run at work may remove the checkpoint at any moment."""


def check_run(folder: RunFolder, device: str = "auto", samples: int = 64) -> list[Finding]:
    """Examine a run; changes nothing in it. What is not there to be examined is left out, and said to be.

    Args:
        folder: of the run, which may be at work meanwhile.
        device: where to measure and to draw: auto, cpu, cuda, cuda:1 or mps.
        samples: pictures to draw; 0 draws none.

    Raises:
        RequestError: it is no run, its settings cannot be read, or there is no such device.
    """
    config = folder.read_config()
    if config.trains_autoencoder:
        raise RequestError(
            f"{folder.path} is a codec; `unfog report {folder.path}` shows its losses and what comes back of images"
        )
    where = choose_device(device)
    record = RunRecord.read(folder.path, config, read_heartbeat(folder.path))
    skipped: list[str] = []
    weights, broken = _newest_weights(folder, config.autoencoder_folder, skipped)
    record = record.with_broken(broken)
    prepared = _load_run_images(config, skipped)
    usual = usual_learning_rate_of(config)
    findings, relative, beaten = [], None, None
    if weights is not None and prepared is not None:
        try:
            found, relative, beaten = _check_losses(record, weights, prepared, where, skipped)
            findings += found
            if samples > 0:
                if weights.step < 0.2 * record.steps:
                    unready = "go on training; this is early"
                else:
                    unready = "make it learn first" if beaten > 0.9 else ""
                findings += _check_samples(weights, prepared, where, samples, unready, skipped)
        except torch.OutOfMemoryError:
            skipped.append(f"what needs the weights, as {where} has too little memory free (try --device cpu)")
    by_heart = any(f.code in ("run.memorised", "run.overfitting") and f.severity == "warning" for f in findings)
    before = [*check_status(record, usual), *check_trends(record, usual, relative, beaten, by_heart)]
    findings = [*before, *findings, *check_costs(record)]
    if skipped:
        findings.append(Finding("run.skipped", "hint", f"not looked at: {'; '.join(skipped)}"))
    return findings


def _newest_weights(
    folder: RunFolder, codec: str, skipped: list[str]
) -> tuple[_Weights | None, list[checkpoint.BrokenCheckpoint]]:
    """The newest whole weights after the first step, None if there are none; and the checkpoints that are broken.

    `codec`: where the codec of the run is now, if it has one.
    """
    broken: list[checkpoint.BrokenCheckpoint] = []
    try:
        saved, found = checkpoint.newest_intact(folder.checkpoints)
        broken = [one for one in found if one.folder.exists()]  # a run at work may have removed others meanwhile
        updates = 0 if saved is None else int(checkpoint.read_state(saved.folder)["updates"])
        if saved is None or not updates:
            none = "no checkpoint is whole" if broken and saved is None else "nothing that was trained is saved yet"
            skipped.append(f"what needs weights, as {none}")
            return None, broken
        config = replace(read_toml(saved.folder / checkpoint.CONFIG, Config()), autoencoder_folder=codec)
        networks = {kind: build_network(config) for kind in ("model", "ema")}
        for kind, network in networks.items():
            checkpoint.load_weights(saved.folder, kind, network)
        return _Weights(saved.step, config, updates, networks), broken
    except (RunError, RequestError, KeyError, TypeError, ValueError, OSError) as error:
        # It may be removed at this moment, too; whatever is wrong, the record can still be examined.
        skipped.append(f"what needs weights ({error})")
        return None, broken


def _load_run_images(config: Config, skipped: list[str]) -> Dataset | None:
    """The images of the run, from the cache where they are in it; None if they are not there, or not the same."""
    try:
        prepared, found = load_images(config, StopSignals())
    except (RequestError, RunError, OSError) as error:
        skipped.append(f"what needs the images ({error})")
        return None
    if config.fingerprint and found.fingerprint != config.fingerprint:
        skipped.append(
            f"what needs the images, as those in {sanitize(config.source)} are not those that it was trained on"
        )
        return None
    return prepared


def usual_learning_rate_of(config: Config) -> float | None:
    """The learning rate that would be chosen for this run; None for a network that is not settled, and where none is
    known for the optimiser."""
    method = config.optimizer.method
    if config.network is None or isinstance(method, Custom):
        return None
    parameters = sum(p.numel() for p in build_network(config).parameters())
    return fine_tuning(config) * usual_learning_rate(parameters, config.training.batch, config.network, method)


def _check_losses(
    record: RunRecord, weights: _Weights, prepared: Dataset, device: torch.device, skipped: list[str]
) -> tuple[list[Finding], float, float]:
    """Findings from losses on fixed noise.

    Returns:
        They, and the loss on training images over that of answering 0, and over that of guessing pixel by pixel.
    """
    config = weights.config
    see = without_augmentation(config)
    seen, unseen = (
        loss_images(part, device, see) for part in (prepared.as_network_input.train, prepared.as_network_input.held_out)
    )
    levels = midpoints(config.evaluate.levels)
    batch = config.training.microbatch or config.training.batch
    own = unseen if unseen is not None and len(unseen.x0) >= 8 else seen
    assert seen is not None, "nobody trains on nothing"
    work = [("ema", seen)] + [("ema", unseen)] * (unseen is not None) + [("model", own)]
    passes = len(levels) * sum(len(images.x0) for _, images in work if images is not None)

    results: dict[tuple[str, int], Floats] = {}
    with Progress("measuring losses", passes) as progress:
        done = 0

        def advance(images: int) -> None:
            nonlocal done
            done += images
            progress.update(done)

        for kind, images in work:
            assert images is not None
            network = weights.networks[kind].to(device).eval()
            results[kind, id(images)] = measure_losses(
                build_loss_at(network, config), images, levels, batch, progress=advance
            )
    assert own is not None
    average, raw = results["ema", id(own)], results["model", id(own)]
    what = "training images" if own is seen else "held-out images"
    findings = [check_ema(record, average, raw, weights.updates, what)]
    if unseen is None:
        skipped.append("overfitting, as no images are held out (--data.held-out 0.05 would, of 100 or more)")
    else:
        findings.append(check_overfitting(record, results["ema", id(seen)], results["ema", id(unseen)]))
    zero, pixelwise = baseline_losses(
        config.diffusion, _model_inputs(prepared.as_network_input.train, _COMPARED, see), levels
    )
    # Of the two weights the better one: the average may be behind without that nothing was learned.
    lost = min(float(results["ema", id(seen)].mean()), float(raw.mean()))
    return findings, lost / max(float(zero.mean()), 1e-30), lost / max(float(pixelwise.mean()), 1e-30)


def _check_samples(
    weights: _Weights, prepared: Dataset, device: torch.device, samples: int, unready: str, skipped: list[str]
) -> list[Finding]:
    """Findings from pictures drawn with the average of the weights, without guidance, which would shift them.

    `unready`: what to do before anything can be expected of them; "" where the network has learned something.
    """
    config, network = weights.config, weights.networks["ema"].to(device)
    # Of more classes than pictures, as many evenly spread.
    labels = tuple(evenly_spaced(len(config.classes), samples).tolist())
    batch = config.training.microbatch or config.training.batch
    with Progress("drawing pictures", samples) as progress:
        drawing = GenerationSettings(samples, config.sampler, labels, batch=min(batch, 64))
        drawn = generate_images(network, config, drawing, progress.update)
    data, data_labels = _training_pixels(prepared.train, labels)
    own = np.array([labels[i % len(labels)] for i in range(samples)]) if labels else None
    mine, theirs = color_statistics(drawn, own), color_statistics(data, data_labels)
    shown = comparison_figure(drawn, data)
    findings = [
        check_blank(mine, theirs, shown, unready),
        check_tint(mine, theirs, shown, unready),
        check_contrast(mine, theirs, unready),
        check_saturation(mine, theirs, unready),
    ]
    if len(prepared.train) < FEWEST:
        skipped.append(f"copies of training images, as there are only {len(prepared.train)} of them")
    else:
        with Progress("searching copies", len(prepared.train)) as progress:
            findings.append(check_memorization_by_pixels(drawn, prepared, progress.update))
    return findings


def _model_inputs(images: ImageSet, count: int, see: Callable[[Tensor], Tensor]) -> Tensor:
    """Up to `count` images as the network sees them."""
    return see(torch.from_numpy(np.ascontiguousarray(images.pixels[evenly_spaced(len(images), count)])))


def _training_pixels(images: ImageSet, labels: tuple[int, ...]) -> tuple[Pixels, NDArray[np.int64] | None]:
    """Up to COMPARED images [N, H, W, C] of these classes, all for (), and their labels."""
    if images.labels is None or not labels:
        rows = evenly_spaced(len(images), _COMPARED)
        return images.pixels[rows].transpose(0, 2, 3, 1), None
    wanted = np.flatnonzero(np.isin(images.labels, labels))
    rows = wanted[evenly_spaced(len(wanted), _COMPARED)]
    pixels, own, _ = images.take(rows)
    return pixels.transpose(0, 2, 3, 1), own
