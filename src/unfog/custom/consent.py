"""Consent to code that settings name: given in this process, by UNFOG_TRUST, or stored with the file and its SHA-256.

A file of settings may be somebody else's, so a part or source that it names is imported only with consent. A person
gives it by the value of a flag or keyword that names the part, and by a SOURCE that begins with `python:`. No other
text gives consent: names of runs, folders and files may be somebody else's too. It is stored for one content of one
file, so that a file that changes, or another file of that name, is asked about again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from unfog.custom.module_code import ModuleCode
from unfog.errors import RequestError
from unfog.files.safe_files import open_file, read_file
from unfog.text import sanitize

PART = "custom:path="
"""Beginning of a spec string that names code: custom:path=MODULE.NAME,argument=value."""
SOURCE = "python:"
"""Beginning of a SOURCE that names code: python:MODULE:CLASS, or python:MODULE:CLASS:ARGUMENT."""
TRUST = "UNFOG_TRUST"
STARTED_BY = "UNFOG_STARTED_BY"
"""Environment variable of commands that the page starts. Their words are not a person's, and give no consent."""

_LARGEST = 2**24  # bytes of the file of consents
_from_files: set[str] = set()
_given: set[str] = set()
_imported: set[str] = set()
_words_of_others: ContextVar[bool] = ContextVar("words_of_others", default=False)


def part_path(text: object) -> str:
    """Return MODULE.NAME of a spec string `custom:path=MODULE.NAME,…`; "" for everything else."""
    return text.removeprefix(PART).partition(",")[0] if isinstance(text, str) and text.startswith(PART) else ""


def source_path(text: object) -> str:
    """Return MODULE:CLASS of a SOURCE `python:MODULE:CLASS:…`; "" for everything else."""
    if not isinstance(text, str) or not text.startswith(SOURCE):
        return ""
    return ":".join(text.removeprefix(SOURCE).split(":")[:2])


def give(path: str) -> None:
    """Consent to the import of a path in this process: MODULE.NAME of a part, or MODULE:CLASS of a source.

    Call it only with the value of a flag or keyword that names code. Without effect for words of the page.
    """
    if split_path(path) and STARTED_BY not in os.environ and not _words_of_others.get():
        _given.add(path)


def give_to_source(text: object) -> None:
    """Consent to a SOURCE that a person names, if it begins with `python:`."""
    # A folder of that name may be a stranger's: `locate` refuses it.
    if (path := source_path(text)) and not os.path.lexists(str(text)):
        give(path)


@contextmanager
def words_of_others() -> Iterator[None]:
    """Return a context in which nothing gives consent, for checks of requests that a page sends."""
    token = _words_of_others.set(True)
    try:
        yield
    finally:
        _words_of_others.reset(token)


def require(settings: Any) -> None:
    """Import what these settings, read from a file, name only with consent."""
    _from_files.update(code_paths(settings))


def code_paths(settings: Any) -> Iterator[str]:
    """Yield every path that a tree of settings names: of parts, samplers, trackers and sources."""
    if isinstance(settings, str):
        yield from filter(None, (part_path(settings), source_path(settings)))
    elif isinstance(settings, tuple | list):
        for item in settings:
            yield from code_paths(item)
    elif isinstance(settings, Mapping):
        yield from code_paths(list(settings.values()))
    elif is_dataclass(settings):
        if getattr(settings, "kind", "") == "custom":
            yield str(getattr(settings, "path", ""))
        for field in fields(settings):
            yield from code_paths(getattr(settings, field.name))


def is_from_file(path: str) -> bool:
    """Return True if a file of settings has named this path."""
    return path in _from_files


def given_paths() -> list[str]:
    """Return the paths that were consented to in this process, or imported by it: worker ranks may import them too."""
    return sorted(_given | _imported)


def split_path(path: str) -> tuple[str, str] | None:
    """Return module and name of MODULE.NAME or MODULE:CLASS; None if these are not names of Python."""
    module, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    return (module, name) if all(part.isidentifier() for part in (*module.split("."), name)) else None


def check(path: str, noun: str) -> ModuleCode:
    """Return the code that a path names. Raise RequestError if a file names it, and nobody has consented to it.

    Consent that a person gave is stored with the file of the module, so that a later command on the same run has it.
    """
    code = ModuleCode.find((split_path(path) or ("", ""))[0])
    line, stored = f"{path}\t{code.file}\t{code.digest}", _stored()
    given = path in os.environ.get(TRUST, "").split(",") or path in _given
    known = bool(code.digest) and line in stored.split("\n")
    # What was imported already is not asked about again, which would protect nothing.
    if not (given or known or path in _imported) and (path in _from_files or STARTED_BY in os.environ):
        raise RequestError(_refusal(path, noun, code, stored))
    # A file whose name holds a line break could make a line of its own.
    if given and code.digest and not known and line.replace("\t", "").isprintable():
        _store(line, stored)
    return code


def check_all(settings: Any) -> None:
    """Raise RequestError, as `check` does, for the first path of these settings without consent. Imports nothing."""
    for path in code_paths(settings):
        check(path, "a part")


def was_imported(path: str) -> bool:
    """Return True if this process has imported the path."""
    return path in _imported


def note_import(path: str) -> None:
    """Note that this process has imported the path."""
    _imported.add(path)


def _refusal(path: str, noun: str, code: ModuleCode, stored: str) -> str:
    where = f" in {sanitize(code.file)}" if code.file else ""
    lines = [line.split("\t") for line in stored.split("\n")]
    changed = any(len(line) == 3 and line[:2] == [path, code.file] for line in lines)
    news = ", and has changed since you trusted it" if changed else ""
    by_page = STARTED_BY in os.environ or _words_of_others.get()
    once = " and run the command once in a terminal" if by_page else ""
    return (
        f"{noun} of these settings is Python code, {path}{where}, which would run with your rights{news}; if you trust "
        f"it, set {TRUST}={path}{once}"
    )


def _file() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "unfog" / "trusted-code"


def _stored() -> str:
    with suppress(OSError, RuntimeError, ValueError):
        return read_file(_file(), _file().parent, _LARGEST, follow=True).decode()
    return ""


def _store(line: str, stored: str) -> None:
    with suppress(OSError, RuntimeError):
        _file().parent.mkdir(parents=True, exist_ok=True)
        # Appended in one write, as another process may store a consent at this moment. The file may be a link to
        # where a person keeps all settings, and an editor may have left its last line without an end.
        with open_file(_file(), "ab", _file().parent, follow=True, buffering=0) as file:
            file.write(b"\n" * (stored[-1:] not in ("", "\n")) + f"{line}\n".encode())
