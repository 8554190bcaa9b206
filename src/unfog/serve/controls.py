"""Controls of the page: forms made of the settings, requests to a run that trains, and checked commands to start.

Words of a command are made from the fields of its request dataclass, each a list item of its own: no shell takes part.
The page sends names of settings and values, and numbers of runs and sources. It sends no path and no code: settings
that name either can be given on the command line only.
"""

from __future__ import annotations

import os
import re
import shlex
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin

from unfog.cli.read_request import read_request
from unfog.config.describe import Description, describe
from unfog.config.explain import words_for
from unfog.config.presets import preset
from unfog.config.requests.train import ResumeRequest, TrainRequest
from unfog.config.schema import Config
from unfog.custom import consent, names_code
from unfog.data.columns.image_setting import split_images
from unfog.data.settings import LABELS, parse_condition
from unfog.errors import RequestError
from unfog.process.heartbeat import Heartbeat, Request
from unfog.process.run_folder import RunFolder, next_folder
from unfog.serve.child_processes import command_text
from unfog.serve.run_files import read_source
from unfog.serve.runs import RunEntry, number_of
from unfog.serve.server import Server
from unfog.text import sanitize

_REQUESTS: dict[str, Request] = {"save": "SAVE", "preview": "PREVIEW", "stop": "STOP"}
_BUILT_IN = "fashion"
_RESUME = re.compile(r"unfog resume (?:'[^']*'|\S+)((?: --[\w.-]+(?: [\w.:=+-]+)?)*)")
_FLAG = re.compile(r"(--[\w.-]+)(?: ([\w.:=+][\w.:=+-]*))?")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,59}")
_checking = threading.Lock()  # checks of a request are written for one thread
# Settings that name files, or programs that send data to others.
_NOT_FROM_PAGE = (
    "autoencoder_folder",
    "init.folder",
    "evaluate.features",
    "log.sinks",
    "checkpoint.mirror",
    "text_encoder.pretrained",
)
_LONGEST_VALUE, _MOST_SETTINGS = 1000, 200


class Command(NamedTuple):
    """A command of unfog whose words were checked, and where it writes."""

    words: list[str]
    trains: bool
    result: Path | None = None
    """Folder that it writes to."""
    new_run: int | None = None
    """Number that the list of runs will give to the run that it begins."""

    @property
    def text(self) -> str:
        return command_text(self.words)


class SourceList:
    """Images that a run may be started on, by number: built in, of the command line, or of a listed run."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def texts(self) -> dict[int, str]:
        """Return SOURCE by number. Sources that are code, or could be taken for a flag, are left out."""
        found = [*self._server.given_sources, _BUILT_IN]  # the page selects the first
        named = {os.path.abspath(text) for text in found}  # as runs store a path
        for run in self._server.runs:
            source = read_source(run.path)
            # A run of a stranger may name code or a flag as its source, and the page must not be the way to run it.
            if source and source not in named and not names_code(source) and not source.startswith("-"):
                found.append(source)
        return {number_of(text): text for text in found}

    def as_json(self) -> list[dict[str, Any]]:
        return [{"id": number, "name": sanitize(text)} for number, text in self.texts().items()]


def send_request(run: RunEntry, what: object) -> dict[str, Any]:
    """Write the file that asks a running run to save, to draw a preview, or to stop. RequestError if none runs."""
    if not isinstance(what, str) or what not in _REQUESTS:
        raise RequestError(f"a run can be asked for {', '.join(_REQUESTS)}")
    beat = Heartbeat.read(run.path)
    if beat is None or not beat["alive"]:
        raise RequestError(f"{run.name} is not running, so it cannot read the request; resume it first")
    try:
        Heartbeat.request(run.path, _REQUESTS[what])
    except OSError as error:
        raise RequestError(f"the request cannot be written: {error.strerror}; make room or permit it") from None
    return {"command": shlex.join(["touch", os.fspath(run.path / _REQUESTS[what])])}


def train_command(server: Server, body: Mapping[str, Any]) -> Command:
    """Return the command of a new run on a source of the list."""
    source = _source(server, body)
    out = _named_folder(server.folder, body.get("name")) or next_folder(source, os.fspath(server.folder))
    # The folder is named here, so that the page knows which run in the list is its own.
    words = ["train", source, *setting_words(body, TrainRequest), "--out", os.fspath(out)]
    return _checked(Command(words, True, out, number_of(out.relative_to(server.folder).as_posix())))


def _named_folder(folder: Path, name: object) -> Path | None:
    """Return the new folder of a run that was given a name, None without one. A name is a word, and never a path."""
    if name in (None, ""):
        return None
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise RequestError(
            "the name of a run is up to 60 letters, digits and . _ + -, and begins with a letter or digit"
        )
    if os.path.lexists(folder / name):
        raise RequestError(f"there is a run named {name} already; give another name, or resume that one")
    return folder / name


def resume_command(run: RunEntry, body: Mapping[str, Any]) -> Command:
    """Return the command that continues a run, with changed settings or with those of a finding's remedy."""
    words = ["resume", _folder_word(run.path), *setting_words(body, ResumeRequest)]
    command = Command(words, True, run.path)
    return _checked_for_run(command, run)


