"""Steering: requests to a run that trains, and commands that the page starts after the checks of the command line.

Words of a command are made from the fields of its request dataclass, each a list item of its own: no shell takes part.
The page sends names of settings and values, and numbers of runs and sources. It sends no path and no code: settings
that name either can be given on the command line only.
"""

from __future__ import annotations

import os
import shlex
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin

from unfog.cli.requests import read_request
from unfog.config.describe import Description, describe
from unfog.config.presets import preset
from unfog.config.requests import ResumeRequest, TrainRequest
from unfog.config.schema import Config
from unfog.custom import names_code
from unfog.data.settings import LABELS
from unfog.errors import RequestError
from unfog.process.heartbeat import Request, read_heartbeat, write_request
from unfog.process.run_folder import next_folder
from unfog.serve.run_files import read_settings, read_source
from unfog.serve.runs import RunEntry, number_of
from unfog.serve.server import Server
from unfog.serve.tasks import command_text
from unfog.text import sanitize, without_secrets

# Settings that name files, or programs that send data to others.
_NOT_FROM_PAGE = ("autoencoder_folder", "init.folder", "evaluate.features", "log.sinks")
_BUILT_IN = "fashion"
_LONGEST_VALUE, _MOST_SETTINGS = 1000, 200
_checking = threading.Lock()  # checks of a request are written for one thread


class Command(NamedTuple):
    """A command that was checked."""

    words: list[str]
    trains: bool
    result: Path | None = None
    """Folder that it writes to."""

    @property
    def text(self) -> str:
        return command_text(self.words)


