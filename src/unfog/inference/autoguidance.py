"""The weaker network of autoguidance (Karras et al. 2024a): another checkpoint of a run, or another run."""

from __future__ import annotations

from dataclasses import replace
from os import PathLike
from pathlib import Path

from unfog.config.paths import path_text
from unfog.config.schema import Config
from unfog.diffusion.denoiser import Denoiser
from unfog.errors import RequestError
from unfog.inference.loaded_run import LoadedRun


def open_guide(run: LoadedRun, guide: LoadedRun | str | PathLike[str] | int) -> Denoiser:
    """Return the denoiser that guides `run`, on its device.

    Args:
        run: generates the samples.
        guide: the step of one of its checkpoints; or another run, loaded, or its folder, "RUN" or "RUN:STEP".

    Raises:
        RequestError: there is no such run or checkpoint, it generates other images, or it is `run` itself.
    """
    if isinstance(guide, LoadedRun):
        other = guide
    elif isinstance(guide, str | PathLike):
        path, step = _split_step(path_text(guide, "guide"))
        other = LoadedRun(path, run.weights, step, str(run.device))
    else:
        other = LoadedRun(run.path, run.weights, guide, str(run.device))
    same = other.checkpoint.folder.resolve() == run.checkpoint.folder.resolve() and other.weights == run.weights
    if same and other.ema is None and run.ema is None:  # an EMA of a given width may be of another step
        raise RequestError(
            f"guide = step {other.checkpoint.step} is what draws; give an earlier checkpoint, or a smaller network"
        )
    check_guide(run.config, other.config)
    return Denoiser(other.network, other.config.diffusion)


def _split_step(text: str) -> tuple[str, int | None]:
    path, colon, step = text.rpartition(":")
    # A folder may itself be called "RUN:100".
    if colon and step.isdecimal() and len(step) < 16 and not Path(text).exists():
        return path, int(step)
    return text, None


def check_guide(config: Config, other: Config) -> None:
    """Raise `RequestError` unless both networks can denoise the same noisy image."""
    for what, mine, its in (
        ("image size", config.data.size, other.data.size),
        ("channels", config.data.channels, other.data.channels),
        ("classes", config.classes, other.classes),
        ("diffusion.path", config.diffusion.path.kind, other.diffusion.path.kind),
    ):
        if mine != its:
            raise RequestError(f"the guide has another {what} than this run ({its}, not {mine}), so it cannot guide it")
    try:
        # The settings of the guide are valid with the noise levels of the run.
        replace(other.diffusion, schedule=config.diffusion.schedule, learned_variance=False)
    except RequestError as error:
        raise RequestError(f"the guide cannot be asked at the noise levels of this run: {error}") from None
    if _input_scale(config) != _input_scale(other):
        raise RequestError(
            "the guide does not see what this run sees: pixels, or latents of one autoencoder with one mean, deviation "
            "and sigma_data; give a checkpoint of this run, or a run on the same images with the same autoencoder"
        )


def _input_scale(config: Config) -> tuple[object, ...]:
    """Return what decides which image a latent stands for; () for pixels."""
    latents = config.latents
    return (latents.sha256, latents.mean, latents.deviation, config.diffusion.sigma_data) if config.uses_latents else ()
