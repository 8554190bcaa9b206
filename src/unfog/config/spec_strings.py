"""Spec strings: `kind` or `kind:name=value,name=value`, which name a schedule, target, network and other parts.

Lists have slashes: `channels=32/64/96`. In TOML a part is a spec string or a table with a `kind`. Fields that are not
given have the kind's defaults.
"""

from __future__ import annotations

import types
import typing
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from unfog.config.values import FormatError, parse_value, sanitize, suggest
from unfog.custom import REGISTERED
from unfog.diffusion.noise import PATHS, SCHEDULES
from unfog.diffusion.target import TARGETS
from unfog.diffusion.weighting import WEIGHTINGS, CustomWeighting
from unfog.errors import RequestError
from unfog.models.network_settings import CustomNetwork
from unfog.models.settings import ARCHITECTURES, SIZES
from unfog.training.settings import EMA_SCHEDULES, OPTIMIZERS


def _registry(section: str, classes: tuple[Any, ...], **named: Any) -> tuple[tuple[type, ...], Mapping[str, Any]]:
    words = {**named, **{cls.kind: cls() for cls in classes}}
    return classes, ChainMap(words, REGISTERED[section])  # a view, so that a later `register` shows


# Each entry: the classes of a union, and the words that stand for one of them with its fields filled in.
REGISTRIES = (
    _registry("path", PATHS),
    _registry("schedule", SCHEDULES),
    _registry("target", TARGETS),
    _registry("weighting", (*WEIGHTINGS, CustomWeighting)),
    _registry("ema", EMA_SCHEDULES),
    _registry("optimizer", OPTIMIZERS),
    _registry("network", (*ARCHITECTURES, CustomNetwork), auto=None, **SIZES),
)


def registry_of(annotation: Any) -> Mapping[str, Any] | None:
    """Return word -> default part for a union of parts, or None for any other type."""
    members = set(typing.get_args(annotation)) or {annotation}
    members -= {types.NoneType}
    return next((words for classes, words in REGISTRIES if members and members <= set(classes)), None)


def lookup(words: Mapping[str, Any], word: object) -> Any:
    """Return the part of a word. Raise RequestError with a suggestion if there is none."""
    if not isinstance(word, str) or word not in words:
        raise RequestError(f"{sanitize(word)} is not known here{suggest(word, words)}")
    return words[word]


def parse_spec(words: Mapping[str, Any], text: str) -> Any:
    """Return the part of a spec string such as `min-snr:gamma=3`. Raise RequestError if it names none."""
    kind, _, assignments = text.partition(":")
    part = lookup(words, kind)
    known = [f.name for f in fields(part)] if part is not None else []
    changes: dict[str, Any] = {}
    for assignment in filter(None, assignments.split(",")):
        name, equals, value = assignment.partition("=")
        if name not in known and "arguments" in known and equals:  # of a custom part, for the class that it names
            changes["arguments"] = (*changes.get("arguments", part.arguments), assignment)
            continue
        if name not in known:
            hint = suggest(name, known) if known else ", nor any other"
            raise RequestError(f"{kind} has no setting {sanitize(name)}{hint}")
        if not equals:
            raise RequestError(f"{sanitize(assignment)} in {sanitize(text)} needs a value, as in {name}=1")
        if name in changes:
            raise RequestError(f"{name} is given twice in {sanitize(text)}; give it once")
        annotation = typing.get_type_hints(type(part))[name]
        items = value.split("/") if typing.get_origin(annotation) is tuple else [value]
        try:
            changes[name] = parse_value(annotation, items)
        except FormatError as error:
            raise RequestError(f"{kind}:{name} = {sanitize(value)} is {error}") from None
    return replace(part, **changes) if changes else part


def format_spec(part: Any) -> str:
    """Return the shortest spec string of a part."""
    if part is None:
        return "auto"
    # Against the kind's defaults, not those of a named size: `small` and `unet` with the same fields are one part.
    default = type(part)()
    changed = [
        f"{f.name}={_spell_value(getattr(part, f.name))}"
        for f in fields(part)
        if getattr(part, f.name) != getattr(default, f.name)
    ]
    return ":".join(filter(None, [part.kind, ",".join(changed)]))


def _spell_value(value: Any) -> str:
    if isinstance(value, tuple):
        return "/".join(map(_spell_value, value))
    return str(int(value)) if isinstance(value, bool) else str(value)
