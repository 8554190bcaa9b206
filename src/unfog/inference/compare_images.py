"""Comparison of samples with real images: features of both, the metrics, what real images reach, and the verdict.

Training, `evaluate`, `ema-sweep` and the doctor all compare samples here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unfog.config.requests.evaluate import NOT_COMPARED, ON_REQUEST, VALUES, EvaluationRequest
from unfog.data.dataset import ImageSet, evenly_spaced
from unfog.errors import RequestError
from unfog.evaluation.features import Features, PixelSource, Ranks, compute_features, compute_statistics
from unfog.evaluation.metrics import MetricResult, check_count, compare_features
from unfog.evaluation.pixel_metrics import PIXEL_METRICS, compare_pixels, radial_spectrum
from unfog.evaluation.value_metrics import Curve, MeasuredSamples, RealImages
from unfog.reporting.charts import line_chart
from unfog.reporting.progress import Progress
from unfog.settings import is_auto
from unfog.text import plural
from unfog.training.distributed.world import SINGLE_PROCESS, World
from unfog.values.image_format import CHANNELS, describe_channels
from unfog.values.unknown import UnknownValues

_MOST_PIXELS = 20_000  # samples whose pixels are compared
# Fewest real images that are compared with other real images, and fewest images of a size that has its own metrics.
FEWEST_COMPARED = 10
# Draws of random halves of real images, and the factor of their deviation that gives the interval of the next draw: the
# 95% quantile of Student's t of one degree of freedom less, times sqrt(1 + 1/draws), so that nine of ten are inside.
_DRAWS = {20: 1.77, 10: 1.92, 5: 2.34, 3: 3.37}
_DRAWN = 640_000  # pixels of all halves of one side, if there is more than one draw: about a second
_MOST_REFERENCE = 10_000  # real images, or as many as samples, if those are more

# Share of the value that real images have, from which precision and recall count as reached.
_REACHED = 0.9
# Below this share of their recall, nearly all variety is lost. Then precision means nothing: samples that are all alike
# and lie amid the real images, such as noise that is nearly grey, can have a precision of 1.
_ALIKE = 0.1
_DISTANCES = ("fid", "kid", "fd", "sliced")  # the first that was measured is named
_JUDGED = {
    (True, True): "The samples look like real images and are as varied",
    (True, False): "The samples look like real images, but are less varied",
    (False, True): "The samples are as varied as real images, but many do not look like them",
    (False, False): "Many samples do not look like real images, and they are less varied",
}
_COLLAPSED = "The samples lack almost all variety of real images, so precision means nothing"
_NEAR = "The samples are as close to real images as real images are to each other"
_UNSURE = (
    "There are too few images to tell whether the samples are as close to real images as real images are to each other"
)
_FAR = "The samples are farther from real images than real images are from each other"


class ImageRows:
    """Some images of a set, uint8 [N, C, H, W] by slices."""

    def __init__(self, images: ImageSet, rows: NDArray[np.int64]):
        self.images, self.rows = images, rows

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def key(self) -> str:
        """Name of these images in the cache of features: the number of rows is part of the cache's own key."""
        return f"{self.images.fingerprint} spread"

    def __getitem__(self, key: slice) -> NDArray[np.uint8]:
        return self.images.pixels[self.rows[key]]


