"""The guide of autoguidance (Karras et al. 2024a): a weaker network that samples move away from, found and checked."""

from __future__ import annotations

from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import NamedTuple

from unfog.config.schema import GUIDE_SHARE, Config
from unfog.config.validate import path_text
from unfog.diffusion.denoiser import Denoiser
from unfog.errors import RequestError, RunError
from unfog.inference.loaded_run import LoadedRun, swept_width
from unfog.pipeline.generate import check_guidance, one_strength
from unfog.reporting.progress import say
from unfog.training.precision import DTYPES, drawing_precision
from unfog.training.settings import PowerEma, SamplingPrecision
from unfog.values.condition_requests import GuidanceScale

# A weaker run, loaded, or as "RUN" or "RUN:STEP"; the step of another checkpoint of the same run; or "auto", this run's
# EMA of an earlier step; or "none".
Guide = LoadedRun | str | PathLike[str] | int

_AUTO, _NONE = "auto", "none"
_AUTO_SCALE = 2.0  # the usual scale of "auto" (docs/decisions/0020-guide-of-the-same-run.md)


class Guidance(NamedTuple):
    """Guide of samples, and its strength."""

    guide: Denoiser | None
    scale: GuidanceScale
    name: str
    """The guide as a person names it; "" without one."""


def resolve_guidance(
    run: LoadedRun,
    guide: Guide | None,
    scale: GuidanceScale | None,
    precision: SamplingPrecision,
    every: int = 1,
    edits: bool = False,
) -> Guidance:
    """Return the guide and the guidance scale; None is the usual one; "none" uses no guide.

    Weights of conditions are guidance by conditions alone, without a guide, in the form of `ConditionFormat.guidance`.
    `edits` is true where samples begin from an image, which only a guide that was asked for guides.
    RequestError if the guide is unknown, if the scale does not use it, or if `every` is given without a guide.
    """
    if isinstance(scale, tuple):
        if guide not in (None, _NONE):
            one_strength(scale)
        guide, scale = _NONE, run.config.conditions.guidance(scale)
        check_guidance(run.config, scale)
    if guide is None:
        weaker, guide = (None, _NONE) if edits or scale == 1 else _usual_guide(run)
    else:
        weaker = None if guide == _NONE else _open_guide(run, guide)
    # Without a guide, a scale makes sense only for a network that was trained to go without its class.
    usual = run.config.usual_guidance if weaker is None else run.config.guidance
    scale = (_AUTO_SCALE if guide == _AUTO else usual) if scale is None else scale
    if weaker is None:
        if every != 1:
            raise RequestError(f"guide_every = {every} has no effect without a guide; omit it, or give a --guide")
        return Guidance(None, scale, "")
    if scale == 1:
        raise RequestError("guidance = 1 does not use a guide; give --guidance 2, or omit the guide")
    name = f"{guide.path.name}:{guide.step}" if isinstance(guide, LoadedRun) else str(guide)
    chosen = drawing_precision(precision, run.device, run.config.training.precision)
    return Guidance(replace(weaker, dtype=DTYPES.get(chosen)), scale, name)


def is_guided_by_itself(run: LoadedRun) -> bool:
    """Return whether samples of a run are guided by its own earlier EMA, unless another guide is asked for."""
    return run.weights == "ema" and run.config.is_guided_at(run.step)


def _usual_guide(run: LoadedRun) -> tuple[Denoiser | None, str]:
    """Return the guide of the run's settings and its name; none, with the reason said, where the run cannot have it."""
    if run.config.usual_guide == _NONE:
        return None, _NONE
    if run.weights == "raw":
        say(
            "sampling without the guide of this run, which is an earlier EMA; --guide auto uses it with raw weights too"
        )
        return None, _NONE
    try:
        return _open_guide(run, _AUTO), _AUTO
    except (RequestError, RunError) as error:
        say(f"sampling without the guide of this run: {error}")
        return None, _NONE


def _open_guide(run: LoadedRun, guide: Guide) -> Denoiser:
    """Return the denoiser that guides `run`, on its device: autoguidance (Karras et al. 2024a).

    Raises:
        RequestError: there is no such run or checkpoint, it generates other images, or it is `run` itself.
    """
    if isinstance(guide, LoadedRun):
        other = guide
    elif guide == _AUTO:
        other = _earlier_self(run)
    elif isinstance(guide, str | PathLike):
        path, step = _split_step(path_text(guide, "guide"))
        other = LoadedRun(path, run.weights, step, str(run.device))
    else:
        other = LoadedRun(run.path, run.weights, guide, str(run.device))
    # The difference of a network from itself is zero, so that guidance would silently do nothing.
    if _weights_of(other) == _weights_of(run):
        raise RequestError(
            f"guide = step {other.step} is the checkpoint that samples; give an earlier one, or a smaller network"
        )
    sized = other.at_size(run.config.data.size) if run.resized else other
    check_guide(run.config, sized.config)
    return Denoiser(other.network, other.config.diffusion)


def _weights_of(run: LoadedRun) -> tuple[object, ...]:
    return run.path.resolve(), run.step, run.weights, run.ema


def _earlier_self(run: LoadedRun) -> LoadedRun:
    """Return the run with its EMA of an earlier step, rebuilt from snapshots, so that no checkpoint has to be kept."""
    own = run.config.ema
    width = run.ema or swept_width(run.path) or (own.width if isinstance(own, PowerEma) else PowerEma().width)
    if run.earlier is None or run.earlier.ema != width:
        run.earlier = LoadedRun(run.path, step=round(GUIDE_SHARE * run.step), device=str(run.device), ema=width)
    return run.earlier


def _split_step(text: str) -> tuple[str, int | None]:
    path, colon, step = text.rpartition(":")
    # A folder may itself be called "RUN:100".
    if colon and step.isdecimal() and len(step) < 16 and not Path(text).exists():
        return path, int(step)
    return text, None


def _names(config: Config) -> list[str]:
    return [" ".join((one.name, one.kind, *one.categories)) for one in config.columns]


def check_guide(config: Config, other: Config) -> None:
    """Raise `RequestError` unless both networks can denoise the same noisy image."""
    for what, mine, its in (
        ("image size", config.data.size, other.data.size),
        ("channels", config.data.channels, other.data.channels),
        ("classes", config.classes, other.classes),
        ("conditions", _names(config), _names(other)),
        ("diffusion.path", config.diffusion.path.kind, other.diffusion.path.kind),
    ):
        if mine != its:
            raise RequestError(f"the guide has another {what} than this run ({its}, not {mine}), so it cannot guide it")
    try:
        # The settings of the guide are valid with the noise levels of the run.
        replace(other.diffusion, schedule=config.diffusion.schedule, learned_variance=False)
    except RequestError as error:
        raise RequestError(f"the guide cannot be used at the noise levels of this run: {error}") from None
    # Both guesses are subtracted, which makes no sense if the same number stands for another colour.
    if config.representation.identity() != other.representation.identity():
        raise RequestError(
            "the guide must be trained on the same kind of input: pixels, or latents of the same "
            "autoencoder with the same mean, deviation and sigma_data; give a checkpoint of this run, or a "
            "run on the same images with the same autoencoder"
        )
