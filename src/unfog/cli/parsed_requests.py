"""From the words of a command to what they give: a request, or the settings of something to train."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import tyro

from unfog.cli.parse import ParsedArgs, parse_args, show_help
from unfog.cli.requests import Doctor, FindLr, Pack, Plan, Resume, Slurm, Train, TrainCodec, Training
from unfog.cli.run_lookup import open_run
from unfog.cli.run_requests import EmaSweep, Evaluate, Report, Sample, Tune
from unfog.config.autoencoder_recipe import AutoencoderRunSettings, autoencoder_recipe
from unfog.config.paths import check_out
from unfog.config.presets import preset
from unfog.config.resume_rules import apply_changes, check_changes
from unfog.config.schema import Config, clear_length, inherit_length
from unfog.config.toml import read_toml, update
from unfog.config.validate import check_request, check_source
from unfog.errors import RequestError
from unfog.models.autoencoder_settings import Autoencoder, Latents
from unfog.process.run_folder import RunFolder, next_folder

HELP_FLAGS = ("-h", "--help")
KINDS: dict[str, type] = {
    "train": Train,
    "resume": Resume,
    "train-autoencoder": TrainCodec,
    "sample": Sample,
    "evaluate": Evaluate,
    "ema-sweep": EmaSweep,
    "tune": Tune,
    "report": Report,
    "doctor": Doctor,
    "plan": Plan,
    "find-lr": FindLr,
    "pack": Pack,
    "slurm": Slurm,
}


def given_to(command: str, words: Sequence[str], default: Any) -> ParsedArgs:
    """What the words after `unfog COMMAND` give; with --help among them, print the help, and leave."""
    if any(word in HELP_FLAGS for word in words):
        show_help(KINDS[command], f"unfog {command}", default)
    others = {f"unfog {name}": kind for name, kind in KINDS.items() if name != command}
    return parse_args(words, KINDS[command], f"unfog {command}", others)


def training_asked_for(words: Sequence[str]) -> tuple[Config, Path | None]:
    """The settings and the folder that `unfog train` is given. RequestError if they will not do."""
    config, given = asked_for("train", words)
    out = given.table.get("out")
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":  # else it may be there, and be its own
        check_out(out or next_folder(config.source), config.source)
    return config, out


def resuming_asked_for(words: Sequence[str]) -> tuple[RunFolder, Config, ParsedArgs]:
    """The run that `unfog resume` is given, its settings with those that are changed, and all that is given.

    RequestError if they will not do.
    """
    # The help text shows what RUN has, if it is named already.
    runs = [RunFolder(Path(word)) for word in words if not word.startswith("-")]
    shown = Config()
    with suppress(RequestError, OSError, ValueError):
        shown = next((run.read_config() for run in runs if run.config_file.is_file()), Config())
    default = Resume(run=tyro.MISSING, settings=clear_length(shown))
    given = given_to("resume", words, default)
    folder = open_run(Path(given.positionals[0]))
    stored = folder.read_config()
    config = apply_changes(stored, given.table.get("settings", {}))
    if "source" in given.table:
        config = replace(config, source=given.table["source"])
        check_source(config.source)
    check_request(config)
    if not given.table.get("verify"):
        check_changes(stored, config, given.table.get("force", False))
    return folder, config, given


def asked_for(command: str, words: Sequence[str]) -> tuple[Config, ParsedArgs]:
    """The settings of a command that says how to train on something, and all that it is given.

    Raises:
        RequestError: they will not do.
    """
    asked = [word for word in words if word not in HELP_FLAGS]
    default = showing(command, base_config(ParsedArgs(), command))
    if asked != list(words):  # the help text shows the recipe that they name
        for whole in (asked, [*asked, "SOURCE"]):
            with suppress(RequestError):
                default = showing(command, base_config(given_to(command, whole, default), command))
    given = given_to(command, words, default)
    base = base_config(given, command)
    config = inherit_length(base, update(clear_length(base), given.table.get("settings", {}), ""))
    config = replace(
        config,
        source=given.positionals[0],
        # Of another run, where --config names one's.
        fingerprint="",
        classes=(),
        latents=Latents(),
        autoencoder=Autoencoder(),
        init=replace(config.init, sha256=""),
    )
    check_request(config)
    return config, given


def showing(command: str, config: Config) -> Training | TrainCodec:
    """The request whose help text has these settings as defaults."""
    settings = clear_length(config)
    if command == "train-autoencoder":
        return TrainCodec(folder=tyro.MISSING, settings=AutoencoderRunSettings.of(settings))
    kind: type[Training] = KINDS[command]
    return kind(folder=tyro.MISSING, settings=settings)


def base_config(given: ParsedArgs, command: str = "train") -> Config:
    """What the flags start from: the preset, changed by what --init names, changed by the file of --config."""
    base = autoencoder_recipe() if command == "train-autoencoder" else preset(given.table.get("preset", "default"))
    file, settings = given.table.get("config"), given.table.get("settings", {})
    named = read_toml(file, clear_length(base)).init if file else base.init
    if named.folder or settings.get("init", {}).get("folder"):
        from unfog.runs.init_weights import recipe_from_weights

        base = recipe_from_weights(replace(base, init=named), settings)
    return inherit_length(base, read_toml(file, clear_length(base))) if file else base
