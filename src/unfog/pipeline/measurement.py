"""Measurements of inverse problems: a person's file or function, and what was observed, checked before sampling."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unfog.config.schema import Config
from unfog.config.spec_strings import quote
from unfog.custom import consent
from unfog.data.file_rows import map_array
from unfog.diffusion.losses.pixel_loss import SquaredError
from unfog.diffusion.posterior import Observation
from unfog.errors import RequestError
from unfog.files.safe_files import read_file, regular_file
from unfog.pipeline.generate import samples_show_unknown, with_legend
from unfog.pipeline.sample_folder import SampleFolder
from unfog.reporting.image_grids import grid
from unfog.reporting.progress import say, warn
from unfog.text import plural
from unfog.values.colour_map import COLOUR_MAPS, GREY
from unfog.values.image_format import parse_view

MeasureInput = str | PathLike[str] | Callable[[Tensor], Tensor]
ObservedInput = str | PathLike[str] | NDArray[Any] | Tensor
_LARGEST_CODE = 2**24  # bytes of a file of a measurement
_MOST_PARTS = 8  # of y, by its first axis, that are named one by one
_LINEAR = 1e-3  # largest relative difference of a measurement that counts as linear
_FAR = 0.1  # of the range of the training values: how far a draw may leave them, as good draws of a few images do


@dataclass(frozen=True, eq=False)
class Measurement:
    """A measurement of the images of a run, checked on the device of the run."""

    observation: Observation
    """Of model values; y and its noise are divided by `scale`."""
    scale: float
    name: str
    """Of the file or function, for captions."""
    digest: str
    """Of the file, the observed values and their noise."""
    parts: int = 1
    """Length of the first axis of y if these may be channels, of units of their own; else 1."""

    def misfit(self, draws: Iterable[Tensor]) -> str:
        """Return in words how far measured images [B, C, H, W] are from y, in deviations of the noise; also by part."""
        observed, variance = self.observation.observed, self.observation.variance
        total, count = torch.zeros_like(observed), 0
        for x0 in draws:  # one in memory at a time
            total += (self.observation.measure(x0) - observed).square().sum(0)
            count += len(x0)
        squares = total / count
        if not bool(variance.all()):  # nothing to compare with, so in the units of y
            rms, noise = (self.scale * float(each.mean().sqrt()) for each in (squares, variance))
            return f"draws differ from y by {rms:.4g} (root mean square); noise is {noise:.4g}"
        ratios = squares / variance
        text = f"draws differ from y by {float(ratios.mean().sqrt()):.3g} times the noise (root mean square)"
        if self.parts > 1:
            each = ratios.view(self.parts, -1).mean(1).sqrt().tolist()
            text += "; " + ", ".join(f"y[{i}]: {ratio:.3g}" for i, ratio in enumerate(each))
        return text


def build_measurement(
    config: Config,
    measure: MeasureInput | None,
    observed: ObservedInput | None,
    noise: object,
    device: torch.device,
    run: Path,
) -> Measurement:
    """Return the measurement of images of a run.

    Args:
        config: of the run.
        measure: file that defines `measure`, or a function: stored units [B, C, H, W] -> [B, …].
        observed: file .npy, array or tensor […]: what was measured of one image.
        noise: standard deviation of each value of `observed`; None is that of the file, or 0.
        device: to measure on.
        run: its folder, from which no code is taken.

    RequestError if a file cannot be read, the shapes differ, there is no gradient, or values are not finite.
    """
    if measure is None or observed is None:
        for name, value, other in (("observed", observed, "measure"), ("measure", measure, "observed")):
            if value is not None:
                raise RequestError(f"{name} needs {other}: give both --measure FILE.py and --observed FILE.npy")
        raise RequestError("noise is that of a measurement; give measure and observed, or omit it")
    _check_measurable(config)
    if config.diffusion.loss != SquaredError():
        warn(
            f"loss = {config.diffusion.loss.kind}: the network of this run did not learn the mean of the images given "
            "a noisy one, which measure assumes; the draws differ from the posterior; train with --loss mse"
        )
    function, name, code, own_noise = _read_measure(measure, run)
    y = _read_observed(observed)
    deviation = _read_noise(own_noise if noise is None else noise, y)
    scale = float(y.abs().max()) or 1.0
    flat, variance = _flat(y[None])[0].float(), (_real_noise(deviation, y) / scale).square()
    units, unknown = config.image_format.values.to_units, _unknown_in_samples(config, device)
    if unknown is not None:
        _check_known_alone(lambda x0: _measured(function, units(x0), y), unknown)

    def scaled(x0: Tensor) -> Tensor:
        # What stands at unknown values, such as NaN in a sample, does not reach the measurement.
        return _measured(function, units(x0 if unknown is None else x0.masked_fill(unknown, 0.0)), y) / scale

    trial = Observation(scaled, (flat / scale).to(device), variance.to(device))
    affine = _try(trial, config.input_shape, device)
    digest = hashlib.sha256(b"".join([code, y.numpy().tobytes(), variance.numpy().tobytes()])).hexdigest()
    parts = len(y) if y.ndim > 2 and len(y) <= _MOST_PARTS else 1
    return Measurement(Observation(scaled, trial.observed, trial.variance, affine), scale, name, digest, parts)


def _check_measurable(config: Config) -> None:
    """Raise RequestError unless the run generates pixels, which can be measured."""
    if config.representation.scaling():
        raise RequestError(
            "this run generates latents, in which a measurement of images is not linear; measure takes runs on pixels"
        )


def _unknown_in_samples(config: Config, device: torch.device) -> Tensor | None:
    """Return which values [C, H, W] are unknown in all images of a run, and so in samples; None if all are known."""
    known = config.data.known_in_samples()
    return None if known is None else torch.from_numpy(~known).to(device)


def _check_known_alone(measure: Callable[[Tensor], Tensor], unknown: Tensor) -> None:
    """Raise RequestError if a measurement [B, M] of images [B, C, H, W] depends on values that no image has.

    Two images are measured with four fillings of these values, of either sign and up to thrice the range of images. No
    bit of what is measured may change, if the same images give equal bits twice; sums on GPUs may differ in rounding.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (2, *unknown.shape)
    x0, filling = (torch.randn(shape, generator=generator).to(unknown.device) / 2 for _ in range(2))
    fillings = (filling, -filling, torch.full_like(x0, -3.0), torch.full_like(x0, 3.0))
    with torch.no_grad():
        first, again, *others = (measure(torch.where(unknown, each, x0)) for each in (filling, *fillings))
    rounding = 0.0 if torch.equal(first, again) else 1e-5 * float(first.abs().max())
    share = float(torch.stack([~((other - first).abs() <= rounding) for other in others]).any(0).float().mean())
    if share:
        raise RequestError(
            f"{float(unknown.float().mean()):.0%} of the values of an image are unknown in all images of this run, and "
            f"{share:.0%} of what measure returns depends on them; leave these out of measure and of observed by your "
            "own mask, as they are numbers in x and not NaN; or store a number in their place and train again"
        )


