"""`unfog init`: ask five questions, and write a commented TOML file of settings for `unfog train --config`."""

from __future__ import annotations

import os
import shlex
import sys
import textwrap
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from unfog.config.describe import Description, describe, field_texts
from unfog.config.presets import preset
from unfog.config.requests.init import InitRequest
from unfog.config.schema import Config
from unfog.config.spec_strings import format_spec, registry_of
from unfog.config.toml import literal, with_version
from unfog.config.validate import check_device, check_source, parse_duration
from unfog.data.sources.image_files import SUFFIXES
from unfog.errors import RequestError
from unfog.files.safe_files import open_file
from unfog.reporting.progress import print_result, say
from unfog.runs.start import new_run_settings
from unfog.text import sanitize
from unfog.values.image_format import parse_size

# Answer -> the setting that it gives. The source is named on the command line.
_SETTINGS = {"size": "data.size", "budget": "training.budget", "classes": "data.labels", "device": "training.device"}
_DEFAULTS = {"size": "0", "budget": "1h", "classes": "auto", "device": "auto"}
_QUESTIONS = {
    "source": "Which images? A folder, a zip, a dataset, or the built-in set fashion",
    "size": "How many pixels along a side, or 96x64? Twice as many show more, and take four times as long; 0: choose",
    "budget": "How long may it train? 10m, 2h, 1d",
    "classes": "Learn classes? folders: sub-folders are classes; none; auto: if there are any; or a .csv or .jsonl",
    "device": "Where should it run? cpu, cuda (NVIDIA), mps (Apple); auto: the fastest here",
}
_WIDTH = 100
_MAX_LOOKED_AT = 200  # entries of a folder


def _ask(request: InitRequest, read: Callable[[], str]) -> dict[str, str]:
    """Return the answers by name: given as flags, read, or the defaults with --yes.

    RequestError if a flag has a value that it cannot have, or there is nothing more to read.
    """
    answers: dict[str, str] = {}
    for number, (name, question) in enumerate(_QUESTIONS.items(), 1):
        default = _DEFAULTS.get(name) or _find_source()
        given = getattr(request, name)
        while name not in answers:
            answer = given if given is not None else default
            if given is None and not request.yes:
                sys.stderr.write(f"{number}/{len(_QUESTIONS)}  {question}\n     [{default}] ")
                sys.stderr.flush()
                # An end of input, unlike an empty line, which takes the default.
                if not (line := read()):
                    raise RequestError(
                        "there is no terminal to ask questions in; give --yes for the defaults, and flags for "
                        "other values"
                    )
                answer = line.strip() or default
            try:
                _check(name, str(answer))
                answers[name] = str(answer)
            except RequestError as error:
                if given is not None or request.yes:
                    raise
                say(f"     {error}")
    return answers


def _check(name: str, answer: str) -> None:
    if name == "source":
        check_source(answer)
        return
    if name == "budget":
        parse_duration(answer)
    if name == "device":
        check_device(answer)
    _config_of({name: answer})


def _config_of(answers: Mapping[str, str]) -> Config:
    """Return the settings of these answers."""
    table: dict[str, dict[str, Any]] = {}
    for name, place in _SETTINGS.items():
        if name in answers:
            section, _, key = place.partition(".")
            value: Any = answers[name]
            if name == "size":
                value = parse_size(value)
            table.setdefault(section, {})[key] = value
    return new_run_settings(preset("default"), table, answers.get("source", ""))


def _find_source() -> str:
    """Return the first folder here that has images, or the name of the built-in set."""
    # A limit, as it may be started in a home folder with any number of entries.
    for folder in sorted(path for path in islice(Path().iterdir(), _MAX_LOOKED_AT) if path.is_dir()):
        if not folder.name.startswith(".") and folder.name not in ("runs", "doctor"):
            files = (file for _, _, names in islice(os.walk(folder), 3) for file in islice(names, _MAX_LOOKED_AT))
            if any(Path(file).suffix.lower() in SUFFIXES for file in files):
                return folder.name
    return "fashion"


def _settings_text(answers: Mapping[str, str], command: str) -> str:
    """Return the TOML of these answers, with the other common settings as comments."""
    config, asked = _config_of(answers), set(_SETTINGS.values())
    lines = [f"# Train with: {sanitize(command)}"]
    lines += ["# `unfog explain NAME` says more about a setting; `unfog train --help-all` lists all.", ""]
    shown = [each for each in describe(Config) if each.rules.common or each.setting in asked]
    section: tuple[str, ...] = ()
    # Settings without a section come first: a key below the header of one would belong to it.
    for each in sorted(shown, key=lambda each: each.path[:-1]):
        if each.path[:-1] != section:
            section = each.path[:-1]
            lines += [f"[{'.'.join(section)}]"]
        about = field_texts(each.owner)[each.field.name]
        lines += textwrap.wrap(about, _WIDTH, initial_indent="# ", subsequent_indent="# ")
        lines += [f"{'' if each.setting in asked else '# '}{each.path[-1]} = {_value(each, config)}", ""]
    return "\n".join(lines).rstrip() + "\n"


def _value(each: Description, config: Any) -> str:
    for name in each.path:
        config = getattr(config, name)
    return literal(format_spec(config) if registry_of(each.annotation) is not None else config)


def main(request: InitRequest) -> int:
    """Ask, and write the file. Return the exit status."""
    answers = _ask(request, sys.stdin.readline)
    source = answers["source"]
    file = request.file or Path(f"{Path(source.rstrip('/')).stem or 'unfog'}.toml")
    command = shlex.join(["unfog", "train", source, "--config", str(file)])
    try:
        # "x" refuses a file that is there: somebody's settings are not overwritten by a default name.
        with open_file(file, "xb", file.parent) as out:
            out.write(with_version(_settings_text(answers, command)).encode())
    except FileExistsError:
        raise RequestError(f"{file} exists; give another name: unfog init FILE") from None
    say(f"{file} is written; edit it as you like. Then:")
    print_result(command)
    return 0
