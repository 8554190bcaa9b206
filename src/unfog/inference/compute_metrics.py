"""The metrics of an evaluation: samples against real images, memorization, and held-out losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unfog.config.requests.evaluate import OBEYS, WORTH
from unfog.config.schema import Config
from unfog.config.spec_strings import StepOrRun
from unfog.custom import is_own_choice
from unfog.data.buckets.joined_set import join_columns
from unfog.data.dataset import Dataset
from unfog.diffusion.denoiser import Denoiser
from unfog.diffusion.likelihood import best_end, bits_per_dim
from unfog.diffusion.noise import NoiseSource
from unfog.diffusion.sampler import Kind
from unfog.errors import RequestError
from unfog.evaluation.condition_worth import ConditionWorth
from unfog.evaluation.features import compute_features
from unfog.evaluation.held_out import HeldOut, HeldOutBuckets, MeanEstimate
from unfog.evaluation.image_agreement import ImageAgreement
from unfog.evaluation.judged_kinds import ConditionScore
from unfog.evaluation.metrics import MetricResult, Z
from unfog.evaluation.value_metrics import Curve
from unfog.files.safe_files import make_folder, write_atomic
from unfog.inference.clip_scores import measure_clip
from unfog.inference.compare_images import FEWEST_COMPARED, reference_rows, spectrum_chart, verdict
from unfog.inference.evaluation_files import (
    Against,
    Evaluation,
    EvaluationSamples,
    EvaluationSetup,
    GeneratedSamples,
    MixedSamples,
    describe_sampling,
)
from unfog.inference.loaded_run import LoadedRun, weights_digest
from unfog.inference.memorization import (
    DRAWN,
    FEWEST,
    UnseenImages,
    check_memorization_by_features,
    check_memorization_by_pixels,
)
from unfog.inference.obeyed_conditions import ConditionJudge, in_parts, judged_columns, measure_worth
from unfog.inference.true_images import compare_with_truth
from unfog.pipeline.build import build_held_out_set, build_loss_at
from unfog.pipeline.generate import generate_images, sample_calls, view_grid
from unfog.reporting.charts import as_file, curve_chart
from unfog.reporting.findings import Finding
from unfog.reporting.image_grids import Pixels, save_png
from unfog.reporting.progress import Progress
from unfog.training.checkpoints import format as checkpoint
from unfog.training.distributed.world import World
from unfog.values.columns import Column, rows_of
from unfog.values.condition_format import Given
from unfog.values.condition_requests import spell_guidance

_MOST_HELD_OUT = 1000  # held-out images of the loss
_MOST_FOR_WORTH = 256  # held-out images of the worth, which takes two losses for each condition
_MOST_FOR_BITS = 256  # held-out images of the bits, which take many more network calls
_FOR_END = 16  # training images by which the cleanest level of the bits is chosen, in one call
LEVELS = 64  # network calls per image for the bits; with 64 the bound is within a percent


def compute_metrics(
    run: LoadedRun, setup: EvaluationSetup, samples: EvaluationSamples, world: World, out: Path
) -> Evaluation:
    """Compute the metrics of `setup`, and search the samples for copies of training images, shown in the folder `out`.

    Metrics of a run with buckets are of the samples of all sizes, then of each size.
    The ranks share the computation of features. Rank 0 does the rest, and the others return no metrics.
    """
    generation = _describe_generation(run, setup)
    metrics, copies = list[MetricResult](), list[dict[str, Any]]()
    spectrum: dict[str, list[float]] = {}
    curves = list[Curve]()
    of_sizes = list[MetricResult]()
    obeys, judge, worth = list[ConditionScore](), "", list[ConditionWorth]()
    truth = list[ImageAgreement]()
    if (mixed := samples.mixed) is not None:
        compared = setup.compared
        _ = compared.real_features  # by all ranks, as those of the samples
        fake = compared.compute_features(mixed, "samples", mixed.key)
        if world.is_main:
            values = compared.measure_values(mixed)
            metrics += chain(*compared.measure(mixed, fake, True, values).values())
            spectrum, curves = compared.spectra(mixed), compared.curves(mixed, values)
            _draw_spectra(spectrum, out)
            _draw_curves(curves, out)
            copies += _search_copies(setup, mixed, fake, out)
            judged = OBEYS in compared.metrics and judged_columns(run.config.conditions)
            asked = _columns_of_samples(run.config, setup, mixed) if judged or setup.clip else {}
            if OBEYS in compared.metrics:
                truth = _compare_with_truth(run, setup)
            if judged:
                obeys, judge = _judge_samples(run.config, setup, mixed, asked)
            if setup.clip is not None:
                scores, how = measure_clip(run.config, setup.dataset, mixed, asked, setup.clip)
                obeys, judge = [*obeys, *scores], "; ".join(filter(None, (judge, how)))
        if len(samples.parts) > 1:
            of_sizes = _measure_sizes(setup, samples.parts, world)
    said = verdict(metrics, copies)
    metrics += of_sizes
    if world.is_main:
        drawn = describe_sampling(generation, without="reference")
        metrics = [replace(one, drawn=drawn) for one in metrics] + _held_out_metrics(run, setup)
        if WORTH in setup.compared.metrics:
            held_out = build_held_out_set(setup.dataset, run.config, run.device, _MOST_FOR_WORTH)
            assert held_out is not None, "the worth is left out where no images are held out"
            worth = measure_worth(run.config, held_out, build_loss_at(run.network, run.config), setup.generation.batch)
    drawn_curves = [asdict(curve) for curve in curves]
    return Evaluation(run.step, generation, metrics, copies, said, spectrum, drawn_curves, obeys, judge, worth, truth)


def _compare_with_truth(run: LoadedRun, setup: EvaluationSetup) -> list[ImageAgreement]:
    """Return how draws from the images that are conditions agree with the held-out images themselves."""

    def draw(count: int, given: Given) -> Pixels:
        generation = replace(setup.generation, count=count, given=given, first=0)
        with Progress("drawing for held-out images", count) as progress:
            return generate_images(run.network, run.config, generation, progress.update, guide=setup.guide)

    return compare_with_truth(run.config, setup.dataset.of_one_size, draw)


def _judge_samples(
    config: Config, setup: EvaluationSetup, samples: GeneratedSamples | MixedSamples, asked: Mapping[str, Column]
) -> tuple[list[ConditionScore], str]:
    """Return the scores of samples that were drawn with the columns `asked`, and the description of their judge."""
    judge = ConditionJudge.open(config, setup.dataset)
    return judge.score(in_parts(samples), asked), judge.description


def _columns_of_samples(
    config: Config, setup: EvaluationSetup, samples: GeneratedSamples | MixedSamples
) -> dict[str, Column]:
    """Return the columns that samples were drawn with, in their order."""
    given = [
        one.run.config.conditions.columns_of(one.generation.given, range(one.generation.count)) for one in setup.parts
    ]
    joined = {name: join_columns([one[name] for one in given], config.image_format) for name in given[0]}
    return rows_of(joined, samples.order) if isinstance(samples, MixedSamples) else joined


def _measure_sizes(setup: EvaluationSetup, samples: Sequence[GeneratedSamples], world: World) -> list[MetricResult]:
    """Return the metrics of the samples of each size, compared with the real images of that size, if these are enough.

    Values that are refused are left out, as are the parts of a metric. Ranks other than 0 return no metrics.
    """
    found = list[MetricResult]()
    for part, own in zip(setup.parts, samples):
        if min(len(part.reference), len(own)) < FEWEST_COMPARED:
            continue
        rows = reference_rows(part.reference, len(own))
        compared = replace(setup.compared, reference=part.reference, rows=rows)
        _ = compared.real_features
        fake = compared.compute_features(own, f"samples {part.sides}", own.key)
        if world.is_main:
            measured = [results[0] for results in compared.measure(own, fake, baseline=True).values()]
            found += [replace(one, metric=f"{one.metric} {part.sides}") for one in measured if one.value is not None]
    return found


def _describe_generation(run: LoadedRun, setup: EvaluationSetup) -> dict[str, Any]:
    generation = setup.generation
    low, high = generation.interval
    partly = generation.guidance != 1 and (low, high) != (0.0, 1.0)
    sizes = [f"{part.generation.count:,} of {part.sides}" for part in setup.parts]
    # The adaptive sampler calls the network as often as it needs, and so may a step of somebody's own.
    kind = generation.sampler.kind
    counted = kind != "adaptive" and not is_own_choice(Kind, kind)
    data = run.config.data
    masked = {"unknown_share": round(data.unknown_share, 6), "samples_masked": bool(data.unknown_mask)}
    return {
        "weights": run.weights if run.ema is None else f"{run.weights} of width {run.ema:g}",
        "sampler": generation.sampler.kind,
        "steps": generation.sampler.steps,
        **({"calls": sample_calls(generation, run.config.diffusion.schedule)} if counted else {}),
        "seed": generation.seed,
        # A number as such, as it always was.
        "guidance": spell_guidance(generation.guidance)
        if isinstance(generation.guidance, tuple)
        else generation.guidance,
        **({"guide": setup.guide_name} if setup.guide_name else {}),
        **({"guide every": generation.guide_every} if generation.guide_every != 1 else {}),
        **({"within": f"{low:g} to {high:g} of noise"} if partly else {}),
        "precision": generation.precision,
        "labels": "as in the data" if generation.given else "none",
        **({"sizes": ", ".join(sizes)} if len(sizes) > 1 else {}),
        **(masked if data.has_unknown else {}),
        "reference": setup.reference_name,
    }


def _draw_spectra(spectrum: Mapping[str, Sequence[float]], out: Path) -> None:
    """Write spectrum.svg, if the spectra were measured, into the folder `out`."""
    if spectrum:
        make_folder(out, out.parents[1])  # RUN/evaluations/NAME
        write_atomic(out / "spectrum.svg", as_file(spectrum_chart(spectrum)), out.parents[1], shared=True)


def _draw_curves(curves: Sequence[Curve], out: Path) -> None:
    """Write the charts of spectra and histograms of channels, such as histogram-0.svg, into the folder `out`."""
    if curves:
        make_folder(out, out.parents[1])  # RUN/evaluations/NAME
    for curve in curves:
        name = f"{curve.metric}-{curve.channel}.svg"
        write_atomic(out / name, as_file(curve_chart(asdict(curve))), out.parents[1], shared=True)


def _search_copies(
    setup: EvaluationSetup, samples: GeneratedSamples | MixedSamples, fake: Tensor | None, out: Path
) -> list[dict[str, Any]]:
    """Search for copies of training images by pixels and by features, and save images of the nearest pairs."""
    dataset, some = setup.dataset, samples[0:DRAWN].transpose(0, 2, 3, 1)
    config = setup.parts[0].run.config
    make_folder(out, out.parents[1])  # RUN/evaluations/NAME
    save_png(out / "drawn.png", out.parents[1], view_grid(config, some[:64], ()))
    if len(dataset.train) < FEWEST or not config.image_format.is_picture:
        return []
    with Progress("searching copies", len(dataset.train)) as progress:
        found = {"pixels": check_memorization_by_pixels(some, dataset, progress.update)}
    features, real = setup.compared.features, setup.compared.real_features
    # Only against the training images: features of another reference say nothing about copies.
    if features is not None and real is not None and fake is not None and setup.compared.reference is dataset.train:
        unseen = compute_features(UnseenImages(dataset).pixels, features)
        name = features.name if features.name != "pixels" else "small pixels"
        found[name] = check_memorization_by_features(
            some, fake[: len(some)], real, setup.compared.rows, unseen, dataset
        )
    return [_save_search(by, finding, out) for by, finding in found.items()]


def _save_search(by: str, finding: Finding, out: Path) -> dict[str, Any]:
    """Save the image of the nearest pairs, and return the result in its stored form."""
    name = f"nearest-{by.replace(' ', '-')}.png"
    picture = finding.figures[0].image
    assert picture is not None, "the first figure shows the pairs"
    save_png(out / name, out.parents[1], picture)
    return {
        "by": by,
        "severity": finding.severity,
        "evidence": finding.evidence,
        "remedy": finding.remedy,
        "facts": dict(finding.facts),
        "picture": f"{out.name}/{name}",
    }


def _held_out_metrics(run: LoadedRun, setup: EvaluationSetup) -> list[MetricResult]:
    found, config, batch = list[MetricResult](), run.config, setup.generation.batch
    if "held_out" in setup.compared.metrics:
        held_out = build_held_out_set(setup.dataset, config, run.device, _MOST_HELD_OUT)
        assert held_out is not None, "the loss is left out where no images are held out"
        passes = config.evaluate.levels * held_out.images * (1 if setup.against is None else 2)
        with Progress("measuring losses", passes) as progress:
            losses = held_out_losses(run.network, config, held_out, batch, progress.advance)
            found.append(_as_metric("held_out", MeanEstimate.over_images(losses), ""))
            if isinstance(held_out, HeldOutBuckets):
                found += _losses_of_sizes(held_out, losses)
            if setup.against is not None:
                others = held_out_losses(setup.against.load(), config, held_out, batch, progress.advance)
                found.append(_held_out_difference(losses, others, setup.against.name))
    if "bits" in setup.compared.metrics:
        held_out = _held_out_set(setup.dataset, run, _MOST_FOR_BITS)
        choosing = _held_out_set(replace(setup.dataset, held_out=setup.dataset.train), run, _FOR_END)
        with Progress("measuring bits", len(held_out.x0)) as progress:
            seed = setup.generation.seed
            found.append(bits_per_value(run, held_out, choosing, batch, seed, progress.advance))
    return found


def _losses_of_sizes(held_out: HeldOutBuckets, losses: Tensor) -> list[MetricResult]:
    """Return the mean loss of the images of each size; losses [L, N] are of all of them."""
    found = list[MetricResult]()
    for part, own in zip(held_out.parts, torch.split(losses, [part.images for part in held_out.parts], 1)):
        height, width = part.x0.shape[2:]
        found.append(_as_metric(f"held_out {width}x{height}", MeanEstimate.over_images(own), ""))
    return found


def _held_out_set(dataset: Dataset, run: LoadedRun, most: int) -> HeldOut:
    held_out = build_held_out_set(dataset, run.config, run.device, most)
    assert isinstance(held_out, HeldOut), "bits need images of one size; others have no bits"
    return held_out


def held_out_losses(
    network: nn.Module, config: Config, held_out: HeldOut | HeldOutBuckets, batch: int, progress: Callable[[int], None]
) -> Tensor:
    """Return the loss [L, N] of each image at each noise level; `progress` gets the images of every forward pass."""
    return held_out.losses(build_loss_at(network, config), batch, progress=progress)[0]


def open_against(run: LoadedRun, against: StepOrRun | None) -> Against | None:
    """Return the other network of a comparison of held-out losses: of a step of the run, or of another run.

    RequestError if it does not exist, or the other run has other images or another task.
    """
    if against is None:
        return None
    if isinstance(against, int):
        saved = checkpoint.find_checkpoint(run.folder.checkpoints, against)
        return Against(against, f"that at step {against:,}", lambda: run.load_network(saved, against)[0])
    other = LoadedRun(against, run.weights, device=str(run.device), ema=run.ema)
    other = other.at_size(run.config.data.size) if run.resized else other
    if differences := _differences_of_tasks(run.config, other.config):
        raise RequestError(
            f"--against {against} has other {' and '.join(differences)} than {run.path}, so its held-out losses are of "
            "another task; compare samples of both, with one seed: unfog evaluate RUN --metrics kid, or sliced, or "
            "spectrum of values"
        )
    return Against(weights_digest(other.network), f"that of {against} at step {other.step:,}", lambda: other.network)


def _differences_of_tasks(ours: Config, theirs: Config) -> list[str]:
    """Return the differences between two tasks. Loss and weighting may: both are measured by our own."""
    diffusion = replace(theirs.diffusion, loss=ours.diffusion.loss, weighting=ours.diffusion.weighting)
    pairs = {
        "images": ((ours.fingerprint, ours.data.held_out), (theirs.fingerprint, theirs.data.held_out)),
        "sizes or value maps": (ours.image_format, theirs.image_format),
        "conditions": (ours.conditions, theirs.conditions),
        "latents": ((ours.autoencoder_folder, ours.latents), (theirs.autoencoder_folder, theirs.latents)),
        "diffusion settings (target, path, schedule)": (ours.diffusion, diffusion),
    }
    return [name for name, (one, other) in pairs.items() if one != other]


def _held_out_difference(losses: Tensor, others: Tensor, name: str) -> MetricResult:
    """Return how much higher the loss is than that of another network, paired by image."""
    difference = paired_difference(losses, others)
    sure = abs(difference.value) > Z * difference.error
    which = "lower" if difference.value < 0 else "higher"
    note = f"{which} than {name}" if sure else f"not significantly different from {name}"
    return _as_metric("held_out_difference", difference, f"{note}, by the same images and noise")


def bits_per_value(
    run: LoadedRun, held_out: HeldOut, others: HeldOut, batch: int, seed: int, progress: Callable[[int], None]
) -> MetricResult:
    """Return the variational bound on the bits per dimension (VDM, Kingma et al. 2021).

    `others` are images by which the cleanest level is chosen.
    """
    diffusion, found = run.config.diffusion, []
    denoiser = Denoiser(run.network, diffusion, diffusion.learned_variance)

    def part(images: HeldOut, first: int, count: int) -> tuple[partial[Tensor], Tensor, NoiseSource]:
        x0 = images.x0[first : first + count]
        conditions = images.conditions.rows(slice(first, first + count))
        # Noise by the number of the image, so that the batch size does not change the result.
        source = NoiseSource(seed, range(first, first + len(x0)), (x0.shape[1], x0.shape[2], x0.shape[3]), x0.device)
        return partial(denoiser, conditions=conditions), x0, source

    guess, x0, source = part(others, 0, len(others.x0))
    end = best_end(guess, diffusion, x0, source.draw)
    for first in range(0, len(held_out.x0), batch):
        guess, x0, source = part(held_out, first, batch)
        found.append(bits_per_dim(guess, diffusion, x0, LEVELS, source.draw, end))
        progress(len(x0))
    note = (
        f"upper bound on bits per dimension, from at most {LEVELS} noise levels, down to a share of noise of {end:.2g}"
    )
    return _as_metric("bits", MeanEstimate.over_images(torch.cat(found)[None].cpu()), note)


def _as_metric(name: str, mean: MeanEstimate, note: str) -> MetricResult:
    if math.isnan(mean.error):  # of a single image
        return MetricResult(name, mean.value, None, None, None, mean.n, 0, "none", "none", note)
    low, high = mean.value - Z * mean.error, mean.value + Z * mean.error
    return MetricResult(name, mean.value, low, high, mean.error, mean.n, 0, "none", "none", note)


def paired_difference(a: Tensor, b: Tensor) -> MeanEstimate:
    """Mean of the differences a - b of losses [L, N] on the same images with the same noise, with its standard error.

    What the images and the noise have in common drops out, so it separates two checkpoints that lie far within each
    other's intervals. ValueError if they are not of the same images and levels.
    """
    if a.shape != b.shape:
        raise ValueError(f"losses {list(a.shape)} and {list(b.shape)} are not of the same images and levels")
    return MeanEstimate.over_images(a - b)
