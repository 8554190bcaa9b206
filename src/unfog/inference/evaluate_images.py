"""Evaluation of images without a run: compare those of any program with real ones."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from unfog.config.requests.evaluate import LOSSES, METRICS, ON_REQUEST, EvaluationRequest
from unfog.config.schema import Config
from unfog.data.dataset import Dataset, ImageSet, evenly_spaced
from unfog.data.scan import common_size
from unfog.data.sources.registry import open_source
from unfog.data.values.value_range import FULL_RANGE
from unfog.errors import RequestError
from unfog.evaluation.pixel_metrics import PIXEL_METRICS
from unfog.inference.compare_images import Comparison, ImageRows, reference_rows, verdict
from unfog.inference.evaluate import check_enough, open_request_features
from unfog.inference.evaluation_files import Evaluation
from unfog.pipeline.load_data import load_images
from unfog.process.device import choose_device
from unfog.process.signals import StopSignals
from unfog.process.torch_flags import caller_flags_kept
from unfog.reporting.progress import say
from unfog.text import sanitize
from unfog.training.distributed.world import init_world
from unfog.values.image_format import Size, size_of

_GRIDS = ("grid.png", "strip.png")  # which `unfog sample` writes beside its images


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
        features = open_request_features(request, choose_device(device))
        samples, reference = _load_both(images, request.reference, size, stop)
        rows = _rows_without_grids(samples)
        check_enough(len(rows), sanitize(images))
        rows = rows[evenly_spaced(len(rows), request.n or len(rows))]
        real = reference_rows(reference, len(rows))
        compared = Comparison(_metrics(request, features is not None), features, reference, real, world)
        if set(request.metrics) == {"fid"}:
            # With any other metric beside it, a refused FID is a line of the table and no error.
            compared.check_count("fid", len(rows), "--metrics")
        generated = ImageRows(samples, rows)
        fake = compared.compute_features(generated, "samples", generated.key)
        found = list(chain(*compared.measure(generated, fake, baseline=True).values()))
        drawn = {"images": sanitize(images), "size": size_of(*samples.pixels.shape[2:]), "reference": name}
        spectrum = compared.spectra(generated)
        seconds = round(time.monotonic() - started, 1)
        return Evaluation(None, drawn, found, verdict=verdict(found), spectrum=spectrum, seconds=seconds)


def _load_both(images: str, reference: str, size: Size, stop: StopSignals) -> tuple[ImageSet, ImageSet]:
    """Return both sets at one size and with equal channels. RequestError if that cannot be, or images are missing."""
    samples = _load(images, size or common_size(open_source(images), _GRIDS), 0, stop)
    side = samples.settings.size
    real = _load(reference, side, 0, stop)
    if real.settings.size != side:
        raise RequestError(
            f"{sanitize(reference)} has images of {real.settings.size} pixels and {sanitize(images)} of "
            f"{side}; give the --size that is stored in both, or what a pack was made of"
        )
    channels = [one.train.pixels.shape[1] for one in (samples, real)]
    values = _shared_range(samples, real)
    other = values != samples.settings.range
    if other or channels[0] < max(channels):  # grey ones are compared as RGB
        samples = _load(images, side, max(channels), stop, values, clip=other)
    if channels[1] < max(channels):
        real = _load(reference, side, max(channels), stop)
    check_enough(len(real.train), "the reference")
    return samples.train, real.train


def _shared_range(samples: Dataset, real: Dataset) -> tuple[float, ...]:
    """Return the range of values for the samples: that of the reference if both are integers deeper than 8 bits."""
    own, other = samples.settings.range, real.settings.range
    whole = all(not {"sixteen_bit"}.isdisjoint(one.report.actions) for one in (samples, real))
    # Two numbers for integers alone; 16 bits need no setting.
    if own == other or not whole or max(len(own), len(other)) > 2:
        return own
    return other or (FULL_RANGE.low, FULL_RANGE.high)


def _load(
    source: str,
    size: Size,
    channels: int,
    stop: StopSignals,
    value_range: tuple[float, ...] = (),
    clip: bool = False,
) -> Dataset:
    base = Config(source=source)
    data = replace(base.data, size=size, channels=channels, held_out=0.0, labels="none", range=value_range, clip=clip)
    # A batch of one, as there is no training that could want more images than there are.
    dataset, _ = load_images(replace(base, data=data, training=replace(base.training, batch=1)), stop)
    return dataset


def _rows_without_grids(samples: ImageSet) -> NDArray[np.int64]:
    rows = [i for i, name in enumerate(samples.names) if name not in _GRIDS]
    if len(rows) < len(samples):
        say(f"  {' and '.join(_GRIDS)} are left out, as `unfog sample` writes them beside its images")
    return np.array(rows, np.int64)


def _metrics(request: EvaluationRequest, has_features: bool) -> tuple[str, ...]:
    """Return the metrics of the request, or all that are possible without a run."""
    usual = (name for name in METRICS if name not in (*ON_REQUEST, *LOSSES))
    return request.metrics or tuple(name for name in usual if has_features or name in PIXEL_METRICS)