def _read_measure(given: MeasureInput, run: Path) -> tuple[Callable[[Tensor], Tensor], str, bytes, object]:
    """Return the function that a person gives, its name, the content of its file, and the noise that it defines."""
    if callable(given):
        return given, getattr(given, "__name__", "measure"), b"", None
    path = Path(given)
    module, code = _load(path, run)
    function = getattr(module, "measure", None)
    if not callable(function):
        raise RequestError(f"{quote(path.name)} defines no function measure(x), of x [B, C, H, W]")
    return function, path.name, code, getattr(module, "noise", None)


def _load(path: Path, run: Path) -> tuple[ModuleType, bytes]:
    """Run a file of Python that a person names, and return its module and content."""
    if not consent.by_a_person():
        raise RequestError(f"measure = {quote(str(path))} is Python code, which only a person in a terminal may name")
    if path.resolve().is_relative_to(run.resolve()):
        raise RequestError(
            f"measure = {quote(str(path))} lies in the folder of the run, which may be somebody else's; read it, and "
            "copy it to another folder"
        )
    try:
        content = read_file(path, path.parent, _LARGEST_CODE, follow=True)
    except (OSError, ValueError) as error:
        raise RequestError(f"measure = {quote(str(path))} cannot be read: {error}; give a file of Python") from None
    sys.stderr.write(f"  measure: runs {quote(str(path))}\n")
    module = ModuleType("measurement")
    module.__file__ = str(path)
    folder = str(path.resolve().parent)
    if folder not in sys.path:  # last, so that it shadows nothing
        sys.path.append(folder)
    try:
        exec(compile(content, str(path), "exec"), module.__dict__)
    except Exception as error:  # a person's code may raise anything
        raise RequestError(f"{quote(str(path))} failed: {type(error).__name__}: {error}") from error
    return module, content


def _read_observed(given: ObservedInput) -> Tensor:
    """Return the observed values on the host, float32 or complex64."""
    if isinstance(given, str | PathLike):
        path = Path(given)
        try:
            values: Any = np.array(map_array(regular_file(path, path.parent, follow=True)))
        except (OSError, ValueError) as error:
            raise RequestError(f"observed = {quote(str(path))} cannot be read: {error}; give a file .npy") from None
    else:
        values = given.detach().cpu().numpy() if isinstance(given, Tensor) else np.asarray(given)
    if values.dtype.kind not in "biufc" or not values.size:
        raise RequestError(f"observed is {values.dtype} {list(values.shape)}; give numbers, as measure returns them")
    if missing := int((~np.isfinite(values)).sum()):
        raise RequestError(
            f"observed has {missing:,} values that are NaN or infinite, of {values.size:,}; leave these out of it and "
            "of what measure returns"
        )
    return torch.from_numpy(np.ascontiguousarray(values, np.complex64 if values.dtype.kind == "c" else np.float32))


