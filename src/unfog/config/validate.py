"""Checks of a request and its paths before any work is done. They need no torch, so that an error appears at once."""

from __future__ import annotations

import math
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from os import PathLike
from pathlib import Path
from typing import Any

from unfog.config.schema import LENGTH, Config
from unfog.config.spec_strings import FormatError, parse_path, quote
from unfog.config.toml import update
from unfog.custom import consent
from unfog.data.decode import parse_colour
from unfog.data.settings import LABELS, table_and_columns
from unfog.data.sources.base import LabelTable
from unfog.data.sources.registry import PYTHON, locate, open_source
from unfog.diffusion.diffusion import Diffusion
from unfog.diffusion.sampler import TWO_CALLS, Sampler
from unfog.errors import RequestError
from unfog.files.locks import LOCK
from unfog.models.autoencoder_settings import check_multiple
from unfog.models.settings import Architecture
from unfog.reporting.log_settings import check_installed
from unfog.reporting.progress import say
from unfog.settings import is_auto
from unfog.text import plural, sanitize
from unfog.values.image_format import scaled, sides_of, size_of
from unfog.values.kinds.image_kinds import IMAGE_KINDS, image_columns

# Factor of the noise from which on a step of Heun in 2 or 3 steps is refused.
_LONGEST_STEP = 100
_TEN_YEARS = 10 * 365 * 86400


