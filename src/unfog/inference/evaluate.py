"""Evaluation: samples of a run, or images of any program, compared with real ones; and held-out losses of a run."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from unfog.config.requests.evaluate import (
    CLIP,
    LOSSES,
    METRICS,
    NOT_COMPARED,
    OBEYS,
    USUAL,
    VALUES,
    WORTH,
    EvaluationRequest,
)
from unfog.config.schema import Config
from unfog.data.bit_depth import FULL_RANGE, UNKNOWN_REMEDY
from unfog.data.buckets.joined_set import join_sets
from unfog.data.dataset import Dataset, ImageSet, evenly_spaced
from unfog.data.scan import NoUsableImageError, common_size
from unfog.data.settings import Data
from unfog.data.sources.registry import open_source
from unfog.errors import RequestError, RunError
from unfog.evaluation.feature_networks import inception_path
from unfog.evaluation.features import Features, delete_features, open_features
from unfog.evaluation.pixel_metrics import PIXEL_METRICS
from unfog.inference.clip_scores import open_clip
from unfog.inference.compare_images import (
    Comparison,
    ImageRows,
    check_enough,
    check_for_values,
    check_no_features,
    reference_rows,
    verdict,
)
from unfog.inference.compute_metrics import compute_metrics, open_against
from unfog.inference.evaluation_files import (
    ARITHMETIC,
    FORMAT,
    Evaluation,
    EvaluationPart,
    EvaluationSamples,
    EvaluationSetup,
    GeneratedSamples,
    MixedSamples,
)
from unfog.inference.guide import resolve_guidance
from unfog.inference.loaded_run import LoadedRun, load_run_images, weights_digest
from unfog.inference.obeyed_conditions import can_be_obeyed, check_condition_metrics
from unfog.pipeline.generate import GenerationSettings, cost_per_sample, generate_images, proportional_given
from unfog.pipeline.load_data import load_images
from unfog.process.device import choose_device
from unfog.process.machine_key import machine_key
from unfog.process.signals import StopSignals
from unfog.process.torch_flags import caller_flags_kept
from unfog.reporting.image_grids import Pixels
from unfog.reporting.progress import Progress, format_duration, say
from unfog.settings import is_auto
from unfog.text import format_bytes, manual, plural, sanitize
from unfog.training.distributed.world import World, init_world
from unfog.values.buckets import share_samples
from unfog.values.condition_format import given_labels
from unfog.values.image_format import Size, are_pictures, describe_channels, size_of

_GRIDS = ("grid.png", "strip.png")  # which `unfog sample` writes beside its images


def evaluate(run: LoadedRun, request: EvaluationRequest) -> Evaluation:
    """Compute the metrics of a run. Stored results are read, and stored samples are not generated again.

    Under torchrun every rank calls this with the same run and generates its share of the samples; all get the result.

    Raises:
        RequestError: there is no such metric, file or reference, or none of the metrics can be computed.
        RunError: the run folder or the cache cannot be written.
        Interrupted: a stop was requested; the samples so far are kept, and the same call goes on from there.
    """
    with init_world() as world, StopSignals() as stop:
        started = time.monotonic()
        dataset = load_run_images(run.config, stop)
        dataset = dataset.at_size(run.config.data.size) if run.resized else dataset
        setup = _resolve_request(run, request, dataset, world, stop)
        # By step and by all that the result depends on, so that a stored one is never that of another question.
        path = run.path / "evaluations" / f"{run.step:08d}-{_result_key(setup)}.json"
        # That of rank 0, as the ranks may run on several machines.
        key = bytes.fromhex(world.broadcast_object(machine_key().hex() if world.is_main else ""))
        stored, exists = Evaluation.read(path, key), os.path.lexists(path)
        world.barrier()  # every rank has looked before rank 0 writes the file
        if stored is not None:
            say(f"measured before: {path}")
            return stored
        if exists:
            say(f"measured again, as {path} is from elsewhere, from an earlier version, or was changed")
        samples = _generate_samples(setup, world, stop, key)
        evaluation = compute_metrics(run, setup, samples, world, path.with_suffix(""))
        if world.is_main:
            seconds = round(time.monotonic() - started, 1)
            asked = {name: str(one) if isinstance(one, Path) else one for name, one in asdict(request).items()}
            _write_result(path, replace(evaluation, asked=asked, seconds=seconds), key)
        world.barrier()  # no rank reads the result, and none of the features are deleted, before it is written
        # Only the features of real images are used again, for the next checkpoint; the samples themselves stay.
        if world.is_main and setup.compared.features is not None:
            for drawn in samples.each:
                delete_features(drawn.key, len(drawn), setup.compared.features)
        return Evaluation.read(path, key) or evaluation


def _resolve_request(
    run: LoadedRun, request: EvaluationRequest, dataset: Dataset, world: World, stop: StopSignals
) -> EvaluationSetup:
    """Choose what the request left open, and say which metrics are left out."""
    against = open_against(run, request.against)  # what fails does so before anything is read
    config, n = run.config, request.samples_on(run.device.type)
    picture = config.image_format.is_picture
    if not picture:
        check_no_features(request, str(config.image_format))
    features = open_request_features(request, run.device) if picture else None
    real, name = _load_reference(run, request, dataset, stop)
    reference = real.train
    metrics = _possible_metrics(run, request, dataset, features)
    rows, unknown = reference_rows(reference, n), config.data.unknown_values
    compared = Comparison(metrics, features, reference, rows, world, config.data.wrapped, unknown)
    if set(request.metrics) == {"fid"}:  # with any other metric, a refused FID is a line of the table
        compared.check_count("fid", n, "--metrics")
    # Held-out losses are of the network alone, for which no guide has to be loaded.
    guide = "none" if request.guide is None and set(metrics) <= {*LOSSES} else request.guide
    guidance = resolve_guidance(run, guide, request.guidance, request.precision, request.guide_every)
    clip = open_clip(config, request.clip_folder, run.device) if CLIP in metrics else None
    generation = GenerationSettings(
        n,
        run.sampler(request.sampler, request.steps),
        proportional_given(config.conditions, dataset.train, n),
        request.seed,
        guidance.scale,
        request.batch,
        config.guidance_interval,
        precision=request.precision,
        guide_every=request.guide_every,
    ).resolved(config, run.device)
    parts = _parts(run, generation, dataset, real)
    return EvaluationSetup(compared, generation, parts, dataset, name, against, guidance.guide, guidance.name, clip)


def _parts(
    run: LoadedRun, generation: GenerationSettings, dataset: Dataset, real: Dataset
) -> tuple[EvaluationPart, ...]:
    """Return the samples to generate at each size; a run with buckets has them in proportion to its images."""
    if not dataset.buckets:
        return (EvaluationPart(run, generation, real.train),)
    parts, none = [], real.train.subset(slice(0))
    for part, n in zip(dataset.buckets, share_samples(dataset.size_buckets, generation.count)):
        if n:
            sized = run.at_size(part.settings.size)
            own = replace(generation, count=n, given=proportional_given(sized.config.conditions, part.train, n))
            known = next((one.train for one in real.buckets if one.settings.size == part.settings.size), none)
            parts.append(EvaluationPart(sized, own, known))
    return tuple(parts)


def open_request_features(request: EvaluationRequest, device: torch.device) -> Features | None:
    """Return the feature network of the request, or the best one at hand; None if no metric needs one."""
    if all(name in (*PIXEL_METRICS, *VALUES, *NOT_COMPARED) for name in request.metrics or METRICS):
        return None
    if not is_auto(request, "features"):
        return open_features(request.features, device)
    if {"fid", "fid_infinity"} & {*request.metrics} or inception_path().is_file():
        return open_features("inception", device)
    say(
        f"comparing texture statistics: the Inception network of published figures is not in {inception_path()}. "
        f"{manual('docs/metrics.md')} says where to get it; --features takes another network"
    )
    return open_features("texture", device)


def _load_reference(
    run: LoadedRun, request: EvaluationRequest, dataset: Dataset, stop: StopSignals
) -> tuple[Dataset, str]:
    """Return a dataset whose training images are the real ones to compare with, and their name.

    RequestError if there are too few.
    """
    if request.reference == "held-out":
        parts = tuple(replace(part, train=part.held_out) for part in dataset.buckets)
        real, name = replace(dataset, train=dataset.held_out, buckets=parts), "held-out images"
    elif request.reference:
        # All of them are compared with, and their classes, if they have any, are not those of the run.
        data = replace(run.config.data, held_out=0.0, labels="none", aspect="keep" if dataset.buckets else "crop")
        config = replace(
            run.config,
            source=request.reference,
            data=data,
            fingerprint="",
            classes=(),
            columns=(),
            buckets=run.config.buckets if dataset.buckets else (),
            autoencoder_folder="",
        )
        real, _ = load_images(config, stop)
        if real.buckets:  # its bucket with most images may be another than that of the run
            format = dataset.settings.image_format
            key = f"{real.train.fingerprint} {format.sides}"
            real = replace(real, train=join_sets([part.train for part in real.buckets], format, key))
        name = sanitize(request.reference)
    else:
        real, name = dataset, "training images"
    check_enough(len(real.train), "the reference")
    return real, name


def _possible_metrics(
    run: LoadedRun, request: EvaluationRequest, dataset: Dataset, features: Features | None
) -> tuple[str, ...]:
    """Return the metrics of the request, or all that are possible for this run, and say which are left out.

    RequestError if a metric of the request is not possible.
    """
    format, conditions = run.config.image_format, run.config.conditions
    metrics = (*_usual_metrics(request, format.is_picture, features is not None), *["held_out"] * (not request.metrics))
    if not request.metrics and conditions.can_be_dropped:
        metrics += (*[OBEYS] * can_be_obeyed(conditions), WORTH)
    metrics += (CLIP,) * bool(request.clip_folder and not request.metrics)
    if not format.is_picture:
        check_for_values(metrics, str(format))
    check_condition_metrics(metrics, conditions)
    if (reason := run.config.representation.no_bits) and "bits" in metrics:
        raise RequestError(f"{run.path}: {reason}")
    if dataset.buckets and "bits" in metrics:
        raise RequestError(f"bits are measured at one size; give --size {run.config.image_format.sides}, or omit bits")
    metrics = _possible(run, request, metrics, len(dataset.held_out))
    if request.against is not None and "held_out" not in metrics:
        raise RequestError("--against compares held-out losses, and the run has no held-out images")
    return metrics


def _possible(run: LoadedRun, request: EvaluationRequest, metrics: tuple[str, ...], held_out: int) -> tuple[str, ...]:
    """Return the metrics without those losses that need more held-out images, and say so. RequestError if named."""
    fewest = {name: 2 if name == WORTH else 1 for name in LOSSES}
    short = [name for name in metrics if held_out < fewest.get(name, 0)]
    if short and request.metrics:
        has = "no images of" if not held_out else "too few images of"
        raise RequestError(f"{has} {run.path} are held out, so {' and '.join(short)} cannot be measured")
    if short:
        has = "no held-out images" if not held_out else "one held-out image"
        say(f"{' and '.join(short)} {'is' if len(short) == 1 else 'are'} skipped: the run has {has}")
    return tuple(name for name in metrics if name not in short)


def _result_key(setup: EvaluationSetup) -> str:
    """Return a digest of all that the result depends on."""
    features = setup.compared.features.digest if setup.compared.features else ""
    reference = (setup.compared.reference.fingerprint, len(setup.compared.rows))
    settings = (
        setup.compared.metrics,
        setup.generation.count,
        features,
        reference,
        None if setup.against is None else setup.against.key,
        *([setup.clip.digest] if setup.clip else []),
        *(_samples_key(part, setup) for part in setup.parts),
    )
    return hashlib.sha256(repr((FORMAT, ARITHMETIC, settings)).encode()).hexdigest()[:12]


def _samples_key(part: EvaluationPart, setup: EvaluationSetup) -> str:
    """Return a digest of all that a sample depends on, except its number and its neighbours in the batch."""
    run, generation = part.run, part.generation
    labels = repr(given_labels(generation.given)[:10])  # the same rule gives the rest
    given = hashlib.sha256((repr(generation.given) if run.config.columns else labels).encode()).hexdigest()
    how: tuple[object, ...] = (generation.sampler, given, generation.seed, generation.guidance, generation.interval)
    # fp32 adds nothing, so that samples from before there was a choice of precision are found.
    how += () if generation.precision == "fp32" else (generation.precision,)
    how += (run.config.data.size,) if run.config.size_buckets else ()
    if setup.guide is not None:
        how += (setup.guide.diffusion, weights_digest(cast(nn.Module, setup.guide.network)))
        how += () if generation.guide_every == 1 else (generation.guide_every,)
    settings = (weights_digest(run.network), run.config.diffusion, how)
    return hashlib.sha256(repr((FORMAT, settings, generation.batch)).encode()).hexdigest()[:16]


def _generate_samples(setup: EvaluationSetup, world: World, stop: StopSignals, key: bytes) -> EvaluationSamples:
    """Return the samples, after generating those that are missing or not sealed; no metric may need any."""
    if all(name in LOSSES for name in setup.compared.metrics):
        return EvaluationSamples((), None)
    samples = [_open_samples(part, setup, key) for part in setup.parts]
    missing = [one.count_in(one.missing()) for one in samples]
    if any(missing):
        _report_cost(setup, missing, world)
    done = 0
    with Progress("generating", sum(missing)) as progress:
        for part, own, count in zip(setup.parts, samples, missing):

            def generate(first: int, count: int, part: EvaluationPart = part) -> Pixels:
                stop.leave_if_requested()
                generation = replace(part.generation, first=first, count=count)
                return generate_images(part.run.network, part.run.config, generation, guide=setup.guide)

            def show(n: int, before: int = done) -> None:
                progress.update(before + n)

            own.generate_missing(generate, world, show)
            done += count
    mixed = MixedSamples(samples, setup.dataset.settings.image_format) if len(samples) > 1 else samples[0]
    return EvaluationSamples(tuple(samples), mixed)


def _open_samples(part: EvaluationPart, setup: EvaluationSetup, key: bytes) -> GeneratedSamples:
    """Return the samples of one size that are there so far, and say how many are."""
    run, generation = part.run, part.generation
    folder = run.path / "evaluations" / "drawn" / _samples_key(part, setup)
    each = run.config.image_format.nbytes
    kind = run.config.image_format.values.dtype
    samples = GeneratedSamples(folder, generation.count, generation.batch, run.path, key, each, kind)
    if unsealed := samples.count_in(samples.unsealed()):
        where = f"in {folder} were not drawn on this machine, or were changed"
        say(f"{plural(unsealed, 'sample')} {where}; drawing them again")
    missing = samples.count_in(samples.missing())
    if missing < generation.count:
        say(f"{plural(generation.count - missing, 'sample')} exist already, in {samples.folder}")
    return samples


def _report_cost(setup: EvaluationSetup, missing: Sequence[int], world: World) -> None:
    """Say how long generation and features will take, from a few sampler steps and a few images.

    `missing` is the number of samples of each part.
    """
    seconds, disk = 0.0, 0
    for part, count in zip(setup.parts, missing):
        if count:
            few = replace(part.generation, count=min(part.generation.batch, count))
            seconds += cost_per_sample(part.run.network, part.run.config, few, _wall_seconds, setup.guide) * count
            disk += count * part.run.config.image_format.nbytes
    line = f"{plural(sum(missing), 'sample')} will take about {format_duration(seconds / world.size)} to generate"
    if (features := setup.compared.features) is not None:
        pixels = torch.from_numpy(np.ascontiguousarray(setup.compared.reference.pixels[setup.compared.rows[:50]]))
        each = _wall_seconds(lambda: features(pixels).cpu()) / len(pixels)
        count = setup.generation.count + len(setup.compared.rows)
        # At most, because features of real images are cached.
        line += (
            f", and {features.name} of them and of {plural(len(setup.compared.rows), 'real image')} at most "
            f"{format_duration(each * count / world.size)}"
        )
    say(f"{line}; stored in {setup.parts[0].run.path / 'evaluations' / 'drawn'}: {format_bytes(disk)}")


def _write_result(path: Path, evaluation: Evaluation, key: bytes) -> None:
    try:
        evaluation.write(path, key)
    except OSError as error:
        raise RunError(f"{path} cannot be written ({error.strerror}); the samples are kept") from error


def _wall_seconds(work: Callable[[], object]) -> float:
    """Return the wall time of the second call of `work`, as the first also allocates."""
    work()
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


@caller_flags_kept()
def evaluate_images(images: str, request: EvaluationRequest, size: Size, device: str) -> Evaluation:
    """Compare a source of generated images with the reference of the request. Under torchrun the ranks share the work.

    Args:
        images: any source; other sizes than `size` are resized as for training.
        request: metrics, features, reference, and the number of images, 0 for all; the rest is of runs.
        size: at which both are compared, 64 or "96x64"; 0 is that of the images if it is one, else that of training.
        device: auto, cpu, cuda, cuda:1 or mps.

    Raises:
        RequestError: there is no such metric, file or source, or too few images.
        RunError: the cache cannot be written.
    """
    with init_world() as world, StopSignals() as stop:
        started, name = time.monotonic(), sanitize(request.reference)
        samples, reference = load_both(images, request.reference, size, stop)
        picture = are_pictures(reference.pixels[:1].transpose(0, 2, 3, 1))
        if not picture:
            check_no_features(request, f"{describe_channels(reference.pixels.shape[1])} of float32")
        features = open_request_features(request, choose_device(device)) if picture else None
        rows = _rows_without_grids(samples)
        check_enough(len(rows), sanitize(images))
        rows = rows[evenly_spaced(len(rows), len(rows) if is_auto(request, "n") else request.n)]
        real = reference_rows(reference, len(rows))
        metrics = _usual_metrics(request, picture, features is not None)
        compared = Comparison(metrics, features, reference, real, world)
        if set(request.metrics) == {"fid"}:
            # With any other metric beside it, a refused FID is a line of the table and no error.
            compared.check_count("fid", len(rows), "--metrics")
        generated = ImageRows(samples, rows)
        fake = compared.compute_features(generated, "samples", generated.key)
        values = compared.measure_values(generated)
        found = list(chain(*compared.measure(generated, fake, True, values).values()))
        drawn = {"images": sanitize(images), "size": size_of(*samples.pixels.shape[2:]), "reference": name}
        spectrum, curves = compared.spectra(generated), [asdict(curve) for curve in compared.curves(generated, values)]
        seconds = round(time.monotonic() - started, 1)
        said = verdict(found)
        return Evaluation(None, drawn, found, verdict=said, spectrum=spectrum, curves=curves, seconds=seconds)


def load_both(images: str, reference: str, size: Size, stop: StopSignals) -> tuple[ImageSet, ImageSet]:
    """Return both sets at one size and with equal channels. RequestError if that cannot be, or images are missing."""
    samples = _load(images, Data(size=size or common_size(open_source(images), _GRIDS)), stop)
    side = samples.settings.size
    real = _load(reference, Data(size=side), stop)
    if real.settings.size != side:
        raise RequestError(
            f"{sanitize(reference)} has images of {real.settings.size} pixels and {sanitize(images)} of "
            f"{side}; give the --size that is stored in both, or what a pack was made of"
        )
    if not (samples.settings.image_format.is_picture and real.settings.image_format.is_picture):
        return _load_values(images, reference, samples, real, stop)
    channels = [one.train.pixels.shape[1] for one in (samples, real)]
    values = _shared_range(samples, real)
    other = values != samples.settings.range
    if other or channels[0] < max(channels):  # grey ones are compared as RGB
        samples = _load(images, Data(size=side, channels=max(channels), range=values, clip=other), stop)
    if channels[1] < max(channels):
        real = _load(reference, Data(size=side, channels=max(channels)), stop)
    check_enough(len(real.train), "the reference")
    return samples.train, real.train


def _load_values(
    images: str, reference: str, samples: Dataset, real: Dataset, stop: StopSignals
) -> tuple[ImageSet, ImageSet]:
    """Return both sets with their values kept as float32; `samples` and `real` are as each was loaded by itself."""
    sets = list[ImageSet]()
    for source, one in ((images, samples), (reference, real)):
        data = Data(size=one.settings.size, dtype="float32", channels=one.settings.channels)
        kept = one if one.settings.dtype == "float32" else _load(source, data, stop)
        sets.append(kept.train)
    kinds = [one.pixels.shape[1] for one in sets]
    if kinds[0] != kinds[1]:
        raise RequestError(
            f"{sanitize(images)} has images of {describe_channels(kinds[0])}, and {sanitize(reference)} of "
            f"{describe_channels(kinds[1])}; only images of the same channels compare"
        )
    check_enough(len(sets[1]), "the reference")
    return sets[0], sets[1]


def _shared_range(samples: Dataset, real: Dataset) -> tuple[float, ...]:
    """Return the range of values for the samples: that of the reference if both are integers deeper than 8 bits."""
    own, other = samples.settings.range, real.settings.range
    whole = all(not {"sixteen_bit"}.isdisjoint(one.report.actions) for one in (samples, real))
    # Two numbers for integers alone; 16 bits need no setting.
    if own == other or not whole or max(len(own), len(other)) > 2:
        return own
    return other or (FULL_RANGE.low, FULL_RANGE.high)


def _load(source: str, data: Data, stop: StopSignals) -> Dataset:
    """Load all images of a source, without classes. RequestError if each has unknown values."""
    base, data = Config(source=source), replace(data, held_out=0.0, labels="none")
    # A batch of one, as there is no training that could want more images than there are.
    try:
        dataset, _ = load_images(replace(base, data=data, training=replace(base.training, batch=1)), stop)
    except NoUsableImageError as error:
        if UNKNOWN_REMEDY not in str(error):
            raise
        raise RequestError(
            f"all images of {sanitize(source)} have NaN, which only a run explains; give it: unfog evaluate RUN"
        ) from None
    if any(UNKNOWN_REMEDY in file.reason for file in dataset.report.skipped):
        say("  images with NaN are left out; `unfog evaluate RUN` compares the known values of samples of a run")
    return dataset


def _rows_without_grids(samples: ImageSet) -> NDArray[np.int64]:
    rows = [i for i, name in enumerate(samples.names) if name not in _GRIDS]
    if len(rows) < len(samples):
        say(f"  {' and '.join(_GRIDS)} are left out, as `unfog sample` writes them beside its images")
    return np.array(rows, np.int64)


def _usual_metrics(request: EvaluationRequest, picture: bool, has_features: bool) -> tuple[str, ...]:
    """Return the metrics of the request, or all usual ones of samples, which are pictures of 8 bits or other values."""
    if request.metrics or not picture:
        return request.metrics or VALUES
    return tuple(name for name in USUAL if has_features or name in PIXEL_METRICS)
