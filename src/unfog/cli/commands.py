"""The commands: from words to the call that each makes."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import tyro

from unfog.cli.parsing import Given, read_words, show_help
from unfog.cli.places import check_run
from unfog.cli.requests import Doctor, FindLr, Pack, Plan, Report, Resume, Sample, Train, Training
from unfog.config.places import check_out
from unfog.config.presets import preset
from unfog.config.request import check_device, check_request, check_sampler, check_source
from unfog.config.toml import read_toml, update
from unfog.config.tree import Config, with_length_of, without_length
from unfog.errors import RequestError
from unfog.runs.changes import check_changes
from unfog.runs.folder import RunFolder, free_name, next_folder

HELP_FLAGS = ("-h", "--help")
KINDS: dict[str, type] = {
    "train": Train,
    "resume": Resume,
    "sample": Sample,
    "report": Report,
    "doctor": Doctor,
    "plan": Plan,
    "find-lr": FindLr,
    "pack": Pack,
}


def given_to(command: str, words: Sequence[str], default: Any) -> Given:
    """What the words after `unfog COMMAND` give; with --help among them, print the help, and leave."""
    if any(word in HELP_FLAGS for word in words):
        show_help(KINDS[command], f"unfog {command}", default)
    others = {f"unfog {name}": kind for name, kind in KINDS.items() if name != command}
    return read_words(words, KINDS[command], f"unfog {command}", others)


def train(words: Sequence[str]) -> int:
    """`unfog train`."""
    config, out = training_asked_for(words)
    from unfog.runs.train import start

    folder, done = start(config, out)
    return ended(folder, done)


def training_asked_for(words: Sequence[str]) -> tuple[Config, Path | None]:
    """The settings and the folder that `unfog train` is given. RequestError if they will not do."""
    config, given = asked_for("train", words)
    out = given.table.get("out")
    check_out(out or next_folder(config.source), config.source)
    return config, out


def asked_for(command: str, words: Sequence[str]) -> tuple[Config, Given]:
    """The settings of a command that says how to train on something, and all that it is given.

    Raises:
        RequestError: they will not do.
    """
    kind: type[Training] = KINDS[command]
    asked = [word for word in words if word not in HELP_FLAGS]
    default = kind(folder=tyro.MISSING, settings=without_length(Config()))
    with suppress(RequestError):  # the help text shows what the other flags lead to, where they lead anywhere
        if asked != list(words):
            given = given_to(command, [*asked, "SOURCE"], default)
            default = replace(default, settings=without_length(base_config(given)))
    given = given_to(command, words, default)
    base = base_config(given)
    config = with_length_of(base, update(without_length(base), given.table.get("settings", {}), ""))
    config = replace(config, source=given.positionals[0], fingerprint="", classes=())
    check_request(config)
    return config, given


def resume(words: Sequence[str]) -> int:
    """`unfog resume`."""
    # The help text shows what RUN has, if it is named already.
    runs = [RunFolder(Path(word)) for word in words if not word.startswith("-")]
    shown = Config()
    with suppress(RequestError, OSError, ValueError):
        shown = next((run.read_config() for run in runs if run.config_file.is_file()), Config())
    default = Resume(run=tyro.MISSING, settings=without_length(shown))
    given = given_to("resume", words, default)
    folder = check_run(Path(given.positionals[0]))
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
    request = update(Sample(run=Path(given.positionals[0])), given.table, "")
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
    folder = check_run(
        Path(given.positionals[0])
    )  # and no more: the report of a run with a damaged config.toml is wanted
    from unfog.reporting.progress import result
    from unfog.reporting.report import write_report

    result(str(write_report(folder.path)))
    return 0


def doctor(words: Sequence[str]) -> int:
    """`unfog doctor`."""
    default = Doctor(folder=tyro.MISSING, settings=without_length(Config()))
    given = given_to("doctor", words, default) if not set(words) & set(HELP_FLAGS) else None
    run = given is not None and RunFolder(Path(given.positionals[0])).config_file.is_file()
    if given is not None and run:
        others = [flag for path, (flag, _) in given.spelled.items() if path[-1] not in ("out", "quick", "device")]
        if others:
            raise RequestError(f"a run has its own settings, so {', '.join(others)} cannot be given with it")
        config = None
    else:
        config, given = asked_for("doctor", words)
    out, quick = given.table.get("out"), given.table.get("quick", False)
    if out is not None:
        check_out(out, what="the folder of the findings")
    from unfog.reporting.findings import senseless
    from unfog.reporting.progress import result
    from unfog.runs.doctor import examine_run_folder, examine_source

    if config is None:
        device = given.table.get("settings", {}).get("training", {}).get("device", "auto")
        page, findings = examine_run_folder(RunFolder(Path(given.positionals[0])), out, quick, device)
    else:
        page, findings = examine_source(config, out, quick)
    result(str(page))
    return 2 if senseless(findings) else 0


def plan(words: Sequence[str]) -> int:
    """`unfog plan`."""
    config, given = asked_for("plan", words)
    from unfog.reporting.findings import say_findings, senseless
    from unfog.reporting.progress import result
    from unfog.runs.plan import plan as predict

    planned = predict(config, given.table.get("other", ""))
    result(json.dumps(planned.to_dict(), indent=2) if given.table.get("json") else "\n".join(planned.lines()))
    say_findings(planned.findings)
    return 2 if senseless(planned.findings) else 0


def find_lr(words: Sequence[str]) -> int:
    """`unfog find-lr`."""
    config, given = asked_for("find-lr", words)
    out = given.table.get("out")
    if out is not None:
        check_out(out, config.source, what="the folder of the plot")
    from unfog.reporting.progress import result
    from unfog.runs.find_lr import find_lr as search

    found = search(config, out or next_folder(config.source, "find-lr"), given.table.get("seconds", 90.0))
    result(f"{found.suggestion:g}" if found.suggestion else "none")
    return 0 if found.suggestion else 1


def pack(words: Sequence[str]) -> int:
    """`unfog pack`."""
    given = given_to("pack", words, Pack(folder=tyro.MISSING, target=tyro.MISSING))
    source, out = given.positionals
    config = replace(update(Config(), {"data": given.table.get("data", {})}, ""), source=source)
    check_request(config)
    from unfog.reporting.progress import result
    from unfog.runs.packing import pack as write

    result(str(write(config, Path(out))))
    return 0


def base_config(given: Given) -> Config:
    """What the flags start from: the preset, changed by the file of --config."""
    base = preset(given.table.get("preset", "default"))
    if "config" not in given.table:
        return base
    return with_length_of(base, read_toml(given.table["config"], without_length(base)))
