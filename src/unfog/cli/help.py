"""The help texts of the commands: `--help`, one screen with what people change; `--help-all`, with all settings."""

from __future__ import annotations

import inspect
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING
from itertools import groupby
from typing import Any

from unfog.config.describe import Description, describe
from unfog.config.presets import SETTINGS_OF
from unfog.config.schema import Config
from unfog.config.task import AutoencoderTask, DiffusionTask, RunTask
from unfog.data.settings import TRAINING_ONLY
from unfog.text import manual

HELP_FLAGS = ("-h", "--help", "--help-all")
PAGES = {
    "train": "docs/guide.md",
    "resume": "docs/guide.md",
    "train-autoencoder": "docs/latent.md",
    "sample": "docs/sampling.md",
    "evaluate": "docs/evaluating.md",
    "ema-sweep": "docs/ema-and-optimisers.md",
    "tune": "docs/sampling.md",
    "export": "docs/export.md",
    "runs": "docs/guide.md",
    "serve": "docs/serve.md",
    "doctor": "docs/fix-it.md",
    "plan": "docs/guide.md",
    "find-lr": "docs/guide.md",
    "slurm": "docs/distributed.md",
}
"""Command -> page of the documentation that its help names."""
_COLUMN = 24
_WIDEST = 100


def format_help(command: str, kind: type, default: Any, *, every: bool = False) -> str:
    """Return the help text of a command: of all its settings, or of the common ones.

    Args:
        command: its name.
        kind: its request dataclass.
        default: a request with the defaults to show; None shows those of the fields.
        every: list all settings, with their full text and default.
    """
    listed = listed_settings(command, kind, default)
    words = [each for each in listed if each.positional]
    flags = [each for each in listed if not each.positional]
    shown = flags if every else [each for each in flags if each.path[0] != "settings" or _is_common(command, each)]
    every = every or len(shown) == len(flags)
    metavars = [each.metavar if each.field.default is MISSING else f"[{each.metavar}]" for each in words]
    lines = [" ".join(["usage: unfog", command, *metavars, *["[OPTIONS]"] * bool(flags)]), ""]
    lines += [*_paragraphs(kind), *[""] * bool(words)]
    for word in words:
        lines += _two_columns(word.metavar, word.text)
    if every:
        lines += _sections(command, kind, shown, default)
    else:
        lines += [""]
        # What belongs to the command alone stands before what belongs to the run.
        for each in sorted(shown, key=lambda each: each.path[0] == "settings"):
            text = _text_of(each, kind)
            text = first_sentence(text) if each.path[0] == "settings" else text
            lines += _two_columns(_spell(each, each.flags[:1]), text)
        more = f"--help-all lists {len(flags) - len(shown)} more; `unfog explain SETTING` says more about each"
        lines += ["", more + "."]
    if command in PAGES:
        lines += [*[""] * every, f"Its page: {manual(PAGES[command])}"]
    return "\n".join(lines).rstrip() + "\n"


def _is_common(command: str, each: Description) -> bool:
    """Return True for a setting that people change; on a resume, one that can change without --force."""
    return each.rules.common and (command != "resume" or each.rules.resume == "free")


def listed_settings(command: str, kind: type, default: Any = None) -> list[Description]:
    """Return the settings that mean something to a command, and the words without a flag.

    Without those that no resume can change, and those that a pack or the training of an autoencoder does not read.
    """
    settings, found = getattr(default, "settings", None), list(describe(kind))
    task: type[RunTask] = AutoencoderTask if command == "train-autoencoder" else DiffusionTask
    task = type(settings.task) if isinstance(settings, Config) else task
    read, unused = SETTINGS_OF[task]
    if command == "resume":
        if read is not None:
            known = {each.setting for each in describe(read)}
            found = [each for each in found if each.path[0] != "settings" or each.setting in known]
        found = [each for each in found if each.path[0] != "settings" or each.changes_on_resume]
    if command == "pack":
        found = [each for each in found if each.setting not in {f"data.{name}" for name in TRAINING_ONLY}]
    return [each for each in found if not each.setting.startswith(unused)]


def _paragraphs(kind: type) -> Iterator[str]:
    """Yield the lines of the docstring of a request. Indented lines, the examples, stay unchanged."""
    text = (inspect.getdoc(kind) or "").splitlines()
    for verbatim, group in groupby(text, lambda line: line[:1] in ("", " ")):
        lines = list(group)
        yield from lines if verbatim else _wrap(" ".join(lines))


def _sections(command: str, kind: type, settings: Iterable[Description], default: Any) -> Iterator[str]:
    """Yield the lines of all settings with their full texts: those of the command, then section by section."""
    sections: dict[tuple[str, ...], list[Description]] = {(): [], ("settings",): []}
    for each in settings:
        sections.setdefault(each.path[:-1], []).append(each)
    for section, members in sections.items():
        if members:
            yield from ["", f"{'.'.join(section[1:] or section) or 'options'}:"]
        for each in members:
            usual, text = each.default(default), _text_of(each, kind)
            # Only what a file or a preset may have switched on needs a flag that switches it off.
            settable = each.path[0] in ("settings", "data") or usual == "on"
            if each.metavar == "NAME":
                text += f" One of {', '.join(each.choices)}."
            if command == "resume" and each.path[0] == "settings" and each.rules.resume == "force":
                text += " Needs --force."
            if usual and "Default:" not in text and (settable or usual != "off"):
                text += f" (default: {usual})"
            yield f"  {_spell(each, [flag for flag in each.flags if settable or not flag.startswith('no-')])}"
            yield from _wrap(text, " " * 6)


def _text_of(setting: Description, kind: type) -> str:
    """Return the text of a setting, or what it means to this command."""
    meanings: Mapping[str, str] = getattr(kind, "meanings", {})
    return meanings.get(setting.setting, setting.text)


def _spell(setting: Description, names: Iterable[str]) -> str:
    """Return flags as typed, and the placeholder of the value."""
    flags = ", ".join(f"-{name}" if len(name) == 1 else f"--{name}" for name in names)
    return f"{flags} {setting.metavar}".rstrip()


def _two_columns(left: str, text: str) -> Iterator[str]:
    lines = _wrap(text, " " * _COLUMN) or [""]
    if len(left) + 3 > _COLUMN:
        yield f"  {left}"
    else:
        yield f"  {left:{_COLUMN - 2}}{lines.pop(0).lstrip()}"
    yield from lines


def _wrap(text: str, indent: str = "") -> list[str]:
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def first_sentence(text: str) -> str:
    """Return a text up to its first full stop."""
    first, stop, _ = text.partition(". ")
    return first + stop.strip()