def _read_noise(noise: object, y: Tensor) -> Tensor:
    """Return the standard deviation of each value of y."""
    try:
        values = torch.as_tensor(0.0 if noise is None else noise, dtype=torch.float32).detach().cpu()
        if values.numel() > 1 and values.ndim != y.ndim:  # broadcast along which axis?
            raise ValueError(f"it has the shape {list(values.shape)}; give np.broadcast_to(noise, {[*y.shape]})")
        values = values.broadcast_to(y.shape)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RequestError(
            f"noise is not a number, or one for each value of observed {list(y.shape)}: {error}"
        ) from None
    if not bool((values.isfinite() & (values >= 0)).all()):
        raise RequestError(f"noise from {float(values.min()):g} to {float(values.max()):g} must be finite, at least 0")
    return values


def _real_noise(deviation: Tensor, y: Tensor) -> Tensor:
    """Return the deviation of each real number of y, as `_flat` orders them."""
    return _flat(torch.complex(deviation, deviation)[None] if y.is_complex() else deviation[None])[0]


def _flat(y: Tensor) -> Tensor:
    """Return values [B, …] as real numbers [B, M]; complex ones are two each."""
    return (torch.view_as_real(y) if y.is_complex() else y).flatten(1)


def _measured(function: Callable[[Tensor], Tensor], x: Tensor, observed: Tensor) -> Tensor:
    """Return the values [B, M] that a person's function measures. RequestError if it is not like `observed`."""
    try:
        y = function(x)
    except Exception as error:  # a person's code may raise anything
        raise RequestError(f"measure failed for x {list(x.shape)}: {type(error).__name__}: {error}") from error
    if not isinstance(y, Tensor):
        raise RequestError(f"measure returned {type(y).__name__}, and not a tensor [B, …]")
    if y.shape[:1] != x.shape[:1]:
        raise RequestError(
            f"measure returned {list(y.shape)} for x {list(x.shape)}; the first axis must be that of images"
        )
    if y.shape[1:] != observed.shape or y.is_complex() != observed.is_complex():
        kinds = [" complex" * tensor.is_complex() for tensor in (y, observed)]
        raise RequestError(
            f"measure returns{kinds[0]} {list(y.shape[1:])} for one image, and observed is{kinds[1]} "
            f"{list(observed.shape)}; both must be the same"
        )
    flat = _flat(y)
    if not bool(flat.isfinite().all()):
        raise RequestError("measure returns NaN or infinity for an image; it must be finite for all values of images")
    return flat.float()


def _try(observation: Observation, shape: tuple[int, int, int], device: torch.device) -> bool:
    """Measure random images; return True if that is linear but for a constant. RequestError if it has no gradient."""
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode(False), torch.enable_grad():
        a, b = (torch.randn(2, *shape, generator=generator).to(device) / 2 for _ in range(2))
        y = observation.measure(a.requires_grad_())
        gradient = torch.autograd.grad(y.square().sum(), a, allow_unused=True)[0] if y.requires_grad else None
        if gradient is None or not bool(gradient.any()):
            raise RequestError(
                "measure has no gradient: what it returns must be computed from x by differentiable functions of "
                "torch, without numpy, detach, item, rounding or comparisons"
            )
        if not bool(gradient.isfinite().all()):
            raise RequestError(
                "the gradient of measure is NaN or infinite for an image, as that of sqrt is at 0; make it finite"
            )
        first, second, both, none = (observation.measure(x).detach() for x in (a, b, a + b, torch.zeros_like(a)))
    difference = (first + second - both - none).abs().max()
    return bool(difference <= _LINEAR * (first - none).abs().max())


