"""The weaker network of autoguidance: another checkpoint of a run, or another run."""

from __future__ import annotations

from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from unfog.config.paths import path_text
from unfog.config.schema import Config
from unfog.diffusion.denoiser import Denoiser
from unfog.errors import RequestError

if TYPE_CHECKING:
    from unfog.inference.run import Run


def open_guide(run: Run, guide: Run | str | PathLike[str] | int) -> Denoiser:
    """The denoiser of what leads `run`, on its device.

    Args:
        run: what draws.
        guide: the step of a checkpoint of it; or another run, opened, or its folder, "RUN" or "RUN:STEP".

    Raises:
        RequestError: there is no such run or checkpoint (what there is, is said), it draws other pictures, or it is
            the very one that draws.
    """
    from unfog.inference.run import Run

    if isinstance(guide, Run):
        other = guide
    elif isinstance(guide, str | PathLike):
        path, step = _run_and_step(path_text(guide, "guide"))
        other = Run(path, run.weights, step, str(run.device))
    else:
        other = Run(run.path, run.weights, guide, str(run.device))
    same = other.checkpoint.folder.resolve() == run.checkpoint.folder.resolve() and other.weights == run.weights
    if same and other.ema is None and run.ema is None:  # an average of a width may be of any step
        raise RequestError(
            f"guide = step {other.checkpoint.step} is what draws; give a younger checkpoint, or a smaller network"
        )
    check_guide(run.config, other.config)
    return Denoiser(other.network, other.config.diffusion)


def _run_and_step(text: str) -> tuple[str, int | None]:
    """RUN:STEP apart; a folder that has such a name is one."""
    path, colon, step = text.rpartition(":")
    if colon and step.isdecimal() and len(step) < 16 and not Path(text).exists():
        return path, int(step)
    return text, None


def check_guide(config: Config, other: Config) -> None:
    """RequestError unless both networks can be asked about the same noisy image."""
    for what, mine, its in (
        ("image size", config.data.size, other.data.size),
        ("channels", config.data.channels, other.data.channels),
        ("classes", config.classes, other.classes),
        ("diffusion.path", config.diffusion.path.kind, other.diffusion.path.kind),
    ):
        if mine != its:
            raise RequestError(f"the guide has another {what} than this run ({its}, not {mine}), so it cannot lead it")
    try:
        replace(other.diffusion, schedule=config.diffusion.schedule, learned_variance=False)
    except RequestError as error:
        raise RequestError(f"the guide cannot be asked at the noise levels of this run: {error}") from None
    if _network_inputs(config) != _network_inputs(other):
        raise RequestError(
            "the guide does not see what this run sees: pixels, or latents of one codec with one mean, deviation and "
            "sigma_data; give a checkpoint of this run, or a run on the same images with the same codec"
        )


def _network_inputs(config: Config) -> tuple[object, ...]:
    """What makes numbers mean the same picture to two networks; () for pixels."""
    latents = config.latents
    return (latents.sha256, latents.mean, latents.deviation, config.diffusion.sigma_data) if config.uses_latents else ()
