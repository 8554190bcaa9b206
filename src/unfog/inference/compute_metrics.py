"""The measuring of an evaluation: pictures against real ones, copies of training images, and what is held out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unfog.data.dataset import Dataset, ImageSet, evenly_spaced
from unfog.errors import RequestError
from unfog.evaluation.feature_store import PixelSource, compute_features, compute_statistics, delete_features
from unfog.evaluation.features import Features
from unfog.evaluation.held_out import HeldOut
from unfog.evaluation.metrics import MetricResult, compare_features
from unfog.evaluation.sliced_wasserstein import PIXEL_METRICS, compare_pixels
from unfog.inference import held_out_metrics
from unfog.inference import memorization as copies
from unfog.inference.generated import GeneratedSamples
from unfog.inference.results import LOSSES, Evaluation, EvaluationSetup
from unfog.pipeline.build import build_held_out_set
from unfog.pipeline.generate import sample_grid
from unfog.reporting.findings import Finding
from unfog.reporting.image_grids import save_png
from unfog.reporting.progress import Progress
from unfog.training.checkpoints import format as checkpoint
from unfog.training.distributed.world import World

if TYPE_CHECKING:
    from unfog.inference.run import Run

MOST_PIXELS = 20_000
"""Pictures whose pixels are compared."""


class ImageRows:
    """Some images of a set, by slices."""

    def __init__(self, images: ImageSet, rows: NDArray[np.int64]):
        self.images, self.rows = images, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: slice) -> NDArray[np.uint8]:
        return self.images.pixels[self.rows[key]]


def measure_all(
    run: Run, chosen: EvaluationSetup, prepared: Dataset, pictures: GeneratedSamples | None, world: World, out: Path
) -> Evaluation:
    """All that was asked for, and whether training images come back; the latter as pictures in `out` as well.

    Features are shared between processes; the rest is the first one's work, and the others return without it.
    """
    drawing, found, searches = chosen.drawing, list[MetricResult](), list[dict[str, Any]]()
    part = drawing.guidance != 1 and drawing.interval != (0.0, 1.0)
    how = {
        "weights": run.weights,
        "sampler": drawing.sampler.kind,
        "steps": drawing.sampler.steps,
        "seed": drawing.seed,
        "guidance": drawing.guidance,
        **({"within": f"{drawing.interval[0]:g} to {drawing.interval[1]:g} of noise"} if part else {}),
        "precision": drawing.precision,
        "labels": "as in the data" if drawing.labels else "none",
        "reference": chosen.what,
    }
    if pictures is not None:
        real, drawn = both_features(chosen, pictures, world)
        if world.first:
            found += of_pictures(chosen, pictures, real, drawn)
            searches += of_copies(chosen, prepared, pictures, real, drawn, out)
    if world.first:
        told = ", ".join(f"{name} {value}" for name, value in how.items() if name != "reference")
        found = [replace(one, drawn=told) for one in found] + of_held_out(run, chosen, prepared)
    return Evaluation(run.checkpoint.step, how, found, searches)


def both_features(
    chosen: EvaluationSetup, pictures: GeneratedSamples, world: World
) -> tuple[Tensor | None, Tensor | None]:
    """Features of the real images and of the pictures, each process computing a part; None where none are asked for."""
    features = chosen.features
    if features is None:
        return None, None
    real = shared(ImageRows(chosen.reference, chosen.rows), features, key_of_real(chosen), world, "real images")
    return real, shared(pictures, features, pictures.folder.name, world, "pictures")


def forget_drawn(chosen: EvaluationSetup, pictures: GeneratedSamples | None) -> None:
    """Remove the features of the pictures from the cache, once all processes have read them and the result is stored.

    Hardly anybody asks for them again. Those of the real images stay, for the next checkpoint, and the pictures too.
    """
    if chosen.features is not None and pictures is not None:
        delete_features(pictures.folder.name, len(pictures), chosen.features)


def key_of_real(chosen: EvaluationSetup) -> str:
    """What features of the real images are kept under: they are spread over the set, as many as there are."""
    return f"{chosen.reference.fingerprint} spread"


def shared(pixels: PixelSource, features: Features, key: str, world: World, what: str) -> Tensor:
    """Features of these by all processes, with progress."""
    with Progress(f"{features.name} of {what}", len(pixels)) as progress:

        def update(done: int, total: int) -> None:
            progress.total = total
            progress.update(done)

        return compute_features(pixels, features, key, update, world.rank, world.size, world.barrier)


def of_pictures(
    chosen: EvaluationSetup, pictures: GeneratedSamples, real: Tensor | None, drawn: Tensor | None
) -> list[MetricResult]:
    """The metrics of the pictures, in the order in which they were asked for."""
    found: dict[str, list[MetricResult]] = {}
    names = [name for name in chosen.metrics if name not in (*PIXEL_METRICS, *LOSSES)]
    with Progress("computing metrics", None):
        features = chosen.features
        if features is not None and real is not None and drawn is not None and names:
            known = compute_statistics(real, features, key_of_real(chosen)) if "fid" in names else None
            # At once, as they share what they need.
            by_features = compare_features(names, real, drawn, features=features, reference=known)
            found = {name: [one] for name, one in zip(names, by_features, strict=True)}
        found |= {name: of_pixels(name, chosen, pictures) for name in chosen.metrics if name in PIXEL_METRICS}
    return [one for name in chosen.metrics for one in found.get(name, [])]


def of_pixels(name: str, chosen: EvaluationSetup, pictures: GeneratedSamples) -> list[MetricResult]:
    """A metric of pixels, of as many real images as there are pictures, evenly spread: both are cut to equal size."""
    count = min(len(pictures), MOST_PIXELS, len(chosen.reference))
    real = np.ascontiguousarray(chosen.reference.pixels[evenly_spaced(len(chosen.reference), count)])
    drawn = pictures[0:count]
    if real.shape[1:] != drawn.shape[1:]:
        raise RequestError(
            f"the reference has images {list(real.shape[1:])}, and the run draws {list(drawn.shape[1:])}"
        )
    return compare_pixels([name], torch.from_numpy(real), torch.from_numpy(drawn))


def of_copies(
    chosen: EvaluationSetup,
    prepared: Dataset,
    pictures: GeneratedSamples,
    real: Tensor | None,
    drawn: Tensor | None,
    out: Path,
) -> list[dict[str, Any]]:
    """Searches for copies of training images, by pixels and by features, each with a picture of the nearest pairs."""
    some = pictures[0 : copies.DRAWN].transpose(0, 2, 3, 1)
    save_png(out / "drawn.png", sample_grid(some[:64], ()))
    if not copies.enough_images(prepared):
        return []
    with Progress("searching copies", len(prepared.train)) as progress:
        found = {"pixels": copies.check_memorization_by_pixels(some, prepared, progress.update)}
    features = chosen.features
    if features is not None and real is not None and drawn is not None and chosen.reference is prepared.train:
        unseen = compute_features(copies.UnseenImages(prepared).pixels, features)
        name = features.name if features.name != "pixels" else "small pixels"
        found[name] = copies.check_memorization_by_features(
            some, drawn[: len(some)], real, chosen.rows, unseen, prepared
        )
    return [told(by, finding, out) for by, finding in found.items()]


def told(by: str, finding: Finding, out: Path) -> dict[str, Any]:
    """A search as it is stored, with its picture of the nearest pairs written beside."""
    name = f"nearest-{by.replace(' ', '-')}.png"
    picture = finding.figures[0].image
    assert picture is not None, "the pairs are always shown"
    save_png(out / name, picture)
    return {
        "by": by,
        "severity": finding.severity,
        "evidence": finding.evidence,
        "remedy": finding.remedy,
        "facts": dict(finding.facts),
        "picture": f"{out.name}/{name}",
    }


def of_held_out(run: Run, chosen: EvaluationSetup, prepared: Dataset) -> list[MetricResult]:
    """Loss and bits of the held-out images, as far as they are asked for."""
    found, config, batch = list[MetricResult](), run.config, chosen.drawing.batch
    if "held_out" in chosen.metrics:
        held_out = some_held_out(prepared, run, held_out_metrics.MOST)
        passes = len(held_out.levels) * len(held_out.x0) * (1 if chosen.against is None else 2)
        with Progress("measuring losses", passes) as progress:
            count = counting(progress)
            losses = held_out_metrics.held_out_losses(run.network, config, held_out, batch, count)
            found.append(held_out_metrics.held_out_loss(losses))
            if chosen.against is not None:
                other = run.load_network(checkpoint.find(run.folder.checkpoints, chosen.against), chosen.against)
                others = held_out_metrics.held_out_losses(other, config, held_out, batch, count)
                found.append(held_out_metrics.held_out_difference(losses, others, chosen.against))
    if "bits" in chosen.metrics:
        held_out = some_held_out(prepared, run, held_out_metrics.LIKELY)
        with Progress("measuring bits", len(held_out.x0)) as progress:
            seed = chosen.drawing.seed
            found.append(
                held_out_metrics.bits_per_value(run.network, config, held_out, batch, seed, counting(progress))
            )
    return found


def some_held_out(prepared: Dataset, run: Run, most: int) -> HeldOut:
    """Held-out images, of which there are some, as was made sure of before."""
    held_out = build_held_out_set(prepared, run.config, run.device, most)
    assert held_out is not None
    return held_out


def counting(progress: Progress) -> Callable[[int], None]:
    """Adds up what it is told."""
    done = 0

    def add(count: int) -> None:
        nonlocal done
        done += count
        progress.update(done)

    return add
