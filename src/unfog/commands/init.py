"""`unfog init`: ask five questions, and write a commented TOML file of settings for `unfog train --config`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from unfog.config.commented_toml import commented_toml
from unfog.config.presets import preset
from unfog.config.requests.init import InitRequest
from unfog.config.schema import Config
from unfog.config.toml import with_version
from unfog.config.validate import check_device, check_source, parse_duration
from unfog.data.sources.folder import first_image_folder
from unfog.errors import RequestError
from unfog.files.safe_files import open_file
from unfog.reporting.progress import print_result, say
from unfog.runs.start import new_run_settings
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


def _ask(request: InitRequest, read: Callable[[], str]) -> dict[str, str]:
    """Return the answers by name: given as flags, read, or the defaults with --yes.

    RequestError if a flag has a value that it cannot have, or there is nothing more to read.
    """
    answers: dict[str, str] = {}
    for number, (name, question) in enumerate(_QUESTIONS.items(), 1):
        default = _DEFAULTS.get(name) or first_image_folder() or "fashion"
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


def main(request: InitRequest) -> int:
    """Ask, and write the file. Return the exit status."""
    answers = _ask(request, sys.stdin.readline)
    source = answers["source"]
    file = request.file or Path(f"{Path(source.rstrip('/')).stem or 'unfog'}.toml")
    command = shlex.join(["unfog", "train", source, "--config", str(file)])
    try:
        # "x" refuses a file that is there: somebody's settings are not overwritten by a default name.
        with open_file(file, "xb", file.parent) as out:
            out.write(with_version(commented_toml(_config_of(answers), {*_SETTINGS.values()}, command)).encode())
    except FileExistsError:
        raise RequestError(f"{file} exists; give another name: unfog init FILE") from None
    say(f"{file} is written; edit it as you like. Then:")
    print_result(command)
    return 0
