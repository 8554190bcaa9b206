"""The commands: what each takes, and the call that it makes."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional

from unfog.cli.parsing import Given, read_words, show_help
from unfog.cli.places import check_run
from unfog.config.places import check_out
from unfog.config.presets import preset
from unfog.config.request import check_device, check_request, check_sampler, check_source
from unfog.config.toml import read_toml, update
from unfog.config.tree import Config, with_length_of, without_length
from unfog.errors import RequestError
from unfog.runs.changes import check_changes
from unfog.runs.folder import RunFolder, free_name, next_folder


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
    out: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """Folder of the run; must be new. Left open: runs/ and the name of SOURCE."""
    preset: str = "default"
    """Recipe to start from: default, ddpm or demo."""
    config: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """TOML file of settings, such as the config.toml of another run."""


@dataclass(frozen=True)
class Resume:
    """Go on with RUN from its newest whole checkpoint; it ends as if it had never stopped.

    Settings may be given to change them from here on (--steps to go on for longer, --lr, intervals); what a run cannot
    change, such as its network, is refused, and what would make it another run, such as its images, needs --force.
    """

    run: Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of the run."""
    settings: Annotated[Config, tyro.conf.arg(name="")]
    source: Annotated[str | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Where the images are now, if they were moved."""
    force: bool = False
    """Also change what makes it another run from here on: images, seed, weighting, EMA, background, held-out share."""
    verify: bool = False
    """Do not go on: train from the checkpoint before the newest one once more, and compare with that to the bit."""


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
    best: bool = False
    """The checkpoint with the lowest held-out loss instead, of those that were kept."""
    batch: int = 64
    """Pictures drawn at once; lower it when memory is short."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1 or mps."""
    strip: bool = False
    """Also strip.png: x_t and the predicted x0 of the first picture, from noise to picture."""

    def __post_init__(self) -> None:
        if self.best and self.checkpoint is not None:
            raise RequestError(f"--best and --checkpoint {self.checkpoint} both name a checkpoint; give one of them")
        for name, value, least in (("n", self.n, 1), ("batch", self.batch, 1), ("checkpoint", self.checkpoint or 0, 0)):
            if value < least:
                raise RequestError(f"{name} = {value} must be at least {least}")


@dataclass(frozen=True)
class Report:
    """Write report.html of RUN: one file with settings, curves and pictures that opens anywhere."""

    run: Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of the run."""


HELP_FLAGS = ("-h", "--help")
KINDS: dict[str, type] = {"train": Train, "resume": Resume, "sample": Sample, "report": Report}


def given_to(command: str, words: Sequence[str], default: Any) -> Given:
    """What the words after `unfog COMMAND` give; with --help among them, print the help, and leave."""
    if any(word in HELP_FLAGS for word in words):
        show_help(KINDS[command], f"unfog {command}", default)
    others = {f"unfog {name}": kind for name, kind in KINDS.items() if name != command}
    return read_words(words, KINDS[command], f"unfog {command}", "SOURCE" if command == "train" else "RUN", others)


def train(words: Sequence[str]) -> int:
    """`unfog train`."""
    config, out = training_asked_for(words)
    from unfog.runs.train import start

    folder, done = start(config, out)
    return ended(folder, done)


def training_asked_for(words: Sequence[str]) -> tuple[Config, Path | None]:
    """The settings and the folder that `unfog train` is given. RequestError if they will not do."""
    asked = [word for word in words if word not in HELP_FLAGS]
    default = Train(folder=tyro.MISSING, settings=without_length(Config()))
    with suppress(RequestError):  # the help text shows what the other flags lead to, where they lead anywhere
        if asked != list(words):
            given = given_to("train", [*asked, "SOURCE"], default)
            default = replace(default, settings=without_length(base_config(given)))
    given = given_to("train", words, default)
    base = base_config(given)
    config = with_length_of(base, update(without_length(base), given.table.get("settings", {}), ""))
    config = replace(config, source=given.positional, fingerprint="", classes=())
    out = given.table.get("out")
    check_request(config)
    check_out(out or next_folder(config.source), config.source)
    return config, out


def resume(words: Sequence[str]) -> int:
    """`unfog resume`."""
    # The help text shows what RUN has, if it is named already.
    runs = [RunFolder(Path(word)) for word in words if not word.startswith("-")]
    shown = Config()
    with suppress(RequestError, OSError, ValueError):
        shown = next((run.read_config() for run in runs if run.config_file.is_file()), Config())
    default = Resume(run=tyro.MISSING, settings=without_length(shown))
    given = given_to("resume", words, default)
    folder = check_run(Path(given.positional))
    stored = folder.read_config()
    config = with_length_of(stored, update(without_length(stored), given.table.get("settings", {}), ""))
    if "source" in given.table:
        config = replace(config, source=given.table["source"])
        check_source(config.source)
    check_request(config)
    if given.table.get("verify"):
        from unfog.reporting.progress import say
        from unfog.runs.verify import verify

        say(verify(folder))
        return 0
    force = given.table.get("force", False)
    check_changes(stored, config, force)
    from unfog.runs.train import resume as go_on

    folder, done = go_on(folder, config, force)
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
    given = given_to("sample", words, Sample(run=tyro.MISSING))
    request = update(Sample(run=Path(given.positional)), given.table, "")
    stored = check_run(request.run).read_config()
    changes = {k: v for k, v in {"kind": request.sampler, "steps": request.steps}.items() if v is not None}
    check_sampler(update(stored.sampler, changes, "sampler"), stored.diffusion.schedule)
    check_device(request.device)
    if request.out is not None:
        check_out(request.out, what="the folder of the pictures")
    from unfog.reporting.progress import Progress, result
    from unfog.runs.pictures import Strip, write_pictures
    from unfog.runs.run import Run
    from unfog.runs.sampling import find_labels

    find_labels(request.label, stored.classes)  # before the weights are read
    run = Run(request.run, request.weights, request.checkpoint, request.device, request.best)
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
    given = given_to("report", words, Report(run=tyro.MISSING))
    folder = check_run(Path(given.positional))  # and no more: the report of a run with a damaged config.toml is wanted
    from unfog.reporting.progress import result
    from unfog.reporting.report import write_report

    result(str(write_report(folder.path)))
    return 0


def base_config(given: Given) -> Config:
    """What the flags start from: the preset, changed by the file of --config."""
    base = preset(given.table.get("preset", "default"))
    if "config" not in given.table:
        return base
    return with_length_of(base, read_toml(given.table["config"], without_length(base)))
