"""The commands: from words to the call that each makes."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import tyro

from unfog.cli.parsed_requests import HELP_FLAGS, asked_for, given_to, resuming_asked_for, training_asked_for
from unfog.cli.requests import Doctor, Pack
from unfog.cli.run_lookup import open_run
from unfog.cli.run_requests import EmaSweep, Evaluate, Report, Sample, Tune
from unfog.config.autoencoder_recipe import add_autoencoder
from unfog.config.paths import check_out
from unfog.config.schema import Config, clear_length
from unfog.config.toml import update
from unfog.config.validate import (
    check_autoencoder,
    check_device,
    check_request,
    check_sampler,
    check_source,
    override_sampler,
)
from unfog.errors import RequestError
from unfog.process.run_folder import RunFolder, next_folder, unused_path

CODEC_FLAGS = ("factor", "channels", "width", "kl", "pyramid")


def train(words: Sequence[str]) -> int:
    """`unfog train`."""
    if follows(words):
        return 0
    config, out = training_asked_for(words)
    from unfog.process.launch import find_earlier_attempt
    from unfog.runs.train import resume as go_on
    from unfog.runs.train import train

    made = find_earlier_attempt(config.source, out)
    folder, done = train(config, out) if made is None else go_on(made)
    return ended(folder, done)


def train_autoencoder(words: Sequence[str]) -> int:
    """`unfog train-autoencoder`."""
    if follows(words):
        return 0
    config, given = asked_for("train-autoencoder", words)
    config = add_autoencoder(config, **{k: v for k, v in given.table.items() if k in CODEC_FLAGS})
    check_autoencoder(config)
    out = given.table.get("out") or next_folder(f"{config.source.rstrip('/')}-autoencoder")
    check_out(out, config.source, "the folder of a codec")
    from unfog.runs.train import train

    folder, done = train(config, out)
    return ended(folder, done)


def resume(words: Sequence[str]) -> int:
    """`unfog resume`."""
    if follows(words):
        return 0
    folder, config, given = resuming_asked_for(words)
    if given.table.get("verify"):
        from unfog.commands.verify import verify
        from unfog.reporting.progress import say

        say(verify(folder))
        return 0
    from unfog.runs.train import resume as go_on

    folder, done = go_on(folder, config, given.table.get("force", False))
    return ended(folder, done)


def follows(words: Sequence[str]) -> bool:
    """Whether this process is one of those that train with a first one, which it then has done."""
    if os.environ.get("RANK", "0") == "0":
        return False
    if not {"--verify", *HELP_FLAGS} & set(words):  # which train nothing
        from unfog.runs.workers import run_worker

        run_worker()
    return True


def ended(folder: RunFolder, done: bool) -> int:
    """Say where everything is and what comes next; the folder itself is the result, on stdout."""
    from unfog.reporting.progress import print_result, say

    say(f"  pictures  {folder.newest_preview}\n  report    {folder.path / 'report.html'}")
    what = "sample" if done else "resume"
    if done and folder.read_config().trains_autoencoder:
        what = "train SOURCE --autoencoder"
    say(f"  next      unfog {what} {shlex.quote(str(folder.path))}")
    print_result(str(folder.path))
    # torchrun takes anything but 0 for a failure, after which it would start again what was to stop.
    return 0 if done or "TORCHELASTIC_RUN_ID" in os.environ else 3


def sample(words: Sequence[str]) -> int:
    """`unfog sample`."""
    given = given_to("sample", words, Sample(run=tyro.MISSING))
    request = update(Sample(run=Path(given.positionals[0])), given.table, "")
    stored = open_run(request.run).read_config()
    sampler = override_sampler(stored.sampler, request.sampler, request.steps)
    check_sampler(sampler, stored.diffusion.schedule)
    check_device(request.device)
    check_out(request.out or unused_path(request.run / "pictures"), what="the folder of the pictures")
    from unfog.inference.run import Run
    from unfog.inference.tuned_sampler import report_dropped_levels
    from unfog.pipeline.edit import build_edit
    from unfog.pipeline.generate import parse_labels
    from unfog.pipeline.image_files import DenoisingStrip, write_images
    from unfog.reporting.progress import Progress, print_result, say

    parse_labels(request.label, stored.classes)  # before the weights are read
    edit = build_edit(stored, request.image, request.mask, request.strength, request.repeats)
    run = Run(request.run, request.weights, request.checkpoint, request.device, request.best, request.ema)
    report_dropped_levels(stored.sampler, sampler)
    strip = DenoisingStrip(run.config.diffusion.schedule, run.decode) if request.strip else None
    label = f"drawing from step {run.checkpoint.step:,}" if request.ema is None else "drawing"
    with Progress(label, request.n) as progress:
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
            guidance_interval=request.guidance_interval,
            guide=request.guide if request.guide_checkpoint is None else request.guide_checkpoint,
            image=request.image,
            mask=request.mask,
            strength=request.strength,
            repeats=request.repeats,
            precision=request.precision,
        )
    if sampler.kind == "adaptive":
        say(f"  adaptive took up to {run.calls} network calls")
    out = request.out or unused_path(run.path / "pictures")
    write_images(out, pictures, request.label or run.classes, strip, edit)
    print_result(str(out))
    return 0


def evaluate(words: Sequence[str]) -> int:
    """`unfog evaluate`."""
    given = given_to("evaluate", words, Evaluate(run=tyro.MISSING))
    request = update(Evaluate(run=Path(given.positionals[0])), given.table, "")
    stored = open_run(request.run).read_config()
    check_sampler(override_sampler(stored.sampler, request.sampler, request.steps), stored.diffusion.schedule)
    check_device(request.device)
    if request.reference not in ("", "held-out"):
        check_source(request.reference)
    from unfog.inference.results import EvaluationRequest
    from unfog.inference.run import Run
    from unfog.reporting.progress import print_result
    from unfog.reporting.report import write_report
    from unfog.training.distributed.rendezvous import is_main_process, local_device

    names = {f.name for f in fields(EvaluationRequest)}
    asked = update(
        EvaluationRequest(), {k: v for k, v in vars(request).items() if k in names}, ""
    )  # before weights are read
    run = Run(request.run, request.weights, request.checkpoint, local_device(request.device), request.best)
    found = run.evaluate(**vars(asked))
    if is_main_process():
        print_result("\n".join(found.lines()))
        write_report(run.path)
    return 0


def ema_sweep(words: Sequence[str]) -> int:
    """`unfog ema-sweep`."""
    given = given_to("ema-sweep", words, EmaSweep(run=tyro.MISSING))
    asked = update(EmaSweep(run=Path(given.positionals[0])), given.table, "")
    open_run(asked.run).read_config()
    check_device(asked.device)
    from unfog.commands.ema_sweep import ema_sweep as sweep
    from unfog.commands.ema_sweep import report_sweep

    report_sweep(sweep(asked.run, asked.metric, asked.n, asked.widths, asked.checkpoint, asked.features, asked.device))
    return 0


def tune(words: Sequence[str]) -> int:
    """`unfog tune`."""
    given = given_to("tune", words, Tune(run=tyro.MISSING))
    request = update(Tune(run=Path(given.positionals[0])), given.table, "")
    open_run(request.run).read_config()
    check_device(request.device)
    from unfog.commands.tune import tune as search
    from unfog.reporting.progress import print_result

    asked = (request.steps, request.sampler, request.pictures, request.tries, request.store, request.device)
    print_result(search(request.run, *asked).table())
    return 0


def report(words: Sequence[str]) -> int:
    """`unfog report`."""
    given = given_to("report", words, Report(run=tyro.MISSING))
    folder = open_run(
        Path(given.positionals[0])
    )  # and no more: the report of a run with a damaged config.toml is wanted
    from unfog.reporting.progress import print_result
    from unfog.reporting.report import write_report

    print_result(str(write_report(folder.path)))
    return 0


def doctor(words: Sequence[str]) -> int:
    """`unfog doctor`."""
    default = Doctor(folder=tyro.MISSING, settings=clear_length(Config()))
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
    from unfog.commands.doctor import examine_run_folder, examine_source
    from unfog.reporting.findings import has_fatal
    from unfog.reporting.progress import print_result

    if config is None:
        device = given.table.get("settings", {}).get("training", {}).get("device", "auto")
        page, findings = examine_run_folder(RunFolder(Path(given.positionals[0])), out, quick, device)
    else:
        page, findings = examine_source(config, out, quick)
    print_result(str(page))
    return 2 if has_fatal(findings) else 0


def plan(words: Sequence[str]) -> int:
    """`unfog plan`."""
    config, given = asked_for("plan", words)
    from unfog.commands.plan import plan as predict
    from unfog.reporting.findings import has_fatal, print_findings
    from unfog.reporting.progress import print_result

    planned = predict(config, given.table.get("other", ""), given.table.get("processes", 1))
    print_result(json.dumps(planned.to_dict(), indent=2) if given.table.get("json") else "\n".join(planned.lines()))
    print_findings(planned.findings)
    return 2 if has_fatal(planned.findings) else 0


def find_lr(words: Sequence[str]) -> int:
    """`unfog find-lr`."""
    config, given = asked_for("find-lr", words)
    out = given.table.get("out")
    if out is not None:
        check_out(out, config.source, what="the folder of the plot")
    from unfog.commands.find_lr import find_lr as search
    from unfog.reporting.progress import print_result

    found = search(config, out or next_folder(config.source, "find-lr"), given.table.get("seconds", 90.0))
    print_result(f"{found.suggestion:g}" if found.suggestion else "none")
    return 0 if found.suggestion else 1


def pack(words: Sequence[str]) -> int:
    """`unfog pack`."""
    given = given_to("pack", words, Pack(folder=tyro.MISSING, target=tyro.MISSING))
    source, out = given.positionals
    config = replace(update(Config(), {"data": given.table.get("data", {})}, ""), source=source)
    check_request(config)
    from unfog.commands.pack import pack as write
    from unfog.reporting.progress import print_result

    print_result(str(write(config, Path(out))))
    return 0