def moments(draws: Iterator[NDArray[Any]]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return mean and standard deviation of two or more draws [H, W, C], one in memory at a time (Welford)."""
    count, mean, squares = 0, np.zeros(()), np.zeros(())
    for draw in draws:
        count += 1
        before, mean = mean, mean + (draw - mean) / count
        squares = squares + (draw - before) * (draw - mean)
    return mean.astype(np.float32), np.sqrt(squares / (count - 1)).astype(np.float32)


def write_posterior(folder: SampleFolder, config: Config, measurement: Measurement) -> None:
    """Write mean and deviation of the draws in a folder, in the units of the source, and say how they fit y."""
    format = config.image_format

    def inputs() -> Iterator[Tensor]:  # one in memory at a time
        return (as_input(config, folder.values(i)) for i in range(folder.count))

    say_misfit(measurement, inputs())
    beyond = [max(_beyond_training(config, x0[0]), default=0.0) for x0 in inputs()]
    if max(beyond) > _FAR:
        _warn_of_values(folder, config, beyond)
    if folder.count < 2:
        return
    mean, deviation = moments(folder.values(i) for i in range(folder.count))
    unknown = _unknown_in_samples(config, torch.device("cpu"))
    if unknown is not None:  # a number that stands for unknown values has no deviation
        deviation[unknown.numpy().transpose(1, 2, 0)] = np.nan
    x0 = format.to_model(format.values.rounded(torch.from_numpy(mean.transpose(2, 0, 1)[None])))
    hides = samples_show_unknown(config)
    ends = np.fmin.reduce(x0[0].numpy(), (1, 2)) < -1, np.fmax.reduce(x0[0].numpy(), (1, 2)) > 1

    def value(channel: int, x: float) -> str:
        text = f"{format.stored_value(channel, x):.4g}"  # of the last colour, if values beyond have it too
        return f"< {text}" if x == -1 and ends[0][channel] else f"> {text}" if x == 1 and ends[1][channel] else text

    shown = grid(config.view(format.to_pictures(x0)))
    folder.save("mean", mean, with_legend(shown, config, hides, value, f"mean of {folder.count:,} draws"))
    view = parse_view(config.preview.view)
    if hides and view.colours == GREY and len(shown_channels := format.shown(view.channels)) == 1:
        # In grey, a deviation of 0 would be black as well.
        config = config.with_view(f"{shown_channels[0]}:{COLOUR_MAPS[-1]}")
    # The lowest colour is a deviation of 0, and the highest the largest of each channel.
    largest = np.fmax.reduce(deviation, (0, 1)).clip(np.finfo(np.float32).tiny)
    scaled = torch.from_numpy((2 * deviation / largest - 1).transpose(2, 0, 1)[None])
    shown = grid(config.view(format.to_pictures(scaled)))
    title = f"deviation of {folder.count:,} draws"
    shown = with_legend(shown, config, hides, lambda channel, x: f"{largest[channel] * (x + 1) / 2:.4g}", title)
    folder.save("deviation", deviation, shown)
    say(
        f"  mean.npy and deviation.npy are of {folder.count:,} draws; the largest deviation is "
        + ", ".join("unknown" if np.isnan(one) else f"{one:.4g}" for one in largest)
    )


def say_misfit(measurement: Measurement, inputs: Iterable[Tensor]) -> None:
    """Say how draws, as the network's images [1, C, H, W], fit what was measured, in deviations of its noise."""
    device = measurement.observation.observed.device
    say(f"  {measurement.misfit(x0.to(device) for x0 in inputs)}")


def as_input(config: Config, values: NDArray[Any]) -> Tensor:
    """Return an image [H, W, C] in the units of the source as the network's [1, C, H, W]."""
    return config.image_format.to_model(torch.from_numpy(values.transpose(2, 0, 1)[None].copy()))


def _beyond_training(config: Config, x0: Tensor) -> list[float]:
    """Return how far each channel of an image [C, H, W] leaves the training values, in their range; [] if not known.

    It is counted after the curve of the value map, so that a logarithm counts factors.
    """
    ends = config.data.range_in_training
    if not ends:
        return []
    low, high = config.image_format.to_model(torch.tensor(ends, device=x0.device).T[..., None, None])
    # A channel that is the same everywhere is measured by the whole range of the map.
    beyond = torch.maximum(low - x0, x0 - high) / torch.where(high > low, high - low, 2.0)
    found: list[float] = beyond.nan_to_num(0.0).clamp_min(0.0).amax((1, 2)).tolist()
    return found


def _warn_of_values(folder: SampleFolder, config: Config, beyond: Sequence[float]) -> None:
    """Warn of draws that leave the training values by these shares of their range."""
    number = int(np.argmax(beyond))
    draw = folder.values(number)
    x0 = as_input(config, draw)[0]
    channel = int(np.argmax(_beyond_training(config, x0)))
    values = draw[..., channel][~x0[channel].isnan().numpy()]
    low, high = config.data.range_in_training[channel]
    warn(
        f"{plural(sum(one > _FAR for one in beyond), 'draw')} of {folder.count} left the training values, draw "
        f"{number} by most: it has {values.min():.4g} to {values.max():.4g} in channel {channel}, and they have "
        f"{low:.4g} to {high:.4g}; take more steps, or train longer"
    )
