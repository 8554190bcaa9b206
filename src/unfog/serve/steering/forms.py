"""Forms of the page: the fields for settings, and the flags that its answers become.

The page sends names of settings and values. It sends no path and no code: settings that name either can be given on the
command line only.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin

from unfog.config.describe import Description, describe
from unfog.config.presets import preset
from unfog.config.requests import ResumeRequest, TrainRequest
from unfog.config.schema import Config
from unfog.custom import names_code
from unfog.data.settings import LABELS
from unfog.errors import RequestError

# Settings that name files, or programs that send data to others.
_NOT_FROM_PAGE = ("autoencoder_folder", "init.folder", "evaluate.features", "log.sinks")
_LONGEST_VALUE, _MOST_SETTINGS = 1000, 200


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
