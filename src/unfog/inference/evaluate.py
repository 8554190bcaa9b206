"""`unfog evaluate RUN`: draw pictures, compare them with real ones, and measure what is held out."""

from __future__ import annotations

import hashlib
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from unfog.data.dataset import Dataset, ImageSet, evenly_spaced
from unfog.errors import RequestError, RunError
from unfog.evaluation.feature_networks import inception_path
from unfog.evaluation.features import Features, open_features
from unfog.evaluation.metrics import check_count
from unfog.evaluation.sliced_wasserstein import PIXEL_METRICS
from unfog.inference.compute_metrics import forget_drawn, measure_all
from unfog.inference.generated import GeneratedSamples, weights_digest
from unfog.inference.results import (
    ARITHMETIC,
    FORMAT,
    HELD_OUT,
    LOSSES,
    METRICS,
    ON_REQUEST,
    Evaluation,
    EvaluationRequest,
    EvaluationSetup,
)
from unfog.pipeline.class_labels import proportional_labels
from unfog.pipeline.generate import GenerationSettings, generate_images
from unfog.pipeline.load_data import load_images
from unfog.planning.step_benchmark import seconds_per_sample, wall_seconds
from unfog.process.signals import StopSignals
from unfog.reporting.image_grids import Pixels
from unfog.reporting.progress import Progress, format_bytes, format_duration, plural, say
from unfog.text import sanitize
from unfog.training.checkpoints import format as checkpoint
from unfog.training.distributed.rendezvous import processes
from unfog.training.distributed.world import World

if TYPE_CHECKING:
    from unfog.inference.run import Run

MOST_REAL = 10_000
"""Real images to compare with, or as many as are drawn, if that is more."""


def evaluate(run: Run, asked: EvaluationRequest) -> Evaluation:
    """Measure a run. What was measured before is read, and what was drawn before is not drawn again.

    Under torchrun each process calls this with the same run and draws its part of the pictures; all get the result.

    Raises:
        RequestError: there is no such metric, file or reference; nothing that was asked for can be measured.
        RunError: the run folder or the cache cannot be written.
        Interrupted: a stop was requested; what is drawn is kept, and the same call goes on from there.
    """
    with processes() as world, StopSignals() as stop:
        started = time.monotonic()
        if asked.against is not None:
            checkpoint.find(run.folder.checkpoints, asked.against)  # at once, rather than after drawing
        config = replace(run.config, training=replace(run.config.training, images=0, steps=0))
        prepared, found = load_images(config, stop)
        if found.fingerprint != run.config.fingerprint:
            raise RequestError(f"the images in {sanitize(config.source)} are not those that this run was trained on")
        chosen = choose(run, asked, prepared, stop)
        folder = run.path / "evaluations"
        key = key_of(run, chosen)
        path = folder / f"{run.checkpoint.step:08d}-{key}.json"
        stored = Evaluation.read(path)
        world.barrier()  # all have looked, before the first of them writes it
        if stored is not None:
            say(f"measured before: {path}")
            return stored
        pictures = drawn_pictures(run, chosen, folder, world, stop)
        evaluation = measure_all(run, chosen, prepared, pictures, world, path.with_suffix(""))
        if world.first:
            evaluation = replace(evaluation, asked=asdict(asked), seconds=round(time.monotonic() - started, 1))
            try:
                evaluation.write(path)
            except OSError as error:
                raise RunError(f"{path} cannot be written ({error.strerror}); what was drawn is kept") from error
        world.barrier()
        if world.first:
            forget_drawn(chosen, pictures)
        return Evaluation.read(path) or evaluation


def choose(run: Run, asked: EvaluationRequest, prepared: Dataset, stop: StopSignals) -> EvaluationSetup:
    """Settle what was left open, and say what cannot be measured and what it takes."""
    config, n = run.config, asked.n or (1000 if run.device.type == "cpu" else 10_000)
    features = features_for(asked, run.device)
    reference, what = reference_of(run, asked, prepared, stop)
    if features is not None and set(asked.metrics) == {"fid"}:  # all that is asked for would be refused
        one = torch.from_numpy(reference.take(np.arange(1))[0])
        check_count("fid", min(n, len(reference)), one, features, "--metrics")
    metrics = measurable(run, asked, prepared, features)
    strength = config.usual_guidance if asked.guidance is None else asked.guidance
    labels = proportional_labels(prepared.train.labels, n)
    drawing = GenerationSettings(
        n,
        run.sampler(asked.sampler, asked.steps),
        labels,
        asked.seed,
        strength,
        asked.batch,
        config.guidance_interval,
        precision=asked.precision,
    )
    rows = evenly_spaced(len(reference), max(MOST_REAL, n))
    return EvaluationSetup(metrics, features, drawing, reference, rows, what, asked.against)


def measurable(run: Run, asked: EvaluationRequest, prepared: Dataset, features: Features | None) -> tuple[str, ...]:
    """The metrics that are asked for, or all that can be measured of this run; what is left out is said.

    Raises:
        RequestError: one that is asked for cannot be measured.
    """
    metrics = asked.metrics or tuple(
        name
        for name in METRICS
        if name not in ON_REQUEST and (features is not None or name in (*PIXEL_METRICS, *LOSSES))
    )
    if run.config.uses_latents and "bits" in metrics:
        # A bound on latents says nothing of pixels: the codec's share is missing, and it has no density of them.
        if asked.metrics:
            raise RequestError(f"bits are of pixels, and {run.path} was trained on latents; held_out compares losses")
        say("bits are left out: the run was trained on latents, and they are of pixels")
        metrics = tuple(name for name in metrics if name != "bits")
    if not len(prepared.held_out) and any(name in LOSSES for name in metrics):
        if asked.metrics:
            raise RequestError(f"no images of {run.path} are held out, so {' and '.join(LOSSES)} cannot be measured")
        say("held_out and bits are left out: the run has no held-out images")
        metrics = tuple(name for name in metrics if name not in LOSSES)
    if asked.against is not None and "held_out" not in metrics:
        raise RequestError("--against compares held-out losses, and the run has no held-out images")
    return metrics