class SourceList:
    """Images that a run may be started on, by number: built in, of the command line, or of a listed run."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def texts(self) -> dict[int, str]:
        """Return SOURCE by number. Sources that are code, or could be taken for a flag, are left out."""
        found = [_BUILT_IN, *self._server.given_sources]
        for run in self._server.runs:
            source = read_source(run.path)
            if source and not names_code(source) and not source.startswith("-"):
                found.append(source)
        return {number_of(text): text for text in found}

    def as_json(self) -> list[dict[str, Any]]:
        return [{"id": number, "name": sanitize(text)} for number, text in self.texts().items()]


def send_request(run: RunEntry, what: object) -> dict[str, Any]:
    """Write the file that asks a running run to save, to draw a preview, or to stop. RequestError if none runs."""
    names: dict[str, Request] = {"save": "SAVE", "preview": "PREVIEW", "stop": "STOP"}
    if not isinstance(what, str) or what not in names:
        raise RequestError(f"a run can be asked for {', '.join(names)}")
    beat = read_heartbeat(run.path)
    if beat is None or not beat["alive"]:
        raise RequestError(f"{run.name} does not run, so nobody would read the request; resume it first")
    try:
        write_request(run.path, names[what])
    except OSError as error:
        raise RequestError(f"the request cannot be written: {error.strerror}; make room or permit it") from None
    return {"command": shlex.join(["touch", os.fspath(run.path / names[what])])}


def train_command(server: Server, body: Mapping[str, Any]) -> Command:
    """Return the command of a new run on a source of the list."""
    source = _source(server, body)
    out = next_folder(source, os.fspath(server.folder))
    words = ["train", source, *setting_words(body, TrainRequest), "--out", os.fspath(out)]
    return _checked(Command(words, True, out))


def resume_command(run: RunEntry, body: Mapping[str, Any]) -> Command:
    """Return the command that continues a run, with changed settings."""
    words = ["resume", _folder_word(run.path), *setting_words(body, ResumeRequest)]
    command = Command(words, True, run.path)
    # Reading such settings could import what they name, which is left to the child and its rules of consent.
    return command if _names_code(run) else _checked(command)


def doctor_command(server: Server, run: RunEntry | None, body: Mapping[str, Any]) -> Command:
    """Return the command that checks a run, or a source with settings."""
    quick = ["--quick"] if body.get("quick") else []
    if run is not None:
        place, words = _folder_word(run.path), list[str]()
    else:
        place, words = _source(server, body), setting_words(body, TrainRequest)
    out = next_folder(place, "doctor")
    command = Command(["doctor", place, *words, *quick, "--out", os.fspath(out)], False, out)
    return command if run is not None and _names_code(run) else _checked(command)


def plan_command(server: Server, body: Mapping[str, Any]) -> Command:
    """Return the command that predicts memory, time and disk space of a run."""
    return _checked(Command(["plan", _source(server, body), *setting_words(body, TrainRequest)], False))


def setting_words(body: Mapping[str, Any], kind: type) -> list[str]:
    """Return the flags of the settings in a body, {dotted name: text}. RequestError for what the page may not give."""
    settings = body.get("settings") or {}
    if not isinstance(settings, Mapping) or len(settings) > _MOST_SETTINGS:
        raise RequestError(f"settings must be an object of at most {_MOST_SETTINGS} names and values")
    known = {each.setting: each for each in page_settings(kind)}
    words: list[str] = []
    for name, value in settings.items():
        if name not in known:
            raise RequestError(f"{str(name)[:60]} is not a setting that the page can give; use the command line")
        words += _words_of(known[name], value)
    return words


def page_settings(kind: type) -> list[Description]:
    """Return the settings of a request that the page may give: none that is a path, or sends data to others."""
    found = [each for each in describe(kind) if not each.positional and each.path[0] == "settings"]
    return [each for each in found if each.setting not in _NOT_FROM_PAGE and each.annotation is not Path]


def form_fields(command: str) -> list[dict[str, Any]]:
    """Return the fields of a form for `train` or `resume`: the common settings first."""
    kinds: dict[str, type] = {"train": TrainRequest, "resume": ResumeRequest}
    if command not in kinds:
        raise RequestError(f"there are forms for {', '.join(kinds)}")
    listed = [each for each in page_settings(kinds[command]) if command == "train" or each.changes_on_resume]
    usual = preset("default")
    return [_field(each, usual) for each in sorted(listed, key=lambda each: not each.rules.common)]


def _field(each: Description, usual: Config) -> dict[str, Any]:
    section, dot, _ = each.setting.rpartition(".")
    return {
        "name": each.setting,
        "flag": f"--{each.flags[0]}",
        "type": _type_name(each),
        "default": each.default(_Shown(usual)),
        "choices": list(each.choices) if each.setting != "data.labels" else list(LABELS),
        "help": each.text,
        "group": section if dot else "",
        "common": each.rules.common,
        "resume": each.rules.resume or "fixed",
        "at_least": each.rules.at_least,
        "at_most": each.rules.at_most,
    }


class _Shown(NamedTuple):
    """A request as `Description.default` reads it."""

    settings: Config


def _type_name(each: Description) -> str:
    if get_origin(each.annotation) is tuple:
        return "list"
    names = {bool: "switch", int: "integer", float: "number", str: "text"}
    return "choice" if each.choices else names.get(each.annotation, "text")


def _words_of(each: Description, value: object) -> list[str]:
    """Return the words of one flag. The value is attached to it, so that none can be taken for a flag."""
    if isinstance(value, bool):
        value = "true" if value else "false"
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    if len(text) > _LONGEST_VALUE or not text.isprintable() or isinstance(value, Mapping):
        raise RequestError(f"{each.setting} must be one line of at most {_LONGEST_VALUE:,} characters")
    if names_code(text):
        raise RequestError(f"{each.setting} = {text[:60]} names Python code; give it on the command line")
    if each.setting == "data.labels" and text not in LABELS:
        raise RequestError(f"data.labels must be {', '.join(LABELS)} here; give a table on the command line")
    flag = f"--{each.flags[0]}" if len(each.flags[0]) > 1 else f"-{each.flags[0]}"
    if each.annotation is bool:
        on, off = each.flags[0], each.flags[len(each.flags) // 2]
        if text not in ("true", "false", "on", "off"):
            raise RequestError(f"{each.setting} = {text[:60]} must be on or off")
        return [f"--{on if text in ('true', 'on') else off}"]
    if get_origin(each.annotation) is tuple and get_args(each.annotation):
        first, *rest = text.split() or [""]
        if any(word.startswith("-") and not word[1:2].isdigit() for word in rest):
            raise RequestError(f"{each.setting} = {text[:60]} must be a list of values")
        return [f"{flag}={first}", *rest]
    return [f"{flag}={text}"]


def _checked(command: Command) -> Command:
    """Return the command if the command line would accept it. RequestError, with its message, otherwise."""
    name, *words = command.words
    with _checking:
        read_request(name, words)
    return command


def _names_code(run: RunEntry) -> bool:
    """Return True if the settings of a run may name Python code."""
    texts = [value for value in read_settings(run.path).values() if isinstance(value, str)]
    return any(text in ("custom", "given") or names_code(text) for text in texts)


def _source(server: Server, body: Mapping[str, Any]) -> str:
    number = body.get("source")
    texts = SourceList(server).texts()
    if not isinstance(number, int) or number not in texts:
        raise RequestError("the source must be the number of one in the list")
    return _folder_word(texts[number])


def _folder_word(path: str | Path) -> str:
    """Return a path as a word that is not taken for a flag."""
    text = os.fspath(path)
    return f"./{text}" if text.startswith("-") else text


def run_commands(path: Path) -> dict[str, str]:
    """Return the commands of a run, to copy."""
    names = ("resume", "sample", "evaluate", "report", "watch", "doctor", "ema-sweep", "tune")
    return {name: without_secrets(shlex.join(["unfog", name, _folder_word(path)])) for name in names}
