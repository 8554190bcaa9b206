"""From the words of a command to its request, with everything checked that can be checked without torch."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

from unfog.cli.help import HELP_FLAGS, format_help
from unfog.cli.parse import ParsedArgs, parse_args
from unfog.config.named_code import consent_to_flags
from unfog.config.presets import AutoencoderRunSettings, autoencoder_recipe, preset
from unfog.config.requests.cache import CacheRequest
from unfog.config.requests.completion import CompletionRequest
from unfog.config.requests.doctor import DoctorRequest
from unfog.config.requests.ema_sweep import EmaSweepRequest
from unfog.config.requests.evaluate import EvaluateRequest
from unfog.config.requests.explain import ExplainRequest
from unfog.config.requests.export import ExportRequest
from unfog.config.requests.init import InitRequest
from unfog.config.requests.pack import PackRequest
from unfog.config.requests.plan import FindLrRequest, PlanRequest
from unfog.config.requests.runs import DocsRequest, ReportRequest, RunsRequest, ServeRequest, WatchRequest
from unfog.config.requests.sample import SampleRequest, is_model
from unfog.config.requests.slurm import SlurmRequest
from unfog.config.requests.train import ResumeRequest, TrainAutoencoderRequest, TrainRequest
from unfog.config.requests.tune import TuneRequest
from unfog.config.resume_rules import apply_changes as apply_resume_changes
from unfog.config.resume_rules import check_changes
from unfog.config.schema import Config
from unfog.config.spec_strings import quote
from unfog.config.toml import update
from unfog.config.validate import check_device, check_out, check_request, check_source, is_run_folder, reason_of
from unfog.custom import consent
from unfog.errors import RequestError
from unfog.process.run_folder import RunFolder, next_folder
from unfog.runs.start import base_settings, check_new_run, new_run_settings

REQUESTS: dict[str, type] = {
    "train": TrainRequest,
    "resume": ResumeRequest,
    "train-autoencoder": TrainAutoencoderRequest,
    "sample": SampleRequest,
    "evaluate": EvaluateRequest,
    "ema-sweep": EmaSweepRequest,
    "tune": TuneRequest,
    "report": ReportRequest,
    "export": ExportRequest,
    "runs": RunsRequest,
    "watch": WatchRequest,
    "serve": ServeRequest,
    "doctor": DoctorRequest,
    "plan": PlanRequest,
    "find-lr": FindLrRequest,
    "pack": PackRequest,
    "slurm": SlurmRequest,
    "init": InitRequest,
    "explain": ExplainRequest,
    "docs": DocsRequest,
    "completion": CompletionRequest,
    "cache": CacheRequest,
}
_MOST_NAMES = 1000  # of a folder that are looked at
_DEEPEST = 3  # parents of a part of a run, as of checkpoints/NAME/FILE
_FOLDER_FOR = {"doctor": "the folder of the findings", "find-lr": "the folder of the plot"}


def read_request(command: str, words: Sequence[str]) -> Any:
    """Return the request that the words after `unfog COMMAND` make. With --help among them, print the help and exit.

    Raises:
        RequestError: the words make no request, or one that cannot be met.
    """
    if command == "slurm":
        return _slurm_request(words)
    if command == "resume":
        return _resume_request(words)
    kind = REQUESTS[command]
    if "settings" in {f.name for f in fields(kind)}:
        return _training_request(command, words)
    if command == "explain" and not any(word in (*HELP_FLAGS, "--") for word in words):
        words = ["--", *words]  # it has no flags, so that --num-epochs is the word to explain
    args = _parse(command, words)
    request = update(kind(**args.named), args.table, "")
    if isinstance(request, EvaluateRequest) and request.is_of_images:
        consent.give_to_source(str(request.run))
        check_source(str(request.run))
        check_device(request.device)
        request.check_without_run()
    elif command in ("sample", "evaluate") and is_model(request.run):
        check_device(request.device)
        request.check_without_run()
    elif hasattr(request, "run"):
        folder = _open_run(request.run, "; images need --reference SOURCE" if command == "evaluate" else "")
        if isinstance(request, EvaluateRequest) and isinstance(request.against, Path):
            _open_run(request.against, "; give the step of a checkpoint, such as 5000, or the folder of a run")
        if command not in ("report", "watch"):  # which are wanted of a run with a damaged config.toml too
            folder.read_config()
            check_device(getattr(request, "device", "cpu"))
    if command == "pack":
        check_request(Config(source=request.source, data=request.data))
    return request


def _parse(command: str, words: Sequence[str], default: Any = None) -> ParsedArgs:
    """Return the parsed words. With --help among them, print the help with the values of `default`, and exit."""
    if any(word in HELP_FLAGS for word in words):
        sys.stdout.write(format_help(command, REQUESTS[command], default, every="--help-all" in words))
        raise SystemExit(0)
    others = {f"unfog {name}": kind for name, kind in REQUESTS.items() if name != command}
    args = parse_args(words, REQUESTS[command], f"unfog {command}", others)
    consent_to_flags(REQUESTS[command], args.named | args.table)
    return args


def _training_request(command: str, words: Sequence[str]) -> Any:
    """Return a request to train on something, or one that looks ahead to it."""
    kind, default = REQUESTS[command], _shown_settings(command, {})
    plain = [word for word in words if word not in HELP_FLAGS]
    if plain != list(words):  # the help text shows the recipe that the words name
        for attempt in (plain, [*plain, "SOURCE"]):
            # Help is given whatever else is wrong with the words.
            with suppress(RequestError):
                default = _shown_settings(command, _parse(command, attempt).table)
    args = _parse(command, words, kind(source="", settings=default))
    changes, source = args.table.get("settings", {}), args.named.get("source", "")
    gpu = command == "doctor" and args.table.get("gpu", False)
    if gpu and source:
        raise RequestError(f"--gpu checks the GPU, without images; omit {quote(source)}, or --gpu")
    if not gpu and "source" not in args.named:
        raise RequestError("SOURCE|RUN is missing; write it first: unfog doctor SOURCE|RUN, or unfog doctor --gpu")
    if command == "doctor" and RunFolder(Path(source)).claims_to_be_one:
        if others := [flag for path, (flag, _) in args.spelled.items() if path[-1] not in ("out", "quick", "device")]:
            raise RequestError(f"a run has its own settings, so {', '.join(others)} cannot be given with it")
        settings: Any = update(Config(), changes, "")
    else:
        config = new_run_settings(_base(command, args.table), changes, source)
        settings = AutoencoderRunSettings.of(config) if command == "train-autoencoder" else config
        if gpu:
            check_device(config.training.device)
        else:
            check_request(config)
    rest = {name: value for name, value in args.table.items() if name != "settings"}
    request = kind(source=source, settings=settings, **rest)
    if command == "train":
        check_new_run(request)
    elif command in _FOLDER_FOR and request.out is not None:
        check_out(request.out, source if command == "find-lr" else "", _FOLDER_FOR[command])
    return request


def _base(command: str, table: dict[str, Any]) -> Config:
    recipe = autoencoder_recipe() if command == "train-autoencoder" else preset(table.get("preset", "default"))
    return base_settings(recipe, table.get("config"), table.get("settings", {}))


def _shown_settings(command: str, table: dict[str, Any]) -> Config | AutoencoderRunSettings:
    settings = _base(command, table).without_length()
    return AutoencoderRunSettings.of(settings) if command == "train-autoencoder" else settings


def _resume_request(words: Sequence[str]) -> ResumeRequest:
    kind, shown = ResumeRequest, Config()
    # The help text shows the settings of RUN, if it is named already.
    runs = [RunFolder(Path(word)) for word in words if not word.startswith("-")]
    with suppress(RequestError, OSError, ValueError):
        shown = next((run.read_config() for run in runs if run.config_file.is_file()), Config())
    args = _parse("resume", words, kind(Path(), shown.without_length()))
    folder = _open_run(args.named["run"])
    stored, table = folder.read_config(), args.table
    config = apply_resume_changes(stored, table.get("settings", {}))
    if source := table.get("source"):
        config = replace(config, source=source)
        check_source(source)
    check_request(config)
    request = kind(folder.path, config, source, table.get("force", False), table.get("verify", False))
    # A replay only reads, so a run whose folders are links can still be verified.
    if not request.verify:
        folder.check_own_files()
        check_changes(stored, config, request.force)
    return request


def _slurm_request(words: Sequence[str]) -> SlurmRequest:
    at = _command_at(words)
    args = _parse("slurm", words[:at])
    job = update(SlurmRequest(words=tuple(words)), args.table, "")
    command = words[at + (words[at : at + 1] == ["--"]) :]
    name, rest = next(iter(command), ""), command[1:]
    if name == "train":
        train: TrainRequest = read_request("train", rest)
        # The job may start many times, and has to find the same run each time.
        run = train.out or next_folder(train.source)
        command = ("train", *(() if train.out else ("--out", str(run))), *rest)
        return replace(job, command=command, run=run, source=train.source)
    if name == "resume":
        resume = _resume_request(rest)
        if resume.verify:
            raise RequestError(
                "--verify trains nothing new and needs no batch job; run it directly: unfog resume RUN --verify"
            )
        budget = parse_args(rest, ResumeRequest, "", {}).table.get("settings", {}).get("training", {})
        if budget.get("budget"):
            raise RequestError("--budget would start again in each job; give --steps or --images")
        return replace(job, command=("resume", *rest), run=resume.run, source=resume.settings.source)
    raise RequestError(
        f"unfog slurm needs the command to run{f', which {quote(name)} is not' if name else ''}; "
        "give train or resume: unfog slurm --nodes 2 train SOURCE"
    )


def _command_at(words: Sequence[str]) -> int:
    """Return where the flags of `unfog slurm` end: at "--", or else at the command itself."""
    if "--" in words:
        return words.index("--")
    for at, word in enumerate(words):
        # Behind a flag stands its value: --account train is an account.
        if word in ("train", "resume") and not (at and words[at - 1].startswith("-") and "=" not in words[at - 1]):
            return at
    return len(words)


def _open_run(path: Path, else_say: str = "") -> RunFolder:
    """Return the run folder at `path`. Raise RequestError, which names a similar one, if it is missing."""
    folder = RunFolder(path)
    try:
        folder.check_is_run()
    except (OSError, ValueError) as error:  # a name too long, a folder that may not be entered
        raise RequestError(f"{quote(str(path))} cannot be read: {reason_of(error)}; give the folder of a run") from None
    except RequestError as error:
        missing = "it has no config.toml" if path.exists() else "there is no such folder"
        remedy = else_say or "; give the folder of a run (unfog runs lists them)"
        said = _run_around(path) or _similar_run(path) or f": {missing}{remedy}"
        raise RequestError(f"{quote(str(path))[1:-1]} is not a run{said}") from error
    return folder


def _run_around(path: Path) -> str:
    """Name the run that a folder is a part of, as that of its checkpoints is, or the newest run in it; "" without."""
    with suppress(OSError, ValueError):
        if path.exists() and (run := next(filter(is_run_folder, path.parents[:_DEEPEST]), None)) is not None:
            return f", but a part of one; give {run}"
        with os.scandir(path) as entries:
            configs = [Path(entry, "config.toml") for entry in islice(entries, _MOST_NAMES)]
        if inside := [config for config in configs if os.path.isfile(config)]:
            newest = max(inside, key=os.path.getmtime).parent
            return f", but a folder of runs; give one of them, such as {newest}"
    return ""


def _similar_run(path: Path) -> str:
    try:
        places = [path.parent, Path("runs")]
        runs = [str(run.parent) for place in places if place.is_dir() for run in place.glob("*/config.toml")]
    except (OSError, ValueError):
        return ""
    by_name = {Path(run).name: run for run in runs}
    close = difflib.get_close_matches(path.name, by_name, n=1)
    return f"; did you mean {by_name[close[0]]}?" if close else ""