@dataclass(frozen=True, eq=False)
class Comparison:
    """Metrics, and the real images that samples are compared with."""

    metrics: Sequence[str]
    features: Features | None
    """None if no metric needs them."""
    reference: ImageSet
    rows: NDArray[np.int64]
    """Rows of the reference images whose features are compared."""
    world: World = SINGLE_PROCESS
    """The ranks that share the computation of features."""
    wrap: str = ""
    """Axes along which images continue at their other side: "", "x", "y" or "xy"."""
    unknown: UnknownValues | None = None
    """What is unknown in images and samples; None if nothing is."""
    # Not arguments, so that `replace` begins them anew: they are of this reference.
    _prepared: dict[int, RealImages] = field(default_factory=dict, repr=False, init=False)
    """Real images by the number of samples that are compared with them."""

    def __post_init__(self) -> None:
        pixels = self.reference.pixels
        dtype = np.dtype(getattr(pixels, "dtype", np.uint8))
        picture = pixels.shape[1] in CHANNELS and dtype == np.uint8
        if not picture:
            check_for_values(self.metrics, f"{describe_channels(pixels.shape[1])} of {dtype}")

    @property
    def real(self) -> ImageRows:
        return ImageRows(self.reference, self.rows)

    @cached_property
    def real_features(self) -> Tensor | None:
        """Features of the real images, float32 [N, D], computed once by all ranks; None if no metric needs them."""
        return self.compute_features(self.real, "real images", self.real.key)

    def compute_features(self, images: PixelSource, what: str, key: str | None = None) -> Tensor | None:
        """Return features, float32 [N, D], computed by all ranks; None if no metric needs them.

        `what` names the images in the progress. `key` names them in the cache of features; None caches nothing.
        """
        features, world = self.features, self.world
        if features is None:
            return None
        with Progress(f"{features.name} of {what}", len(images)) as progress:
            return compute_features(images, features, key, progress.set, Ranks(world.rank, world.size, world.barrier))

    def check_count(self, metric: str, samples: int, instead: str, larger: str = "-n") -> None:
        """Raise RequestError if a metric would be refused for so many samples. See `evaluation.metrics.check_count`."""
        if self.features is not None:
            one = torch.from_numpy(self.reference.take(np.arange(1)).pixels)
            n, most = min(samples, len(self.rows)), len(self.reference)
            check_count(metric, n, one, self.features, instead, larger, most)

    def measure_values(self, samples: PixelSource) -> MeasuredSamples | str | None:
        """Return moments and values of samples, or why there are not any; None if no metric of values is measured."""
        return self._real_images(samples).measure(samples) if any(name in VALUES for name in self.metrics) else None

    def measure(
        self,
        samples: PixelSource,
        fake: Tensor | None,
        baseline: bool = False,
        values: MeasuredSamples | str | None = None,
    ) -> dict[str, list[MetricResult]]:
        """Return the results by metric, as named and in the order of `metrics`: its value, then its parts.

        Args:
            samples: uint8 [N, C, H, W] by slices.
            fake: features of the samples, of `compute_features`.
            baseline: also measure real images against other real images.
            values: of `measure_values`, if it has been called.
        """
        found: dict[str, list[MetricResult]] = {}
        names = [name for name in self.metrics if name not in (*PIXEL_METRICS, *VALUES, *NOT_COMPARED)]
        features, real = self.features, self.real_features
        if features is not None and real is not None and fake is not None and names:
            known = compute_statistics(real, features, self.real.key) if "fid" in names else None
            # In one call, as the metrics share distances and statistics.
            by_features = compare_features(names, real, fake, features=features, reference=known)
            reached = real_baseline(names, real, len(fake), features) if baseline else {}
            by_features = [replace(one, real=reached.get(one.metric)) for one in by_features]
            found = {name: [one] for name, one in zip(names, by_features, strict=True)}
        if by_pixels := [name for name in self.metrics if name in PIXEL_METRICS]:
            pixels = self._pixels_of_both(samples)
            others = self._pixels_of_halves(len(pixels[0])) if baseline else None
            found |= {name: _measure_pixels(name, *pixels, others) for name in by_pixels}
        if by_values := [name for name in self.metrics if name in VALUES]:
            # Real images against real images are measured in any case: such values mean little without them.
            found |= self._real_images(samples).compare(by_values, samples if values is None else values)
        return {name: found[name] for name in self.metrics if name in found}

    def spectra(self, samples: PixelSource) -> dict[str, list[float]]:
        """Return radial spectra of luma as `Evaluation` stores them; {} unless `detail` is measured."""
        if "detail" not in self.metrics:
            return {}
        return luma_spectra(*self._pixels_of_both(samples))

    def curves(self, samples: PixelSource, values: MeasuredSamples | str | None) -> list[Curve]:
        """Return spectra and histograms of channels, of real images and of samples, if these metrics are measured.

        `values` are those of `measure_values`.
        """
        return [] if values is None else self._real_images(samples).curves(self.metrics, values)

    def _real_images(self, samples: PixelSource) -> RealImages:
        """Return twice as many real images as samples, or all of them, with their halves; computed once."""
        count = min(len(samples), _MOST_PIXELS)
        if count not in self._prepared:
            rows = evenly_spaced(len(self.reference), 2 * count)
            halves = len(rows) >= 2 * FEWEST_COMPARED
            rows = rows[: len(rows) - len(rows) % 2] if halves else rows[:count]
            self._prepared[count] = RealImages(ImageRows(self.reference, rows), halves, self.wrap, self.unknown)
        _check_shapes(self._prepared[count].shape, samples[0:1].shape[1:])
        return self._prepared[count]

    def _pixels_of_both(self, samples: PixelSource) -> tuple[Tensor, Tensor]:
        """Return pixels of real images and of as many samples, uint8 [N, C, H, W]."""
        # One of the metrics sorts both sets against each other, so they must be of equal size.
        count = min(len(samples), _MOST_PIXELS, len(self.reference))
        real = np.ascontiguousarray(self.reference.pixels[evenly_spaced(len(self.reference), count)])
        fake = samples[0:count]
        _check_shapes(real.shape[1:], fake.shape[1:])
        return torch.from_numpy(real), torch.from_numpy(fake)

    def _pixels_of_halves(self, count: int) -> Tensor:
        """Return pixels of the real images whose halves are compared: twice `count` of them, or all."""
        count = min(2 * count, _MOST_PIXELS, len(self.reference))
        return torch.from_numpy(np.ascontiguousarray(self.reference.pixels[evenly_spaced(len(self.reference), count)]))


