"""Strict TOML for frozen dataclasses: an unknown key or a value of the wrong type is refused by its full name."""

from __future__ import annotations

import json
import tomllib
import types
import typing
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from unfog.config.kinds import named, parse, suggest, words_of
from unfog.errors import RequestError

T = TypeVar("T")


def to_toml(settings: Any) -> str:
    """All fields of a dataclass tree. A field that is None is left out: that is its default."""
    return "\n".join(_tables(settings, "")).strip() + "\n"


def _tables(settings: Any, name: str) -> list[str]:
    lines = [f"\n[{name}]"] if name else []
    if hasattr(type(settings), "kind") and "kind" not in [f.name for f in fields(settings)]:
        lines.append(f'kind = "{settings.kind}"')
    values = {f.name: getattr(settings, f.name) for f in fields(settings)}
    lines += [f"{k} = {_literal(v)}" for k, v in values.items() if v is not None and not is_dataclass(v)]
    for key, value in values.items():
        if is_dataclass(value):
            lines += _tables(value, f"{name}.{key}" if name else key)
    return lines


def _literal(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON strings are TOML strings
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return repr(value)


def from_toml(text: str, base: T) -> T:
    """`base` with the fields that a TOML text gives. RequestError names a wrong key or value."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RequestError(f"not valid TOML: {error}") from None
    return update(base, table, "")


def read_toml(path: Path, base: T) -> T:
    """`from_toml` of a file, whose name is put before what is wrong."""
    try:
        return from_toml(path.read_text(encoding="utf-8-sig"), base)  # some editors begin with a byte order mark
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise RequestError(f"{path} is not a text file in UTF-8") from None
    except RequestError as error:
        raise RequestError(f"{path}: {error}") from None


def update(base: T, table: dict[str, Any], where: str) -> T:
    """`base` with the changes of a nested dict; `where` is its dotted name."""
    hints = typing.get_type_hints(type(base))
    known = [f.name for f in fields(base)]  # type: ignore[arg-type]
    changes = {}
    for key, value in table.items():
        name = f"{where}.{key}" if where else key
        if key not in known:
            raise RequestError(f"unknown setting {name}{suggest(key, known)}")
        changes[key] = _convert(hints[key], getattr(base, key), value, name)
    return replace(base, **changes)  # type: ignore[type-var]


def _convert(annotation: Any, old: Any, value: Any, name: str) -> Any:
    words = words_of(annotation)
    if words is not None:
        if type(value) in {type(part) for part in words.values()}:  # from Python, an instance will do
            return value
        if isinstance(value, str):
            return parse(words, value)
        if not isinstance(value, dict) or "kind" not in value:
            raise RequestError(f"{name} must be a table with a kind, one of {', '.join(sorted(words))}")
        try:
            part = named(words, str(value["kind"]))
        except RequestError as error:
            raise RequestError(f"{name}.kind: {error}") from None
        rest = {k: v for k, v in value.items() if k != "kind"}
        return update(part, rest, name) if part is not None else None
    if is_dataclass(old):
        if not isinstance(value, dict):
            raise RequestError(f"{name} must be a table, not {value!r}")
        return update(old, value, name)
    return _plain(annotation, value, name)


def _plain(annotation: Any, value: Any, name: str) -> Any:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is tuple and isinstance(value, list | tuple):
        if args[-1] is not Ellipsis and len(value) != len(args):
            raise RequestError(f"{name} = {value!r} must have {len(args)} values")
        return tuple(_plain(args[0], item, f"{name}[{i}]") for i, item in enumerate(value))
    if origin is typing.Literal and value in args:
        return value
    if origin in (typing.Union, types.UnionType):
        return next(_plain(arg, value, name) for arg in args if arg is not types.NoneType)
    if annotation is float and type(value) is int:
        return float(value)
    if origin is None and type(value) is annotation:
        return value
    wanted = " or ".join(map(repr, args)) if origin is typing.Literal else getattr(annotation, "__name__", annotation)
    raise RequestError(f"{name} = {value!r} is not a valid {wanted}")
