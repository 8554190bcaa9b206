"""People's own parts: a network, weighting, sampler step, optimiser or tracker that is not in this package.

Two ways lead to them. `register` adds a class or function from Python, under a name. A spec string such as
`custom:path=mymodule.MyNet,width=64` imports `mymodule` and calls `MyNet(..., width=64)`.

A file of settings may be somebody else's, so what it names is imported only with consent (`unfog.custom.consent`).
Every import is announced on stderr first.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar, TypeVar

from unfog.custom import consent
from unfog.errors import RequestError

T = TypeVar("T")

PREFIX = consent.PART

_CODE = re.compile(r"\b(?:custom|given|python)\s*:")

# Section ("network", "weighting", "sampler", ...) -> name -> default instance of a settings class, or a function.
REGISTERED: defaultdict[str, dict[str, Any]] = defaultdict(dict)

_open_literals: dict[Any, str] = {}


def register(section: str) -> Callable[[T], T]:
    """Return a decorator that adds a part to a section, for command line, TOML and Python.

    Sections are network, weighting, loss, path, schedule, target, ema and optimizer, whose parts are frozen dataclasses
    with defaults and a `kind`, and sampler, whose parts are functions (see `unfog.diffusion.steps.Step`).
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


@cache
def resolve_step(kind: str) -> Callable[..., Any]:
    """Return the sampler step that a registered name or `custom:path=MODULE.FUNCTION,name=value` stands for."""
    if kind in REGISTERED["sampler"]:
        step: Callable[..., Any] = REGISTERED["sampler"][kind]
        return step
    return resolve_path(kind, "a sampler step")


@cache
def resolve_path(spec: str, noun: str) -> Callable[..., Any]:
    """Return the function or class of `custom:path=MODULE.NAME,name=value`, and its keyword arguments."""
    path, *arguments = spec.removeprefix(PREFIX).split(",")
    return partial(import_object(path, noun), **_parse_keywords(arguments))


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
        """Import and return the class or function. Raise RequestError if it does not exist."""
        return import_object(self.path, self.noun)

    def keywords(self) -> dict[str, Any]:
        """Return the arguments as Python values. Raise RequestError if one is not a keyword argument."""
        return _parse_keywords(self.arguments)


def import_object(path: str, noun: str) -> Any:
    """Announce MODULE.NAME or MODULE:CLASS once per process, and import it, which runs the code of its module.

    RequestError if nobody has consented to code that a file names, or the path names nothing that can be imported.
    """
    example = PREFIX + ("torch.optim.RMSprop" if noun.endswith("optimiser") else "mymodule.Name")
    if noun == "the source":
        example = f"{consent.SOURCE}MODULE:CLASS"
    if (names := consent.split_path(path)) is None:
        raise RequestError(f"path = {path!r} must name a module and {noun} in it, as in {example}")
    code, name = consent.check(path, noun), names[1]
    if not consent.was_imported(path) and os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"  {noun.split()[-1]}: imports and runs {path}, as these settings ask for\n")
    try:
        found = getattr(code.load(), name)
    except Exception as error:  # anything may go wrong in other people's modules
        raise RequestError(f"path = {path!r} cannot be imported: {error}; give one like {example}") from error
    # Only now: a failed import is announced again when it is tried again.
    consent.note_import(path)
    return found


def _parse_keywords(arguments: list[str] | tuple[str, ...]) -> dict[str, Any]:
    """Return `alpha=0.9` as {"alpha": 0.9}. Raise RequestError if a value is not a literal of Python."""
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