def doctor_command(server: Server, run: RunEntry | None, body: Mapping[str, Any]) -> Command:
    """Return the command that checks a run, or a source with settings."""
    quick = ["--quick"] if body.get("quick") else []
    if run is not None:
        place, words = _folder_word(run.path), list[str]()
    else:
        place, words = _source(server, body), setting_words(body, TrainRequest)
    out = next_folder(place, "doctor")
    command = Command(["doctor", place, *words, *quick, "--out", os.fspath(out)], False, out)
    return _checked(command) if run is None else _checked_for_run(command, run)


def plan_command(server: Server, body: Mapping[str, Any]) -> Command:
    """Return the command that predicts memory, time and disk space of a run."""
    return _checked(Command(["plan", _source(server, body), *setting_words(body, TrainRequest)], False))


def _checked(command: Command) -> Command:
    """Return the command if the command line would accept it. RequestError, with its message, otherwise."""
    name, *words = command.words
    with _checking, consent.words_of_others():
        read_request(name, words)
    return command


def _checked_for_run(command: Command, run: RunEntry) -> Command:
    """Return the checked command on a run. RequestError if the run names code that nobody has consented to."""
    config = RunFolder(run.path).read_config()
    if not any(consent.code_paths(config)):
        return _checked(command)
    # Checking the words could import the code, which is left to the child.
    with consent.words_of_others():
        consent.check_all(config)
    return command


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


def remedy_settings(remedy: str) -> dict[str, str] | None:
    """Return the settings of the `unfog resume` in a remedy of the doctor; None without one.

    The file of findings may be a stranger's: only flags that the page may give are taken, and not the run it names.
    """
    found = _RESUME.search(remedy)
    if found is None:
        return None
    by_flag = {f"--{flag}": each.setting for each in page_settings(ResumeRequest) for flag in each.flags}
    settings: dict[str, str] = {}
    for flag, value in _FLAG.findall(found[1]):
        if flag not in by_flag:
            return None
        settings[by_flag[flag]] = value.rstrip(".") or ("off" if ".no-" in flag or flag.startswith("--no-") else "on")
    return settings


def run_commands(path: Path) -> dict[str, str]:
    """Return the commands of a run, to copy."""
    names = ("resume", "sample", "evaluate", "report", "watch", "doctor", "ema-sweep", "tune")
    commands = {name: command_text([name, _folder_word(path)]) for name in names}
    requests = {what: shlex.join(["touch", os.fspath(path / file)]) for what, file in _REQUESTS.items()}
    return commands | requests


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
    fields = [_field(each, usual, command) for each in listed]
    return sorted(fields, key=lambda field: not field["common"])


def _field(each: Description, usual: Config, command: str) -> dict[str, Any]:
    section, dot, _ = each.setting.rpartition(".")
    return {
        "name": each.setting,
        "flag": f"--{each.flags[0]}",
        "type": _type_name(each),
        "default": each.default(_Shown(usual)),
        "choices": list(each.choices) if each.setting != "data.labels" else list(LABELS),
        "help": each.text,
        "words": words_for(each.setting),
        "group": section if dot else "",
        # Of a resume, only what people may change freely: the rest needs --force, and a reason.
        "common": each.rules.common and (command == "train" or each.rules.resume == "free"),
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
    if each.setting == "data.condition" and (split_images(text)[0].second or parse_condition(text)[0]):
        # A table, or images of a second source: the page would read what a visitor names.
        raise RequestError(
            f"data.condition = {text[:60]} names files; here it is columns of the source, degrade, grey or hole; give "
            "it on the command line"
        )
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