def check_request(config: Config) -> None:
    """Check all that is known before the images are read. Raise RequestError for the first error.

    Of a new run, that includes whether the source and the table of labels exist.
    """
    training = config.training
    given = {k: v for k in LENGTH if (v := getattr(training, k))}
    if len(given) > 1:
        raise RequestError(f"the length is given {len(given)} times ({given}); give one of --steps, --images, --budget")
    if training.budget:
        parse_duration(training.budget)
    check_device(training.device)
    parse_colour(config.data.background)
    check_sampler(config.sampler, config.diffusion)
    if config.data.has_unknown and config.diffusion.learned_variance:
        raise RequestError(
            f"data.unknown = {config.data.unknown}: the bound that teaches a learned variance is of whole images; omit "
            "--diffusion.learned-variance"
        )
    check_installed(config.log.sinks)
    check_buckets(config)
    encoder = config.text_encoder.pretrained
    if encoder and not config.fingerprint and not folder_path(encoder, "text_encoder.pretrained").is_dir():
        raise RequestError(f"text_encoder.pretrained = {quote(encoder)} is not a folder; give one of Hugging Face")
    factor = check_autoencoder(config)
    if config.network is not None:
        config.network.check_wrap(config.data.wrapped)
        config.network.check_mask(config.data.unknown)
    if config.network is not None and not is_auto(config.data, "size"):
        height, width = sides_of(config.data.size)
        check_network_size(config.network, (height // factor, width // factor), factor)
    if not config.fingerprint and not config.source.startswith(PYTHON):  # which runs code, and is announced first
        check_source(config.source)
        source, _ = locate(config.source)
        if config.data.labels not in LABELS and not source.tables_inside:
            LabelTable.find(table_and_columns(config.data.labels)[0], config.source)


def check_network_size(network: Architecture, sides: tuple[int, int], factor: int) -> None:
    """Raise RequestError unless the network takes inputs of this height and width.

    They are of pixels, or of latents of `factor` pixels each.
    """
    try:
        network.check(sides)
    except RequestError as error:
        if factor == 1:
            raise
        pixels = scaled(size_of(*sides), factor)
        raise RequestError(f"{error}; these are latents, of {factor} pixels each: {pixels} pixels") from None


def check_sample_size(config: Config) -> None:
    """Raise RequestError unless the network of a run generates images of `data.size`."""
    factor = config.representation.factor
    if factor > 1:
        check_multiple(config.data.size, factor)
    config.data.known_in_samples()  # raises for another size
    for one in image_columns(config.columns):
        _, height, width = IMAGE_KINDS[one.kind].shape(one)
        if (height, width) != (config.image_format.height, config.image_format.width):
            wanted, remedy = f"{width}x{height}", "omit --size"
            if buckets := config.size_buckets:
                wanted, remedy = "the size of a bucket", f"give {' or '.join(str(one.size) for one in buckets)}"
            raise RequestError(
                f"size = {config.image_format.sides}: the condition {sanitize(one.name)} is an image of {wanted}, and "
                f"so are the samples; {remedy}"
            )
    if config.network is not None:
        _, height, width = config.input_shape
        check_network_size(config.network, (height, width), factor)


def check_buckets(config: Config) -> None:
    """Raise RequestError if aspects are to be kept together with what needs images of one size."""
    training = config.training
    reason = (
        config.task.one_size
        or config.representation.one_size
        or (training.compile and "a compiled step is for one size; omit --training.compile")
        or (training.capture and "a captured step is for one size; omit --training.capture")
    )
    if reason and config.data.aspect == "keep":
        raise RequestError(f"aspect = keep trains on several sizes, and {reason}")


def check_autoencoder(config: Config) -> int:
    """Return image pixels along the side of one input of the network: 1, or the factor of the autoencoder.

    Raises:
        RequestError: there is no such autoencoder, or it does not suit the images or their augmentation.
    """
    config.task.check(config.data)
    return config.representation.check()


def check_device(name: str) -> None:
    """Raise RequestError unless this names a device that may exist, as far as is known without importing torch."""
    if not re.fullmatch(r"auto|cpu|mps|cuda(:[0-9]{1,4})?", str(name)):
        raise RequestError(f"device = {quote(name)} is not one of auto, cpu, cuda, cuda:1, mps")
    torch = version("torch")
    # The version says whether this torch was built for CUDA, which importing it takes seconds to find out.
    if (name.startswith("cuda") and torch.endswith("+cpu")) or (name == "mps" and sys.platform != "darwin"):
        raise RequestError(f"device = {name} is not available to torch {torch} on this machine; try --device auto")


def check_sampler(sampler: Sampler, diffusion: Diffusion) -> None:
    """Raise RequestError for a sampler that gives no images.

    It has more steps than the schedule has levels, or so few that they explode, or begins where nothing is defined.
    """
    schedule, (flaw, _) = diffusion.schedule, diffusion.flaw_in_pure_noise
    if flaw and sampler.grid == "tuned" and sampler.tuned[0] == 1:
        share = min(0.999, 1 / (1 + math.exp(schedule.limits()[0] / 2)))
        raise RequestError(f"levels = 1 … begin in pure noise, where {flaw} in this run; begin at {share:.3g}")
    if sampler.grid == "schedule" and sampler.kind != "adaptive" and 0 < schedule.steps < sampler.steps:
        raise RequestError(
            f"sampler.steps = {sampler.steps} is more than the {schedule.steps} levels of the {schedule.kind} "
            f"schedule; use at most {schedule.steps}, or train or resume the run with --sampler.grid karras"
        )
    # Heun's mean of two slopes extrapolates by half the ratio of the levels: of a Gaussian's deviation 80-fold in two.
    if sampler.kind in TWO_CALLS and 2 <= sampler.steps <= 3 and sampler.longest_step(schedule) > _LONGEST_STEP:
        raise RequestError(
            f"{sampler.kind} in {sampler.steps} steps on this grid explodes, as one step divides the noise by "
            f"{sampler.longest_step(schedule):,.0f}; use 8 steps or more, or --sampler dpmpp"
        )


def override_sampler(
    sampler: Sampler, kind: str | None, steps: int | None, grid: str | None = None, levels: Sequence[float] = ()
) -> Sampler:
    """Return a sampler with another kind, number of steps, grid or levels. Levels tuned for the old ones are dropped.

    `levels` are shares of noise that fall from at most 1; their number is that of the steps.
    """
    if levels and (steps not in (None, len(levels)) or grid not in (None, "tuned")):
        raise RequestError(f"{len(levels)} levels already set the grid and the number of steps; omit steps and grid")
    if levels:
        steps, grid = len(levels), "tuned"
    given = {"kind": kind, "steps": steps, "grid": grid, "tuned": tuple(levels) or None}
    changes: dict[str, Any] = {k: v for k, v in given.items() if v is not None}
    other = update(sampler, changes, "sampler")
    if grid == "tuned" and len(other.tuned) != other.steps:
        raise RequestError(
            f"grid = tuned has levels for {plural(len(other.tuned), 'step')}, and steps = {other.steps}; omit one of "
            f"them, or find levels for as many: unfog tune RUN --steps {other.steps}"
        )
    if sampler.grid == "tuned" and grid is None and (other.kind, other.steps) != (sampler.kind, sampler.steps):
        return replace(other, grid="schedule")
    return other


def resolve_sampler(
    config: Config,
    kind: str | None,
    steps: int | None,
    grid: str | None = None,
    levels: Sequence[float] = (),
) -> Sampler:
    """Return the sampler of a run, changed as by `override_sampler`. RequestError if it cannot sample this run."""
    consent.give(consent.part_path(kind))  # which a person names, in a flag or a call
    sampler = override_sampler(config.sampler, kind, steps, grid, levels)
    check_sampler(sampler, config.diffusion)
    return sampler


def report_dropped_levels(before: Sampler, now: Sampler) -> None:
    """Say so if `override_sampler` has dropped tuned noise levels."""
    if (before.grid, now.grid) == ("tuned", "schedule"):
        say(
            f"  the tuned levels are for {plural(before.steps, 'step')} of {before.kind}; using the levels of "
            "the schedule"
        )


def is_run_folder(path: Path) -> bool:
    """Return whether a folder is that of a run: it has config.toml and checkpoints/, as a folder of images has not."""
    return os.path.isfile(path / "config.toml") and os.path.isdir(path / "checkpoints")


def check_source(source: str) -> None:
    """Raise RequestError if there is no such source, or an empty folder, or that of a run.

    Opens nothing, which may take a while.
    """
    try:
        if "://" not in source:
            Path(source).expanduser().is_dir()  # raises for an unknown ~user and for a name that is too long
        _, location = locate(source)
        if location.form != "folder":
            return
        folder = Path(location.resolved)
        if next(folder.iterdir(), None) is None:
            open_source(source)  # raises with the reason
        if is_run_folder(folder):
            raise RequestError(
                f"{quote(source)} is the folder of a run, and not of images; give the images, or go on with the run by "
                "unfog resume"
            )
    except (OSError, RuntimeError, ValueError) as error:
        raise RequestError(
            f"{quote(source)} cannot be read: {reason_of(error)}; give a folder of images, or fashion"
        ) from None


_CLOCK = re.compile(r"([0-9]+):([0-5][0-9]):([0-5][0-9])")
_SPAN = re.compile("".join(rf"(?:([0-9]+(?:\.[0-9]+)?){unit})?" for unit in "dhms"))


def parse_duration(text: str) -> float:
    """Return seconds of a time span: 90s, 10m, 2h, 1d, 1h30m or 1:30:00. Raise RequestError for anything else."""
    plain, numbers = text.strip(), [0.0]
    if match := _CLOCK.fullmatch(plain):  # not of two numbers, which may be minutes or hours
        numbers = [int(match[1]) * 3600.0, int(match[2]) * 60.0, float(match[3])]
    elif match := _SPAN.fullmatch(plain):
        numbers = [float(number or 0) * unit for number, unit in zip(match.groups(), (86400, 3600, 60, 1))]
    span = sum(numbers)
    if not span > 0:
        raise RequestError(f"budget = {quote(text)} is not a time; write 90s, 10m, 2h, 1d, 1h30m or 1:30:00")
    if span > _TEN_YEARS:
        raise RequestError(f"budget = {quote(text)} is over ten years; give less")
    return span


_LONGEST_NAME = 255  # bytes; the limit of ext4, XFS, APFS and NTFS


def path_text(value: object, name: str) -> str:
    """Return a path as text, with ~ expanded. Raise RequestError if `value` is not a path."""
    text = os.fspath(value) if isinstance(value, str | PathLike) else None
    if not isinstance(text, str):
        raise RequestError(f"{name} = {quote(value)} is not a path; give a string or a pathlib.Path")
    return os.path.expanduser(text)


def folder_path(value: object, name: str) -> Path:
    """Return the path of a folder or file on a disk. Raise RequestError if `value` is not a path, or an address."""
    try:
        return parse_path(path_text(value, name))
    except FormatError as error:
        raise RequestError(f"{name} = {quote(value)} is {error}") from None


def check_out(out: Path, source: str = "", what: str = "a run folder", argument: str = "--out") -> None:
    """Raise RequestError unless `out` is an empty folder or can be created; `source` is the folder of the images."""
    try:
        reason = _in_the_way(out, source)
    except (OSError, RuntimeError, ValueError) as error:
        reason = reason_of(error)
    if reason:
        raise RequestError(f"{quote(str(out))[1:-1]} cannot be {what}: {reason}; give another {argument}")


def _in_the_way(out: Path, source: str) -> str:
    """Return why `out` cannot be created; "" if it can."""
    whole = above = out.resolve()
    # The nearest folder that exists decides, as those below it are still to be made.
    while not above.exists() and above != above.parent:
        above = above.parent
    if not str(out).encode("utf-8", "replace").decode().isprintable():
        return "its name has a character that cannot be shown"
    if any(len(os.fsencode(part)) > _LONGEST_NAME for part in out.parts):
        return "its name is too long"
    if out.is_symlink() and not out.exists():
        return "it is a link that leads nowhere"
    if not above.is_dir():
        return f"{above} is a file"
    if source and whole == Path(source).expanduser().resolve():
        return "it holds the images, and a run needs a folder of its own"
    if above == whole and (out / "config.toml").exists():
        return f"it is already a run, which `unfog resume {shlex.quote(str(out))}` continues"
    if above == whole and any(one.name != LOCK for one in out.iterdir()):
        return "it is not empty"
    return "" if os.access(above, os.W_OK | os.X_OK) else f"{above} is not writable"


def reason_of(error: Exception) -> str:
    """Return the message of an error without the path."""
    return (isinstance(error, OSError) and error.strerror) or str(error).rstrip(".")
