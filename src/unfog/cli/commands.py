"""The commands: what each takes, and the call that it makes."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional

from unfog.cli.parsing import expand, parse
from unfog.config.presets import preset
from unfog.config.toml import read_toml
from unfog.config.tree import Config, with_length_of, without_length
from unfog.errors import RequestError
from unfog.runs.folder import RunFolder, free_name


@dataclass(frozen=True)
class Train:
    """Train on SOURCE: a folder of images (any nesting; sub-folders become classes), or the built-in set `fashion`.

    An hour, with everything chosen for you: unfog train photos/

    Ten minutes at 64x64: unfog train photos/ --size 64 --budget 10m

    The textbook recipe: unfog train photos/ --preset ddpm --steps 20000

    Settings are taken from the preset, then from --config, then from the flags below.
    """

    folder: Annotated[Positional[str], tyro.conf.arg(metavar="SOURCE")]
    """Folder of images, or a built-in set."""
    settings: Annotated[Config, tyro.conf.arg(name="")]
    out: Path | None = None
    """Folder of the run; must be new. Left open: runs/ and the name of SOURCE."""
    preset: str = "default"
    """Recipe to start from: default, ddpm or demo."""
    config: Path | None = None
    """TOML file of settings, such as the config.toml of another run."""


@dataclass(frozen=True)
class Resume:
    """Go on with RUN from its newest whole checkpoint; it ends as if it had never stopped.

    Settings may be given to change them from here on (--steps to go on for longer, --lr, intervals); what a run cannot
    change, such as its network or its images, is refused.
    """

    run: Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of the run."""
    settings: Annotated[Config, tyro.conf.arg(name="")]


@dataclass(frozen=True)
class Sample:
    """Draw pictures from RUN: numbered PNGs and grid.png. Needs no flag: the run knows its model, sampler and classes.

    Picture number i of a seed is the same picture whatever -n is.
    """

    run: Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of the run."""
    n: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 16
    """How many pictures."""
    out: Path | None = None
    """Folder for them. Left open: a new one in the run folder."""
    seed: int = 0
    """Another seed gives other pictures."""
    steps: int | None = None
    """Steps of the sampler; more is slower and closer to the model. Left open: as the run is set."""
    sampler: Literal["ddpm", "ddim", "heun", "dpmpp"] | None = None
    """Left open: as the run is set."""
    label: tuple[str, ...] = ()
    """Classes by name or number; pictures cycle through them. Left open: all classes."""
    guidance: float | None = None
    """Classifier-free guidance: above 1, pictures keep closer to their class. Left open: as the run is set."""
    weights: Literal["ema", "raw"] = "ema"
    """The average of the weights, or the last ones as they are."""
    checkpoint: int | None = None
    """Step of the checkpoint. Left open: the newest whole one."""
    batch: int = 64
    """Pictures drawn at once; lower it when memory is short."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1 or mps."""
    strip: bool = False
    """Also strip.png: x_t and the predicted x0 of the first picture, from noise to picture."""


@dataclass(frozen=True)
class Report:
    """Write report.html of RUN: one file with settings, curves and pictures that opens anywhere."""

    run: Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of the run."""


def train(words: Sequence[str]) -> int:
    """`unfog train`."""
    base = base_config(words)
    default = Train(folder=tyro.MISSING, settings=without_length(base))
    request = parse(Train, expand(words), "unfog train", default)
    from unfog.runs.train import start

    config = with_length_of(base, request.settings)
    folder, done = start(replace(config, source=request.folder), request.out)
    return ended(folder, done)


def resume(words: Sequence[str]) -> int:
    """`unfog resume`."""
    # The stored settings are the defaults of the flags, so the folder has to be known first.
    runs = [RunFolder(Path(word)) for word in words if not word.startswith("-")]
    stored = next((run.read_config() for run in runs if run.config_file.is_file()), Config())
    default = Resume(run=tyro.MISSING, settings=without_length(stored))
    request = parse(Resume, expand(words), "unfog resume", default)
    from unfog.runs.train import resume as go_on

    folder, done = go_on(RunFolder(request.run), with_length_of(stored, request.settings))
    return ended(folder, done)


def ended(folder: RunFolder, done: bool) -> int:
    """Say where everything is and what comes next; the folder itself is the result, on stdout."""
    from unfog.reporting.progress import result, say

    say(f"  pictures  {folder.newest_preview}\n  report    {folder.path / 'report.html'}")
    say(f"  next      unfog {'sample' if done else 'resume'} {shlex.quote(str(folder.path))}")
    result(str(folder.path))
    return 0 if done else 3


def sample(words: Sequence[str]) -> int:
    """`unfog sample`."""
    request = parse(Sample, words, "unfog sample", Sample(run=tyro.MISSING))
    from unfog.reporting.progress import Progress, result
    from unfog.runs.pictures import Strip, write_pictures
    from unfog.runs.run import Run

    if request.out is not None and request.out.exists() and any(request.out.iterdir()):
        raise RequestError(f"{request.out} is not empty; give another --out, so that pictures do not mix")
    run = Run(request.run, request.weights, request.checkpoint, request.device)
    sampler = run.sampler(request.sampler, request.steps)
    strip = Strip(run.config.diffusion.schedule, sampler) if request.strip else None
    with Progress("drawing", request.n) as progress:
        pictures = run.sample(
            request.n,
            request.steps,
            request.seed,
            request.label,
            request.guidance,
            request.sampler,
            request.batch,
            progress.update,
            strip,
        )
    out = request.out or free_name(run.path / "pictures")
    write_pictures(out, pictures, request.label or run.classes, strip)
    result(str(out))
    return 0


def report(words: Sequence[str]) -> int:
    """`unfog report`."""
    request = parse(Report, words, "unfog report", Report(run=tyro.MISSING))
    from unfog.reporting.progress import result
    from unfog.reporting.report import write_report

    RunFolder(request.run).check_is_run()  # and no more: the report of a run with a damaged config.toml is wanted, too
    result(str(write_report(request.run)))
    return 0


def base_config(words: Sequence[str]) -> Config:
    """What the flags start from: the preset, changed by the file of --config."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--preset", default="default")
    early.add_argument("--config", type=Path)
    given, _ = early.parse_known_args([word for word in words if word not in ("-h", "--help")])
    base = preset(given.preset)
    if given.config is None:
        return base
    return with_length_of(base, read_toml(given.config, without_length(base)))