def _check_shapes(real: tuple[int, ...], samples: tuple[int, ...]) -> None:
    if real != samples:
        raise RequestError(f"the reference has images {list(real)}, and the samples are {list(samples)}")


def check_for_values(metrics: Sequence[str], kind: str) -> None:
    """Raise RequestError if a metric is of pictures of 8 bits; `kind` names the images, which are not pictures."""
    wrong = [name for name in metrics if name not in (*VALUES, *NOT_COMPARED)]
    if wrong:
        raise RequestError(
            f"{', '.join(wrong)} compare pictures of 8 bits, grey or RGB, and these images have {kind}; give "
            f"{','.join(VALUES)}, which compare any values, or held_out"
        )


def check_no_features(request: EvaluationRequest, kind: str) -> None:
    """Raise RequestError if features are given for images of this kind, which have other values than pictures."""
    if not is_auto(request, "features"):
        raise RequestError(
            f"features = {request.features} are of pictures of 8 bits, grey or RGB, and mean nothing for {kind}; omit "
            f"them: {', '.join(VALUES)} compare any values"
        )


def check_enough(count: int, what: str) -> None:
    """Raise RequestError if there are too few images for any metric."""
    if count < 10:
        raise RequestError(f"{what} has {plural(count)}; at least 10 are needed")