def features_for(asked: EvaluationRequest, device: torch.device) -> Features | None:
    """The extractor that was asked for; else Inception for fid, or if its file is there, else texture, which needs no
    file; None if no metric needs one."""
    wanted = [name for name in asked.metrics or METRICS if name not in (*PIXEL_METRICS, *LOSSES)]
    if not wanted:
        return None
    if asked.features or {"fid", "fid_infinity"} & {*asked.metrics} or inception_path().is_file():
        return open_features(asked.features or "inception", device)
    say(
        f"compared by texture, as {inception_path()} is not there, which the literature's figures are of; put it there "
        "(docs/metrics.md says where it comes from), or give --features and a file of your own"
    )
    return open_features("texture", device)


def reference_of(run: Run, asked: EvaluationRequest, prepared: Dataset, stop: StopSignals) -> tuple[ImageSet, str]:
    """The real images to compare with, and what they are. RequestError if there are too few."""
    if asked.reference == HELD_OUT:
        images, what = prepared.held_out, "held-out images"
    elif asked.reference:
        data = replace(run.config.data, held_out=0.0, labels="none")
        config = replace(
            run.config, source=asked.reference, data=data, fingerprint="", classes=(), autoencoder_folder=""
        )
        other, _ = load_images(config, stop)
        images, what = other.train, sanitize(asked.reference)
    else:
        images, what = prepared.train, "training images"
    if len(images) < 10:
        raise RequestError(f"the reference has {plural(len(images))}; at least 10 are needed")
    return images, what


def key_of(run: Run, chosen: EvaluationSetup) -> str:
    """What the result depends on, in a digest."""
    features = chosen.features.digest if chosen.features else ""
    reference = (chosen.reference.fingerprint, len(chosen.rows))
    settings = (chosen.metrics, chosen.drawing.count, features, reference, chosen.against, drawing_key(run, chosen))
    return hashlib.sha256(repr((FORMAT, ARITHMETIC, settings)).encode()).hexdigest()[:12]


def drawing_key(run: Run, chosen: EvaluationSetup) -> str:
    """What a drawn picture depends on besides its number, and its neighbours in the batch."""
    drawing = chosen.drawing
    labels = hashlib.sha256(repr(drawing.labels[:10]).encode()).hexdigest()  # the same rule gives the rest
    how: tuple[object, ...] = (drawing.sampler, labels, drawing.seed, drawing.guidance, drawing.interval)
    # What was drawn before there was a choice was drawn in fp32.
    how += () if drawing.precision == "fp32" else (drawing.precision,)
    settings = (weights_digest(run.network), run.config.diffusion, how)
    return hashlib.sha256(repr((FORMAT, settings, drawing.batch)).encode()).hexdigest()[:16]


def drawn_pictures(
    run: Run, chosen: EvaluationSetup, folder: Path, world: World, stop: StopSignals
) -> GeneratedSamples | None:
    """The pictures, drawn as far as they are not there; None if no metric needs any."""
    if all(name in LOSSES for name in chosen.metrics):
        return None
    drawing = chosen.drawing
    pictures = GeneratedSamples(folder / "drawn" / drawing_key(run, chosen), drawing.count, drawing.batch)
    missing = pictures.count_in(pictures.missing())
    if missing < drawing.count:
        say(f"{plural(drawing.count - missing, 'picture')} are drawn already, in {pictures.folder}")
    if missing:
        tell_cost(run, chosen, missing, world)

    def some(first: int, count: int) -> Pixels:
        stop.leave_if_requested()
        return generate_images(run.network, run.config, replace(drawing, first=first, count=count))

    with Progress("drawing", missing) as progress:
        pictures.generate_missing(some, world, progress.update)
    return pictures


def tell_cost(run: Run, chosen: EvaluationSetup, missing: int, world: World) -> None:
    """Say what drawing and features will take, by a few steps and a few pictures."""
    drawing = chosen.drawing
    few = replace(drawing, count=min(drawing.batch, missing))
    seconds = seconds_per_sample(run.network, run.config, few) * missing
    told = f"drawing {plural(missing, 'picture')} takes about {format_duration(seconds / world.size)}"
    if chosen.features is not None:
        pixels = torch.from_numpy(np.ascontiguousarray(chosen.reference.pixels[chosen.rows[:50]]))
        each = wall_seconds(lambda: chosen.features(pixels).cpu()) / len(pixels)  # type: ignore[misc]
        count = drawing.count + len(chosen.rows)
        told += (
            f", and {chosen.features.name} of them and of {plural(len(chosen.rows), 'real one')} at most "
            f"{format_duration(each * count / world.size)}, as it is kept"
        )
    channels, side = run.config.data.channels, run.config.data.size
    say(f"{told}; they take {format_bytes(missing * channels * side * side)} in {run.path / 'evaluations' / 'drawn'}")
