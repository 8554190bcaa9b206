"""Generate samples from a network: conditions, noise by sample, guidance, sampler, uint8 images; and their cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from unfog.config.schema import Config, check_guidance_interval
from unfog.data.dataset import ImageSet
from unfog.diffusion.denoiser import (
    Autoguided,
    Conditional,
    Denoiser,
    Guided,
    GuidedInTurn,
    Within,
    inside_interval,
)
from unfog.diffusion.editing import Edit
from unfog.diffusion.noise import NoiseSource, Schedule
from unfog.diffusion.posterior import Observation
from unfog.diffusion.sampler import TWO_CALLS, Denoise, Observe, Sampler
from unfog.diffusion.steps import PURE_NOISE, Watch
from unfog.errors import RequestError
from unfog.pipeline.latents import ImageMap
from unfog.reporting.channel_sheets import encode_channels
from unfog.reporting.image_grids import Pixels, captioned_grid, captioned_groups, grid, with_bar, with_caption
from unfog.training.precision import DTYPES, default_memory_format, drawing_precision
from unfog.training.settings import SamplingPrecision
from unfog.values.colour_map import GREY, colour_table
from unfog.values.columns import CLASS
from unfog.values.condition_format import ConditionFormat, Given
from unfog.values.condition_requests import GuidanceScale, passes, spell_guidance
from unfog.values.conditions import NO_CONDITIONS, Conditions
from unfog.values.image_format import channel_names, parse_view


@dataclass(frozen=True)
class GenerationSettings:
    """Settings of generation. Sample i depends on the seed, i and its conditions alone, not on `count` or `batch`."""

    count: int
    sampler: Sampler
    given: Given = ()  # conditions that samples cycle through; () without conditions
    seed: int = 0
    guidance: GuidanceScale = 1.0
    batch: int = 64  # samples at once
    interval: tuple[float, float] = (0.0, 1.0)
    """Share of noise, sigma / (alpha + sigma), within which there is guidance."""
    first: int = 0  # number of the first sample
    precision: SamplingPrecision = "auto"  # of the network; the sampler itself always computes in fp32
    guide_every: int = 1  # guided calls of the network to a call of the guide, whose difference is kept in between
    negative: tuple[int, ...] = field(default=(), repr=False)
    """Tokens of a text that guidance leads away from; () without one."""
    shared: int = field(
        default=1, repr=False
    )  # samples in a row that begin from the same noise, as the cells of a grid do
    numbers: tuple[int, ...] = field(default=(), repr=False)
    """Numbers of the samples, increasing, if they do not follow each other; () for those from `first`."""
    to_seed: int | None = None  # then the samples go from the first one of `seed` to the first one of this seed

    def __post_init__(self) -> None:
        scales = [weight for _, weight in self.guidance] if isinstance(self.guidance, tuple) else [self.guidance]
        if not all(map(math.isfinite, scales)):
            raise RequestError(f"guidance = {self.guidance} must be a finite number; 1 to 3 is usual")
        check_guidance_interval(self.interval)
        for name in ("count", "batch", "guide_every", "shared"):
            if getattr(self, name) < 1:
                raise RequestError(f"{name} of samples = {getattr(self, name)} must be at least 1")

    @classmethod
    def default(cls, config: Config, count: int, batch: int) -> GenerationSettings:
        """Return the settings of samples without flags: the run's sampler and guidance, seed 0, all classes in turn."""
        guidance, interval = config.usual_guidance, config.guidance_interval
        return cls(count, config.sampler, config.conditions.usual, guidance=guidance, interval=interval, batch=batch)

    @property
    def indices(self) -> Sequence[int]:
        """Numbers of the samples to draw, from which their noise and conditions follow."""
        return self.numbers or range(self.first, self.first + self.count)

    def resolved(self, config: Config, device: torch.device) -> GenerationSettings:
        """Return these settings with the precision that a run of `config` is drawn in on a device."""
        return replace(self, precision=drawing_precision(self.precision, device, config.training.precision))

    def noise(self, indices: Sequence[int], shape: tuple[int, int, int], device: torch.device) -> Callable[[], Tensor]:
        """Return a function that draws the noise of these samples, float32 [B, C, H, W], anew at each call."""
        if self.to_seed is None:
            # By the number of the sample, so that it depends on neither `count` nor `batch`.
            return NoiseSource(self.seed, [i // self.shared for i in indices], shape, device).draw
        one, other = (NoiseSource(seed, [0], shape) for seed in (self.seed, self.to_seed))
        shares = [i / max(1, self.count - 1) for i in indices]
        return lambda: interpolate_noise(one.draw()[0], other.draw()[0], shares).to(device)

    def conditions(self, config: Config, indices: Sequence[int], device: torch.device) -> Conditions:
        """Return the conditions of these samples of a run."""
        conditions = config.conditions.conditions(self.given, indices)
        if (known := config.data.known_in_samples()) is not None:
            mask = torch.from_numpy(known).float()
            conditions = conditions._replace(known=mask.expand(len(indices), *mask.shape))
        return conditions.to(device)


def generate_images(
    network: nn.Module,
    config: Config,
    settings: GenerationSettings,
    progress: Callable[[int], None] = lambda done: None,
    observe: Observe | None = None,
    guide: Conditional | None = None,
    calls: Callable[[int], None] = lambda calls: None,
    edit: Edit | None = None,
) -> Pixels:
    """Return samples, uint8 [N, H, W, C]. The network is in evaluation mode meanwhile.

    `progress` is called with the number of finished samples, the rest is of `generate_batches`.
    """
    samples = [config.image_format.empty()]
    for numbers, batch in generate_batches(network, config, settings, observe, guide, calls, edit):
        samples.append(batch)
        progress(numbers[-1] + 1 - settings.first)
    return np.concatenate(samples)


def generate_batches(
    network: nn.Module,
    config: Config,
    settings: GenerationSettings,
    observe: Observe | None = None,
    guide: Conditional | None = None,
    calls: Callable[[int], None] = lambda calls: None,
    edit: Edit | None = None,
    skip: Callable[[Sequence[int]], bool] = lambda numbers: False,
    observation: Observation | None = None,
) -> Iterator[tuple[Sequence[int], Pixels]]:
    """Yield (numbers, samples uint8 [n, H, W, C]) of each batch, but for those whose numbers `skip` is true of.

    `calls` receives, for each batch, the network calls per image, with those of a guide. `observe` is called at every
    step of every batch. Where `observe` returns True, that batch is dropped, and it is the last. `edit` is an image to
    start from, or to paint into. `guide` is a weaker denoiser for autoguidance; None guides away from the output
    without a class. With an `observation` samples are drawn from the posterior.
    """
    # Tensors of inference mode have no gradients, which a posterior needs.
    mode = torch.inference_mode() if observation is None else torch.no_grad()
    return mode(_generate_batches)(network, config, settings, observe, guide, calls, edit, skip, observation)


def _generate_batches(
    network: nn.Module,
    config: Config,
    settings: GenerationSettings,
    observe: Observe | None,
    guide: Conditional | None,
    calls: Callable[[int], None],
    edit: Edit | None,
    skip: Callable[[Sequence[int]], bool],
    observation: Observation | None,
) -> Iterator[tuple[Sequence[int], Pixels]]:
    device = next(network.parameters()).device
    settings = settings.resolved(config, device)
    shape, image_map = config.input_shape, ImageMap.of(config, device)
    sampler = config.representation.sampler(settings.sampler)
    encoded_edit = None if edit is None else image_map.encode_edit(edit)
    # Known pixels, and what was observed, constrain the predicted image, not the learned variance.
    uses_variance = sampler.kind == "ddpm" and (edit is None or edit.unknown is None) and observation is None
    variance = config.diffusion.learned_variance and uses_variance
    with _evaluation_mode(network, device, settings.precision):
        for first in range(0, settings.count, settings.batch):
            indices = settings.indices[first : first + settings.batch]
            if skip(indices):
                continue
            denoiser = _CallCounter(Denoiser(network, config.diffusion, variance, DTYPES.get(settings.precision)))
            weaker = None if guide is None else _CallCounter(guide)
            conditions = settings.conditions(config, indices, device)
            denoise = conditional_denoiser(denoiser, config, settings, conditions, weaker)
            if observation is not None:
                denoise = observation.posterior(denoise, config.diffusion.path)
            noise = settings.noise(indices, shape, device)
            parts = (denoise, config.diffusion.path, config.diffusion.schedule, noise)
            watch = observe and Watch(observe, indices[0])
            x = sampler(*parts, watch) if encoded_edit is None else encoded_edit(sampler, *parts, watch)
            if watch and watch.stopped:
                break
            if conditions.known is not None:
                x = x.masked_fill(conditions.known == 0, math.nan)
            images = image_map.decode(x) if edit is None else edit.keep(image_map.decode(x))
            calls(round((denoiser.images + (weaker.images if weaker else 0)) / len(indices)))
            yield indices, config.image_format.to_pictures(images)


@contextmanager
def _evaluation_mode(network: nn.Module, device: torch.device, precision: SamplingPrecision) -> Iterator[None]:
    was_training, memory_format = network.training, getattr(network, "channels_last", False)
    network.eval()
    # Independent of the format in training, so that a preview equals the output of `sample`.
    network.channels_last = default_memory_format(device, precision)[0] == "channels_last"  # type: ignore[assignment]
    try:
        yield
    finally:
        network.train(was_training)
        network.channels_last = memory_format  # type: ignore[assignment]


def interpolate_noise(a: Tensor, b: Tensor, shares: Sequence[float]) -> Tensor:
    """Return noise [N, …] between noises a and b, at these shares of the great circle: 0 is a, and 1 is b, exactly.

    Along the circle noise keeps its length; on a straight line it would be too weak in the middle, and images grey.
    """
    angle = float(cosine_similarity(a.flatten().double(), b.flatten().double(), 0).clamp(-1, 1).acos())
    # Both sines are then zero, and their quotient is not a number.
    if angle < 1e-6:  # of the same seed
        return a.expand(len(shares), *a.shape).clone()
    sines = [(math.sin((1 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle)) for t in shares]
    return torch.stack([of_a * a + of_b * b for of_a, of_b in sines])


class _CallCounter:
    """A denoiser that counts the images that it is called with."""

    def __init__(self, denoise: Conditional) -> None:
        self.denoise, self.images = denoise, 0

    def __call__(self, x_t: Tensor, logsnr: Tensor, conditions: Conditions = NO_CONDITIONS) -> Tensor:
        self.images += len(x_t)
        return self.denoise(x_t, logsnr, conditions)


def conditional_denoiser(
    denoiser: Conditional,
    config: Config,
    settings: GenerationSettings,
    conditions: Conditions,
    guide: Conditional | None = None,
) -> Denoise:
    """Return the denoiser with these conditions, and with the guidance of `settings`.

    Guidance extrapolates away from the weaker `guide` with the same conditions, or else from outputs with fewer
    conditions. A negative text takes the place of the text that the guide is given, and of one that is hidden.
    RequestError if that needs conditions, or a network that was trained without them at times, and the run lacks these.
    """
    scale = config.conditions.guidance(settings.guidance)
    if scale == 1:
        return lambda x, logsnr: denoiser(x, logsnr, conditions)
    negative = None
    if settings.negative and conditions.tokens is not None:
        negative = conditions.tokens.new_tensor(settings.negative)
    guided: Conditional
    if guide is not None:
        guided = Autoguided(denoiser, guide, one_strength(scale), settings.guide_every, negative)
    else:
        if not conditions.droppable:
            raise RequestError(
                f"guidance = {settings.guidance} needs classes or other conditions, and this run has none; or a weaker "
                "--guide"
            )
        check_guidance(config, scale)
        if isinstance(scale, tuple):
            guided = GuidedInTurn(denoiser, config.conditions.turns(scale), negative)
        else:
            guided = Guided(denoiser, scale, negative)
    if settings.interval != (0.0, 1.0):
        guided = Within(guided, denoiser, settings.interval)
    return lambda x, logsnr: guided(x, logsnr, conditions)


def one_strength(scale: GuidanceScale) -> float:
    """Return the scale of guidance by a weaker network. RequestError for weights of conditions."""
    if isinstance(scale, tuple):
        raise RequestError(
            f"guidance = {spell_guidance(scale)} is of conditions, and a guide has one strength; give --guidance 2, or "
            "omit the guide"
        )
    return scale


def check_guidance(config: Config, scale: GuidanceScale) -> None:
    """Raise RequestError if the network never learned to go without the conditions that guidance hides."""
    most = len(config.conditions.facts)
    hidden = [len(spans) for _, spans in config.conditions.turns(scale)] if isinstance(scale, tuple) else [most]
    if config.label_dropout == 0 and most in hidden:
        raise RequestError(
            f"guidance = {spell_guidance(scale)} needs a network trained with --label-dropout, such as 0.1"
        )
    if config.condition_dropout == 0 and any(0 < count < most for count in hidden):
        raise RequestError(
            f"guidance = {spell_guidance(scale)} hides some conditions by themselves, and needs a network trained with "
            "--condition-dropout, such as 0.1; give one number for all conditions, such as --guidance 2"
        )


def sample_grid(samples: Pixels, names: Sequence[str]) -> Pixels:
    """Return one image of all samples; whole cycles through up to 20 names get a column for each name, captioned."""
    return captioned_grid(samples, names) if _in_columns(samples, names) else grid(samples)


def named_grid(samples: Pixels, names: Sequence[str]) -> Pixels:
    """Return `sample_grid`; if names have no columns in it, up to 100 samples have theirs below them."""
    if _in_columns(samples, names) or len(names) < 2 or len(samples) > _MOST_NAMED:
        return sample_grid(samples, names)
    return captioned_groups({"": samples}, [names[i % len(names)] for i in range(len(samples))])


def _in_columns(samples: NDArray[Any], names: Sequence[str]) -> bool:
    return 1 < len(names) <= 20 and len(samples) % len(names) == 0


def view_grid(config: Config, samples: NDArray[Any], names: Sequence[str]) -> Pixels:
    """Return `sample_grid` of samples [N, H, W, C] as `preview.view` shows them, with the values that colours mean."""
    return with_legend(sample_grid(config.view(samples), names), config, shows_unknown(config, samples))


def shows_unknown(config: Config, images: NDArray[Any]) -> bool:
    """Return True if stored images [N, H, W, C] have unknown values in the channels of `preview.view`."""
    return _unknown_in_view(config, config.image_format.known_planes(images))


def view_channels(config: Config, samples: NDArray[Any], names: Sequence[str]) -> bytes:
    """Return a PNG of all channels of samples [N, H, W, C], for other views than `preview.view`; b"" of pictures."""
    format = config.image_format
    if format.is_picture:
        return b""
    ends = [[format.stored_value(c, x) for x in (-1.0, 0.0, 1.0)] for c in range(format.channels)]
    captions = names if _in_columns(samples, names) else ()
    return encode_channels(format.planes(samples), ends, captions, format.known_planes(samples))


def samples_show_unknown(config: Config) -> bool:
    """Return True if some values in the channels of `preview.view` are unknown in all samples of a run."""
    return _unknown_in_view(config, config.data.known_in_samples())


def _unknown_in_view(config: Config, known: NDArray[np.bool_] | None) -> bool:
    """Return True if channels of `preview.view` have unknown values, by what is known [..., C, H, W]; None: all."""
    if known is None:
        return False
    return not known[..., config.image_format.shown(parse_view(config.preview.view).channels), :, :].all()


def with_legend(
    picture: Pixels,
    config: Config,
    unknown: bool,
    value: Callable[[int, float], str] | None = None,
    title: str = "",
) -> Pixels:
    """Return a picture of images in `preview.view` with its values in the units of the source; pictures need none.

    One channel has a bar of its colours below. Three have a line above, with the values from -1 to 1 of the model.
    With `unknown`, a line says how unknown pixels look. `value` returns what is shown of a channel where the model has
    a value from -1 to 1; by default it is the value in the units of the source. `title` is a first line.
    """
    format = config.image_format
    if format.is_picture and value is None:
        return picture
    value = value or (lambda channel, x: f"{format.stored_value(channel, x):.4g}")
    channels, colours = parse_view(config.preview.view)
    shown = format.shown(channels)
    how = [f"images: {'black' if colours == GREY else 'checkered'} is unknown"] if unknown else []
    if len(shown) == 1:
        how = [f"{title}, channel {shown[0]}"] * bool(title) + how
        picture = with_caption(picture, how) if how else picture
        return with_bar(picture, colour_table(colours), [value(shown[0], x) for x in (-1.0, 0.0, 1.0)])
    how = [title] * bool(title) + how
    ends = [f"{value(c, -1.0)} to {value(c, 1.0)}" for c in shown]
    named = zip(channel_names(3), shown, ends, strict=True)
    return with_caption(picture, [f"{name} channel {c}: {both}" for name, c, both in named] + how)


_MOST_NAMED = 100  # samples that may have a caption each; more captions are too many to read
_GOLDEN = (5**0.5 - 1) / 2


def proportional_labels(labels: NDArray[np.integer] | Sequence[int] | None, count: int) -> tuple[int, ...]:
    """Return labels for `count` samples, in the class proportions of a data set with these `labels`; () for None.

    Sample i gets the class at the fraction (i + 1/2) / golden ratio (mod 1) of the data set sorted by class, so its
    label depends on i alone.
    """
    if labels is None:
        return ()
    present = np.asarray(labels, dtype=np.int64)
    if present.ndim != 1 or not len(present):
        raise RequestError("labels like those of a data set need one that has labels; without classes, give none")
    # After n samples the share of a class is off by about log(n) / n, against 1 / sqrt(n) for random labels, whose
    # scatter would add to a Frechet distance.
    cumulative = np.bincount(present).cumsum() / len(present)
    return tuple(np.searchsorted(cumulative, _fractions(count), side="right").tolist())


def proportional_given(format: ConditionFormat, images: ImageSet, count: int) -> Given:
    """Return conditions for `count` samples in the proportions of a set of images: sample i depends on i alone.

    With classes alone, the labels are `proportional_labels`. Otherwise sample i has all conditions of one image, the
    one at that fraction of the set sorted by class.
    """
    if not format.columns:
        labels = proportional_labels(images.labels, count)
        return ((CLASS, labels),) if labels else ()
    order = np.arange(len(images)) if images.labels is None else np.argsort(images.labels, kind="stable")
    return format.rows(images.columns.values(), order[(_fractions(count) * len(images)).astype(np.int64)])


def _fractions(count: int) -> NDArray[np.float64]:
    fractions: NDArray[np.float64] = (np.arange(count, dtype=np.float64) + 0.5) * _GOLDEN % 1
    return fractions


def sample_calls(drawing: GenerationSettings, schedule: Schedule) -> int:
    """Return the network calls for a sample; those for its guidance, by a class or a guide, count as well."""
    levels = drawing.sampler.visits(schedule)[:-1]
    if drawing.sampler.kind in TWO_CALLS:
        # Once more where a step ends, but for those from pure noise and into the clean image: see `steps.heun`.
        levels = torch.cat([levels, levels[1:][levels[:-1] >= -2 * math.log(PURE_NOISE)]])
    if drawing.guidance == 1:
        return len(levels)
    # In float32, as the sampler gives the levels to the denoiser: some are at the ends of the interval.
    guided = inside_interval(levels.float(), drawing.interval)
    return len(levels) + math.ceil((passes(drawing.guidance) - 1) * sum(guided) / drawing.guide_every)


def cost_per_sample(
    network: nn.Module,
    config: Config,
    drawing: GenerationSettings,
    measure: Callable[[Callable[[], object]], float],
    guide: Conditional | None = None,
) -> float:
    """Extrapolate `measure` of one sample from two steps of the sampler in `drawing`, by the network calls."""
    trial = replace(drawing, sampler=replace(drawing.sampler, steps=trial_steps(drawing.sampler)))
    whole, part = (sample_calls(one, config.diffusion.schedule) for one in (drawing, trial))
    return measure(lambda: generate_images(network, config, trial, guide=guide)) / drawing.count * whole / part


def trial_steps(sampler: Sampler) -> int:
    """Return the sampler steps of a timing trial: two at most, or all of an adaptive sampler."""
    # The adaptive sampler decides itself how many steps it takes, so a part of them says nothing.
    return sampler.steps if sampler.kind == "adaptive" else min(2, sampler.steps)