def _measure_pixels(name: str, real: Tensor, fake: Tensor, others: Tensor | None) -> list[MetricResult]:
    """Return a metric of pixels, and the same of random halves of `others`, real images, for comparison.

    `sliced` falls with the number of images, so the halves have as many images as the samples, if `others` has twice
    as many. Their range is where nine of ten further halves would be. Many pixels take long: one draw, and no range.
    """
    if others is None or (half := len(others) // 2) < FEWEST_COMPARED:
        return compare_pixels([name], real, fake)
    draws = next((count for count in _DRAWS if count * half * real[0, 0].numel() <= _DRAWN), 1)
    generator, reached = torch.Generator().manual_seed(0), list[list[float | None]]()
    with Progress(f"{name} of samples and of halves of the real images", 1 + draws) as progress:
        found = compare_pixels([name], real, fake)
        for _ in range(draws):
            progress.advance(1)
            order = torch.randperm(len(others), generator=generator)
            parts = others[order[:half]], others[order[half : 2 * half]]
            reached.append([one.value for one in compare_pixels([name], *parts)])
    return [_with_halves(one, each) for one, each in zip(found, zip(*reached, strict=True), strict=True)]


def _with_halves(one: MetricResult, values: Sequence[float | None]) -> MetricResult:
    """Return a result with the mean of its values of random halves, and their range if there are several."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):  # refused
        return one
    mean = fmean(known)
    if len(known) == 1:
        return replace(one, real=mean)
    around = _DRAWS[len(known)] * stdev(known)
    return replace(one, real=mean, real_low=max(0.0, mean - around), real_high=mean + around)


def luma_spectra(real: Tensor, fake: Tensor) -> dict[str, list[float]]:
    """Return radial spectra of luma, `generated` and `real` over `frequency`, of pixels uint8 [N, C, H, W]."""
    (frequency, generated), (_, given) = radial_spectrum(fake), radial_spectrum(real)
    return {"frequency": frequency.tolist(), "generated": generated.tolist(), "real": given.tolist()}


def spectrum_chart(spectra: Mapping[str, Sequence[float]], real: str = "real") -> str:
    """Return the chart of `luma_spectra` as SVG; `real` names the real images in it."""
    series = {name: (spectra["frequency"], spectra[key]) for name, key in (("generated", "generated"), (real, "real"))}
    return line_chart(series, "frequency, 1 = highest along a row", "variance of luma", log_y=True)


def reference_rows(reference: ImageSet, count: int) -> NDArray[np.int64]:
    """Return the rows of the real images that `count` samples are compared with."""
    return evenly_spaced(len(reference), max(_MOST_REFERENCE, count))


def real_baseline(names: Sequence[str], real: Tensor, count: int, features: Features | None) -> dict[str, float | None]:
    """Return the metrics of `count` real images, or half of them if there are fewer, against the other real images."""
    count = min(count, len(real) // 2)
    names = [name for name in names if name not in ON_REQUEST]
    if count < FEWEST_COMPARED or not names:
        return {}
    as_samples = np.zeros(len(real), bool)
    as_samples[evenly_spaced(len(real), count)] = True
    rows = torch.from_numpy(as_samples).to(real.device)
    return {one.metric: one.value for one in compare_features(names, real[~rows], real[rows], features=features)}


def verdict(measured: Sequence[MetricResult], copies: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return the verdict; "" if no metric was measured on real images too.

    Precision says how many samples look real, and recall how much of the variety is reached. Each is judged by what
    real images reach against other real images.
    """
    known = {one.metric: one for one in measured if one.value is not None and one.real is not None}
    of_values = [known[name] for name in VALUES if name in known]
    distance = next((known[name] for name in _DISTANCES if name in known), None)
    shares = [known[name] for name in ("precision", "recall") if name in known]
    if len(shares) == 2:
        looks_real, varied = (_reached(one) for one in shares)
        said = _JUDGED[looks_real, varied] if _reached(shares[1], _ALIKE) else _COLLAPSED
    elif distance is not None:
        said = _FAR if not _near(distance) else _UNSURE if _uncertain(distance) else _NEAR
    elif of_values:
        far = [one for one in of_values if not _near(one)]
        shares, said = far or of_values, _FAR if far else _NEAR
    else:
        return ""
    evidence = [f"{one.metric} {one.value:.3g} (real images {real_text(one)})" for one in (*shares, distance) if one]
    if within := ", ".join(one.metric for one in of_values if distance is None and one not in shares):
        evidence[-1] += f"; within: {within}"
    copied = "; some are nearly copies of training images" if any(c["severity"] == "warning" for c in copies) else ""
    return f"{said}: {', '.join(evidence)}{copied}."


def real_text(one: MetricResult, digits: int = 3) -> str:
    """Return the metric of real images against each other: "0.12", or "0.1 to 0.15" of random halves; "" if unknown."""
    if one.real_low is not None and one.real_high is not None:
        return f"{one.real_low:.{digits}g} to {one.real_high:.{digits}g}"
    return "" if one.real is None else f"{one.real:.{digits}g}"


def _near(one: MetricResult) -> bool:
    # A kernel distance may be negative; its interval shows whether it exceeds that of real images.
    lowest = one.value if one.low is None else one.low
    usual = one.real if one.real_high is None else one.real_high
    return lowest is not None and usual is not None and lowest <= max(usual, usual / _REACHED)


def _uncertain(one: MetricResult) -> bool:
    """Return True if halves of real images differ by more than what still counts as reached, and hold the value."""
    if one.value is None or one.real is None or one.real_low is None or one.real_high is None:
        return False
    return one.value > one.real_low and one.real_high > one.real / _REACHED


def _reached(one: MetricResult, share: float = _REACHED) -> bool:
    return one.value is not None and one.real is not None and one.value >= share * one.real
