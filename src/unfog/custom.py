"""People's own parts: a network, weighting, sampler step, optimiser or tracker that is not in this package.

Two ways lead to them. `register` adds a class or function from Python, under a name. A spec string such as
`custom:path=mymodule.MyNet,width=64` imports `mymodule` and calls `MyNet(..., width=64)`.

A file of settings may be somebody else's, so what it names is imported only with consent: a person has named the same
part of the same file before, names it now, or lists it in UNFOG_TRUST. Every import is announced on stderr first.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from unfog.errors import RequestError
from unfog.safe_files import LARGEST_TEXT, open_file, read_file

T = TypeVar("T")

PREFIX = "custom:path="
_NAMED = re.compile(r"(?:custom:path=|python:)([\w.]+(?::\w+)?)")

_CODE = re.compile(r"\b(?:custom|given|python)\s*:")

# Section ("network", "weighting", "sampler", ...) -> name -> default instance of a settings class, or a function.
REGISTERED: defaultdict[str, dict[str, Any]] = defaultdict(dict)

_open_literals: dict[Any, str] = {}
_announced: set[str] = set()
_from_files: set[str] = set()
_consented: set[str] = set()


def register(section: str) -> Callable[[T], T]:
    """Return a decorator that adds a part to a section, for command line, TOML and Python.

    Sections are network, weighting, path, schedule, target, ema and optimizer, whose parts are frozen dataclasses with
    defaults and a `kind`, and sampler, whose parts are functions (see `unfog.diffusion.steps.Step`).
    """

    def add(part: Any) -> Any:
        name = getattr(part, "kind", "") or part.__name__.replace("_", "-")
        REGISTERED[section][name] = part() if isinstance(part, type) else part
        return part

    return add


def open_literal(annotation: Any, section: str) -> None:
    """Let a setting of this Literal type also take the registered names of a section, and `custom:path=...`."""
    _open_literals[annotation] = section


def is_own_choice(annotation: Any, value: object) -> bool:
    """Return True if an open Literal takes this text besides its members."""
    section = _open_literals.get(annotation)
    return section is not None and isinstance(value, str) and (value in REGISTERED[section] or value.startswith(PREFIX))


def names_code(text: str) -> bool:
    """Return True if a spec string or SOURCE may name Python code."""
    return _CODE.search(text) is not None


def give_consent(text: str) -> None:
    """Let the parts be imported that a person names in this text: words of a command, or settings from Python."""
    _consented.update(_NAMED.findall(text))


def require_consent(settings: Any) -> None:
    """Import what these settings, read from a file, name only with consent."""
    if isinstance(settings, CustomPart):
        _from_files.add(settings.path)
    # Samplers and sources are named by text, which holds no part of settings.
    if isinstance(settings, str):
        _from_files.update(_NAMED.findall(settings))
    elif isinstance(settings, tuple):
        for item in settings:
            require_consent(item)
    elif is_dataclass(settings):
        for field in fields(settings):
            require_consent(getattr(settings, field.name))


def check_consent(path: str, noun: str) -> None:
    """Raise RequestError if only a file of settings names this path, and nobody has consented to its import.

    Consent is stored, with the file of the module, so that a later command on the same run has it too.
    """
    line, stored = f"{path}\t{_module_file(path)}", _stored_consent()
    # Announced ones were imported already in this process, so that asking again protects nothing.
    trusted = path in os.environ.get("UNFOG_TRUST", "").split(",") or path in _consented | _announced
    if path in _from_files and not trusted and line not in stored.splitlines():
        raise RequestError(
            f"{noun} of these settings is Python code, {path}, which would run with your rights; if you trust it, set "
            f"UNFOG_TRUST={path}"
        )
    if line not in stored.splitlines():
        with suppress(OSError, RuntimeError):
            _consent_file().parent.mkdir(parents=True, exist_ok=True)
            # Appended in one write, as another process may store a consent at this moment. The file may be a link to
            # where a person keeps all settings, and an editor may have left its last line without an end.
            with open_file(_consent_file(), "ab", _consent_file().parent, follow=True, buffering=0) as file:
                file.write(b"\n" * (stored[-1:] not in "\n") + f"{line}\n".encode())


def _consent_file() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "unfog" / "trusted-code"


def _stored_consent() -> str:
    with suppress(OSError, RuntimeError, ValueError):
        return read_file(_consent_file(), _consent_file().parent, LARGEST_TEXT, follow=True).decode()
    return ""


def _module_file(path: str) -> str:
    """Return the file of the module or package that a path begins with, without running it."""
    name = re.split("[.:]", path)[0]
    if name in sys.modules:
        return str(getattr(sys.modules[name], "__file__", ""))
    with suppress(ImportError, ValueError, AttributeError):
        spec = importlib.util.find_spec(name)
        return str(spec.origin) if spec else ""
    return ""


@cache
def resolve_step(kind: str) -> Callable[..., Any]:
    """Return the sampler step that a registered name or `custom:path=MODULE.FUNCTION,name=value` stands for."""
    if kind in REGISTERED["sampler"]:
        step: Callable[..., Any] = REGISTERED["sampler"][kind]
        return step
    return resolve_path(kind, "a sampler step")


@cache
def resolve_path(spec: str, noun: str) -> Callable[..., Any]:
    """Return what `custom:path=MODULE.NAME,name=value` stands for: a function, or a class, with keyword arguments."""
    path, *arguments = spec.removeprefix(PREFIX).split(",")
    return partial(_import_object(path, noun), **_parse_keywords(arguments))


@dataclass(frozen=True)
class CustomPart:
    """Settings of a part that its dotted path names. Constructing this imports nothing; `load` does."""

    kind: ClassVar[str] = "custom"
    noun: ClassVar[str] = "a part"
    """The part in messages, with its article."""
    path: str = ""
    """A module that can be imported, a dot, and a class or function in it, such as mymodule.MyNet."""
    arguments: tuple[str, ...] = ()
    """Its keyword arguments, such as alpha=0.9/momentum=0.9; values as Python writes them."""

    def load(self) -> Any:
        """Import and return the class or function. Raise RequestError if there is none."""
        return _import_object(self.path, self.noun)

    def keywords(self) -> dict[str, Any]:
        """Return the arguments as Python values. Raise RequestError if one is no keyword argument."""
        return _parse_keywords(self.arguments)


def _import_object(path: str, noun: str) -> Any:
    """Announce a dotted path once per process, and import it, which runs the code of its module.

    RequestError if the path names nothing that can be imported.
    """
    module, _, name = path.rpartition(".")
    if not module:
        example = "torch.optim.RMSprop" if noun.endswith("optimiser") else "mymodule.Name"
        raise RequestError(f"path = {path!r} must name a module and {noun} in it, as in custom:path={example}")
    # The `unfog` script, unlike `python -m unfog`, leaves the current folder out. Last, so that it shadows nothing.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    check_consent(path, noun)
    if path not in _announced and os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"  {noun.split()[-1]}: imports and runs {path}, as these settings ask for\n")
    try:
        found = getattr(import_module(module), name)
    except Exception as error:  # anything may go wrong in other people's modules
        raise RequestError(f"path = {path!r} cannot be imported: {error}") from error
    # Only now: a failed import is announced again when it is tried again.
    _announced.add(path)
    return found


def _parse_keywords(arguments: list[str] | tuple[str, ...]) -> dict[str, Any]:
    """Return `alpha=0.9` as {"alpha": 0.9}. Raise RequestError if a value is no literal of Python."""
    keywords: dict[str, Any] = {}
    for text in arguments:
        name, equals, value = text.partition("=")
        try:
            if not (equals and name.isidentifier()):
                raise ValueError
            keywords[name] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):
            raise RequestError(f"{text!r} is not a keyword argument; write it as alpha=0.9 or name='text'") from None
    return keywords
